import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch

from fedstale.errors import ResumeError, TraceError
from fedstale.traces.forecast import LSTM, FleetStatistics
from fedstale.traces.forecast.baselines import HourlyChain
from fedstale.traces.forecast.lstm import (
    HIDDEN,
    OUTPUTS,
    PIECES,
    SEQUENCE,
    SHAPES,
    STATIC,
    features,
    forward,
    read_out,
)
from fedstale.traces.forecast.lstm_training import TrainingRun, network, train


@pytest.fixture(scope="module")
def weights():
    rng = np.random.default_rng(0)
    return {k: rng.normal(0, 0.3, shape).astype(np.float32) for k, shape in SHAPES.items()}


def fleet_of(training):
    return FleetStatistics.of(training), HourlyChain.of(training)


def test_numpy_and_torch_compute_the_same_network(weights):
    rng = np.random.default_rng(1)
    sequence = rng.normal(size=(24, 50, SEQUENCE)).astype(np.float32)
    static = rng.normal(size=(50, STATIC)).astype(np.float32)
    theirs = network(
        {k: torch.from_numpy(w) for k, w in weights.items()},
        torch.from_numpy(sequence),
        torch.from_numpy(static),
    )
    np.testing.assert_allclose(
        forward(weights, sequence, static).T, theirs.numpy(), rtol=1e-3, atol=1e-4
    )


def test_gates_are_those_of_an_lstm_with_softsign(weights):
    def softsign(x):
        return x / (1.0 + np.abs(x))

    rng = np.random.default_rng(1)
    sequence = rng.normal(size=(24, 7, SEQUENCE)).astype(np.float32)
    static = rng.normal(size=(7, STATIC)).astype(np.float32)
    h = c = np.zeros((7, HIDDEN))
    for step in sequence:
        z = np.concatenate([step, h, np.ones((7, 1))], axis=1) @ weights["gates"]
        i, f, o = (0.5 + 0.5 * softsign(z[:, k * HIDDEN : (k + 1) * HIDDEN]) for k in range(3))
        c = f * c + i * softsign(z[:, 3 * HIDDEN :])
        h = o * softsign(c)
    inner = np.maximum(np.concatenate([h, static, np.ones((7, 1))], axis=1) @ weights["hidden"], 0)
    expected = np.concatenate([inner, static, np.ones((7, 1))], axis=1) @ weights["output"]
    np.testing.assert_allclose(forward(weights, sequence, static).T, expected, rtol=1e-3, atol=1e-4)


def test_before_training_survival_is_that_of_the_chain(training):
    lstm, chain = LSTM(), HourlyChain.of(training)
    lstm.fleet, lstm.chain = FleetStatistics.of(training), chain
    first = TrainingRun.start(seed=0, n=1).weights
    lstm.weights = {k: w.detach().numpy() for k, w in first.items()}
    observed = training.observed.take(slice(0, 300))
    np.testing.assert_allclose(
        lstm.forecast(observed).survival,
        chain.survival(observed.online, observed.time_of_day_s),
        atol=0.01,
    )


def test_thousands_at_once_are_forecast_as_each_of_them_alone(observer, training, weights):
    lstm = LSTM()
    lstm.fleet, lstm.chain = FleetStatistics.of(training), HourlyChain.of(training)
    lstm.weights = {k: 0.3 * w for k, w in weights.items()}
    rng = np.random.default_rng(2)
    observed = observer.at(rng.integers(60, size=1300), rng.uniform(0, 2e5, 1300))
    together = lstm.forecast(observed)
    for i in (0, 511, 512, 1024, 1299):
        alone = lstm.forecast(observed.take(np.array([i])))
        np.testing.assert_allclose(together.survival[i], alone.survival[0], rtol=1e-4)
        np.testing.assert_allclose(together.rates[i], alone.rates[0], rtol=1e-4)


def test_outputs_are_read_as_survival_and_as_quantiles_around_the_median(training, weights):
    observed = training.observed.take(slice(0, 40))
    given = features(observed, FleetStatistics.of(training))
    raw = forward(weights, given.sequence, given.static)
    survival, rates = read_out(raw.copy(), given)
    np.testing.assert_allclose(
        survival, np.cumprod(1.0 / (1.0 + np.exp(-raw[:PIECES])), axis=0), 1e-5
    )
    logs = raw[PIECES:].astype(np.float64).reshape(3, 7, 3, 40)
    median = logs[:, :, 1] + given.level.T[:, None]
    np.testing.assert_allclose(np.log(rates[:, :, 1]), median, atol=1e-5)
    for quantile, sign in ((0, -1.0), (2, 1.0)):
        expected = median + sign * np.logaddexp(logs[:, :, quantile], 0.0)
        np.testing.assert_allclose(np.log(rates[:, :, quantile]), expected, atol=1e-5)


def test_the_forward_pass_leaves_the_weights_as_they_were(weights):
    before = {k: w.copy() for k, w in weights.items()}
    forward(weights, np.zeros((24, 3, SEQUENCE), np.float32), np.zeros((3, STATIC), np.float32))
    for name in weights:
        np.testing.assert_array_equal(weights[name], before[name])


def test_there_are_about_ten_thousand_parameters(weights):
    lstm = LSTM()
    lstm.weights = weights
    n_parameters = sum(w.size for w in lstm.weights.values())
    assert 8_000 <= n_parameters <= 12_000
    assert 4 * n_parameters < 100_000
    assert weights["output"].shape[1] == OUTPUTS


def test_training_lowers_the_loss_and_is_the_same_again(training, held_out):
    fleet = fleet_of(training)
    losses = []
    one = train(training, held_out, *fleet, seed=0, epochs=3, progress=lambda *e: losses.append(e))
    two = train(training, held_out, *fleet, seed=0, epochs=3)
    assert losses[-1][1] < losses[0][1]
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])


def test_an_interrupted_training_goes_on_to_the_same_weights(training, held_out, tmp_path):
    fleet = fleet_of(training)

    def interrupt(epoch, *_):
        if epoch == 2:
            raise KeyboardInterrupt

    whole = train(training, held_out, *fleet, seed=0, epochs=3)
    first = str(tmp_path / "first")
    with pytest.raises(KeyboardInterrupt):
        train(training, held_out, *fleet, seed=0, epochs=3, checkpoint=first, progress=interrupt)
    resumed = train(training, held_out, *fleet, seed=0, epochs=3, checkpoint=first)
    for name in whole:
        np.testing.assert_array_equal(resumed[name], whole[name])


def test_a_checkpoint_of_another_training_is_rejected(training, held_out, tmp_path):
    fleet = fleet_of(training)
    train(training, held_out, *fleet, seed=0, epochs=1, checkpoint=str(tmp_path))
    with pytest.raises(ResumeError, match="seed 0"):
        train(training, held_out, *fleet, seed=1, epochs=1, checkpoint=str(tmp_path))


def test_a_damaged_checkpoint_is_one_sentence(training, held_out, tmp_path):
    (tmp_path / "training.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ResumeError, match="delete it to begin again"):
        train(training, held_out, *fleet_of(training), seed=0, checkpoint=str(tmp_path))


def test_a_checkpoint_of_another_version_is_one_sentence(training, held_out, tmp_path):
    fleet = fleet_of(training)
    train(training, held_out, *fleet, seed=0, epochs=1, checkpoint=str(tmp_path))
    path = tmp_path / "training.safetensors"
    arrays = safetensors.numpy.load_file(path)
    with safetensors.safe_open(path, framework="numpy") as file:
        counts = file.metadata()
    renamed = {k.replace("gates", "recurrent"): v for k, v in arrays.items()}
    safetensors.numpy.save_file(renamed, path, metadata=counts)
    with pytest.raises(ResumeError, match="another version"):
        train(training, held_out, *fleet, seed=0, checkpoint=str(tmp_path))


def test_weights_of_another_shape_are_rejected(training, weights):
    fleet, chain = fleet_of(training)
    state = fleet.state_dict() | {"leaving": chain.leaving} | weights
    state["hidden"] = np.zeros((3, 3), np.float32)
    with pytest.raises(TraceError, match="hidden"):
        LSTM().load_state_dict(state)


def test_what_is_unknown_is_zero_in_the_inputs(observer, training):
    given = features(observer.at(np.arange(5), 1e5, history_s=0.0), FleetStatistics.of(training))
    assert np.all(np.isfinite(given.sequence))
    assert np.all(np.isfinite(given.static))
    np.testing.assert_array_equal(given.sequence[:, :, :4], 0.0)


def test_a_forecast_needs_neither_torch_nor_scikit_learn():
    code = (
        "import sys, fedstale.traces.forecast; "
        "print(*sorted({'torch', 'sklearn', 'flwr', 'ray'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_nothing_tells_the_network_how_far_a_record_has_run(fleet, observer, training):
    observed = observer.at(np.arange(20), 1.1 * 86_400.0)
    later = replace(observed, history_s=observed.history_s * 9)
    fleet_statistics = FleetStatistics.of(training)
    np.testing.assert_array_equal(
        features(observed, fleet_statistics).static, features(later, fleet_statistics).static
    )
