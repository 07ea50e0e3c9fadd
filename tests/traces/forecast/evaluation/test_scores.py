import numpy as np
import pytest
from sklearn.metrics import log_loss, mean_pinball_loss

from fedstale.traces.forecast.evaluation import scores
from fedstale.traces.forecast.observation import LEVELS


def test_pinball_is_the_sum_of_that_of_scikit_learn():
    rng = np.random.default_rng(0)
    y, q = rng.normal(size=200), np.sort(rng.normal(size=(200, 3)), axis=1)
    expected = sum(mean_pinball_loss(y, q[:, i], alpha=level) for i, level in enumerate(LEVELS))
    assert scores.pinball(q, y).mean() == pytest.approx(expected)


def test_log_loss_is_that_of_scikit_learn():
    rng = np.random.default_rng(1)
    p, y = rng.uniform(0.01, 0.99, 300), rng.integers(0, 2, 300).astype(float)
    assert scores.log_loss(p, y).mean() == pytest.approx(log_loss(y, p))


def test_unknown_outcomes_stay_unknown_in_every_score():
    nan = np.array([np.nan])
    q = np.array([[1.0, 2.0, 3.0]])
    for score in (
        scores.pinball(q, nan),
        scores.covered(q, nan),
        scores.brier(np.array([0.5]), nan),
        scores.log_loss(np.array([0.5]), nan),
    ):
        assert np.isnan(score).all()


def test_reliability_of_a_calibrated_forecast_lies_on_the_diagonal():
    rng = np.random.default_rng(2)
    p = rng.random(100_000)
    curve = scores.reliability(p, (rng.random(p.size) < p).astype(float))
    np.testing.assert_allclose(curve["predicted"], curve["observed"], atol=0.02)
    assert curve["n"].sum() == p.size


def test_the_interval_widens_where_examples_of_a_device_are_alike():
    rng = np.random.default_rng(3)
    each = rng.normal(size=50)
    alike = np.repeat(each, 100)
    free = rng.normal(size=5000)
    devices = np.repeat(np.arange(50), 100)
    _, low, high = scores.mean_with_interval(alike, devices)
    _, low_free, high_free = scores.mean_with_interval(free, devices)
    assert high - low > 4 * (high_free - low_free)
    assert high - low == pytest.approx(4 * each.std() / np.sqrt(50), rel=0.3)


def test_few_devices_are_resampled_by_their_days(observer):
    when = np.arange(0.0, 3.0, 0.25) * 86_400.0
    one = observer.at(np.repeat(7, when.size), when)
    days = scores.blocks(one)
    assert [np.count_nonzero(days == day) for day in np.unique(days)] == [4, 4, 4]
    two = observer.at(np.tile([7, 8], when.size // 2), when)
    assert np.unique(scores.blocks(two)).size == 6
    _, low, high = scores.mean_with_interval(np.repeat([1.0, 2.0, 3.0], 4), days)
    assert low < 2.0 < high
    five = observer.at(np.arange(5), np.full(5, 1000.0))
    np.testing.assert_array_equal(scores.blocks(five), np.arange(5))


def test_the_mean_leaves_unknown_scores_out():
    value, low, high = scores.mean_with_interval(np.array([1.0, np.nan, 3.0]), np.array([0, 0, 1]))
    assert value == 2.0
    assert low <= 2.0 <= high
    assert np.isnan(scores.mean_with_interval(np.array([np.nan]), np.array([0]))).all()
