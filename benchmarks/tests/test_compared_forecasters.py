"""Forecasters that are compared with forecast what can be, and learn what they should."""

from dataclasses import replace

import numpy as np
import pytest
from shared_fleets import synthetic

from fedstale.traces.forecast import TraceObserver, draw
from fedstale.traces.forecast.inputs import session_inputs
from fedstale.traces.forecast.lstm import SESSIONS
from fedstale.traces.forecast.sessions import HORIZONS_S
from forecasts.compared import (
    Boosting,
    Ewma,
    Hour,
    HourlyChain,
    HourlyMarkov,
    HourOfWeek,
    Linear,
    Perceptron,
)

DAY, HOUR_S = 86_400.0, 3600.0


@pytest.fixture(scope="module")
def drawn():
    observer = TraceObserver(synthetic(60, days=3))
    return [
        draw(observer, devices, start=0.0, until=2 * DAY, n=400, seed=seed)
        for seed, devices in enumerate((np.arange(40), np.arange(40, 60)))
    ]


@pytest.mark.parametrize(
    "made", [Boosting(n_trees=8), Hour(), HourlyMarkov(), HourOfWeek(), Ewma(), Linear()]
)
def test_chances_fall_and_beat_a_coin_and_quantiles_rise(made, drawn):
    training, held_out = drawn
    forecast = made.fit(training, held_out, seed=0).forecast(held_out.observed)
    assert np.all(np.diff(forecast.survival, axis=1) <= 1e-9)
    assert np.all(np.diff(forecast.rates, axis=3) >= 0)
    assert np.nanmean((forecast.survival[:, 2] - held_out.survival[:, 2]) ** 2) < 0.25


def test_a_linear_forecaster_is_logistic_regression(drawn):
    training, held_out = drawn
    linear, observed = Linear().fit(training, held_out, seed=0), held_out.observed
    numbers, _ = session_inputs(observed, linear.fleet, linear.around.of_devices(observed))
    z = np.c_[linear.standardised(numbers), np.ones(len(observed))]
    odds = (z @ linear.networks[SESSIONS]["output"]).reshape(-1, 2, 2, HORIZONS_S.size)
    online = odds[np.arange(len(observed)), observed.online.astype(int), 1]
    np.testing.assert_allclose(
        linear.forecast(observed).available, 1 / (1 + np.exp(-online)), atol=1e-5
    )


def test_a_constant_rate_is_an_exponential_law():
    chain = HourlyChain(leaving=np.full((2, 24), 1e-4))
    clock = np.array([0.0, 5.5 * HOUR_S, 23.9 * HOUR_S, np.nan])
    survival = chain.survival(np.ones(4, bool), clock)
    np.testing.assert_allclose(survival, np.tile(np.exp(-1e-4 * HORIZONS_S), (4, 1)))


def test_the_perceptron_reads_no_sequence(drawn):
    training, held_out = drawn
    perceptron = Perceptron().fit(training, held_out, seed=0)
    assert all("gates" not in weights for weights in perceptron.networks.values())
    observed = held_out.observed
    rates = observed.rates.copy()
    # All steps but the newest, in another order.
    rates[:, :, 1:] = rates[:, :, :0:-1]
    other = perceptron.forecast(replace(observed, rates=rates))
    np.testing.assert_allclose(other.rates, perceptron.forecast(observed).rates, rtol=1e-5)


def test_an_average_that_forgets_lies_between_the_least_and_the_most_that_was_observed(drawn):
    rates = drawn[0].observed.rates
    level = Ewma().level(drawn[0].observed)[:, :, 0]
    known = np.isfinite(level)
    assert np.all(level[known] >= np.nanmin(rates, axis=2)[known] - 1e-9)
    assert np.all(level[known] <= np.nanmax(rates, axis=2)[known] + 1e-9)
