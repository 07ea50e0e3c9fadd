from dataclasses import replace

import numpy as np
import pytest
import torch

from fedstale.errors import TraceError
from fedstale.traces.forecast import LSTM, TraceObserver, draw
from fedstale.traces.forecast.inputs import (
    of_other_devices,
)
from fedstale.traces.forecast.lstm import SESSIONS, forward, shapes
from fedstale.traces.forecast.lstm_training import network, session_loss
from fedstale.traces.forecast.observation import RATES
from fedstale.traces.forecast.sessions import HORIZONS_S

DAY = 86_400.0
CELLS, WIDTH, NUMBERS, STATIC = 5, 7, 3, 4


def random_weights(cells=CELLS, width=WIDTH, outputs=6):
    rng = np.random.default_rng(0)
    of_network = shapes(sequence=NUMBERS, static=STATIC, outputs=outputs, cells=cells, width=width)
    return {k: rng.normal(0, 0.3, shape).astype(np.float32) for k, shape in of_network.items()}


def random_inputs(n, steps=24):
    rng = np.random.default_rng(1)
    return (
        rng.normal(size=(steps, n, NUMBERS)).astype(np.float32),
        rng.normal(size=(n, STATIC)).astype(np.float32),
    )


@pytest.fixture(scope="module")
def lstm(training, held_out):
    return LSTM().fit(training, held_out, seed=0)


@pytest.mark.parametrize(("cells", "width"), [(CELLS, WIDTH), (0, WIDTH), (0, 0)])
def test_numpy_and_torch_compute_the_same_network(cells, width):
    weights, (sequence, static) = random_weights(cells, width), random_inputs(50)
    theirs = network(
        {k: torch.from_numpy(w) for k, w in weights.items()},
        torch.from_numpy(sequence.transpose(1, 0, 2).copy()),
        torch.from_numpy(static),
    )
    np.testing.assert_allclose(
        forward(weights, sequence, static).T, theirs.numpy(), rtol=1e-3, atol=1e-5
    )


def test_the_loss_is_the_likelihood_of_the_bin_in_which_a_run_ends():
    # One device online that leaves in the third bin, and one whose log ends in the second.
    h = HORIZONS_S.size
    survival = np.full((2, h), np.nan)
    survival[0] = np.arange(h) < 2
    survival[1, 0] = 1.0
    labels = np.concatenate([np.ones((2, 1)), survival, np.full((2, h), np.nan)], axis=1)
    raw = np.random.default_rng(0).normal(size=(2, 4 * h))
    survives = 1 / (1 + np.exp(-raw.reshape(2, 2, 2, h)[:, 1, 0]))
    expected = (
        -(
            np.log(survives[0, 0])
            + np.log(survives[0, 1])
            + np.log(1 - survives[0, 2])
            + np.log(survives[1, 0])
        )
        / 2
    )
    found = session_loss(torch.from_numpy(raw), torch.from_numpy(labels))
    assert float(found) == pytest.approx(expected)


def exchanged(observed, channel, rng):
    """Return observations whose channel is that of quite another network."""
    rates = observed.rates.copy()
    others = rng.permutation(len(observed))
    rates[:, channel] = 1e4 * rates[others, channel] * rng.lognormal(0, 2, rates[:, channel].shape)
    return replace(observed, rates=rates)


@pytest.mark.parametrize("channel", range(3))
def test_a_foreign_channel_moves_no_other_forecast(lstm, held_out, channel):
    observed = held_out.observed
    before = lstm.forecast(observed)
    after = lstm.forecast(exchanged(observed, channel, np.random.default_rng(0)))
    np.testing.assert_array_equal(after.survival, before.survival)
    np.testing.assert_array_equal(after.available, before.available)
    for other in range(3):
        same = np.array_equal(after.rates[:, other], before.rates[:, other])
        assert same == (other != channel)


@pytest.mark.parametrize("unit", [1e-3, 1e6])
def test_a_forecast_in_another_unit_is_the_same_forecast(lstm, held_out, unit):
    observed = held_out.observed
    known = ~np.isnan(observed.rates).all(axis=2).any(axis=1)
    other = replace(observed, rates=unit * observed.rates)
    np.testing.assert_allclose(
        np.log(lstm.forecast(other).rates[known]),
        np.log(lstm.forecast(observed).rates[known]) + np.log(unit),
        atol=1e-3,
    )


def test_a_share_that_an_example_sees_was_counted_without_its_device(training):
    shown = of_other_devices(training, training.observed)
    device = int(training.observed.devices[0])
    own = training.observed.devices == device
    survival = training.survival.copy()
    survival[own] = 1.0 - survival[own]
    again = of_other_devices(replace(training, survival=survival), training.observed)
    np.testing.assert_array_equal(again.survival[own], shown.survival[own])
    assert not np.array_equal(again.survival[~own], shown.survival[~own])


def test_of_one_device_a_share_was_counted_without_the_day_of_the_example(observer):
    one = draw(observer, [7], start=0.0, until=3 * 86_400.0, n=300, seed=0)
    day = one.observed.now // 86_400.0 == 1.0
    survival = one.survival.copy()
    survival[day] = 1.0 - survival[day]
    shown = of_other_devices(one, one.observed)
    again = of_other_devices(replace(one, survival=survival), one.observed)
    np.testing.assert_array_equal(again.survival[day], shown.survival[day])
    assert not np.array_equal(again.survival[~day], shown.survival[~day])


def test_outer_quantiles_cover_as_often_as_they_say_on_the_validation_devices(lstm, held_out):
    rates = lstm.forecast(held_out.observed).rates
    for channel in range(3):
        truth = held_out.rates[:, channel]
        inside = (rates[:, channel, :, 0] <= truth) & (truth <= rates[:, channel, :, 2])
        coverage = inside[~np.isnan(truth)].mean()
        assert 0.77 <= coverage <= 0.83


def test_thousands_at_once_are_forecast_as_each_of_them_alone(lstm, observer):
    rng = np.random.default_rng(2)
    observed = observer.at(rng.integers(60, size=1300), rng.uniform(0, 2e5, 1300))
    together = lstm.forecast(observed)
    for i in (0, 511, 512, 1024, 1299):
        alone = lstm.forecast(observed.take(np.array([i])))
        np.testing.assert_allclose(together.survival[i], alone.survival[0], rtol=1e-4)
        np.testing.assert_allclose(together.rates[i], alone.rates[0], rtol=1e-4)


def test_training_lowers_the_loss_and_is_the_same_again(lstm, training, held_out, caplog):
    with caplog.at_level("INFO", "fedstale.traces.forecast"):
        again = LSTM().fit(training, held_out, seed=0)
    for name, weight in again.state_dict().items():
        np.testing.assert_array_equal(weight, lstm.state_dict()[name], err_msg=name)
    for network_name in (SESSIONS, *RATES):
        losses = [loss.args[2] for loss in caplog.records if loss.args[0] == network_name]
        assert losses[len(losses) // 2 - 1] < losses[0]


def test_a_channel_that_no_training_device_knew_is_that_of_the_fleet(observer, fleet):
    known = TraceObserver(replace(fleet, uplink=None))
    training = draw(known, np.arange(40), start=0.0, until=2 * DAY, n=200, seed=1)
    lstm = LSTM().fit(training, training, seed=0)
    assert "uplink" not in lstm.networks
    rates = lstm.forecast(observer.at(np.arange(5), 2.2 * DAY)).rates
    np.testing.assert_array_equal(rates[:, 2], np.broadcast_to(lstm.fleet.rates[2], (5, 7, 3)))


def test_weights_of_another_shape_are_rejected(lstm):
    state = lstm.state_dict() | {"sessions.hidden": np.zeros((3, 3), np.float32)}
    with pytest.raises(TraceError, match=r"sessions\.hidden"):
        LSTM().load_state_dict(state)
