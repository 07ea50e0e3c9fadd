"""Forecasters to compare with: what practitioners use before anything is learnt.

A baseline has one number for a rate and the fleet's share for a session. What makes it a forecaster
of quantiles is counted on the training devices: how far the truth lay from the number, and how
often a device in that state remained as it was.
"""

from typing import ClassVar, Self

import numpy as np

from fedstale.traces import Array
from fedstale.traces.forecast.base import (
    FleetStatistics,
    Forecaster,
    log_rate,
    quantiles,
    shares_by_state,
)
from fedstale.traces.forecast.dataset import Examples
from fedstale.traces.forecast.observation import RATE_HORIZONS_S, Observation
from fedstale.traces.forecast.sessions import HORIZONS_S


class LastValue(Forecaster):
    """Rates go on as in the last seconds, and devices remain as the share of the fleet does."""

    kind = "last-value"
    saved: ClassVar[tuple[str, ...]] = ("spread", "table")
    spread: Array
    table: Array
    """Share of devices offline and online that remain so, and that are online; (2, 2, horizons)."""

    def level(self, observed: Observation) -> Array:
        """Return the number for each rate, NaN where unobserved; shape (n, 3, rate horizons)."""
        return np.repeat(observed.rates[:, :, :1], RATE_HORIZONS_S.size, axis=2)

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
        survival, available = shares_by_state(training, np.zeros(len(training), dtype=np.int64), 1)
        return np.stack([np.minimum.accumulate(survival, axis=1), available])

    def predict_sessions(self, observed: Observation) -> tuple[Array, Array]:
        """Return the shares of the state."""
        survival, available = self.table[:, observed.online.astype(np.int64)]
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
