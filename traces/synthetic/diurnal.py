"""Availability of a generated population: devices that come and go with the hours.

A device is never online, or belongs to a group. In its group it comes in bouts: sessions with short
pauses between them, then a long gap. A gap is drawn in operational time, which runs fast in the
hours in which such devices come and slowly in the others (the time change of an inhomogeneous
renewal process), so that rare devices too come at their hours. Lengths follow quantiles of the
recording, that of a session by the part of the cycle in which it starts.

The cycle is a day or a week. Devices that keep opening hours come many times a day: in a week, gaps
too are drawn by the part in which they start, in real time, and groups are of habits: each week of
a recorded device counts by itself, and a generated device keeps one habit for good.

Deliberately absent: devices that know of each other, as those do that one shutdown ends; habits
that change; and, in a population without weekdays, hours that one device keeps and no other does:
yesterday says less of a generated phone than of a recorded one.
"""

from dataclasses import dataclass

import numpy as np

from fedstale.errors import TraceError
from fedstale.traces import DAY_S, Array, Availability, Index, rounded

PARTS = 8
"""Parts of each day of the cycle, from midnight, that have lengths of their own."""
WEEK_S = 7 * DAY_S
_PART_S = DAY_S / PARTS
# Where a few long lengths make up most of the time, the levels are close to 1.
_LEVELS = {
    DAY_S: (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0),
    WEEK_S: (0, 0.1, 0.25, 0.5, 0.7, 0.85, 0.93, 0.97, 0.985, 0.993, 0.997, 0.999, 1.0),
}
_PAUSE_S = 1800.0
# Cycles before instant 0 that are drawn and not kept.
_BURN_IN = 2
_SHARE_GROUPS = 8
_HOUR_GROUPS = 2
# No hour is closed: the flow of operational time must be invertible.
_LEAST_INTENSITY = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Devices that come and go alike."""

    weight: float
    """Share of the population, in (0, 1]."""
    another: float
    """Probability that a session is followed by another of the same bout."""
    hourly: tuple[float, ...]
    """Flow of operational time in each hour of the day, mean 1; 24 numbers > 0."""
    gap_s: tuple[tuple[float, ...], ...]
    """Quantiles of the gap between bouts, in operational seconds: of any gap, or for each part of
    the cycle, of a gap that starts in it."""
    pause_s: tuple[float, ...]
    """Quantiles of the pause within a bout, in s."""
    session_s: tuple[tuple[float, ...], ...]
    """For each part of the cycle, quantiles of the length of a session that starts in it, in s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diurnal:
    """A population of groups; what their weights leave to 1 is never online."""

    levels: tuple[float, ...]
    """Levels of all quantiles, from 0 to 1; between them, logarithms are interpolated."""
    groups: tuple[Group, ...]
    """The groups, rarest devices first, and of alike those first that come at the other hours."""

    @property
    def cycle_s(self) -> float:
        """Time after which the parts begin again, a day or a week from a Monday, in s."""
        return len(self.groups[0].session_s) * _PART_S


def draw(model: Diurnal, n: int, days: int, rng: np.random.Generator) -> tuple[Array, Array, Index]:
    """Return windows of n devices over whole days, from a local midnight, for a week a Monday's.

    Returns:
        Starts and ends in s, device after device, and the number of windows of each; a device
        that is never online has none.
    """
    end = days * DAY_S
    edges = np.cumsum([g.weight for g in model.groups])
    group = np.searchsorted(edges, rng.random(n), side="right")
    active = np.flatnonzero(group < len(model.groups))
    tables = _Tables(model)
    t = np.full(n, np.inf)
    u = rng.random((2, active.size))
    before = np.full(active.size, -_BURN_IN * model.cycle_s)
    t[active] = tables.after(group[active], before, u[1] * tables.gap(group[active], before, u[0]))
    active = active[t[active] < end]
    found: list[tuple[Index, Array, Array]] = []
    while active.size:
        # Only devices still on their way draw: the draws depend on the block alone.
        u = rng.random((3, active.size))
        of, start = group[active], t[active]
        stop = start + tables.session(of, start, u[0])
        seen = stop > 0
        found.append((active[seen], np.maximum(start[seen], 0.0), np.minimum(stop[seen], end)))
        again = u[1] < tables.another[of]
        pause = stop + tables.pause(of, u[2])
        # A gap of less than a second would be no gap to a recorder.
        gap = np.maximum(tables.after(of, stop, tables.gap(of, stop, u[2])), stop + 1.0)
        t[active] = np.where(again, pause, gap)
        active = active[t[active] < end]
    if not found:
        return np.empty(0), np.empty(0), np.zeros(n, dtype=np.int64)
    owner = np.concatenate([f[0] for f in found])
    order = np.argsort(owner, kind="stable")
    starts = np.concatenate([f[1] for f in found])[order]
    ends = np.concatenate([f[2] for f in found])[order]
    return starts, ends, np.bincount(owner, minlength=n)


def fit(availability: Availability, epoch_s: float = 0.0, *, cycle_s: float = DAY_S) -> Diurnal:
    """Return the population whose replay would look like a recording's replay.

    With a cycle of a day, a record is taken as a circle, as it is replayed: the gap from a device's
    last window leads to its first. With one of a week, what lies outside of a device's log is
    neither a gap nor a time online, and a member of a group is not a device but one of its weeks:
    the sessions that start in it, each with the gap that follows. Members are grouped by the share
    of time they are online, then by their hours: those that are online when most are, and the
    others.

    Args:
        availability: the recording; each record a whole number of days.
        epoch_s: time of the cycle at instant 0, in s.
        cycle_s: `DAY_S` or `WEEK_S`.

    Raises:
        TraceError: fewer than 16 members ever come, or records are not whole days.
    """
    length = availability.record_s()
    if np.any(np.mod(length, DAY_S) != 0):
        raise TraceError("availability to fit: expected records of whole days, cut or pad them")
    n = availability.n_devices
    device, starts, ends = availability.sessions(np.arange(n))
    following = np.concatenate([starts[1:], [0.0]])
    is_last = np.diff(device, append=-1) != 0
    is_first = np.diff(device, prepend=-1) != 0
    if cycle_s == DAY_S:
        following[is_last] = starts[is_first] + length[device[is_first]]
        member, size, stands_for_s = device, np.full(n, 1.0), length
    else:
        following[is_last] = np.nan
        week = ((starts + epoch_s) // cycle_s).astype(np.int64)
        _, found = np.unique(np.stack([device, week]), axis=1, return_inverse=True)
        member = found.astype(np.int64)
        until = np.where(is_last, ends, following)
        stands_for_s = np.bincount(member, weights=until - starts).astype(np.float64)
        # All that come have the weight of the devices that do.
        size = stands_for_s / stands_for_s.sum() * np.unique(device).size
    counts = np.bincount(member, minlength=size.size)
    hour_s = np.array(
        [
            np.bincount(
                member,
                weights=_time_in_hour(starts + epoch_s, ends + epoch_s, hour),
                minlength=size.size,
            )
            for hour in range(24)
        ]
    )
    share = hour_s.sum(axis=0) / stands_for_s
    # The mean hour online of each member, as an angle, against that of all.
    mean_hour = np.exp(2j * np.pi / 24 * np.arange(24)) @ hour_s
    likeness = np.cos(np.angle(mean_hour) - np.angle(mean_hour.sum()))
    present = np.flatnonzero((counts > 0) & ((share < 1) | (cycle_s != DAY_S)))
    if present.size < _SHARE_GROUPS * _HOUR_GROUPS:
        raise TraceError(
            f"availability to fit: {present.size} devices come and go, expected >= "
            f"{_SHARE_GROUPS * _HOUR_GROUPS}"
        )
    groups = []
    for members in np.array_split(
        present[np.argsort(share[present], kind="stable")], _SHARE_GROUPS
    ):
        order = members[np.argsort(likeness[members], kind="stable")]
        halves = np.array_split(order, _HOUR_GROUPS)
        for half in halves:
            ours = np.isin(member, half)
            groups.append(
                _fit_group(
                    float(size[half].sum() / n),
                    starts[ours] + epoch_s,
                    ends[ours] + epoch_s,
                    following[ours] + epoch_s,
                    cycle_s,
                )
            )
    return Diurnal(levels=_LEVELS[cycle_s], groups=tuple(groups))


def _fit_group(
    weight: float, starts: Array, ends: Array, following: Array, cycle_s: float
) -> Group:
    """Return a group's numbers; `following` is NaN where the log ends before another session."""
    levels = np.array(_LEVELS[cycle_s])
    lengths = ends - starts
    session_s = _by_part(starts, lengths, cycle_s, levels)
    if cycle_s != DAY_S:
        known = np.isfinite(following)
        ends, gaps = ends[known], (following - ends)[known]
        return Group(
            weight=weight,
            another=0.0,
            hourly=(1.0,) * 24,
            gap_s=_by_part(ends, gaps, cycle_s, levels),
            pause_s=_quantiles(np.array([_PAUSE_S]), levels),
            session_s=session_s,
        )
    gaps = following - ends
    long = gaps > _PAUSE_S
    arrivals = np.bincount((following[long] % DAY_S // 3600).astype(np.int64), minlength=24).astype(
        np.float64
    )
    # How long, in hours, such devices were waiting in each hour of the day.
    waiting = np.array(
        [_time_in_hour(ends[long], following[long], hour).sum() / 3600 for hour in range(24)]
    )
    hourly = arrivals / np.maximum(waiting, 1e-9)
    hourly = np.maximum(hourly / hourly.mean(), _LEAST_INTENSITY)
    hourly /= hourly.mean()
    cumulated = offsets_of_hours(hourly[None])[0]
    operational = _operational(cumulated, following[long]) - _operational(cumulated, ends[long])
    return Group(
        weight=weight,
        another=float(1 - long.mean()),
        hourly=rounded(hourly, 5),
        gap_s=(_quantiles(operational, levels),),
        pause_s=_quantiles(gaps[~long] if (~long).any() else np.array([_PAUSE_S]), levels),
        session_s=session_s,
    )


def _by_part(
    starts: Array, lengths: Array, cycle_s: float, levels: Array
) -> tuple[tuple[float, ...], ...]:
    """Return quantiles of lengths for each part of the cycle.

    Where none starts in a part, they are of all lengths; in a week, of what is left, in the middle
    of the part, of those that go on then, so that who comes at an odd hour goes with the others.
    """
    part = (np.mod(starts, cycle_s) // _PART_S).astype(np.int64)
    tables = []
    for p in range(round(cycle_s / _PART_S)):
        own = lengths[part == p]
        if own.size == 0 and cycle_s != DAY_S:
            left = lengths - np.mod((p + 0.5) * _PART_S - starts, cycle_s)
            own = left[left > 0]
        tables.append(_quantiles(own if own.size else lengths, levels))
    return tuple(tables)


class _Tables:
    """The groups of a model as arrays, looked up for many devices at once."""

    def __init__(self, model: Diurnal) -> None:
        groups = model.groups
        self.another = np.array([g.another for g in groups])
        self._cycle_s, self._levels = model.cycle_s, np.array(model.levels)
        self._flow = np.array([g.hourly for g in groups])
        self._cumulated = offsets_of_hours(self._flow)
        self._gap = np.log([g.gap_s for g in groups])
        self._pause = np.log([g.pause_s for g in groups])
        self._session = np.log([g.session_s for g in groups])

    def session(self, group: Index, start: Array, u: Array) -> Array:
        return self._by_part(self._session, group, start, u)

    def gap(self, group: Index, start: Array, u: Array) -> Array:
        return self._by_part(self._gap, group, start, u)

    def pause(self, group: Index, u: Array) -> Array:
        return _interpolated(self._levels, self._pause, group, u)

    def _by_part(self, logs: Array, group: Index, start: Array, u: Array) -> Array:
        parts = logs.shape[1]
        part = (np.mod(start, self._cycle_s) // (self._cycle_s / parts)).astype(np.int64)
        tables = logs.reshape(-1, self._levels.size)
        return _interpolated(self._levels, tables, group * parts + part, u)

    def after(self, group: Index, t: Array, operational_s: Array) -> Array:
        """Return when an amount of operational time has passed since t."""
        day, second = np.divmod(t, DAY_S)
        hour = np.minimum((second // 3600).astype(np.int64), 23)
        passed = self._cumulated[group, hour] + self._flow[group, hour] * (second - hour * 3600)
        days, rest = np.divmod(passed + operational_s, DAY_S)
        hour = (self._cumulated[group, 1:24] <= rest[:, None]).sum(axis=1)
        within = (rest - self._cumulated[group, hour]) / self._flow[group, hour]
        return (day + days) * DAY_S + hour * 3600 + within


def offsets_of_hours(hourly: Array) -> Array:
    """Return the operational time at each hour of the day; shape (groups, 24) to (groups, 25)."""
    return np.concatenate([np.zeros((len(hourly), 1)), np.cumsum(hourly * 3600, axis=1)], axis=1)


def _interpolated(levels: Array, logs: Array, row: Index, u: Array) -> Array:
    right = np.searchsorted(levels[1:-1], u, side="right") + 1
    weight = (u - levels[right - 1]) / (levels[right] - levels[right - 1])
    low = logs[row, right - 1]
    return np.exp(low + weight * (logs[row, right] - low))


def _operational(cumulated: Array, t: Array) -> Array:
    day, second = np.divmod(t, DAY_S)
    return day * DAY_S + np.interp(second, np.arange(25) * 3600.0, cumulated)


def _time_in_hour(start: Array, end: Array, hour: int) -> Array:
    def upto(t: Array) -> Array:
        day, second = np.divmod(t, DAY_S)
        return day * 3600 + np.clip(second - hour * 3600, 0, 3600)

    return upto(end) - upto(start)


def _quantiles(x: Array, levels: Array) -> tuple[float, ...]:
    return rounded(np.maximum(np.quantile(x, levels), 1.0), 5)
