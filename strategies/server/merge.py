"""One merge in the making: updates are added as they come, and none of them is kept.

The exception are weightings that must see a whole merge before they can weigh a late update; for
them the late updates of the merge, and nothing else, wait until it closes.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import isfinite, nan
from typing import Any, Literal

import numpy as np

from fedstale.strategies.arrays import Array, Model, add_scaled, copy_of, scale, zeros_like
from fedstale.strategies.server.versions import Snapshot
from fedstale.strategies.weighting.base import Update, Weighting

Normalise = Literal["examples", "buffer_size", "weights"]


@dataclass(frozen=True, slots=True)
class Merged:
    """A reply that went into a merge."""

    message_id: str
    node_id: int
    base_version: int
    weight: float = nan
    """NaN until it is known."""


@dataclass(frozen=True, slots=True)
class _Held:
    job: Merged
    update: Update
    counts: Model
    examples: float
    metrics: Mapping[str, float]


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
    staleness: int = 0
    """Of the stalest update in it, >= 0."""
    _held: list[_Held] = field(default_factory=list)
    _sum: Model = field(default_factory=dict)
    _counts: Model = field(default_factory=dict)
    _metrics: dict[str, list[float]] = field(default_factory=dict)

    def take(
        self,
        job: Merged,
        update: Update,
        counts: Model,
        *,
        weighting: Weighting,
        examples: float,
        metrics: Mapping[str, float],
    ) -> None:
        """Weigh an update and add it, or keep it until `settle` if it is to be weighed with others.

        Args:
            job: the reply.
            update: its update, not yet scaled.
            counts: change of the integer arrays, in float64.
            weighting: how much it counts.
            examples: number of examples behind the update.
            metrics: what the device measured.
        """
        self.staleness = max(self.staleness, update.staleness)
        if update.staleness and weighting.together:
            self.jobs.append(job)
            self._held.append(_Held(job, update, counts, examples, metrics))
            return
        weighed = Merged(job.message_id, job.node_id, job.base_version, weighting.weigh(update))
        self.add(weighed, update.delta, counts, examples=examples, metrics=metrics)

    def settle(self, weighting: Weighting) -> None:
        """Weigh and add what was kept; call it once, before `finish`."""
        held, self._held = self._held, []
        if not held:
            return
        waiting = {late.job.message_id for late in held}
        self.jobs = [job for job in self.jobs if job.message_id not in waiting]
        weights = weighting.weigh_stale([late.update for late in held], self._mean())
        for late, weight in zip(held, weights, strict=True):
            self.add(
                replace(late.job, weight=weight),
                late.update.delta,
                late.counts,
                examples=late.examples,
                metrics=late.metrics,
            )

    def _mean(self) -> Model:
        """Return the mean of what was added so far; empty if nothing was."""
        mean = copy_of(self._sum)
        if self.mass > 0.0:
            scale(mean, 1.0 / self.mass)
        return mean

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

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, and the updates that wait."""
        return {
            "jobs": [asdict(job) for job in self.jobs],
            "mass": self.mass,
            "count_mass": self.count_mass,
            "staleness": self.staleness,
            "held": [
                {
                    "job": asdict(late.job),
                    "delta": dict(late.update.delta),
                    "base": dict(late.update.base),
                    "staleness": late.update.staleness,
                    "counts": dict(late.counts),
                    "examples": late.examples,
                    "metrics": dict(late.metrics),
                }
                for late in self._held
            ],
            "sum": dict(self._sum),
            "counts": dict(self._counts),
            "metrics": self._metrics,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, on the same current version."""
        self.jobs = [Merged(**job) for job in state["jobs"]]
        self.mass, self.count_mass = state["mass"], state["count_mass"]
        self.staleness = state["staleness"]
        self._held = [
            _Held(
                Merged(**late["job"]),
                Update(
                    delta=late["delta"],
                    base=late["base"],
                    current=self.like.floats,
                    staleness=late["staleness"],
                    node_id=late["job"]["node_id"],
                ),
                late["counts"],
                late["examples"],
                late["metrics"],
            )
            for late in state["held"]
        ]
        self._sum, self._counts = state["sum"], state["counts"]
        self._metrics = state["metrics"]
