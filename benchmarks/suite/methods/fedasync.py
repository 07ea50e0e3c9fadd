"""FedAsync: each reply is mixed into the model as it comes.

The rate is the share of a fresh model in the mixture.

Reference:
    Xie, Koyejo, Gupta. Asynchronous Federated Optimization. 2019.
"""

from typing import Any

from fedstale.strategies import FedAsync

RATES = (0.3, 0.6, 0.9)


def strategy(scenario: Any, rate: float) -> FedAsync:
    """Return FedAsync as it is."""
    return FedAsync(scenario.concurrency, mix=rate, seed=scenario.seed)
