import logging
from collections import Counter
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from made_agent import save

from fedstale.agents import SelectionEnv
from fedstale.agents.policy import scorer, selector
from fedstale.agents.policy.selector import AgentSelector, observation
from fedstale.errors import ConfigError
from fedstale.strategies.selection import (
    BALANCED,
    Enough,
    ExpectedUtility,
    Likely,
)
from fedstale.strategies.types import Candidates, SelectionContext


@pytest.fixture
def untrained(tmp_path):
    return save(tmp_path / "untrained")


def fleet(n, seed=0):
    rng = np.random.default_rng(seed)
    picked = rng.integers(0, 9, n)
    finished = rng.binomial(picked, 0.7)
    return Candidates.of(
        np.arange(n) + 100,
        forecast_p_finish=rng.random(n),
        forecast_at=rng.uniform(0, 50, n),
        examples=rng.integers(10, 90, n),
        loss=rng.uniform(0.5, 3, n),
        duration_s=rng.uniform(60, 600, n),
        times_picked=picked,
        times_finished=finished,
        times_failed=picked - finished,
        expected_finishes=picked * 0.7,
    )


def pick(chooser, nodes, k, seed=0):
    return chooser.select(nodes, k, 60.0, np.random.default_rng(seed))


@pytest.mark.usefixtures("greedy")
def test_an_untrained_agent_picks_whom_the_heuristic_picks(untrained):
    chooser = AgentSelector(untrained)
    assert not chooser.fault
    for seed in range(5):
        nodes = fleet(200, seed)
        rule = ExpectedUtility(replace(BALANCED, temperature=0.0))
        assert pick(chooser, nodes, 10) == pick(rule, nodes, 10)


def test_rounds_are_drawn_by_the_scores_over_the_temperature(untrained):
    """Of three, two are picked in an order as likely as Plackett and Luce say."""
    nodes = Candidates.of([1, 2, 3], forecast_p_finish=[0.8, 0.7, 0.6])
    chooser, rng = AgentSelector(untrained), np.random.default_rng(0)
    scores = chooser.scores(nodes, 2, 60.0)
    drawn = Counter(tuple(chooser.select(nodes, 2, 60.0, rng)) for _ in range(1_500))
    weight = dict(zip((1, 2, 3), np.exp(scores / scorer.TEMPERATURE), strict=True))
    total = sum(weight.values())
    for first, second in permutations((1, 2, 3), 2):
        chance = weight[first] / total * weight[second] / (total - weight[first])
        assert drawn[first, second] / 1_500 == pytest.approx(chance, abs=0.03)


def test_nodes_of_which_nothing_is_known_are_picked_by_chance(untrained):
    nodes = Candidates.of(np.arange(20))
    chosen = {tuple(sorted(pick(AgentSelector(untrained), nodes, 3, seed))) for seed in range(20)}
    assert len(chosen) > 10


def test_the_fairness_share_goes_to_clients_never_picked_first(untrained):
    nodes = fleet(300)
    new = set(nodes.node_ids[nodes.times_picked == 0].tolist())
    chosen = pick(AgentSelector(untrained, fairness=0.5), nodes, 20)
    assert len(new) > 10
    assert len(set(chosen) & new) >= 10


def test_the_fairness_quota_goes_to_whom_was_picked_least(untrained):
    nodes = fleet(30)
    least = np.sort(nodes.times_picked)[:6].max()
    chosen = pick(AgentSelector(untrained, fairness=0.5), nodes, 12)
    picked = dict(zip(nodes.node_ids.tolist(), nodes.times_picked.tolist(), strict=True))
    assert sum(picked[node] <= least for node in chosen) >= 6


def test_no_more_jobs_are_sent_than_a_step_is_likely_to_need(untrained):
    step = SelectionContext(buffer_size=3, n_missing=3)
    nodes = Candidates.of(np.arange(20), step, forecast_p_finish=[0.99] * 20)
    assert len(pick(AgentSelector(untrained), nodes, 8)) == 3
    assert len(pick(AgentSelector(untrained, sure=0.99), nodes, 8)) == 4
    assert len(pick(AgentSelector(untrained, sure=1.0), nodes, 8)) == 8


def test_a_rule_in_the_place_of_an_agent_picks_as_its_description_says(tmp_path):
    step = SelectionContext(buffer_size=3, n_missing=3)
    nodes = Candidates.of(np.arange(20), step, forecast_p_finish=[0.99] * 20)
    chooser = AgentSelector(tmp_path / "nowhere")
    assert chooser.described() == ExpectedUtility(BALANCED).described()
    assert pick(chooser, nodes, 8) == pick(ExpectedUtility(BALANCED), nodes, 8)


def test_a_share_of_those_sent_is_fair_where_fewer_are_sent_than_asked_for(untrained):
    step = SelectionContext(buffer_size=4, n_missing=4)
    new = np.arange(60) >= 50
    nodes = Candidates.of(
        np.arange(60),
        step,
        forecast_p_finish=np.where(new, 0.98, 0.99),
        times_picked=np.where(new, 0, 9),
        forecast_duration_s=np.where(new, 1e6, 1.0),
    )
    chooser = AgentSelector(untrained, fairness=0.5)
    chosen = [pick(chooser, nodes, 8, seed) for seed in range(60)]
    assert {len(some) for some in chosen} <= {4, 5}
    share = np.mean([node >= 50 for some in chosen for node in some])
    assert 0.4 < share < 0.6


def test_a_share_smaller_than_one_pick_is_kept_on_average(untrained):
    nodes = Candidates.of(
        np.arange(50),
        forecast_p_finish=np.linspace(0.1, 0.9, 50),
        times_picked=(np.arange(50) >= 5) * 3,
        times_finished=(np.arange(50) >= 5) * 3,
    )
    chooser = AgentSelector(untrained, fairness=0.1)
    rng = np.random.default_rng(0)
    n = sum(node < 5 for _ in range(400) for node in chooser.select(nodes, 2, 0.0, rng))
    assert 40 < n < 130


@pytest.mark.parametrize(
    ("setting", "value"),
    [("fairness", -0.1), ("fairness", 2), ("sure", 0), ("sure", 1.1)],
)
def test_settings_out_of_range_are_rejected(untrained, setting, value):
    with pytest.raises(ConfigError, match=rf"AgentSelector\.{setting}"):
        AgentSelector(untrained, **{setting: value})


def test_missing_files_are_told_in_one_line_and_the_heuristic_decides(tmp_path, caplog):
    nodes = fleet(30)
    with caplog.at_level(logging.WARNING):
        chooser = AgentSelector(tmp_path / "nowhere")
        for _ in range(3):
            assert pick(chooser, nodes, 5) == pick(ExpectedUtility(BALANCED), nodes, 5)
    assert chooser.fault
    assert len(caplog.records) == 1
    assert "no agent.toml there" in caplog.text
    assert "\n" not in caplog.records[0].message


def test_scores_that_are_no_numbers_are_told_in_one_line_and_the_heuristic_decides(
    tmp_path, caplog, monkeypatch
):
    chooser = AgentSelector(save(tmp_path))
    monkeypatch.setattr(selector, "score", lambda weights, x, c, heuristic: heuristic * np.nan)
    nodes = fleet(30)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert pick(chooser, nodes, 5) == pick(ExpectedUtility(BALANCED), nodes, 5)
    assert [record.message for record in caplog.records] == [
        "the agent is not used, the balanced rule decides: 30 of 30 scores are no numbers"
    ]


def test_an_own_policy_sees_what_the_environment_shows(scenario):
    env = SelectionEnv(scenario, n_max=40)
    shown, _ = env.reset(seed=0)
    seen = observation(fleet(30), 5, 60.0, n_max=40)
    assert {name: array.shape[1:] for name, array in seen.items()} == {
        name: array.shape for name, array in shown.items()
    }
    assert env.observation_space.contains({name: array[0] for name, array in seen.items()})
    given = selector.inputs_of(fleet(30), 5, 60.0)
    assert np.array_equal(seen["features"][0, :30], given.features[0])
    assert np.array_equal(seen["heuristic"][0, :30], given.heuristic[0])
    assert np.array_equal(seen["context"], given.context)
    assert seen["mask"][0].tolist() == [1.0] * 30 + [0.0] * 10
    assert not seen["features"][0, 30:].any()
    assert (seen["slots"].item(), seen["clock"].item()) == (5.0, 0.0)


def test_there_is_a_place_for_each_candidate():
    assert observation(fleet(30), 5, 60.0)["mask"].shape == (1, 30)
    with pytest.raises(ConfigError, match="n_max = 20: expected at least 30"):
        observation(fleet(30), 5, 60.0, n_max=20)


def test_of_more_candidates_than_places_some_are_shown_and_enough_are_picked():
    shown = []

    def policy(seen):
        shown.append(int(seen["mask"].sum()))
        return np.ones((1, 8))

    chooser = AgentSelector(policy, n_max=8)
    firsts = {pick(chooser, fleet(30), 1, seed)[0] for seed in range(30)}
    assert set(shown) == {8}
    assert len(firsts) > 10
    shown.clear()
    chosen = pick(chooser, fleet(30), 20)
    assert len(set(chosen)) == 20
    assert shown == [8, 8, 8]


def test_scores_of_another_shape_are_refused_and_no_numbers_are_not_used():
    with pytest.raises(ConfigError, match=r"scores of shape \(1, 64\)"):
        pick(AgentSelector(lambda seen: seen["heuristic"][0]), fleet(9), 2)
    chooser = AgentSelector(lambda seen: seen["heuristic"] * np.nan)
    assert pick(chooser, fleet(30), 5) == pick(ExpectedUtility(BALANCED), fleet(30), 5)


def test_a_description_says_that_no_other_process_can_make_an_own_policy():
    described = AgentSelector(lambda seen: seen["heuristic"]).described()
    assert described["settings"]["path"] == {"opaque": "function"}


def test_selectors_name_those_in_them_that_lack_their_agent(tmp_path, untrained):
    lacking = AgentSelector(tmp_path / "nowhere")
    inside = Enough(Likely(0.5, lacking))
    assert list(inside.faulty()) == [lacking]
    assert "no agent.toml there" in lacking.fault
    assert not list(Enough(AgentSelector(untrained)).faulty())
