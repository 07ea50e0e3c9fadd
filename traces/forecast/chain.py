"""The chain with two states, there and away, whose rates of change depend on the hour of the day.

Rates are counted on training devices for each hour, in each state. The chance that a device remains
is that the chain does not leave its state. It is a reasonable model of phones that charge at night,
the best of the simple ones at horizons of hours, and what the LSTM starts from.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fedstale.traces.arrays import Array, Index
from fedstale.traces.forecast.examples import Examples
from fedstale.traces.forecast.grid import DAY_S, HORIZONS_S

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]

HOURS = 24
WITHIN = 1
"""Changes are counted within this horizon, 5 min: long enough to see some, short in an hour."""
_HOUR_S, _MINUTE_S, _MINUTES = 3600.0, 60.0, 24 * 60
# Log-odds beyond these would say that a thing is certain.
_LEAST, _MOST = 1e-4, 1.0 - 1e-6


@dataclass(frozen=True, eq=False, kw_only=True)
class Chain:
    """Rates of leaving by state and hour."""

    leaving: Array
    """Changes a second, of devices away and there; shape (2, 24)."""

    @classmethod
    def of(cls, training: Examples) -> "Chain":
        """Count the changes of training devices."""
        hour = hour_of(training.seen.time_of_day_s)
        known, stays = hour >= 0, training.targets.stays[:, WITHIN]
        leaving = np.zeros((2, HOURS))
        for state in range(2):
            here = (training.seen.online == state) & ~np.isnan(stays)
            share = (stays[here].sum() + 5.0) / (here.sum() + 10.0)
            n = np.bincount(hour[here & known], minlength=HOURS)
            stayed = np.bincount(hour[here & known], weights=stays[here & known], minlength=HOURS)
            p = (stayed + 50.0 * share) / (n + 50.0)
            leaving[state] = -np.log(np.clip(p, 1e-9, 1.0)) / HORIZONS_S[WITHIN]
        return cls(leaving=leaving)

    def staying(self, online: Bools, time_of_day_s: Array) -> Array:
        """Return the chance that each device remains as it is.

        Args:
            online: whether it is there; shape (n,).
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

    def log_odds(self, online: Bools, time_of_day_s: Array) -> Floats:
        """Return the log-odds of staying through each piece between two horizons, once in it.

        To the minute of the day, from a table.

        Args:
            online: whether each device is there; shape (n,).
            time_of_day_s: of its clock, NaN where it has none; shape (n,).

        Returns:
            float32 of shape (n, horizons).
        """
        minute = np.nan_to_num(time_of_day_s / _MINUTE_S, nan=-1.0).astype(np.int64)
        minute[minute >= 0] %= _MINUTES
        return self._table[online.astype(np.int64), minute]

    @cached_property
    def _table(self) -> Floats:
        """Log-odds by state and minute; the last row is of devices without a clock."""
        clock = np.append((np.arange(_MINUTES) + 0.5) * _MINUTE_S, np.nan)
        rows = []
        for state in (False, True):
            stays = self.staying(np.full(clock.size, state), clock)
            stays[:, 1:] /= stays[:, :-1].copy()
            p = np.clip(stays, _LEAST, _MOST)
            rows.append(np.log(p) - np.log1p(-p))
        return np.array(rows, dtype=np.float32)


def hour_of(time_of_day_s: Array) -> Index:
    """Return the hour of the day; -1 where the time of day is unknown."""
    hour = np.floor(np.nan_to_num(time_of_day_s, nan=-_HOUR_S) / _HOUR_S).astype(np.int64)
    return np.where(hour >= 0, hour % HOURS, -1)
