"""Whole episodes, played by selectors and by scoring functions."""

import numpy as np
import pandas as pd
import pytest
from shared_fleets import synthetic

from fedstale.agents.env.episodes import EpisodeSettings
from fedstale.agents.env.scenario import Scenario
from fedstale.agents.evaluation import episode_metrics, gini
from fedstale.agents.policy.scorer import by_heuristic
from fedstale.strategies.selection import (
    ExpectedUtility,
    Fastest,
    LeastAvailable,
    Oort,
    PowerOfChoice,
    Random,
    Selector,
)


def phones(n, seed):
    return synthetic(n, days=1, seed=seed)


class LowestId(Selector):
    """Takes the first candidates, so that two servers choose alike."""

    def select(self, candidates, k, now, rng):
        return [int(node) for node in np.sort(candidates.node_ids)[:k]]


def test_episodes_of_a_batch_do_not_touch_one_another():
    settings = EpisodeSettings(devices=(8, 30), rounds=5)
    scenario = Scenario.of(phones(60, 1), forecasts="oracle", settings=settings)
    made = scenario.draw(4, np.random.default_rng(0))
    together = episode_metrics(scenario.simulator(4), made, LowestId())
    alone = [
        episode_metrics(scenario.simulator(1), made.take(np.array([i])), LowestId())
        for i in range(4)
    ]
    pd.testing.assert_frame_equal(together, pd.concat(alone, ignore_index=True))


SELECTORS = {
    "random": Random(),
    "fedcs": Fastest(),
    "power": PowerOfChoice(10),
    "likely": ExpectedUtility(),
    "refl": LeastAvailable(),
    "oort": Oort(),
}


@pytest.mark.parametrize("name", SELECTORS)
def test_every_selector_plays_and_the_same_seed_gives_the_same_metrics(name):
    traces = phones(60, 1)
    settings = EpisodeSettings(devices=(8, 30), rounds=6)
    scenario = Scenario.of(traces, forecasts="oracle", settings=settings)
    made = scenario.draw(5, np.random.default_rng(0))
    one, two = (
        episode_metrics(scenario.simulator(3), made, SELECTORS[name], seed=1) for _ in range(2)
    )
    assert one.equals(two)
    assert len(one) == 5
    assert one["valid_ratio"].dropna().between(0, 1).all()
    assert (one["sent"] > 0).all()
    np.testing.assert_allclose(one["reward"], one["gain"] + one["time"] + one["waste"])


def test_true_forecasts_are_worth_more_than_none():
    traces = phones(150, 2)
    settings = EpisodeSettings(
        devices=(60, 100), request_share=1.0, over_reporting_share=0.0, rounds=10
    )
    truth = Scenario.of(traces, forecasts="oracle", settings=settings)
    made = truth.draw(40, np.random.default_rng(0))
    told = episode_metrics(truth.simulator(40), made, by_heuristic)
    untold = episode_metrics(truth.with_forecasts("none").simulator(40), made, by_heuristic)
    assert told["valid_ratio"].mean() > untold["valid_ratio"].mean() + 0.02


def test_gini_of_known_counts():
    present = np.array([[True, True, True, False]] * 3)
    found = gini(np.array([[2, 2, 2, 9], [6, 0, 0, 9], [0, 0, 0, 9]]), present)
    np.testing.assert_allclose(found[:2], [0.0, 2 / 3])
    assert np.isnan(found[2])
