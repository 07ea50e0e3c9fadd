"""Many episodes at once give what each would give alone, to Gymnasium and Stable-Baselines3."""

from dataclasses import replace

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecMonitor

from fedstale.agents.env.gym_env import SelectionEnv, VectorSelectionEnv
from fedstale.agents.env.stable_baselines import SB3VecEnv
from fedstale.agents.env.windows import WindowList
from fedstale.errors import ConfigError


def rankings(env):
    """Return rankings that take the places as they come."""
    n_max = env.single_action_space.shape[0]
    return np.tile(np.arange(n_max), (env.num_envs, 1))


def vector(scenario, num_envs, **changed):
    return VectorSelectionEnv(scenario, num_envs, **{"n_max": 16, "action": "ranking"} | changed)


@pytest.mark.parametrize("baseline", [True, False])
def test_each_window_of_a_vector_is_played_as_by_the_single_environment(busy, baseline):
    many, one = (
        vector(busy, 6, baseline=baseline),
        SelectionEnv(busy, n_max=16, action="ranking", baseline=baseline),
    )
    seen, infos = many.reset(seed=3)
    np.testing.assert_array_equal(infos["window"], np.arange(6))
    told, played = [[] for _ in range(6)], []
    while len(played) < 30:
        before = seen
        seen, rewards, over, truncated, infos = many.step(rankings(many))
        assert not truncated.any()
        for row in range(6):
            told[row].append(({k: v[row] for k, v in before.items()}, rewards[row], infos["sent"]))
        for row in np.flatnonzero(over):
            window = int(infos["window"][row])
            alone, _ = one.reset(seed=3, options={"window": window})
            for shown, reward, sent in told[row]:
                for name, values in shown.items():
                    np.testing.assert_array_equal(values, alone[name])
                alone, of_one, done, _, info = one.step(np.arange(16))
                assert of_one == pytest.approx(reward)
                assert info["sent"] == sent[row]
            assert done
            told[row] = []
            played.append(window)
    # No window is left out or played twice, and no row waits for another.
    going_on = infos["window"][~over].tolist()
    begun = set(played) | set(going_on)
    assert len(begun) == len(played) + len(going_on)
    assert begun < set(range(len(played) + 6))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("action", ["scores", "ranking"])
def test_an_action_that_is_no_number_is_refused_and_changes_nothing(busy, action, value):
    many, one = (kind(busy, action=action, n_max=16) for kind in (VectorSelectionEnv, SelectionEnv))
    _, (begun, _) = many.reset(seed=3), one.reset(seed=3)
    told = rf"an action holds {value}: expected finite scores, or places of a ranking"
    bad = np.zeros((1, 16))
    bad[0, 5] = value
    for step in (lambda: many.step(bad), lambda: one.step(bad[0])):
        with pytest.raises(ConfigError, match=told):
            step()
    # What follows is played as if nothing had been asked.
    played = many.step(np.zeros((1, 16), dtype=int))
    again, *_ = one.step(np.zeros(16, dtype=int))
    for name, values in played[0].items():
        np.testing.assert_array_equal(values[0], again[name])
    assert played[4]["sent"].item() > 0 < begun["slots"].item()


def test_an_episode_that_is_over_begins_the_next_window_in_the_same_step_as_gymnasium_has_it(busy):
    """`SyncVectorEnv` in the same mode tells alike what ended, and what begins."""
    ours = vector(busy, 1)
    theirs = SyncVectorEnv(
        [lambda: SelectionEnv(busy, n_max=16, action="ranking")],
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    assert ours.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    one, two = ours.reset(seed=2), theirs.reset(seed=2)
    ended = 0
    for _ in range(40):
        for name, values in one[0].items():
            np.testing.assert_array_equal(values, two[0][name])
        assert ours.observation_space.contains(one[0])
        one, two = ours.step(rankings(ours)), theirs.step(rankings(ours))
        for mine, its in zip(one[1:4], two[1:4], strict=True):
            np.testing.assert_array_equal(mine, its)
        assert ("final_obs" in one[4]) == ("final_obs" in two[4]) == bool(one[2][0])
        if one[2][0]:
            ended += 1
            for name, values in one[4]["final_obs"][0].items():
                np.testing.assert_array_equal(values, two[4]["final_obs"][0][name])
            assert one[4]["final_info"]["gain"] == two[4]["final_info"]["gain"]
    assert ended > 2


def test_the_same_seed_gives_the_same_steps_whatever_came_before(scenario):
    env, runs = vector(scenario, 4), []
    for seed in (7, 8, 7):
        first = env.reset(seed=seed)
        runs.append([first, *(env.step(rankings(env)) for _ in range(20))])
    np.testing.assert_equal(runs[0], runs[2])
    assert not np.array_equal(*([step[1] for step in run[1:]] for run in runs[:2]))
    unseeded = [vector(scenario, 4).reset()[0]["context"] for _ in range(2)]
    assert not np.array_equal(*unseeded)


def test_what_is_seen_is_not_changed_by_the_next_step(scenario):
    env = vector(scenario, 3)
    before, _ = env.reset(seed=0)
    kept = {name: values.copy() for name, values in before.items()}
    env.step(rankings(env))
    for name, values in before.items():
        np.testing.assert_array_equal(values, kept[name])


def test_of_two_scenarios_each_plays_as_alone(scenario, busy):
    busy = replace(busy, settings=replace(busy.settings, rounds=scenario.settings.rounds))
    both, alone = vector([scenario, busy], 6), vector(scenario, 3)
    (seen, _), (own, _) = both.reset(seed=3), alone.reset(seed=3)
    for _ in range(20):
        for name, values in own.items():
            np.testing.assert_array_equal(seen[name][:3], values)
            is_other = not np.array_equal(seen[name][3:], values)
            assert is_other or name in ("mask", "slots", "clock")
        seen, rewards, over, _, infos = both.step(rankings(both))
        own, of_own, own_over, _, own_infos = alone.step(rankings(alone))
        np.testing.assert_array_equal(rewards[:3], of_own)
        np.testing.assert_array_equal(over[:3], own_over)
        np.testing.assert_array_equal(infos["sent"][:3], own_infos["sent"])


def test_the_second_of_two_scenarios_plays_the_same_whatever_the_first_does(scenario, busy):
    busy = replace(busy, settings=replace(busy.settings, rounds=scenario.settings.rounds))
    rng, n_over = np.random.default_rng(0), 0
    one, two = vector([scenario, busy], 6), vector([busy, busy], 6)
    (seen, _), (other, _) = one.reset(seed=3), two.reset(seed=3)
    for _ in range(40):
        for name, values in seen.items():
            np.testing.assert_array_equal(values[3:], other[name][3:])
        mine, theirs = (rng.permuted(rankings(env), axis=1) for env in (one, two))
        theirs[3:] = mine[3:]
        np.testing.assert_array_equal(one.action_masks()[3:], two.action_masks()[3:])
        seen, rewards, over, _, infos = one.step(mine)
        other, earned, other_over, _, other_infos = two.step(theirs)
        assert not np.array_equal(rewards[:3], earned[:3])
        np.testing.assert_array_equal(rewards[3:], earned[3:])
        np.testing.assert_array_equal(over[3:], other_over[3:])
        for name in ("sent", "window", "reward"):
            np.testing.assert_array_equal(infos[name][3:], other_infos[name][3:])
        n_over += int(over[3:].sum())
    assert n_over


def together(scenario, num_envs, rollouts, **changed):
    return SB3VecEnv(vector(scenario, num_envs, rollouts=rollouts, **changed))


def test_with_rollouts_all_episodes_begin_and_end_together(busy):
    env = together(busy, 40, 1)
    env.seed(1)
    seen = env.reset()
    idle, choices = 0, busy.settings.choices
    for step in range(3 * choices):
        free = seen["slots"][:, 0]
        assert (free <= seen["mask"].sum(axis=1)).all()
        np.testing.assert_array_equal(free > 0, seen["mask"].any(axis=1))
        ranking = np.tile(np.arange(16), (40, 1))
        seen, rewards, dones, infos = env.step(ranking)
        over = free == 0
        idle += over.sum()
        assert not rewards[over].any()
        for info, k in zip(infos, free, strict=True):
            assert info.get("sent", 0) == k
        assert (dones == (step % choices == choices - 1)).all()
        for done, info in zip(dones, infos, strict=True):
            assert done == ("terminal_observation" in info)
    assert idle


def test_rollouts_of_a_window_differ_only_by_what_is_picked(busy):
    env = together(busy, 6, 3, n_max=20, baseline=False)
    env.seed(2)
    seen = env.reset()
    first = seen["context"].reshape(2, 3, -1)
    assert (first == first[:, :1]).all()
    assert not np.array_equal(first[0, 0], first[1, 0])
    earned = np.zeros(6)
    for step in range(busy.settings.choices):
        ranking = np.argsort(np.where(seen["mask"] > 0, -seen["heuristic"], np.inf), axis=1)
        if step == 0:
            # The last rollout of each window prefers the others.
            k = seen["mask"].sum(axis=1).astype(int)
            for row in (2, 5):
                ranking[row, : k[row]] = ranking[row, : k[row]][::-1]
        seen, rewards, _, _ = env.step(ranking)
        earned += rewards
    earned = earned.reshape(2, 3)
    np.testing.assert_array_equal(earned[:, 0], earned[:, 1])
    assert (earned[:, 2] != earned[:, 0]).any()


@pytest.mark.slow
@pytest.mark.usefixtures("logs")
@pytest.mark.parametrize("action", ["scores", "ranking"])
def test_algorithms_of_stable_baselines_learn_on_it(scenario, action):
    env = VecMonitor(SB3VecEnv(vector(scenario, 4, n_max=8, action=action)))
    model = PPO("MultiInputPolicy", env, n_steps=16, batch_size=16, n_epochs=1, seed=0)
    model.learn(128)
    assert model.num_timesteps == 128
    # It has seen ends of episodes, with what they earned.
    assert len(model.ep_info_buffer) > 4


def test_what_makes_no_sense_is_named(scenario):
    with pytest.raises(ConfigError, match="num_envs = 0"):
        vector(scenario, 0)
    with pytest.raises(ConfigError, match="num_envs = 5: expected a multiple of rollouts = 2"):
        vector(scenario, 5, rollouts=2)
    with pytest.raises(ConfigError, match=r"num_envs = 3, scenarios with .* a multiple"):
        vector([scenario, scenario], 3)
    with pytest.raises(ConfigError, match="reset"):
        vector(scenario, 2).step(np.zeros((2, 16), dtype=int))
    env = SB3VecEnv(vector(scenario, 2))
    with pytest.raises(ConfigError, match="render"):
        env.env_method("render")
    with pytest.raises(ConfigError, match="scenario"):
        env.set_attr("scenario", None)
    with pytest.raises(ConfigError, match="VectorSelectionEnv"):
        SB3VecEnv(SyncVectorEnv([lambda: SelectionEnv(scenario)]))
    assert env.env_is_wrapped(VecMonitor) == [False, False]


@pytest.mark.parametrize("baseline", [True, False])
def test_one_episode_at_a_time_waits_for_few_windows_at_first_and_plays_more_ahead_later(
    busy, baseline, monkeypatch
):
    drawn, draw = [], WindowList._drawn
    monkeypatch.setattr(
        WindowList,
        "_drawn",
        lambda self, first, count: drawn.append((first, count)) or draw(self, first, count),
    )
    env = SelectionEnv(busy, n_max=16, baseline=baseline)
    env.reset(seed=3, options={"window": 5})
    assert drawn == [(0, 1)]
    seen = [env.reset()[1]["window"] for _ in range(59)]
    assert seen == list(range(6, 65))
    # What is not played by the heuristic costs no less when more of it is drawn.
    assert drawn == ([(0, 1), (1, 2), (3, 4)] if baseline else [(i, 1) for i in range(5)])
