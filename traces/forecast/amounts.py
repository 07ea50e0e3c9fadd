"""What devices accumulated up to many instants each, from running integrals made once.

A past of 24 steps asks for 25 instants of one device, and neighbouring steps share them. `Series`
sums its segments anew for each span, which suits a job; here one running integral is kept for each
segment, so an instant costs one search and a step is a difference. The memory is 8 bytes a stored
segment, and rows that devices share are stored once.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from fedstale.traces.arrays import Array, Index, last_at_or_before
from fedstale.traces.availability import Availability
from fedstale.traces.segments import BLOCK, Rows
from fedstale.traces.series import Series


class Amounts(Protocol):
    """A process that accumulates: what a channel carries, or the time that devices are there."""

    def upto(self, devices: Index, t: Array) -> Array:
        """Return what has been accumulated up to each instant, from a start of each device's own.

        Only differences within one row of the result have a meaning.

        Args:
            devices: positions of devices; shape (n,).
            t: instants in s, >= 0; shape (n, m). The first of each device sets the cycle of its
                record that is counted from.

        Returns:
            Shape (n, m).
        """


class CarriedAmounts:
    """What a channel carries.

    Args:
        series: rates of the channel.

    Example:
        >>> link = CarriedAmounts(Series.regular([[1.0, 3.0]], step_s=10.0))
        >>> link.upto(np.array([0]), np.array([[15.0, 5.0, 0.0]]))
        array([[25.,  5.,  0.]])
    """

    def __init__(self, series: Series) -> None:
        self.series = series
        stored = series.stored
        self._starts = None if stored.starts is None else stored.starts.reshape(-1)
        self._values = stored.values.reshape(-1)
        before, after = _running(stored)
        self._before = before
        # The totals of the same sums: a rate of zero around the end of a record is zero exactly.
        self._totals = after[stored.first_block[1:] * BLOCK - 1]

    def upto(self, devices: Index, t: Array) -> Array:
        """Return what has been carried up to each instant; see `Amounts`."""
        series, stored = self.series, self.series.stored
        row = series.rows[devices]
        length = stored.lengths[row][:, None]
        x = np.minimum(t, series.until) + series.shifts[devices][:, None]
        if series.repeat:
            cycles = np.floor(x / length)
            x -= cycles * length
            np.maximum(x, 0.0, out=x)
            cycles -= cycles[:, :1].copy()
        else:
            np.minimum(x, length, out=x)
        slot = self._slot_at(x, row)
        # In place: what is needed at each instant comes once.
        result: Array = x
        result -= self._start_of(slot, row)
        result *= self._values[slot]
        result += self._before[slot]
        if series.repeat:
            result += cycles * self._totals[row][:, None]
        result *= series.scales[devices][:, None]
        return result

    def _slot_at(self, x: Array, row: npt.NDArray[np.int32]) -> Index:
        stored = self.series.stored
        first = stored.first_block[row] * BLOCK
        if self._starts is None:
            assert stored.step_s is not None
            k = (x / stored.step_s).astype(np.int64)
            count = np.rint(stored.lengths[row] / stored.step_s).astype(np.int64)
            np.minimum(k, count[:, None] - 1, out=k)
            k += first[:, None]
            return k
        last = stored.first_block[row + 1] * BLOCK
        m = x.shape[1]
        found = last_at_or_before(
            self._starts, np.repeat(first, m), np.repeat(last, m), x.reshape(-1)
        )
        return np.maximum(found.reshape(x.shape), first[:, None])

    def _start_of(self, slot: Index, row: npt.NDArray[np.int32]) -> Array:
        if self._starts is not None:
            return self._starts[slot]
        stored = self.series.stored
        assert stored.step_s is not None
        first = stored.first_block[row][:, None] * BLOCK
        return np.asarray((slot - first) * stored.step_s, dtype=np.float64)


def _running(stored: Rows) -> tuple[Array, Array]:
    """Return the integral of a row before and after each of its slots; shape (slots,)."""
    blocks = stored.values.shape[0]
    row = np.repeat(np.arange(stored.n), np.diff(stored.first_block))
    length = stored.lengths[row][:, None]
    if stored.starts is None:
        assert stored.step_s is not None
        place = (np.arange(blocks) - stored.first_block[row])[:, None] * BLOCK + np.arange(BLOCK)
        starts = np.minimum(place * stored.step_s, length)
    else:
        starts = np.minimum(stored.starts, length)
    ends = np.empty(starts.shape)
    ends[:, :-1] = starts[:, 1:]
    ends[:-1, -1] = starts[1:, 0]
    ends[stored.first_block[1:] - 1, -1] = stored.lengths
    gains = (ends - starts) * stored.values
    inside = np.cumsum(gains, axis=1)
    after = stored.totals[:, None] + inside
    before = np.concatenate([stored.totals[:, None], after[:, :-1]], axis=1)
    return before.ravel(), after.ravel()


class OnlineTime:
    """For how long devices have been available.

    Args:
        availability: windows of the devices.

    Example:
        >>> phone = OnlineTime(Availability.of([[(10.0, 20.0), (50.0, 60.0)]], 100.0))
        >>> phone.upto(np.array([0]), np.array([[55.0, 20.0, 15.0, 0.0]]))
        array([[15., 10.,  5.,  0.]])
    """

    def __init__(self, availability: Availability) -> None:
        self.availability = availability
        self._widths = availability.ends - availability.starts
        self._before = np.zeros(self._widths.size)
        self._totals = np.zeros(availability.lengths.size)
        counts = np.diff(availability.offsets)
        # Rows are summed apart, lest late rows lose digits to one long sum; equal ones together.
        for count in np.unique(counts[counts > 0]):
            alike = np.flatnonzero(counts == count)
            windows = availability.offsets[alike][:, None] + np.arange(count)
            sums = np.cumsum(self._widths[windows], axis=1)
            self._before[windows[:, 1:]] = sums[:, :-1]
            self._totals[alike] = sums[:, -1]

    def upto(self, devices: Index, t: Array) -> Array:
        """Return the time there up to each instant, in s; see `Amounts`."""
        availability = self.availability
        if availability.starts.size == 0:
            return np.zeros(t.shape)
        row = availability.rows[devices]
        length = availability.lengths[row][:, None]
        x = np.minimum(t, availability.until) + availability.shifts[devices][:, None]
        if availability.repeat:
            cycles = np.floor(x / length)
            x -= cycles * length
            cycles -= cycles[:, :1].copy()
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


def means(amounts: Amounts, devices: Index, start: Array, end: Array) -> Array:
    """Return the mean rates between pairs of instants; NaN where they leave no time between them.

    Args:
        amounts: what is accumulated.
        devices: positions of devices; shape (n,).
        start: instants in s, >= 0; shape (n, m).
        end: at least the starts; shape (n, m).
    """
    both = amounts.upto(devices, np.concatenate([end, start], axis=1))
    return _per_second(both[:, : end.shape[1]] - both[:, end.shape[1] :], end - start)


def stepwise_means(amounts: Amounts, devices: Index, edges: Array) -> Array:
    """Return the mean rates of steps that follow one another, the newest first.

    Args:
        amounts: what is accumulated.
        devices: positions of devices; shape (n,).
        edges: instants in s, falling; shape (n, steps + 1).

    Returns:
        NaN where a step has no length; shape (n, steps).
    """
    carried = amounts.upto(devices, edges)
    return _per_second(carried[:, :-1] - carried[:, 1:], edges[:, :-1] - edges[:, 1:])


def _per_second(amount: Array, width: Array) -> Array:
    np.maximum(amount, 0.0, out=amount)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(width > 0, amount / width, np.nan)
