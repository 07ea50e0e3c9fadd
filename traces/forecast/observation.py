"""What devices know of themselves at an instant: their own history up to then, and nothing later.

A `TraceObserver` reads traces as the device's own recorder would have. It is the only way from a
trace to a forecaster, so a forecaster cannot see the future by mistake.

A history begins with the device's log: what a repeated record held the last time is not known the
next, or a forecaster would know it by heart.

A history is 24 steps that grow from seconds to hours, so one short sequence holds both the last
minute and yesterday. Forecasts are made on a grid of horizons; anything in between follows by
interpolation, so one forecast serves jobs of every size.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstale.errors import TraceError
from fedstale.traces import (
    BLOCK,
    DAY_S,
    Array,
    Availability,
    Index,
    Mask,
    Series,
    TraceSet,
    broadcast,
    joined,
    outline,
    row_time,
    taken,
)
from fedstale.traces.forecast.sessions import OwnSessions, SessionHistory

RATES = ("compute", "downlink", "uplink")
"""Channels with a rate, in the order of every array that has an axis of channels."""

LEVELS: Array = np.array([0.1, 0.5, 0.9])
"""Levels of the quantiles."""

AVAILABLE_S = 1800.0
"""The horizon for which a device reports its chance to stay online, so that devices compare."""

RATE_HORIZONS_S: Array = np.array([10.0, 60.0, 300.0, 900.0, 1800.0, 3600.0, 7200.0])
"""Horizons over which a mean rate is forecast, in s."""

EDGES_S: Array = np.concatenate(
    [
        [0, 10, 60, 120, 180, 240, 300],
        [600, 900, 1200, 1800, 2400, 3600],
        [5400, 7200, 10800, 14400, 18000, 21600],
        [28800, 36000, 43200, 57600, 72000, 90000],
    ]
).astype(np.float64)
"""How long ago the steps of a history end and begin, in s, the newest first; (steps + 1,)."""

STEPS = EDGES_S.size - 1
"""Number of steps of a history."""

# Devices are read this many at a time, so that their arrays stay in the cache.
_CHUNK = 512


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Observation:
    """Histories of n devices, each as of an instant of its own. What was not observed is NaN."""

    devices: Index
    """Position of each device in its trace set; shape (n,)."""
    now: Array
    """Instants in s; shape (n,)."""
    history_s: Array
    """How long each device has been observed, in s, >= 0; shape (n,)."""
    online: Mask
    """Whether the device is available now; always true where availability is unknown."""
    own: OwnSessions
    """Its sessions and gaps so far."""
    time_of_day_s: Array
    """Seconds since local midnight; shape (n,)."""
    time_of_week_s: Array
    """Seconds since the local midnight that began the Monday; NaN where the record holds no whole
    weeks, so that its days are no weekdays; shape (n,)."""
    rates: Array
    """Mean rate of each channel in each step, the newest first; shape (n, 3, steps)."""

    __repr__ = outline

    def __len__(self) -> int:
        return self.devices.size

    def take(self, which: npt.NDArray[Any] | slice) -> "Observation":
        """Return some of the observations; `which` is positions, a mask or a slice."""
        return taken(self, which)


class TraceObserver:
    """Observes devices of a trace set as they observe themselves.

    Args:
        traces: the devices; any channel may be unknown.

    Example:
        >>> traces = TraceSet.constant(1, compute=2, downlink_bit_per_s=8, uplink_bit_per_s=4)
        >>> observed = TraceObserver(traces).at([0], 3600.0)
        >>> observed.rates[0, :, 0]
        array([2., 8., 4.])
        >>> float(observed.history_s[0])
        3600.0
    """

    def __init__(self, traces: TraceSet) -> None:
        self.traces = traces
        availability = traces.availability
        self._sessions = None if availability is None else SessionHistory(availability)
        known = ((i, getattr(traces, name)) for i, name in enumerate(RATES))
        # An infinite rate is none that a device could measure.
        self._series: list[tuple[int, Series]] = [
            (i, series) for i, series in known if series is not None and not series.is_instant
        ]

    def at(
        self, devices: npt.ArrayLike, now: npt.ArrayLike, *, history_s: npt.ArrayLike = np.inf
    ) -> Observation:
        """Compute each device's observations of itself before an instant.

        Args:
            devices: positions of devices; shape (n,).
            now: instants in s, >= 0; scalar or shape (n,).
            history_s: how long devices remember, in s, >= 0; scalar or shape (n,).

        Raises:
            TraceError: a device does not exist, or an instant or a memory is negative or NaN.
        """
        devices = np.atleast_1d(np.asarray(devices, dtype=np.int64))
        n = devices.size
        now, memory = broadcast(now, (n,)), broadcast(history_s, (n,))
        if n and (devices.min() < 0 or devices.max() >= self.traces.n_devices):
            raise TraceError(
                f"devices = {devices.min()}..{devices.max()}: expected positions from 0 to "
                f"{self.traces.n_devices - 1}"
            )
        if not (np.all(np.isfinite(now) & (now >= 0)) and np.all(memory >= 0)):
            raise TraceError("now, history_s: expected seconds >= 0, now finite")
        # Where the state is unknown, so is all that came before.
        began = self.traces.log_at(devices, now)[0].clip(min=0.0)
        begin = np.maximum(now - memory, began)
        parts = [slice(i, i + _CHUNK) for i in range(0, max(n, 1), _CHUNK)]
        return joined([self._observed(devices[p], now[p], begin[p]) for p in parts])

    def _observed(self, devices: Index, now: Array, begin: Array) -> Observation:
        online, own = np.ones(devices.size, dtype=bool), OwnSessions.unknown(now - begin)
        availability = self.traces.availability
        if self._sessions is not None and availability is not None:
            online = availability.is_available(devices, now)
            own = self._sessions.at(devices, now, begin)
        edges = np.maximum(now[:, None] - EDGES_S, begin[:, None])
        rates = np.full((devices.size, len(RATES), STEPS), np.nan)
        for i, series in self._series:
            rates[:, i] = stepwise_means(series, devices, edges)
        clock = np.mod(now + (np.nan if (at := self.traces.midnight_s) is None else at), DAY_S)
        return Observation(
            devices=devices,
            now=now,
            history_s=now - begin,
            online=online,
            own=own,
            time_of_day_s=clock,
            time_of_week_s=self._time_of_week(devices, now),
            rates=rates,
        )

    def _time_of_week(self, devices: Index, now: Array) -> Array:
        monday_s, availability = self.traces.monday_s, self.traces.availability
        if monday_s is None or availability is None:
            return np.full(now.shape, np.nan)
        # A record of a few days that repeats is on any day of the week.
        week_s = 7 * DAY_S
        is_whole = np.mod(availability.record_s()[devices], week_s) == 0.0
        is_whole &= np.mod(availability.shifts[devices], week_s) == 0.0
        return np.where(is_whole, np.mod(now + monday_s, week_s), np.nan)


def time_to_change(availability: Availability, devices: Index, t: Array) -> Array:
    """Return how long each device remains online or offline, in s; inf if for ever."""
    online = availability.is_available(devices, t)
    start, end = availability.window_at_or_after(devices, t)
    return np.where(online, end, start) - t


def stepwise_means(series: Series, devices: Index, edges: Array) -> Array:
    """Compute the mean rates of steps that follow one another, the newest first.

    Neighbouring steps share an instant: the integral up to each of them is summed once.

    Args:
        series: rates of a channel.
        devices: positions; shape (n,).
        edges: instants in s, falling; shape (n, steps + 1).

    Returns:
        NaN where a step has no length; shape (n, steps).
    """
    x, cycles = row_time(series, devices, edges)
    row, n = series.rows[devices], edges.size
    x = x.clip(0.0, np.inf if series.repeat else series.lengths[row][:, None]).ravel()
    each = np.append(np.repeat(row, edges.shape[1]), row)
    # The last block of each row too: by the same sums a rate of zero is zero around its end.
    block = np.append(series.block_at(x, each[:n]), series.first_block[row + 1] - 1)
    starts = series.edges_of(block, each, series.lengths[each])
    sums = np.zeros(starts.shape)
    np.cumsum(np.diff(starts) * series.values[block], axis=1, out=sums[:, 1:])
    sums += series.totals[block][:, None]
    k = np.arange(n), (starts[:n, 1:BLOCK] <= x[:, None]).sum(axis=1)
    carried: Array = (x - starts[k]) * series.values[block[:n], k[1]] + sums[k]
    carried = carried.reshape(edges.shape)
    if series.repeat:
        carried += cycles * sums[n:, -1:]
    carried *= series.scales[devices][:, None]
    amount, width = carried[:, :-1] - carried[:, 1:], edges[:, :-1] - edges[:, 1:]
    np.maximum(amount, 0.0, out=amount)
    return np.divide(amount, width, out=np.full(width.shape, np.nan), where=width > 0)
