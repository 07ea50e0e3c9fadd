"""What learnt forecasters read of a device: numbers out of its observation, one set for each head.

Chances to stay and to be online are made of the device's own sessions and its clock alone, a rate
of the history of its own channel and the clock: a link that no training held moves no other head.
Rates enter as logarithms against the device's own level and in units of its own spread, so one
network serves slow and fast, calm and restless channels and any unit. No input depends on how far
a record has run: in a record of two days that would be the date.
"""

import warnings
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedstale.traces import DAY_S, Array, Index, taken
from fedstale.traces.forecast.base import FleetStatistics, hour_of, log_rate, shares_by_state
from fedstale.traces.forecast.dataset import Examples
from fedstale.traces.forecast.observation import EDGES_S, RATE_HORIZONS_S, STEPS, Observation
from fedstale.traces.forecast.sessions import HORIZONS_S, RUNS

Floats = npt.NDArray[np.float32]

SESSION_NUMBERS = 146
"""Numbers of a device's sessions and clock."""
RUN_NUMBERS = 7
"""Numbers of each finished run: length, kind, hours of its beginning and end, whether it was."""
STEP_NUMBERS = 3
"""Numbers of each step of a channel: ratio to the level, whether it is known, its length."""
CHANNEL_NUMBERS = 7
"""Other numbers of a channel."""

_LONG_S = 7 * DAY_S
_LATEST = 8
# Horizons that look at other days on their own: the shorter ones look at the half hour's.
_FAR = slice(int(np.searchsorted(HORIZONS_S, 1800.0)), None)
_LEAST_SHARE = 1e-3
_LEAST_SPREAD = 0.1
# Own counts are shrunk to the fleet by so many counts of it.
_RUNS_OF_FLEET, _HOURS_OF_FLEET, _DAYS_OF_OWN, _STEPS_OF_FLEET = 4.0, 2.0, 2.0, 4.0
# A bin of the half hours is shrunk to the state by so many examples.
_EXAMPLES_OF_STATE = 20.0
_FOLDS = 5
BOUND = 4.0
"""Inputs and logarithms of ratios are cut here, in standard deviations."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class HalfHours:
    """What devices in a state did at each half hour of the day; the last bin has no clock."""

    BINS: ClassVar[int] = 2 * 49
    survival: Array
    """Share that remained in the state; shape (BINS, horizons)."""
    available: Array
    """Share that was online; shape (BINS, horizons)."""

    @classmethod
    def of(cls, examples: Examples) -> "HalfHours":
        """Count the examples."""
        half = _half_hours(examples.observed)
        survival, available = shares_by_state(examples, half, cls.BINS // 2, _EXAMPLES_OF_STATE)
        return cls(survival=survival, available=available)

    def of_devices(self, observed: Observation) -> "HalfHours":
        """Return the shares that hold for each device; rows are devices."""
        return taken(self, observed.online * (self.BINS // 2) + _half_hours(observed))


def _half_hours(observed: Observation) -> Index:
    return np.nan_to_num(np.floor(observed.time_of_day_s / 1800.0), nan=48.0).astype(np.int64)


def of_other_devices(examples: Examples, seen: Observation) -> HalfHours:
    """Return the shares that hold for each example, counted on other devices; rows are examples.

    Of one device they are counted on other days.

    A share that an example was counted in tells its label, and a network would trust it too much.

    Args:
        examples: to count.
        seen: their observations, of which some may have no clock.
    """
    fold = examples.observed.devices % _FOLDS
    if np.ptp(fold) == 0:
        fold = np.floor(examples.observed.now / DAY_S).astype(np.int64) % _FOLDS
    survival, available = np.empty((2, len(examples), HORIZONS_S.size))
    for k in np.unique(fold):
        here, others = np.flatnonzero(fold == k), np.flatnonzero(fold != k)
        counted = HalfHours.of(examples.take(others if others.size else here))
        of_fold = counted.of_devices(seen.take(here))
        survival[here], available[here] = of_fold.survival, of_fold.available
    return HalfHours(survival=survival, available=available)


def session_inputs(
    observed: Observation, fleet: FleetStatistics, around: HalfHours
) -> tuple[Array, Floats]:
    """Compute the inputs of the chances to stay and to be online.

    Args:
        observed: n devices.
        fleet: what own counts are shrunk to.
        around: shares of the fleet for each device; rows are devices.

    Returns:
        Numbers of each device, NaN where unknown, of shape (n, SESSION_NUMBERS); and its finished
        runs, the oldest first, of shape (RUNS, n, RUN_NUMBERS), 0 where there was none.
    """
    own, online, clock = observed.own, observed.online, observed.time_of_day_s
    day, week = 2 * np.pi * clock / DAY_S, 2 * np.pi * observed.time_of_week_s / (7 * DAY_S)
    began = 2 * np.pi * (clock - own.age_s) / DAY_S
    lengths = np.log1p(own.lengths_s / 60.0)
    hours = hour_of(clock[:, None] + np.maximum(HORIZONS_S, 1800.0))
    at_hour = np.where(hours >= 0, fleet.online_by_hour[hours], fleet.online_by_hour.mean())
    lasting = fleet.survival[online.astype(np.int64)]
    survival = _shrunk(own.longer, _RUNS_OF_FLEET, lasting)
    sure = [
        np.log1p(own.age_s / 60.0),
        own.began,
        online,
        np.isnan(clock),
        np.isnan(week),
        np.log1p(np.minimum(observed.history_s, _LONG_S) / 3600.0),
        *np.log1p(own.changes).T,
        np.log1p(own.longer[:, 0, 1]),
        np.log1p(own.same_time[:, 0, 1]),
        np.log1p(own.same_week_time[:, 0, 1]),
        *_log_odds(_shrunk(own.same_time, _HOURS_OF_FLEET, at_hour))[:, _FAR].T,
        *_log_odds(_shrunk(own.same_week_time, _HOURS_OF_FLEET, at_hour))[:, _FAR].T,
        *_log_odds(survival).T,
        *_log_odds(_shrunk(own.lasted, _DAYS_OF_OWN, survival)).T,
        *_log_odds(around.survival).T,
        *_log_odds(around.available).T,
        *_waves(day, 8),
        *_waves(week, 3),
        np.nan_to_num(observed.time_of_week_s) >= 5 * DAY_S,
        *_waves(began),
    ]
    perhaps = [
        *_log_odds(own.online_share).T,
        *lengths[:, :_LATEST].T,
        _mean(lengths[:, ::2]),
        _mean(lengths[:, 1::2]),
        *own.yesterday[:, _FAR].T,
        *own.last_week[:, _FAR].T,
    ]
    columns = [*sure, *perhaps, *np.isnan(perhaps)]
    return np.stack(columns, axis=1, dtype=np.float64, casting="unsafe"), _runs(observed)


def _waves(angle: Array, n: int = 1) -> list[Array]:
    """Return the sines and cosines of an angle and its multiples, 0 where it is unknown."""
    return [np.nan_to_num(wave(k * angle)) for k in range(1, n + 1) for wave in (np.sin, np.cos)]


def _runs(observed: Observation) -> Floats:
    lengths, n = observed.own.lengths_s, len(observed)
    known = ~np.isnan(lengths)
    lasted = np.nan_to_num(lengths)
    ended = observed.own.age_s[:, None] + np.cumsum(lasted, axis=1) - lasted
    angle = 2 * np.pi / DAY_S * observed.time_of_day_s[:, None]
    end, start = angle - 2 * np.pi * ended / DAY_S, angle - 2 * np.pi * (ended + lasted) / DAY_S
    # Kinds alternate: the newest finished run is of the other kind.
    was_online = observed.online[:, None] ^ (np.arange(RUNS) % 2 == 0)
    runs = np.empty((RUNS, RUN_NUMBERS, n), dtype=np.float32)
    numbers = (
        np.log1p(lasted / 60.0) / 3.0 - 1.0,
        was_online,
        *_waves(start),
        *_waves(end),
        np.ones((n, RUNS)),
    )
    for i, number in enumerate(numbers):
        runs[:, i] = np.where(known, number, 0.0).T[::-1]
    return runs.transpose(0, 2, 1)


def without_clock(observed: Observation, hidden: npt.NDArray[np.bool_]) -> Observation:
    """Return observations of which some devices know no time of day and of the week."""
    return replace(
        observed,
        time_of_day_s=np.where(hidden, np.nan, observed.time_of_day_s),
        time_of_week_s=np.where(hidden, np.nan, observed.time_of_week_s),
    )


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class ChannelInputs:
    """What the rates of one channel are made of, of n devices."""

    sequence: Floats
    """The history, the oldest step first; shape (STEPS, n, STEP_NUMBERS)."""
    static: Floats
    """The rest; shape (n, CHANNEL_NUMBERS)."""
    level: Array
    """Logarithm of the rate that ratios are relative to; shape (n,)."""
    spread: Array
    """Standard deviation of the ratios of the steps, shrunk to the fleet's and > 0, which is their
    unit; shape (n,)."""


def channel_inputs(
    observed: Observation, channel: int, fleet_rates: Array, usual_spread: float
) -> ChannelInputs:
    """Compute the inputs of the rates of a channel.

    Args:
        observed: n devices.
        channel: position in `RATES`.
        fleet_rates: quantiles of the fleet's rates of the channel, as in `FleetStatistics`.
        usual_spread: of the fleet; own spreads are shrunk to it.
    """
    logs = log_rate(observed.rates[:, channel])
    known = ~np.isnan(logs)
    count = known.sum(axis=1)
    middle = np.log(fleet_rates[1, 1])
    level = np.where(count > 0, np.nan_to_num(logs).sum(axis=1) / np.maximum(count, 1), middle)
    ratios = np.where(known, logs - level[:, None], 0.0)
    # A few steps say little of how restless a channel is.
    square = (ratios**2).sum(axis=1) + _STEPS_OF_FLEET * usual_spread**2
    spread = np.maximum(np.sqrt(square / (count + _STEPS_OF_FLEET)), _LEAST_SPREAD)
    ratios = np.clip(ratios / spread[:, None], -BOUND, BOUND)
    n, backwards = len(observed), slice(None, None, -1)
    sequence = np.empty((STEPS, n, STEP_NUMBERS), dtype=np.float32)
    sequence[:, :, 0] = ratios.T[backwards]
    sequence[:, :, 1] = known.T[backwards]
    sequence[:, :, 2] = (np.log(np.diff(EDGES_S)) / 5.0 - 1.0)[backwards, None]
    angle = 2 * np.pi * observed.time_of_day_s / DAY_S
    static = np.empty((n, CHANNEL_NUMBERS), dtype=np.float32)
    columns = [
        ratios[:, 0],
        count / STEPS,
        ~np.isnan(angle),
        *_waves(angle, 2),
    ]
    for i, column in enumerate(columns):
        static[:, i] = column
    return ChannelInputs(sequence=sequence, static=static, level=level, spread=spread)


def channel_targets(rates: Array, given: ChannelInputs) -> Array:
    """Return logarithms of rates against the level, in spreads, cut at twice the bound.

    Args:
        rates: mean rates over the horizons, NaN where unknown; shape (n, rate horizons).
        given: inputs of the same devices.
    """
    assert rates.shape[1] == RATE_HORIZONS_S.size
    ratio = (log_rate(rates) - given.level[:, None]) / given.spread[:, None]
    return np.clip(ratio, -2 * BOUND, 2 * BOUND)


def _shrunk(counts: Array, weight: float, start: Array) -> Array:
    """Return the share that pairs of counts stand for, shrunk to another by so much weight."""
    share: Array = (counts[..., 0] + weight * start) / (counts[..., 1] + weight)
    return share


def _log_odds(share: Array) -> Array:
    p = np.clip(share, _LEAST_SHARE, 1.0 - _LEAST_SHARE)
    odds: Array = np.log(p / (1.0 - p))
    return odds


def _mean(x: Array) -> Array:
    """Compute the mean of the known values of each row; NaN without any."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        mean: Array = np.nanmean(x, axis=1)
    return mean
