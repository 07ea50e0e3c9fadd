"""A device's own sessions: their lengths, and its habits at this hour.

A device is online in sessions and offline in gaps; both are runs. From the runs since its log began
it counts what says how long the current one will last and whether it is online later: runs that got
as old as this one and then lasted on, the same time of earlier days, the same time of earlier
weeks. All of it is counts and sums, so that a forecaster can shrink them to those of a fleet.

Nothing here reads what happens after the instant, or before the log that the instant lies in.
"""

from dataclasses import dataclass, replace

import numpy as np

from fedstale.traces import (
    DAY_S,
    Array,
    Availability,
    Index,
    Mask,
    last_at_or_before,
    offsets_of,
    outline,
    row_time,
    running_sums,
)

HORIZONS_S: Array = np.array(
    [60.0, 300.0, 900.0, 1800.0, 3600.0, 7200.0, 14400.0, 28800.0, 57600.0, 86400.0]
)
"""Horizons of survival, of being online or of being offline, in s."""

RUNS = 24
"""Finished runs that are kept one by one, the newest first."""
RUNS_COUNTED = 64
"""Runs of the current kind, the last ones, that are counted by how long they lasted."""
RECENT_S: Array = np.array([3600.0, 14400.0, DAY_S, 7 * DAY_S])
"""Spans before the instant whose time online is counted, in s."""
CHANGES_S: Array = np.array([3600.0, DAY_S])
"""Spans before the instant whose changes are counted, in s."""
DAYS = 28
"""Days before the instant at which the same time is looked at."""
DAY_DECAY, WEEK_DECAY = 0.95, 0.9
"""Weight of a day against the day after it, and of a week against the week after it."""
AROUND_S = 1800.0
"""The same time of another day is from so long before it to so long after it, in s."""

# Horizons below half an hour share the half hour's look at other days.
_AHEAD_S, _OF_HORIZON = np.unique(np.maximum(HORIZONS_S, AROUND_S), return_inverse=True)
_WEEK = 7


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class OwnSessions:
    """What n devices counted of their own runs; h is the number of horizons, `HORIZONS_S`.

    A pair of numbers is a sum and the weight it is out of; their quotient is a share.
    """

    age_s: Array
    """For how long the current run lasts, as far as it was observed, in s; shape (n,)."""
    began: Mask
    """Whether its beginning was observed; shape (n,)."""
    lengths_s: Array
    """Lengths of the last finished runs in s, the newest first; the kinds alternate, and the first
    is not of the current kind. NaN where there was none; shape (n, RUNS)."""
    online_share: Array
    """Share of time online in each span of `RECENT_S`; NaN unknown; shape (n, spans)."""
    changes: Array
    """Number of changes in each span of `CHANGES_S`; shape (n, spans)."""
    longer: Array
    """Runs of the current kind that got older than this one and the horizon, out of those that got
    older than this one; shape (n, h, 2)."""
    lasted: Array
    """Earlier days on which the current state, at this time, lasted for the horizon, out of those
    on which it was the state; shape (n, h, 2)."""
    same_time: Array
    """Time online around this time plus the horizon on earlier days, in hours; shape (n, h, 2)."""
    same_week_time: Array
    """The same on the earlier days that are whole weeks before; shape (n, h, 2)."""
    yesterday: Array
    """Share of time online a day before this time plus the horizon; NaN unknown; shape (n, h)."""
    last_week: Array
    """The same a week before; shape (n, h)."""

    __repr__ = outline

    @classmethod
    def unknown(cls, age_s: Array) -> "OwnSessions":
        """Return the statistics of devices that have observed no change.

        Args:
            age_s: for how long each has been observed, in s; shape (n,).
        """
        n, h = age_s.size, HORIZONS_S.size
        pairs, nothing = np.zeros((n, h, 2)), np.full((n, h), np.nan)
        return cls(
            age_s=age_s,
            began=np.zeros(n, dtype=bool),
            lengths_s=np.full((n, RUNS), np.nan),
            online_share=np.full((n, RECENT_S.size), np.nan),
            changes=np.zeros((n, CHANGES_S.size)),
            longer=pairs,
            lasted=pairs,
            same_time=pairs,
            same_week_time=pairs,
            yesterday=nothing,
            last_week=nothing,
        )


class SessionHistory:
    """Looks up the runs of devices before any instant.

    Args:
        availability: of the devices.

    Example:
        >>> phone = SessionHistory(Availability.of([[(10.0, 20.0), (50.0, 60.0)]], 100.0))
        >>> own = phone.at(np.array([0]), np.array([95.0]), np.array([0.0]))
        >>> own.lengths_s[0, :3]
        array([10., 30., 10.])
        >>> phone.online_s(np.array([0]), np.array([[55.0, 20.0, 15.0, 0.0]]))
        array([[15., 10.,  5.,  0.]])
    """

    def __init__(self, availability: Availability) -> None:
        self.availability = availability
        # Windows through the end of a record are one, so every start and every end is a change.
        rows = np.arange(availability.lengths.size)
        of_rows = replace(availability, rows=rows.astype(np.int32), shifts=np.zeros(rows.size))
        owner, self._starts, self._ends = of_rows.sessions(rows)
        self._offsets = offsets_of(np.bincount(owner, minlength=rows.size))
        # A row that is always online has no change.
        whole = np.zeros(rows.size, dtype=bool)
        if availability.repeat:
            whole[owner] = self._ends - self._starts >= availability.lengths[owner]
        self._has_changes = (np.diff(self._offsets) > 0) & ~whole
        self._widths = availability.ends - availability.starts
        self._before, self._totals = running_sums(self._widths, availability.offsets)

    def online_s(self, devices: Index, t: Array) -> Array:
        """Return the time online up to each instant, in s, from a start of each device's own.

        Only differences within one row of the result have a meaning.

        Args:
            devices: positions of devices; shape (n,).
            t: instants in s, >= 0; shape (n, m). The first of each device sets the cycle of its
                record that is counted from.

        Returns:
            Shape (n, m).
        """
        availability = self.availability
        if availability.starts.size == 0:
            return np.zeros(t.shape)
        row = availability.rows[devices]
        x, cycles = row_time(availability, devices, t)
        first, last = availability.offsets[row], availability.offsets[row + 1]
        m = t.shape[1]
        k = last_at_or_before(
            availability.starts, np.repeat(first, m), np.repeat(last, m), x.reshape(-1)
        ).reshape(t.shape)
        inside = np.maximum(k, 0)
        x -= availability.starts[inside]
        np.minimum(x, self._widths[inside], out=x)
        x += self._before[inside]
        result = np.where(k >= first[:, None], x, 0.0)
        if availability.repeat:
            result += cycles * self._totals[row][:, None]
        return result

    def changes(self, devices: Index, now: Array, begin: Array, most: int) -> Array:
        """Return when each device came online or went offline, the newest change first.

        Args:
            devices: positions; shape (n,).
            now: instants in s; shape (n,).
            begin: when each history begins, in s; shape (n,).
            most: number of changes, >= 1.

        Returns:
            Instants in s, at most `now` and after `begin`; NaN from there on. Shape (n, most).
        """
        availability = self.availability
        row = availability.rows[devices]
        first, last = self._offsets[row], self._offsets[row + 1]
        count = last - first
        at = np.minimum(now, np.nextafter(availability.until, 0.0))
        base, x, _ = availability.locate(devices, at)
        length = availability.lengths[row]
        newest = last_at_or_before(self._starts, first, last, x) - first
        # Of session i - j come its end and its start: two changes, the later one perhaps ahead.
        back = newest[:, None] - np.arange(most // 2 + 1)
        known = self._has_changes[row][:, None] & (availability.repeat | (back >= 0))
        found = np.full((devices.size, 2 * back.shape[1]), np.nan)
        if self._starts.size:
            cycles, place = np.divmod(back, np.maximum(count, 1)[:, None])
            place = np.minimum(place + first[:, None], self._starts.size - 1)
            origin = base[:, None] + cycles * length[:, None]
            found[:, ::2] = np.where(known, self._ends[place] + origin, np.nan)
            found[:, 1::2] = np.where(known, self._starts[place] + origin, np.nan)
        is_online = found[:, 0] > at
        # Everything stops at once: whoever was online then went offline.
        found[is_online & (now > at), 0] = availability.until
        is_online &= now == at
        found[is_online, :-1] = found[is_online, 1:]
        found[~(found > begin[:, None])] = np.nan
        return found[:, :most]

    def at(self, devices: Index, now: Array, begin: Array) -> OwnSessions:
        """Compute the devices' statistics of their runs at an instant.

        Args:
            devices: positions; shape (n,).
            now: instants in s; shape (n,).
            begin: when each history begins, in s, at most `now`; shape (n,).
        """
        # So many days back, the longest horizon still reaches into a history.
        reach = (now - begin).max(initial=0.0) + _AHEAD_S[-1] + AROUND_S
        days = min(int(reach / DAY_S), DAYS)
        online, known = self._same_times(devices, now, begin, days)
        k = np.arange(1, days + 1)
        each_day: Array = np.power(DAY_DECAY, k - 1.0)
        each_week = np.where(k % _WEEK == 0, WEEK_DECAY ** (k // _WEEK - 1.0), 0.0)
        shares = _shares(online, known)
        nothing = np.full((devices.size, HORIZONS_S.size), np.nan)
        changes = self.changes(devices, now, begin, 2 * RUNS_COUNTED + 1)
        began = ~np.isnan(changes[:, 0])
        age = now - np.where(began, changes[:, 0], begin)
        lengths = changes[:, :-1] - changes[:, 1:]
        return OwnSessions(
            age_s=age,
            began=began,
            lengths_s=lengths[:, :RUNS],
            changes=np.sum(
                changes[:, :, None] > (now[:, None] - CHANGES_S)[:, None], axis=1, dtype=np.float64
            ),
            longer=_longer(lengths[:, 1::2], age),
            online_share=self._recent(devices, now, begin),
            lasted=self._lasted(devices, now, begin, days),
            same_time=_weighted(each_day, online, known),
            same_week_time=_weighted(each_week, online, known),
            yesterday=shares[:, 0] if days >= 1 else nothing,
            last_week=shares[:, _WEEK - 1] if days >= _WEEK else nothing,
        )

    def _recent(self, devices: Index, now: Array, begin: Array) -> Array:
        since = np.maximum(now[:, None] - RECENT_S, begin[:, None])
        online = self.online_s(devices, np.concatenate([now[:, None], since], axis=1))
        return _shares(online[:, :1] - online[:, 1:], now[:, None] - since)

    def _same_times(
        self, devices: Index, now: Array, begin: Array, days: int
    ) -> tuple[Array, Array]:
        """Return hours online, and known, around the same time of earlier days; (n, days, h)."""
        back = DAY_S * np.arange(1, days + 1)
        middle = now[:, None, None] - back[:, None] + _AHEAD_S
        edges = np.stack([middle - AROUND_S, middle + AROUND_S], axis=3)
        edges = np.clip(edges, begin[:, None, None, None], now[:, None, None, None])
        shape = (now.size, 2 * days * _AHEAD_S.size)
        flat = np.concatenate([now[:, None], edges.reshape(shape)], axis=1)
        online = self.online_s(devices, flat)[:, 1:].reshape(edges.shape)
        hours, known = ((x[..., 1] - x[..., 0]) / 3600.0 for x in (online, edges))
        return hours[:, :, _OF_HORIZON], known[:, :, _OF_HORIZON]

    def _lasted(self, devices: Index, now: Array, begin: Array, days: int) -> Array:
        availability = self.availability
        result = np.zeros((devices.size, HORIZONS_S.size, 2))
        online = availability.is_available(devices, now)
        for k in range(1, days + 1):
            then = now - k * DAY_S
            i = np.flatnonzero(then >= begin)
            if i.size == 0:
                break
            was_online = availability.is_available(devices[i], then[i])
            start, end = availability.window_at_or_after(devices[i], then[i])
            left = np.where(was_online, end, start) - then[i]
            alike = (was_online == online[i])[:, None]
            # Only what had come to its end by now is known, whether it lasted or not.
            resolved = alike & (then[i][:, None] + HORIZONS_S <= now[i][:, None])
            weight = DAY_DECAY ** (k - 1.0)
            result[i, :, 1] += weight * resolved
            result[i, :, 0] += weight * (resolved & (left[:, None] > HORIZONS_S))
        return result


def _longer(lengths: Array, age: Array) -> Array:
    """Return how many runs got older than this one and each horizon, and than this one alone.

    Args:
        lengths: of finished runs of the current kind in s, NaN where there was none; (n, runs).
        age: of the current run in s; shape (n,).
    """
    result = np.empty((age.size, HORIZONS_S.size, 2))
    result[:, :, 1] = (lengths > age[:, None]).sum(axis=1)[:, None]
    for h, horizon in enumerate(HORIZONS_S):
        result[:, h, 0] = (lengths > age[:, None] + horizon).sum(axis=1)
    return result


def _weighted(weights: Array, online: Array, known: Array) -> Array:
    """Return sums over days as pairs; shape (n, h, 2).

    One day is added after the other: a matrix product rounds otherwise for other numbers of
    devices.
    """
    sums = [(weights[:, None] * hours).sum(axis=1) for hours in (online, known)]
    return np.stack(sums, axis=2)


def _shares(amount: Array, whole: Array) -> Array:
    """Return amount / whole, NaN where the whole is 0."""
    return np.divide(amount, whole, out=np.full(amount.shape, np.nan), where=whole > 0)
