import json
import tempfile
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from shared_fleets import synthetic

from fedstale.agents import AgentSelector
from fedstale.agents.env.episodes import EpisodeSettings
from fedstale.agents.env.scenario import Scenario
from fedstale.agents.env.simulator import Reward
from fedstale.agents.env.windows import rollout, training_picks_of
from fedstale.agents.evaluation import episode_metrics
from fedstale.agents.policy import scorer
from fedstale.agents.policy.scorer import by_agent
from fedstale.agents.training import Training, train
from fedstale.errors import ConfigError
from fedstale.strategies import parse
from fedstale.strategies.selection import BALANCED


def rewards(ground, episodes, score):
    simulator = ground.simulator(len(episodes))
    pick = training_picks_of(simulator, score, rng(3))
    return rollout(simulator, episodes, pick, Reward()).terms


def rng(seed):
    return np.random.default_rng(seed)


def random_weights():
    return {
        name: (0.3 * rng(1).standard_normal(value.shape)).astype("f4")
        for name, value in settings().start_weights().items()
    }


@cache
def scenario(seed=0):
    traces = synthetic(180, days=1).take(np.arange(30 * seed, 30 * seed + 30))
    few = EpisodeSettings(
        devices=(4, 8), rounds=4, window_s=3 * 3600.0, concurrency_share=(0.2, 0.5)
    )
    return Scenario.of(traces, forecasts="oracle", settings=few)


def settings(**changed):
    small = {"windows": 1, "validate_every": 2, "validation_windows": 6, "updates": 6}
    return Training(**{**small, **changed})


def test_a_training_ends_with_an_agent_that_can_be_used(tmp_path, tmp_path_factory, monkeypatch):
    seen, elsewhere = [], tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    agent = train(scenario(), scenario(1), settings(), tmp_path, watch=seen.append)
    assert [progress.update for progress in seen] == [1, 2, 3, 4, 5, 6]
    assert "validation" in seen[1].metrics
    loaded = scorer.load(tmp_path)
    for name, value in agent.weights.items():
        np.testing.assert_array_equal(loaded.weights[name], value)
    assert loaded.provenance["training"]["seed"] == 0
    assert not list(elsewhere.glob("SB3-*"))
    rows = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert max(row.get("validation", -np.inf) for row in rows) == pytest.approx(
        loaded.provenance["validation"], abs=1e-4
    )
    (best,) = (row for row in rows if row["update"] == loaded.provenance["best_update"])
    error = loaded.provenance["validation_error"]
    assert error == pytest.approx(best["validation_error"], abs=1e-4)


@pytest.mark.parametrize(
    ("provenance", "said"),
    [
        ({}, ""),
        ({"validation": -0.5}, ""),
        ({"validation": 0.5, "validation_error": 0.2}, ""),
        ({"validation": 0.3, "validation_error": 0.2}, "+0.30 [-0.09, +0.69]"),
        ({"validation": -0.5, "validation_error": 0.1}, "-0.50 [-0.70, -0.30]"),
        ({"validation": 0.0, "validation_error": 0.0}, "+0.00 [+0.00, +0.00]"),
    ],
)
def test_an_agent_without_a_gain_in_validation_names_what_to_use(provenance, said):
    advice = scorer.Agent(weights={}, provenance=provenance).advice
    if not said:
        assert not advice
        return
    told, _, use = advice.partition(": use selector=")
    assert told == f"no better than the rule, with {said} in reward in validation"
    assert parse(f"FedBuff(10, 5, selector={use})").selector.exponents == BALANCED


@pytest.mark.parametrize(
    ("name", "value"),
    [("updates", 0), ("windows", 1.5), ("rate", 0.0), ("rate", np.inf), ("seed", -1)],
)
def test_settings_out_of_range_are_rejected(name, value):
    with pytest.raises(ConfigError, match=rf"training\.{name}"):
        settings(**{name: value})


def test_an_agent_from_scratch_never_uses_the_heuristics_score(tmp_path):
    agent = train(scenario(), scenario(1), settings(residual=False, updates=2), tmp_path)
    assert agent.weights["beta"][0] == 0.0


def test_torch_computes_on_one_thread_while_an_agent_learns_and_on_as_many_as_before_then(tmp_path):
    before, seen = torch.get_num_threads(), []
    try:
        torch.set_num_threads(2)
        how = settings(updates=1)
        train(
            scenario(),
            scenario(1),
            how,
            tmp_path,
            watch=lambda _: seen.append(torch.get_num_threads()),
        )
        seen.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 2]


def without_ties():
    """Windows in which no two candidates are alike: each forecasts its own duration."""
    made = scenario()
    return replace(made, settings=replace(made.settings, request_share=1.0))


@pytest.mark.usefixtures("greedy")
def test_training_picks_earn_what_evaluation_measures():
    ground = without_ties()
    episodes = ground.draw(8, rng(0))
    weights = random_weights()
    found = rewards(ground, episodes, by_agent(weights))
    table = episode_metrics(ground.simulator(8), episodes, by_agent(weights))
    for name in ("reward", "gain", "time", "waste"):
        np.testing.assert_allclose(found[name], table[name], atol=1e-9)


@pytest.mark.usefixtures("greedy")
def test_the_selector_plays_as_the_scores_that_it_was_trained_by(tmp_path):
    ground = without_ties()
    episodes = ground.draw(8, rng(0))
    weights = random_weights()
    scorer.save(scorer.Agent(weights=weights, provenance={}), tmp_path)
    selector = AgentSelector(tmp_path, sure=1.0)
    assert not selector.fault
    by_selector = episode_metrics(ground.simulator(8), episodes, selector)
    by_score = episode_metrics(ground.simulator(8), episodes, by_agent(weights))
    for name in ("sent", "aggregated", "reward", "unique"):
        np.testing.assert_allclose(by_selector[name], by_score[name], atol=1e-6, err_msg=name)


def test_updates_learn_from_every_fleet_and_every_fleet_validates(tmp_path):
    fleets, held_out = [scenario(), scenario(2)], [scenario(1), scenario(3)]
    how = settings(updates=2, validate_every=1)
    both = train(fleets, held_out, how, tmp_path / "both")
    for i, alone in enumerate(fleets):
        other = train(alone, held_out, how, tmp_path / str(i))
        assert any((other.weights[k] != v).any() for k, v in both.weights.items())


def test_fleets_of_other_sizes_learn_together_but_not_of_other_lengths(tmp_path):
    smaller = scenario(2).with_devices(5)
    train([scenario(), smaller], scenario(1), settings(updates=1), tmp_path / "sizes")
    longer = replace(smaller, settings=replace(smaller.settings, rounds=5))
    with pytest.raises(ConfigError, match=r"scenarios with \[8, 10\] choices"):
        train([scenario(), longer], scenario(1), settings(), tmp_path / "lengths")
