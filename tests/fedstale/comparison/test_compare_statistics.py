import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstale.comparison.statistics import (
    Reached,
    difference,
    estimate,
    kaplan_meier,
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


@pytest.mark.parametrize(("values", "mean"), [([], np.nan), ([2.0], 2.0), ([1.0, np.nan], np.nan)])
def test_too_few_or_undefined_values_have_no_interval(values, mean):
    found = estimate(values)
    assert found.mean == pytest.approx(mean, nan_ok=True)
    assert np.isnan(found.low)
    assert np.isnan(found.high)


def test_differences_are_paired_by_seed_and_not_by_position():
    own, reference = {3: 10.0, 1: 2.0, 9: 77.0}, {1: 1.0, 2: 55.0, 3: 7.0}
    # Pairs 2 - 1 and 10 - 7: mean 2, deviation sqrt(2), t(1) = 12.7062.
    found = difference(own, reference)
    assert (found.mean, found.n) == (2.0, 2)
    assert found.high == pytest.approx(2 + 12.706205)


def test_pairing_removes_what_seeds_share():
    own = {seed: 100.0 * seed + 1 for seed in range(5)}
    reference = {seed: 100.0 * seed for seed in range(5)}
    found = difference(own, reference)
    assert (found.low, found.high) == (1.0, 1.0)


def test_speed_ups_are_averaged_as_logarithms():
    found = speed_up(reached([100.0, 100.0]), reached([200.0, 800.0]))
    assert found.ratio.mean == pytest.approx(4.0)
    # Logarithms ln 2 and ln 8: their deviation is sqrt(2) ln 2, so half is t(1) ln 2.
    assert found.ratio.low == pytest.approx(4.0 * 2.0**-12.706205)
    assert found.ratio.high == pytest.approx(4.0 * 2.0**12.706205, rel=1e-5)
    assert found.bound == "exact"


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


def product_limit(times, t):
    """Return 1 minus the product over instants of the share that did not reach the target."""
    left = 1.0
    for at in sorted({at for at, ever in times if ever and at <= t}):
        at_risk = sum(other >= at for other, _ in times)
        left *= 1.0 - sum(other == at and ever for other, ever in times) / at_risk
    return 1.0 - left


@given(st.lists(st.tuples(st.integers(1, 6).map(float), st.booleans()), min_size=1, max_size=8))
def test_the_share_that_reached_a_target_is_the_product_of_kaplan_and_meier(times):
    instants, shares = kaplan_meier([Reached(at_s=at, ever=ever) for at, ever in times])
    assert (np.diff(instants) > 0).all()
    for at, share in zip(instants, shares, strict=True):
        assert share == pytest.approx(product_limit(times, at))
