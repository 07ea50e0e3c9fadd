"""Sites that lie about what they have learnt, and know what all the others have."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from flwr.app import ArrayRecord, RecordDict

from fedstale.flower import model_of, record_of
from fedstale.strategies import Stage
from fedstale.strategies.types import Array, Job, Model


class Known(NamedTuple):
    """What a liar knows when it answers; rows of `before` and `after` are the honest sites."""

    own: Array
    """What it has learnt, shape (p,)."""
    base: Array
    """What it started from."""
    before: Array
    """What honest sites started from, shape (n, p)."""
    after: Array
    """What they have sent last."""
    rng: np.random.Generator


ATTACKS: dict[str, Callable[[Known], Array]] = {
    # Five times the opposite of what it has learnt.
    "sign flip": lambda known: known.base - 5.0 * (known.own - known.base),
    "random": lambda known: known.rng.standard_normal(known.own.size),
    # A little is enough: Baruch, Baruch, Goldberg, NeurIPS 2019; 1.5 deviations from the mean.
    "ALIE": lambda known: known.after.mean(0) - 1.5 * known.after.std(0),
    # Inner product manipulation: Xie, Koyejo, Gupta, UAI 2019.
    "IPM": lambda known: known.base - 2.0 * (known.after - known.before).mean(0),
}
"""What a liar sends, as in `robustness/attacks.py`, but models in the place of updates."""


class Liars(Stage):
    """Puts lies in the place of some nodes' models, before anything else sees them.

    What a site starts from is what it is sent; behind a relay, the mean of what the honest sites
    have sent last.

    Args:
        nodes: that lie.
        attack: of `ATTACKS`.
        of_peers: whether a relay comes behind.
        seed: of random lies.
    """

    def __init__(self, nodes: Sequence[int], attack: str, *, of_peers: bool, seed: int) -> None:
        self.nodes, self.attack, self.of_peers = tuple(nodes), attack, of_peers
        self._rng = np.random.default_rng((seed, 7))
        self._bases: dict[int, Array] = {}
        self._honest: dict[int, tuple[Array, Array]] = {}
        self._shapes: Model = {}

    def outgoing(self, job: Job, content: RecordDict) -> RecordDict:
        """Note what a node starts from."""
        if job.purpose == "train":
            base = self._flat(content.array_records["arrays"])
            if self.of_peers and self._honest:
                base = np.mean([after for _, after in self._honest.values()], axis=0)
            elif self.of_peers:
                # Versions of a relay's server are sent to nobody.
                base = self._bases.get(-1, base)
                self._bases[-1] = base
            self._bases[job.node_id] = base
        return content

    def incoming(self, job: Job, content: RecordDict) -> None:
        """Note what an honest node has learnt, or lie."""
        if job.purpose != "train":
            return
        own, base = self._flat(content.array_records["arrays"]), self._bases[job.node_id]
        if job.node_id not in self.nodes:
            self._honest[job.node_id] = base, own
        elif self._honest:
            before, after = map(np.array, zip(*self._honest.values(), strict=True))
            lie = ATTACKS[self.attack](Known(own, base, before, after, self._rng))
            content["arrays"] = self._record(lie)

    def _flat(self, record: ArrayRecord) -> Array:
        self._shapes = model_of(record)
        return np.concatenate([x.ravel() for x in self._shapes.values()]).astype(np.float64)

    def _record(self, flat: Array) -> ArrayRecord:
        ends = np.cumsum([x.size for x in self._shapes.values()])[:-1]
        parts = zip(self._shapes.items(), np.split(flat, ends), strict=True)
        return record_of({k: part.reshape(x.shape).astype(x.dtype) for (k, x), part in parts})
