"""When each device is online: disjoint half-open windows, repeated or not.

The only question a job asks is "which window am I in, or which is next?", so windows are kept
sorted in one flat array and found by binary search.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fedstale.errors import TraceError
from fedstale.traces.arrays import (
    Array,
    Channel,
    Index,
    Mask,
    last_at_or_before,
    offsets_of,
    spread_over,
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

    @classmethod
    def of(
        cls, rows: Sequence[npt.ArrayLike], lengths: npt.ArrayLike, *, repeat: bool = True
    ) -> "Availability":
        """Return the availability of devices from their windows.

        Args:
            rows: windows of each row as (start, end) in s, sorted, not touching; each of shape
                (windows, 2), and of shape (0, 2) for a device that is never online.
            lengths: end of each row's record in s; scalar or shape (rows,).
            repeat: whether a row starts again at its end.

        Raises:
            TraceError: windows are empty, unsorted, overlap, touch or leave the record.

        Example:
            >>> phone = Availability.of([[(10.0, 20.0)]], 100.0)
            >>> phone.window_at_or_after([0, 0], [15.0, 20.0])
            (array([ 15., 110.]), array([ 20., 120.]))
        """
        starts, ends, counts = _flat(rows)
        return cls.packed(starts, ends, counts, lengths, repeat=repeat)

    @classmethod
    def packed(
        cls,
        starts: Array,
        ends: Array,
        counts: npt.ArrayLike,
        lengths: npt.ArrayLike,
        *,
        repeat: bool = True,
    ) -> "Availability":
        """Return the availability of devices from flat arrays of windows.

        Args:
            starts: starts in s, row after row; shape (windows,).
            ends: ends in s; shape (windows,).
            counts: number of windows of each row; shape (rows,).
            lengths: end of each row's record in s; scalar or shape (rows,).
            repeat: whether a row starts again at its end.

        Raises:
            TraceError: windows are empty, unsorted, overlap, touch or leave the record.
        """
        offsets = offsets_of(counts)
        n_rows = offsets.size - 1
        lengths = np.array(np.broadcast_to(np.asarray(lengths, dtype=np.float64), (n_rows,)))
        if not np.all(np.isfinite(lengths) & (lengths > 0)):
            raise TraceError("the record of a device must have a finite length > 0 s")
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
            rows=np.arange(n_rows, dtype=np.int32),
            shifts=np.zeros(n_rows),
            repeat=repeat,
        )

    @classmethod
    def repaired(
        cls, rows: Sequence[npt.ArrayLike], lengths: npt.ArrayLike, *, join_s: float
    ) -> tuple["Availability", Counter[str]]:
        """Return the availability of devices from windows as recordings have them.

        Windows that end before they start, or that lie outside the record, have no single reading
        and are dropped. Windows across an edge of the record are cut there. Windows that overlap,
        touch or are at most `join_s` apart are one. What then has no length was an instant, and is
        dropped.

        Args:
            rows: windows of each device as (start, end) in s, in any order; each of shape
                (windows, 2).
            lengths: end of each device's record in s, > 0; scalar or shape (devices,).
            join_s: longest gap that is not a gap, in s, >= 0.

        Returns:
            The devices, and counts of repairs by kind.

        Example:
            >>> windows = [(20.0, 30.0), (-5.0, 4.0), (31.0, 31.0)]
            >>> phone, counts = Availability.repaired([windows], 100.0, join_s=1.0)
            >>> phone.starts, phone.ends
            (array([ 0., 20.]), array([ 4., 31.]))
            >>> counts["cut: started before instant 0"], counts["merged: at most 1 s apart"]
            (1, 1)
        """
        starts, ends, n_windows = _flat(rows)
        owner = np.repeat(np.arange(len(rows)), n_windows)
        lengths = spread_over(lengths, (len(rows),))
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
        keep(ends > 0, "dropped: before instant 0")
        keep(starts < lengths[owner], "dropped: after the end of the record")
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

    @classmethod
    def always(cls, n: int) -> "Availability":
        """Return n devices that never leave.

        Example:
            >>> Availability.always(1).window_at_or_after([0], [7.0])
            (array([7.]), array([inf]))
        """
        one = cls.of([[(0.0, 1.0)]], 1.0)
        return replace(one, rows=np.zeros(n, dtype=np.int32), shifts=np.zeros(n))

    def windows(self, device: int) -> tuple[Array, float]:
        """Return the windows of one device's row, shape (windows, 2), and the row's length in s.

        The device's shift is not applied: the row's own time is used.
        """
        row = int(self.rows[device])
        part = slice(self.offsets[row], self.offsets[row + 1])
        return np.stack([self.starts[part], self.ends[part]], axis=1), float(self.lengths[row])

    def is_available(self, devices: npt.ArrayLike, t: npt.ArrayLike) -> Mask:
        """Return whether each device is available at its instant t; shape (n,)."""
        devices = np.asarray(devices, dtype=np.int64)
        t = spread_over(t, devices.shape)
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
        t = spread_over(t, devices.shape)
        if self.starts.size == 0:
            return np.full(devices.shape, np.inf), np.full(devices.shape, np.inf)
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
