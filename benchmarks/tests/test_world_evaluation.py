"""The agent in many worlds: what is summed up, and what is refused."""

from functools import cache

import numpy as np
import pytest
from made_agent import untrained
from shared_fleets import synthetic

from agent import many_worlds as agent_worlds
from agent.many_worlds import (
    BY_LOSS,
    RULES,
    VARIED,
    Worlds,
    WorldSimulator,
    compared,
    evaluate_worlds,
)
from fedstale.agents.env.episodes import EpisodeSettings
from fedstale.agents.env.learning_proxy import fitted
from fedstale.agents.env.scenario import Scenario
from fedstale.agents.env.simulator import Reward
from fedstale.agents.env.windows import picks_of, rollout
from fedstale.agents.evaluation import AGENT
from fedstale.errors import ConfigError
from fedstale.traces.arrays import stream

SPREAD = dict.fromkeys(VARIED, 0.4)


@cache
def scenario():
    few = EpisodeSettings(
        devices=(12, 16), rounds=5, window_s=4 * 3600.0, concurrency_share=(0.2, 0.5)
    )
    return Scenario.of(synthetic(60, days=1), forecasts="oracle", settings=few)


@pytest.fixture(autouse=True)
def _few_plays(monkeypatch):
    monkeypatch.setattr(agent_worlds, "PLAYS", 60)


def evaluated(agents=1, *, seed=0, spread=SPREAD):
    few = {"worlds": 20, "windows": 10, "seed": seed, "spread": spread}
    return evaluate_worlds(scenario(), [untrained()] * agents, **few)


@pytest.fixture(scope="module")
def evaluation():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent_worlds, "PLAYS", 60)
        return evaluated()


@pytest.mark.parametrize("name", RULES)
def test_a_rule_looks_at_losses_if_and_only_if_it_is_listed_as_such(name):
    episodes = scenario().draw(12, stream(0, 9))
    far = Worlds(constants={n: np.array([v]) for n, v in far_constants().items()})
    picked = []
    for worlds in (Worlds.of(fitted()), far):
        simulator = WorldSimulator(scenario(), 12, worlds)
        pick = picks_of(simulator, RULES[name](8), 12, np.random.SeedSequence(1))
        rollout(simulator, episodes, pick, Reward())
        picked.append(simulator.known["times_picked"].copy())
    assert (picked[0] == picked[1]).all() == (name not in BY_LOSS)


def far_constants():
    plain = {name: getattr(fitted(), name) for name in (*VARIED, "first_loss")}
    return plain | {"eta": 0.02, "loss_noise": 0.01, "loss_power": 3.0}


def test_a_seed_repeats_the_evaluation_and_another_does_not(evaluation):
    first = evaluation.advantages.to_numpy()
    np.testing.assert_array_equal(first, evaluated().advantages.to_numpy())
    assert (first != evaluated(seed=1).advantages.to_numpy()).any()


def test_worlds_that_are_all_alike_have_no_band_and_nothing_that_matters():
    table = evaluated(spread=dict.fromkeys(VARIED, 0.0)).table.set_index("rule")
    assert (table["high"] - table["low"]).max() < 1e-9
    assert (table["matters"] == "").all()


def worlds_of(n, **changed):
    plain = {name: np.full(n, getattr(fitted(), name)) for name in (*VARIED, "first_loss")}
    return Worlds(constants=plain | changed)


def test_the_table_says_in_how_many_worlds_the_agent_is_ahead_and_what_matters():
    rho = np.linspace(0.01, 1.0, 100)
    eta = np.random.default_rng(0).permutation(rho)
    ahead = 10 * (rho - 0.305)
    found = compared(worlds_of(100, rho=rho, eta=eta), ahead + 7.0, {"random": np.full(100, 7.0)})
    (row,) = found.table.to_dict("records")
    assert row["ahead"] == 70
    assert row["median"] == pytest.approx(np.median(ahead))
    assert (row["low"], row["high"]) == pytest.approx(np.quantile(ahead, [0.05, 0.95]))
    assert row["matters"] == "rho"
    assert row["correlation"] == pytest.approx(1.0)


def test_the_best_rule_is_preferred_of_those_that_the_agent_is_not_surely_ahead_of():
    agent = np.zeros(20)
    rules = {
        "closer": np.where(np.arange(20) < 3, 0.5, -0.1),
        "beaten": np.full(20, -1.0),
        "close": np.where(np.arange(20) < 8, 0.5, -0.5),
    }
    assert compared(worlds_of(20), agent, rules).prefer == "closer"
    # 18 of 20 worlds are 90 %.
    sure = {"beaten": rules["beaten"], "sure": np.where(np.arange(20) < 2, 0.5, -0.5)}
    assert compared(worlds_of(20), agent, sure).prefer == AGENT


def test_several_agents_take_worlds_in_turn(evaluation):
    np.testing.assert_allclose(evaluated(agents=2).advantages, evaluation.advantages)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"worlds": 19}, "worlds = 19: expected an integer >= 20"),
     ({"worlds": 20.5}, "worlds = 20.5"),
     ({"windows": 9}, "windows = 9: expected an integer >= 10"),
     ({"spread": {"eta": 1.0}}, "spread.ceiling = None")],
)  # fmt: skip
def test_what_cannot_be_evaluated_is_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        evaluate_worlds(scenario(), [untrained()], **({"worlds": 20, "windows": 10} | change))
    with pytest.raises(ConfigError, match="at least one trained agent"):
        evaluate_worlds(scenario(), [])
