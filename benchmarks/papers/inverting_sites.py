"""Sites that invert Kronecker factors for each other, as the workers of distributed K-FAC do.

The server merges factors and hands each site some layers with its next message; the reply brings
their inverses, and later messages take these to all sites. A layer whose site gives no answer goes
to another. An inverse is accepted if it is one at a vector that is drawn by the strategy's seed.

Reference:
    Osawa et al. Large-Scale Distributed Second-Order Optimization Using Kronecker-Factored
    Approximate Curvature for Deep Convolutional Neural Networks. CVPR 2019.
    Pauloski et al. Convolutional Neural Network Training with Distributed K-FAC. SC 2020.
"""

from collections.abc import Mapping

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict

from fedstale.contrib.kfac import SharedInverses
from fedstale.contrib.kfac.merge import INVERSES, RECORD, damped, inverses, layers_of, unpacked
from fedstale.flower import model_of, record_of
from fedstale.strategies.types import Array, Count, End, Job, Model, Positive, RejectionError

INVERT, HANDED = f"{RECORD}.invert", "SitesInvert.layers"
"""Names of the record of a message, and of the note of a job."""
CLOSE = 1e-3
"""By how much an inverse may miss a vector, as a share of it; float32 misses by far less."""


class SitesInvert(SharedInverses):
    """Has sites invert the layers that `SharedInverses` inverts itself.

    Args:
        damping: of the factors.
        every: versions from one measurement to the next.
        layers: that a site is handed at a time.
    """

    saved = (*SharedInverses.saved, "_damped", "_waiting", "_asked")

    def __init__(self, damping: Positive, *, every: Count = 5, layers: Count = 1) -> None:
        super().__init__(damping, every=every)
        self.layers = layers
        self._damped: dict[str, Model] = {}
        """Triangles of the newest factors of each layer."""
        self._waiting: list[str] = []
        self._asked: dict[str, Model] = {}
        """Layers that wait for a site, and those that sites have, with what these were handed."""

    def outgoing(self, job: Job, content: RecordDict) -> RecordDict:
        """Hand a site that trains its layers, beside what it is sent besides."""
        made = super().outgoing(job, content)
        if job.purpose == "train":
            mine, self._waiting = self._waiting[: self.layers], self._waiting[self.layers :]
            self._asked |= {layer: self._damped[layer] for layer in mine}
            job.notes[HANDED] = mine
            pairs = [self._asked[layer] for layer in mine]
            made[INVERT] = record_of({name: x for pair in pairs for name, x in pair.items()})
        return made

    def incoming(self, job: Job, content: RecordDict) -> None:
        """Take the inverses of the layers that a site was handed.

        Raises:
            RejectionError: they are none, or nobody asked for them.
        """
        found, mine = content.pop(INVERSES, None), job.notes.get(HANDED, [])
        super().incoming(job, content)
        names = set(found) if isinstance(found, ArrayRecord) else set()
        if names - {name for layer in mine for name in self._asked[layer]}:
            raise RejectionError(RECORD, "inverses that this site was not asked for")
        for layer in layers_of(names):
            seed = self._run.seed + job.job_id
            sent = self._asked[layer].items()
            self._take(layer, {name: checked(name, found, x, seed) for name, x in sent})
            del self._asked[layer]
            mine.remove(layer)

    def ended(self, job: Job, end: End) -> None:
        """Let layers that were not inverted wait for another site."""
        super().ended(job, end)
        for layer in job.notes.pop(HANDED, ()):
            del self._asked[layer]
            self._waiting.append(layer)

    def _merged(self, layer: str, factors: Mapping[str, Array]) -> None:
        whole = damped(factors, self.damping)
        self._damped[layer] = {name: triangle(x) for name, x in whole.items()}
        if layer not in self._waiting and layer not in self._asked:
            self._waiting.append(layer)


def inverted(message: Message) -> dict[str, ArrayRecord]:
    """Return the inverses of the layers that a site was handed, as its reply holds them."""
    handed = model_of(message.content.array_records[INVERT])
    layers = [
        {k: full(x) for k, x in handed.items() if layers_of([k])[0] == layer}
        for layer in layers_of(handed)
    ]
    return {INVERSES: record_of({name: x for pair in layers for name, x in inverses(pair).items()})}


def checked(name: str, found: ArrayRecord, sent: Array, seed: int) -> Array:
    """Return the triangle of the inverse of what was sent, or raise RejectionError."""
    matrix = full(sent)
    whole = unpacked(name, found.get(name), len(matrix))
    drawn = np.random.default_rng(seed).standard_normal(len(matrix))
    missed = np.linalg.norm(whole @ (matrix @ drawn) - drawn)
    if not missed <= CLOSE * np.linalg.norm(drawn):
        raise RejectionError(RECORD, f"{RECORD}[{name[:40]!r}] is no inverse of what was sent")
    return triangle(whole)


def triangle(x: Array) -> Array:
    """Return the upper triangle of a matrix, row by row, in float32."""
    return x[np.triu_indices(len(x))].astype(np.float32)


def full(half: Array) -> Array:
    """Return the matrix of an upper triangle, in float64."""
    n = int(((8 * half.size + 1) ** 0.5 - 1) / 2)
    made = np.zeros((n, n))
    made[np.triu_indices(n)] = half
    return np.triu(made, 1).T + made
