import numpy as np

from fedstale.traces import Job, TraceSet
from fedstale.traces.forecast import Ewma, LastValue, TraceObserver, examples_at

DAY = 86_400.0
JOB = Job(work=60.0, download_bytes=1_000_000, upload_bytes=1_000_000, ttl_s=1800.0)


def test_the_last_value_is_exact_where_nothing_changes():
    traces = TraceSet.constant(5, compute=2.0, downlink_bit_per_s=8e6, uplink_bit_per_s=4e6)
    examples = examples_at(TraceObserver(traces), np.arange(5), DAY, until=2 * DAY)
    forecast = LastValue().fit(examples, examples, seed=0).forecast_job(examples.observed, JOB)
    truth = traces.trips(np.arange(5), DAY, JOB)
    np.testing.assert_allclose(forecast.total_s[:, 1], truth.reported - DAY, rtol=1e-6)


def test_an_average_that_forgets_lies_between_the_least_and_the_most_that_was_observed(observer):
    observed = observer.at(np.arange(60), 1.5 * DAY)
    level = Ewma().level(observed)[:, :, 0]
    assert np.all(level >= np.nanmin(observed.rates, axis=2) - 1e-9)
    assert np.all(level <= np.nanmax(observed.rates, axis=2) + 1e-9)
