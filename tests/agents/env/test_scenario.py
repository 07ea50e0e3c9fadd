"""Scenarios: devices, hours and forecasts, and the episodes that are drawn from them."""

from dataclasses import replace

import numpy as np
import pytest
from shared_fleets import synthetic
from small_episodes import fleet, one_kind

from fedstale.agents.env.episodes import EpisodeSettings, JobKinds
from fedstale.agents.env.forecast_table import ForecastTable
from fedstale.agents.env.scenario import Scenario, Scenarios, cross_fitted
from fedstale.agents.evaluation import episode_metrics
from fedstale.errors import ConfigError, TraceError
from fedstale.strategies.selection import Random
from fedstale.traces import Job
from fedstale.traces.forecast import LastValue, TraceObserver, draw


def phones(n, seed):
    return synthetic(n, days=1, seed=seed)


def test_forecasts_of_a_table_are_those_of_the_forecaster_at_or_before_the_instant():
    traces = phones(40, 0)
    kinds = JobKinds.of_fleet(traces)
    examples = draw(TraceObserver(traces), np.arange(15), start=0.0, until=86_400.0, n=400, seed=0)
    forecaster = LastValue().fit(examples, examples, seed=0)
    table = ForecastTable.of(
        traces, kinds, [(np.arange(15, 40), forecaster)], start=7200.0, end=15_000.0
    )
    devices = np.arange(40)
    now = np.full(40, 7200.0 + 20 * 300.0)
    online = traces.availability.is_available(devices, now)
    # A job of twice the mean device's work.
    kind, twice = np.ones(40, dtype=np.int64), np.full(40, 2.0)
    p, available, duration = table.at(devices, kind, twice, now)
    assert np.isnan(p[:15]).all()
    told = np.flatnonzero(online & (devices >= 15))
    assert told.size
    forecast = forecaster.forecast(TraceObserver(traces).at(told, now[told]))
    job = one_kind(kinds.work[1], kinds.ttl_s[1])
    asked = Job(
        work=2.0 * job.work[0],
        download_bytes=kinds.n_bytes[1],
        upload_bytes=kinds.n_bytes[1],
        ttl_s=kinds.ttl_s[1],
    )
    np.testing.assert_allclose(p[told], forecast.of_job(asked).p_finish, rtol=1e-5)
    asked_s = forecast.of_job(asked).total_s[:, 1]
    np.testing.assert_allclose(duration[told], asked_s, rtol=1e-5)
    assert ((available[told] >= 0) & (available[told] <= 1)).all()
    later = table.at(told, kind[told], twice[told], now[told] + 299.0)
    np.testing.assert_array_equal(later[0], p[told])
    # Between the works of a table a line is near what the forecaster says.
    asked = replace(asked, work=2.8 * job.work[0])
    p_more, _, more_s = table.at(told, kind[told], 1.4 * twice[told], now[told])
    np.testing.assert_allclose(more_s, forecast.of_job(asked).total_s[:, 1], rtol=0.15)
    p_most, _, _ = table.at(told, kind[told], 2.0 * twice[told], now[told])
    assert ((p_most <= p_more + 1e-6) & (p_more <= p[told] + 1e-6)).all()


def test_a_table_does_not_change_when_the_future_does():
    traces = phones(40, 0)
    examples = draw(TraceObserver(traces), np.arange(20), start=0.0, until=86_400.0, n=300, seed=0)
    forecaster = LastValue().fit(examples, examples, seed=0)
    kinds = JobKinds.of_fleet(traces)
    parts = [(np.arange(20), forecaster)]
    whole = ForecastTable.of(traces, kinds, parts, start=0.0, end=30_000.0)
    cut = traces.between(0.0, 30_000.0)
    again = ForecastTable.of(cut, kinds, parts, start=0.0, end=30_000.0)
    np.testing.assert_array_equal(whole.values[:, :, :-1], again.values[:, :, :-1])


def test_no_device_is_forecast_by_a_forecaster_that_learnt_from_it():
    traces = phones(40, 0)
    made = cross_fitted(traces, np.arange(20), kind="last-value", until=50_000.0, n=200)
    found = np.concatenate([devices for devices, _ in made])
    assert sorted(found) == list(range(20))
    assert made[0][1] is not made[1][1]
    with pytest.raises(TraceError, match="two parts"):
        Scenario.of(traces, forecaster=[*made, (np.array([3]), made[0][1])])


def test_scenarios_share_no_device_and_testing_is_later():
    traces = phones(40, 0)
    settings = EpisodeSettings(devices=(2, 8), window_s=3600.0)
    made = Scenarios.of(traces, forecasts="oracle", settings=settings)
    parts = [set(scenario.devices) for scenario in (made.training, made.validation, made.testing)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 40
    assert made.training.end <= made.testing.start
    drawn = made.testing.draw(5, np.random.default_rng(0))
    assert set(drawn.devices[drawn.present]) <= parts[2]
    assert (drawn.start >= made.testing.start).all()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"rounds": 0}, "rounds"),
        ({"devices": (0, 4)}, "devices"),
        ({"concurrency_share": (0.0, 0.5)}, "concurrency_share"),
        ({"keep_share": 1.5}, "keep_share"),
        ({"window_s": 0.0}, "window_s"),
    ],
)
def test_settings_out_of_range_are_named(changed, named):
    with pytest.raises(ConfigError, match=f"episodes.{named} = "):
        EpisodeSettings(**changed)


def test_traces_shorter_than_a_window_make_shorter_episodes():
    traces = phones(40, 0)
    scenario = Scenario.of(
        traces,
        forecasts="none",
        start=70_000.0,
        end=72_000.0,
        settings=EpisodeSettings(devices=(2, 8)),
    )
    drawn = scenario.draw(4, np.random.default_rng(0))
    np.testing.assert_allclose(drawn.end - drawn.start, 2000.0)
    table = episode_metrics(scenario.simulator(4), drawn, Random())
    assert (table["time_s"] <= 2000.0 + scenario.kinds.ttl_s.max()).all()


def test_windows_without_devices_online_are_an_error():
    traces = fleet([[(0.0, 10.0)]])
    scenario = Scenario.of(
        traces, forecasts="none", start=100.0, end=5000.0, settings=EpisodeSettings(devices=(1, 4))
    )
    with pytest.raises(TraceError, match="no device is online"):
        scenario.draw(3, np.random.default_rng(0))


def test_traces_without_a_channel_are_rejected():
    traces = phones(40, 0)
    with pytest.raises(TraceError, match="uplink"):
        Scenario.of(replace(traces, uplink=None), forecasts="none")
    with pytest.raises(ConfigError, match="forecasts = 'guess'"):
        Scenario.of(traces, forecasts="guess")
