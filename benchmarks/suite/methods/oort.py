"""FedBuff, Oort: FedBuff that prefers devices with a large loss, and quick ones.

Reference:
    Lai et al. Oort: Efficient Federated Learning via Guided Participant Selection. OSDI 2021; with
    the constants of the authors' release.
"""

from typing import Any

from fedstale.strategies import FedBuff
from fedstale.strategies.selection import RELEASED, Oort

RATES = (0.5, 1.0, 2.0, 4.0)


def strategy(scenario: Any, rate: float) -> FedBuff:
    """Return FedBuff that picks by Oort."""
    jobs, size, seed = scenario.concurrency, scenario.buffer_size, scenario.seed
    return FedBuff(jobs, size, eta=rate, selector=Oort(RELEASED), seed=seed)
