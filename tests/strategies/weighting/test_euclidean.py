"""Staleness as the distance that the model has moved, in lengths of the update."""

import numpy as np
import pytest

from fedstale.strategies.weighting import ClientUpdate, EuclideanStaleness


def stale(delta, moved, staleness=2):
    zero = {name: np.zeros_like(array) for name, array in delta.items()}
    return ClientUpdate(delta=delta, base=zero, current=moved, staleness=staleness)


def test_the_step_is_lambda_over_gamma_plus_epsilon_as_hand_computes():
    # The model moved (3, 0 | 4), 5 in all; the update is (0, 1 | 2, 2), 3 long: gamma = 5/3.
    delta = {"a": np.array([0.0, 1.0]), "b": np.array([2.0, 2.0])}
    moved = {"a": np.array([3.0, 0.0]), "b": np.array([4.0, 0.0])}
    before = {name: array.copy() for name, array in delta.items()}
    lam, epsilon = 0.8, 0.5
    weight = EuclideanStaleness(epsilon).weigh(stale(delta, moved))
    eta = lam / (5 / 3 + epsilon)
    assert weight * lam / epsilon == pytest.approx(eta, rel=1e-12)
    for name, array in delta.items():
        np.testing.assert_allclose(array * lam / epsilon, eta * before[name], rtol=1e-12)


def test_an_update_that_is_not_stale_or_a_model_that_stood_still_costs_nothing():
    delta, moved = {"a": np.array([1.0, 0.3], np.float32)}, {"a": np.ones(2, np.float32)}
    assert EuclideanStaleness().weigh(stale(delta, moved, staleness=0)) == 1.0
    still = {"a": np.zeros(2, np.float32)}
    assert EuclideanStaleness().weigh(stale(delta, still)) == 1.0
    np.testing.assert_array_equal(delta["a"], np.array([1.0, 0.3], np.float32))
    assert EuclideanStaleness().weigh(stale({"a": np.zeros(2, np.float32)}, still)) == 1.0


def test_an_update_of_zeros_is_infinitely_stale_once_the_model_has_moved():
    assert EuclideanStaleness().weigh(stale({"a": np.zeros(2)}, {"a": np.ones(2)})) == 0.0


def test_a_longer_update_is_less_late():
    moved = {"a": np.array([2.0])}
    weights = [EuclideanStaleness().weigh(stale({"a": np.array([x])}, moved)) for x in (1.0, 2.0)]
    assert weights == pytest.approx([1 / 3, 1 / 2])
