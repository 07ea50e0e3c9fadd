"""Many episodes at once give what each would give alone, to Stable-Baselines3's liking."""

from dataclasses import replace

import numpy as np
import pytest
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecMonitor

from fedstale.agents.env.gym_env import SelectionEnv, VectorSelectionEnv
from fedstale.errors import ConfigError
from fedstale.traces.arrays import stream


def in_order(env):
    """Return rankings that take the places as they come."""
    n_max = env.action_space.shape[0]
    return np.tile(np.arange(n_max), (env.num_envs, 1))


def test_one_episode_of_a_vector_is_the_single_environment(scenario):
    many, one = (
        VectorSelectionEnv(scenario, 1, n_max=16, seed=11),
        SelectionEnv(scenario, n_max=16),
    )
    seen = many.reset()
    # Both draw the same windows: the single one is given the vector's stream.
    one.np_random = stream(11, 8, 0, 0)
    alone, _ = one.reset()
    over, steps = False, 0
    while not over:
        for name, values in seen.items():
            np.testing.assert_array_equal(values[0], alone[name])
        seen, rewards, dones, infos = many.step(in_order(many))
        alone, reward, _, over, info = one.step(np.arange(16))
        assert rewards[0] == pytest.approx(reward, rel=1e-6)
        assert {name: infos[0][name] for name in info} == info
        steps += 1
        assert dones[0] == (steps == scenario.settings.choices)
    assert steps > 1


def test_all_episodes_begin_and_end_together_and_are_empty_when_their_window_is_over(busy):
    env = VectorSelectionEnv(busy, 40, n_max=16, seed=1)
    seen = env.reset()
    idle = 0
    rounds = busy.settings.choices
    for step in range(3 * rounds):
        free = seen["slots"][:, 0]
        assert (free <= seen["mask"].sum(axis=1)).all()
        np.testing.assert_array_equal(free > 0, seen["mask"].any(axis=1))
        seen, rewards, dones, infos = env.step(in_order(env))
        over = free == 0
        idle += over.sum()
        assert not rewards[over].any()
        for info, k in zip(infos, free, strict=True):
            assert info.get("sent", 0) == k
        assert (dones == (step % rounds == rounds - 1)).all()
        for done, info in zip(dones, infos, strict=True):
            assert done == ("terminal_observation" in info)
        for name, space in env.observation_space.spaces.items():
            assert seen[name].shape == (40, *space.shape)
            assert (seen[name] >= space.low).all()
            assert (seen[name] <= space.high).all()
    assert idle


def test_rollouts_of_a_window_differ_only_by_what_is_picked(busy):
    env = VectorSelectionEnv(busy, 6, rollouts=3, n_max=20, baseline=False, seed=2)
    seen = env.reset()
    first = seen["context"].reshape(2, 3, -1)
    assert (first == first[:, :1]).all()
    assert not np.array_equal(first[0, 0], first[1, 0])

    def ordered(seen):
        """Return rankings by the sum of the features, whatever the order of the places."""
        score = seen["features"].sum(axis=2) + seen["heuristic"]
        return np.argsort(np.where(seen["mask"] > 0, -score, np.inf), axis=1, kind="stable")

    earned = np.zeros(6)
    for step in range(busy.settings.choices):
        ranking = ordered(seen)
        if step == 0:
            # The last rollout of each window prefers the others.
            k = seen["mask"].sum(axis=1).astype(int)
            for row in (2, 5):
                ranking[row, : k[row]] = ranking[row, : k[row]][::-1]
        seen, rewards, _, _ = env.step(ranking)
        earned += rewards
    earned = earned.reshape(2, 3)
    assert (earned[:, 2] != earned[:, 0]).any()


def test_the_same_seed_gives_the_same_steps_and_numbers_name_windows(scenario):
    runs = []
    for _ in range(2):
        env = VectorSelectionEnv(scenario, 4, n_max=16, seed=7)
        env.reset()
        runs.append([env.step(in_order(env))[1] for _ in range(3 * scenario.settings.choices)])
    np.testing.assert_array_equal(runs[0], runs[1])
    third = VectorSelectionEnv(scenario, 4, n_max=16, seed=7)
    third.next_windows = 2
    third.reset()
    rewards = [third.step(in_order(third))[1] for _ in range(scenario.settings.choices)]
    np.testing.assert_array_equal(rewards, runs[0][2 * scenario.settings.choices :])
    other = VectorSelectionEnv(scenario, 4, n_max=16, seed=7)
    other.seed(8)
    assert not np.array_equal(other.reset()["context"], third.reset()["context"])


def test_what_is_seen_is_not_changed_by_the_next_step(scenario):
    env = VectorSelectionEnv(scenario, 3, n_max=16, seed=0)
    before = env.reset()
    kept = {name: values.copy() for name, values in before.items()}
    env.step(in_order(env))
    for name, values in before.items():
        np.testing.assert_array_equal(values, kept[name])


def test_of_two_scenarios_each_plays_as_alone(scenario, busy):
    """In rows of its own, though one has smaller windows than the other; all are over together."""
    busy = replace(busy, settings=replace(busy.settings, rounds=scenario.settings.rounds))
    both = VectorSelectionEnv([scenario, busy], 6, n_max=16, seed=3)
    alone = VectorSelectionEnv(scenario, 3, n_max=16, seed=3)
    seen, own = both.reset(), alone.reset()
    differ = False
    for _ in range(2 * scenario.settings.choices):
        for name, values in own.items():
            np.testing.assert_array_equal(seen[name][:3], values)
            differ |= not np.array_equal(seen[name][3:], values)
        seen, rewards, dones, infos = both.step(in_order(both))
        own, of_own, over, own_infos = alone.step(in_order(alone))
        np.testing.assert_array_equal(rewards[:3], of_own)
        assert dones.tolist() == [over[0]] * 6
        assert [info.get("sent") for info in infos[:3]] == [i.get("sent") for i in own_infos]
    assert differ


@pytest.mark.usefixtures("logs")
def test_algorithms_of_stable_baselines_learn_on_it(scenario):
    env = VecMonitor(VectorSelectionEnv(scenario, 4, n_max=8, seed=0))
    model = PPO("MultiInputPolicy", env, n_steps=8, batch_size=16, n_epochs=1, seed=0)
    model.learn(64)
    assert model.num_timesteps == 64


def test_what_makes_no_sense_is_named(scenario):
    with pytest.raises(ConfigError, match="n_envs = 0"):
        VectorSelectionEnv(scenario, 0)
    with pytest.raises(ConfigError, match="n_envs = 5: expected a multiple of rollouts = 2"):
        VectorSelectionEnv(scenario, 5, rollouts=2)
    with pytest.raises(ConfigError, match=r"n_envs = 3, scenarios with .* a multiple"):
        VectorSelectionEnv([scenario, scenario], 3)
    env = VectorSelectionEnv(scenario, 2, n_max=16)
    with pytest.raises(ConfigError, match="render"):
        env.env_method("render")
    with pytest.raises(ConfigError, match="scenario"):
        env.set_attr("scenario", None)
    assert env.env_is_wrapped(VecMonitor) == [False, False]
