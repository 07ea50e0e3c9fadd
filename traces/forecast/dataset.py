"""Examples to learn from and to test on: devices' observations, and their behaviour after.

Labels come from the traces by the same windows and integrals as `trips`, up to an instant that
belongs to the part and no later, nor later than the device was logged: a label that would need more
is NaN, which every forecaster and score leaves out. Origins are drawn from two streams, any time
and time online, since phones that are online are rare.

Devices and time are split together: a forecaster is tested on devices that it did not learn from,
at later instants than any it learnt from. Fewer than five devices are split by time alone. The
split follows from a seed, so training and testing agree on it without a file.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from fedstale.errors import TraceError
from fedstale.traces import DAY_S, Array, Index, TraceSet, broadcast, outline, stream
from fedstale.traces.forecast.observation import (
    RATE_HORIZONS_S,
    RATES,
    Observation,
    TraceObserver,
    time_to_change,
)
from fedstale.traces.forecast.sessions import HORIZONS_S

SHORT_HISTORY = 0.2
"""Share of the examples to learn from whose device remembers only a part of its history."""
TURN_SHARE = 0.625
"""Share of the median record that may be learnt from."""
LEAST_DAYS = 7
"""Record in days of fewer than five devices that are split by time: every hour several times."""
FEW = 5
"""Devices from which on devices are split, and resampled, and not time alone."""
_ATTEMPTS = 50


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Examples:
    """Observations and their outcomes, NaN beyond the end of the part."""

    observed: Observation
    """The histories."""
    survival: Array
    """1 if the device remained online, or offline, beyond the horizon; shape (n, horizons)."""
    available: Array
    """1 if the device was online at the horizon; shape (n, horizons)."""
    rates: Array
    """Mean rate over each horizon after the origin; shape (n, 3, rate horizons)."""
    new_session_survival: Array
    """Share of sessions that last beyond each horizon from their beginning; (horizons,)."""

    __repr__ = outline

    def __len__(self) -> int:
        return len(self.observed)

    def take(self, which: Index) -> "Examples":
        """Return some of the examples, by their positions."""
        return replace(
            self,
            observed=self.observed.take(which),
            survival=self.survival[which],
            available=self.available[which],
            rates=self.rates[which],
        )


def record_s(traces: TraceSet) -> Array:
    """Return how long each device's record is before it repeats or ends, in s; shape (devices,).

    It is the record of availability where that is known, since links and loads of composed devices
    are shared and repeat within it; otherwise the longest record of a rate.
    """
    channels = ("availability",) if traces.availability is not None else RATES
    known = [getattr(traces, c) for c in channels if getattr(traces, c) is not None]
    return np.max([np.minimum(c.record_s(), c.until) for c in known], axis=0)


def log_spans(traces: TraceSet, devices: Index) -> tuple[Index, Array, Array]:
    """Compute the spans in which devices were logged for the first time, gap by gap.

    What holds at any time, as of generated devices, is taken as logged for one record: its
    repetition brings nothing new.

    Args:
        traces: of the devices.
        devices: positions; shape (n,).

    Returns:
        Place of the device in `devices`, start and end in s, by device; shape (spans,), at least
        one for each device.
    """
    whole = record_s(traces)[devices]
    availability = traces.availability
    if availability is None:
        return np.arange(devices.size), np.zeros(devices.size), whole
    row = availability.rows[devices]
    start = np.mod(availability.log_starts[row] - availability.shifts[devices], whole)
    which, since, until = availability.stretches(devices)
    end = np.minimum(start[which] + until, availability.until)
    endless = np.isinf(availability.logs_s[row])[which]
    return (
        which,
        np.where(endless, 0.0, start[which] + since),
        np.where(endless, whole[which], end),
    )


def targets_at(
    traces: TraceSet, devices: Index, now: Array, until: Array
) -> tuple[Array, Array, Array]:
    """Compute each device's behaviour after an instant, as far as it is known before another.

    Args:
        traces: the devices.
        devices: positions; shape (n,).
        now: origins in s; shape (n,).
        until: instant from which on nothing may be known, in s; shape (n,).

    Returns:
        Survival, being online and rates, as in `Examples`.
    """
    n = devices.size
    survival, available = np.full((2, n, HORIZONS_S.size), np.nan)
    if (availability := traces.availability) is not None:
        # A change that was observed also counts only if survival could have been: else the last
        # origins of a part would have changes alone.
        known = (until - now)[:, None] > HORIZONS_S
        change = time_to_change(availability, devices, now)[:, None]
        survival = np.where(known, change > HORIZONS_S, np.nan)
        then = now[:, None] + HORIZONS_S
        online = availability.is_available(np.repeat(devices, HORIZONS_S.size), then.ravel())
        available = np.where(known, online.reshape(then.shape), np.nan)
    end = now[:, None] + RATE_HORIZONS_S
    inside = end <= until[:, None]
    each, start = np.broadcast_arrays(devices[:, None], now[:, None], end)[:2]
    rates = np.full((n, len(RATES), RATE_HORIZONS_S.size), np.nan)
    for i, name in enumerate(RATES):
        series = getattr(traces, name)
        if series is not None and inside.any():
            amounts = np.full(end.shape, np.nan)
            amounts[inside] = series.integral(each[inside], start[inside], end[inside])
            rates[:, i] = amounts / RATE_HORIZONS_S
    return survival, available, rates


def examples_at(
    observer: TraceObserver,
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
        until: instant from which on nothing may be known, in s; scalar or shape (n,). A device's
            log may end earlier.
        history_s: how long devices remember, in s; scalar or shape (n,).
    """
    observed = observer.at(devices, now, history_s=history_s)
    limit = broadcast(until, observed.now.shape)
    limit = np.minimum(limit, observer.traces.log_at(observed.devices, observed.now)[1])
    survival, available, rates = targets_at(observer.traces, observed.devices, observed.now, limit)
    return Examples(
        observed=observed,
        survival=survival,
        available=available,
        rates=rates,
        new_session_survival=_new_session_survival(
            observer.traces, np.unique(observed.devices), float(limit.max(initial=0.0))
        ),
    )


def draw(
    observer: TraceObserver,
    devices: npt.ArrayLike,
    *,
    start: float,
    until: float,
    n: int,
    seed: int,
    short_history: float = 0.0,
    balanced: bool = True,
) -> Examples:
    """Return examples at origins drawn at random.

    Args:
        observer: of the devices' traces.
        devices: positions to draw from; shape (m,).
        start: first origin in s.
        until: instant in s before which origins and labels lie; a device's own log may end earlier.
        n: number of examples, >= 1.
        seed: of the draw.
        short_history: share of the examples whose device remembers only a part of its history,
            down to nothing, as one does that has just joined.
        balanced: whether half of the origins are among devices online, of which there are few.

    Raises:
        TraceError: there is no time to draw from.
    """
    devices = np.asarray(devices, dtype=np.int64)
    which, begins, ends = log_spans(observer.traces, devices)
    begins, ends = np.maximum(begins, start), np.minimum(ends, until)
    open_ = np.flatnonzero(ends > begins)
    if open_.size == 0 or n < 1:
        raise TraceError(
            f"no log to draw {n} origins from lies in the part [{start}, {until}) s: devices were "
            "logged at other times"
        )
    rng = np.random.default_rng(seed)
    part = devices[which[open_]], begins[open_], ends[open_]
    which, when = _anywhere(part, n, rng)
    availability = observer.traces.availability
    for _ in range(_ATTEMPTS if balanced else 0):
        if availability is None:
            break
        online = availability.is_available(part[0][which], when)
        spare = np.flatnonzero(~online)[: max(0, n // 2 - int(online.sum()))]
        if spare.size == 0:
            break
        which[spare], when[spare] = _anywhere(part, spare.size, rng)
    memory = np.full(n, np.inf)
    short = rng.random(n) < short_history
    so_far = when - part[1][which]
    memory[short] = so_far[short] * rng.random(int(short.sum())) ** 3
    memory[short & (rng.random(n) < 0.25)] = 0.0
    return examples_at(observer, part[0][which], when, until=part[2][which], history_s=memory)


def _anywhere(
    part: tuple[Index, Array, Array], n: int, rng: np.random.Generator
) -> tuple[Index, Array]:
    """Return n origins, uniform over all the time of all the devices: places in the part, instants.

    Args:
        part: devices, and from when to when each may be drawn, in s; shape (m,) each.
        n: how many.
        rng: draws.
    """
    _, begins, ends = part
    edges = np.cumsum(ends - begins)
    place = rng.random(n) * edges[-1]
    which = np.minimum(np.searchsorted(edges, place, side="right"), begins.size - 1)
    return which, begins[which] + rng.random(n) * (ends[which] - begins[which])


def _new_session_survival(traces: TraceSet, devices: Index, until: float) -> Array:
    availability = traces.availability
    if availability is None:
        return np.ones(HORIZONS_S.size)
    which, starts, ends = availability.sessions(devices)
    owner, lasts_s = devices[which], ends - starts
    begin = starts - availability.shifts[owner]
    if availability.repeat:
        begin = np.where(begin < 0, begin + availability.record_s()[owner], begin)
    known_since, last = availability.log_at(owner, begin.clip(min=0.0))
    last = np.minimum(last, until)
    # After a gap a session may have begun within it.
    begun = (begin >= 0) & ((known_since < begin) | (availability.gap_starts.size == 0))
    known = begun[:, None] & (begin[:, None] + HORIZONS_S <= last[:, None])
    lasts = lasts_s[:, None] > HORIZONS_S
    result = ((known & lasts).sum(axis=0) + 0.5) / (known.sum(axis=0) + 1.0)
    return np.minimum.accumulate(result)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Split:
    """Three sets of devices, and the instant between learning and testing.

    Of few devices each set has all: what is learnt from ends where the validation begins.
    """

    training: Index
    """Positions of the devices to learn from, before `learnt`."""
    validation: Index
    """Positions of the devices to stop early and to calibrate on, from `validated` to `turn`."""
    testing: Index
    """Positions of the devices to test on, from `turn` on."""
    learnt: float
    """Instant in s: `turn`, or of few devices an earlier one."""
    validated: float
    """Instant in s: 0, or of few devices `learnt`."""
    turn: float
    """Instant in s."""
    end: float
    """End of the last log in s."""

    __repr__ = outline


def split(traces: TraceSet, *, seed: int) -> Split:
    """Return 60, 20 and 20 % of the devices, and the instant that ends the learning.

    Fewer than five devices are all in each part, and the time is split: the last day before the
    end of the learning, or its last fifth, validates.

    Args:
        traces: the devices.
        seed: of the draw.

    Raises:
        TraceError: there are fewer than five devices, with a record that is too short.

    Example:
        >>> parts = split(TraceSet.ideal(10), seed=0)
        >>> parts.training.size, parts.validation.size, parts.testing.size
        (6, 2, 2)
    """
    n = traces.n_devices
    if n < FEW:
        return _split_by_time(traces)
    order = stream(seed, 5).permutation(n)
    first, second = round(0.6 * n), round(0.8 * n)
    lengths, ends = record_s(traces), log_spans(traces, np.arange(n))[2]
    turn = TURN_SHARE * float(np.median(lengths))
    return Split(
        training=np.sort(order[:first]),
        validation=np.sort(order[first:second]),
        testing=np.sort(order[second:]),
        learnt=turn,
        validated=0.0,
        turn=turn,
        end=float(ends.max()),
    )


def _split_by_time(traces: TraceSet) -> Split:
    everyone = np.arange(traces.n_devices)
    _, begins, ends = log_spans(traces, everyone)
    begin, end = float(begins.min()), float(ends.max())
    # A recorder that is told to go on for a week ends with the reading before.
    days = (end - begin) / DAY_S
    missing = LEAST_DAYS - days - 1.0 / 24.0
    if missing > 0.0:
        raise TraceError(
            f"devices: {everyone.size}, with a record of {days:.1f} days: expected at least {FEW} "
            f"devices, or {LEAST_DAYS} days to learn on the first and test on the last; record "
            f"{np.ceil(10 * missing) / 10:.1f} days more"
        )
    turn = begin + TURN_SHARE * (end - begin)
    late = turn - max(DAY_S, 0.2 * (turn - begin))
    return Split(
        training=everyone,
        validation=everyone,
        testing=everyone,
        learnt=late,
        validated=late,
        turn=turn,
        end=end,
    )


def draw_parts(traces: TraceSet, *, n: int, seed: int) -> tuple[Examples, Examples]:
    """Return examples to learn from, and a fifth as many to stop early on.

    Args:
        traces: the devices.
        n: number of examples to learn from.
        seed: of the split and of the draw.
    """
    parts = split(traces, seed=seed)
    drawn = partial(draw, TraceObserver(traces), short_history=SHORT_HISTORY)
    training = drawn(parts.training, start=0.0, until=parts.learnt, n=n, seed=seed)
    start, n_held_out = parts.validated, max(n // 5, 100)
    held_out = drawn(parts.validation, start=start, until=parts.turn, n=n_held_out, seed=seed + 1)
    return training, held_out
