"""Probing and Credits: the contract of a selector, and whom probes find."""

from math import nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_nodes import NODES, RNG, picks_as_it_should, pool

from fedstale.contrib.audit import Credits, Probing
from fedstale.errors import ConfigError
from fedstale.strategies.selection import ExpectedUtility, MostReliable, Oort, Random
from fedstale.strategies.types import History

SELECTORS = {
    "probing": lambda: Probing(ExpectedUtility(), 0.3),
    "probing oort": lambda: Probing(Oort(), 0.3),
    "credits": lambda: Credits(utility=2.0, cost=lambda nodes: np.arange(len(nodes))),
}


@settings(max_examples=40, deadline=None)
@given(NODES, st.integers(1, 15))
@pytest.mark.parametrize("name", SELECTORS)
def test_a_selector_that_audits_keeps_the_contract(name, pool, k):
    picks_as_it_should(SELECTORS[name], pool, k)


def picks_of_modest_nodes(selector, *, rounds=300):
    """Return the share of the picks that nodes get which state 0, and keep as much as all do."""
    history, rng, modest = History(), RNG(5), set(range(100, 120))
    nodes = np.arange(80, 120)
    done = {"duration_s": 1.0, "examples": 1.0, "loss": 1.0, "square_loss": 1.0}
    for node in nodes.tolist():
        history.forecast(node, {"p_finish": 0.0 if node in modest else 0.9}, 0.0)
    picked = 0
    for turn in range(rounds):
        chosen = selector.select(history.candidates(nodes), 5, float(turn), rng)
        for node in chosen:
            picked += node in modest
            history.picked(node, float(turn))
            if rng.random() < 0.9:
                history.finished(node, **done, staleness=0, version=turn)
            else:
                history.failed(node)
    return picked / (5 * rounds), history.candidates(nodes)


@pytest.mark.parametrize("rule", [MostReliable, ExpectedUtility])
def test_probing_finds_nodes_that_state_less_than_they_keep(rule):
    without, _ = picks_of_modest_nodes(rule())
    share, nodes = picks_of_modest_nodes(Probing(rule(), 0.1))
    assert without == 0.0
    assert share >= 0.09
    assert nodes.times_picked[20:].min() >= 1


def test_probes_are_a_share_of_the_picks_also_where_one_slot_is_free_at_a_time():
    nodes = pool(forecast=[{"p_finish": 0.9}, {"p_finish": 0.9}, {"p_finish": 0.0}])
    rule, rng = Probing(MostReliable(), 0.2), RNG(0)
    picks = [rule.select(nodes, 1, 0.0, rng)[0] for _ in range(100)]
    assert picks.count(12) == 20
    assert 12 not in picks[:2]


def test_who_is_no_better_than_what_it_states_is_never_probed():
    nodes = pool(
        forecast=[{"p_finish": 0.9}, {"p_finish": 0.5}, {}], times_failed=[0, 3, 0], loss=[1, 1, 1]
    )
    for seed in range(20):
        chosen = Probing(MostReliable(), 1.0).select(nodes, 1, 0.0, RNG(seed))
        assert chosen == MostReliable().select(nodes, 1, 0.0, RNG(seed)) == [10]


@pytest.mark.parametrize("share", [-0.1, 1.5, nan])
def test_a_share_of_probes_is_a_share(share):
    with pytest.raises(ConfigError, match=r"Probing\.share"):
        Probing(Random(), share)


def test_a_probing_selector_goes_on_from_its_state():
    nodes = pool(forecast=[{"p_finish": 0.9}, {"p_finish": 0.0}])
    one = Probing(Oort(), 0.3)
    for turn in range(5):
        one.select(nodes, 1, 0.0, RNG(turn))
    other = Probing(Oort(), 0.3)
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == one.state_dict()
    turns = [[rule.select(nodes, 1, 0.0, RNG(9)) for _ in range(8)] for rule in (one, other)]
    assert turns[0] == turns[1]
