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

from fedstale.traces import DAY_S, Array, Index

PARTS = 8
"""Parts of each day of the cycle, from midnight, that have lengths of their own."""
WEEK_S = 7 * DAY_S
_PART_S = DAY_S / PARTS
# Cycles before instant 0 that are drawn and not kept.
_BURN_IN = 2


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
