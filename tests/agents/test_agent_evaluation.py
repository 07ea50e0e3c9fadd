from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pytest
from made_agent import untrained
from shared_fleets import synthetic

from fedstale.agents.env.episodes import EpisodeSettings
from fedstale.agents.env.scenario import Scenario
from fedstale.agents.evaluation import AGENT, HEURISTIC, contenders, evaluate, paired
from fedstale.errors import ConfigError


def test_the_interval_of_a_difference_ignores_how_much_windows_differ():
    rng = np.random.default_rng(0)
    windows = rng.normal(0, 100, 300)
    one, other = windows + rng.normal(1, 1, 300), windows
    found = paired(one, other)
    assert found.windows == 300
    assert found.low < found.difference < found.high
    assert found.difference == pytest.approx(1.0, abs=0.2)
    # The standard error of the mean of 300 differences is 1/sqrt(300) = 0.058.
    assert found.high - found.low == pytest.approx(2 * 1.96 * 0.058, rel=0.15)


def test_seeds_that_disagree_widen_the_interval():
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 1, 300)
    alike = np.tile(noise, (5, 1))
    apart = alike + np.linspace(-2, 2, 5)[:, None]
    baseline = np.zeros(300)
    width = [f.high - f.low for f in (paired(alike, baseline), paired(apart, baseline))]
    assert width[1] > 3 * width[0]


def test_windows_without_a_value_are_left_out_of_both():
    found = paired(np.array([1.0, np.nan, 3.0]), np.array([0.0, 0.0, np.inf]))
    assert (found.difference, found.windows) == (1.0, 1)
    assert np.isnan(paired(np.array([np.nan]), np.array([1.0])).difference)


@cache
def scenario():
    few = EpisodeSettings(
        devices=(4, 8), rounds=4, window_s=3 * 3600.0, concurrency_share=(0.2, 0.5)
    )
    return Scenario.of(synthetic(30, days=1), forecasts="oracle", settings=few)


def test_two_policies_that_are_the_same_do_the_same_on_every_window():
    playing = contenders(scenario(), [untrained(), untrained()])
    playing = {name: playing[name] for name in (AGENT, HEURISTIC, "random")}
    one = playing[AGENT]
    playing[HEURISTIC] = replace(one, policies=one.policies[:1])
    found = evaluate(playing, windows=10, seed=1, at_a_time=4)
    reward = found.table[found.table["metric"].eq("reward")].set_index("contender")
    interval = reward.loc[HEURISTIC, ["difference", "low", "high"]].tolist()
    assert interval == pytest.approx([0.0] * 3, abs=1e-12)
    assert reward.loc["random", "difference"] != 0.0
    assert reward.loc["random", "windows"] == 10
    assert len(found.windows) == 10 * 4
    again = evaluate(playing, windows=10, seed=1, at_a_time=4)
    pd.testing.assert_frame_equal(found.table, again.table)


def test_all_policies_that_the_agent_is_to_beat_play():
    names = set(contenders(scenario(), [untrained()], persistence=scenario()))
    assert {
        "agent",
        "p_finish x utility",
        "p_finish",
        "random",
        "FedCS",
        "Oort, paper's constants",
        "Oort, released constants",
        "REFL IPS",
        "power of choice",
        "agent, no forecasts",
        "agent, persistence",
        "agent, true forecasts",
    } <= names


def test_windows_may_have_any_number_of_devices():
    episodes = scenario().with_devices(3).draw(5, np.random.default_rng(0))
    assert (episodes.present.sum(axis=1) <= 3).all()
    assert episodes.devices.shape == (5, 3)


def test_what_cannot_be_compared_is_rejected():
    playing = {"random": contenders(scenario(), [untrained()])["random"]}
    with pytest.raises(ConfigError, match="expected at least 10"):
        evaluate(playing, windows=9)
    with pytest.raises(ConfigError, match="contenders = random: expected 'agent'"):
        evaluate(playing, windows=10)
    with pytest.raises(ConfigError, match="at least one trained agent"):
        contenders(scenario(), [])


def test_contenders_on_other_schedules_are_refused():
    playing = contenders(scenario(), [untrained()])
    wide = replace(scenario().settings, concurrency_share=(0.9, 1.0))
    other = replace(playing["random"], scenario=replace(scenario(), settings=wide))
    with pytest.raises(ConfigError, match="'random' has windows with other settings than 'agent'"):
        evaluate({AGENT: playing[AGENT], "random": other}, windows=10)
