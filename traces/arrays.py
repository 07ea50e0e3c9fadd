"""Array types, the search that every query on a trace uses, and what channels have in common."""

from collections.abc import Sequence, Sized
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]
Index: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]
T = TypeVar("T", bound=Any)
DAY_S = 86_400.0
"""A day, in s."""
ROUNDED = 1.0 + 2.0**-49
"""An end times this is after all that fits by it exactly in decimals: rounding moves an instant by
some units in its last place, and this is up to 16."""
# So few queries are faster looked up one by one.
_FEW = 24
_LINE, _VALUE = 240, 80
"""Characters that `outline` shows at most, and of one value."""


def last_at_or_before(keys: Array, first: Index, last: Index, x: Array) -> Index:
    """Return, for each query, the position of the last key that is at most x.

    Many queries are halved together, so the cost grows with the logarithm of the longest range.

    Args:
        keys: sorted within each range; shape (m,).
        first: start of each query's range in keys; shape (n,).
        last: end of the range, exclusive; shape (n,).
        x: what to look for; shape (n,).

    Returns:
        Positions in keys; first - 1 where every key of the range exceeds x. Shape (n,).

    Example:
        >>> keys = np.array([0.0, 10.0, 20.0, 0.0, 5.0])
        >>> first, last = np.array([0, 3]), np.array([3, 5])
        >>> last_at_or_before(keys, first, last, np.array([12.0, 7.0]))
        array([1, 4])
    """
    found = first - 1
    if keys.size == 0 or first.size == 0:
        return found
    if first.size <= _FEW:
        each = zip(first.tolist(), last.tolist(), x.tolist(), strict=True)
        found += [keys[low:high].searchsorted(value, "right") for low, high, value in each]
        return found
    longest, end = int((last - first).max()), keys.size - 1
    step = 1 << max(longest.bit_length() - 1, 0) if longest > 0 else 0
    while step:
        candidate = found + step
        # A candidate beyond its range is rejected by the second test; the minimum keeps the read
        # legal. Indexing, not `take`: keys may be a strided view, which `take` would copy whole.
        ahead = keys[np.minimum(candidate, end)] <= x
        ahead &= candidate < last
        found += step * ahead
        step >>= 1
    return found


def offsets_of(counts: npt.ArrayLike) -> Index:
    """Return where each of several runs begins in a flat array, and the end of the last.

    Args:
        counts: length of each run; shape (n,).

    Returns:
        Offsets, shape (n + 1,).

    Example:
        >>> offsets_of([2, 0, 3])
        array([0, 2, 2, 5])
    """
    counts = np.asarray(counts, dtype=np.int64)
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])


def ranges(first: Index, counts: Index) -> Index:
    """Return first, first + 1, ... of each of several runs, one run after the other.

    Example:
        >>> ranges(np.array([5, 0]), np.array([2, 3]))
        array([5, 6, 0, 1, 2])
    """
    return np.arange(int(counts.sum())) + np.repeat(first - offsets_of(counts)[:-1], counts)


def running_sums(x: Array, offsets: Index) -> tuple[Array, Array]:
    """Return the sum before each entry of its run, and the sum of each run.

    Runs are summed apart, never by differences of one long sum, which would lose the last digits
    of late runs. Runs of equal length are summed together.

    Args:
        x: the runs, one after the other; shape (m,).
        offsets: where each run begins in x, and the end of the last; shape (n + 1,).

    Returns:
        Shapes (m,) and (n,).

    Example:
        >>> running_sums(np.array([1.0, 2.0, 5.0]), np.array([0, 2, 2, 3]))
        (array([0., 1., 0.]), array([3., 0., 5.]))
    """
    before, counts = np.zeros(x.size), np.diff(offsets)
    totals = np.zeros(counts.size)
    for count in np.unique(counts[counts > 0]):
        alike = np.flatnonzero(counts == count)
        places = offsets[alike][:, None] + np.arange(count)
        sums = np.cumsum(x[places], axis=1)
        before[places[:, 1:]] = sums[:, :-1]
        totals[alike] = sums[:, -1]
    return before, totals


def broadcast(x: npt.ArrayLike, shape: tuple[int, ...]) -> Array:
    """Return numbers in a shape, as numpy.broadcast_to does, at no cost where they have it.

    Example:
        >>> broadcast(2.0, (3,))
        array([2., 2., 2.])
    """
    array = np.asarray(x, dtype=np.float64)
    # Small queries call this many times, and broadcast_to alone takes ten microseconds.
    return array if array.shape == shape else np.broadcast_to(array, shape)


def rounded(x: Array, digits: int) -> tuple[float, ...]:
    """Return numbers to so many significant digits, as files hold them."""
    return tuple(float(f"{v:.{digits}g}") for v in x)


def outline(record: Any) -> str:
    """Return a dataclass in a line: the `__repr__` of one that holds arrays, tables or many parts.

    A value that is long is shown by its type and its shape or length.

    Example:
        >>> from dataclasses import make_dataclass
        >>> outline(make_dataclass("Rates", ["step_s", "values"])(15.0, np.zeros((4, 96))))
        'Rates(step_s=15.0, values=<ndarray (4, 96)>)'
    """
    parts = (f"{field.name}={_brief(getattr(record, field.name))}" for field in fields(record))
    text = ", ".join(parts)
    return f"{type(record).__name__}({text if len(text) <= _LINE else text[:_LINE] + '...'})"


def _brief(value: object) -> str:
    text = repr(value)
    if len(text) <= _VALUE and "\n" not in text:
        return text
    size = getattr(value, "shape", len(value) if isinstance(value, Sized) else "")
    return f"<{type(value).__name__} {size}>"


def joined(parts: Sequence[T]) -> T:
    """Return one dataclass of arrays out of several, joined along the first axis.

    A field may be such a dataclass itself.
    """
    if len(parts) == 1:
        return parts[0]
    values = {field.name: [getattr(p, field.name) for p in parts] for field in fields(parts[0])}
    return type(parts[0])(
        **{
            name: np.concatenate(each) if isinstance(each[0], np.ndarray) else joined(each)
            for name, each in values.items()
        }
    )


def taken(whole: T, which: npt.NDArray[Any] | slice) -> T:
    """Return some entries of a dataclass of arrays; `which` is positions, a mask or a slice.

    A field may be such a dataclass itself.
    """
    made = {}
    for field in fields(whole):
        value = getattr(whole, field.name)
        made[field.name] = value[which] if isinstance(value, np.ndarray) else taken(value, which)
    return type(whole)(**made)


def rows_of(parts: Sequence["Channel"]) -> npt.NDArray[np.int32]:
    """Return the row of each device of several channels, whose rows follow each other."""
    offsets = offsets_of([part.lengths.size for part in parts])
    shifted = [part.rows + first for part, first in zip(parts, offsets, strict=False)]
    return np.concatenate(shifted).astype(np.int32)


def stream(seed: int, *key: int) -> np.random.Generator:
    """Return the random numbers of one purpose: the same whatever else is drawn with the seed."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Channel:
    """What is known of one side of many devices: when they are online, or a rate.

    A device is a row and a shift, so a million devices can share a thousand recorded rows without
    copying them.
    """

    rows: npt.NDArray[np.int32]
    """Row of each device; shape (devices,)."""
    shifts: Array
    """What is added to the device's time to get the row's time, in s, >= 0; shape (devices,)."""
    repeat: bool
    """Whether a row starts again at its end; otherwise there is nothing from there on."""
    until: float = np.inf
    """Instant from which on there is nothing, whatever the rows say."""

    lengths: Array
    """End of each row's record in s; shape (rows,)."""

    per_device: ClassVar[tuple[str, ...]] = ("rows", "shifts")

    def record_s(self) -> Array:
        """Return the length of each device's row in s; shape (devices,)."""
        return self.lengths[self.rows]

    @property
    def n_devices(self) -> int:
        """Number of devices."""
        return self.rows.size

    @property
    def nbytes(self) -> int:
        """Memory of all arrays, in bytes."""
        values = (getattr(self, field.name) for field in fields(self))
        return sum(value.nbytes for value in values if isinstance(value, np.ndarray))

    def take(self, devices: npt.ArrayLike) -> Self:
        """Return the channel of some devices, in the order given; rows stay shared."""
        devices = np.asarray(devices, dtype=np.int64)
        return replace(self, **{name: getattr(self, name)[devices] for name in self.per_device})

    def shifted(self, shifts: npt.ArrayLike) -> Self:
        """Return the channel as seen by devices whose clock starts later.

        Args:
            shifts: how much later each device starts, in s, >= 0; scalar or shape (devices,).
        """
        later = self.shifts + np.asarray(shifts, dtype=np.float64)
        return replace(self, shifts=np.mod(later, self.record_s()) if self.repeat else later)

    def between(self, start: float, end: float) -> Self:
        """Cut to [start, end), with start as the new 0 and nothing from end on."""
        return replace(self.shifted(start), until=min(self.until, end) - start)


def row_time(channel: Channel, devices: Index, t: Array) -> tuple[Array, Array]:
    """Return instants in the time of each device's row, and the cycles since the first instant.

    Args:
        channel: of the devices.
        devices: positions; shape (n,).
        t: instants in s, >= 0; shape (n, m).

    Returns:
        Shape (n, m), and (n, m) or, for a channel that does not repeat, (1, 1).
    """
    x = np.minimum(t, channel.until) + channel.shifts[devices][:, None]
    if not channel.repeat:
        return x, np.zeros((1, 1))
    length = channel.lengths[channel.rows[devices]][:, None]
    cycles = np.floor(x / length)
    x -= cycles * length
    return x, cycles - cycles[:, :1]
