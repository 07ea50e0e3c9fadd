"""Raw windows of availability made into sorted ones with gaps between them; repairs are counted.

All readers of availability share this: recordings differ in format, and need the same repairs.
"""

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from fedstale.traces.arrays import Array, Index, Mask


def frozen(counts: Counter[str]) -> Mapping[str, int]:
    """Return the counts that are not 0, in alphabetical order of their kind, as a fixed mapping.

    Example:
        >>> dict(frozen(Counter({"sorted": 2, "dropped: no length": 0, "cut": 1})))
        {'cut': 1, 'sorted': 2}
    """
    return MappingProxyType({kind: int(counts[kind]) for kind in sorted(counts) if counts[kind]})


def repaired(
    owner: Index, starts: Array, ends: Array, lengths: Array, *, join_s: float
) -> tuple[Array, Array, Index, Counter[str]]:
    """Return the windows of all devices as `Availability.packed` wants them.

    Windows that end before they start, or that lie outside the record, have no single reading and
    are dropped. Windows across an edge of the record are cut there. Windows that overlap, touch or
    are at most `join_s` apart are one. What then has no length was an instant, and is dropped.

    Args:
        owner: device of each window, 0 to devices - 1; shape (windows,).
        starts: in s; shape (windows,).
        ends: in s; shape (windows,).
        lengths: end of each device's record in s, > 0; shape (devices,).
        join_s: longest gap that is not a gap, in s, >= 0.

    Returns:
        Starts, ends, windows of each device (shape (devices,)), and counts of repairs by kind.

    Example:
        >>> owner, lengths = np.array([0, 0, 0]), np.array([100.0])
        >>> starts, ends = np.array([20.0, -5.0, 31.0]), np.array([30.0, 4.0, 31.0])
        >>> *windows, counts = repaired(owner, starts, ends, lengths, join_s=1.0)
        >>> windows
        [array([ 0., 20.]), array([ 4., 31.]), array([2])]
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
    return starts, ends, np.bincount(owner, minlength=lengths.size), counts


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
