"""One merge in the making whose updates are kept until it closes, and then combined robustly.

It stands where `Merge` stands: `add` as replies come, `finish` once. Its memory is the merge size
times the model. Weightings act before it, on each update, so every weighting and schedule composes
with every rule.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from statistics import median
from typing import Any

import numpy as np

from fedstale.strategies.arrays import Array, Model, add_scaled, scale, zeros_like
from fedstale.strategies.robust.base import Median, Rule, aggregate, heaviest
from fedstale.strategies.server.merge import Merge, Merged
from fedstale.strategies.settings import require
from fedstale.strategies.weighting.base import Weighting

WEIGHT_CAP = 1.5


@dataclass(slots=True)
class _Kept:
    """What one node contributes: one update, or the mean of several."""

    delta: Model
    counts: Model
    weights: list[float]
    metrics: dict[str, float]


@dataclass(slots=True)
class RobustMerge(Merge):
    """Keeps the updates of one merge.

    What a rule stands is f nodes: several updates of one node are averaged first, by their weights,
    and count as one. The rule's weights are equal for "buffer_size", the examples for "examples",
    and the staleness weights for "weights", which then multiply no update. All are capped at
    `weight_cap` times their median, and further where f nodes could still hold half of the weight.

    Integer arrays take the median of each coordinate, and metrics the median over nodes. Weightings
    that see a whole merge compare with the median of the fresh updates instead of their mean.
    """

    rule: Rule = field(kw_only=True)
    weight_cap: float = field(default=WEIGHT_CAP, kw_only=True)
    """>= 1, times the median weight of the merge."""
    _kept: dict[int, _Kept] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(
            self.weight_cap >= 1, "robust.weight_cap", self.weight_cap, "a number >= 1, such as 1.5"
        )

    def add(
        self,
        job: Merged,
        delta: Model,
        counts: Model,
        *,
        examples: float,
        metrics: Mapping[str, float],
    ) -> None:
        """Keep a weighted update; arguments as in `Merge.add`. It takes the arrays over."""
        self.jobs.append(job)
        weight = 1.0
        if self.normalise == "examples":
            weight = examples
        elif self.normalise == "weights":
            weight = job.weight
            if weight <= 0.0:
                return
            scale(delta, 1.0 / weight)
        own = {key: value for key, value in metrics.items() if isfinite(value)}
        known = self._kept.get(job.node_id)
        if known is None:
            self._kept[job.node_id] = _Kept(delta, counts, [weight], own)
            return
        share = weight / (sum(known.weights) + weight)
        for both, new in ((known.delta, delta), (known.counts, counts)):
            scale(both, 1.0 - share)
            add_scaled(both, new, share)
        known.weights.append(weight)
        known.metrics |= own

    def settle(self, weighting: Weighting) -> None:
        """Weigh and add what waits for the whole merge, as `Merge.settle` does."""
        fresh = [one.delta for one in self._kept.values()]
        # `Merge.settle` compares with its sum, which is empty here otherwise.
        self._sum = aggregate(Median(f=0), fresh) if fresh else zeros_like(self.like.floats)
        Merge.settle(self, weighting)
        self._sum = {}

    @property
    def n_nodes(self) -> int:
        """Nodes that contribute."""
        return len(self._kept)

    def finish(self) -> tuple[Model, dict[str, Array]]:
        """Return the merged update of float arrays and of integer arrays; call it once.

        A merge in which every weight is 0 does not move the model.

        Raises:
            ProtocolError: there are too few nodes for the rule; says how many it needs.
        """
        kept = list(self._kept.values())
        if not kept:
            return zeros_like(self.like.floats), zeros_like(self.like.counts, np.float64)
        weights = np.array([sum(one.weights) / len(one.weights) for one in kept])
        merged = aggregate(
            self.rule, [one.delta for one in kept], capped(weights, self.rule.f, self.weight_cap)
        )
        counts = {
            name: np.median(np.stack([one.counts[name] for one in kept]), axis=0)
            for name in self.like.counts
        }
        return merged, {name: np.asarray(x) for name, x in counts.items()}

    def metrics(self) -> dict[str, float]:
        """Return the median of each metric over the nodes that sent it."""
        found: dict[str, list[float]] = {}
        for one in self._kept.values():
            for key, value in one.metrics.items():
                found.setdefault(key, []).append(value)
        return {key: float(median(values)) for key, values in found.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what `Merge.state_dict` does, and the updates that were kept."""
        kept = [
            {
                "node_id": node_id,
                "delta": dict(one.delta),
                "counts": dict(one.counts),
                "weights": list(one.weights),
                "metrics": dict(one.metrics),
            }
            for node_id, one in self._kept.items()
        ]
        return Merge.state_dict(self) | {"kept": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, on the same current version."""
        Merge.load_state_dict(self, state)
        self._kept = {
            one["node_id"]: _Kept(one["delta"], one["counts"], one["weights"], one["metrics"])
            for one in state["kept"]
        }


def capped(weights: Array, f: int, cap: float) -> Array:
    """Return weights of at most `cap` times their median that no f updates dominate.

    The cap falls further until the f largest hold no more than a share (n - 1) / 2n, which is what
    they hold of equal weights in the worst case of n = 2f + 1.

    Args:
        weights: > 0; shape (n,).
        f: adversarial updates.
        cap: >= 1.

    Example:
        >>> capped(np.array([1.0, 1.0, 1.0, 1.0, 1e9]), f=1, cap=1.5)
        array([1. , 1. , 1. , 1. , 1.5])
    """
    n, top = len(weights), cap * float(np.median(weights))
    lowest = float(weights.min())
    while True:
        now = np.minimum(weights, top)
        fits = 2.0 * n * heaviest(now, min(f, n)) <= (n - 1) * float(now.sum()) * (1.0 + 1e-12)
        if fits or top <= lowest:
            return now
        top = max(0.9 * top, lowest)
