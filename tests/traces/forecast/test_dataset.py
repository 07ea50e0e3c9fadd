import numpy as np
import pandas as pd
import pytest

from fedstale.errors import TraceError
from fedstale.traces import Availability, Series, TraceSet
from fedstale.traces.forecast import TraceObserver, draw
from fedstale.traces.forecast.backtest import rolling
from fedstale.traces.forecast.dataset import draw_parts, examples_at, record_s, split, targets_at
from fedstale.traces.forecast.observation import RATE_HORIZONS_S
from fedstale.traces.forecast.sessions import HORIZONS_S
from fedstale.traces.synthetic import LEVELS, availability_marginal

DAY = 86_400.0


def test_survival_is_that_of_the_windows(fleet):
    rng = np.random.default_rng(0)
    who, when = rng.integers(60, size=200), rng.uniform(0, DAY, 200)
    survival = targets_at(fleet, who, when, np.full(200, 3 * DAY))[0]
    for i in range(0, 200, 7):
        now = fleet.availability.is_available(who[[i]], when[i])[0]
        for k, horizon in enumerate(HORIZONS_S[:5]):
            path = when[i] + np.arange(0, horizon + 1, 1.0)
            same = fleet.availability.is_available(np.full(path.size, who[i]), path) == now
            # A change between two whole seconds is seen at the second after it.
            assert survival[i, k] == same.all() or same[:-1].all()


def test_mean_rates_are_the_integrals_of_the_trace(fleet):
    got = targets_at(fleet, np.array([3]), np.array([500.0]), np.array([DAY]))[2]
    for k, horizon in enumerate(RATE_HORIZONS_S):
        expected = fleet.downlink.integral([3], 500.0, 500.0 + horizon)[0] / horizon
        assert got[0, 1, k] == pytest.approx(expected)


def test_labels_that_would_need_more_than_the_part_are_unknown(fleet):
    survival, available, rates = targets_at(
        fleet, np.array([0]), np.array([1000.0]), np.array([1000.0 + 900.0])
    )
    np.testing.assert_array_equal(np.isnan(survival[0]), HORIZONS_S >= 900.0)
    np.testing.assert_array_equal(np.isnan(available[0]), HORIZONS_S >= 900.0)
    np.testing.assert_array_equal(np.isnan(rates[0, 0]), RATE_HORIZONS_S > 900.0)


def test_origins_lie_in_the_part_and_half_of_them_are_online(observer):
    examples = draw(observer, np.arange(10, 30), start=DAY, until=2 * DAY, n=600, seed=0)
    assert examples.observed.now.min() >= DAY
    assert examples.observed.now.max() < 2 * DAY
    assert set(examples.observed.devices) <= set(range(10, 30))
    assert 0.4 < examples.observed.online.mean() < 0.75


def test_the_same_seed_draws_the_same_origins_and_another_seed_others(observer):
    one, two, three = (
        draw(observer, np.arange(60), start=0.0, until=DAY, n=50, seed=s).observed.now
        for s in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, two)
    assert not np.array_equal(one, three)


def test_some_devices_remember_only_a_part_of_their_history(observer):
    examples = draw(
        observer, np.arange(60), start=DAY, until=2 * DAY, n=400, seed=0, short_history=0.5
    )
    short = examples.observed.history_s < examples.observed.now
    assert 0.4 < short.mean() < 0.6
    assert (examples.observed.history_s == 0).any()


def test_records_of_rates_alone_end_where_the_longest_ends():
    rows = [np.ones(4), np.ones(7)]
    traces = TraceSet(
        device_ids=pd.Index(["a", "b"], dtype="str"), downlink=Series.regular(rows, step_s=10.0)
    )
    np.testing.assert_array_equal(record_s(traces), [40.0, 70.0])
    examples = draw(TraceObserver(traces), [0, 1], start=0.0, until=np.inf, n=200, seed=0)
    assert np.all(examples.observed.now < np.array([40.0, 70.0])[examples.observed.devices])


def test_a_part_after_every_record_is_one_sentence(observer):
    with pytest.raises(TraceError, match="no log to draw 10 origins"):
        draw(observer, np.arange(60), start=9 * DAY, until=10 * DAY, n=10, seed=0)


def test_survival_of_new_sessions_is_counted_over_sessions_that_begin():
    traces = TraceSet(
        device_ids=pd.Index(["a"], dtype="str"),
        availability=Availability.of([[(100.0 * i, 100.0 * i + 70.0) for i in range(50)]], DAY),
    )
    survival = examples_at(TraceObserver(traces), [0], 50.0, until=DAY).new_session_survival
    assert survival[0] > 0.95
    assert survival[1] < 0.05


def test_nothing_learnt_comes_from_a_tested_device_or_a_tested_hour(fleet):
    parts = split(fleet, seed=0)
    training, held_out = draw_parts(fleet, n=300, seed=0)
    for examples, allowed in ((training, parts.training), (held_out, parts.validation)):
        assert set(examples.observed.devices) <= set(allowed)
        assert examples.observed.now.max() < parts.turn
        late = examples.observed.now[:, None] + 3600.0 > parts.turn
        assert np.isnan(examples.rates[:, 0, 5:])[late[:, 0]].all()


@pytest.mark.parametrize("n", [1, 4])
def test_few_devices_are_split_by_time_alone(n):
    few = TraceSet.synthetic(n, seed=2, days=8)
    parts = split(few, seed=0)
    for devices in (parts.training, parts.validation, parts.testing):
        np.testing.assert_array_equal(devices, np.arange(n))
    assert parts.turn == 5 * DAY
    assert parts.end == 8 * DAY
    # A whole day validates, with all of its hours.
    assert parts.learnt == parts.validated == 4 * DAY
    training, held_out = draw_parts(few, n=300, seed=0)
    for examples, start, until in ((training, 0, 4), (held_out, 4, 5)):
        assert start * DAY <= examples.observed.now.min()
        assert examples.observed.now.max() < until * DAY
        late = examples.observed.now[:, None] + HORIZONS_S >= until * DAY
        assert late.any()
        assert np.isnan(examples.survival[late]).all()


def test_few_devices_with_a_short_record_are_one_sentence_that_says_how_many_days_are_missing():
    few = TraceSet.synthetic(1, seed=2, days=3)
    with pytest.raises(TraceError, match=r"at least 5 devices, or 7 days .* record 4\.0 days more"):
        split(few, seed=0)
    with pytest.raises(TraceError, match=r"devices: 4, with a record of 0\.0 days"):
        split(TraceSet.ideal(4), seed=0)
    # A recorder that goes on for a week stops at the reading before its end.
    assert split(phone((0.0, 7 * DAY - 5.0), days=7), seed=0).end == 7 * DAY - 5.0


def phone(logs, *, days=1):
    """Return a phone that is online from 1 h to 3 h, and logged for a part of its record."""
    return TraceSet(
        device_ids=pd.Index(["a"], dtype="str"),
        availability=Availability.of([[(3600.0, 3 * 3600.0)]], days * DAY, logs=logs),
    )


def test_no_label_lies_beyond_the_end_of_a_log():
    observer = TraceObserver(phone((0.0, 4 * 3600.0)))
    survival = examples_at(observer, [0], 2 * 3600.0, until=DAY).survival[0]
    np.testing.assert_array_equal(np.isnan(survival), HORIZONS_S >= 2 * 3600.0)
    # The record says what came after; nobody saw it.
    assert survival[HORIZONS_S == 3600.0] == 0.0


def test_no_origin_is_drawn_where_nothing_was_logged():
    observer = TraceObserver(phone((20 * 3600.0, 8 * 3600.0)))
    examples = draw(observer, [0], start=0.0, until=3 * DAY, n=300, seed=0)
    hour = examples.observed.now // 3600
    assert set(hour) == {20, 21, 22, 23, 24, 25, 26, 27}


def test_being_online_at_a_horizon_is_the_state_then(fleet):
    rng = np.random.default_rng(1)
    who, when = rng.integers(60, size=100), rng.uniform(0, DAY, 100)
    available = targets_at(fleet, who, when, np.full(100, 3 * DAY))[1]
    for k, horizon in enumerate(HORIZONS_S):
        np.testing.assert_array_equal(
            available[:, k], fleet.availability.is_available(who, when + horizon)
        )


def test_most_devices_have_hours_to_test_on_where_one_was_logged_for_long():
    days = [2, 5, 5, 6, 40]
    traces = TraceSet(
        device_ids=pd.Index([f"d{i}" for i in range(5)], dtype="str"),
        availability=Availability.of([[(0.0, 3600.0)]] * 5, np.array(days) * DAY),
    )
    parts = split(traces, seed=0)
    assert parts.turn == 0.625 * 5 * DAY
    assert parts.end == 40 * DAY


def gappy_set() -> TraceSet:
    """Return two devices logged for four days, of which one day of the second is unknown."""
    hours = np.arange(0, 4 * DAY, 7200.0)
    windows = np.stack([hours, hours + 3600.0], axis=1)
    seen = windows[(windows[:, 0] < DAY) | (windows[:, 0] >= 2 * DAY)]
    online = Availability.of([windows, seen], 4 * DAY)
    online = online.with_gaps(np.array([DAY]), np.array([2 * DAY]), [0, 1])
    return TraceSet(device_ids=pd.Index(["a", "b"]), availability=online)


def test_nothing_is_learnt_or_scored_in_a_gap_or_over_it():
    observer = TraceObserver(gappy_set())
    drawn = draw(observer, [0, 1], start=0.0, until=4 * DAY, n=400, seed=0)
    rolled = rolling(observer, np.arange(2), start=0.0, until=4 * DAY, step_s=1800.0, seed=0)
    for examples in (drawn, rolled):
        now, of_b = examples.observed.now, examples.observed.devices == 1
        assert now[~of_b].size > now[of_b].size > 0
        assert not ((now >= DAY) & (now < 2 * DAY))[of_b].any()
        # Before the gap a label ends with it, and after it no memory reaches behind it.
        before, after = of_b & (now < DAY), of_b & (now >= 2 * DAY)
        beyond = now[before][:, None] + HORIZONS_S >= DAY
        assert np.isnan(examples.available[before][beyond]).all()
        assert np.isfinite(examples.available[before][~beyond]).all()
        assert (examples.observed.history_s[after] <= now[after] - 2 * DAY).all()
    # Every session and every pause that was seen whole lasts an hour.
    assert availability_marginal(gappy_set().availability)["gap_s"] == [3600.0] * len(LEVELS)
