"""Series against a naive walk over the segments of one row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstale.errors import TraceError
from fedstale.traces import Series

RATES = st.lists(st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=40)
INSTANTS = st.integers(0, 400).map(lambda k: k / 4)


def _rate(rates, step, repeat, t):
    k = int(t // step)
    return rates[k % len(rates)] if repeat or k < len(rates) else 0.0


def _naive_integral(rates, step, repeat, a, b):
    total, t = 0.0, a
    while t < b:
        upto = min((t // step + 1) * step, b)
        total += (upto - t) * _rate(rates, step, repeat, t)
        t = upto
    return total


def _naive_time(rates, step, repeat, amount, start):
    t, left = start, amount
    while left > 0:
        if t > start + 100_000 or (not repeat and t >= len(rates) * step) or not any(rates):
            return np.inf
        rate, upto = _rate(rates, step, repeat, t), (t // step + 1) * step
        if rate > 0 and left <= rate * (upto - t):
            return t + left / rate - start
        left, t = left - rate * (upto - t), upto
    return t - start


def _both(rates, repeat):
    starts = np.arange(len(rates)) * 2.0
    yield Series.regular([rates], step_s=2.0, repeat=repeat)
    yield Series.irregular([(starts, rates)], [len(rates) * 2.0], repeat=repeat)


@given(RATES, st.booleans(), INSTANTS, INSTANTS)
@settings(max_examples=150, deadline=None)
def test_the_integral_is_that_of_a_walk_over_segments(rates, repeat, a, span):
    expected = _naive_integral(rates, 2.0, repeat, a, a + span)
    for series in _both(rates, repeat):
        assert series.integral([0], a, a + span)[0] == pytest.approx(expected, abs=1e-9)


@given(RATES, st.booleans(), INSTANTS, st.integers(0, 200))
@settings(max_examples=200, deadline=None)
def test_the_inverse_is_the_first_instant_that_a_walk_finds(rates, repeat, start, amount):
    expected = _naive_time(rates, 2.0, repeat, float(amount), start)
    for series in _both(rates, repeat):
        found = series.time_to_accumulate([0], amount, start)[0]
        assert found == pytest.approx(expected, abs=1e-9)


def test_an_infinite_rate_carries_anything_in_no_time_and_nothing_without_any():
    series = Series.constant([np.inf, 2.0])
    assert series.time_to_accumulate([0, 0, 1], [1e300, 0.0, 4.0], 3.0).tolist() == [0.0, 0.0, 2.0]
    assert series.integral([0, 0, 1], [3.0, 3.0, 3.0], [3.0, 4.0, 4.0]).tolist() == [0, np.inf, 2]
    assert series.between(0.0, 5.0).time_to_accumulate([0], 1.0, 5.0).tolist() == [0.0]
    assert not series.is_instant
    assert series.take([0]).is_instant


@pytest.mark.parametrize("rate", [np.nan, -1.0])
def test_a_constant_rate_that_is_no_rate_is_rejected(rate):
    with pytest.raises(TraceError, match="expected a finite number >= 0"):
        Series.constant([np.inf, rate])


@pytest.mark.parametrize("rate", [np.nan, -1.0, np.inf])
def test_a_rate_that_is_no_rate_is_rejected(rate):
    with pytest.raises(TraceError, match="expected a finite number >= 0"):
        Series.regular([[1.0, rate]], step_s=1.0)


def test_rows_that_mean_nothing_are_rejected():
    with pytest.raises(TraceError, match="empty"):
        Series.regular([[]], step_s=1.0)
    with pytest.raises(TraceError, match="strictly increasing"):
        Series.irregular([([0.0, 2.0, 1.0], [1.0, 1.0, 1.0])], [4.0])
    with pytest.raises(TraceError, match="step_s"):
        Series.regular([[1.0]], step_s=0.0)


@pytest.mark.parametrize("factor", [np.nan, -1.0, np.inf])
def test_a_factor_that_is_no_factor_is_rejected(factor):
    with pytest.raises(TraceError, match=r"factor .*: expected a finite number >= 0"):
        Series.constant([1.0]).scaled([factor])


def test_devices_that_share_rows_take_two_dozen_bytes_each():
    rows = Series.regular(np.ones((10, 1000)), step_s=1.0)
    assert rows.take(np.zeros(100_000, dtype=int)).nbytes < 2_100_000
