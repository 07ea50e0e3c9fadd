"""Robust rules that select whole updates by their distances from one another.

A score is the mean squared distance to the nearest updates, those that hold all the weight but that
of the f heaviest; with equal weights these are the n - f nearest, the update itself among them.

Reference:
    Blanchard, El Mhamdi, Guerraoui, Stainer. Machine Learning with Adversaries. NeurIPS 2017.
    El Mhamdi, Guerraoui, Rouault. The Hidden Vulnerability of Distributed Learning in Byzantium.
    ICML 2018.
    Allouah et al. Fixing by Mixing. AISTATS 2023 (Krum over n - f neighbours, and its kappa).
"""

from dataclasses import dataclass

import numpy as np

from fedstale.strategies.robust.base import (
    BlockRule,
    Rule,
    Stack,
    heaviest,
    weighted_median,
    weighted_sum,
)
from fedstale.strategies.types import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Krum(Rule):
    """Takes the one update that is nearest to its neighbours.

    kappa = 6 (1 + f / (n - 2f)).

    Differences from the paper: n - f neighbours instead of n - f - 1, both counted with the update
    itself, as in the analysis of kappa; so n >= 2 f + 1 is enough.
    """

    def fit(self, updates: Stack, weights: Array) -> BlockRule:
        """Return the rule that takes the chosen row."""
        best = int(np.argmin(scores(updates.squared_distances(), weights, self.f)))
        return lambda block: np.asarray(block[best])


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiKrum(Rule):
    """Averages the n - f updates with the best scores of Krum, by their weights."""

    def fit(self, updates: Stack, weights: Array) -> BlockRule:
        """Return the mean of the chosen rows."""
        n = len(updates)
        order = np.argsort(scores(updates.squared_distances(), weights, self.f), kind="stable")
        chosen = np.zeros(n)
        best = order[: n - self.f]
        chosen[best] = weights[best]
        return weighted_sum(chosen / chosen.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Bulyan(Rule):
    """Chooses n - 2f updates by repeated Krum; averages the values nearest to their median.

    Of each coordinate the n - 4f values nearest to the median of the chosen ones are averaged.
    No kappa is claimed.
    """

    @property
    def least(self) -> int:
        """4 f + 3."""
        return 4 * self.f + 3

    def fit(self, updates: Stack, weights: Array) -> BlockRule:
        """Return the mean around the median of the chosen rows."""
        squares, left = updates.squared_distances(), list(range(len(updates)))
        chosen = []
        for _ in range(len(updates) - 2 * self.f):
            best = int(np.argmin(scores(squares[np.ix_(left, left)], weights[left], self.f)))
            chosen.append(left.pop(best))
        own, keep = weights[chosen], len(chosen) - 2 * self.f

        def around_median(block: Array) -> Array:
            values = block[chosen]
            away = np.abs(values - weighted_median(values, own))
            nearest = np.argsort(away, axis=0, kind="stable")[:keep]
            mass = own[nearest]
            return np.asarray(
                np.einsum("ij,ij->j", mass / mass.sum(0), np.take_along_axis(values, nearest, 0))
            )

        return around_median


def scores(squares: Array, weights: Array, f: int) -> Array:
    """Return the mean squared distance of every update to its nearest; shape (n,).

    Args:
        squares: squared distances between updates; shape (n, n).
        weights: > 0; shape (n,).
        f: the weight of as many heaviest updates is left out at the far end.
    """
    order = np.argsort(squares, axis=1, kind="stable")
    mass = weights[order]
    upto = np.cumsum(mass, axis=1)
    # Late choices of Bulyan leave fewer updates than f: the nearest ones, the update itself, count.
    budget = max(float(weights.sum()) - heaviest(weights, min(f, len(weights) - 1)), 0.0)
    counted = np.maximum(np.minimum(upto, budget) - (upto - mass), 0.0)
    nearest = np.take_along_axis(squares, order, 1)
    # 0 times infinity would be NaN: an update so far away counts only where it must.
    return np.asarray(np.where(counted > 0.0, counted * nearest, 0.0).sum(1) / budget)
