"""Without late updates, the strategies are those that Flower ships."""

import numpy as np
import pytest
from flwr.serverapp import strategy as flower
from virtual_grid import VirtualGrid, content, identity, record

from fedstale.strategies import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi

PAIRS = {
    "FedAvg": (FedAvg, {}, flower.FedAvg, {}),
    "FedAvgM": (
        FedAvgM,
        {"server_learning_rate": 0.5, "server_momentum": 0.8},
        flower.FedAvgM,
        {"server_learning_rate": 0.5, "server_momentum": 0.8},
    ),
    "FedAdam": (FedAdam, {"eta": 0.05}, flower.FedAdam, {"eta": 0.05}),
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
