"""ACE: at each reply, a step by the mean of every client's last update.

With u_j the last update of client j, the m clients heard so far, and eta the server's rate,

    theta <- theta + (eta / m) sum over j of u_j.

A fast client replaces its own update more often, and counts no more than a slow one.
`CachedUpdates` of beta = 1 is not this: it moves a reply's whole update u_i to u_i - h_i + H,
where h_i is what was cached of its client and H the mean of all, so that the difference of one
client counts in full; here it counts 1 / m, H + (u_i - h_i) / m. One is to the other as SAGA is
to SAG.

Differences from the paper:
    Updates are those of whole local trainings, not single gradients.
    The mean is over the clients that were heard. What the paper takes for the others before their
    first reply is not known here; a third party's code offers to ask all of them first.

Checked: a buffer of one, no weight by age and all clients alike, in a third party's implementation
and in the abstract.
Not checked: the paper's text.

Reference:
    Chang, Yao, Krishnamurthy, Shelton, Chakraborty, Swami, Oymak, Roy-Chowdhury. Mitigating
    Participation Imbalance Bias in Asynchronous Federated Learning. arXiv 2511.19066, 2025.
"""

from math import inf
from typing import Any

import numpy as np

from fedstale.strategies import FedBuff
from fedstale.strategies.types import (
    ClientUpdate,
    Model,
    add_scaled,
    copy_of,
    over_chunks,
    zeros_like,
)
from fedstale.strategies.weighting import Weighting

RATES = (0.025, 0.05, 0.2, 0.4, 0.8)


class LastOfEach(Weighting):
    """Puts the mean of every client's last update in the place of a reply's; a model a client."""

    saved = ("last", "_coming")

    def __init__(self, most_age: float = inf) -> None:
        """Set how many versions ago an update may have begun to count, >= 0."""
        self.most_age = most_age
        self.last: dict[int, tuple[int, Model]] = {}
        """By client, the version that its update was trained from, and the update."""
        self._coming: dict[int, tuple[int, Model]] = {}

    def weigh(self, update: ClientUpdate) -> float:
        """Write the mean with the update in the place of its client's; zeros if all are too old."""
        now = update.base_version + update.staleness
        self._coming = {update.node_id: (update.base_version, copy_of(update.delta))}
        known = (self.last | self._coming).values()
        fresh = [u for version, u in known if now - version <= self.most_age]
        mean = zeros_like(update.delta, np.float64)
        for each in fresh:
            add_scaled(mean, each, 1.0 / len(fresh))
        over_chunks(np.copyto, update.delta, mean)
        return 1.0

    def observe(self, before: Model, after: Model, rate: float) -> None:
        """Cache the update that made the step."""
        self.last |= self._coming
        self._coming = {}

    def discard(self) -> None:
        """Forget the update: it made no step."""
        self._coming = {}


def strategy(scenario: Any, rate: float) -> FedBuff:
    """Return ACE with one step a reply."""
    jobs, seed = scenario.concurrency, scenario.seed
    return FedBuff(jobs, 1, weighting=LastOfEach(), eta=rate, seed=seed)
