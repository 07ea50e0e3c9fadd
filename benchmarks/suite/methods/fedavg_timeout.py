"""FedAvg with a time-out: rounds that go on without those who take long.

A round ends after a quarter of the time after which a scenario gives jobs up, or when all have
replied; what is in flight then is cancelled, and its device's time is lost.
"""

from typing import Any

from fedstale.strategies import FedAvg
from fedstale.strategies.schedule import semi_synchronous
from fedstale.strategies.server_optimizer import SGD

RATES = (1.0, 2.0, 4.0)


def strategy(scenario: Any, rate: float) -> FedAvg:
    """Return FedAvg with a deadline."""
    jobs, deadline_s = scenario.concurrency, scenario.timeout_s / 4
    return FedAvg(
        schedule=semi_synchronous(jobs, deadline_s, stragglers="cancel"),
        server_optimizer=SGD(rate),
        seed=scenario.seed,
    )
