import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedstale.traces.availability import Availability

times = st.integers(-20, 60).map(float) | st.sampled_from([math.nan, math.inf, -math.inf, 7.25])
devices = st.lists(st.lists(st.tuples(times, times), max_size=8), min_size=1, max_size=4)
LENGTH = 40.0


def slow(windows, join_s):
    """One device, window by window."""
    kept = sorted(
        (max(s, 0.0), min(e, LENGTH))
        for s, e in windows
        if math.isfinite(s) and math.isfinite(e) and s <= e and e > 0 and s < LENGTH
    )
    merged = []
    for start, end in kept:
        if merged and start - merged[-1][1] <= join_s:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [(s, e) for s, e in merged if e > s]


def fast(rows, join_s):
    owner = np.repeat(np.arange(len(rows)), [len(r) for r in rows])
    flat = np.array([w for row in rows for w in row], dtype=float).reshape(-1, 2)
    return windows_of(owner, flat[:, 0], flat[:, 1], np.full(len(rows), LENGTH), join_s)


def windows_of(owner, starts, ends, lengths, join_s):
    made, counts = Availability.repaired(owner, starts, ends, lengths, join_s=join_s)
    assert made.lengths.tolist() == lengths.tolist()
    return made.starts, made.ends, np.diff(made.offsets), counts


@given(devices, st.sampled_from([0.0, 1.0]))
def test_windows_equal_those_of_a_loop_over_each_device(rows, join_s):
    starts, ends, per_device, _ = fast(rows, join_s)
    expected = [slow(row, join_s) for row in rows]
    assert per_device.tolist() == [len(row) for row in expected]
    assert list(zip(starts, ends, strict=True)) == [w for row in expected for w in row]


@given(devices, st.sampled_from([0.0, 1.0]))
def test_every_window_is_kept_or_counted_once(rows, join_s):
    starts, _, _, counts = fast(rows, join_s)
    gone = sum(n for kind, n in counts.items() if kind.startswith(("dropped", "merged")))
    assert starts.size + gone == sum(len(row) for row in rows)


@given(devices, st.sampled_from([0.0, 1.0]))
def test_repairing_twice_changes_nothing(rows, join_s):
    starts, ends, per_device, _ = fast(rows, join_s)
    owner = np.repeat(np.arange(len(rows)), per_device)
    again = windows_of(owner, starts, ends, np.full(len(rows), LENGTH), join_s)
    assert again[0].tolist() == starts.tolist()
    assert again[1].tolist() == ends.tolist()
    assert sum(again[3].values()) == 0
