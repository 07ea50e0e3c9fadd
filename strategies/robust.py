"""Rules that combine updates although some are adversarial: by coordinates, centres, or selection.

A rule with parameter f withstands f adversarial updates among n, whatever they hold. Every rule
takes weights, which must be the server's own or capped by it: a rule then withstands any f updates,
the heaviest ones too. With equal weights the rules are those of the papers. See `server.buffer` for
their place in a strategy.

Rules are called robust with coefficient kappa if, for every set S of n - f updates,

    |F(x_1, ..., x_n) - mean_S|^2 <= kappa / |S| sum_{i in S} |x_i - mean_S|^2.

Reference:
    Allouah, Farhadkhani, Guerraoui, Gupta, Pinot, Stephan. Fixing by Mixing: A Recipe for Optimal
    Byzantine ML under Heterogeneity. AISTATS 2023 (the definition, and kappa for each rule; Krum
    over n - f neighbours).
    Fang, Yang, Bajwa. BRIDGE: Byzantine-resilient Decentralized Gradient Descent. IEEE TSIPN 2022
    (the same rules as screening of neighbours: trimmed mean, median, Krum, Bulyan).
    Blanchard, El Mhamdi, Guerraoui, Stainer. Machine Learning with Adversaries. NeurIPS 2017.
    El Mhamdi, Guerraoui, Rouault. The Hidden Vulnerability of Distributed Learning in Byzantium.
    ICML 2018.

A rule looks at all updates of a buffer at once, block by block in float64 (`Stack`). Blocks of some
thousand coordinates keep that from needing a float64 copy of every update; distances are sums over
blocks of squared differences, which neither go negative nor lose small updates beside a huge one,
as Gram matrices do.

Krum, MultiKrum and Bulyan select whole updates. A score is the mean squared distance to the nearest
updates, those that hold all the weight but that of the f heaviest; with equal weights these are the
n - f nearest, the update itself among them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, Self

import numpy as np

from fedstale.errors import ProtocolError
from fedstale.strategies.types import (
    Array,
    Count,
    Model,
    NotNegative,
    Positive,
    Whole,
    check_fields,
    is_finite,
)

BlockRule = Callable[[Array], Array]
"""Takes a block of shape (n, c) and returns one combined row of shape (c,)."""

BLOCK = 1 << 17
"""Elements of a block over all updates together: 1 MiB in float64."""


class Stack:
    """Updates of equal names and shapes, only read."""

    def __init__(self, models: Sequence[Model]) -> None:
        """Stack at least one update of float arrays; only finite ones are kept."""
        self.kept = np.array([is_finite(model) for model in models])
        """Which of the updates are finite; shape (n given,)."""
        self.models = [model for model, kept in zip(models, self.kept, strict=True) if kept]

    def __len__(self) -> int:
        """Return the number of finite updates."""
        return len(self.models)

    def blocks(self) -> Iterator[tuple[str, slice, Array]]:
        """Yield the name of an array, a range of its flat elements and these in float64, (n, c)."""
        width = max(BLOCK // len(self), 1)
        for name, first in self.models[0].items():
            flat = [model[name].reshape(-1) for model in self.models]
            for start in range(0, first.size, width):
                part = slice(start, start + width)
                yield name, part, np.stack([row[part] for row in flat]).astype(np.float64)

    def combine(self, rule: BlockRule) -> Model:
        """Apply a rule to every block, in the dtypes of the updates."""
        combined = {name: np.empty(x.shape, x.dtype) for name, x in self.models[0].items()}
        for name, part, block in self.blocks():
            combined[name].reshape(-1)[part] = rule(block)
        return combined

    def distances_to(self, centre: BlockRule) -> Array:
        """Return the Euclidean distance of every update from a combined row; shape (n,)."""
        total = np.zeros(len(self))
        for _, _, block in self.blocks():
            difference = block - centre(block)
            total += np.einsum("ij,ij->i", difference, difference)
        return np.sqrt(total)

    def squared_distances(self) -> Array:
        """Return the squared distances between all pairs; symmetric, of shape (n, n)."""
        total = np.zeros((len(self), len(self)))
        for _, _, block in self.blocks():
            for i in range(len(self) - 1):
                difference = block[i + 1 :] - block[i]
                total[i, i + 1 :] += np.einsum("ij,ij->i", difference, difference)
        return total + total.T


def weighted_sum(coefficients: Array) -> BlockRule:
    """Return the rule that adds the rows of a block times coefficients of shape (n,)."""
    return lambda block: np.einsum("i,ij->j", coefficients, block)


Radius = Annotated[Positive, "a finite norm > 0"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(ABC):
    """Combines updates, up to f of which may hold anything."""

    f: Whole
    """Adversarial updates that it withstands, >= 0."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def least(self) -> int:
        """Updates that the rule needs; 2 f + 1 unless it says otherwise."""
        return 2 * self.f + 1

    @abstractmethod
    def fit(self, updates: Stack, weights: Array) -> BlockRule:
        """Return the rule for these updates, block by block.

        Args:
            updates: at least `least` of them, finite.
            weights: > 0, the f largest together less than half of the sum; shape (n,).
        """

    def facing(self, f: int) -> Self:
        """Return the same rule for another number of adversarial updates."""
        return replace(self, f=f)


@np.errstate(over="ignore", invalid="ignore")  # an infinite distance is a large one
def aggregate(rule: Rule, updates: Sequence[Model], weights: Array | None = None) -> Model:
    """Return the robust mean of some updates.

    An update with NaN or infinity is left out. It counts as one of the f only where the others
    alone would be too few for the rule.

    Args:
        rule: how.
        updates: float arrays of equal names and shapes; only read.
        weights: finite and > 0; equal ones if not given; shape (n,).

    Returns:
        A model in the dtypes of the updates; sums are in float64.

    Raises:
        ProtocolError: there are too few updates for the rule, or f of them hold half the weight.

    Example:
        >>> updates = [{"w": np.array([x])} for x in (1.0, 2.0, 3.0, 1e9)]
        >>> aggregate(TrimmedMean(f=1), updates)
        {'w': array([2.5])}
    """
    stack = Stack(updates)
    n, lost = len(stack), len(updates) - len(stack)
    if n < rule.least:
        rule = rule.facing(max(rule.f - lost, 0))
    if n < rule.least:
        raise ProtocolError(
            f"a buffer of {n} finite updates: {rule!r} needs at least {rule.least}; wait for more "
            "(buffer_size) or withstand fewer (f)"
        )
    kept = np.ones(n) if weights is None else np.asarray(weights, np.float64)[stack.kept]
    if not (np.isfinite(kept).all() and (kept > 0).all()):
        raise ProtocolError(f"weights {kept.tolist()} of a buffer: expected finite numbers > 0")
    if 2.0 * heaviest(kept, rule.f) >= kept.sum():
        raise ProtocolError(
            f"the {rule.f} heaviest of {n} updates hold half the weight of a buffer or more: "
            "cap the weights, or weigh updates equally"
        )
    return stack.combine(rule.fit(stack, kept))


@dataclass(frozen=True, slots=True, kw_only=True)
class Median(Rule):
    """Takes the median of each coordinate.

    kappa = 4 (1 + f / (n - 2f))^2.

    Reference:
        Yin, Chen, Ramchandran, Bartlett. Byzantine-Robust Distributed Learning: Towards Optimal
        Statistical Rates. ICML 2018.
    """

    def fit(self, updates: Stack, weights: Array) -> BlockRule:
        """Return the median; between two middle values, their mean."""
        return lambda block: weighted_median(block, weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimmedMean(Rule):
    """Leaves out the f smallest and the f largest values of each coordinate, and averages.

    kappa = 6 f / (n - 2f) (1 + f / (n - 2f)). With weights, the weight of the f heaviest updates
    is left out at each end, so that a value at the border may count in part.

    Reference:
        Yin, Chen, Ramchandran, Bartlett. Byzantine-Robust Distributed Learning: Towards Optimal
        Statistical Rates. ICML 2018.
    """

    def fit(self, updates: Stack, weights: Array) -> BlockRule:
        """Return the trimmed mean."""
        total, cut = float(weights.sum()), heaviest(weights, self.f)

        def trimmed(block: Array) -> Array:
            order = np.argsort(block, axis=0, kind="stable")
            values, mass = np.take_along_axis(block, order, 0), weights[order]
            upto = np.cumsum(mass, axis=0)
            counted = np.minimum(upto, total - cut) - np.maximum(upto - mass, cut)
            return np.einsum("ij,ij->j", np.maximum(counted, 0.0) / (total - 2.0 * cut), values)

        return trimmed


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometricMedian(Rule):
    """Takes the point with the smallest weighted sum of distances, by smoothed Weiszfeld steps.

    kappa = 4 (1 + f / (n - 2f))^2 for the exact point. f says how many updates it needs; the point
    itself does not depend on it. The start is the median of each coordinate, because a mean may be
    as far away as an attacker likes.

    Reference:
        Pillutla, Kakade, Harchaoui. Robust Aggregation for Federated Learning. IEEE TSP 2022.
    """

    steps: Count = 50
    """Most steps; each reads all updates once."""
    tolerance: NotNegative = 1e-9
    """Stop when a step lowers the sum of distances by no more than this share."""
    smoothing: Positive = 1e-6
    """Smallest distance divided by, as a share of the median distance from the start."""

    def fit(self, updates: Stack, weights: Array) -> BlockRule:
        """Return a weighted mean whose weights were found step by step."""
        centre: BlockRule = lambda block: weighted_median(block, weights)  # noqa: E731
        distances = updates.distances_to(centre)
        floor = self.smoothing * float(weighted_median(distances[:, None], weights)[0])
        before = np.inf
        for _ in range(self.steps):
            objective = float(np.einsum("i,i->", weights, distances))
            if floor == 0.0 or not objective < before * (1.0 - self.tolerance):
                break
            before = objective if np.isfinite(objective) else np.inf
            pull = weights / np.maximum(distances, floor)
            centre = weighted_sum(pull / pull.sum())
            distances = updates.distances_to(centre)
        return centre


@dataclass(frozen=True, slots=True, kw_only=True)
class CentredClipping(Rule):
    """Goes from a start towards the updates, each of which pulls at most by a radius.

    f says how many updates it needs; the steps do not depend on it. No kappa is claimed.

    Differences from the paper: the start is the median of each coordinate, not the last step, so
    that the rule needs no state; `start="zero"` with a radius bounds the norm of every update. The
    radius follows the updates unless it is given.

    Reference:
        Karimireddy, He, Jaggi. Learning from History for Byzantine Robust Optimization. ICML 2021.
    """

    radius: Radius | None = None
    """tau, in the units of an update's norm, > 0; None takes the median distance from the start."""
    steps: Count = 3
    start: Literal["median", "zero"] = "median"

    def fit(self, updates: Stack, weights: Array) -> BlockRule:
        """Return the start and the updates, mixed by coefficients that were found step by step."""
        share, radius, kept = weights / weights.sum(), self.radius, 1.0
        pulls = np.zeros(len(updates))

        def mixed(kept: float, pulls: Array) -> BlockRule:
            if self.start == "zero":
                return weighted_sum(pulls)
            return lambda block: kept * weighted_median(block, weights) + weighted_sum(pulls)(block)

        for _ in range(self.steps):
            distances = updates.distances_to(mixed(kept, pulls))
            if radius is None:
                radius = float(weighted_median(distances[:, None], weights)[0])
            clipped = share * np.minimum(1.0, radius / np.maximum(distances, radius or 1.0))
            left = 1.0 - float(clipped.sum())
            kept, pulls = left * kept, left * pulls + clipped
        return mixed(kept, pulls)


def heaviest(weights: Array, f: int) -> float:
    """Return the sum of the f largest weights: what f adversaries hold at most."""
    return float(np.sort(weights)[len(weights) - f :].sum())


def weighted_median(block: Array, weights: Array) -> Array:
    """Return the median of each column of a block of shape (n, c); shape (c,).

    Where exactly half the weight lies at or below a value, it is the mean of that value and the
    next, so that equal weights give the usual median.
    """
    if (weights == weights[0]).all():
        return np.asarray(np.median(block, axis=0))
    order = np.argsort(block, axis=0, kind="stable")
    values, upto = np.take_along_axis(block, order, 0), np.cumsum(weights[order], axis=0)
    half, slack = upto[-1] / 2.0, 1e-12 * upto[-1]
    low = np.argmax(upto >= half - slack, axis=0)
    high = np.argmax(upto > half + slack, axis=0)
    columns = np.arange(block.shape[1])
    return np.asarray(values[low, columns] / 2.0 + values[high, columns] / 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CTMA(Rule):
    """Wraps a rule: the weighted mean of the nearest updates that hold a share 1 - lambda.

    lambda is the share of weight of the f heaviest updates, f / n where weights are equal. The last
    update counted may count in part, so that exactly that share is averaged.

    Differences from the paper: lambda follows from f. Its coefficient of robustness was not checked
    against the paper.

    Reference:
        Dahan, Levy. Weight for Robustness: A Comprehensive Approach towards Optimal Fault-Tolerant
        Asynchronous ML. NeurIPS 2024 (weighted centred trimmed meta aggregator).

    Example:
        >>> CTMA(f=2).base
        GeometricMedian(f=2, steps=50, tolerance=1e-09, smoothing=1e-06)
    """

    base: Annotated[Rule, "a robust rule"] = field(default_factory=lambda: GeometricMedian(f=0))
    """What finds the centre; takes over f."""

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
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
