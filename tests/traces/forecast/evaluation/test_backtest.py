from dataclasses import replace

import numpy as np
import pytest

from fedstale.errors import TraceError
from fedstale.traces import Job, Status
from fedstale.traces.forecast import Adaptation, LastValue, Oracle
from fedstale.traces.forecast.evaluation.backtest import (
    by_horizon,
    error_per_device,
    least_rates,
    rolling,
)
from fedstale.traces.forecast.evaluation.jobs import (
    calibrated,
    calibration_scores,
    decision,
    finishes,
    job_scores,
    most_reliable,
    true_times,
)
from fedstale.traces.forecast.evaluation.report import backtested, printed, why_empty
from fedstale.traces.forecast.survival import LONGEST_S

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


def test_the_oracle_makes_no_error_and_the_last_value_does(tested, fleet, last, training):
    table = by_horizon({"last-value": last, "oracle": Oracle(fleet)}, tested, training)
    for metric in ("brier", "mae", "mase", "pinball"):
        part = table[table["metric"] == metric].groupby("forecaster")["value"]
        assert part.max()["oracle"] < 1e-6
        assert part.max()["last-value"] > 0.01
    known = table[table["forecaster"].eq("last-value") & table["metric"].eq("brier")]
    assert (known["low"] <= known["value"] + 1e-12).all()
    assert (known["value"] <= known["high"] + 1e-12).all()
    assert len(error_per_device({"last-value": last}, tested, least_rates(training))) == 3


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


def test_an_outcome_corrects_no_forecast_that_was_made_before_it(
    observer, origins, last, held_out, fleet
):
    observed = observer.at(origins.devices, origins.now)
    forecast = last.forecast_job(observed, JOB)
    times = true_times(fleet, origins, JOB, 3 * DAY)
    fleet_wide = calibration_scores(last, fleet, held_out.observed, JOB, 2 * DAY)
    before = calibrated(forecast, origins, times, fleet_wide, Adaptation())
    late = origins.now + times[:, 2] > 2.5 * DAY
    changed = calibrated(
        forecast, origins, np.where(late[:, None], times * 50, times), fleet_wide, Adaptation()
    )
    early = origins.now <= 2.5 * DAY
    np.testing.assert_array_equal(before.total_s[early], changed.total_s[early])
    assert not np.array_equal(before.total_s, changed.total_s)


def test_scores_of_a_perfect_forecast_of_a_job_are_perfect(observer, origins, fleet):
    some = origins.take(origins.online)
    forecast = Oracle(fleet).forecast_job(some, JOB)
    finished = finishes(fleet, some, JOB, 3 * DAY)
    table = job_scores("oracle", forecast, some, true_times(fleet, some, JOB, 3 * DAY), finished)
    got = table.set_index(["quantity", "metric"])["value"]
    assert got["finish", "brier"] == 0.0
    assert got["finish", "auprc"] == 1.0


def least_loss(forecast):
    p = np.maximum(forecast.p_finish, 1e-3)
    return np.argsort((1.0 - p) / p * forecast.total_s[:, 1], kind="stable")


@pytest.mark.parametrize("order", [most_reliable, least_loss])
def test_picking_by_the_oracle_wastes_least(observer, last, fleet, order):
    instants = np.arange(2 * DAY, 3 * DAY - 3600, 3600.0)
    table = decision(
        {"last-value": last, "oracle": Oracle(fleet)},
        observer,
        np.arange(60),
        instants,
        JOB,
        k=3,
        seed=0,
        order=order,
    ).set_index("forecaster")
    assert table.loc["oracle", "wasted_s"] == table["wasted_s"].min()
    assert table.loc["oracle", "valid_ratio"] == table["valid_ratio"].max()
    assert set(table.index) == {"random", "last-value", "oracle"}
    assert table["rounds"].nunique() == 1
    if "gap_closed" in table:
        assert table.loc["oracle", "gap_closed"] == pytest.approx(1.0)
        assert table.loc["last-value", "gap_closed"] == pytest.approx(0.0)


def test_a_whole_backtest_has_every_table_and_is_the_same_again(fleet):
    run = [
        backtested(
            fleet, ["last-value", "oracle"], [], JOB, step_s=7200.0, k=2, examples=300, seed=0
        )
        for _ in range(2)
    ]
    assert set(run[0]) == {
        "verdict",
        "horizons",
        "per_device",
        "cold_start",
        "jobs",
        "reliability",
        "survival",
        "fan",
        "decision",
    }
    for name in run[0]:
        assert run[0][name].equals(run[1][name])
        assert len(run[0][name])
        # Of a dozen devices there are rarely four online.
        assert name == "decision" or why_empty(name, run[0]) == ""
    shown = dict(printed(run[0]))
    # Two scores of horizons, four tables of the job, and of the others all but `decision`.
    assert len(shown) == 1 + 2 + 4 + 3
    for table in shown.values():
        assert table.notna().any(axis=None)
        assert max(map(len, table.to_string().splitlines())) <= 120


def test_one_forecast_of_never_does_not_make_the_median_error(observer, origins, fleet):
    some = origins.take(origins.online)
    forecast = Oracle(fleet).forecast_job(some, JOB)
    times, finished = true_times(fleet, some, JOB, 3 * DAY), finishes(fleet, some, JOB, 3 * DAY)
    times_s = forecast.times_s.copy()
    times_s[np.flatnonzero(np.isfinite(times[:, 2]))[0], 2] = LONGEST_S
    table = job_scores("x", replace(forecast, times_s=times_s), some, times, finished)
    got = table.set_index(["quantity", "metric"])["value"]
    assert got["total_s", "mae_s"] > 1e5
    assert got["total_s", "median_error_s"] < 60.0
    shown = dict(printed({"jobs": table}))
    (whole,) = (one for title, one in shown.items() if "whole time" in title)
    assert whole.loc["x", "median error"].endswith(" s")
    assert "mae_s" not in whole


def test_traces_without_all_channels_are_tested_on_what_they_know(fleet):
    tables = backtested(
        replace(fleet, compute=None, downlink=None, uplink=None),
        ["last-value"],
        [],
        JOB,
        step_s=7200.0,
        k=2,
        examples=300,
        seed=0,
    )
    assert set(tables) == {"verdict", "horizons", "per_device", "cold_start", "survival", "fan"}
    assert set(tables["horizons"]["quantity"]) == {"online", "offline", "available"}
    assert len(dict(printed(tables))) == 3
    for name in ("jobs", "reliability", "decision"):
        assert "do not hold all of availability, compute" in why_empty(name, tables)
    assert (
        why_empty("per_device", tables) == "The traces hold none of compute, downlink and uplink."
    )
    assert why_empty("horizons", tables) == ""


def test_errors_of_devices_are_quantiles_of_the_means_of_each_device(tested, last, training):
    least = least_rates(training)
    table = error_per_device({"last-value": last}, tested, least).set_index("channel")
    rate = np.maximum(last.forecast(tested.observed).rates[:, 1, 2, 1], least[1])
    error = np.abs(np.log(np.maximum(tested.rates[:, 1, 2], least[1])) - np.log(rate))
    means = []
    for device in np.unique(tested.observed.devices):
        own = error[tested.observed.devices == device]
        if not np.isnan(own).all():
            means.append(np.nanmean(own))
    assert len(means) > 3
    assert table.loc["downlink", "q50"] == pytest.approx(np.median(means))
