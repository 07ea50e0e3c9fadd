"""Piecewise-constant rates of many devices, with exact integrals and their inverse.

A rate (bits per second of a link, work units per second of a processor) is constant on half-open
segments. What a device moves between two instants is the integral; when it will have moved an
amount is the inverse. Both are closed forms found by binary search, for many devices in one call,
so a query costs the same wherever it falls in the trace.

A device is a row, a shift and a scale: `rate_d(t) = scale_d * row(t + shift_d)`. A row lives in
blocks of 16 segments with one running integral a block. A query halves over blocks and finishes
inside one block, which is one cache line of values; storing an integral for every segment would
treble the memory.

Deliberately absent: interpolation, and any moving pointer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedstale.errors import TraceError
from fedstale.traces.arrays import (
    ROUNDED,
    Array,
    Channel,
    Index,
    broadcast,
    last_at_or_before,
    offsets_of,
    outline,
    ranges,
    rows_of,
    running_sums,
)

BLOCK = 16

# Keeps an instant at the very end of a row in its last segment.
_TINY = 2.0**-50


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Series(Channel):
    """Non-negative, right-open, piecewise-constant functions of time, one for each device.

    Build one with `Series.constant`, `Series.regular` or `Series.irregular`.
    """

    values: npt.NDArray[np.float32]
    """Rate on each segment; shape (blocks, 16), zero beyond the end of a row."""
    starts: Array | None
    """Start of each segment in s; shape (blocks, 16), inf beyond the end; None on a grid."""
    step_s: float | None
    """Length of every segment on a regular grid, else None."""
    totals: Array
    """Integral of the row up to the start of each block; shape (blocks,)."""
    first_block: Index
    """First block of each row; shape (rows + 1,)."""
    row_totals: Array
    """Integral over the whole of each row; shape (rows,)."""
    scales: Array
    """Factor of each device, >= 0; inf where nothing takes time; shape (devices,)."""

    per_device: ClassVar[tuple[str, ...]] = ("rows", "shifts", "scales")

    __repr__ = outline

    @classmethod
    def constant(cls, values: npt.ArrayLike) -> "Series":
        """Return one constant rate for each device.

        Args:
            values: rate of each device, >= 0; inf for one that takes no time; shape (devices,).

        Example:
            >>> Series.constant([2.0, 0.0, np.inf]).time_to_accumulate([0, 1, 2], 10.0, 0.0)
            array([ 5., inf,  0.])
        """
        scales = np.atleast_1d(np.asarray(values, dtype=np.float64))
        check_rates(scales[scales != np.inf], "constant rate")
        one = cls.regular([[1.0]], step_s=1.0)
        n = scales.size
        return replace(one, rows=np.zeros(n, dtype=np.int32), shifts=np.zeros(n), scales=scales)

    @classmethod
    def regular(
        cls, rows: Sequence[npt.ArrayLike] | Array, *, step_s: float, repeat: bool = True
    ) -> "Series":
        """Return rates sampled on one regular grid, each held until the next sample.

        Args:
            rows: rates of each row, finite, >= 0; each of shape (samples,), at least one sample.
                An array of shape (rows, samples) is packed without a Python loop.
            step_s: time between samples, > 0.
            repeat: whether a row starts again at its end.

        Raises:
            TraceError: a row is empty, a rate is negative or not finite, or the step is not > 0.

        Example:
            >>> link = Series.regular([[1.0, 3.0]], step_s=10.0)
            >>> link.integral([0], 5.0, 15.0)
            array([20.])
            >>> link.time_to_accumulate([0], 20.0, 5.0)
            array([10.])
        """
        flat, counts = flatten(rows)
        return cls.packed(flat, counts, counts * float(step_s), step_s=step_s, repeat=repeat)

    @classmethod
    def irregular(
        cls,
        rows: Sequence[tuple[npt.ArrayLike, npt.ArrayLike]],
        lengths: npt.ArrayLike,
        *,
        repeat: bool = True,
    ) -> "Series":
        """Return rates that change at instants of their own.

        Args:
            rows: for each row (starts, values): starts in s, the first 0, strictly increasing;
                values finite, >= 0. Both of shape (segments,).
            lengths: end of the last segment of each row, in s; shape (rows,).
            repeat: whether a row starts again at its end.

        Raises:
            TraceError: starts do not begin at 0 or do not increase, a length is not beyond the last
                start, or a rate is negative or not finite.

        Example:
            >>> load = Series.irregular([([0.0, 2.0], [1.0, 0.0])], [4.0])
            >>> load.time_to_accumulate([0], 3.0, 0.0)
            array([5.])
        """
        starts, start_counts = flatten([row[0] for row in rows])
        flat, counts = flatten([row[1] for row in rows])
        if not np.array_equal(start_counts, counts):
            row = int(np.flatnonzero(start_counts != counts)[0])
            raise TraceError(
                f"row {row} has {start_counts[row]} starts and {counts[row]} values: "
                "expected as many"
            )
        return cls.packed(flat, counts, lengths, starts=starts, repeat=repeat)

    @classmethod
    def packed(
        cls,
        values: Array,
        counts: Index,
        lengths: npt.ArrayLike,
        *,
        starts: Array | None = None,
        step_s: float | None = None,
        repeat: bool = True,
    ) -> "Series":
        """Return one device for each row, from flat arrays of rates.

        Args:
            values: rates, row after row, finite, >= 0; shape (segments,).
            counts: number of segments of each row, >= 1; shape (rows,).
            lengths: end of each row in s; on a grid, its count times the step; shape (rows,).
            starts: start of each segment in s, as `irregular` takes them; None on a grid.
            step_s: time between samples of a grid, > 0; None if there are starts.
            repeat: whether a row starts again at its end.

        Raises:
            TraceError: as `regular` and `irregular`.
        """
        ends, offsets = np.asarray(lengths, dtype=np.float64), offsets_of(counts)
        if np.any(counts < 1):
            raise TraceError(f"row {int(np.argmin(counts))} of a series is empty")
        if starts is None:
            if step_s is None or not (np.isfinite(step_s) and step_s > 0):
                raise TraceError(f"step_s = {step_s}: expected a time in seconds > 0")
            if not np.array_equal(ends, counts * float(step_s)):
                raise TraceError(f"lengths: expected the number of values times {step_s} s")
            widths = np.full(values.size, float(step_s))
        else:
            if np.any(starts[offsets[:-1]] != 0.0):
                raise TraceError("the first segment of a series must start at 0 s")
            steps = np.diff(starts, prepend=0.0)
            steps[offsets[:-1]] = 1.0
            if not np.all(steps > 0) or not np.all(np.isfinite(starts)):
                raise TraceError("segment starts must be finite and strictly increasing")
            if not np.all((ends > starts[offsets[1:] - 1]) & np.isfinite(ends)):
                raise TraceError(
                    "a series must end after its last segment starts, at a finite time"
                )
            widths = np.diff(starts, append=0.0)
            widths[offsets[1:] - 1] = ends - starts[offsets[1:] - 1]
        check_rates(values, "rate")
        if values.max() > np.finfo(np.float32).max:
            raise TraceError(f"rate {values.max()}: expected at most {np.finfo(np.float32).max}")
        first_block = offsets_of(-(-counts // BLOCK))
        # Where each sample goes: its row's first slot plus its place in the row.
        place = ranges(first_block[:-1] * BLOCK, counts)

        def in_blocks(flat: Array, beyond: float) -> Array:
            blocks: Array = np.full((int(first_block[-1]), BLOCK), beyond)
            blocks.ravel()[place] = flat
            return blocks

        packed = in_blocks(values, 0.0).astype(np.float32)
        totals, row_totals = running_sums(
            (in_blocks(widths, 0.0) * packed).sum(axis=1), first_block
        )
        return cls(
            values=packed,
            starts=None if starts is None else in_blocks(starts, np.inf),
            step_s=None if step_s is None else float(step_s),
            totals=totals,
            first_block=first_block,
            lengths=ends,
            row_totals=row_totals,
            rows=np.arange(ends.size, dtype=np.int32),
            shifts=np.zeros(ends.size),
            scales=np.ones(ends.size),
            repeat=repeat,
        )

    @classmethod
    def joined(cls, parts: Sequence["Series"]) -> "Series":
        """Return the devices of several series that repeat, one after the other.

        Rows stay shared. Series on one grid stay on it.

        Example:
            >>> both = Series.joined([Series.constant([1.0]), Series.regular([[2, 4]], step_s=5.0)])
            >>> both.integral([0, 1], 0.0, 10.0)
            array([10., 30.])
        """
        steps = {part.step_s for part in parts}
        step_s = steps.pop() if len(steps) == 1 else None
        starts = None if step_s else np.concatenate([part._all_starts() for part in parts])
        alike: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("values", "totals", "lengths", "row_totals", "shifts", "scales")
        }
        return cls(
            starts=starts,
            step_s=step_s,
            first_block=offsets_of(np.concatenate([np.diff(p.first_block) for p in parts])),
            rows=rows_of(parts),
            repeat=True,
            **alike,
        )

    def _all_starts(self) -> Array:
        """Return the start of each segment, inf beyond the end of a row; shape (blocks, 16)."""
        row = np.repeat(np.arange(self.lengths.size), np.diff(self.first_block))
        starts = self.starts_of(np.arange(row.size), row)
        return np.where(starts < self.lengths[row][:, None], starts, np.inf)

    def scaled(self, factors: npt.ArrayLike) -> "Series":
        """Return the series with each device's rate multiplied by a factor >= 0."""
        factors = np.asarray(factors, dtype=np.float64)
        check_rates(factors, "factor")
        return replace(self, scales=self.scales * factors)

    @property
    def is_instant(self) -> bool:
        """Whether no device takes any time: a rate that is infinite is nothing to be measured."""
        return bool((self.scales == np.inf).all())

    def ends(self, devices: npt.ArrayLike) -> Array:
        """Return the instant in s from which each device's rate is 0 for good, as far as it is set.

        That is inf for rows that repeat, even where they hold nothing but zeros.
        """
        devices = np.asarray(devices, dtype=np.int64)
        if self.repeat:
            return np.full(devices.shape, self.until)
        left = self.lengths[self.rows[devices]] - self.shifts[devices]
        return np.minimum(np.maximum(left, 0.0), self.until)

    def fastest(self) -> Array:
        """Return the largest rate that each device ever has; shape (devices,).

        Example:
            >>> Series.regular([[1.0, 3.0], [2.0, 0.0]], step_s=10.0).fastest()
            array([3., 2.])
        """
        most = np.maximum.reduceat(self.values.max(axis=1), self.first_block[:-1])
        return most.astype(np.float64)[self.rows] * self.scales

    def segments(self, device: int) -> tuple[Array, Array, float]:
        """Return the segments of one device's row as (starts in s, scaled rates, length in s).

        The device's shift is not applied: the first start is 0 in the row's own time.
        """
        row = int(self.rows[device])
        starts, rates = self.row_segments(row)
        return starts, rates * self.scales[device], float(self.lengths[row])

    def row_segments(self, row: int) -> tuple[Array, Array]:
        """Return the segments of one row as (starts in s, rates)."""
        blocks = np.arange(self.first_block[row], self.first_block[row + 1])
        starts = self.starts_of(blocks, np.full(blocks.size, row)).ravel()
        inside = starts < self.lengths[row]
        return starts[inside], self.values[blocks].ravel()[inside].astype(np.float64)

    def value_at(self, devices: npt.ArrayLike, t: npt.ArrayLike) -> Array:
        """Return the rate of each device at its instant t.

        Args:
            devices: positions of devices; shape (n,).
            t: instants in s, >= 0; scalar or shape (n,).

        Returns:
            Rates; shape (n,).
        """
        devices, t = np.asarray(devices, dtype=np.int64), np.asarray(t, dtype=np.float64)
        row = self.rows[devices]
        x = self._row_time(t + self.shifts[devices], row)
        rate, _ = self._segment_at(x, row)
        inside = (x < self.lengths[row]) & (t < self.until)
        return np.where(inside, rate * self.scales[devices], 0.0)

    def integral(self, devices: npt.ArrayLike, start: npt.ArrayLike, end: npt.ArrayLike) -> Array:
        """Integrate each device's rate from start to end.

        Args:
            devices: positions of devices; shape (n,).
            start: instants in s, >= 0; scalar or shape (n,).
            end: finite instants in s, >= start; scalar or shape (n,).

        Returns:
            Integrals of the rate over [start, end); shape (n,).
        """
        devices = np.asarray(devices, dtype=np.int64)
        start, end = broadcast(start, devices.shape), broadcast(end, devices.shape)
        row = self.rows[devices]
        span = np.maximum(np.minimum(end, self.until) - start, 0.0)
        x = self._row_time(start + self.shifts[devices], row)
        rate, segment_end = self._segment_at(x, row)
        amount = rate * span
        # Most spans of a job end in the segment in which they begin: only the rest is summed.
        long = np.flatnonzero(x + span > segment_end)
        if long.size:
            amount[long] = self._sum(row[long], x[long], span[long])
        # No time carries nothing, however fast: 0 times inf would be NaN.
        return np.multiply(amount, self.scales[devices], out=amount, where=amount > 0)

    def time_to_accumulate(
        self, devices: npt.ArrayLike, amount: npt.ArrayLike, start: npt.ArrayLike
    ) -> Array:
        """Return the shortest time after which each device has accumulated its amount.

        Args:
            devices: positions of devices; shape (n,).
            amount: what to accumulate, >= 0; scalar or shape (n,).
            start: instants in s, >= 0, from which to count; scalar or shape (n,).

        Returns:
            Durations in s; 0 for an amount of 0, inf where the amount is never reached. Shape (n,).
        """
        devices = np.asarray(devices, dtype=np.int64)
        amount, start = np.asarray(amount, np.float64), np.asarray(start, np.float64)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            needed = np.where(amount > 0, amount / self.scales[devices], 0.0)
            if self._is_constant:
                duration = needed / float(self.values[0, 0])
            else:
                row = self.rows[devices]
                x = self._row_time(start + self.shifts[devices], row)
                rate, segment_end = self._segment_at(x, row)
                duration = needed / rate
                # As in `integral`: what is not reached within its first segment is searched for.
                long = (~(x + duration <= segment_end)).nonzero()[0]
                if long.size:
                    duration[long] = self._search(row[long], needed[long], x[long])
        if self.until < np.inf:
            in_time = start + duration <= self.until * ROUNDED
            duration = np.where(in_time, np.clip(self.until - start, 0.0, duration), np.inf)
        return np.where(amount > 0, duration, 0.0)

    @property
    def _is_constant(self) -> bool:
        return self.repeat and self.lengths.size == 1 and self.lengths[0] == self.step_s

    def _row_time(self, x: Array, row: npt.NDArray[np.int32]) -> Array:
        return np.mod(x, self.lengths[row]) if self.repeat else x

    def _sum(self, row: npt.NDArray[np.int32], x: Array, span: Array) -> Array:
        """Return the integral of rows over [x, x + span), with x in row time."""
        end, length = x + span, self.lengths[row]
        if not self.repeat:
            end = np.minimum(end, length)
            gain = self._accumulated(end, row) - self._accumulated(np.minimum(x, length), row)
        else:
            cycles = np.floor(end / length)
            end = np.maximum(end - cycles * length, 0.0)
            gain = self._accumulated(end, row) - self._accumulated(x, row)
            gain += cycles * self.row_totals[row]
        return np.maximum(gain, 0.0)

    def _search(self, row: npt.NDArray[np.int32], needed: Array, x: Array) -> Array:
        """Return how long rows take from x, in row time, to accumulate what is needed."""
        length, total = self.lengths[row], self.row_totals[row]
        target = self._accumulated(np.minimum(x, length), row) + needed
        if self.repeat:
            # The target is first reached at the end of a cycle, not at the start of the next.
            cycles = np.maximum(np.ceil(target / total) - 1.0, 0.0)
            within = np.minimum(np.maximum(target - cycles * total, 0.0), total)
            reachable = (total > 0) & np.isfinite(target)
        else:
            reachable = target <= total * ROUNDED
            cycles, within = np.zeros(target.shape), np.minimum(target, total)
        within = np.where(reachable, within, 0.0)
        duration = self._reached(within, row) + cycles * length - x
        return np.where(reachable, np.maximum(duration, 0.0), np.inf)

    def _segment_at(self, x: Array, row: npt.NDArray[np.int32]) -> tuple[Array, Array]:
        """Return the unscaled rate of rows at x and the end of the segment, in row time.

        Before the end of a row; beyond it, those of the last segment.
        """
        first, length = self.first_block[row], self.lengths[row]
        rates = self.values.reshape(-1)
        if self.step_s is not None:
            k = np.minimum(x, length * (1.0 - _TINY)) // self.step_s
            rate = rates[first * BLOCK + k.astype(np.int64)]
            return rate.astype(np.float64), np.minimum((k + 1.0) * self.step_s, length)
        assert self.starts is not None
        block = self.block_at(x, row)
        column = np.maximum((self.starts[block] <= x[:, None]).sum(axis=1) - 1, 0)
        slot = block * BLOCK + column
        following = np.minimum(slot + 1, rates.size - 1)
        is_last = slot + 1 >= self.first_block[row + 1] * BLOCK
        end = np.where(is_last, np.inf, self.starts.reshape(-1)[following])
        return rates[slot].astype(np.float64), np.minimum(end, length)

    def block_at(self, x: Array, row: npt.NDArray[np.int32]) -> Index:
        """Return the block of rows that instants lie in, in row time."""
        first, last = self.first_block[row], self.first_block[row + 1]
        if self.step_s is not None:
            block = first + (x / (self.step_s * BLOCK)).astype(np.int64)
        else:
            assert self.starts is not None
            block = last_at_or_before(self.starts[:, 0], first, last, x)
        return np.minimum(np.maximum(block, first), last - 1)

    def starts_of(self, block: Index, row: npt.NDArray[np.integer]) -> Array:
        """Return the start of each segment of blocks of rows, in row time; shape (n, 16)."""
        if self.starts is not None:
            return self.starts[block]
        assert self.step_s is not None
        samples = (block - self.first_block[row]) * BLOCK
        return (samples[:, None] + np.arange(BLOCK)) * self.step_s

    def edges_of(self, block: Index, row: npt.NDArray[np.integer], upto: Array) -> Array:
        """Return the edges of a block's segments, none beyond upto; shape (n, 17)."""
        edges = np.empty((block.size, BLOCK + 1))
        np.minimum(self.starts_of(block, row), upto[:, None], out=edges[:, :-1])
        edges[:, -1] = upto
        return edges

    def _accumulated(self, x: Array, row: npt.NDArray[np.int32]) -> Array:
        """Return the integral of a row from 0 to x, with 0 <= x <= its length."""
        block = self.block_at(x, row)
        edges = self.edges_of(block, row, x)
        widths = edges[:, 1:] - edges[:, :-1]
        return self.totals[block] + np.einsum("ij,ij->i", widths, self.values[block])

    def _reached(self, target: Array, row: npt.NDArray[np.int32]) -> Array:
        """Return the first instant at which the integral of a row from 0 is at least target."""
        first, last = self.first_block[row], self.first_block[row + 1]
        block = last_at_or_before(self.totals, first, last, np.nextafter(target, -np.inf))
        block = np.maximum(block, first)
        following = self.starts_of(np.minimum(block + 1, last - 1), row)[:, 0]
        block_end = np.where(block + 1 < last, following, self.lengths[row])
        edges = self.edges_of(block, row, block_end)
        gained = ((edges[:, 1:] - edges[:, :-1]) * self.values[block]).cumsum(axis=1)
        missing = target - self.totals[block]
        column = (gained < missing[:, None]).sum(axis=1)
        # Rounding may leave the last segment a hair short of its target: it ends where it ends.
        found = np.minimum(column, BLOCK - 1)
        each = np.arange(block.size)
        before = np.where(found > 0, gained[each, found - 1], 0.0)
        inside = edges[each, found] + (missing - before) / self.values[block, found]
        return np.where(
            missing <= 0,
            edges[:, 0],
            np.where(column < BLOCK, np.minimum(inside, block_end), block_end),
        )


def check_rates(rates: Array, name: str) -> None:
    """Raise a TraceError that names the first rate which is negative or not finite."""
    wrong = ~(np.isfinite(rates) & (rates >= 0))
    if wrong.any():
        where = int(np.flatnonzero(wrong)[0])
        raise TraceError(
            f"{name} {rates.flat[where]} at position {where}: expected a finite number >= 0"
        )


def flatten(rows: Sequence[npt.ArrayLike] | npt.NDArray[Any]) -> tuple[Array, Index]:
    """Return the entries of all rows, one after the other, and how many each row has."""
    if len(rows) == 0:
        raise TraceError("a series needs at least one row")
    if isinstance(rows, np.ndarray) and rows.ndim == 2 and rows.size:
        return rows.ravel(), np.full(len(rows), rows.shape[1], dtype=np.int64)
    arrays = [np.asarray(row, dtype=np.float64).ravel() for row in rows]
    return np.concatenate(arrays), np.array([a.size for a in arrays], dtype=np.int64)
