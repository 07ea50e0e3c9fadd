"""Without stale updates, the strategies are those that Flower ships."""

import numpy as np
import pytest
from flwr.serverapp import strategy as flower
from virtual_grid import VirtualGrid, content, identity, record

from fedstale.strategies import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedProx, FedYogi, Validation

PAIRS = {
    "FedAvg": (FedAvg, {}, flower.FedAvg, {}),
    "FedProx": (FedProx, {"proximal_mu": 0.1}, flower.FedProx, {"proximal_mu": 0.1}),
    "FedAvgM": (
        FedAvgM,
        {"server_learning_rate": 0.5, "server_momentum": 0.8},
        flower.FedAvgM,
        {"server_learning_rate": 0.5, "server_momentum": 0.8},
    ),
    "FedAdam": (FedAdam, {"eta": 0.05}, flower.FedAdam, {"eta": 0.05}),
    "FedAdam with its own betas and tau": (
        FedAdam,
        {"eta": 0.05, "beta_1": 0.8, "beta_2": 0.95, "tau": 0.01},
        flower.FedAdam,
        {"eta": 0.05, "beta_1": 0.8, "beta_2": 0.95, "tau": 0.01},
    ),
    "FedYogi": (FedYogi, {"eta": 0.05}, flower.FedYogi, {"eta": 0.05}),
    "FedAdagrad": (FedAdagrad, {"eta": 0.05}, flower.FedAdagrad, {"eta": 0.05}),
}


def learner(k, dtype):
    """A node that goes a step towards a target of its own."""
    target = np.random.default_rng(k).normal(size=(6, 7)).astype(dtype)

    def node(message, grid):
        arrays = {n: a.numpy() for n, a in message.content["arrays"].items()}
        moved = {n: x + dtype(0.3) * (target[: x.shape[0]] - x) for n, x in arrays.items()}
        return 1.0 + k, content(record(**moved), 3 + 2 * k, train_loss=0.5 * k)

    return node


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", PAIRS)
def test_ten_rounds_agree_with_flowers_own_strategy(name, dtype):
    ours, our_options, theirs, their_options = PAIRS[name]
    initial = record(a=np.zeros((6, 7), dtype), b=np.ones((2, 7), dtype))
    with identity():
        one = ours(**our_options).start(
            VirtualGrid({k: learner(k, dtype) for k in range(4)}), initial, num_rounds=10
        )
        two = theirs(fraction_evaluate=0.0, **their_options).start(
            VirtualGrid({k: learner(k, dtype) for k in range(4)}), initial, num_rounds=10
        )
    tolerance = 2e-5 if dtype is np.float32 else 1e-11
    for key in initial:
        found, expected = one.arrays[key].numpy(), two.arrays[key].numpy()
        assert found.dtype == dtype
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    for version in range(1, 11):
        assert dict(one.train_metrics_clientapp[version]) == pytest.approx(
            dict(two.train_metrics_clientapp[version])
        )


def towards(target, examples):
    """A node that goes half way to a target."""

    def node(message, grid):
        w = message.content["arrays"]["w"].numpy()
        return 1.0, content(record(w=w + 0.5 * (target - w)), examples)

    return node


COUNTS = {"3 + 4 k": [3 + 4 * k for k in range(10)], "one large": [10, 20, 30, 200]}


@pytest.mark.parametrize(
    ("counts", "validation"),
    [
        (COUNTS["3 + 4 k"], Validation(examples_cap=None)),
        (COUNTS["one large"], Validation(examples_cap=None)),
        # By default no reply counts for more than 1.5 times the median, which 7 of [3, 7] does not.
        (COUNTS["3 + 4 k"][:2], None),
    ],
)
def test_fedavg_averages_as_flowers_does_whatever_the_example_counts(counts, validation):
    targets = np.random.default_rng(0).normal(size=(len(counts), 5))
    nodes = {k: towards(targets[k], n) for k, n in enumerate(counts)}
    initial = record(w=np.zeros(5))
    with identity():
        ours = FedAvg(validation=validation).start(VirtualGrid(nodes), initial, num_rounds=3)
        theirs = flower.FedAvg(fraction_evaluate=0.0).start(
            VirtualGrid(nodes), initial, num_rounds=3
        )
    found, expected = ours.arrays["w"].numpy(), theirs.arrays["w"].numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)
    mean = np.average(targets, axis=0, weights=counts)
    np.testing.assert_allclose(found, (1.0 - 0.5**3) * mean, rtol=1e-12, atol=1e-15)
