"""A rate that falls while a merge holds a very late update, and AMSGrad."""

import numpy as np
import pytest

from fedstale.errors import ConfigError
from fedstale.strategies.server_optimizer import SGD, Adam, AMSGrad, DelayAdaptive, Momentum


def steps(n=6, seed=0):
    rng = np.random.default_rng(seed)
    return [{"a": rng.normal(size=(3, 2)).astype(np.float32), "b": rng.normal(size=4)}] * n


def walk(optimizer, staleness, model=None, n=6):
    model = model or {"a": np.zeros((3, 2), np.float32), "b": np.zeros(4)}
    for delta, tau in zip(steps(n), staleness, strict=True):
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
@pytest.mark.parametrize("beyond", ["divide", "cap"])
def test_with_nobody_beyond_tau_c_the_optimizer_is_itself_to_the_last_bit(make, beyond):
    plain = walk(make(), [0, 1, 2, 0, 3, 3])
    adaptive = walk(DelayAdaptive(make(), tau_c=3, beyond=beyond), [0, 1, 2, 0, 3, 3])
    for name in plain:
        np.testing.assert_array_equal(plain[name], adaptive[name])


def test_beyond_tau_c_the_rate_is_divided_or_capped():
    divided = DelayAdaptive(SGD(0.5), tau_c=2)
    capped = DelayAdaptive(SGD(0.5), tau_c=2, beyond="cap")
    small = DelayAdaptive(SGD(0.1), tau_c=2, beyond="cap")
    for tau, rates in ((2, (0.5, 0.5, 0.1)), (5, (0.1, 0.2, 0.1)), (1, (0.5, 0.5, 0.1))):
        for optimizer, rate in zip((divided, capped, small), rates, strict=True):
            model = {"w": np.zeros(1)}
            optimizer.step(model, {"w": np.ones(1)}, staleness=tau)
            assert optimizer.rate == pytest.approx(rate)
            assert model["w"][0] == pytest.approx(rate)


def test_a_cap_follows_a_rate_that_follows_the_steps():
    optimizer = DelayAdaptive(SGD(lambda step: 1.0 / step), beyond="cap")
    rates = []
    for tau in (4, 4, 4, 4, 4, 4):
        optimizer.step({"w": np.zeros(1)}, {"w": np.ones(1)}, staleness=tau)
        rates.append(optimizer.rate)
    assert rates == pytest.approx([0.25, 0.25, 0.25, 0.25, 0.2, 1 / 6])


def test_a_late_merge_still_enters_the_moments():
    on_time, late = AMSGrad(0.1), DelayAdaptive(AMSGrad(0.1))
    walk(on_time, [0] * 6)
    walk(late, [9] * 6)
    for moment, arrays in on_time.state.items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, late.optimizer.state[moment][name])


@pytest.mark.parametrize("make", [AMSGrad, lambda: DelayAdaptive(AMSGrad())])
def test_a_stopped_and_resumed_optimizer_goes_where_it_would_have_gone(make):
    delays = [0, 4, 1, 0, 7, 2]
    through = walk(make(), delays)
    one, two = make(), make()
    half = walk(one, delays[:3], n=3)
    two.load_state_dict(one.state_dict())
    resumed = walk(two, delays[3:], half, n=3)
    for name in through:
        np.testing.assert_array_equal(through[name], resumed[name])


def test_a_reset_reaches_the_optimizer():
    optimizer = DelayAdaptive(AMSGrad())
    walk(optimizer, [0] * 6)
    optimizer.reset()
    assert optimizer.optimizer.state == {}


@pytest.mark.parametrize(
    "make", [lambda: DelayAdaptive(SGD(), 0), lambda: DelayAdaptive(SGD(), beyond="drop")]
)
def test_settings_out_of_range_are_refused(make):
    with pytest.raises(ConfigError, match="expected"):
        make()
