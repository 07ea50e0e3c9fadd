"""AdaSync: FedBuff from two updates a step, and more as the loss falls.

Reference:
    Dutta, Wang, Joshi. Slow and Stale Gradients Can Win the Race. IEEE JSAIT 2021.
"""

from typing import Any

from fedstale.strategies import FedBuff
from fedstale.strategies.pace import AdaSync

RATES = (0.5, 1.0, 2.0, 4.0)


def strategy(scenario: Any, rate: float) -> FedBuff:
    """Return FedBuff with the pace of AdaSync."""
    return FedBuff(scenario.concurrency, 2, eta=rate, pace=AdaSync(), seed=scenario.seed)
