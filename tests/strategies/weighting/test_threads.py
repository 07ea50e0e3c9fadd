"""Weights and updates are the same to the last bit on any number of threads."""

import numpy as np
import pytest

from fedstale.strategies.types import arrays
from fedstale.strategies.types.arrays import CHUNK
from fedstale.strategies.weighting import ClientUpdate, DirectionalGap, Gap


def weighed(weighting, model_sizes, dtype, seed=0):
    rng = np.random.default_rng(seed)
    theta = [
        {name: rng.standard_normal(n).astype(dtype) for name, n in model_sizes.items()}
        for _ in range(4)
    ]
    weighting.observe(theta[0], theta[1], 1.0)
    weighting.observe(theta[1], theta[2], 0.5)
    stale = ClientUpdate(delta=theta[3], base=theta[0], current=theta[2], staleness=2)
    return weighting.weigh(stale), theta[3]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("make", [Gap, lambda: Gap(of="layer"), lambda: DirectionalGap(of="model")])
def test_stale_updates_weigh_the_same_on_any_number_of_threads(monkeypatch, make, dtype):
    sizes = {"w": 3 * CHUNK + 17, "b": 5, "v": CHUNK}
    monkeypatch.setattr(arrays, "LARGE", 1 << 62)
    weight, delta = weighed(make(), sizes, dtype)
    monkeypatch.setattr(arrays, "LARGE", 1)
    for threads in ("1", "2", "5"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        again, parts = weighed(make(), sizes, dtype)
        assert again == weight
        for name, array in parts.items():
            np.testing.assert_array_equal(array, delta[name])
