"""The benchmark of strategies trains as the apps do, deals as it says, and compares in pairs."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedstale.apps import classification, client
from fedstale.simulation.flower_app import FlowerApp

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmarks():
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def numpy_digits(benchmarks):
    import numpy_digits

    return numpy_digits


@pytest.fixture
def numpy_shakespeare(benchmarks):
    import numpy_shakespeare

    return numpy_shakespeare


@pytest.fixture
def comparing(benchmarks):
    spec = importlib.util.spec_from_file_location("comparing", BENCHMARKS / "strategies.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["comparing"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["comparing"]


def test_training_in_numpy_agrees_with_the_app_within_rounding(numpy_digits):
    app = FlowerApp.find("digits")
    with app.importable():
        app.load_client()
        from digits_app import task

        for partition in (0, 7):
            data, _ = task.client_data(partition, 20, 0.1, 3)
            network = task.Network(3)
            model = {name: x.numpy().copy() for name, x in network.state_dict().items()}
            torch.set_num_threads(1)
            seed = (3, partition, 11)
            seed = (task.SHUFFLE, *seed)
            order = client.order(len(data[1]), 5, seed)
            settings = {"batch_size": 8, "learning_rate": 0.1}
            loss = client.train(network, classification.mean_loss, data, order, **settings)
            rng = np.random.default_rng(seed)
            arrays = data[0].numpy(), data[1].numpy()
            found = numpy_digits.train(model, arrays, epochs=5, batch_size=8, rate=0.1, rng=rng)
            assert found == pytest.approx(loss, rel=1e-4)
            for name, expected in network.state_dict().items():
                np.testing.assert_allclose(model[name], expected.numpy(), atol=1e-5)


def test_shakespeare_in_numpy_agrees_with_the_app_within_rounding(numpy_shakespeare):
    app = FlowerApp.find("shakespeare")
    with app.importable():
        app.load_client()
        from shakespeare_app import task

        text = "".join(np.random.default_rng(2).choice(list("to be or not\n"), 81 * 21))
        examples = task.encode(text)
        network = task.Network(3)
        model = {name: x.numpy().copy() for name, x in network.state_dict().items()}
        torch.set_num_threads(1)
        seed = (3, 4, 11)
        settings = {"batch_size": 8, "learning_rate": 1.0, "max_norm": task.MAX_NORM}
        order = client.order(len(examples), 2, seed)
        loss = client.train(network, task.mean_loss, (examples,), order, **settings)
        found = numpy_shakespeare.train(
            model,
            examples.numpy(),
            order,
            batch_size=8,
            rate=1.0,
            max_norm=task.MAX_NORM,
        )
        assert found == pytest.approx(loss, rel=1e-4)
        for name, expected in network.state_dict().items():
            np.testing.assert_allclose(model[name], expected.numpy(), atol=1e-5)
        assert numpy_shakespeare.evaluate(model, examples.numpy()) == pytest.approx(
            task.evaluate(network, examples), rel=1e-4
        )


def test_rare_classes_are_dealt_to_their_owners_alone(numpy_digits):
    labels = np.repeat(np.arange(10), 140)
    owners = np.arange(60) % 4 == 0
    for seed in range(5):
        deal = numpy_digits.deal_rare_to(owners, labels, (7, 8, 9), alpha=0.1, seed=seed)
        assert sorted(np.concatenate(deal)) == list(range(len(labels)))
        assert min(map(len, deal)) >= 1
        held = [labels[mine] for mine in deal]
        common = np.concatenate([x for x, own in zip(held, owners, strict=True) if not own])
        rare = np.concatenate([x for x, own in zip(held, owners, strict=True) if own])
        assert common.max() <= 6
        # A twentieth of 7 x 140 others, less what went to devices without any.
        assert np.sum(rare >= 7) == 3 * 140
        assert np.sum(rare < 7) <= 7 * 7


def test_a_curve_holds_the_last_value_and_averages_ten_readings(comparing):
    from strategy_runs import read_curve

    seen = np.array([[0.0, 0.0, 1.0], [150.0, 1.0, 0.5]])
    curve = read_curve(seen, 1200.0)
    # Read at 60, 120, ...: from the third reading on the second value holds.
    assert curve.accuracy[:4] == pytest.approx([0.0, 0.0, 0.1, 0.2])
    assert curve.slow[[1, 2, 11]] == pytest.approx([1.0, 0.95, 0.5])
    assert curve.versions == 1
    assert curve.to_target_s(0.2) == pytest.approx(240.0)
    assert not curve.reaches(1.01)
    assert curve.to_target_s(1.01) == pytest.approx(1200.0)


class _Made:
    """Reaches 1 after about 1000 s divided by the rate; tuning looks at the first half."""

    def __init__(self, comparing, seed):
        self.comparing, self.seed, self.asked = comparing, seed, []

    def run(self, rate, until_s):
        self.asked.append((rate, until_s))
        instants = np.arange(60.0, until_s + 1, 60.0)
        accuracy = (instants >= (1000.0 + self.seed) / rate).astype(float)
        return self.comparing.Curve(accuracy=accuracy, slow=accuracy / 2, versions=7)


def test_a_strategy_is_tuned_on_its_own_seeds_and_compared_in_pairs(comparing):
    settings = {seed: _Made(comparing, seed) for seed in (1, 2, 101)}
    comparison = comparing.Comparison(
        title="made",
        settings=settings,
        tuning_seeds=(101,),
        seeds=(1, 2),
        target=0.8,
        horizon_s=7200.0,
    )
    trials = {
        "slow": comparing.Trial(make=lambda rate, seed: min(rate, 0.5)),
        "fast": comparing.Trial(make=lambda rate, seed: rate, per_rate=0.1),
    }
    slow, fast = comparing.compare(comparison, trials, (0.3, 10.0))
    assert [until for _, until in settings[101].asked] == [3600.0] * 4
    assert [until for _, until in settings[1].asked] == [7200.0] * 2
    assert (slow["server_rate"], fast["server_rate"]) == (10.0, 1.0)
    assert slow["hours_to_target_by_seed"] == pytest.approx([2040 / 3600, 2040 / 3600], abs=1e-4)
    assert fast["speed_up"] == pytest.approx([2.0, 2.0, 2.0])
    assert fast["final_slow_accuracy"] == pytest.approx(0.5)
    assert slow["reached"] == fast["reached"] == 2
