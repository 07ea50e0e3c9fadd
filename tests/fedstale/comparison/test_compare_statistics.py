import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedstale.comparison.statistics import (
    Reached,
    difference,
    estimate,
    pairs_needed,
    speed_up,
)


def reached(times, *, never=()):
    return {s: Reached(at_s=t, ever=s not in never) for s, t in enumerate(times)}


def test_a_mean_has_the_interval_of_students_t():
    # Deviation sqrt(2.5), t(4) = 2.776445: half is 2.776445 * sqrt(2.5 / 5).
    found = estimate([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.mean, found.n) == (3.0, 5)
    assert found.high - found.mean == pytest.approx(1.963243, abs=1e-6)
    assert found.mean - found.low == pytest.approx(1.963243, abs=1e-6)


@pytest.mark.parametrize(
    ("values", "mean"),
    [([], np.nan), ([2.0], 2.0), ([0.3, 0.7], 0.5), ([1.0, 2.0, np.nan], np.nan)],
)
def test_too_few_or_undefined_values_have_no_interval(values, mean):
    found = estimate(values)
    assert found.mean == pytest.approx(mean, nan_ok=True)
    assert np.isnan(found.low)
    assert np.isnan(found.high)


def test_two_values_are_told_and_no_interval():
    assert estimate([0.351, 0.568]).half_width() == "0.351, 0.568"
    assert estimate([0.351, 0.568]).ends() == "+0.351, +0.568"


@given(
    st.lists(st.floats(0, 1), min_size=3, max_size=6),
    st.lists(st.floats(0, 1), min_size=3, max_size=6),
)
def test_intervals_of_shares_and_of_their_differences_hold_only_what_can_be(one, two):
    mean = estimate(one, (0.0, 1.0))
    whole = estimate(one)
    assert 0.0 <= mean.low <= mean.high <= 1.0
    assert (mean.low, mean.high) == (max(whole.low, 0.0), min(whole.high, 1.0))
    paired = difference(dict(enumerate(one)), dict(enumerate(two)), (0.0, 1.0))
    assert -1.0 <= paired.low <= paired.high <= 1.0


def test_an_interval_that_is_cut_is_told_by_its_ends():
    assert estimate([0.3, 0.5, 1.0], (0.0, 1.0)).half_width() == "0.600 (0.000 to 1.000)"
    assert "±" in estimate([0.4, 0.5, 0.6], (0.0, 1.0)).half_width()


def test_an_interval_that_is_cut_holds_the_mean_as_often():
    rng = np.random.default_rng(1)
    shares = rng.beta(0.8, 0.4, size=(400, 3))
    mean = 0.8 / 1.2
    held = {
        limits: np.mean([(e := estimate(row, limits)).low <= mean <= e.high for row in shares])
        for limits in ((0.0, 1.0), (-np.inf, np.inf))
    }
    assert len(set(held.values())) == 1


@pytest.mark.parametrize("effect", [0.4, 0.8, 1.5])
def test_as_many_pairs_as_are_needed_show_the_effect_four_times_in_five(effect):
    seen = np.array([-1.0, 0.0, 1.0]) + effect  # deviation 1
    n = pairs_needed(estimate(seen.tolist()))

    def shown(n):
        """Return how often Student's interval of n pairs leaves out 0."""
        pairs = np.random.default_rng(2).normal(effect, 1.0, size=(20_000, n))
        half = stats.t.ppf(0.975, n - 1) * pairs.std(axis=1, ddof=1) / np.sqrt(n)
        return (abs(pairs.mean(axis=1)) > half).mean()

    assert shown(n) >= 0.79
    assert shown(n - 1) < 0.81
    assert shown(n - 1) < shown(n)


@pytest.mark.parametrize(
    ("pairs", "needed"), [([1.0, 1.0, 1.0], 3), ([0.0, 0.0, 0.0], None), ([-1.0, 0.0, 1.01], None)]
)
def test_equal_pairs_need_no_more_and_an_effect_of_nothing_is_never_shown(pairs, needed):
    assert pairs_needed(estimate(pairs)) == needed


def test_differences_are_paired_by_seed_and_not_by_position():
    own = {3: 10.0, 1: 2.0, 9: 77.0, 4: 5.0}
    reference = {1: 1.0, 2: 55.0, 4: 3.0, 3: 7.0}
    # Pairs 2 - 1, 10 - 7 and 5 - 3: mean 2, deviation 1, t(2) = 4.302653.
    found = difference(own, reference)
    assert (found.mean, found.n) == (2.0, 3)
    assert found.high == pytest.approx(2 + 4.302653 / np.sqrt(3))


def test_pairing_removes_what_seeds_share():
    own = {seed: 100.0 * seed + 1 for seed in range(5)}
    reference = {seed: 100.0 * seed for seed in range(5)}
    found = difference(own, reference)
    assert (found.low, found.high) == (1.0, 1.0)


def test_speed_ups_are_averaged_as_logarithms():
    found = speed_up(reached([100.0] * 3), reached([200.0, 400.0, 800.0]))
    assert found.ratio.mean == pytest.approx(4.0)
    # Logarithms of 2, 4 and 8: their deviation is ln 2, so half is t(2) ln 2 / sqrt(3).
    half = 4.302653 / np.sqrt(3)
    assert found.ratio.low == pytest.approx(4.0 * 2.0**-half)
    assert found.ratio.high == pytest.approx(4.0 * 2.0**half)
    assert found.bound == "exact"
    assert str(speed_up(reached([100.0] * 2), reached([200.0, 800.0]))) == "2.00, 8.00"


@pytest.mark.parametrize(
    ("own", "other", "bound"),
    [
        ((), (), "exact"),
        ((), (0,), "at least"),
        ((1,), (), "at most"),
        ((0,), (1,), "unknown"),
    ],
)
def test_runs_that_never_got_there_make_a_bound(own, other, bound):
    found = speed_up(reached([10.0, 20.0], never=own), reached([20.0, 40.0], never=other))
    assert found.bound == bound
    assert found.ratio.mean == pytest.approx(2.0)


def test_nothing_is_said_where_nobody_got_there_or_a_time_is_zero():
    never = reached([10.0, 10.0], never=(0, 1))
    assert speed_up(never, never) is None
    assert speed_up(reached([0.0]), reached([5.0])) is None
    assert speed_up({1: Reached(at_s=1.0, ever=True)}, {2: Reached(at_s=1.0, ever=True)}) is None
