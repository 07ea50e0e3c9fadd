"""Gradient-boosted trees on the same inputs as the LSTM, with the horizon as one more input.

scikit-learn grows and runs the trees: three regressors for each channel (one a quantile) and one
classifier of survival, pooled over the pieces of the horizon grid. They are a baseline of the
backtest and are not saved: scikit-learn saves estimators by pickle, which can run code.

Reference:
    Friedman. Greedy Function Approximation: A Gradient Boosting Machine. Annals of Statistics
    29(5), 2001.
"""

from typing import Any, Self

import numpy as np

from fedstale.traces.arrays import Array
from fedstale.traces.forecast.base import FleetStatistics, Forecaster
from fedstale.traces.forecast.dataset import Examples
from fedstale.traces.forecast.lstm import Floats, features, flat, ratios
from fedstale.traces.forecast.observation import (
    HORIZONS_S,
    LEVELS,
    RATE_HORIZONS_S,
    RATES,
    Observation,
)

_MOST_ROWS = 120_000
_SETTINGS: dict[str, Any] = {
    "learning_rate": 0.1,
    "max_leaf_nodes": 15,
    "min_samples_leaf": 40,
    "early_stopping": False,
}


class Boosting(Forecaster):
    """Gradient-boosted trees on lags.

    Args:
        n_trees: trees of each model, >= 1.
    """

    kind = "boosting"

    def __init__(self, n_trees: int = 80) -> None:
        self.n_trees = n_trees
        self.quantiles: dict[int, list[Any]] = {}
        """Regressors of each channel that is known, one a level."""
        self.survives: list[Any] = []
        """The classifier; none where the examples hold one outcome alone."""
        self.only_outcome = 1.0
        """The probability that stands for the classifier then."""

    def fit(self, training: Examples, validation: Examples, *, seed: int) -> Self:
        """Grow the trees; the number of them is fixed, so nothing is chosen on `validation`."""
        from sklearn.ensemble import (  # noqa: PLC0415 - slow to import
            HistGradientBoostingClassifier,
            HistGradientBoostingRegressor,
        )

        del validation
        self.fleet = FleetStatistics.of(training)
        given = features(training.observed, self.fleet)
        x = flat(given)
        rng = np.random.default_rng(seed)
        survival = training.survival
        before = np.concatenate([np.ones((len(survival), 1)), survival[:, :-1]], axis=1)
        rows, survived = _pooled(x, np.where(before == 1.0, survival, np.nan), rng)
        if np.unique(survived).size == 2:
            classifier = HistGradientBoostingClassifier(max_iter=self.n_trees, **_SETTINGS)
            self.survives = [classifier.fit(rows, survived > 0.5)]
        else:
            self.survives, self.only_outcome = [], float(survived.max(initial=0.0))
        y = ratios(training.rates, given.level)
        self.quantiles = {}
        for channel in range(len(RATES)):
            if np.isnan(y[:, channel]).all():
                continue
            rows, labels = _pooled(x, y[:, channel], rng)
            self.quantiles[channel] = [
                HistGradientBoostingRegressor(
                    loss="quantile", quantile=float(level), max_iter=self.n_trees, **_SETTINGS
                ).fit(rows, labels)
                for level in LEVELS
            ]
        return self

    def predict(self, observed: Observation) -> tuple[Array, Array]:
        """Return the predictions of the trees for each device."""
        n = len(observed)
        given = features(observed, self.fleet)
        x = flat(given)
        pieces = np.full((n, HORIZONS_S.size), self.only_outcome)
        for classifier in self.survives if n else ():
            for k in range(HORIZONS_S.size):
                pieces[:, k] = classifier.predict_proba(_with(x, k))[:, 1]
        rates = np.broadcast_to(self.fleet.rates, (n, *self.fleet.rates.shape)).copy()
        for channel, regressors in self.quantiles.items() if n else ():
            for k in range(RATE_HORIZONS_S.size):
                at = _with(x, k)
                logs = np.stack([each.predict(at) for each in regressors], axis=1)
                quantiles = np.sort(logs, axis=1)
                rates[:, channel, k] = np.exp(given.level[:, channel, None] + quantiles)
        return np.cumprod(pieces, axis=1, dtype=np.float64), rates


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
