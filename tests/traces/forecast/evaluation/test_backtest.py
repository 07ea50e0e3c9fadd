from dataclasses import replace

import numpy as np
import pytest
from perfect_forecaster import Perfect

from fedstale.errors import TraceError
from fedstale.traces import Job, Status
from fedstale.traces.forecast import LastValue
from fedstale.traces.forecast.evaluation import (
    backtested,
    by_horizon,
    job_scores,
    least_rates,
    printed,
    rolling,
    true_times,
)
from fedstale.traces.forecast.evaluation.backtest import finishes
from fedstale.traces.forecast.survival import LONGEST_S, JobForecast

DAY = 86_400.0
JOB = Job(work=60.0, download_bytes=1_000_000, upload_bytes=1_000_000, ttl_s=1800.0)


@pytest.fixture(scope="module")
def tested(observer):
    return rolling(observer, np.arange(40, 60), start=2 * DAY, until=3 * DAY, step_s=3600.0, seed=0)


@pytest.fixture(scope="module")
def origins(tested):
    return tested.observed


@pytest.fixture(scope="module")
def last(training, held_out):
    return LastValue().fit(training, held_out, seed=0)


def test_origins_are_in_order_inside_the_part_and_hold_all_devices_online(observer, origins, fleet):
    assert np.all(np.diff(origins.now) >= 0)
    assert 2 * DAY <= origins.now.min() < 2 * DAY + 3600.0
    np.testing.assert_array_equal(np.diff(np.unique(origins.now // 3600.0)), 1.0)
    assert origins.now.max() < 3 * DAY
    for now in np.unique(origins.now):
        chosen = origins.devices[origins.now == now]
        online = np.arange(40, 60)[
            fleet.availability.is_available(np.arange(40, 60), np.full(20, now))
        ]
        assert set(online) <= set(chosen)
        assert len(set(chosen)) == chosen.size


def test_a_part_without_origins_is_one_sentence(observer):
    with pytest.raises(TraceError, match="no origin"):
        rolling(observer, np.arange(60), start=9 * DAY, until=10 * DAY, step_s=60.0, seed=0)


def test_a_perfect_forecast_makes_no_error_and_the_last_value_does(
    tested, observer, last, training
):
    both = {"last-value": last, "perfect": Perfect(observer, training)}
    table = by_horizon(both, tested, least_rates(training))
    for metric in ("brier", "pinball"):
        part = table[table["metric"] == metric].groupby("forecaster")["value"]
        assert part.max()["perfect"] < 1e-6
        assert part.max()["last-value"] > 0.01
    known = table[table["forecaster"].eq("last-value") & table["metric"].eq("brier")]
    assert (known["low"] <= known["value"] + 1e-12).all()
    assert (known["value"] <= known["high"] + 1e-12).all()


def test_true_times_are_those_of_trips_where_nothing_interrupts(fleet, origins):
    times = true_times(fleet, origins, JOB, np.inf)
    outcome = fleet.trips(origins.devices, origins.now, JOB)
    made = (outcome.status == Status.REPORTED) & (outcome.started == origins.now)
    assert made.any()
    np.testing.assert_allclose(
        times[made, 2], outcome.reported[made] - origins.now[made], rtol=1e-9
    )


def test_a_deadline_beyond_the_part_is_no_test(fleet, origins):
    finished = finishes(fleet, origins, JOB, 3 * DAY)
    assert np.isnan(finished[origins.now + 1800.0 > 3 * DAY]).all()
    online = fleet.availability.is_available(origins.devices, origins.now)
    assert np.isnan(finished[~online]).all()
    assert set(finished[~np.isnan(finished)]) <= {0.0, 1.0}


@pytest.fixture(scope="module")
def exact(origins, fleet):
    """Devices that are sent a job, what became of it, and the forecast of just that."""
    some = origins.take(origins.online)
    times, finished = true_times(fleet, some, JOB, 3 * DAY), finishes(fleet, some, JOB, 3 * DAY)
    known = np.nan_to_num(times, nan=60.0)
    forecast = JobForecast(times_s=np.repeat(known[..., None], 3, axis=2), p_finish=finished)
    return some, times, finished, forecast


def test_scores_of_a_perfect_forecast_of_a_job_are_perfect(exact):
    some, times, finished, forecast = exact
    table = job_scores("perfect", forecast, some, times, finished)
    got = table.set_index(["quantity", "metric"])["value"]
    assert got["finish", "brier"] == 0.0
    assert got["total_s", "coverage"] == 1.0
    assert got["total_s", "pinball"] == 0.0


def backtest_of(traces):
    return backtested(traces, ["last-value", "hour"], [], JOB, step_s=7200.0, examples=300, seed=0)


def test_a_whole_backtest_has_every_table_and_is_the_same_again(fleet):
    once, again = backtest_of(fleet), backtest_of(fleet)
    assert set(once) == {"verdict", "horizons", "jobs", "reliability"}
    for name, table in once.items():
        assert len(table)
        assert table.equals(again[name])
    shown = dict(printed(once))
    # The verdict, two scores of horizons, four of the job, and reliability.
    assert len(shown) == 1 + 2 + 4 + 1
    for table in shown.values():
        assert table.notna().any(axis=None)
        assert max(map(len, table.to_string().splitlines())) <= 120


def test_one_forecast_of_never_does_not_make_the_median_error(exact):
    some, times, finished, forecast = exact
    times_s = forecast.times_s.copy()
    times_s[np.flatnonzero(np.isfinite(times[:, 2]))[0], 2] = LONGEST_S
    table = job_scores("x", replace(forecast, times_s=times_s), some, times, finished)
    got = table.set_index(["quantity", "metric"])["value"]
    assert got["total_s", "median_error_s"] == 0.0
    assert got["total_s", "pinball"] > 0.0


def test_traces_without_all_channels_are_tested_on_what_they_know(fleet):
    tables = backtest_of(replace(fleet, compute=None, downlink=None, uplink=None))
    assert set(tables) == {"verdict", "horizons"}
    assert set(tables["horizons"]["quantity"]) == {"online", "offline", "available"}
    assert len(dict(printed(tables))) == 2
