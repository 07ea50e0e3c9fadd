"""Gradient-boosted trees on the same inputs as the LSTM, with the horizon as one more input.

scikit-learn grows the trees; here they are kept as plain arrays, so that a trained forecaster is
saved without pickle and runs without scikit-learn. Three regressors for each channel (one a
quantile) and one classifier of leaving, pooled over the pieces of the horizon grid.

Reference:
    Friedman. Greedy Function Approximation: A Gradient Boosting Machine. Annals of Statistics
    29(5), 2001.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fedstale.traces.arrays import Array, Index
from fedstale.traces.forecast.examples import Examples
from fedstale.traces.forecast.features import Floats, features, flat, ratios
from fedstale.traces.forecast.forecaster import Forecaster, Prior, State
from fedstale.traces.forecast.grid import HORIZONS_S, LEVELS, RATE_HORIZONS_S, RATES
from fedstale.traces.forecast.observation import Observation
from fedstale.traces.forecast.outlook import Outlook

_MOST_ROWS = 120_000
_SETTINGS: dict[str, Any] = {
    "learning_rate": 0.1,
    "max_leaf_nodes": 15,
    "min_samples_leaf": 40,
    "early_stopping": False,
}
_LEAVING = "leaving"


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Trees:
    """Trees as flat arrays: node 0 of each is its root, a leaf points to itself."""

    column: Index
    """Input that each node asks for; shape (nodes,)."""
    threshold: Array
    """Inputs up to this go left; shape (nodes,)."""
    children: Index
    """Where each node leads, left and right; shape (nodes, 2)."""
    value: Array
    """What each leaf adds; shape (nodes,)."""
    roots: Index
    """Root of each tree; shape (trees,)."""
    depth: int
    """The longest way from a root to a leaf."""
    start: float
    """What the sum starts from."""

    def sum(self, x: Floats) -> Array:
        """Return the sum over all trees of the leaf that each row falls into; shape (n,)."""
        total = np.full(len(x), self.start)
        each = np.arange(len(x))
        for root in self.roots:
            node = np.full(len(x), root)
            for _ in range(self.depth):
                right = x[each, self.column[node]] > self.threshold[node]
                node = self.children[node, right.astype(np.int64)]
            total += self.value[node]
        return total

    @classmethod
    def of(cls, model: Any) -> "Trees":  # noqa: ANN401 - scikit-learn has no types
        """Return the trees of a fitted HistGradientBoosting model of scikit-learn."""
        nodes = [each[0].nodes for each in model._predictors]
        roots = np.concatenate([[0], np.cumsum([len(n) for n in nodes])])
        flat_nodes = np.concatenate(nodes)
        first = np.repeat(roots[:-1], [len(n) for n in nodes])
        leaf = flat_nodes["is_leaf"].astype(bool)
        own = np.arange(flat_nodes.size)
        sides = [np.where(leaf, own, first + flat_nodes[s]) for s in ("left", "right")]
        return cls(
            column=np.where(leaf, 0, flat_nodes["feature_idx"]).astype(np.int64),
            threshold=np.where(leaf, 0.0, flat_nodes["num_threshold"]).astype(np.float64),
            children=np.stack(sides, axis=1).astype(np.int64),
            value=np.where(leaf, flat_nodes["value"], 0.0).astype(np.float64),
            roots=roots[:-1].astype(np.int64),
            depth=int(flat_nodes["depth"].max()),
            start=float(np.ravel(model._baseline_prediction)[0]),
        )


class Boosting(Forecaster):
    """Gradient-boosted trees on lags.

    Args:
        n_trees: trees of each model, >= 1.
    """

    kind = "boosting"

    def __init__(self, n_trees: int = 80) -> None:
        self.n_trees = n_trees
        self.prior: Prior
        self.trees: dict[str, Trees] = {}

    def fit(self, training: Examples, validation: Examples, *, seed: int) -> Self:
        """Grow the trees; the number of them is fixed, so nothing is chosen on `validation`."""
        del validation
        self.prior = Prior.of(training)
        given = features(training.seen, self.prior)
        x = flat(given)
        rng = np.random.default_rng(seed)
        self.trees = {_LEAVING: self._leaving(x, training.targets.stays, rng)}
        y = ratios(training.targets.rates, given.level)
        for channel, name in enumerate(RATES):
            if np.isnan(y[:, channel]).all():
                continue
            rows, labels = _pooled(x, y[:, channel], rng)
            for level in LEVELS:
                self.trees[f"{name}.{level}"] = self._quantile(rows, labels, float(level))
        return self

    def _quantile(self, x: Floats, y: Array, level: float) -> Trees:
        from sklearn.ensemble import HistGradientBoostingRegressor  # noqa: PLC0415 - slow to import

        model = HistGradientBoostingRegressor(
            loss="quantile", quantile=level, max_iter=self.n_trees, **_SETTINGS
        )
        return Trees.of(model.fit(x, y))

    def _leaving(self, x: Floats, stays: Array, rng: np.random.Generator) -> Trees:
        from sklearn.ensemble import (  # noqa: PLC0415 - slow to import
            HistGradientBoostingClassifier,
        )

        before = np.concatenate([np.ones((len(stays), 1)), stays[:, :-1]], axis=1)
        rows, stayed = _pooled(x, np.where(before == 1.0, stays, np.nan), rng)
        if stayed.size == 0 or stayed.min() == stayed.max():
            return _constant(float(stayed[0]) if stayed.size else 1.0)
        model = HistGradientBoostingClassifier(max_iter=self.n_trees, **_SETTINGS)
        return Trees.of(model.fit(rows, stayed > 0.5))

    def outlook(self, seen: Observation) -> Outlook:
        """Return what the trees say of each device."""
        n = len(seen)
        given = features(seen, self.prior)
        x = flat(given)
        pieces = np.empty((n, HORIZONS_S.size))
        for k in range(HORIZONS_S.size):
            pieces[:, k] = 1.0 / (1.0 + np.exp(-self.trees[_LEAVING].sum(_with(x, k))))
        rates = np.broadcast_to(self.prior.rates, (n, *self.prior.rates.shape)).copy()
        for channel, name in enumerate(RATES):
            if f"{name}.{LEVELS[0]}" not in self.trees:
                continue
            for k in range(RATE_HORIZONS_S.size):
                at = _with(x, k)
                logs = [self.trees[f"{name}.{level}"].sum(at) for level in LEVELS]
                quantiles = np.sort(np.stack(logs, axis=1), axis=1)
                rates[:, channel, k] = np.exp(given.level[:, channel, None] + quantiles)
        return Outlook(
            online=seen.online,
            stays=np.cumprod(pieces, axis=1, dtype=np.float64),
            fresh=self.prior.fresh,
            rates=rates,
        )

    def state_dict(self) -> State:
        """Return the prior and the trees."""
        state = self.prior.state_dict()
        for name, trees in self.trees.items():
            for part in ("column", "children", "roots"):
                state[f"{name}/{part}"] = getattr(trees, part).astype(np.int32)
            state[f"{name}/threshold"] = trees.threshold
            state[f"{name}/value"] = trees.value
            state[f"{name}/start"] = np.array([trees.start, trees.depth])
        return state

    def load_state_dict(self, state: State) -> None:
        """Take over the prior and the trees."""
        self.prior = Prior.from_state(state)
        names = [key.removesuffix("/start") for key in state if key.endswith("/start")]
        self.trees = {
            name: Trees(
                column=state[f"{name}/column"].astype(np.int64),
                threshold=state[f"{name}/threshold"],
                children=state[f"{name}/children"].astype(np.int64),
                value=state[f"{name}/value"],
                roots=state[f"{name}/roots"].astype(np.int64),
                depth=int(state[f"{name}/start"][1]),
                start=float(state[f"{name}/start"][0]),
            )
            for name in names
        }


def _with(x: Floats, k: int) -> Floats:
    return np.concatenate([x, np.full((len(x), 1), k, dtype=np.float32)], axis=1)


def _pooled(x: Floats, y: Array, rng: np.random.Generator) -> tuple[Floats, Array]:
    """Return one row for each known pair of example and horizon, at most so many."""
    row, horizon = np.nonzero(~np.isnan(y))
    if row.size > _MOST_ROWS:
        chosen = np.sort(rng.choice(row.size, _MOST_ROWS, replace=False))
        row, horizon = row[chosen], horizon[chosen]
    at = horizon.astype(np.float32)[:, None]
    return np.concatenate([x[row], at], axis=1), y[row, horizon]


def _constant(stayed: float) -> Trees:
    """Return no trees, which say that a device always stays, or always leaves."""
    none: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
    return Trees(
        column=none,
        threshold=np.zeros(0),
        children=np.zeros((0, 2), dtype=np.int64),
        value=np.zeros(0),
        roots=none,
        depth=0,
        start=10.0 if stayed > 0.5 else -10.0,
    )
