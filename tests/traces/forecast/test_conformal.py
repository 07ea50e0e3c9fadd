import numpy as np
import pytest

from fedstale.traces.forecast import Calibration, JobForecast


def fleet_scores(forecast, outcome):
    """Quantiles of how far, in logarithms, outcomes lay outside of each end."""
    y, q = np.log(outcome), np.log(forecast.times_s)
    outside = np.stack([q[..., 0] - y, y - q[..., 2]], axis=-1)
    return np.moveaxis(np.quantile(outside, np.linspace(0, 1, 201), axis=0), 0, -1)


def forecast(n, low=50.0, middle=100.0, high=200.0):
    times = np.tile([low, middle, high], (n, 1))
    return JobForecast(times_s=np.stack([times] * 3, axis=1), p_finish=np.full(n, 0.5))


def outcomes(rng, n, spread):
    return 100.0 * np.exp(spread * rng.standard_normal((n, 3)))


def coverage(calibration, rng, spread, rounds, n=40):
    inside = []
    for _ in range(rounds):
        given = calibration.corrected(np.arange(n), forecast(n))
        y = outcomes(rng, n, spread)
        inside.append((given.total_s[:, 0] <= y[:, 2]) & (y[:, 2] <= given.total_s[:, 2]))
        calibration.learn(np.arange(n), given, y)
    return np.mean(inside[rounds // 2 :])


def test_a_fleet_correction_covers_a_fleet_that_behaves_as_before():
    rng = np.random.default_rng(0)
    scores = fleet_scores(forecast(4000), outcomes(rng, 4000, 1.0))
    fixed = Calibration(40, scores, step=0.0)
    assert coverage(fixed, rng, 1.0, 100) == pytest.approx(0.8, abs=0.02)


def test_devices_that_behave_otherwise_are_covered_after_they_adapted():
    rng = np.random.default_rng(1)
    scores = fleet_scores(forecast(4000), outcomes(rng, 4000, 1.0))
    for spread in (0.3, 1.5):
        fixed = coverage(Calibration(40, scores, step=0.0), rng, spread, 300)
        adaptive = coverage(Calibration(40, scores), rng, spread, 300)
        assert abs(fixed - 0.8) > 0.05
        assert adaptive == pytest.approx(0.8, abs=0.03)


def test_each_device_adapts_by_its_own_outcomes_only():
    scores = fleet_scores(forecast(100), outcomes(np.random.default_rng(2), 100, 1.0))
    calibration = Calibration(2, scores)
    before = calibration.corrected([0, 1], forecast(2))
    calibration.learn([0], forecast(1), np.full((1, 3), 1e6))
    after = calibration.corrected([0, 1], forecast(2))
    assert after.total_s[0, 2] > before.total_s[0, 2]
    np.testing.assert_array_equal(after.total_s[1], before.total_s[1])
