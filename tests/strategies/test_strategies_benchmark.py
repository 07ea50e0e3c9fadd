"""The training of the benchmark of strategies is that of the app it stands for."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedstale.simulation.flower_app import FlowerApp

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def numpy_digits():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import numpy_digits

        yield numpy_digits
    finally:
        sys.path.remove(str(BENCHMARKS))


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
            loss = task.train(network, data, epochs=5, batch_size=8, learning_rate=0.1, seed=seed)
            rng = np.random.default_rng((task._SHUFFLE, *seed))
            arrays = data[0].numpy(), data[1].numpy()
            found = numpy_digits.train(model, arrays, epochs=5, batch_size=8, rate=0.1, rng=rng)
            assert found == pytest.approx(loss, rel=1e-4)
            for name, expected in network.state_dict().items():
                np.testing.assert_allclose(model[name], expected.numpy(), atol=1e-5)
