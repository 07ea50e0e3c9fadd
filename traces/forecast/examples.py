"""Pairs of what devices had seen and what they then did, to learn from and to test on.

Labels come from the traces by the same windows and integrals as `trips`, up to an instant that
belongs to the part and no later: a label that would need more is NaN, which every forecaster and
score leaves out. Origins are drawn from two streams, any time and time online, since phones that
can be asked are rare.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstale.errors import TraceError
from fedstale.traces.arrays import Array, Index
from fedstale.traces.forecast.grid import HORIZONS_S, RATE_HORIZONS_S, RATES
from fedstale.traces.forecast.observation import Observation, Observer, time_to_change
from fedstale.traces.trace_set import TraceSet


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Targets:
    """What devices did after their origins. What the part does not tell is NaN."""

    stays: Array
    """1 if the device remains as it is, there or away, beyond the horizon; shape (n, horizons)."""
    rates: Array
    """Mean rate over each horizon; shape (n, 3, rate horizons)."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Examples:
    """Observations and what followed them."""

    seen: Observation
    """The past."""
    targets: Targets
    """The future of it."""
    fresh: Array
    """Share of windows, of those that begin, which last beyond each horizon; (horizons,)."""

    def __len__(self) -> int:
        return len(self.seen)

    def take(self, which: npt.NDArray[Any]) -> "Examples":
        """Return some of the examples; `which` is positions or a mask."""
        targets = Targets(stays=self.targets.stays[which], rates=self.targets.rates[which])
        return Examples(seen=self.seen.take(which), targets=targets, fresh=self.fresh)


def record_s(traces: TraceSet) -> Array:
    """Return how long each device's record is before it repeats or ends, in s; shape (devices,).

    It is the record of availability where that is known, since links and loads of composed devices
    are shared and repeat within it; otherwise the longest record of a rate.
    """
    channels = ("availability",) if traces.availability is not None else RATES
    known = [getattr(traces, c) for c in channels if getattr(traces, c) is not None]
    return np.max([np.minimum(c.lengths[c.rows], c.until) for c in known], axis=0)


def targets_at(traces: TraceSet, devices: Index, now: Array, until: Array) -> Targets:
    """Return what each device does after an instant, as far as it is known before another.

    Args:
        traces: the devices.
        devices: positions; shape (n,).
        now: origins in s; shape (n,).
        until: instant from which on nothing may be known, in s; shape (n,).
    """
    n = devices.size
    stays = np.full((n, HORIZONS_S.size), np.nan)
    if traces.availability is not None:
        change = time_to_change(traces.availability, devices, now)[:, None]
        # Also a change that was seen counts only if staying would have been: else the last origins
        # of a part would know of nobody who stayed.
        stays = np.where((until - now)[:, None] >= HORIZONS_S, change > HORIZONS_S, np.nan)
    end = now[:, None] + RATE_HORIZONS_S
    inside = end <= until[:, None]
    who, start = np.broadcast_arrays(devices[:, None], now[:, None], end)[:2]
    rates = np.full((n, len(RATES), RATE_HORIZONS_S.size), np.nan)
    for i, name in enumerate(RATES):
        series = getattr(traces, name)
        if series is not None and inside.any():
            amounts = np.full(end.shape, np.nan)
            amounts[inside] = series.integral(who[inside], start[inside], end[inside])
            rates[:, i] = amounts / RATE_HORIZONS_S
    return Targets(stays=stays, rates=rates)


def examples_at(
    observer: Observer,
    devices: npt.ArrayLike,
    now: npt.ArrayLike,
    *,
    until: npt.ArrayLike,
    history_s: npt.ArrayLike = np.inf,
) -> Examples:
    """Return the examples of given origins.

    Args:
        observer: of the devices' traces.
        devices: positions; shape (n,).
        now: origins in s; scalar or shape (n,).
        until: instant from which on nothing may be known, in s; scalar or shape (n,).
        history_s: how long devices remember, in s; scalar or shape (n,).
    """
    seen = observer.at(devices, now, history_s=history_s)
    limit = np.broadcast_to(np.asarray(until, dtype=np.float64), seen.now.shape)
    return Examples(
        seen=seen,
        targets=targets_at(observer.traces, seen.devices, seen.now, limit),
        fresh=_fresh(observer.traces, np.unique(seen.devices), float(limit.max(initial=0.0))),
    )


def draw(
    observer: Observer,
    devices: npt.ArrayLike,
    *,
    start: float,
    until: float,
    n: int,
    seed: int,
    short_history: float = 0.0,
) -> Examples:
    """Return examples at origins drawn at random, half of them among devices online.

    Args:
        observer: of the devices' traces.
        devices: positions to draw from; shape (m,).
        start: first origin in s.
        until: instant in s before which origins and labels lie; a device's own record may end
            earlier.
        n: number of examples, >= 1.
        seed: of the draw.
        short_history: share of the examples whose device remembers only a part of its past, down
            to nothing, as one does that has just joined.

    Raises:
        TraceError: there is no time to draw from.
    """
    devices = np.asarray(devices, dtype=np.int64)
    ends = np.minimum(record_s(observer.traces)[devices], until)
    open_ = np.flatnonzero(ends > start)
    if open_.size == 0 or n < 1:
        raise TraceError(
            f"no time to draw {n} origins from: records end before the part [{start}, {until}) s"
        )
    rng = np.random.default_rng(seed)
    who, when = _anywhere(devices[open_], start, ends[open_], n, rng)
    if observer.traces.availability is not None:
        for _ in range(20):
            online = observer.traces.availability.is_available(who, when)
            spare = np.flatnonzero(~online)
            spare = spare[: max(0, n // 2 - int(online.sum()))]
            if spare.size == 0:
                break
            who[spare], when[spare] = _anywhere(devices[open_], start, ends[open_], spare.size, rng)
    memory = np.full(n, np.inf)
    short = rng.random(n) < short_history
    memory[short] = when[short] * rng.random(int(short.sum())) ** 3
    memory[short & (rng.random(n) < 0.25)] = 0.0
    limit = np.minimum(record_s(observer.traces)[who], until)
    return examples_at(observer, who, when, until=limit, history_s=memory)


def _anywhere(
    devices: Index, start: float, ends: Array, n: int, rng: np.random.Generator
) -> tuple[Index, Array]:
    """Return n origins, uniform over all the time of all the devices."""
    edges = np.cumsum(ends - start)
    place = rng.random(n) * edges[-1]
    which = np.minimum(np.searchsorted(edges, place, side="right"), devices.size - 1)
    return devices[which], start + rng.random(n) * (ends[which] - start)


def _fresh(traces: TraceSet, devices: Index, until: float) -> Array:
    availability = traces.availability
    if availability is None:
        return np.ones(HORIZONS_S.size)
    starts, lengths = [], []
    for device in devices:
        windows, length = availability.windows(int(device))
        shift = availability.shifts[device]
        begin = windows[:, 0] - shift
        begin = np.where(begin < 0, begin + length, begin) if availability.repeat else begin
        starts.append(begin)
        lengths.append(windows[:, 1] - windows[:, 0])
    begin, width = np.concatenate(starts), np.concatenate(lengths)
    result = np.ones(HORIZONS_S.size)
    for k, horizon in enumerate(HORIZONS_S):
        known = (begin >= 0) & (begin + horizon <= until)
        result[k] = (np.count_nonzero(width[known] > horizon) + 0.5) / (known.sum() + 1.0)
    return np.minimum.accumulate(result)
