"""Steps of the server and rates that adapt to delay; test_parity compares with Flower's."""

import numpy as np
import pytest

from fedstale.errors import ConfigError
from fedstale.strategies.server_optimizer import (
    SGD,
    Adagrad,
    Adam,
    AMSGrad,
    DelayAdaptive,
    Momentum,
    Yogi,
)

OPTIMIZERS = {
    "sgd": SGD,
    "momentum": lambda: Momentum(0.5),
    "nesterov": lambda: Momentum(0.5, nesterov=True),
    "adam": Adam,
    "yogi": Yogi,
    "adagrad": Adagrad,
    "schedule": lambda: Adam(lambda step: 0.1 / step),
    "amsgrad": AMSGrad,
    "delay-adaptive": lambda: DelayAdaptive(AMSGrad()),
}


def deltas(seed=0, n=6):
    rng = np.random.default_rng(seed)
    return [
        {"a": rng.normal(size=(3, 2)).astype(np.float32), "b": rng.normal(size=4)} for _ in range(n)
    ]


def walk(optimizer, model, steps):
    for delta in steps:
        own = {name: array.copy() for name, array in delta.items()}
        # Any number that differs from step to step and is that of its step.
        staleness = int(4 * np.abs(next(iter(delta.values()))).max())
        optimizer.step(model, own, staleness=staleness)
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
        lambda: DelayAdaptive(SGD(), 0),
    ],
)
def test_settings_out_of_range_are_refused(make):
    with pytest.raises(ConfigError, match="expected"):
        make()


def constant_steps(n=6, seed=0):
    rng = np.random.default_rng(seed)
    return [{"a": rng.normal(size=(3, 2)).astype(np.float32), "b": rng.normal(size=4)}] * n


def delayed_walk(optimizer, staleness, model=None, n=6):
    model = model or {"a": np.zeros((3, 2), np.float32), "b": np.zeros(4)}
    for delta, tau in zip(constant_steps(n), staleness, strict=True):
        optimizer.step(model, {k: v.copy() for k, v in delta.items()}, staleness=tau)
    return model


def test_amsgrad_keeps_the_largest_second_moment_as_hand_computes():
    optimizer = AMSGrad(1.0, beta_1=0.5, beta_2=0.5, tau=1.0)
    model = {"w": np.zeros(1)}
    optimizer.step(model, {"w": np.array([4.0])})
    # m = 2, v = 8, v_max = 8.
    first = 2.0 / (8.0**0.5 + 1.0)
    assert model["w"][0] == pytest.approx(first)
    optimizer.step(model, {"w": np.array([0.0])})
    # m = 1, v = 4, but v_max stays 8.
    assert model["w"][0] == pytest.approx(first + 1.0 / (8.0**0.5 + 1.0))
    assert optimizer.state["v"]["w"][0] == pytest.approx(4.0)


@pytest.mark.parametrize("make", [SGD, Momentum, Adam, AMSGrad])
def test_with_no_update_beyond_tau_c_the_optimizer_is_itself_to_the_last_bit(make):
    plain = delayed_walk(make(), [0, 1, 2, 0, 3, 3])
    adaptive = delayed_walk(DelayAdaptive(make(), tau_c=3), [0, 1, 2, 0, 3, 3])
    for name in plain:
        np.testing.assert_array_equal(plain[name], adaptive[name])


def test_beyond_tau_c_the_rate_is_divided():
    optimizer = DelayAdaptive(SGD(0.5), tau_c=2)
    for tau, rate in ((2, 0.5), (5, 0.1), (1, 0.5)):
        model = {"w": np.zeros(1)}
        optimizer.step(model, {"w": np.ones(1)}, staleness=tau)
        assert optimizer.rate == pytest.approx(rate)
        assert model["w"][0] == pytest.approx(rate)


def test_a_stale_step_still_enters_the_moments():
    on_time, late = AMSGrad(0.1), DelayAdaptive(AMSGrad(0.1))
    delayed_walk(on_time, [0] * 6)
    delayed_walk(late, [9] * 6)
    for moment, arrays in on_time.state.items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, late.optimizer.state[moment][name])


def test_a_reset_reaches_the_optimizer():
    optimizer = DelayAdaptive(AMSGrad())
    delayed_walk(optimizer, [0] * 6)
    optimizer.reset()
    assert optimizer.optimizer.state == {}
