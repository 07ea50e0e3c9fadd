"""The contract of every forecaster."""

from dataclasses import replace

import numpy as np
import pytest

from fedstale.errors import TraceError
from fedstale.traces import Job, TraceSet
from fedstale.traces.forecast import (
    KINDS,
    Forecaster,
    LastValue,
    Persistence,
    TraceObserver,
    draw,
)
from fedstale.traces.forecast.dataset import examples_at

JOB = Job(work=60.0, download_bytes=1_000_000, upload_bytes=1_000_000, ttl_s=1800.0)
DAY = 86_400.0
_CACHE: dict[str, Forecaster] = {}


@pytest.fixture(params=list(KINDS))
def forecaster(request, training, held_out):
    if request.param not in _CACHE:
        _CACHE[request.param] = KINDS[request.param]().fit(training, held_out, seed=0)
    return _CACHE[request.param]


def assert_sound(forecast, n):
    for times in (forecast.training_s, forecast.reporting_s, forecast.total_s):
        assert times.shape == (n, 3)
        assert np.all(np.isfinite(times))
        assert np.all(times >= 0)
        assert np.all(np.diff(times, axis=1) >= 0)
    assert forecast.p_finish.shape == (n,)
    assert np.all((forecast.p_finish >= 0) & (forecast.p_finish <= 1))


def test_survival_falls_with_the_horizon(forecaster, held_out):
    survival = forecaster.forecast(held_out.observed).survival
    assert np.all(np.diff(survival, axis=1) <= 1e-9)
    assert np.all((survival >= 0) & (survival <= 1))


@pytest.mark.parametrize("known", ["availability", "compute", "downlink"])
def test_traces_that_know_one_channel_are_enough(forecaster, fleet, known):
    hidden = {c: None for c in fleet.known if c != known}
    observed = TraceObserver(replace(fleet, epoch=None, **hidden)).at(np.arange(60), 1.5 * DAY)
    assert_sound(forecaster.forecast(observed).of_job(JOB), 60)


@pytest.mark.parametrize("value", [0.0, 1e-3, 1e12])
def test_constant_rates_even_zero_have_a_forecast(forecaster, value):
    traces = TraceSet.constant(3, compute=value, downlink_bit_per_s=value, uplink_bit_per_s=value)
    assert_sound(forecaster.forecast(TraceObserver(traces).at([0, 1, 2], DAY)).of_job(JOB), 3)


def test_the_forecast_of_one_device_does_not_depend_on_the_others(forecaster, observer):
    together = forecaster.forecast(observer.at(np.arange(60), 1.7 * DAY)).of_job(JOB)
    alone = forecaster.forecast(observer.at([17], 1.7 * DAY)).of_job(JOB)
    np.testing.assert_allclose(alone.total_s[0], together.total_s[17], rtol=1e-4)
    np.testing.assert_allclose(alone.p_finish[0], together.p_finish[17], rtol=1e-3, atol=1e-6)


def test_a_loaded_forecaster_forecasts_as_the_saved_one(forecaster, observer, tmp_path):
    forecaster.save(tmp_path, {"traces": "synthetic"})
    again = Forecaster.load(tmp_path)
    assert type(again) is type(forecaster)
    observed = observer.at(np.arange(60), 2.2 * DAY)
    before, after = forecaster.forecast(observed), again.forecast(observed)
    np.testing.assert_array_equal(before.survival, after.survival)
    np.testing.assert_array_equal(before.rates, after.rates)
    assert sum(f.stat().st_size for f in tmp_path.iterdir()) < 1_500_000


@pytest.mark.parametrize("kind", ["last-value", "persistence", "hourly"])
def test_the_same_seed_learns_the_same(kind, training, held_out):
    one, two = (KINDS[kind]().fit(training, held_out, seed=3).state_dict() for _ in range(2))
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])


def test_a_forecaster_of_another_class_is_rejected(training, held_out, tmp_path):
    LastValue().fit(training, held_out, seed=0).save(tmp_path)
    with pytest.raises(TraceError, match="expected 'persistence'"):
        Persistence.load(tmp_path)


def test_forecasters_that_learn_beat_a_coin_on_devices_never_seen(forecaster, observer):
    tested = draw(observer, np.arange(40, 60), start=2 * DAY, until=3 * DAY, n=400, seed=9)
    survival, truth = (
        forecaster.forecast(tested.observed).survival[:, 2],
        tested.survival[:, 2],
    )
    assert np.nanmean((survival - truth) ** 2) < 0.25


def test_the_last_value_is_exact_where_nothing_changes():
    traces = TraceSet.constant(5, compute=2.0, downlink_bit_per_s=8e6, uplink_bit_per_s=4e6)
    examples = examples_at(TraceObserver(traces), np.arange(5), DAY, until=2 * DAY)
    forecast = LastValue().fit(examples, examples, seed=0).forecast(examples.observed).of_job(JOB)
    truth = traces.trips(np.arange(5), DAY, JOB)
    np.testing.assert_allclose(forecast.total_s[:, 1], truth.reported - DAY, rtol=1e-6)
