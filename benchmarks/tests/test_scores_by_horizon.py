"""Scores of forecasters by horizon, and their intervals."""

import numpy as np
import pytest
from shared_fleets import synthetic

from fedstale.traces.forecast import LastValue, TraceObserver, draw
from fedstale.traces.forecast.backtest import brier, least_rates, pinball, rolling
from forecasts.horizons import by_horizon, covered, mean_with_interval

DAY = 86_400.0


def test_every_quantity_is_scored_inside_its_interval():
    observer = TraceObserver(synthetic(60, days=3))
    training, held_out = (
        draw(observer, some, start=0.0, until=2 * DAY, n=400, seed=1)
        for some in (np.arange(40), np.arange(40, 60))
    )
    span = {"start": 2 * DAY, "until": 3 * DAY, "step_s": 3600.0}
    tested = rolling(observer, np.arange(40, 60), **span, seed=0)
    last = LastValue().fit(training, held_out, seed=0)
    table = by_horizon({"last-value": last}, tested, least_rates(training))
    scored = {"online", "offline", "available", "compute", "downlink", "uplink"}
    assert set(table["quantity"]) == scored
    assert (table.groupby("metric")["value"].max()[["brier", "pinball"]] > 0.01).all()
    known = table[table["metric"].eq("brier")]
    assert (known["low"] <= known["value"] + 1e-12).all()
    assert (known["value"] <= known["high"] + 1e-12).all()


def test_unknown_outcomes_stay_unknown_in_every_score():
    nan = np.array([np.nan])
    q = np.array([[1.0, 2.0, 3.0]])
    for score in (
        pinball(q, nan),
        covered(q, nan),
        brier(np.array([0.5]), nan),
    ):
        assert np.isnan(score).all()


def test_the_interval_widens_where_examples_of_a_device_are_alike():
    rng = np.random.default_rng(3)
    each = rng.normal(size=50)
    alike = np.repeat(each, 100)
    free = rng.normal(size=5000)
    devices = np.repeat(np.arange(50), 100)
    _, low, high = mean_with_interval(alike, devices)
    _, low_free, high_free = mean_with_interval(free, devices)
    assert high - low > 4 * (high_free - low_free)
    assert high - low == pytest.approx(4 * each.std() / np.sqrt(50), rel=0.3)


def test_the_mean_leaves_unknown_scores_out():
    value, low, high = mean_with_interval(np.array([1.0, np.nan, 3.0]), np.array([0, 0, 1]))
    assert value == 2.0
    assert low <= 2.0 <= high
    assert np.isnan(mean_with_interval(np.array([np.nan]), np.array([0]))).all()
