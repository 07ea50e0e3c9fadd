"""TiFL and the exponents of Pisces: the contract of a selector, and what each prefers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_nodes import NODES, RNG, picks_as_it_should, pool

from fedstale.contrib.selectors import PISCES, TiFL
from fedstale.errors import ConfigError
from fedstale.strategies.selection import ExpectedUtility, SelectionContext

SELECTORS = {"tifl": lambda: TiFL(3, interval=1), "pisces": lambda: ExpectedUtility(PISCES)}


@settings(max_examples=40, deadline=None)
@given(NODES, st.integers(1, 15))
@pytest.mark.parametrize("name", SELECTORS)
def test_a_selector_of_the_shelf_keeps_the_contract(name, pool, k):
    picks_as_it_should(SELECTORS[name], pool, k)


def test_tiers_are_at_least_one():
    with pytest.raises(ConfigError, match="expected"):
        TiFL(0)


def test_pisces_prefers_fresh_updates_of_equal_utility():
    known = pool(examples=[8.0, 8.0, 10.0], loss=[1.0] * 3, staleness=[3.0, 0.0, 8.0])
    assert ExpectedUtility(PISCES).select(known, 3, 0.0, RNG(0)) == [11, 10, 12]


def test_tifl_picks_of_one_speed_at_a_time_and_keeps_to_it_within_a_round():
    slow_and_fast = pool(durations_s=[(float(i // 10),) for i in range(10, 40)])
    tifl, seen = TiFL(3), set()
    for version in range(30):
        slow_and_fast.context = SelectionContext(version=version, n_in_flight=1)
        picked = [tifl.select(slow_and_fast, 4, 0.0, RNG(3 * version + i)) for i in range(3)]
        (tier,) = {(node - 10) // 10 for some in picked for node in some}
        seen.add(tier)
    assert seen == {0, 1, 2}


def test_tifl_draws_the_tier_of_the_largest_loss_more_often():
    known = pool(durations_s=[(1.0,), (2.0,)], loss=[0.1, 5.0])
    tifl, rng = TiFL(2, interval=1), RNG(0)
    picked = [tifl.select(known, 1, 0.0, rng)[0] for _ in range(600)]
    assert picked.count(11) / 600 == pytest.approx(2 / 3, abs=0.06)


def test_a_tier_of_tifl_without_credits_rests():
    known = pool(durations_s=[(1.0,), (2.0,)])
    tifl = TiFL(2, credits=5)
    picked = [tifl.select(known, 1, 0.0, RNG(seed))[0] for seed in range(10)]
    assert picked.count(10) == picked.count(11) == 5
