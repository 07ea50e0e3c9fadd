"""The learning proxy: what helps, what is forgotten, and what devices report."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstale.agents.env.learning_proxy import LearningProxy, assign, entropy_of, fitted
from fedstale.errors import ConfigError

PLAIN = {"eta": 0.4, "delta": 1.0, "nu": 0.5, "rho": 0.1, "fade": 2.0, "ceiling": 4.0}


def test_a_server_step_by_hand():
    proxy = LearningProxy(first_loss=2.0, **PLAIN)
    losses = np.array([[1.0, 0.5]])
    after = proxy.after_step(losses, np.array([[2.0, 0.0]]), np.array([4.0]))
    first = 2.0 * (0.1 * np.exp(-4.0) * np.log(4.0) - 0.4 * 2.0 * 0.5)
    second = 2.0 * 0.1 * np.log(8.0)
    np.testing.assert_allclose(after, losses * np.exp([[first, second]]))


def test_a_step_of_the_fleet_has_the_mixture_of_the_fleet():
    proxy = fitted()
    losses = np.full((1, 4), 1.3)
    after = proxy.after_step(losses, np.ones((1, 4)), np.ones(1))
    fall = np.log(losses.mean() / after.mean())
    assert 0 < fall <= proxy.fleet_progress(losses)[0] < 1.2 * fall


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(1e-4, 3.0), min_size=3, max_size=3),
    st.lists(st.floats(0.0, 1e6), min_size=3, max_size=3),
    st.floats(0.0, 1e5),
)
def test_losses_stay_finite_and_a_larger_share_never_hurts_its_group(losses, ratios, size):
    proxy = fitted()
    start, sizes = np.array([losses]), np.array([size])
    after = proxy.after_step(start, np.array([ratios]), sizes)
    more = proxy.after_step(start, np.array([ratios]) + 0.5, sizes)
    assert np.isfinite(after).all()
    assert (after > 0).all()
    assert (more <= after + 1e-12).all()


def test_entropy_of_known_mixtures():
    found = entropy_of(np.array([[0.25] * 4, [1.0, 0.0, 0.0, 0.0]]))
    np.testing.assert_allclose(found, [np.log(4.0), 0.0])


def test_a_device_reports_more_the_worse_its_groups_are_learnt():
    proxy = fitted()
    low, high = proxy.reported(np.array([0.2, 2.0]), np.zeros(2), np.zeros(2))
    assert 0 < low < high
    assert proxy.reported(np.array([2.0]), np.ones(1), np.zeros(1))[0] > high


def test_dealt_mixtures_are_shares_and_small_skew_is_uneven():
    rng = np.random.default_rng(0)
    even, n = assign(rng, (1, 200), 5, np.array([50.0]), np.array([0.0]))
    uneven, spread = assign(rng, (1, 200), 5, np.array([0.05]), np.array([1.0]))
    for mixtures in (even, uneven):
        np.testing.assert_allclose(mixtures.sum(axis=2), 1.0)
    assert even.max() < 0.5 < uneven.max(axis=2).mean()
    assert (n == 100.0).all()
    assert spread.std() > 20
    assert spread.min() >= 1


@pytest.mark.parametrize(
    "changed", [{"eta": 0.0}, {"rho": -0.1}, {"ceiling": 1.0}, {"delta": np.nan}]
)
def test_constants_that_mean_nothing_are_refused(changed):
    with pytest.raises(ConfigError, match="proxy = "):
        LearningProxy(**(PLAIN | changed))
