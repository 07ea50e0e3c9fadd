from dataclasses import fields, replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstale.errors import TraceError
from fedstale.traces import Availability, Series, TraceSet
from fedstale.traces.forecast import TraceObserver
from fedstale.traces.forecast.observation import (
    EDGES_S,
    stepwise_means,
    time_to_change,
)
from fedstale.traces.forecast.sessions import HORIZONS_S, SessionHistory

DAY = 86_400.0
LENGTH = 3 * DAY


def devices(rng, n=6, *, repeat=True):
    windows = []
    for _ in range(n):
        edges = np.unique(rng.integers(0, int(LENGTH), size=2 * rng.integers(1, 30)))
        windows.append(edges[: edges.size // 2 * 2].reshape(-1, 2).astype(float))
    rows = rng.uniform(0, 9, size=(n, int(LENGTH) // 300)).astype(np.float32)
    return TraceSet(
        device_ids=pd.Index([f"d{i}" for i in range(n)], dtype="str"),
        availability=Availability.of(windows, LENGTH, repeat=repeat),
        compute=Series.regular(rows, step_s=300.0, repeat=repeat),
        downlink=Series.regular(rows * 2, step_s=300.0, repeat=repeat),
        uplink=Series.regular(rows * 3, step_s=300.0, repeat=repeat),
        epoch="2024-01-01T06:00:00",
    )


def with_another_future(traces, now, rng):
    """Return traces that are equal up to now and different afterwards."""
    windows = []
    for i in range(traces.n_devices):
        own, _ = traces.availability.windows(i)
        past = own[own[:, 0] < now].copy()
        if len(past) and past[-1, 1] >= now:
            past[-1, 1] = now + rng.uniform(1, 1000)
        begin = max(past[-1, 1], now) if len(past) else now
        later = begin + 1 + np.cumsum(rng.uniform(10, 4000, size=4))
        windows.append(np.concatenate([past, later.reshape(2, 2)]))
    changed = {}
    for name in ("compute", "downlink", "uplink"):
        rows = []
        for i in range(traces.n_devices):
            starts, rates, _ = getattr(traces, name).segments(i)
            keep = starts < now
            rows.append(
                (np.append(starts[keep], now), np.append(rates[keep], rng.uniform(100, 200)))
            )
        changed[name] = Series.irregular(rows, np.full(len(rows), 2 * LENGTH))
    return replace(traces, availability=Availability.of(windows, 2 * LENGTH), **changed)


def arrays(observed):
    """Return all arrays of an observation by name."""
    return {
        field.name: getattr(part, field.name)
        for part in (observed, observed.own)
        for field in fields(part)
        if field.name != "own"
    }


@pytest.mark.parametrize("seed", range(5))
def test_changing_the_future_changes_no_observation(seed):
    rng = np.random.default_rng(seed)
    traces = devices(rng)
    now = float(rng.uniform(2000, LENGTH - 6000))
    who = np.arange(traces.n_devices)
    before = TraceObserver(traces).at(who, now)
    after = TraceObserver(with_another_future(traces, now, rng)).at(who, now)
    for name, values in arrays(before).items():
        np.testing.assert_allclose(arrays(after)[name], values, rtol=1e-6, atol=1e-6, err_msg=name)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0, LENGTH - 1), st.floats(0, 2 * DAY))
def test_steps_are_the_means_of_a_second_by_second_loop(seed, now, memory):
    rng = np.random.default_rng(seed)
    now, memory = float(np.floor(now)), float(np.floor(memory))
    traces = devices(rng, 2)
    seen = TraceObserver(traces).at([1], now, history_s=memory)
    begin = max(now - memory, 0.0)
    step = int(rng.integers(EDGES_S.size - 1))
    start, end = max(now - EDGES_S[step + 1], begin), max(now - EDGES_S[step], begin)
    if start >= end:
        assert np.isnan(seen.rates[0, :, step]).all()
        return
    seconds = np.arange(start, end)
    starts, rates, _ = traces.compute.segments(1)
    each = rates[np.searchsorted(starts, seconds, side="right") - 1]
    assert seen.rates[0, 0, step] == pytest.approx(each.mean(), rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0, LENGTH - 1))
def test_time_since_the_last_change_is_found_by_walking_back(seed, now):
    rng = np.random.default_rng(seed)
    now = float(np.floor(now))
    traces = devices(rng, 2)
    seen = TraceObserver(traces).at([0], now)
    windows, _ = traces.availability.windows(0)
    edges = windows.ravel()
    past = edges[edges <= now]
    expected = now - past[-1] if past.size else now
    assert seen.own.age_s[0] == pytest.approx(expected)


def test_a_window_counts_only_since_the_record_began_again():
    traces = TraceSet(
        device_ids=pd.Index(["a"], dtype="str"),
        availability=Availability.of([[(0.0, 50.0), (90.0, 100.0)]], 100.0).shifted([95.0]),
    )
    seen = TraceObserver(traces).at([0, 0, 0], [0.0, 20.0, 120.0])
    # The record begins again at 5 s and at 105 s, within a window.
    np.testing.assert_allclose(seen.own.age_s, [0.0, 15.0, 15.0])
    np.testing.assert_allclose(seen.history_s, [0.0, 15.0, 15.0])


def test_without_history_nothing_is_known_but_the_present():
    traces = devices(np.random.default_rng(1))
    seen = TraceObserver(traces).at([0, 1], 2 * DAY, history_s=0.0)
    assert np.isnan(seen.rates).all()
    assert np.isnan(seen.own.online_share).all()
    np.testing.assert_array_equal(seen.own.age_s, 0.0)
    np.testing.assert_array_equal(seen.time_of_day_s, 6 * 3600.0)


def test_unknown_channels_are_nan_and_unknown_availability_counts_as_online():
    traces = TraceSet(device_ids=pd.Index(["a"], dtype="str"), compute=Series.constant([3.0]))
    seen = TraceObserver(traces).at([0], 5000.0)
    assert seen.online[0]
    assert np.isnan(seen.rates[0, 1:]).all()
    assert np.isnan(seen.own.online_share).all()
    assert seen.rates[0, 0, 0] == pytest.approx(3.0)


def test_many_devices_at_once_are_seen_as_each_of_them_alone():
    traces = devices(np.random.default_rng(6))
    rng = np.random.default_rng(7)
    who, when = rng.integers(6, size=1500), rng.uniform(0, 2 * LENGTH, 1500)
    observer = TraceObserver(traces)
    together = observer.at(who, when)
    for i in rng.integers(1500, size=20):
        alone = observer.at(who[i : i + 1], when[i : i + 1])
        for name, values in arrays(alone).items():
            np.testing.assert_array_equal(values[0], arrays(together)[name][i], err_msg=name)


def test_time_to_change_ends_where_the_state_differs():
    traces = devices(np.random.default_rng(4))
    rng = np.random.default_rng(5)
    who, when = rng.integers(6, size=300), rng.uniform(0, LENGTH, 300)
    wait = time_to_change(traces.availability, who, when)
    now = traces.availability.is_available(who, when)
    assert np.isfinite(wait).all()
    np.testing.assert_array_equal(traces.availability.is_available(who, when + wait - 1e-3), now)
    np.testing.assert_array_equal(traces.availability.is_available(who, when + wait + 1e-3), ~now)


@pytest.mark.parametrize(
    ("who", "now", "memory"), [([9], 0.0, 1.0), ([0], -1.0, 1.0), ([0], np.nan, 1.0), ([0], 0, -1)]
)
def test_impossible_questions_are_one_sentence(who, now, memory):
    observer = TraceObserver(devices(np.random.default_rng(0)))
    with pytest.raises(TraceError, match="expected"):
        observer.at(who, now, history_s=memory)


RECORD_S = 50_000.0
SEEDS = st.integers(0, 2**32 - 1)


def rates(rng, n=5):
    """Return rates of every kind of storage, many of them zero."""
    regular = rng.uniform(0, 1e7, (n, 500)) * (rng.random((n, 500)) < 0.6)
    rows = []
    for count in rng.integers(0, 60, n):
        starts = np.append(0.0, np.unique(rng.uniform(1, RECORD_S - 1, count)))
        rows.append((starts, rng.uniform(0, 9, starts.size) * (rng.random(starts.size) < 0.6)))
    shift = rng.uniform(0, RECORD_S, n)
    for repeat in (True, False):
        yield Series.regular(regular, step_s=100.0, repeat=repeat).shifted(shift)
        irregular = Series.irregular(rows, np.full(n, RECORD_S), repeat=repeat).scaled(
            rng.random(n)
        )
        yield irregular
        yield irregular.shifted(shift).between(300.0, 1.7 * RECORD_S)
    yield Series.constant(rng.random(n))


def falling(rng, n, m=12):
    """Return instants, of which some coincide and some lie on the edges of segments."""
    t = np.round(rng.uniform(0, 4 * RECORD_S, (n, m)), int(rng.integers(-2, 4)))
    return -np.sort(-np.maximum(t, 0.0), axis=1)


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_differences_are_the_integrals_of_the_series(seed):
    rng = np.random.default_rng(seed)
    for series in rates(rng):
        chosen = rng.integers(5, size=30)
        edges = falling(rng, 30)
        found = stepwise_means(series, chosen, edges)
        start, end = edges[:, 1:], edges[:, :-1]
        each = np.repeat(chosen, start.shape[1])
        expected = series.integral(each, start.ravel(), end.ravel()).reshape(start.shape)
        with np.errstate(divide="ignore", invalid="ignore"):
            expected = np.where(end > start, expected / (end - start), np.nan)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_time_online_is_what_a_loop_over_the_windows_adds_up(seed):
    rng = np.random.default_rng(seed)
    windows = []
    for count in (0, 1, *rng.integers(0, 20, 4)):
        edges = np.unique(rng.uniform(0, RECORD_S, 2 * int(count)))
        windows.append(edges.reshape(-1, 2))
    shift = rng.uniform(0, RECORD_S, 6)
    for repeat in (True, False):
        phones = Availability.of(windows, RECORD_S, repeat=repeat).shifted(shift)
        phones = phones.between(100.0, 2.5 * RECORD_S)
        edges = falling(rng, 6)
        found = SessionHistory(phones).online_s(np.arange(6), edges)
        for i in range(6):
            cycles = np.arange(5 if repeat else 1) * RECORD_S
            own = (windows[i][None] + cycles[:, None, None]).reshape(-1, 2) - phones.shifts[i]
            own = np.clip(own, 0.0, phones.until)
            for k in range(edges.shape[1] - 1):
                part = np.clip(own, edges[i, k + 1], edges[i, k])
                assert found[i, k] - found[i, k + 1] == pytest.approx(np.diff(part).sum(), abs=1e-6)


def test_a_history_begins_with_the_log_and_not_with_what_the_record_held_the_last_time():
    # Logged from 20:00 to 04:00 and repeated each day: the next night is not known by heart.
    night = Availability.of(
        [[(3600.0, 7200.0), (79_200.0, 82_800.0)]], DAY, logs=(72_000.0, 28_800.0)
    )
    traces = TraceSet(device_ids=pd.Index(["a"], dtype="str"), availability=night)
    seen = TraceObserver(traces).at([0, 0, 0], [2 * DAY + 1800.0, 2 * DAY - 3600.0, DAY + 43_200.0])
    np.testing.assert_allclose(seen.history_s, [4.5 * 3600, 3 * 3600, 0.0])
    np.testing.assert_allclose(seen.own.age_s, [1.5 * 3600, 0.0, 0.0])
    assert not seen.online.any()
    # The hour of this evening, and nothing of earlier nights.
    np.testing.assert_allclose(seen.own.lengths_s[0, :2], [3600.0, np.nan])
    early = HORIZONS_S <= 4 * 3600.0
    assert not seen.own.same_time[0, early].any()


def test_an_infinite_rate_is_none_that_a_device_has_observed():
    observed = TraceObserver(TraceSet.ideal(2)).at([0, 1], 3600.0)
    assert np.isnan(observed.rates).all()
    assert observed.online.all()
