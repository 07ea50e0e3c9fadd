"""A chain with two states, there and away, whose rates depend on the hour of the day.

Rates of change are counted on the training devices for each hour; a device remains with the
probability that the chain does. Links and processors are at their own mean times what the fleet's
are at that hour. A reasonable model of phones that charge at night, and of nothing else.
"""

from typing import Self

import numpy as np

from fedstale.traces.arrays import Array, Index
from fedstale.traces.forecast.examples import Examples
from fedstale.traces.forecast.forecaster import State
from fedstale.traces.forecast.grid import HORIZONS_S, RATE_HORIZONS_S, RATES
from fedstale.traces.forecast.naive import Simple, log_rate, long_mean
from fedstale.traces.forecast.observation import Observation

_WITHIN = 1
_HOURS = 24


class HourlyMarkov(Simple):
    """Two-state Markov chain with hourly rates; rates of links and processors by hour."""

    kind = "hourly-markov"

    def __init__(self) -> None:
        super().__init__()
        self.leaving: Array = np.zeros((2, _HOURS))
        self.profile: Array = np.zeros((len(RATES), _HOURS))

    def fit(self, training: Examples, validation: Examples, *, seed: int) -> Self:
        """Count changes and mean rates for each hour of the training devices."""
        hour = _hour(training.seen.time_of_day_s)
        known = hour >= 0
        stays = training.targets.stays[:, _WITHIN]
        # Counted at the horizon of five minutes: long enough to see changes, short in an hour.
        horizon = HORIZONS_S[_WITHIN]
        for state in range(2):
            here = (training.seen.online == state) & ~np.isnan(stays)
            share = (stays[here].sum() + 5.0) / (here.sum() + 10.0)
            n = np.bincount(hour[here & known], minlength=_HOURS)
            stayed = np.bincount(hour[here & known], weights=stays[here & known], minlength=_HOURS)
            p = (stayed + 50.0 * share) / (n + 50.0)
            self.leaving[state] = -np.log(np.clip(p, 1e-9, 1.0)) / horizon
        mean = long_mean(training.seen)
        ratio = log_rate(training.targets.rates[:, :, _WITHIN]) - log_rate(mean)
        for channel in range(len(RATES)):
            here = known & ~np.isnan(ratio[:, channel])
            n = np.bincount(hour[here], minlength=_HOURS)
            total = np.bincount(hour[here], weights=ratio[here, channel], minlength=_HOURS)
            self.profile[channel] = total / (n + 50.0)
        return super().fit(training, validation, seed=seed)

    def level(self, seen: Observation) -> Array:
        """Return the device's own mean times the fleet's at the hour in the middle of a horizon."""
        middle = seen.time_of_day_s[:, None] + 0.5 * RATE_HORIZONS_S
        hour = _hour(middle)
        # Without a clock there is no hour, and the device's own mean stands alone.
        factor = np.where(hour[:, None] >= 0, self.profile[:, hour].transpose(1, 0, 2), 0.0)
        return long_mean(seen)[:, :, None] * np.exp(factor)

    def staying(self, seen: Observation) -> Array:
        """Return the probability that the chain does not leave its state."""
        each = np.concatenate([np.zeros((2, 1)), np.cumsum(self.leaving, axis=1) * 3600.0], axis=1)
        day = each[:, -1]
        begin = np.nan_to_num(seen.time_of_day_s)
        state = seen.online.astype(np.int64)

        def upto(t: Array) -> Array:
            days, rest = np.divmod(t, 3600.0 * _HOURS)
            k = np.minimum((rest // 3600.0).astype(np.int64), _HOURS - 1)
            inside = (rest - 3600.0 * k) * self.leaving[state, k]
            return days * day[state] + each[state, k] + inside

        columns = [upto(begin + h) - upto(begin) for h in HORIZONS_S]
        hazard = np.stack(columns, axis=1)
        unknown = np.isnan(seen.time_of_day_s)[:, None]
        constant = (day / (3600.0 * _HOURS))[state][:, None] * HORIZONS_S
        return np.exp(-np.where(unknown, constant, hazard))

    def state_dict(self) -> State:
        """Return also the hourly rates."""
        return super().state_dict() | {"leaving": self.leaving, "profile": self.profile}

    def load_state_dict(self, state: State) -> None:
        """Take over also the hourly rates."""
        super().load_state_dict(state)
        self.leaving, self.profile = state["leaving"], state["profile"]


def _hour(time_of_day_s: Array) -> Index:
    """Return the hour of the day; -1 where the time of day is unknown."""
    hour = np.floor(np.nan_to_num(time_of_day_s, nan=-3600.0) / 3600.0).astype(np.int64)
    return np.where(hour >= 0, hour % _HOURS, -1)
