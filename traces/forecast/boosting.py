"""Gradient-boosted trees on the numbers that the LSTM reads beside its sequences.

scikit-learn grows and runs the trees. Chances have one classifier for each state and horizon, which
is what they are judged by. A channel has one regressor for each quantile, with the horizon as one
more input, on its whole history. They are a baseline of the backtest and are not saved:
scikit-learn saves estimators by pickle, which can run code.

Reference:
    Friedman. Greedy Function Approximation: A Gradient Boosting Machine. Annals of Statistics
    29(5), 2001.
"""

from typing import Any, Self

import numpy as np

from fedstale.traces.arrays import Array, Mask
from fedstale.traces.forecast.base import FleetStatistics, Forecaster
from fedstale.traces.forecast.dataset import Examples
from fedstale.traces.forecast.inputs import (
    ChannelInputs,
    Floats,
    HalfHours,
    channel_inputs,
    channel_targets,
    of_other_devices,
    session_inputs,
)
from fedstale.traces.forecast.observation import LEVELS, RATE_HORIZONS_S, RATES, Observation
from fedstale.traces.forecast.sessions import HORIZONS_S

_MOST_ROWS = 120_000
_SETTINGS: dict[str, Any] = {
    "learning_rate": 0.05,
    "max_leaf_nodes": 15,
    "min_samples_leaf": 200,
    "l2_regularization": 1.0,
    "early_stopping": False,
}


class Boosting(Forecaster):
    """Gradient-boosted trees.

    Args:
        n_trees: trees of each model, >= 1.
    """

    kind = "boosting"

    def __init__(self, n_trees: int = 200) -> None:
        self.n_trees = n_trees
        self.around: HalfHours
        self.quantiles: dict[int, list[Any]] = {}
        """Regressors of each channel that is known, one a level."""
        self.chances: dict[tuple[int, int, int], Any] = {}
        """Classifiers, or the only outcome as a number, by what, state and horizon."""

    def fit(self, training: Examples, validation: Examples, *, seed: int) -> Self:
        """Grow the trees; the number of them is fixed, so nothing is chosen on `validation`."""
        from sklearn.ensemble import (  # noqa: PLC0415 - slow to import
            HistGradientBoostingClassifier,
            HistGradientBoostingRegressor,
        )

        del validation
        self.fleet, self.around = FleetStatistics.of(training), HalfHours.of(training)
        observed = training.observed
        around = of_other_devices(training, observed)
        x = _known(session_inputs(observed, self.fleet, around)[0])
        for what, happened in enumerate((training.survival, training.available)):
            for state in (0, 1):
                for k in range(HORIZONS_S.size):
                    here = (observed.online == state) & ~np.isnan(happened[:, k])
                    y = happened[here, k]
                    made: Any = float(y.mean()) if y.size else 1.0
                    if np.unique(y).size == 2:
                        made = HistGradientBoostingClassifier(max_iter=self.n_trees, **_SETTINGS)
                        made.fit(x[here], y > 0.5)
                    self.chances[what, state, k] = made
        rng = np.random.default_rng(seed)
        self.quantiles = {}
        for channel in range(len(RATES)):
            given = self._channel(observed, channel)
            targets = channel_targets(training.rates[:, channel], given)
            if np.isnan(targets).all():
                continue
            rows, labels = _pooled(_flat(given), targets, rng)
            self.quantiles[channel] = [
                HistGradientBoostingRegressor(
                    loss="quantile", quantile=float(level), max_iter=self.n_trees, **_SETTINGS
                ).fit(rows, labels)
                for level in LEVELS
            ]
        return self

    def predict_sessions(self, observed: Observation) -> tuple[Array, Array]:
        """Return the predictions of the trees for each device."""
        around = self.around.of_devices(observed)
        x = _known(session_inputs(observed, self.fleet, around)[0])
        chances = np.empty((2, len(observed), HORIZONS_S.size))
        for (what, state, k), made in self.chances.items():
            here: Mask = observed.online == state
            if isinstance(made, float):
                chances[what, here, k] = made
            elif here.any():
                chances[what, here, k] = made.predict_proba(x[here])[:, 1]
        return np.minimum.accumulate(chances[0], axis=1), chances[1]

    def predict_rates(self, observed: Observation) -> Array:
        """Return the predictions of the trees; the fleet's where a channel was unknown."""
        n = len(observed)
        rates = np.broadcast_to(self.fleet.rates, (n, *self.fleet.rates.shape)).copy()
        for channel, regressors in self.quantiles.items() if n else ():
            given = self._channel(observed, channel)
            x = _flat(given)
            for k in range(RATE_HORIZONS_S.size):
                at = np.concatenate([x, np.full((n, 1), k, dtype=np.float32)], axis=1)
                ratios = np.sort(np.stack([r.predict(at) for r in regressors], axis=1), axis=1)
                logs = ratios * given.spread[:, None] + given.level[:, None]
                rates[:, channel, k] = np.exp(logs)
        return rates

    def _channel(self, observed: Observation, channel: int) -> ChannelInputs:
        return channel_inputs(observed, channel, self.fleet.rates[channel], usual_spread=1.0)


def _known(numbers: Array) -> Array:
    # A column that is unknown throughout has no bins; zeros stand beside columns that say so.
    return np.nan_to_num(numbers)


def _flat(given: ChannelInputs) -> Floats:
    """Return the history and the other numbers of a channel as one row for each device."""
    steps = given.sequence[:, :, 0].T
    return np.concatenate([steps, given.static], axis=1)


def _pooled(x: Floats, y: Array, rng: np.random.Generator) -> tuple[Floats, Array]:
    """Return one row for each known pair of example and horizon, at most so many."""
    row, horizon = np.nonzero(~np.isnan(y))
    if row.size > _MOST_ROWS:
        chosen = np.sort(rng.choice(row.size, _MOST_ROWS, replace=False))
        row, horizon = row[chosen], horizon[chosen]
    at = horizon.astype(np.float32)[:, None]
    return np.concatenate([x[row], at], axis=1), y[row, horizon]
