"""Forecasters to compare with: what practitioners use before anything is learnt.

A baseline has one number for a rate and the fleet's share for a session. What makes it a forecaster
of quantiles is counted on the training devices: how far the truth lay from the number, and how
often a device in that state remained as it was.
"""

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
from fedstale.traces.forecast.observation import EDGES_S, RATE_HORIZONS_S, Observation
from fedstale.traces.forecast.sessions import HORIZONS_S


class LastValue(Forecaster):
    """Rates go on as in the last seconds, and devices remain as the share of the fleet does."""

    kind = "last-value"
    saved: ClassVar[tuple[str, ...]] = ("spread", "table")
    n_bins: ClassVar[int] = 1
    spread: Array
    table: Array
    """Share of the devices in each bin, offline and then online, that remain so, and that are
    online; shape (2, 2 n_bins, horizons)."""

    def level(self, observed: Observation) -> Array:
        """Return the number for each rate, NaN where unobserved; shape (n, 3, rate horizons)."""
        return np.repeat(observed.rates[:, :, :1], RATE_HORIZONS_S.size, axis=2)

    def bins(self, observed: Observation) -> Index:
        """Return the bin that each device is counted in, from 0 to n_bins - 1; shape (n,)."""
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
        """Return the table of the training devices."""
        survival, available = shares_by_state(training, self.bins(training.observed), self.n_bins)
        return np.stack([np.minimum.accumulate(survival, axis=1), available])

    def predict_sessions(self, observed: Observation) -> tuple[Array, Array]:
        """Return the shares of the state and bin."""
        survival, available = self.table[:, observed.online * self.n_bins + self.bins(observed)]
        return survival, available

    def predict_rates(self, observed: Observation) -> Array:
        """Return the number with the fleet's spread around it."""
        rates = np.exp(log_rate(self.level(observed))[..., None] + self.spread)
        return np.where(np.isnan(rates), self.fleet.rates, rates)


class Persistence(LastValue):
    """Everything goes on as it is."""

    kind = "persistence"

    def predict_sessions(self, observed: Observation) -> tuple[Array, Array]:
        """Return 1 for survival, and the state for being online."""
        shape = (len(observed), HORIZONS_S.size)
        return np.ones(shape), np.broadcast_to(observed.online[:, None], shape).astype(np.float64)


class Hourly(LastValue):
    """Devices remain as the fleet's share in that hour of the day does, rates at their own mean."""

    kind = "hourly"
    n_bins = HOURS + 1

    def bins(self, observed: Observation) -> Index:
        """Return the hour of the day; the last bin where it is unknown."""
        hour = hour_of(observed.time_of_day_s)
        return np.where(hour >= 0, hour, HOURS)

    def level(self, observed: Observation) -> Array:
        """Return the mean of each rate over the observed history."""
        mean = mean_of_steps(observed.rates, np.diff(EDGES_S))
        return np.repeat(mean[:, :, None], RATE_HORIZONS_S.size, axis=2)


def mean_of_steps(steps: Array, weights: Array) -> Array:
    """Return the weighted mean over the last axis of what is known there; NaN if nothing is."""
    weights = np.where(np.isnan(steps), 0.0, weights)
    total = weights.sum(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = (np.nan_to_num(steps) * weights).sum(axis=-1) / total
    # Old steps alone may weigh next to nothing; the mean is then as good as unknown.
    return np.where(total > 1e-12, mean, np.nan)
