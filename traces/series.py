"""Piecewise-constant rates of many devices, with exact integrals and their inverse.

A rate (bits per second of a link, work units per second of a processor) is constant on half-open
segments. What a device moves between two instants is the integral; when it will have moved an
amount is the inverse. Both are closed forms found by binary search, for many devices in one call,
so a query costs the same wherever it falls in the trace.

A device is a row, a shift and a scale: `rate_d(t) = scale_d * row(t + shift_d)`.

Deliberately absent: interpolation, and any moving pointer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedstale.errors import TraceError
from fedstale.traces.arrays import Array, Channel, Index, offsets_of, spread_over
from fedstale.traces.segments import Rows, check_rates, flatten, pack


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Series(Channel):
    """Non-negative, right-open, piecewise-constant functions of time, one for each device.

    Build one with `Series.constant`, `Series.regular` or `Series.irregular`.
    """

    stored: Rows
    """The rows that devices read."""
    scales: Array
    """Factor of each device, >= 0; shape (devices,)."""

    per_device: ClassVar[tuple[str, ...]] = ("rows", "shifts", "scales")

    @classmethod
    def constant(cls, values: npt.ArrayLike) -> "Series":
        """Return one constant rate for each device.

        Args:
            values: rate of each device, finite, >= 0; shape (devices,).

        Example:
            >>> Series.constant([2.0, 0.0]).time_to_accumulate([0, 1], 10.0, 0.0)
            array([ 5., inf])
        """
        scales = np.atleast_1d(np.asarray(values, dtype=np.float64))
        check_rates(scales, "constant rate")
        one = cls.regular([[1.0]], step_s=1.0)
        n = scales.size
        return replace(one, rows=np.zeros(n, dtype=np.int32), shifts=np.zeros(n), scales=scales)

    @classmethod
    def regular(
        cls, rows: Sequence[npt.ArrayLike], *, step_s: float, repeat: bool = True
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
        step = None if step_s is None else float(step_s)
        stored = pack(values, starts, step, counts, ends)
        return cls(
            stored=stored,
            rows=np.arange(stored.n, dtype=np.int32),
            shifts=np.zeros(stored.n),
            scales=np.ones(stored.n),
            repeat=repeat,
        )

    @property
    def lengths(self) -> Array:
        """End of each row in s; shape (rows,)."""
        return self.stored.lengths

    def record_s(self) -> Array:
        """Return the length of each device's row in s; shape (devices,)."""
        return self.lengths[self.rows]

    def scaled(self, factors: npt.ArrayLike) -> "Series":
        """Return the series with each device's rate multiplied by a factor >= 0."""
        factors = np.asarray(factors, dtype=np.float64)
        check_rates(factors, "factor")
        return replace(self, scales=self.scales * factors)

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
        return self.stored.largest()[self.rows] * self.scales

    def segments(self, device: int) -> tuple[Array, Array, float]:
        """Return the segments of one device's row as (starts in s, scaled rates, length in s).

        The device's shift is not applied: the first start is 0 in the row's own time.
        """
        row = int(self.rows[device])
        starts, rates = self.stored.segments(row)
        return starts, rates * self.scales[device], float(self.lengths[row])

    def value_at(self, devices: npt.ArrayLike, t: npt.ArrayLike) -> Array:
        """Return the rate of each device at its instant t.

        Args:
            devices: positions of devices; shape (n,).
            t: instants in s, >= 0; scalar or shape (n,).

        Returns:
            Rates; shape (n,).
        """
        devices, t = _broadcast(devices, t)
        row = self.rows[devices]
        x = self._row_time(t + self.shifts[devices], row)
        rate, _ = self.stored.segment_at(x, row)
        inside = (x < self.lengths[row]) & (t < self.until)
        return np.where(inside, rate * self.scales[devices], 0.0)

    def integral(self, devices: npt.ArrayLike, start: npt.ArrayLike, end: npt.ArrayLike) -> Array:
        """Return what each device accumulates from start to end.

        Args:
            devices: positions of devices; shape (n,).
            start: instants in s, >= 0; scalar or shape (n,).
            end: finite instants in s, >= start; scalar or shape (n,).

        Returns:
            Integrals of the rate over [start, end); shape (n,).
        """
        devices, start, end = _broadcast(devices, start, end)
        row = self.rows[devices]
        span = np.maximum(np.minimum(end, self.until) - start, 0.0)
        x = self._row_time(start + self.shifts[devices], row)
        rate, segment_end = self.stored.segment_at(x, row)
        amount = rate * span
        # Most spans of a job end in the segment in which they begin: only the rest is summed.
        long = np.flatnonzero(x + span > segment_end)
        if long.size:
            amount[long] = self.stored.integral(row[long], x[long], span[long], repeat=self.repeat)
        return amount * self.scales[devices]

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
        devices, amount, start = _broadcast(devices, amount, start)
        row = self.rows[devices]
        x = self._row_time(start + self.shifts[devices], row)
        rate, segment_end = self.stored.segment_at(x, row)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            needed = np.where(amount > 0, amount / self.scales[devices], 0.0)
            duration = needed / rate
        if not self._is_constant:
            # As in `integral`: what is not reached within its first segment is searched for.
            long = np.flatnonzero(~(x + duration <= segment_end))
            if long.size:
                duration[long] = self.stored.time_to_accumulate(
                    row[long], needed[long], x[long], repeat=self.repeat
                )
        duration = np.where(start + duration <= self.until, duration, np.inf)
        return np.where(amount > 0, duration, 0.0)

    @property
    def _is_constant(self) -> bool:
        return self.repeat and self.stored.n == 1 and self.lengths[0] == self.stored.step_s

    def _row_time(self, x: Array, row: npt.NDArray[np.int32]) -> Array:
        return np.mod(x, self.lengths[row]) if self.repeat else x


def _broadcast(devices: npt.ArrayLike, *others: npt.ArrayLike) -> tuple[npt.NDArray[Any], ...]:
    devices = np.asarray(devices, dtype=np.int64)
    return devices, *(spread_over(x, devices.shape) for x in others)
