"""When each device is online: disjoint half-open windows, repeated or not.

The only question a job asks is "which window am I in, or which is next?", so windows are kept
sorted in one flat array and found by binary search.

A device that was not logged at an instant is in a third state: unknown. It counts as offline where
a state is needed, as in a simulation. So are gaps inside a log. What learns from devices, or is
tested on them, asks `log_at` how far what is known around an instant reaches, and looks no further
in either direction.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstale.errors import TraceError
from fedstale.traces.arrays import (
    DAY_S,
    Array,
    Channel,
    Index,
    Mask,
    broadcast,
    last_at_or_before,
    offsets_of,
    outline,
    ranges,
    rows_of,
)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Availability(Channel):
    """Windows in which devices can be reached and can compute, one list for each device.

    Build one with `Availability.of` or `Availability.always`.
    """

    starts: Array
    """Start of each window in s, sorted within a row; shape (windows,)."""
    ends: Array
    """End of each window in s, exclusive, at most the next start; shape (windows,)."""
    offsets: Index
    """First window of each row; shape (rows + 1,)."""
    log_starts: Array
    """When each row's log begins, in its record, in s; shape (rows,)."""
    logs_s: Array
    """For how long each row was logged, through the end of its record if need be, in s; inf for
    what is no recording and holds at any time; shape (rows,)."""
    gap_starts: Array = field(default_factory=lambda: np.empty(0))
    """Start of each gap inside a log, in s since the log's start, sorted within a row; nothing is
    known in it. Shape (gaps,)."""
    gap_ends: Array = field(default_factory=lambda: np.empty(0))
    """End of each gap, exclusive, before the end of the log; shape (gaps,)."""
    gap_offsets: Index = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    """First gap of each row; shape (rows + 1,), or (1,) where there is no gap at all."""

    __repr__ = outline

    @classmethod
    def of(
        cls,
        rows: Sequence[npt.ArrayLike],
        lengths: npt.ArrayLike,
        *,
        logs: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
        repeat: bool = True,
    ) -> "Availability":
        """Return the availability of devices from their windows.

        Args:
            rows: windows of each row as (start, end) in s, sorted, not touching; each of shape
                (windows, 2), and of shape (0, 2) for a device that is never online.
            lengths: end of each row's record in s; scalar or shape (rows,).
            logs: start of each row's log in s and its length in s; each a scalar or of shape
                (rows,). None if the whole record was logged.
            repeat: whether a row starts again at its end.

        Raises:
            TraceError: windows are empty, unsorted, overlap, touch or leave the record, or a log
                does.

        Example:
            >>> phone = Availability.of([[(10.0, 20.0)]], 100.0)
            >>> phone.window_at_or_after([0, 0], [15.0, 20.0])
            (array([ 15., 110.]), array([ 20., 120.]))
        """
        starts, ends, counts = _flat(rows)
        return cls.packed(starts, ends, counts, lengths, logs=logs, repeat=repeat)

    @classmethod
    def packed(
        cls,
        starts: Array,
        ends: Array,
        counts: npt.ArrayLike,
        lengths: npt.ArrayLike,
        *,
        logs: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
        repeat: bool = True,
    ) -> "Availability":
        """Return the availability of devices from flat arrays of windows.

        Args:
            starts: starts in s, row after row; shape (windows,).
            ends: ends in s; shape (windows,).
            counts: number of windows of each row; shape (rows,).
            lengths: end of each row's record in s; scalar or shape (rows,).
            logs: as for `of`.
            repeat: whether a row starts again at its end.

        Raises:
            TraceError: windows are empty, unsorted, overlap, touch or leave the record, or a log
                does.
        """
        offsets = offsets_of(counts)
        n_rows = offsets.size - 1
        lengths, log_starts, logs_s = (
            np.array(broadcast(x, (n_rows,)))
            for x in (lengths, *((0.0, lengths) if logs is None else logs))
        )
        if not np.all(np.isfinite(lengths) & (lengths > 0)):
            raise TraceError("the record of a device must have a finite length > 0 s")
        if not np.all((log_starts >= 0) & (log_starts < lengths) & (logs_s >= 0)):
            raise TraceError("the log of a device must start in its record and last >= 0 s")
        row = np.repeat(np.arange(n_rows), np.diff(offsets))
        follows = np.zeros(starts.size, dtype=bool)
        follows[1:] = row[1:] == row[:-1]
        previous_end = np.concatenate([[-np.inf], ends[:-1]]) if ends.size else ends
        wrong = ~((starts >= 0) & (starts < ends) & (ends <= lengths[row]))
        wrong |= follows & (starts <= previous_end)
        if wrong.any():
            k = int(np.flatnonzero(wrong)[0])
            raise TraceError(
                f"window [{starts[k]}, {ends[k]}) of row {row[k]}: expected windows inside "
                f"[0, {lengths[row[k]]}), sorted, with gaps between them"
            )
        return cls(
            starts=np.ascontiguousarray(starts),
            ends=np.ascontiguousarray(ends),
            offsets=offsets,
            lengths=lengths,
            log_starts=log_starts,
            logs_s=logs_s,
            rows=np.arange(n_rows, dtype=np.int32),
            shifts=np.zeros(n_rows),
            repeat=repeat,
        )

    def with_gaps(self, starts: Array, ends: Array, counts: npt.ArrayLike) -> "Availability":
        """Return the same devices, of which nothing is known in gaps inside their logs.

        Args:
            starts: start of each gap in s since the log's start, row after row; shape (gaps,).
            ends: end of each gap, exclusive, before that of the log; shape (gaps,).
            counts: number of gaps of each row; shape (rows,).

        Raises:
            TraceError: gaps are empty, unsorted, touch, leave the log or hold a part of a window.

        Example:
            >>> phone = Availability.of([[(0.0, 20.0), (50.0, 60.0)]], 100.0)
            >>> gappy = phone.with_gaps(np.array([20.0]), np.array([45.0]), [1])
            >>> gappy.log_at([0, 0, 0], [5.0, 30.0, 50.0])
            (array([ 0., 30., 45.]), array([ 20.,  30., 100.]))
        """
        offsets = offsets_of(counts)
        if starts.size == 0:
            return self
        row = np.repeat(np.arange(offsets.size - 1), np.diff(offsets))
        before = np.where(np.append(True, np.diff(row) > 0), 0.0, np.append(0.0, ends[:-1]))
        wrong = ~((before < starts) & (starts < ends) & (ends < self.logs_s[row]))
        # A window overlaps a gap if the last one that starts before the gap's end ends in it.
        begins = np.mod(self.log_starts[row] + starts, self.lengths[row])
        last = last_at_or_before(
            self.starts,
            self.offsets[row],
            self.offsets[row + 1],
            begins + (ends - starts) - 1e-6,
        )
        if self.ends.size:
            wrong |= (last >= self.offsets[row]) & (
                self.ends.take(last, mode="clip") > begins + 1e-6
            )
        if wrong.any():
            k = int(np.flatnonzero(wrong)[0])
            raise TraceError(
                f"gap [{starts[k]}, {ends[k]}) of row {row[k]}: expected gaps inside the log of "
                f"{self.logs_s[row[k]]} s, sorted, apart, and without a window in them"
            )
        return replace(self, gap_starts=starts, gap_ends=ends, gap_offsets=offsets)

    @classmethod
    def repaired(
        cls, owner: Index, starts: Array, ends: Array, lengths: Array, *, join_s: float
    ) -> tuple["Availability", Counter[str]]:
        """Return the availability of devices from windows as recordings have them.

        Windows that end before they start, or that lie outside the record, have no single reading
        and are dropped. Windows across an edge of the record are cut there. Windows that overlap,
        touch or are at most `join_s` apart are one. What then has no length was an instant, and is
        dropped.

        Args:
            owner: device of each window, 0 to devices - 1; shape (windows,).
            starts: in s; shape (windows,).
            ends: in s; shape (windows,).
            lengths: end of each device's record in s, > 0; shape (devices,).
            join_s: longest gap that is not a gap, in s, >= 0.

        Returns:
            The devices, and counts of repairs by kind.

        Example:
            >>> owner, lengths = np.array([0, 0, 0]), np.array([100.0])
            >>> starts, ends = np.array([20.0, -5.0, 31.0]), np.array([30.0, 4.0, 31.0])
            >>> phone, counts = Availability.repaired(owner, starts, ends, lengths, join_s=1.0)
            >>> phone.starts, phone.ends
            (array([ 0., 20.]), array([ 4., 31.]))
            >>> counts["cut: started before instant 0"], counts["merged: at most 1 s apart"]
            (1, 1)
        """
        counts: Counter[str] = Counter()
        counts["sorted: out of order"] = int(
            np.count_nonzero((starts[1:] < starts[:-1]) & (owner[1:] == owner[:-1]))
        )

        def keep(good: Mask, kind: str) -> None:
            nonlocal owner, starts, ends
            counts[kind] += int(good.size - np.count_nonzero(good))
            owner, starts, ends = owner[good], starts[good], ends[good]

        keep(np.isfinite(starts) & np.isfinite(ends), "dropped: not a number")
        keep(ends >= starts, "dropped: end before start")
        keep(ends >= 0, "dropped: before instant 0")
        keep(starts <= lengths[owner], "dropped: after the end of the record")
        counts["cut: started before instant 0"] = int(np.count_nonzero(starts < 0))
        counts["cut: went on after the end of the record"] = int(
            np.count_nonzero(ends > lengths[owner])
        )
        order = np.lexsort((ends, starts, owner))
        owner = owner[order]
        starts = np.maximum(starts[order], 0.0)
        ends = np.minimum(ends[order], lengths[owner])

        first = _first_of_each_run(owner, starts, ends, join_s, counts)
        if starts.size:
            owner, starts, ends = owner[first], starts[first], np.maximum.reduceat(ends, first)
        keep(ends > starts, "dropped: no length")
        per_device = np.bincount(owner, minlength=lengths.size)
        return cls.packed(starts, ends, per_device, lengths), counts

    def folded(self, began: Array, logs_s: Array) -> "Availability":
        """Return logs as records of whole days, whose hours are those of the clock.

        Each record is the fewest days that hold its log, so it repeats at the same hours. Played
        from instant 0, the log comes once where it was in its week, and repeats from then on.

        Args:
            began: instant 0 of each row, in s since the midnight that the records begin with;
                shape (rows,).
            logs_s: for how long each row was logged, in s, >= 0; shape (rows,).

        Example:
            >>> night = Availability.of([[(0.0, 7200.0)]], 10_000.0)
            >>> phone = night.folded(np.array([23 * 3600.0]), np.array([10_000.0]))
            >>> phone.windows(0)
            (array([[    0.,  3600.],
                   [82800., 86400.]]), 86400.0)
        """
        lengths = np.maximum(np.ceil(logs_s / DAY_S), 1.0) * DAY_S
        log_starts = np.mod(np.mod(began, 7 * DAY_S), lengths)
        owner = np.repeat(np.arange(lengths.size), np.diff(self.offsets))
        starts = np.mod(log_starts[owner] + self.starts, lengths[owner])
        ends = starts + (self.ends - self.starts)
        # What passes the end of the record goes on at its beginning.
        over = np.flatnonzero(ends > lengths[owner])
        rest = ends[over] - lengths[owner[over]]
        folded, _ = self.repaired(
            np.concatenate([owner, owner[over]]),
            np.concatenate([starts, np.zeros(over.size)]),
            np.concatenate([np.minimum(ends, lengths[owner]), rest]),
            lengths,
            join_s=0.0,
        )
        return replace(folded, log_starts=log_starts, logs_s=logs_s)

    @classmethod
    def joined(cls, parts: Sequence["Availability"]) -> "Availability":
        """Return the devices of several sets whose records repeat, one after the other.

        Example:
            >>> both = Availability.joined([Availability.of([[(5.0, 9.0)]], 10.0)] * 2)
            >>> both.n_devices, both.window_at_or_after([1], [0.0])
            (2, (array([5.]), array([9.])))
        """
        alike: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("starts", "ends", "lengths", "log_starts", "logs_s", "shifts")
        }
        counts = np.concatenate([np.diff(part.offsets) for part in parts])
        both = cls(offsets=offsets_of(counts), rows=rows_of(parts), repeat=True, **alike)
        gaps = [part.gaps() for part in parts]
        return both.with_gaps(*(np.concatenate(each) for each in zip(*gaps, strict=True)))

    def gaps(self) -> tuple[Array, Array, Index]:
        """Return start and end of all gaps, in s since the log's start, and each row's number."""
        counts = np.diff(self.gap_offsets)
        none = np.zeros(self.lengths.size, dtype=np.int64)
        return self.gap_starts, self.gap_ends, counts if counts.size else none

    def known_s(self) -> Array:
        """Return for how long each row is known: its log without the gaps, in s; shape (rows,)."""
        starts, ends, counts = self.gaps()
        row = np.repeat(np.arange(counts.size), counts)
        return self.logs_s - np.bincount(row, ends - starts, minlength=counts.size)

    def stretches(self, devices: Index) -> tuple[Index, Array, Array]:
        """Return the parts of devices' logs between gaps, in s since the log's start.

        Args:
            devices: positions; shape (n,).

        Returns:
            Place of the device in `devices`, start and end; shape (stretches,).
        """
        gap_starts, gap_ends, counts = self.gaps()
        rows = self.rows[devices]
        gap = ranges(offsets_of(counts)[rows], counts[rows])
        owner = np.repeat(np.arange(devices.size), counts[rows])
        who = np.concatenate([np.arange(devices.size), owner])
        order = np.argsort(who, kind="stable")
        starts = np.concatenate([np.zeros(devices.size), gap_ends[gap]])[order]
        lasts = np.argsort(np.concatenate([owner, np.arange(devices.size)]), kind="stable")
        ends = np.concatenate([gap_starts[gap], self.logs_s[rows]])[lasts]
        return who[order], starts, ends

    @classmethod
    def always(cls, n: int) -> "Availability":
        """Return n devices that never leave.

        Example:
            >>> Availability.always(1).window_at_or_after([0], [7.0])
            (array([7.]), array([inf]))
        """
        one = cls.of([[(0.0, 1.0)]], 1.0, logs=(0.0, np.inf))
        return replace(one, rows=np.zeros(n, dtype=np.int32), shifts=np.zeros(n))

    def windows(self, device: int) -> tuple[Array, float]:
        """Return the windows of one device's row, shape (windows, 2), and the row's length in s.

        The device's shift is not applied: the row's own time is used.
        """
        row = int(self.rows[device])
        part = slice(self.offsets[row], self.offsets[row + 1])
        return np.stack([self.starts[part], self.ends[part]], axis=1), float(self.lengths[row])

    def sessions(self, devices: Index) -> tuple[Index, Array, Array]:
        """Return the windows of some devices' rows, those through the end of a record as one.

        Args:
            devices: positions; shape (n,).

        Returns:
            Place of the device in `devices`, start and end in s, in the row's time, where an end
            may lie beyond the record's; shape (sessions,).
        """
        rows = self.rows[devices]
        counts = np.diff(self.offsets)[rows]
        windows = ranges(self.offsets[rows], counts)
        owner = np.repeat(np.arange(devices.size), counts)
        starts, ends = self.starts[windows], self.ends[windows]
        offsets = offsets_of(counts)
        first, last = offsets[:-1][counts > 1], offsets[1:][counts > 1] - 1
        length = self.lengths[rows][counts > 1]
        through = (starts[first] == 0.0) & (ends[last] == length) & self.repeat
        ends[last[through]] += ends[first[through]]
        kept = np.ones(starts.size, dtype=bool)
        kept[first[through]] = False
        return owner[kept], starts[kept], ends[kept]

    def log_at(self, devices: npt.ArrayLike, t: npt.ArrayLike) -> tuple[Array, Array]:
        """Look up the span around an instant in which each device was logged without a gap.

        A record that repeats is another log each time: whoever saw the last one would know this
        one by heart.

        Args:
            devices: positions of devices; shape (n,).
            t: instants in s, >= 0; scalar or shape (n,).

        Returns:
            Start, at most t, and end of the log in s; both t where the state at t is unknown.
            Shape (n,).

        Example:
            >>> night = Availability.of([[(10.0, 20.0)]], 100.0, logs=(90.0, 40.0))
            >>> night.log_at([0, 0, 0], [15.0, 50.0, 95.0])
            (array([-10.,  50.,  90.]), array([ 30.,  50., 130.]))
        """
        devices = np.asarray(devices, dtype=np.int64)
        t = broadcast(t, devices.shape)
        row = self.rows[devices]
        since = t + self.shifts[devices] - self.log_starts[row]
        if self.repeat:
            since = np.mod(since, self.lengths[row])
        known = (since >= 0) & (since < self.logs_s[row]) & (t < self.until)
        first, last = np.zeros(t.shape), self.logs_s[row]
        if self.gap_starts.size:
            low, high = self.gap_offsets[row], self.gap_offsets[row + 1]
            k = last_at_or_before(self.gap_starts, low, high, since)
            after = k >= low
            first = np.where(after, self.gap_ends.take(k, mode="clip"), 0.0)
            last = np.where(k + 1 < high, self.gap_starts.take(k + 1, mode="clip"), last)
            known &= since >= first
        start, endless = t - since + first, np.isinf(self.logs_s[row])
        end = np.where(endless, np.inf, np.minimum(t - since + last, self.until))
        start = np.where(endless, -np.inf, start)
        return np.where(known, start, t), np.where(known, end, t)

    def is_available(self, devices: npt.ArrayLike, t: npt.ArrayLike) -> Mask:
        """Return whether each device is available at its instant t; shape (n,)."""
        devices = np.asarray(devices, dtype=np.int64)
        t = broadcast(t, devices.shape)
        row = self.rows[devices]
        _, x, k = self.locate(devices, t)
        inside = (k >= self.offsets[row]) & (t < self.until)
        return inside & (x < self.ends.take(k, mode="clip")) if self.ends.size else inside

    def window_at_or_after(self, devices: npt.ArrayLike, t: npt.ArrayLike) -> tuple[Array, Array]:
        """Return the rest of the window that each device is in, or else its next window.

        A window that runs to the end of a repeated record and goes on at its beginning is one.

        Args:
            devices: positions of devices; shape (n,).
            t: instants in s, >= 0; scalar or shape (n,).

        Returns:
            Start, at least t, and end of the window; both inf where no window follows. Shape (n,).
        """
        devices = np.asarray(devices, dtype=np.int64)
        if not isinstance(t, np.ndarray) or t.shape != devices.shape:
            t = broadcast(t, devices.shape)
        if self.starts.size == 0:
            return np.full(devices.shape, np.inf), np.full(devices.shape, np.inf)
        if self._is_always:
            before = t < self.until
            return np.where(before, t, np.inf), np.where(before, self.until, np.inf)
        row = self.rows[devices]
        length = self.lengths[row]
        base, x, k = self.locate(devices, t)
        first, last = self.offsets[row], self.offsets[row + 1]
        end = self.ends.take(k, mode="clip")
        inside = (k >= first) & (x < end) & (end + base > t)
        k = np.where(inside, k, k + 1)
        wraps = k >= last
        if wraps.any():
            k = np.where(wraps, first, k)
            base = np.where(wraps, base + length, base)
        begin = np.maximum(self.starts.take(k, mode="clip") + base, t)
        end = self.ends.take(k, mode="clip") + base
        never = first == last
        if self.repeat:
            # The last window of a record may go on at its beginning, and the only one for ever.
            goes_on = (k == last - 1) & (self.ends.take(k, mode="clip") == length)
            if goes_on.any():
                head = first.clip(max=self.starts.size - 1)
                goes_on &= self.starts[head] == 0.0
                end = np.where(goes_on, base + length + self.ends[head], end)
                end = np.where(goes_on & (last - first == 1), np.inf, end)
        else:
            never = never | wraps
        end = np.minimum(end, self.until)
        never = never | (begin >= end)
        return np.where(never, np.inf, begin), np.where(never, np.inf, end)

    @property
    def _is_always(self) -> bool:
        """Whether there is one row, and nobody ever leaves."""
        is_one = self.repeat and self.starts.size == self.lengths.size == 1
        return bool(is_one and self.starts[0] == 0.0 and self.ends[0] == self.lengths[0])

    def windows_before(self, devices: npt.ArrayLike, end_s: float) -> tuple[Index, Array, Array]:
        """Return all windows of some devices from instant 0 on, cut off at an instant.

        Args:
            devices: positions of devices; shape (n,).
            end_s: the instant in s.

        Returns:
            Place of the device in `devices`, start and end in s, by device and then by start;
            shape (windows,).
        """
        devices = np.asarray(devices, dtype=np.int64)
        live, t = np.arange(devices.size), np.zeros(devices.size)
        owners, starts, ends = [], [], []
        while live.size:
            start, end = self.window_at_or_after(devices[live], t)
            goes_on = start < end_s
            live, start, end = live[goes_on], start[goes_on], end[goes_on]
            owners.append(live)
            starts.append(start)
            ends.append(np.minimum(end, end_s))
            live, t = live[end < end_s], end[end < end_s]
        if not owners:
            return np.empty(0, dtype=np.int64), np.empty(0), np.empty(0)
        owner, start, end = (np.concatenate(parts) for parts in (owners, starts, ends))
        order = np.lexsort((start, owner))
        return owner[order], start[order], end[order]

    def locate(self, devices: Index, t: Array) -> tuple[Array, Array, Index]:
        """Return (t's time minus row time, t in row time, position of the last start by then)."""
        row, shift = self.rows[devices], self.shifts[devices]
        if self.repeat:
            cycles, x = np.divmod(t + shift, self.lengths[row])
            base = cycles * self.lengths[row] - shift
        else:
            x, base = t + shift, -shift
        return base, x, last_at_or_before(self.starts, self.offsets[row], self.offsets[row + 1], x)


def _flat(rows: Sequence[npt.ArrayLike]) -> tuple[Array, Array, Index]:
    """Return the starts and the ends of all rows, one after the other, and their counts."""
    if len(rows) == 0:
        raise TraceError("availability needs at least one device")
    windows = [np.asarray(row, dtype=np.float64) for row in rows]
    for row in windows:
        if row.size and (row.ndim != 2 or row.shape[1] != 2):
            raise TraceError(f"windows of shape {row.shape}: expected (start, end) pairs, (n, 2)")
    starts, ends = np.concatenate([row.reshape(-1, 2) for row in windows]).T
    return starts, ends, np.array([row.size // 2 for row in windows], dtype=np.int64)


def _first_of_each_run(
    owner: Index, starts: Array, ends: Array, join_s: float, counts: Counter[str]
) -> Index:
    """Return the positions of the windows that go on from no earlier one; counts the others."""
    if starts.size == 0:
        return np.zeros(0, dtype=np.int64)
    # The latest end so far, device by device: ranks are exact, sums with an offset would round.
    values, rank = np.unique(ends, return_inverse=True)
    latest = values[np.maximum.accumulate(owner * values.size + rank) % values.size]
    gap = starts[1:] - latest[:-1]
    same = owner[1:] == owner[:-1]
    overlaps = same & (gap < 0)
    joins = same & (gap <= join_s)
    apart = "touching" if join_s == 0 else f"at most {join_s:g} s apart"
    counts["merged: overlapping"] = int(np.count_nonzero(overlaps))
    counts[f"merged: {apart}"] = int(np.count_nonzero(joins & ~overlaps))
    return np.flatnonzero(np.concatenate([[True], ~joins]))


def stretches_of(
    owner: Index, starts: Array, ends: Array, *, gap_s: float
) -> tuple[Index, Index, Array, Array]:
    """Return the stretches in which something was seen without any time longer than a gap.

    Args:
        owner: device of each window; shape (windows,), not empty.
        starts: in s; shape (windows,).
        ends: in s, none before its start; shape (windows,).
        gap_s: the longest time without a window within a stretch, in s.

    Returns:
        Stretch of each window, shape (windows,); device, start and end of each, by device and
        time, shape (stretches,).
    """
    order = np.lexsort((ends, starts, owner))
    sorted_owner, start, end = owner[order], starts[order], ends[order]
    first = _first_of_each_run(sorted_owner, start, end, gap_s, Counter())
    of = np.empty(order.size, dtype=np.int64)
    of[order] = np.cumsum(np.isin(np.arange(order.size), first)) - 1
    return of, sorted_owner[first], start[first], np.maximum.reduceat(end, first)
