import numpy as np
import pytest

from fedstale.traces import Job, TraceSet
from fedstale.traces.forecast import Ewma, LastValue, TraceObserver, examples_at
from fedstale.traces.forecast.baselines import HourlyChain
from fedstale.traces.forecast.sessions import HORIZONS_S

DAY = 86_400.0
HOUR_S = 3600.0
JOB = Job(work=60.0, download_bytes=1_000_000, upload_bytes=1_000_000, ttl_s=1800.0)


def test_a_constant_rate_is_an_exponential_law():
    chain = HourlyChain(leaving=np.full((2, 24), 1e-4))
    clock = np.array([0.0, 5.5 * HOUR_S, 23.9 * HOUR_S, np.nan])
    survival = chain.survival(np.ones(4, bool), clock)
    np.testing.assert_allclose(survival, np.tile(np.exp(-1e-4 * HORIZONS_S), (4, 1)))


def test_each_hour_and_each_state_has_its_rate():
    leaving = np.zeros((2, 24))
    leaving[1, 0] = 1e-3
    chain = HourlyChain(leaving=leaving)
    # From half past eleven at night, the first half hour is calm.
    survival = chain.survival(np.array([True, False]), np.full(2, 23.5 * HOUR_S))
    half_an_hour, hour = HORIZONS_S.tolist().index(1800.0), HORIZONS_S.tolist().index(3600.0)
    assert survival[0, half_an_hour] == pytest.approx(1.0)
    assert survival[0, hour] == pytest.approx(np.exp(-1e-3 * 1800.0))
    np.testing.assert_allclose(survival[1], 1.0)


def test_rates_are_those_of_the_examples(training):
    chain = HourlyChain.of(training)
    assert chain.leaving.shape == (2, 24)
    assert np.all(chain.leaving > 0.0)
    observed, survival = training.observed, training.survival[:, 1]
    known = ~np.isnan(survival) & observed.online
    forecast = chain.survival(observed.online, observed.time_of_day_s)[known, 1]
    assert forecast.mean() == pytest.approx(survival[known].mean(), abs=0.02)


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
