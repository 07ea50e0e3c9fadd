"""Plays whose picks many worlds share tell what whole plays of each world tell."""

from functools import cache

import numpy as np
from made_agent import untrained
from shared_fleets import synthetic

from fedstale.agents import world_evaluation
from fedstale.agents.env.episodes import EpisodeSettings
from fedstale.agents.env.rounds import picks_of, rollout
from fedstale.agents.env.scenario import Scenario
from fedstale.agents.env.simulator import Reward
from fedstale.agents.env.worlds import VARIED, WorldSimulator
from fedstale.agents.evaluation import HEURISTIC
from fedstale.agents.policy.scorer import by_heuristic
from fedstale.agents.world_evaluation import RULES, evaluate_worlds
from fedstale.traces.arrays import stream


@cache
def scenario():
    few = EpisodeSettings(
        devices=(12, 16), rounds=8, window_s=4 * 3600.0, concurrency_share=(0.2, 0.5)
    )
    return Scenario.of(synthetic(60, days=1), forecasts="oracle", settings=few)


def in_full(policy, worlds, episodes, world, seed):
    """The rewards of a policy that plays each window in one world, without anything shared."""
    simulator = WorldSimulator(scenario(), len(episodes), worlds)
    simulator.world[:] = world
    pick = picks_of(simulator, policy, len(episodes), np.random.SeedSequence(seed))
    return rollout(simulator, episodes, pick, Reward()).terms["reward"]


def test_worlds_in_which_picks_are_shared_tell_what_whole_plays_tell(monkeypatch):
    monkeypatch.setattr(world_evaluation, "PLAYS", 400)
    # The heuristic picks by loss: here every window is played in every world.
    episodes = scenario().draw(12, stream(0, 9))
    found = evaluate_worlds(
        scenario(), [untrained()], worlds=24, windows=12, spread=dict.fromkeys(VARIED, 1.0)
    )
    shared = found.advantages["random"] - found.advantages[HEURISTIC]
    whole = [
        in_full(by_heuristic, found.worlds, episodes, world, 0).mean()
        - in_full(RULES["random"](8), found.worlds, episodes, world, 0).mean()
        for world in range(24)
    ]
    assert np.corrcoef(whole, shared)[0, 1] > 0.6
    np.testing.assert_allclose(np.mean(whole), shared.mean(), atol=0.3)
