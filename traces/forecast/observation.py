"""What devices know of themselves at an instant: their own past, and nothing later.

An `Observer` reads traces as the device's own recorder would have: up to now. It is the only door
between a trace and a forecaster, so a forecaster cannot see the future by mistake; the oracle,
which may, has to be given the traces.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedstale.errors import TraceError
from fedstale.traces.arrays import Array, Index, Mask, last_at_or_before
from fedstale.traces.availability import Availability
from fedstale.traces.forecast.amounts import CarriedAmounts, OnlineTime, means, stepwise_means
from fedstale.traces.forecast.grid import DAY_S, EDGES_S, RATE_HORIZONS_S, RATES, STEPS
from fedstale.traces.trace_set import TraceSet

# Devices are read this many at a time, so that what they need stays in the cache.
_CHUNK = 512


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Observation:
    """The past of n devices, each at an instant of its own. What was not observed is NaN."""

    devices: Index
    """Position of each device in its trace set; shape (n,)."""
    now: Array
    """Instants in s; shape (n,)."""
    history_s: Array
    """How long each device has been observed, in s, >= 0; shape (n,)."""
    online: Mask
    """Whether the device is available now; always true where availability is unknown."""
    since_s: Array
    """How long that has been so, in s, as far as it was observed; shape (n,)."""
    time_of_day_s: Array
    """Seconds since local midnight; shape (n,)."""
    presence: Array
    """Share of each step of the past in which the device was available; shape (n, steps)."""
    rates: Array
    """Mean rate of each channel in each step, the newest first; shape (n, 3, steps)."""
    day_ago_online: Array
    """1 if the device was available 24 h ago, else 0; shape (n,)."""
    day_ago_stayed_s: Array
    """How long that remained so, in s, at most 24 h; shape (n,)."""
    day_ago_rates: Array
    """Mean rates over each horizon from 24 h ago; shape (n, 3, rate horizons)."""

    def __len__(self) -> int:
        return self.devices.size

    def take(self, which: npt.NDArray[Any] | slice) -> "Observation":
        """Return some of the observations; `which` is positions, a mask or a slice."""
        return Observation(**{f.name: getattr(self, f.name)[which] for f in fields(self)})


class Observer:
    """Reads what devices have seen of themselves.

    Args:
        traces: the devices; any channel may be unknown.

    Example:
        >>> traces = TraceSet.constant(1, compute=2, downlink_bit_per_s=8, uplink_bit_per_s=4)
        >>> seen = Observer(traces).at([0], 3600.0)
        >>> seen.rates[0, :, 0]
        array([2., 8., 4.])
        >>> float(seen.history_s[0])
        3600.0
    """

    def __init__(self, traces: TraceSet) -> None:
        self.traces = traces
        self._there = None if traces.availability is None else OnlineTime(traces.availability)
        series = (getattr(traces, channel) for channel in RATES)
        self._carried = tuple(None if each is None else CarriedAmounts(each) for each in series)
        self._midnight = None if traces.epoch is None else _seconds_of_day(traces.epoch)

    def at(
        self, devices: npt.ArrayLike, now: npt.ArrayLike, *, history_s: npt.ArrayLike = np.inf
    ) -> Observation:
        """Return what each device has observed of itself before an instant.

        Args:
            devices: positions of devices; shape (n,).
            now: instants in s, >= 0; scalar or shape (n,).
            history_s: how long devices remember, in s, >= 0; scalar or shape (n,).

        Raises:
            TraceError: a device does not exist, or an instant or a memory is negative or NaN.
        """
        devices = np.atleast_1d(np.asarray(devices, dtype=np.int64))
        n = devices.size
        now, memory = (
            np.broadcast_to(np.asarray(x, dtype=np.float64), (n,)) for x in (now, history_s)
        )
        if n and (devices.min() < 0 or devices.max() >= self.traces.n_devices):
            raise TraceError(
                f"devices = {devices.min()}..{devices.max()}: expected positions from 0 to "
                f"{self.traces.n_devices - 1}"
            )
        if not (np.all(np.isfinite(now) & (now >= 0)) and np.all(memory >= 0)):
            raise TraceError("now, history_s: expected seconds >= 0, now finite")
        begin = np.maximum(now - memory, 0.0)
        parts = [slice(i, i + _CHUNK) for i in range(0, max(n, 1), _CHUNK)]
        return _joined([self._seen(devices[p], now[p], begin[p]) for p in parts])

    def _seen(self, devices: Index, now: Array, begin: Array) -> Observation:
        online, since = self._state(devices, now, begin)
        yesterday = now - DAY_S
        known = yesterday >= begin
        was_online, stayed = self._stayed(devices, np.maximum(yesterday, 0.0), now)
        clock = np.full(now.shape, np.nan)
        if self._midnight is not None:
            clock = (now + self._midnight) % DAY_S
        edges = np.maximum(now[:, None] - EDGES_S, begin[:, None])
        presence = np.full((devices.size, STEPS), np.nan)
        if self._there is not None:
            presence = stepwise_means(self._there, devices, edges)
        rates = np.full((devices.size, len(RATES), STEPS), np.nan)
        day_ago = np.full((devices.size, len(RATES), RATE_HORIZONS_S.size), np.nan)
        start = np.broadcast_to(yesterday[known, None], (int(known.sum()), RATE_HORIZONS_S.size))
        for i, carried in enumerate(self._carried):
            if carried is None:
                continue
            rates[:, i] = stepwise_means(carried, devices, edges)
            if start.size:
                day_ago[known, i] = means(carried, devices[known], start, start + RATE_HORIZONS_S)
        return Observation(
            devices=devices,
            now=now,
            history_s=now - begin,
            online=online,
            since_s=since,
            time_of_day_s=clock,
            presence=presence,
            rates=rates,
            day_ago_online=np.where(known, was_online, np.nan),
            day_ago_stayed_s=np.where(known, stayed, np.nan),
            day_ago_rates=day_ago,
        )

    def _state(self, devices: Index, now: Array, begin: Array) -> tuple[Mask, Array]:
        availability = self.traces.availability
        if availability is None:
            return np.ones(devices.size, dtype=bool), now - begin
        return availability.is_available(devices, now), np.minimum(
            _since_change(availability, devices, now), now - begin
        )

    def _stayed(self, devices: Index, then: Array, now: Array) -> tuple[Array, Array]:
        if self.traces.availability is None:
            return np.full(devices.size, np.nan), np.full(devices.size, np.nan)
        was = self.traces.availability.is_available(devices, then)
        # What ends after now is only known not to have ended yet.
        changed = np.minimum(time_to_change(self.traces.availability, devices, then), now - then)
        return was.astype(np.float64), changed


def _joined(parts: list[Observation]) -> Observation:
    if len(parts) == 1:
        return parts[0]
    names = [f.name for f in fields(Observation)]
    return Observation(
        **{name: np.concatenate([getattr(p, name) for p in parts]) for name in names}
    )


def time_to_change(availability: Availability, devices: Index, t: Array) -> Array:
    """Return how long each device remains as it is, there or away, in s; inf if for ever."""
    online = availability.is_available(devices, t)
    start, end = availability.window_at_or_after(devices, t)
    return np.where(online, end, start) - t


def _since_change(availability: Availability, devices: Index, t: Array) -> Array:
    """Return how long each device has been as it is; inf where the record does not say."""
    if availability.starts.size == 0:
        return np.full(t.shape, np.inf)
    row = availability.rows[devices]
    length = availability.lengths[row]
    x = t + availability.shifts[devices]
    if availability.repeat:
        x = np.mod(x, length)
    first, last = availability.offsets[row], availability.offsets[row + 1]
    k = last_at_or_before(availability.starts, first, last, x)
    starts = availability.starts.take(k, mode="clip")
    ends = availability.ends.take(k, mode="clip")
    final_start = availability.starts.take(last - 1, mode="clip")
    final_end = availability.ends.take(last - 1, mode="clip")
    before = k < first
    inside = ~before & (x < ends)
    since = np.where(inside, x - starts, x - ends)
    if availability.repeat:
        since = np.where(before, x + length - final_end, since)
        # A window that begins with the record may be the rest of the one that ended the last.
        rest = inside & (starts == 0.0) & (final_end == length)
        since = np.where(rest, x + length - final_start, since)
        since = np.where(rest & (final_start == 0.0), np.inf, since)
    else:
        since = np.where(before, np.inf, since)
    since = np.where(first == last, np.inf, since)
    return np.where(t >= availability.until, np.minimum(since, t - availability.until), since)


def _seconds_of_day(epoch: str) -> float:
    moment = pd.Timestamp(epoch)
    return float((moment - moment.normalize()).total_seconds())
