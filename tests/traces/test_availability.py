"""Availability against a naive loop over windows written out one record after another."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstale.errors import TraceError
from fedstale.traces import Availability
from fedstale.traces.sources.windows import longest_log

inf = np.inf
COPIES = 12


@st.composite
def records(draw):
    """Return (windows, length) of one device, in quarters of a second."""
    edges = draw(st.sets(st.integers(0, 40), max_size=8).map(sorted))
    windows = [(a / 4, b / 4) for a, b in zip(edges[::2], edges[1::2], strict=False)]
    # Often the record ends with its last window, which may then go on at the beginning.
    return windows, draw(st.sampled_from([10.0, edges[-1] / 4 if windows else 10.0]))


def written_out(windows, length, *, shift, repeat, until):
    """Return the windows in the device's own time, touching ones joined, in order."""
    joined = []
    for c in range(COPIES if repeat else 1):
        for a, b in windows:
            start, end = a + c * length - shift, min(b + c * length - shift, until)
            if joined and joined[-1][1] == start:
                joined[-1][1] = end
            elif start < end:
                joined.append([start, end])
    return joined


def naive_window(windows, t):
    later = [(max(a, t), b) for a, b in windows if b > t]
    return later[0] if later else (inf, inf)


@given(
    st.lists(records(), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.25, 3.0, 9.75]),
    st.booleans(),
    st.sampled_from([inf, 4.0, 7.5]),
    st.lists(st.integers(0, 80).map(lambda k: k / 4), min_size=1, max_size=20),
)
@settings(max_examples=200, deadline=None)
def test_windows_are_those_of_a_loop_over_all_windows(rows, shift, repeat, until, instants):
    built = Availability.of(
        [np.reshape(w, (-1, 2)) for w, _ in rows], [length for _, length in rows], repeat=repeat
    ).shifted(shift)
    # The new 0 of `between` is 0.25 s later than the shift alone.
    seen = built if until == inf else built.between(0.25, until + 0.25)
    moved = shift if until == inf else shift + 0.25
    asked = [(d, t) for d in range(len(rows)) for t in instants]
    devices, t = [d for d, _ in asked], [t for _, t in asked]
    starts, ends = seen.window_at_or_after(devices, t)
    online = seen.is_available(devices, t)
    for i, (d, at) in enumerate(asked):
        windows, length = rows[d]
        # Shifts wrap in a repeated record, so the copies cover every instant asked for.
        offset = moved % length if repeat else moved
        whole = windows == [(0.0, length)] and repeat and until == inf
        loop = written_out(windows, length, shift=offset, repeat=repeat, until=until)
        if length * COPIES - offset < at + 2 * length:
            continue
        start, end = naive_window(loop, at)
        assert starts[i] == start
        assert ends[i] == (inf if whole else end)
        assert online[i] == (start == at)


@given(
    st.lists(records(), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.25, 3.0]),
    st.booleans(),
    st.integers(0, 120).map(lambda k: k / 4),
)
@settings(deadline=None)
def test_windows_before_an_instant_hold_every_instant_online(rows, shift, repeat, end):
    built = Availability.of(
        [np.reshape(w, (-1, 2)) for w, _ in rows], [length for _, length in rows], repeat=repeat
    ).shifted(shift)
    devices = [d for d in range(len(rows)) for _ in range(2)]
    owner, starts, ends = built.windows_before(devices, end)
    assert (starts < ends).all()
    assert (ends <= end).all()
    assert (np.diff(owner) >= 0).all()
    for place, device in enumerate(devices):
        own = owner == place
        assert (starts[own][1:] > ends[own][:-1]).all()
        for t in np.arange(0.0, end, 0.25):
            inside = ((starts[own] <= t) & (t < ends[own])).any()
            assert inside == built.is_available([device], t)[0]


def test_windows_at_both_ends_of_a_repeated_record_are_one_session():
    windows = [(0.0, 10.0), (40.0, 50.0), (90.0, 100.0)]
    for repeat, sessions in ((True, [(40.0, 50.0), (90.0, 110.0)]), (False, windows)):
        nights = Availability.of([[(1.0, 2.0)], windows], 100.0, repeat=repeat)
        owner, starts, ends = nights.sessions(np.array([1, 0]))
        assert list(zip(starts, ends, strict=True)) == [*sessions, (1.0, 2.0)]
        assert owner.tolist() == [0] * len(sessions) + [1]


@pytest.mark.parametrize("shift", [0.0, 7.0])
def test_a_window_as_long_as_its_repeated_record_never_ends(shift):
    always = Availability.of([[(0.0, 10.0)]], 10.0).shifted(shift)
    assert always.window_at_or_after([0], 1e7)[1].tolist() == [inf]
    assert always.between(0.0, 50.0).window_at_or_after([0], 3.0)[1].tolist() == [50.0]


def test_between_twice_is_the_same_as_between_once():
    phone = Availability.of([[(10.0, 20.0), (50.0, 90.0)]], 100.0)
    once, twice = phone.between(15.0, 70.0), phone.between(5.0, 80.0).between(10.0, 65.0)
    t = np.arange(0.0, 60.0, 2.5)
    devices = np.zeros(t.size, dtype=int)
    for a, b in zip(
        once.window_at_or_after(devices, t), twice.window_at_or_after(devices, t), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert once.window_at_or_after([0], 40.0)[1].tolist() == [55.0]


def test_packed_windows_are_the_same_as_windows_row_by_row():
    rows = [[(0.0, 1.0), (2.0, 5.0)], np.empty((0, 2)), [(3.0, 7.0)]]
    of = Availability.of(rows, [6.0, 8.0, 7.0])
    packed = Availability.packed(
        np.array([0.0, 2.0, 3.0]), np.array([1.0, 5.0, 7.0]), [2, 0, 1], [6.0, 8.0, 7.0]
    )
    for f in fields(Availability):
        np.testing.assert_array_equal(getattr(of, f.name), getattr(packed, f.name))


@pytest.mark.parametrize(
    "windows",
    [
        [(-1.0, 2.0)],
        [(2.0, 2.0)],
        [(3.0, 2.0)],
        [(0.0, 11.0)],
        [(0.0, 4.0), (3.0, 5.0)],
        [(0.0, 3.0), (3.0, 5.0)],
        [(6.0, 7.0), (1.0, 2.0)],
        [(np.nan, 2.0)],
        [(0.0, np.nan)],
        [(0.0, inf)],
    ],
)
def test_windows_that_mean_nothing_are_rejected_with_their_row(windows):
    with pytest.raises(TraceError, match=r"of row 1: expected windows inside \[0, 10.0\), sorted"):
        Availability.of([[(1.0, 2.0)], windows], 10.0)


@pytest.mark.parametrize("length", [0.0, -1.0, np.nan, inf])
def test_a_record_without_a_finite_length_is_rejected(length):
    with pytest.raises(TraceError, match="finite length > 0 s"):
        Availability.of([np.empty((0, 2))], length)


def test_no_devices_at_all_are_rejected():
    with pytest.raises(TraceError, match="at least one device"):
        Availability.of([], 1.0)


@pytest.mark.parametrize("row", [[1.0, 2.0, 3.0, 4.0], [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]])
def test_windows_that_are_no_pairs_are_rejected(row):
    with pytest.raises(TraceError, match="pairs"):
        Availability.of([row], 10.0)


@given(
    st.integers(0, 39),
    st.integers(0, 40),
    st.sampled_from([0.0, 0.25, 3.0, 9.75]),
    st.booleans(),
    st.lists(st.integers(0, 160).map(lambda k: k / 4), min_size=1, max_size=10),
)
@settings(max_examples=200, deadline=None)
def test_a_log_is_what_a_loop_over_all_logs_finds(start, length, shift, repeat, instants):
    start, length = start / 4, length / 4
    phone = Availability.of([np.empty((0, 2))], 10.0, logs=(start, length), repeat=repeat)
    phone = phone.shifted(shift)
    offset = shift % 10.0 if repeat else shift
    logs = [(start + 10.0 * c - offset, start + 10.0 * c - offset + length) for c in range(-1, 6)]
    for t in instants:
        found = [(a, b) for a, b in (logs if repeat else logs[1:2]) if a <= t < b]
        expected = found[-1] if found else (t, t)
        assert tuple(x[0] for x in phone.log_at([0], t)) == expected


def test_a_whole_record_is_logged_unless_it_is_said_otherwise_and_an_endless_one_has_no_seam():
    phones = Availability.of([[(1.0, 2.0)]], 100.0)
    assert [x.tolist() for x in phones.log_at([0, 0], [99.0, 100.0])] == [[0, 100], [100, 200]]
    assert [x.tolist() for x in Availability.always(1).log_at([0], 5.0)] == [[-inf], [inf]]
    assert [x.tolist() for x in phones.between(10.0, 60.0).log_at([0, 0], [5.0, 50.0])] == [
        [-10, 50],
        [50, 50],
    ]


@pytest.mark.parametrize("logs", [(-1.0, 5.0), (100.0, 5.0), (0.0, -1.0), (np.nan, 5.0)])
def test_a_log_that_cannot_be_is_rejected(logs):
    with pytest.raises(TraceError, match="must start in its record"):
        Availability.of([[(1.0, 2.0)]], 100.0, logs=logs)


@given(records(), st.integers(0, 60 * 24 * 14).map(lambda minutes: 60.0 * minutes))
@settings(max_examples=100, deadline=None)
def test_a_folded_log_is_online_when_the_log_was_at_the_same_hour_of_the_week(record, began):
    windows, _ = record
    hours = np.reshape(windows, (-1, 2)) * 3600.0 * 7
    log_s = 70 * 3600.0
    logged = Availability.of([hours], log_s)
    phone = logged.folded(np.array([began]), np.array([log_s]))
    assert phone.windows(0)[1] == 3 * 86_400.0
    since = np.arange(0.0, log_s, 900.0)
    in_week = began % (7 * 86_400.0) + since
    at = np.zeros(since.size, dtype=int)
    expected = [any(a <= t < b for a, b in hours) for t in since]
    np.testing.assert_array_equal(phone.is_available(at, in_week), expected)
    starts, ends = phone.log_at(at, in_week)
    assert set(starts) == {in_week[0]}
    assert set(ends) == {in_week[0] + log_s}
    # Two hours of the third day were not logged.
    assert phone.log_at([0], in_week[0] + log_s + 60.0)[1] == in_week[0] + log_s + 60.0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(0, 6)), max_size=15))
@settings(max_examples=200, deadline=None)
def test_the_longest_log_is_what_a_loop_finds(windows):
    owner, starts, lengths = np.array(windows, dtype=int).reshape(-1, 3).T
    kept, began, ended = longest_log(
        owner, starts.astype(float), (starts + lengths).astype(float), 3, gap_s=5.0
    )
    for device in range(3):
        own = sorted((a, a + n) for d, a, n in windows if d == device)
        logs: list[list[tuple[int, int]]] = []
        for a, b in own:
            if logs and a - max(end for _, end in logs[-1]) <= 5:
                logs[-1].append((a, b))
            else:
                logs.append([(a, b)])
        if not logs:
            assert ended[device] < began[device]
            continue
        best = max(logs, key=lambda log: sum(b - a for a, b in log))
        assert began[device] == best[0][0]
        assert ended[device] == max(b for _, b in best)
        mine = owner == device
        assert (
            sorted(zip(starts[mine & kept], (starts + lengths)[mine & kept], strict=True)) == best
        )


@given(
    st.lists(st.sets(st.integers(1, 39), max_size=6).map(sorted), min_size=3, max_size=3),
    st.integers(0, 90) | st.floats(0, 90),
    st.lists(st.integers(0, 90), min_size=3, max_size=3),
)
def test_what_is_known_around_an_instant_ends_at_the_gaps(edges, t, shifts):
    gaps = [[(a, b) for a, b in zip(e[::2], e[1::2], strict=False)] for e in edges]
    flat = np.array([g for row in gaps for g in row], dtype=float).reshape(-1, 2)
    devices = Availability.of([np.empty((0, 2))] * 3, 50.0, logs=(5.0, 40.0))
    devices = devices.with_gaps(flat[:, 0], flat[:, 1], [len(row) for row in gaps]).shifted(shifts)
    found = np.stack(devices.log_at([0, 1, 2], t), axis=1)
    for device, row in enumerate(gaps):
        since = (t + shifts[device]) % 50.0 - 5.0
        bounds = [0.0, *(x for gap in row for x in gap), 40.0]
        inside = [(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True) if a <= since < b]
        first, last = inside[0] if inside else (since, since)
        np.testing.assert_allclose(found[device], [t - since + first, t - since + last], atol=1e-9)


def test_a_gap_holds_no_window_and_lies_in_its_log():
    phone = Availability.of([[(10.0, 20.0)]], 100.0, logs=(5.0, 90.0))
    for start, end in [(0.0, 5.0), (10.0, 20.0), (4.0, 6.0), (80.0, 90.0), (30.0, 30.0)]:
        with pytest.raises(TraceError, match="expected gaps inside the log"):
            phone.with_gaps(np.array([start]), np.array([end]), [1])
    # It may begin as a window ends.
    gappy = phone.with_gaps(np.array([15.0]), np.array([30.0]), [1])
    assert gappy.known_s().tolist() == [75.0]
    assert Availability.joined([phone, gappy]).gap_offsets.tolist() == [0, 0, 1]
