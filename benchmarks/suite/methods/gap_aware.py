"""Gap-Aware: FedBuff's updates are divided by how far the model has moved.

Reference:
    Barkai, Hakimi, Schuster. Gap-Aware Mitigation of Gradient Staleness. ICLR 2020.
"""

from typing import Any

from fedstale.strategies import GapAware

RATES = (0.5, 1.0, 2.0, 4.0, 8.0)


def strategy(scenario: Any, rate: float) -> GapAware:
    """Return Gap-Aware as it is."""
    return GapAware(scenario.concurrency, scenario.buffer_size, eta=rate, seed=scenario.seed)
