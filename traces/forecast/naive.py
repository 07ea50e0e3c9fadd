"""Simple forecasters: what practitioners use before anything is learnt, and often afterwards.

Each names one number for a rate (the last value, yesterday's, an average) and one reason for a
device to stay. What makes them forecasters of quantiles is counted on the training devices: how far
the truth lay from the number, and how often a device in that position stayed. A bin or a history
that is empty falls back on the fleet.
"""

from abc import abstractmethod
from typing import ClassVar, Self

import numpy as np

from fedstale.traces.arrays import Array, Index
from fedstale.traces.forecast.examples import Examples
from fedstale.traces.forecast.forecaster import LEAST_RATE, Forecaster, Prior, State, shares
from fedstale.traces.forecast.grid import (
    EDGES_S,
    HORIZONS_S,
    LEVELS,
    RATE_HORIZONS_S,
    RATES,
    STEPS,
)
from fedstale.traces.forecast.observation import Observation
from fedstale.traces.forecast.outlook import Outlook

# Steps of the past that are the last five whole minutes but one: 10-60 s ago, then four minutes.
_LAST_FIVE = slice(1, 6)
_HALF_LIVES_S = (60.0, 300.0, 900.0, 3600.0, 14400.0)


class Simple(Forecaster):
    """A forecaster made of one number for each rate and one bin for each device."""

    n_bins: ClassVar[int] = 1

    def __init__(self) -> None:
        self.prior: Prior
        self.spread: Array
        self.table: Array

    @abstractmethod
    def level(self, seen: Observation) -> Array:
        """Return the number for each rate; NaN where nothing was seen; (n, 3, rate horizons)."""

    def bins(self, seen: Observation) -> Index:
        """Return the bin of each device, from 0 to n_bins - 1; shape (n,)."""
        return np.zeros(len(seen), dtype=np.int64)

    def fit(self, training: Examples, validation: Examples, *, seed: int) -> Self:
        """Count, on the training devices, how far the truth is from the number."""
        del validation, seed
        self.prior = Prior.of(training)
        bins = training.seen.online * self.n_bins + self.bins(training.seen)
        start = np.repeat(self.prior.stays, self.n_bins, axis=0)
        self.table = shares(training.targets.stays, bins, 2 * self.n_bins, start)
        self.spread = self._spread(training)
        return self

    def _spread(self, training: Examples) -> Array:
        ratio = log_rate(training.targets.rates) - log_rate(self.level(training.seen))
        spread = np.zeros((len(RATES), RATE_HORIZONS_S.size, LEVELS.size))
        for channel in range(len(RATES)):
            for k in range(RATE_HORIZONS_S.size):
                known = ratio[:, channel, k]
                known = known[~np.isnan(known)]
                if known.size:
                    spread[channel, k] = np.quantile(known, LEVELS)
        return spread

    def outlook(self, seen: Observation) -> Outlook:
        """Return the number with the fleet's spread around it, and the share of the bin."""
        level = self.level(seen)
        rates = np.exp(log_rate(level)[..., None] + self.spread)
        rates = np.where(np.isnan(rates), self.prior.rates, rates)
        return Outlook(
            online=seen.online, stays=self.staying(seen), fresh=self.prior.fresh, rates=rates
        )

    def staying(self, seen: Observation) -> Array:
        """Return the probability to remain beyond each horizon; shape (n, horizons)."""
        return self.table[seen.online * self.n_bins + self.bins(seen)]

    def state_dict(self) -> State:
        """Return the prior, the spread and the table."""
        return self.prior.state_dict() | {"spread": self.spread, "table": self.table}

    def load_state_dict(self, state: State) -> None:
        """Take over the prior, the spread and the table."""
        self.prior = Prior.from_state(state)
        self.spread, self.table = state["spread"], state["table"]


class LastValue(Simple):
    """Everything goes on as in the last seconds: persistence."""

    kind = "last-value"

    def level(self, seen: Observation) -> Array:
        """Return the mean of the newest step."""
        return _same(seen.rates[:, :, 0])


class Seasonal(Simple):
    """Everything happens as it did 24 hours ago; where that is unknown, as in the last seconds."""

    kind = "seasonal"
    n_bins = 2 + HORIZONS_S.size

    def level(self, seen: Observation) -> Array:
        """Return the mean over the same horizon 24 h ago."""
        return np.where(
            np.isnan(seen.day_ago_rates), _same(seen.rates[:, :, 0]), seen.day_ago_rates
        )

    def bins(self, seen: Observation) -> Index:
        """Return how long yesterday's state lasted, if it was the same as now; else bin 0."""
        lasted = np.nan_to_num(seen.day_ago_stayed_s, nan=-1.0)
        same = seen.day_ago_online == seen.online
        return np.where(same, 1 + np.searchsorted(HORIZONS_S, lasted, side="left"), 0)


class Ewma(Simple):
    """An average that forgets; how fast is chosen on the validation devices."""

    kind = "ewma"
    n_bins = 6

    def __init__(self) -> None:
        super().__init__()
        self.half_life_s = _HALF_LIVES_S[0]

    def level(self, seen: Observation) -> Array:
        """Return the exponentially weighted mean of each rate."""
        return _same(self._average(seen.rates))

    def bins(self, seen: Observation) -> Index:
        """Return the bin of the exponentially weighted share of time online."""
        present = np.nan_to_num(self._average(seen.presence[:, None])[:, 0], nan=0.0)
        return np.minimum((present * self.n_bins).astype(np.int64), self.n_bins - 1)

    def fit(self, training: Examples, validation: Examples, *, seed: int) -> Self:
        """Fit with each half-life and keep the one of the least median error."""
        losses = []
        for self.half_life_s in _HALF_LIVES_S:
            ratio = log_rate(validation.targets.rates) - log_rate(self.level(validation.seen))
            losses.append(float(np.nanmean(np.abs(ratio))) if np.isfinite(ratio).any() else 0.0)
        self.half_life_s = _HALF_LIVES_S[int(np.argmin(losses))]
        return super().fit(training, validation, seed=seed)

    def _average(self, steps: Array) -> Array:
        old, new = EDGES_S[1:], EDGES_S[:-1]
        weights = 0.5 ** (new / self.half_life_s) - 0.5 ** (old / self.half_life_s)
        weights = np.where(np.isnan(steps), 0.0, weights)
        total = weights.sum(axis=-1)
        # An old past alone weighs next to nothing; then it is as good as unknown.
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = (np.nan_to_num(steps) * weights).sum(axis=-1) / total
        return np.where(total > 1e-12, mean, np.nan)

    def state_dict(self) -> State:
        """Return also the half-life."""
        return super().state_dict() | {"half_life_s": np.array([self.half_life_s])}

    def load_state_dict(self, state: State) -> None:
        """Take over also the half-life."""
        super().load_state_dict(state)
        self.half_life_s = float(state["half_life_s"][0])


class HarmonicMean(Simple):
    """The harmonic mean of the last five minutes, which one fast minute cannot spoil.

    Reference:
        Jiang, Sekar, Zhang. Improving Fairness, Efficiency, and Stability in HTTP-based Adaptive
        Video Streaming with FESTIVE. CoNEXT 2012.
    """

    kind = "harmonic-mean"

    def level(self, seen: Observation) -> Array:
        """Return the harmonic mean of the last five steps of about a minute."""
        last = np.maximum(seen.rates[:, :, _LAST_FIVE], LEAST_RATE)
        known = ~np.isnan(last)
        inverse = np.where(known, 1.0 / np.where(known, last, 1.0), 0.0).sum(axis=2)
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = known.sum(axis=2) / inverse
        return _same(np.where(known.any(axis=2), mean, seen.rates[:, :, 0]))


def log_rate(rates: Array) -> Array:
    """Return the logarithm of rates, none below the least."""
    return np.log(np.maximum(rates, LEAST_RATE))


def long_mean(seen: Observation) -> Array:
    """Return the mean of each rate over all of the past that was seen; NaN if none; (n, 3)."""
    widths = np.broadcast_to(np.diff(EDGES_S), (len(seen), len(RATES), STEPS))
    widths = np.where(np.isnan(seen.rates), 0.0, widths)
    total = widths.sum(axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(total > 0, (np.nan_to_num(seen.rates) * widths).sum(axis=2) / total, np.nan)


def _same(level: Array) -> Array:
    return np.repeat(level[:, :, None], RATE_HORIZONS_S.size, axis=2)
