"""Steps of the server, by hand; agreement with Flower's is tested in test_parity."""

import numpy as np
import pytest

from fedstale.errors import ConfigError
from fedstale.strategies.server_optimizer import SGD, Adagrad, Adam, Momentum, Yogi

OPTIMIZERS = {
    "sgd": SGD,
    "momentum": lambda: Momentum(0.5),
    "nesterov": lambda: Momentum(0.5, nesterov=True),
    "adam": Adam,
    "yogi": Yogi,
    "adagrad": Adagrad,
    "schedule": lambda: Adam(lambda step: 0.1 / step),
}


def deltas(seed=0, n=6):
    rng = np.random.default_rng(seed)
    return [
        {"a": rng.normal(size=(3, 2)).astype(np.float32), "b": rng.normal(size=4)} for _ in range(n)
    ]


def walk(optimizer, model, steps):
    for delta in steps:
        optimizer.step(model, {name: array.copy() for name, array in delta.items()})
    return model


def zeros():
    return {"a": np.zeros((3, 2), np.float32), "b": np.zeros(4)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stopped_and_resumed_optimizer_goes_where_it_would_have_gone(name):
    one, two, three = (OPTIMIZERS[name]() for _ in range(3))
    through = walk(one, zeros(), deltas())
    half = walk(two, zeros(), deltas()[:3])
    three.load_state_dict(two.state_dict())
    resumed = walk(three, half, deltas()[3:])
    for key in through:
        np.testing.assert_array_equal(through[key], resumed[key])
        assert through[key].dtype == zeros()[key].dtype


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loaded_state_is_not_shared(name):
    one, two = OPTIMIZERS[name](), OPTIMIZERS[name]()
    walk(one, zeros(), deltas()[:2])
    two.load_state_dict(one.state_dict())
    before = walk(OPTIMIZERS[name](), zeros(), deltas())
    walk(two, zeros(), deltas(seed=9))
    after = walk(one, walk(OPTIMIZERS[name](), zeros(), deltas()[:2]), deltas()[2:])
    for key in before:
        np.testing.assert_array_equal(before[key], after[key])


def test_momentum_and_nesterov_are_what_hand_computes():
    steps = [{"w": np.array([1.0])}, {"w": np.array([2.0])}]
    # v = 1, then 0.5 + 2 = 2.5.
    plain = walk(Momentum(0.1, beta=0.5), {"w": np.zeros(1)}, steps)
    assert plain["w"][0] == pytest.approx(0.1 * (1 + 2.5))
    ahead = walk(Momentum(0.1, beta=0.5, nesterov=True), {"w": np.zeros(1)}, steps)
    assert ahead["w"][0] == pytest.approx(0.1 * (1 + 0.5) + 0.1 * (2 + 0.5 * 2.5))


def test_plain_descent_at_rate_one_adds_the_update_to_the_last_bit():
    (delta,) = deltas(n=1)
    model = walk(SGD(), {"a": np.full((3, 2), 0.1, np.float32), "b": np.full(4, 0.1)}, [delta])
    for name in model:
        start = np.full_like(delta[name], 0.1)
        np.testing.assert_array_equal(model[name], start + delta[name])


def test_a_rate_may_follow_the_steps():
    optimizer = SGD(lambda step: 1.0 / step)
    model = walk(optimizer, {"w": np.zeros(1)}, [{"w": np.ones(1)}] * 3)
    assert model["w"][0] == pytest.approx(1 + 1 / 2 + 1 / 3)
    assert optimizer.rate == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SGD(0.0),
        lambda: Momentum(1.0, beta=1.0),
        lambda: Adam(beta_1=1.0),
        lambda: Yogi(beta_2=-0.1),
        lambda: Adagrad(tau=0.0),
    ],
)
def test_settings_out_of_range_are_refused(make):
    with pytest.raises(ConfigError, match="expected"):
        make()
