"""Times of jobs as devices correct them: from outcomes that they know by then."""

import numpy as np
from shared_fleets import synthetic

from fedstale.traces import Job
from fedstale.traces.forecast import Adaptation, LastValue, TraceObserver, draw
from fedstale.traces.forecast.evaluation import rolling, true_times
from forecasts.jobs import calibrated, calibration_scores, corrected_scores

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
    forecast, times = last.forecast_job(origins, JOB), true_times(fleet, origins, JOB, 3 * DAY)
    fleet_wide = calibration_scores(last, fleet, held_out.observed, JOB, 2 * DAY)
    before = calibrated(forecast, origins, times, fleet_wide, Adaptation())
    late = origins.now + times[:, 2] > 2.5 * DAY
    other = np.where(late[:, None], times * 50, times)
    changed = calibrated(forecast, origins, other, fleet_wide, Adaptation())
    early = origins.now <= 2.5 * DAY
    np.testing.assert_array_equal(before.total_s[early], changed.total_s[early])
    assert not np.array_equal(before.total_s, changed.total_s)
    held = fleet, held_out.observed, 2 * DAY
    table = corrected_scores({"last": last}, fleet, origins, 3 * DAY, JOB, held_out=held)
    assert set(table["forecaster"]) == {"last", "last + fleet", "last + own"}
