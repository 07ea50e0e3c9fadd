"""Forecasters to compare with: what practitioners use before anything is learnt.

Each baseline has one number for a rate (the last value, an average, the mean of the hour) and one
reason for a session to survive. What makes it a forecaster of quantiles is counted on the training
devices: how far the truth lay from the number, and how often a device in that position remained
as it was. A bin or a history that is empty falls back on the fleet.
"""

from abc import abstractmethod
from typing import ClassVar, Self

import numpy as np

from fedstale.traces import Array, Index
from fedstale.traces.forecast.base import (
    HOURS,
    FleetStatistics,
    Forecaster,
    hour_of,
    log_rate,
    quantiles,
    shares_by_state,
)
from fedstale.traces.forecast.dataset import Examples
from fedstale.traces.forecast.observation import (
    EDGES_S,
    RATE_HORIZONS_S,
    RATES,
    Observation,
)
from fedstale.traces.forecast.sessions import HORIZONS_S

_HALF_LIVES_S: Array = np.array([60.0, 300.0, 900.0, 3600.0, 14400.0])
# Changes are counted within this horizon, 5 min: long enough to observe some, short in an hour.
_WITHIN = 1


class Baseline(Forecaster):
    """A forecaster of one number for each rate and one bin for each device."""

    saved: ClassVar[tuple[str, ...]] = ("spread", "table")
    n_bins: ClassVar[int] = 1
    spread: Array
    table: Array
    """Share of each bin that survives, and that is online; shape (2, 2 bins, horizons)."""

    @abstractmethod
    def level(self, observed: Observation) -> Array:
        """Return the number for each rate; (n, 3, rate horizons), NaN where unobserved."""

    def bins(self, observed: Observation) -> Index:
        """Return the bin of each device, from 0 to n_bins - 1; shape (n,)."""
        return np.zeros(len(observed), dtype=np.int64)

    def fit(self, training: Examples, validation: Examples, *, seed: int) -> Self:
        """Count, on the training devices, how far the truth is from the number."""
        del validation, seed
        self.fleet = FleetStatistics.of(training)
        self.table = self.counted(training)
        ratio = log_rate(training.rates) - log_rate(self.level(training.observed))
        self.spread = np.nan_to_num(quantiles(ratio))
        return self

    def counted(self, training: Examples) -> Array:
        """Return the table of the training devices; an empty bin has the share of its state."""
        bins = self.bins(training.observed)
        return _falling(np.stack(shares_by_state(training, bins, self.n_bins)))

    def predict_sessions(self, observed: Observation) -> tuple[Array, Array]:
        """Return the shares of the bin."""
        survival, available = self.table[:, observed.online * self.n_bins + self.bins(observed)]
        return survival, available

    def predict_rates(self, observed: Observation) -> Array:
        """Return the number with the fleet's spread around it."""
        rates = np.exp(log_rate(self.level(observed))[..., None] + self.spread)
        return np.where(np.isnan(rates), self.fleet.rates, rates)


def _falling(table: Array) -> Array:
    """Return a table whose survival falls with the horizon."""
    table[0] = np.minimum.accumulate(table[0], axis=1)
    return table


class LastValue(Baseline):
    """Rates go on as in the last seconds, and devices remain as the share of the fleet does."""

    kind = "last-value"

    def level(self, observed: Observation) -> Array:
        """Return the mean of the newest step."""
        return _same(observed.rates[:, :, 0])


class Persistence(LastValue):
    """Everything goes on as it is."""

    kind = "persistence"

    def predict_sessions(self, observed: Observation) -> tuple[Array, Array]:
        """Return 1 for survival, and the state for being online."""
        shape = (len(observed), HORIZONS_S.size)
        return np.ones(shape), np.broadcast_to(observed.online[:, None], shape).astype(np.float64)


class Hour(Baseline):
    """The share of the fleet's devices in the same state at the same hour of the day.

    Rates are the device's own mean times the fleet's at the hour in the middle of a horizon.
    """

    kind = "hour"
    saved: ClassVar[tuple[str, ...]] = ("spread", "table", "profile")
    n_bins = HOURS + 1
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

    def bins(self, observed: Observation) -> Index:
        """Return the hour of the day; the last bin where it is unknown."""
        hour = hour_of(observed.time_of_day_s)
        return np.where(hour >= 0, hour, HOURS)

    def level(self, observed: Observation) -> Array:
        """Return the device's own mean times the fleet's at the hour in the middle of a horizon."""
        middle = observed.time_of_day_s[:, None] + 0.5 * RATE_HORIZONS_S
        hour = hour_of(middle)
        # Without a clock there is no hour, and the device's own mean stands alone.
        factor = np.where(hour[:, None] >= 0, self.profile[:, hour].transpose(1, 0, 2), 0.0)
        return long_mean(observed)[:, :, None] * np.exp(factor)


class Ewma(Baseline):
    """Exponentially weighted average, with its half-life chosen on the validation devices."""

    kind = "ewma"
    saved = ("spread", "table", "half_life_s")
    n_bins = 6

    def __init__(self) -> None:
        self.half_life_s: Array = _HALF_LIVES_S[:1]

    def level(self, observed: Observation) -> Array:
        """Return the exponentially weighted mean of each rate."""
        return _same(self._average(observed.rates))

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
        return _mean_of_steps(steps, -np.diff(0.5 ** (EDGES_S / self.half_life_s)))


def long_mean(observed: Observation) -> Array:
    """Return the mean of each rate over the observed history; NaN if none; (n, 3)."""
    return _mean_of_steps(observed.rates, np.diff(EDGES_S))


def _mean_of_steps(steps: Array, weights: Array) -> Array:
    """Return the weighted mean over the last axis of what is known there; NaN if nothing is."""
    weights = np.where(np.isnan(steps), 0.0, weights)
    total = weights.sum(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = (np.nan_to_num(steps) * weights).sum(axis=-1) / total
    # Old steps alone may weigh next to nothing; the mean is then as good as unknown.
    return np.where(total > 1e-12, mean, np.nan)


def _same(level: Array) -> Array:
    return np.repeat(level[:, :, None], RATE_HORIZONS_S.size, axis=2)
