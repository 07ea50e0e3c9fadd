"""Availability of a generated population: devices that come and go with the hours of the day.

A device is never online, or belongs to a group. In its group it comes in bouts: sessions with short
pauses between them, then a long gap. A gap is drawn in operational time, which runs fast in the
hours in which such devices come and slowly in the others (the time change of an inhomogeneous
renewal process), so that rare devices too come at their hours. Lengths follow quantiles of the
recording, that of a session by the part of the day in which it starts.

Deliberately absent: weekdays, devices that know of each other, and hours that one device keeps and
no other does: yesterday says less of a generated phone than of a recorded one.
"""

from dataclasses import dataclass

import numpy as np

from fedstale.errors import TraceError
from fedstale.traces.arrays import DAY_S, Array, Index, offsets_of, rounded
from fedstale.traces.availability import Availability

LEVELS = np.array([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0])
"""Levels of all stored quantiles; between them, logarithms are interpolated."""
PARTS = 8
"""Parts of the day, from midnight, that have session lengths of their own."""
_PAUSE_S = 1800.0
_BURN_IN_S = 2 * DAY_S
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
    gap_s: tuple[float, ...]
    """Quantiles of the gap between bouts, in operational seconds, at `LEVELS`."""
    pause_s: tuple[float, ...]
    """Quantiles of the pause within a bout, in s, at `LEVELS`."""
    session_s: tuple[tuple[float, ...], ...]
    """For each part of the day, quantiles of the length of a session, in s, at `LEVELS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diurnal:
    """A population of groups; what their weights leave to 1 is never online."""

    groups: tuple[Group, ...]
    """The groups, rarest devices first, and of alike those first that come at the other hours."""


def draw(model: Diurnal, n: int, days: int, rng: np.random.Generator) -> tuple[Array, Array, Index]:
    """Return windows of n devices over whole days, from a local midnight.

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
    before = np.full(active.size, -_BURN_IN_S)
    t[active] = tables.after(
        group[active], before, u[1] * _interpolated(tables.gap, group[active], u[0])
    )
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
        pause = stop + _interpolated(tables.pause, of, u[2])
        # A gap of less than a second would be no gap to a recorder.
        gap = np.maximum(tables.after(of, stop, _interpolated(tables.gap, of, u[2])), stop + 1.0)
        t[active] = np.where(again, pause, gap)
        active = active[t[active] < end]
    if not found:
        return np.empty(0), np.empty(0), np.zeros(n, dtype=np.int64)
    owner = np.concatenate([f[0] for f in found])
    order = np.argsort(owner, kind="stable")
    starts = np.concatenate([f[1] for f in found])[order]
    ends = np.concatenate([f[2] for f in found])[order]
    return starts, ends, np.bincount(owner, minlength=n)


def fit(availability: Availability, epoch_s: float = 0.0) -> Diurnal:
    """Return the population whose replay would look like a recording's replay.

    The recording is taken as a circle, as it is replayed: the gap from a device's last window leads
    to its first. Devices are grouped by the share of time they are online, then by their hours:
    those that are online when most devices are, and the others.

    Args:
        availability: the recording; each record a whole number of days.
        epoch_s: time of day of instant 0, in s.

    Raises:
        TraceError: fewer than 16 devices ever come, or records are not whole days.
    """
    length = availability.record_s()
    if np.any(np.mod(length, DAY_S) != 0):
        raise TraceError("availability to fit: expected records of whole days, cut or pad them")
    n = availability.n_devices
    owner, starts, ends = availability.sessions(np.arange(n))
    counts = np.bincount(owner, minlength=n)
    hour_s = np.array(
        [
            np.bincount(
                owner,
                weights=_time_in_hour(starts + epoch_s, ends + epoch_s, hour),
                minlength=n,
            )
            for hour in range(24)
        ]
    )
    share = hour_s.sum(axis=0) / length
    # The mean hour online of each device, as an angle, against that of all.
    mean_hour = np.exp(2j * np.pi / 24 * np.arange(24)) @ hour_s
    likeness = np.cos(np.angle(mean_hour) - np.angle(mean_hour.sum()))
    present = np.flatnonzero((counts > 0) & (share < 1))
    if present.size < _SHARE_GROUPS * _HOUR_GROUPS:
        raise TraceError(
            f"availability to fit: {present.size} devices come and go, expected >= "
            f"{_SHARE_GROUPS * _HOUR_GROUPS}"
        )
    following = np.concatenate([starts[1:], [0.0]])
    last = offsets_of(counts)[1:][counts > 0] - 1
    own_first = offsets_of(counts)[:-1][counts > 0]
    following[last] = starts[own_first] + length[counts > 0]
    groups = []
    for members in np.array_split(
        present[np.argsort(share[present], kind="stable")], _SHARE_GROUPS
    ):
        order = members[np.argsort(likeness[members], kind="stable")]
        halves = np.array_split(order, _HOUR_GROUPS)
        for half in halves:
            ours = np.isin(owner, half)
            groups.append(
                _fit_group(
                    half.size / n,
                    starts[ours] + epoch_s,
                    ends[ours] + epoch_s,
                    following[ours] + epoch_s,
                )
            )
    return Diurnal(groups=tuple(groups))


def _fit_group(weight: float, starts: Array, ends: Array, following: Array) -> Group:
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
    part = (np.mod(starts, DAY_S) // (DAY_S / PARTS)).astype(np.int64)
    lengths = ends - starts
    sessions = [lengths[part == p] for p in range(PARTS)]
    return Group(
        weight=float(weight),
        another=float(1 - long.mean()),
        hourly=rounded(hourly, 5),
        gap_s=_quantiles(operational),
        pause_s=_quantiles(gaps[~long] if (~long).any() else np.array([_PAUSE_S])),
        session_s=tuple(_quantiles(s if s.size else lengths) for s in sessions),
    )


class _Tables:
    """The groups of a model as arrays, looked up for many devices at once."""

    def __init__(self, model: Diurnal) -> None:
        groups = model.groups
        self.another = np.array([g.another for g in groups])
        self._flow = np.array([g.hourly for g in groups])
        self._cumulated = offsets_of_hours(self._flow)
        self.gap = np.log([g.gap_s for g in groups])
        self.pause = np.log([g.pause_s for g in groups])
        self._session = np.log([g.session_s for g in groups])

    def session(self, group: Index, start: Array, u: Array) -> Array:
        part = (np.mod(start, DAY_S) // (DAY_S / PARTS)).astype(np.int64)
        tables = self._session.reshape(-1, LEVELS.size)
        return _interpolated(tables, group * PARTS + part, u)

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


def _interpolated(logs: Array, group: Index, u: Array) -> Array:
    right = np.searchsorted(LEVELS[1:-1], u, side="right") + 1
    weight = (u - LEVELS[right - 1]) / (LEVELS[right] - LEVELS[right - 1])
    low = logs[group, right - 1]
    return np.exp(low + weight * (logs[group, right] - low))


def _operational(cumulated: Array, t: Array) -> Array:
    day, second = np.divmod(t, DAY_S)
    return day * DAY_S + np.interp(second, np.arange(25) * 3600.0, cumulated)


def _time_in_hour(start: Array, end: Array, hour: int) -> Array:
    def upto(t: Array) -> Array:
        day, second = np.divmod(t, DAY_S)
        return day * 3600 + np.clip(second - hour * 3600, 0, 3600)

    return upto(end) - upto(start)


def _quantiles(x: Array) -> tuple[float, ...]:
    return rounded(np.maximum(np.quantile(x, LEVELS), 1.0), 5)
