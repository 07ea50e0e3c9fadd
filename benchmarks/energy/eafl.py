"""EAFL: Oort that prefers devices whose battery a job would leave full.

Reference:
    Arouj, Abdelmoniem. Towards Energy-Aware Federated Learning on Battery-Powered Clients. 2022,
    arXiv 2208.04505.
"""

from collections.abc import Iterable

import numpy as np

from fedstale.contrib.energy import Power
from fedstale.strategies.selection import Oort
from fedstale.strategies.types import Array, Candidates
from fedstale.traces.arrays import stream

BATTERY_J = 15.2 * 3600.0
"""4,000 mAh at 3.8 V."""
LEAST, MOST = 0.2, 1.0
"""Between these levels batteries are drawn, as shares of a full one."""
_DRAWN = 104


class EAFL(Oort):
    """Draws nodes by f times Oort's utility plus 1 - f times what is left of their battery.

    What is left is the level at first, less what the node's jobs took and the next one will take,
    each the seconds of its last jobs at the power of a phone that trains. Until a node has answered
    its jobs count as nothing.

    No recording has levels of batteries: they are drawn, and fall by jobs alone. Nor does a node
    leave at 0, since recorded phones train on the charger. f is set here.
    """

    f = 0.25

    def __init__(self, nodes: Iterable[int]) -> None:
        """Draw the levels of nodes."""
        super().__init__()
        ids = sorted(nodes)
        levels = stream(0, _DRAWN).uniform(LEAST, MOST, len(ids))
        self.levels = dict(zip(ids, levels.tolist(), strict=True))
        self.job_w = Power.read()["phone"].training_w

    def utilities(self, known: Candidates) -> Array:
        """Return the rewards of nodes that have been tried; shape (n,)."""
        levels = np.array([self.levels[node] for node in known.node_ids.tolist()])
        used_s = (known.times_picked + 1) * np.nan_to_num(known.duration_s)
        left = levels - used_s * self.job_w / BATTERY_J
        return np.maximum(self.f * super().utilities(known) + (1.0 - self.f) * left, 0.0)
