"""Times of jobs as devices correct them: from outcomes that they know by then."""

import numpy as np
import pytest
from shared_fleets import synthetic

from fedstale.traces import Job, Status
from fedstale.traces.forecast import LastValue, TraceObserver, draw
from fedstale.traces.forecast.backtest import rolling
from fedstale.traces.forecast.survival import LONGEST_S, JobForecast
from forecasts.jobs import calibrated, calibration_scores, corrected_scores, job_scores, true_times

DAY = 86_400.0
JOB = Job(work=60.0, download_bytes=1_000_000, upload_bytes=1_000_000, ttl_s=1800.0)


def test_an_outcome_corrects_no_forecast_that_was_made_before_it():
    fleet = synthetic(60, days=3)
    observer = TraceObserver(fleet)
    training, held_out = (
        draw(observer, some, start=0.0, until=2 * DAY, n=400, seed=1)
        for some in (np.arange(40), np.arange(40, 60))
    )
    last = LastValue().fit(training, held_out, seed=0)
    span = {"start": 2 * DAY, "until": 3 * DAY, "step_s": 3600.0}
    origins = rolling(observer, np.arange(40, 60), **span, seed=0).observed
    forecast, times = last.forecast(origins).of_job(JOB), true_times(fleet, origins, JOB, 3 * DAY)
    fleet_wide = calibration_scores(last, fleet, held_out.observed, JOB, 2 * DAY)
    before = calibrated(forecast, origins, times, fleet_wide)
    late = origins.now + times[:, 2] > 2.5 * DAY
    other = np.where(late[:, None], times * 50, times)
    changed = calibrated(forecast, origins, other, fleet_wide)
    early = origins.now <= 2.5 * DAY
    np.testing.assert_array_equal(before.total_s[early], changed.total_s[early])
    assert not np.array_equal(before.total_s, changed.total_s)
    held = fleet, held_out.observed, 2 * DAY
    table = corrected_scores({"last": last}, fleet, origins, 3 * DAY, JOB, held_out=held)
    assert set(table["forecaster"]) == {"last", "last + fleet", "last + own"}


@pytest.fixture(scope="module")
def exact():
    """Devices that are sent a job, how long it took, and the forecast of just that."""
    fleet = synthetic(60, days=3)
    span = {"start": 2 * DAY, "until": 3 * DAY, "step_s": 3600.0}
    origins = rolling(TraceObserver(fleet), np.arange(40, 60), **span, seed=0).observed
    some = origins.take(origins.online)
    times = true_times(fleet, some, JOB, 3 * DAY)
    times_s = np.repeat(np.nan_to_num(times, nan=60.0)[..., None], 3, axis=2)
    return fleet, some, times, JobForecast(times_s=times_s, p_finish=np.ones(len(some)))


def scored(some, times, times_s):
    forecast = JobForecast(times_s=times_s, p_finish=np.ones(len(some)))
    table = job_scores("x", forecast, some, times)
    return table.set_index(["quantity", "metric"])["value"]


def test_true_times_are_those_of_trips_where_nothing_interrupts(exact):
    fleet, some, _, _ = exact
    times = true_times(fleet, some, JOB, np.inf)
    outcome = fleet.trips(some.devices, some.now, JOB)
    made = (outcome.status == Status.REPORTED) & (outcome.started == some.now)
    assert made.any()
    np.testing.assert_allclose(times[made, 2], outcome.reported[made] - some.now[made], rtol=1e-9)


def test_a_perfect_forecast_makes_no_error_and_one_of_never_no_median_error(exact):
    _, some, times, forecast = exact
    got = scored(some, times, forecast.times_s)
    assert got["total_s", "coverage"] == 1.0
    assert got["total_s", "pinball"] == 0.0
    times_s = forecast.times_s.copy()
    times_s[np.flatnonzero(np.isfinite(times[:, 2]))[0], 2] = LONGEST_S
    got = scored(some, times, times_s)
    assert got["total_s", "median_error_s"] == 0.0
    assert got["total_s", "pinball"] > 0.0
