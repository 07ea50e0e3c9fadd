"""Worlds of learning constants: how they are drawn, and what is shared between them."""

import numpy as np
import pytest
from shared_fleets import synthetic
from small_episodes import SIMPLE, episodes, fleet, one_kind

from agent.many_worlds import (
    VARIED,
    Worlds,
    WorldSimulator,
    outside_of_fit,
)
from fedstale.agents.env.episodes import EpisodeSettings, JobKinds
from fedstale.agents.env.learning_proxy import fitted
from fedstale.agents.env.scenario import Scenario
from fedstale.agents.env.simulator import Reward
from fedstale.agents.env.windows import picks_of, rollout
from fedstale.agents.policy.scorer import by_heuristic
from fedstale.errors import ConfigError
from fedstale.strategies.selection import Random

WIDE = dict.fromkeys(VARIED, 0.7)


def rewards(simulator, policy, made):
    pick = picks_of(simulator, policy, len(made), np.random.SeedSequence(3))
    return rollout(simulator, made, pick, Reward()).terms


@pytest.fixture
def drawn(scenario):
    return scenario.draw(6, np.random.default_rng(1))


def test_worlds_scatter_around_their_median_as_the_spread_says():
    spread = dict(WIDE, eta=0.2, rho=0.0)
    worlds = Worlds.around(fitted(), spread, 20_000, seed=1)
    logs = {name: np.log(worlds.constants[name] / getattr(fitted(), name)) for name in VARIED}
    assert np.median(logs["eta"]) == pytest.approx(0.0, abs=0.01)
    assert logs["eta"].std() == pytest.approx(0.2, rel=0.05)
    assert (logs["rho"] == 0).all()
    assert abs(np.corrcoef(logs["eta"], logs["delta"])[0, 1]) < 0.05
    assert (worlds.constants["ceiling"] >= worlds.constants["first_loss"]).all()


def test_a_seed_gives_the_same_worlds_and_more_of_them_begin_with_these():
    few, many = (Worlds.around(fitted(), WIDE, n, seed=5) for n in (3, 9))
    assert [few[i] for i in range(3)] == [many[i] for i in range(3)]
    assert Worlds.around(fitted(), WIDE, 3, seed=6)[0] != few[0]


def test_a_server_step_in_rows_is_that_of_each_world_alone():
    worlds = Worlds.around(fitted(), WIDE, 3, seed=0)
    rng = np.random.default_rng(0)
    losses, ratios = rng.uniform(0.1, 2, (3, 10)), rng.uniform(0, 3, (3, 10))
    sizes, entropy, noise = rng.uniform(0.5, 2, 3), rng.random(3), rng.standard_normal(3)
    rows = worlds.rows(np.array([2, 0, 1]))
    for row, world in enumerate((2, 0, 1)):
        one = slice(row, row + 1)
        alone = worlds[world]
        after = alone.after_step(losses[one], ratios[one], sizes[one])
        np.testing.assert_array_equal(rows.after_step(losses, ratios, sizes)[one], after)
        np.testing.assert_array_equal(
            rows.fleet_progress(losses)[one], alone.fleet_progress(losses[one])
        )
        told = alone.reported(losses[one, 0], entropy[one], noise[one])
        np.testing.assert_array_equal(rows.reported(losses[:, 0], entropy, noise)[one], told)


def test_an_episode_in_a_world_is_the_episode_with_the_constants_of_that_world(scenario, drawn):
    worlds = Worlds.around(fitted(), WIDE, 3, seed=2)
    simulator = WorldSimulator(scenario, 6, worlds)
    simulator.world[:] = 1
    found = rewards(simulator, by_heuristic, drawn)
    alone = scenario.simulator(6)
    alone.proxy = worlds[1]
    for name, values in rewards(alone, by_heuristic, drawn).items():
        np.testing.assert_allclose(found[name], values, rtol=1e-12)


def test_a_model_that_follows_learns_as_if_the_same_picks_were_made_in_its_world(scenario, drawn):
    worlds = Worlds.around(fitted(), WIDE, 4, seed=2)
    simulator = WorldSimulator(scenario, 6, Worlds.of(fitted()), following=worlds)
    rewards(simulator, Random(), drawn)
    for world in range(4):
        own = WorldSimulator(scenario, 6, worlds)
        own.world[:] = world
        # Random picks look at no loss, so they are the same in every world.
        gain = rewards(own, Random(), drawn)["gain"]
        np.testing.assert_allclose(simulator.gains[:, world], gain, rtol=1e-9)


def test_picks_by_loss_are_others_in_another_world():
    n = 10
    traces = fleet([[(0.0, 9000.0)]] * n)
    scenario = Scenario(
        traces=traces, kinds=one_kind(), forecasts=None, devices=np.arange(n),
        start=0.0, end=9000.0, settings=EpisodeSettings(devices=(1, n)), proxy=SIMPLE,
    )  # fmt: skip
    made = episodes(np.arange(n), b=2, rounds=8)
    worlds = Worlds(constants={
        name: np.array([value, value * (0.05 if name == "eta" else 1.0)])
        for name, value in {k: getattr(SIMPLE, k) for k in (*VARIED, "first_loss")}.items()
    })  # fmt: skip
    simulator = WorldSimulator(scenario, 2, worlds)
    simulator.world[:] = [0, 1]
    rewards(simulator, by_heuristic, made)
    picked = simulator.known["times_picked"]
    assert (picked[0] != picked[1]).any()


@pytest.mark.parametrize(
    ("change", "said"),
    [({"eta": -0.1}, "spread.eta = -0.1"), ({"eta": "wide"}, "spread.eta = 'wide'"),
     ({"speed": 0.1}, "spread.speed = 0.1"), ({"rho": float("nan")}, "spread.rho = nan")],
)  # fmt: skip
def test_a_spread_that_is_none_is_named(change, said):
    with pytest.raises(ConfigError, match=said):
        Worlds.around(fitted(), WIDE | change, 3, seed=0)
    with pytest.raises(ConfigError, match=r"worlds = 0"):
        Worlds.around(fitted(), WIDE, 0, seed=0)


PLACE = {"present": True, "buffer_size": 4, "keeps_stragglers": False, "rounds": 20}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, []),
        ({"buffer_size": 40}, ["updates of a server step 40 to 40, fitted to 2 to 12"]),
        ({"rounds": 2000}, ["rounds 2000 to 2000, fitted to 0 to 577"]),
        ({"keeps_stragglers": True}, ["stragglers are aggregated later"]),
    ],
)
def test_windows_outside_of_the_fit_are_told(values, said):
    traces = synthetic(60, days=1)
    kinds = JobKinds.of_fleet(traces, minutes=(1.0,), megabytes=(5.0,), patience=(5.0,))
    settings = EpisodeSettings(devices=(40, 40), rounds=20)
    scenario = Scenario.of(traces, forecasts="none", settings=settings, kinds=kinds)
    made = scenario.draw(10, np.random.default_rng(0))
    for name, value in (PLACE | values).items():
        getattr(made, name)[:] = value
    found = outside_of_fit(made, kinds)
    assert len(found) == len(said)
    assert all(words in line for words, line in zip(said, found, strict=True))
