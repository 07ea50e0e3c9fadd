"""FedBuff: a step after every few updates, weighed by age.

Reference:
    Nguyen et al. Federated Learning with Buffered Asynchronous Aggregation. AISTATS 2022.
"""

from typing import Any

from fedstale.strategies import FedBuff

RATES = (0.5, 1.0, 2.0, 4.0)


def strategy(scenario: Any, rate: float) -> FedBuff:
    """Return FedBuff as it is."""
    return FedBuff(scenario.concurrency, scenario.buffer_size, eta=rate, seed=scenario.seed)
