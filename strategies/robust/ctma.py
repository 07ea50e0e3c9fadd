"""CTMA: averages the updates nearest to what another robust rule found.

Reference:
    Dahan, Levy. Weight for Robustness: A Comprehensive Approach towards Optimal Fault-Tolerant
    Asynchronous ML. NeurIPS 2024 (weighted centred trimmed meta aggregator).
"""

from dataclasses import dataclass, field

import numpy as np

from fedstale.strategies.robust.base import (
    BlockRule,
    GeometricMedian,
    Rule,
    Stack,
    heaviest,
    weighted_sum,
)
from fedstale.strategies.types import Array, require


@dataclass(frozen=True, slots=True, kw_only=True)
class CTMA(Rule):
    """Wraps a rule: the weighted mean of the nearest updates that hold a share 1 - lambda.

    lambda is the share of weight of the f heaviest updates, f / n where weights are equal. The last
    update counted may count in part, so that exactly that share is averaged.

    Differences from the paper: lambda follows from f. Its coefficient of robustness was not checked
    against the paper.

    Example:
        >>> CTMA(f=2).base
        GeometricMedian(f=2, steps=50, tolerance=1e-09, smoothing=1e-06)
    """

    base: Rule = field(default_factory=lambda: GeometricMedian(f=0))
    """What finds the centre; takes over f."""

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        require(isinstance(self.base, Rule), "robust.base", self.base, "a robust rule")
        object.__setattr__(self, "base", self.base.facing(self.f))

    @property
    def least(self) -> int:
        """What the wrapped rule needs."""
        return self.base.least

    def fit(self, updates: Stack, weights: Array) -> BlockRule:
        """Return the mean of the nearest rows."""
        distances = updates.distances_to(self.base.fit(updates, weights))
        order = np.argsort(distances, kind="stable")
        budget = float(weights.sum()) - heaviest(weights, self.f)
        before = np.cumsum(weights[order]) - weights[order]
        left = budget - before
        # What rounding leaves over must not let in an update whose values know no bound.
        left[left < len(updates) * np.finfo(np.float64).eps * budget] = 0.0
        counted = np.zeros(len(updates))
        counted[order] = np.minimum(left, weights[order])
        return weighted_sum(counted / budget)
