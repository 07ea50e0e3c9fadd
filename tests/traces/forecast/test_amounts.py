import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstale.traces import Availability, Series
from fedstale.traces.forecast.amounts import CarriedAmounts, OnlineTime, means, stepwise_means

LENGTH = 50_000.0
SEEDS = st.integers(0, 2**32 - 1)


def rates(rng, n=5):
    """Return rates of every kind of storage, many of them zero."""
    regular = rng.uniform(0, 1e7, (n, 500)) * (rng.random((n, 500)) < 0.6)
    rows = []
    for count in rng.integers(0, 60, n):
        starts = np.append(0.0, np.unique(rng.uniform(1, LENGTH - 1, count)))
        rows.append((starts, rng.uniform(0, 9, starts.size) * (rng.random(starts.size) < 0.6)))
    shift = rng.uniform(0, LENGTH, n)
    for repeat in (True, False):
        yield Series.regular(regular, step_s=100.0, repeat=repeat).shifted(shift)
        irregular = Series.irregular(rows, np.full(n, LENGTH), repeat=repeat).scaled(rng.random(n))
        yield irregular
        yield irregular.shifted(shift).between(300.0, 1.7 * LENGTH)
    yield Series.constant(rng.random(n))


def falling(rng, n, m=12):
    """Return instants, of which some coincide and some lie on the edges of segments."""
    t = np.round(rng.uniform(0, 4 * LENGTH, (n, m)), int(rng.integers(-2, 4)))
    return -np.sort(-np.maximum(t, 0.0), axis=1)


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_differences_are_the_integrals_of_the_series(seed):
    rng = np.random.default_rng(seed)
    for series in rates(rng):
        who = rng.integers(5, size=30)
        edges = falling(rng, 30)
        found = stepwise_means(CarriedAmounts(series), who, edges)
        start, end = edges[:, 1:], edges[:, :-1]
        each = np.repeat(who, start.shape[1])
        expected = series.integral(each, start.ravel(), end.ravel()).reshape(start.shape)
        with np.errstate(divide="ignore", invalid="ignore"):
            expected = np.where(end > start, expected / (end - start), np.nan)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-5)
        np.testing.assert_allclose(
            means(CarriedAmounts(series), who, start, end), expected, rtol=1e-6, atol=1e-5
        )


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_time_there_is_what_a_loop_over_the_windows_adds_up(seed):
    rng = np.random.default_rng(seed)
    windows = []
    for count in (0, 1, *rng.integers(0, 20, 4)):
        edges = np.unique(rng.uniform(0, LENGTH, 2 * int(count)))
        windows.append(edges.reshape(-1, 2))
    shift = rng.uniform(0, LENGTH, 6)
    for repeat in (True, False):
        phones = Availability.of(windows, LENGTH, repeat=repeat).shifted(shift)
        phones = phones.between(100.0, 2.5 * LENGTH)
        edges = falling(rng, 6)
        found = OnlineTime(phones).upto(np.arange(6), edges)
        for i in range(6):
            cycles = np.arange(5 if repeat else 1) * LENGTH
            own = (windows[i][None] + cycles[:, None, None]).reshape(-1, 2) - phones.shifts[i]
            own = np.clip(own, 0.0, phones.until)
            for k in range(edges.shape[1] - 1):
                part = np.clip(own, edges[i, k + 1], edges[i, k])
                assert found[i, k] - found[i, k + 1] == pytest.approx(np.diff(part).sum(), abs=1e-6)


def test_a_rate_of_zero_is_zero_exactly_also_around_the_end_of_a_record():
    series = Series.regular([[0.0, 1e7 / 3, 1e6 / 7, 0.0]], step_s=10.0)
    edges = np.array([[409.0, 405.0, 400.0, 395.0, 391.0]])
    assert np.all(stepwise_means(CarriedAmounts(series), np.array([0]), edges) == 0.0)


def test_nobody_has_been_there_without_windows():
    there = OnlineTime(Availability.of([np.empty((0, 2))] * 2, 10.0))
    np.testing.assert_array_equal(there.upto(np.arange(2), np.ones((2, 3))), 0.0)


def test_late_devices_lose_no_digits_to_the_many_before_them():
    n = 3000
    windows = [[(0.1, 86_400.3)]] * (n - 1) + [[(10.0, 10.1), (20.0, 20.2)]]
    there = OnlineTime(Availability.of(windows, 1e5, repeat=False))
    found = there.upto(np.array([n - 1]), np.array([[30.0, 15.0]]))
    np.testing.assert_allclose(found, [[0.3, 0.1]], rtol=1e-12)
