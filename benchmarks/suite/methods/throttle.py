"""THROTTLE: repeated updates of one client count exponentially less within a round.

The server steps at each reply. In a round, the first update of a client counts 1 / n and its c-th
repetition 1 / q^c,

    theta <- theta + eta_t u,    eta_t = eta / n for c = 0, eta / q^c for c >= 1,

so that no client moves the model by more than eta (1 / n + 1 / (q - 1)) of its updates. A round
ends when n clients have been heard; what is in flight then is dropped, and all begin from the
same model. q = 1 is asynchronous SGD but for the first updates, q = inf is synchronous.

Differences from the paper:
    n is the number of jobs in flight: in the paper all clients are at work, here most devices are
    away, and a round that waits for all would not end.
    Flower cannot recall a message: what is in flight at the end of a round finishes, and counts 0.
    First updates are not clipped around an anchor, nor repetitions to a radius: those are for
    Byzantine clients, and a robust rule of fedstale's (`robust=`) is another thing.
    Updates are those of whole local trainings, not single gradients.

Checked: equation 2 and algorithm 1 in the paper's text; q = 1.1 was the better of its two there
(section 6.2).

Reference:
    Otsuka, Takezawa, Meyer, Koloskova, Yamada. Robustifying Asynchronous SGD via Soft Throttling.
    Preprint, 2026.
"""

from typing import Any

from fedstale.strategies import FedBuff
from fedstale.strategies.types import ClientUpdate, Model, scale
from fedstale.strategies.weighting import Weighting

RATES = (0.1, 0.3, 1.0, 3.0, 10.0)


class SoftThrottle(Weighting):
    """Weighs an update by how often its client has been heard in the round."""

    saved = ("heard", "begun_at", "_coming")

    def __init__(self, n: int, q: float = 1.1) -> None:
        """Set the clients of a round, >= 1, and what a repetition divides by, >= 1."""
        self.n, self.q = n, q
        self.heard: dict[int, int] = {}
        """By client, its updates of this round."""
        self.begun_at = 0
        """The version that the round began with."""
        self._coming: list[tuple[int, int]] = []

    def weigh(self, update: ClientUpdate) -> float:
        """Scale the update; one that began before the round counts nothing."""
        weight = 0.0
        if update.base_version >= self.begun_at:
            c = self.heard.get(update.node_id, 0)
            weight = self.q**-c if c else 1.0 / self.n
            self._coming = [(update.node_id, update.base_version + update.staleness)]
        scale(update.delta, weight)
        return weight

    def observe(self, before: Model, after: Model, rate: float) -> None:
        """Count the update that made the step, and end the round if it was the last."""
        for node, version in self._coming:
            self.heard[node] = self.heard.get(node, 0) + 1
            if len(self.heard) >= self.n:
                self.heard, self.begun_at = {}, version + 1
        self._coming = []

    def discard(self) -> None:
        """Forget the update: it made no step."""
        self._coming = []


def strategy(scenario: Any, rate: float) -> FedBuff:
    """Return THROTTLE with one step a reply."""
    jobs, seed = scenario.concurrency, scenario.seed
    return FedBuff(jobs, 1, weighting=SoftThrottle(jobs), eta=rate, seed=seed)
