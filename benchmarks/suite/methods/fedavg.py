"""FedAvg: rounds that wait for every reply.

Reference:
    McMahan et al. Communication-Efficient Learning of Deep Networks from Decentralized Data.
    AISTATS 2017.
"""

from typing import Any

from fedstale.strategies import FedAvg
from fedstale.strategies.server_optimizer import SGD

RATES = (1.0, 2.0, 4.0)


def strategy(scenario: Any, rate: float) -> FedAvg:
    """Return FedAvg, which gives a job up after the scenario's time-out alone."""
    return FedAvg(scenario.concurrency, server_optimizer=SGD(rate), seed=scenario.seed)
