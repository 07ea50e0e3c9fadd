"""One merge in the making: updates are added as they come, and none of them is kept."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

import numpy as np

from fedstale.strategies.arrays import Array, Model, add_scaled, scale, zeros_like
from fedstale.strategies.versions import Snapshot

Normalise = Literal["examples", "merge_size", "weights"]


@dataclass(frozen=True, slots=True)
class Merged:
    """A reply that went into a merge."""

    message_id: str
    node_id: int
    base_version: int
    weight: float


@dataclass(slots=True)
class Merge:
    """Running sums over the replies of one merge.

    The sum is divided by the merge size, by the number of examples behind it, or by the sum of
    weights. The last undoes a penalty that all updates of a merge share, and at merge size 1 it
    undoes every penalty.
    """

    like: Snapshot
    normalise: Normalise
    jobs: list[Merged] = field(default_factory=list)
    mass: float = 0.0
    count_mass: float = 0.0
    _sum: Model = field(default_factory=dict)
    _counts: Model = field(default_factory=dict)
    _metrics: dict[str, list[float]] = field(default_factory=dict)

    def add(
        self,
        job: Merged,
        delta: Model,
        counts: Model,
        *,
        examples: float,
        metrics: Mapping[str, float],
    ) -> None:
        """Add a weighted update.

        Args:
            job: the reply, with the mean weight that the delta was scaled by.
            delta: scaled update of the float arrays.
            counts: change of the integer arrays, never scaled, in float64.
            examples: number of examples behind the update.
            metrics: what the device measured; averaged by examples over those who sent it.
        """
        if not self._sum:
            self._sum = zeros_like(self.like.floats)
            self._counts = zeros_like(self.like.counts, np.float64)
        share = examples if self.normalise == "examples" else 1.0
        add_scaled(self._sum, delta, share)
        add_scaled(self._counts, counts, share)
        self.mass += job.weight if self.normalise == "weights" else share
        self.count_mass += share
        self.jobs.append(job)
        for key, value in metrics.items():
            if isfinite(value):
                total = self._metrics.setdefault(key, [0.0, 0.0])
                total[0] += examples * value
                total[1] += examples

    def finish(self) -> tuple[Model, dict[str, Array]]:
        """Return the merged update of float arrays and of integer arrays; call it once.

        A merge in which every weight is 0 does not move the model.
        """
        scale(self._sum, 1.0 / self.mass if self.mass > 0.0 else 0.0)
        scale(self._counts, 1.0 / self.count_mass)
        return self._sum, self._counts

    def metrics(self) -> dict[str, float]:
        """Return the devices' metrics, averaged by their examples."""
        return {key: total / n for key, (total, n) in self._metrics.items()}
