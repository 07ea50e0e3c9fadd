"""Stored rows of piecewise-constant rates, and the exact queries on one row each.

A row lives in blocks of 16 segments with one running integral a block. A query halves over blocks
and finishes inside one block, which is one cache line of values; storing an integral for every
segment would treble the memory. `Series` says which device reads which row, and how.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstale.errors import TraceError
from fedstale.traces.arrays import Array, Index, last_at_or_before, offsets_of

BLOCK = 16

# Keeps an instant at the very end of a row in its last segment.
_TINY = 2.0**-50


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Rows:
    """Right-open, piecewise-constant, non-negative functions on [0, length); see `pack`."""

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
    lengths: Array
    """End of each row in s; shape (rows,)."""
    row_totals: Array
    """Integral over the whole of each row; shape (rows,)."""

    @property
    def n(self) -> int:
        """Number of rows."""
        return self.lengths.size

    def largest(self) -> Array:
        """Return the largest rate of each row; shape (rows,)."""
        most = np.maximum.reduceat(self.values.max(axis=1), self.first_block[:-1])
        return most.astype(np.float64)

    def segments(self, row: int) -> tuple[Array, Array]:
        """Return the segments of one row as (starts in s, rates)."""
        blocks = np.arange(self.first_block[row], self.first_block[row + 1])
        starts = self.starts_of(blocks, np.full(blocks.size, row)).ravel()
        inside = starts < self.lengths[row]
        return starts[inside], self.values[blocks].ravel()[inside].astype(np.float64)

    def integral(self, row: npt.NDArray[np.int32], x: Array, span: Array, *, repeat: bool) -> Array:
        """Return the integral of rows over [x, x + span), with x in row time."""
        end, length = x + span, self.lengths[row]
        if not repeat:
            end = np.minimum(end, length)
            gain = self._accumulated(end, row) - self._accumulated(np.minimum(x, length), row)
        else:
            cycles = np.floor(end / length)
            end = np.maximum(end - cycles * length, 0.0)
            gain = self._accumulated(end, row) - self._accumulated(x, row)
            gain += cycles * self.row_totals[row]
        return np.maximum(gain, 0.0)

    def time_to_accumulate(
        self, row: npt.NDArray[np.int32], needed: Array, x: Array, *, repeat: bool
    ) -> Array:
        """Return how long rows take from x, in row time, to accumulate what is needed."""
        length, total = self.lengths[row], self.row_totals[row]
        target = self._accumulated(np.minimum(x, length), row) + needed
        with np.errstate(divide="ignore", invalid="ignore"):
            if repeat:
                # The target is first reached at the end of a cycle, not at the start of the next.
                cycles = np.maximum(np.ceil(target / total) - 1.0, 0.0)
                within = np.clip(target - cycles * total, 0.0, total)
                reachable = (total > 0) & np.isfinite(target)
            else:
                cycles, within, reachable = np.zeros(target.shape), target, target <= total
            within = np.where(reachable, within, 0.0)
            duration = self._reached(within, row) + cycles * length - x
        return np.where(reachable, np.maximum(duration, 0.0), np.inf)

    def segment_at(self, x: Array, row: npt.NDArray[np.int32]) -> tuple[Array, Array]:
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
        block = self._block_at(x, row)
        column = np.maximum((self.starts[block] <= x[:, None]).sum(axis=1) - 1, 0)
        slot = block * BLOCK + column
        following = np.minimum(slot + 1, rates.size - 1)
        is_last = slot + 1 >= self.first_block[row + 1] * BLOCK
        end = np.where(is_last, np.inf, self.starts.reshape(-1)[following])
        return rates[slot].astype(np.float64), np.minimum(end, length)

    def _block_at(self, x: Array, row: npt.NDArray[np.int32]) -> Index:
        first, last = self.first_block[row], self.first_block[row + 1]
        if self.step_s is not None:
            block = first + (x / (self.step_s * BLOCK)).astype(np.int64)
        else:
            assert self.starts is not None
            block = last_at_or_before(self.starts[:, 0], first, last, x)
        return np.clip(block, first, last - 1)

    def starts_of(self, block: Index, row: npt.NDArray[np.integer]) -> Array:
        """Return the start of each segment of blocks of rows, in row time; shape (n, 16)."""
        if self.starts is not None:
            return self.starts[block]
        assert self.step_s is not None
        samples = (block - self.first_block[row]) * BLOCK
        return (samples[:, None] + np.arange(BLOCK)) * self.step_s

    def _edges_of(self, block: Index, row: npt.NDArray[np.int32], upto: Array) -> Array:
        """Return the edges of a block's segments, none beyond upto; shape (n, 17)."""
        edges = np.empty((block.size, BLOCK + 1))
        np.minimum(self.starts_of(block, row), upto[:, None], out=edges[:, :-1])
        edges[:, -1] = upto
        return edges

    def _accumulated(self, x: Array, row: npt.NDArray[np.int32]) -> Array:
        """Return the integral of a row from 0 to x, with 0 <= x <= its length."""
        block = self._block_at(x, row)
        widths = np.diff(self._edges_of(block, row, x))
        return self.totals[block] + np.einsum("ij,ij->i", widths, self.values[block])

    def _reached(self, target: Array, row: npt.NDArray[np.int32]) -> Array:
        """Return the first instant at which the integral of a row from 0 is at least target."""
        first, last = self.first_block[row], self.first_block[row + 1]
        block = last_at_or_before(self.totals, first, last, np.nextafter(target, -np.inf))
        block = np.maximum(block, first)
        following = np.minimum(block + 1, last - 1)
        block_end: Array
        if self.step_s is not None:
            block_end = np.asarray((block + 1 - first) * (self.step_s * BLOCK), dtype=np.float64)
            block_end = np.minimum(block_end, self.lengths[row]).astype(np.float64, copy=False)
        else:
            assert self.starts is not None
            block_end = np.where(block + 1 < last, self.starts[following, 0], self.lengths[row])
        edges = self._edges_of(block, row, block_end)
        gained = np.cumsum(np.diff(edges) * self.values[block], axis=1)
        missing = target - self.totals[block]
        column = (gained < missing[:, None]).sum(axis=1)
        # Rounding may leave the last segment a hair short of its target: it ends where it ends.
        found = np.minimum(column, BLOCK - 1)
        each = np.arange(block.size)
        before = np.where(found > 0, gained[each, found - 1], 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            inside = edges[each, found] + (missing - before) / self.values[block, found]
        return np.where(
            missing <= 0,
            edges[:, 0],
            np.where(column < BLOCK, np.minimum(inside, block_end), block_end),
        )


def pack(
    flat: Array, starts: Array | None, step_s: float | None, counts: Index, lengths: Array
) -> Rows:
    """Store rows of rates.

    Args:
        flat: rates, row after row, finite, >= 0; shape (segments,).
        starts: start of each segment in s, 0 first in each row; None on a regular grid.
        step_s: length of every segment in s on a regular grid, else None.
        counts: number of segments of each row; shape (rows,).
        lengths: end of each row in s; shape (rows,).

    Raises:
        TraceError: a rate is negative, not finite or larger than a float32 can hold.
    """
    check_rates(flat, "rate")
    if flat.max() > np.finfo(np.float32).max:
        raise TraceError(f"rate {flat.max()}: expected at most {np.finfo(np.float32).max}")
    offsets = offsets_of(counts)
    blocks = -(-counts // BLOCK)
    first_block = offsets_of(blocks)
    # Where each sample goes: its row's first slot plus its place in the row.
    place = np.arange(flat.size) - np.repeat(offsets[:-1], counts)
    place += np.repeat(first_block[:-1] * BLOCK, counts)
    values = np.zeros((int(first_block[-1]), BLOCK), dtype=np.float32)
    values.ravel()[place] = flat
    if starts is None:
        assert step_s is not None
        widths = np.full(flat.size, step_s)
        packed_starts = None
    else:
        widths = np.empty(flat.size)
        widths[:-1] = np.diff(starts)
        widths[offsets[1:] - 1] = lengths - starts[offsets[1:] - 1]
        packed_starts = np.full(values.shape, np.inf)
        packed_starts.ravel()[place] = starts
    gains = np.zeros(values.shape)
    gains.ravel()[place] = widths
    totals, row_totals = _running_totals((gains * values).sum(axis=1), first_block)
    return Rows(
        values=values,
        starts=packed_starts,
        step_s=step_s,
        totals=totals,
        first_block=first_block,
        lengths=lengths,
        row_totals=row_totals,
    )


def _running_totals(gains: Array, first_block: Index) -> tuple[Array, Array]:
    """Return the total before each block and the total of each row.

    Rows are summed apart, never by differences of one long sum, which would lose the last digits
    of late rows. Rows of equal length are summed together.
    """
    totals = np.zeros(gains.size)
    counts = np.diff(first_block)
    row_totals = np.empty(counts.size)
    for count in np.unique(counts):
        alike = np.flatnonzero(counts == count)
        blocks = first_block[alike][:, None] + np.arange(count)
        sums = np.cumsum(gains[blocks], axis=1)
        totals[blocks[:, 1:]] = sums[:, :-1]
        row_totals[alike] = sums[:, -1]
    return totals, row_totals


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
    counts = np.array([a.size for a in arrays], dtype=np.int64)
    if np.any(counts == 0):
        raise TraceError(f"row {int(np.argmin(counts))} of a series is empty")
    return np.concatenate(arrays), counts
