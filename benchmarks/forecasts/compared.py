"""Forecasters that tie with those of fedstale or are worse, and are here to be compared with.

Gradient-boosted trees on the numbers that the LSTM reads beside its sequences, a linear model of
the same numbers and one with a hidden layer, a Markov chain of two states by the hour, shares by
the hour of the day and of the week, and moving averages. scikit-learn grows and runs the trees.
Chances have one classifier for each state and horizon, which
is what they are judged by. A channel has one regressor for each quantile, with the horizon as one
more input, on its whole history.

Reference:
    Friedman. Greedy Function Approximation: A Gradient Boosting Machine. Annals of Statistics
    29(5), 2001.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from fedstale.traces.arrays import DAY_S, Array, Index, Mask
from fedstale.traces.forecast import (
    LSTM,
    Examples,
    FleetStatistics,
    Forecaster,
    Hourly,
    LastValue,
    Observation,
)
from fedstale.traces.forecast.base import HOURS, hour_of, log_rate, shares
from fedstale.traces.forecast.baselines import mean_of_steps
from fedstale.traces.forecast.inputs import (
    ChannelInputs,
    Floats,
    HalfHours,
    channel_inputs,
    channel_targets,
    of_other_devices,
    session_inputs,
)
from fedstale.traces.forecast.lstm import SESSIONS
from fedstale.traces.forecast.observation import EDGES_S, LEVELS, RATE_HORIZONS_S, RATES
from fedstale.traces.forecast.sessions import HORIZONS_S

# Changes are counted within this horizon, 5 min: long enough to observe some, short in an hour.
_WITHIN = 1
_HALF_LIVES_S: Array = np.array([60.0, 300.0, 900.0, 3600.0, 14400.0])
_HOUR_S, _WEEK_HOURS = 3600.0, 7 * HOURS
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
        from sklearn.ensemble import (
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


class Perceptron(LSTM):
    """The LSTM without memory: a hidden layer over what a device counted of itself."""

    kind = "perceptron"
    cells: ClassVar[dict[str, int]] = dict.fromkeys((SESSIONS, *RATES), 0)


class Linear(Perceptron):
    """A linear model of the perceptron's numbers: logistic regression of chances."""

    kind = "linear"
    width: ClassVar[dict[str, int]] = dict.fromkeys((SESSIONS, *RATES), 0)


class Hour(Hourly):
    """The share of the fleet's devices in the same state at the same hour of the day.

    Rates are the device's own mean times the fleet's at the hour in the middle of a horizon.
    """

    kind = "hour"
    saved: ClassVar[tuple[str, ...]] = ("spread", "table", "profile")
    profile: Array

    def fit(self, training: Examples, validation: Examples, *, seed: int) -> Self:
        """Count shares and mean rates for each hour of the training devices."""
        self.profile = np.zeros((len(RATES), HOURS))
        hour = hour_of(training.observed.time_of_day_s)
        ratio = log_rate(training.rates[:, :, _WITHIN]) - log_rate(long_mean(training.observed))
        for channel in range(len(RATES)):
            here = (hour >= 0) & ~np.isnan(ratio[:, channel])
            n = np.bincount(hour[here], minlength=HOURS)
            total = np.bincount(hour[here], weights=ratio[here, channel], minlength=HOURS)
            self.profile[channel] = total / (n + 50.0)
        return super().fit(training, validation, seed=seed)

    def level(self, observed: Observation) -> Array:
        """Return the device's own mean times the fleet's at the hour in the middle of a horizon."""
        middle = observed.time_of_day_s[:, None] + 0.5 * RATE_HORIZONS_S
        hour = hour_of(middle)
        # Without a clock there is no hour, and the device's own mean stands alone.
        factor = np.where(hour[:, None] >= 0, self.profile[:, hour].transpose(1, 0, 2), 0.0)
        return long_mean(observed)[:, :, None] * np.exp(factor)


class Ewma(LastValue):
    """Exponentially weighted average, with its half-life chosen on the validation devices."""

    kind = "ewma"
    saved = ("spread", "table", "half_life_s")
    n_bins = 6

    def __init__(self) -> None:
        self.half_life_s: Array = _HALF_LIVES_S[:1]

    def level(self, observed: Observation) -> Array:
        """Return the exponentially weighted mean of each rate."""
        average = self._average(observed.rates)
        return np.repeat(average[:, :, None], RATE_HORIZONS_S.size, axis=2)

    def bins(self, observed: Observation) -> Index:
        """Return the bin of the share of time online in the last day."""
        share = np.nan_to_num(observed.own.online_share[:, 2])
        return np.minimum((share * self.n_bins).astype(np.int64), self.n_bins - 1)

    def fit(self, training: Examples, validation: Examples, *, seed: int) -> Self:
        """Fit with each half-life and keep the one of the least median error."""
        losses = []
        for self.half_life_s in _HALF_LIVES_S[:, None]:
            ratio = log_rate(validation.rates) - log_rate(self.level(validation.observed))
            losses.append(float(np.nanmean(np.abs(ratio))) if np.isfinite(ratio).any() else 0.0)
        self.half_life_s = _HALF_LIVES_S[[int(np.argmin(losses))]]
        return super().fit(training, validation, seed=seed)

    def _average(self, steps: Array) -> Array:
        return mean_of_steps(steps, -np.diff(0.5 ** (EDGES_S / self.half_life_s)))


def long_mean(observed: Observation) -> Array:
    """Return the mean of each rate over the observed history; NaN if none; (n, 3)."""
    return mean_of_steps(observed.rates, np.diff(EDGES_S))


class HourOfWeek(Hour):
    """The same for the hour of the week; where that is unknown or was rare, that of the day."""

    kind = "hour-of-week"
    n_bins = _WEEK_HOURS + HOURS + 1

    def bins(self, observed: Observation) -> Index:
        """Return the hour of the week, or else 168 and the hour of the day."""
        hour = np.floor(np.nan_to_num(observed.time_of_week_s, nan=-1.0) / _HOUR_S)
        return np.where(hour >= 0, hour, _WEEK_HOURS + Hour.bins(self, observed)).astype(np.int64)

    def counted(self, training: Examples) -> Array:
        """Return the table of the training devices; an empty bin has the share of its hour."""
        state = training.observed.online.astype(np.int64)
        of_day = Hour().counted(training)
        start = of_day.reshape(2, 2, Hour.n_bins, -1)
        hours = [*range(HOURS)] * 7 + [*range(Hour.n_bins)]
        bins = state * self.n_bins + self.bins(training.observed)
        pairs = zip((training.survival, training.available), start[:, :, hours], strict=True)
        tables = [
            shares(happened, bins, 2 * self.n_bins, of_hour.reshape(2 * self.n_bins, -1))
            for happened, of_hour in pairs
        ]
        table = np.stack(tables)
        table[0] = np.minimum.accumulate(table[0], axis=1)
        return table


@dataclass(frozen=True, eq=False, kw_only=True)
class HourlyChain:
    """Markov chain of two states, offline and online, whose rates depend on the hour of the day.

    Rates are counted on training devices for each hour, in each state. The survival of a session is
    the probability that the chain does not leave its state. It is a reasonable model of phones that
    charge at night.
    """

    leaving: Array
    """Changes a second, of devices offline and online; shape (2, 24)."""

    @classmethod
    def of(cls, training: Examples) -> "HourlyChain":
        """Count the changes of training devices."""
        hour = hour_of(training.observed.time_of_day_s)
        known, survived = hour >= 0, training.survival[:, _WITHIN]
        leaving = np.zeros((2, HOURS))
        for state in range(2):
            here = (training.observed.online == state) & ~np.isnan(survived)
            share = (survived[here].sum() + 5.0) / (here.sum() + 10.0)
            n = np.bincount(hour[here & known], minlength=HOURS)
            total = np.bincount(hour[here & known], weights=survived[here & known], minlength=HOURS)
            p = (total + 50.0 * share) / (n + 50.0)
            leaving[state] = -np.log(np.clip(p, 1e-9, 1.0)) / HORIZONS_S[_WITHIN]
        return cls(leaving=leaving)

    def survival(self, online: Mask, time_of_day_s: Array) -> Array:
        """Return the probability that each device remains online, or offline.

        Args:
            online: whether it is online; shape (n,).
            time_of_day_s: of its clock, NaN where it has none; shape (n,).

        Returns:
            For each horizon; shape (n, horizons).
        """
        each = np.concatenate([np.zeros((2, 1)), np.cumsum(self.leaving, axis=1) * _HOUR_S], axis=1)
        day = each[:, -1]
        begin = np.nan_to_num(time_of_day_s)
        state = online.astype(np.int64)

        def upto(t: Array) -> Array:
            days, rest = np.divmod(t, DAY_S)
            k = np.minimum((rest // _HOUR_S).astype(np.int64), HOURS - 1)
            inside = (rest - _HOUR_S * k) * self.leaving[state, k]
            return days * day[state] + each[state, k] + inside

        hazard = np.stack([upto(begin + h) - upto(begin) for h in HORIZONS_S], axis=1)
        unknown = np.isnan(time_of_day_s)[:, None]
        constant = (day / DAY_S)[state][:, None] * HORIZONS_S
        return np.exp(-np.where(unknown, constant, hazard))


class HourlyMarkov(Hour):
    """Hourly chain for survival, and all else as by hour of the day."""

    kind = "hourly-markov"
    saved: ClassVar[tuple[str, ...]] = (*Hour.saved, "leaving")

    leaving: Array

    def fit(self, training: Examples, validation: Examples, *, seed: int) -> Self:
        """Count the changes of each hour as well."""
        self.leaving = HourlyChain.of(training).leaving
        return super().fit(training, validation, seed=seed)

    def predict_sessions(self, observed: Observation) -> tuple[Array, Array]:
        """Return the probability that the chain does not leave its state."""
        chain = HourlyChain(leaving=self.leaving)
        survival = chain.survival(observed.online, observed.time_of_day_s)
        return survival, super().predict_sessions(observed)[1]
