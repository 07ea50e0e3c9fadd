"""The one search of all queries, against Python's own bisect on each range alone."""

from bisect import bisect_right

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstale.traces.arrays import last_at_or_before, offsets_of

KEYS = st.lists(st.integers(0, 12), max_size=9).map(sorted)


@given(st.lists(KEYS, min_size=1, max_size=5), st.lists(st.integers(-2, 14), max_size=20))
@settings(max_examples=150, deadline=None)
def test_the_search_finds_in_each_range_what_bisect_finds(ranges, queries):
    offsets = offsets_of([len(r) for r in ranges])
    keys = np.array([k for r in ranges for k in r], dtype=np.float64)
    asked = [(i, x) for i in range(len(ranges)) for x in queries]
    which = np.array([i for i, _ in asked], dtype=np.int64)
    x = np.array([x for _, x in asked], dtype=np.float64)
    found = last_at_or_before(keys, offsets[which], offsets[which + 1], x)
    expected = [offsets[i] + bisect_right(ranges[i], x) - 1 for i, x in asked]
    assert found.tolist() == expected


def test_a_range_may_lie_anywhere_in_keys_that_are_a_strided_view():
    keys = np.arange(40.0).reshape(20, 2)[:, 0]
    first, last = np.array([3, 0, 19, 5]), np.array([9, 20, 20, 5])
    found = last_at_or_before(keys, first, last, np.array([1e9, 7.0, 38.0, 1e9]))
    assert found.tolist() == [8, 3, 19, 4]


@given(st.lists(st.integers(0, 5), max_size=10))
@settings(max_examples=50, deadline=None)
def test_offsets_are_running_sums_that_start_at_zero(counts):
    assert offsets_of(counts).tolist() == [sum(counts[:k]) for k in range(len(counts) + 1)]
    assert offsets_of(counts).dtype == np.int64
