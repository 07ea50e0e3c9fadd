"""What every forecaster has to do, whichever it is."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from fedstale.errors import ConfigError, TraceError
from fedstale.traces import Job, Series, Status, TraceSet
from fedstale.traces.forecast import (
    KINDS,
    Forecaster,
    Observer,
    Oracle,
    draw,
    examples_at,
    forecaster_class,
)
from fedstale.traces.forecast.boosting import Boosting
from fedstale.traces.forecast.naive import Ewma, HarmonicMean, LastValue, Seasonal, log_rate

LEARNING = [kind for kind in KINDS if not KINDS[kind].reads_the_future]
JOB = Job(work=60.0, download_bytes=1_000_000, upload_bytes=1_000_000, ttl_s=1800.0)
DAY = 86_400.0
_CACHE: dict[str, Forecaster] = {}


@pytest.fixture(params=LEARNING)
def forecaster(request, training, held_out):
    if request.param not in _CACHE:
        made = Boosting(n_trees=8) if request.param == "boosting" else KINDS[request.param]()
        if request.param == "lstm":
            from fedstale.traces.forecast.chain import Chain
            from fedstale.traces.forecast.forecaster import Prior
            from fedstale.traces.forecast.lstm_training import train

            made.prior, made.chain = Prior.of(training), Chain.of(training)
            fleet = made.prior, made.chain
            made.weights = train(training, held_out, *fleet, seed=0, epochs=25)
        else:
            made.fit(training, held_out, seed=0)
        _CACHE[request.param] = made
    return _CACHE[request.param]


def assert_sound(forecast, n):
    for times in (forecast.training_s, forecast.reporting_s, forecast.total_s):
        assert times.shape == (n, 3)
        assert np.all(np.isfinite(times))
        assert np.all(times >= 0)
        assert np.all(np.diff(times, axis=1) >= 0)
    assert forecast.p_finish.shape == (n,)
    assert np.all((forecast.p_finish >= 0) & (forecast.p_finish <= 1))


def test_forecasts_are_ordered_finite_times_and_probabilities(forecaster, observer):
    seen = observer.at(np.arange(60), 2.2 * DAY)
    assert_sound(forecaster.predict(seen, JOB), 60)


def test_staying_falls_with_the_horizon(forecaster, held_out):
    stays = forecaster.outlook(held_out.seen).stays
    assert np.all(np.diff(stays, axis=1) <= 1e-9)
    assert np.all((stays >= 0) & (stays <= 1))


@pytest.mark.parametrize("history_s", [0.0, 5.0, 3600.0])
def test_a_device_that_has_just_joined_gets_an_answer(forecaster, observer, history_s):
    seen = observer.at(np.arange(60), 2.2 * DAY, history_s=history_s)
    assert_sound(forecaster.predict(seen, JOB), 60)


def test_without_history_links_are_those_of_the_fleet(forecaster, observer, training):
    seen = observer.at(np.arange(60), 2.2 * DAY, history_s=0.0)
    middle = np.log(forecaster.outlook(seen).rates[:, 1, 2, 1])
    fleet = np.nanmedian(np.log(training.targets.rates[:, 1, 2]))
    assert np.all(np.abs(middle - fleet) < 3.0)


@pytest.mark.parametrize("known", ["availability", "compute", "downlink"])
def test_traces_that_know_one_channel_are_enough(forecaster, fleet, known):
    hidden = {c: None for c in fleet.known if c != known}
    seen = Observer(replace(fleet, epoch=None, **hidden)).at(np.arange(60), 1.5 * DAY)
    assert_sound(forecaster.predict(seen, JOB), 60)


@pytest.mark.parametrize("value", [0.0, 1e-3, 1e12])
def test_constant_rates_even_zero_give_an_answer(forecaster, value):
    traces = TraceSet.constant(3, compute=value, downlink_bit_per_s=value, uplink_bit_per_s=value)
    assert_sound(forecaster.predict(Observer(traces).at([0, 1, 2], DAY), JOB), 3)


def test_no_devices_get_no_forecasts(forecaster, observer):
    assert_sound(forecaster.predict(observer.at([], 100.0), JOB), 0)


def test_the_answer_for_one_device_does_not_depend_on_the_others(forecaster, observer):
    together = forecaster.predict(observer.at(np.arange(60), 1.7 * DAY), JOB)
    alone = forecaster.predict(observer.at([17], 1.7 * DAY), JOB)
    np.testing.assert_allclose(alone.total_s[0], together.total_s[17], rtol=1e-4)
    np.testing.assert_allclose(alone.p_finish[0], together.p_finish[17], rtol=1e-3, atol=1e-6)


def test_what_is_saved_and_loaded_says_the_same(forecaster, observer, tmp_path):
    forecaster.save(tmp_path, {"traces": "synthetic"})
    again = Forecaster.load(tmp_path)
    assert type(again) is type(forecaster)
    seen = observer.at(np.arange(60), 2.2 * DAY)
    before, after = forecaster.outlook(seen), again.outlook(seen)
    np.testing.assert_array_equal(before.stays, after.stays)
    np.testing.assert_array_equal(before.rates, after.rates)
    assert sum(f.stat().st_size for f in tmp_path.iterdir()) < 1_500_000


@pytest.mark.parametrize("kind", ["last-value", "ewma", "hourly-markov"])
def test_the_same_seed_learns_the_same(kind, training, held_out):
    one, two = (KINDS[kind]().fit(training, held_out, seed=3).state_dict() for _ in range(2))
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])


def test_the_last_value_is_exact_where_nothing_changes():
    traces = TraceSet.constant(5, compute=2.0, downlink_bit_per_s=8e6, uplink_bit_per_s=4e6)
    examples = examples_at(Observer(traces), np.arange(5), DAY, until=2 * DAY)
    said = LastValue().fit(examples, examples, seed=0).predict(examples.seen, JOB)
    truth = traces.trips(np.arange(5), DAY, JOB)
    np.testing.assert_allclose(said.total_s[:, 1], truth.reported - DAY, rtol=1e-6)


def test_the_seasonal_forecaster_is_exact_where_days_repeat():
    rng = np.random.default_rng(0)
    day = rng.uniform(1, 9, size=(4, 288))
    rates = Series.regular(day, step_s=300.0)
    traces = TraceSet(
        device_ids=pd.Index(list("abcd"), dtype="str"), compute=rates, downlink=rates, uplink=rates
    )
    examples = examples_at(
        Observer(traces),
        np.repeat(np.arange(4), 20),
        np.tile(np.linspace(1, 1.9, 20), 4) * DAY,
        until=np.inf,
    )
    said = Seasonal().fit(examples, examples, seed=0).outlook(examples.seen)
    np.testing.assert_allclose(
        log_rate(said.rates[..., 1]), log_rate(examples.targets.rates), atol=1e-6
    )


def test_the_harmonic_mean_is_that_of_the_last_five_steps(observer):
    seen = observer.at([0, 1], 1.5 * DAY)
    expected = [5.0 / sum(1.0 / max(x, 1e-6) for x in seen.rates[d, 1, 1:6]) for d in (0, 1)]
    np.testing.assert_allclose(HarmonicMean().level(seen)[:, 1, 0], expected, rtol=1e-9)


def test_an_average_that_forgets_lies_between_the_least_and_the_most_that_was_seen(observer):
    seen = observer.at(np.arange(60), 1.5 * DAY)
    level = Ewma().level(seen)[:, :, 0]
    assert np.all(level >= np.nanmin(seen.rates, axis=2) - 1e-9)
    assert np.all(level <= np.nanmax(seen.rates, axis=2) + 1e-9)


def test_the_oracle_says_what_trips_says(fleet, observer):
    oracle = Oracle(fleet)
    seen = observer.at(np.arange(60), 1.2 * DAY)
    said, truth = oracle.predict(seen, JOB), fleet.trips(np.arange(60), 1.2 * DAY, JOB)
    np.testing.assert_array_equal(said.p_finish == 1.0, truth.status == Status.REPORTED)
    made = truth.status == Status.REPORTED
    assert made.any()
    np.testing.assert_allclose(
        said.training_s[made, 1], truth.trained[made] - truth.downloaded[made], rtol=1e-9
    )
    assert_sound(said, 60)


def test_the_oracle_is_marked_and_keeps_nothing(tmp_path):
    assert Oracle.reads_the_future
    assert [k for k in KINDS if KINDS[k].reads_the_future] == ["oracle"]
    with pytest.raises(TraceError, match="oracle"):
        Oracle().save(tmp_path)
    with pytest.raises(TraceError, match="no traces"):
        Oracle().outlook(Observer(TraceSet.ideal(1)).at([0], 0.0))


def test_an_unknown_kind_is_one_sentence():
    with pytest.raises(ConfigError, match=r"'prophet'.*last-value"):
        forecaster_class("prophet")


def test_a_forecaster_of_another_class_is_refused(training, held_out, tmp_path):
    LastValue().fit(training, held_out, seed=0).save(tmp_path)
    with pytest.raises(TraceError, match="expected 'ewma'"):
        Ewma.load(tmp_path)


def test_forecasters_that_learn_beat_a_coin_on_devices_never_seen(forecaster, observer):
    tested = draw(observer, np.arange(40, 60), start=2 * DAY, until=3 * DAY, n=400, seed=9)
    stays, truth = forecaster.outlook(tested.seen).stays[:, 2], tested.targets.stays[:, 2]
    assert np.nanmean((stays - truth) ** 2) < 0.25
