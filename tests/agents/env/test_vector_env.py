"""Many episodes at once give what each would give alone, to Stable-Baselines3's liking."""

import numpy as np
import pytest
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
from stable_baselines3.common.vec_env import VecMonitor

from fedstale.agents.env.gym_env import SelectionEnv, VectorSelectionEnv
from fedstale.errors import ConfigError


def first_legal(masks):
    return masks.argmax(axis=1)


def test_one_episode_of_a_vector_is_the_single_environment(scenario):
    many, one = (
        VectorSelectionEnv(scenario, 1, n_max=16, seed=0),
        SelectionEnv(scenario, n_max=16),
    )
    many.seed(11)
    seen = many.reset()
    # Both draw the same windows: the single one hands its seed to NumPy's generator too.
    alone, _ = one.reset(seed=11)
    for _ in range(30):
        for name, values in seen.items():
            np.testing.assert_array_equal(values[0], alone[name])
        action = first_legal(many.action_masks())
        seen, rewards, dones, infos = many.step(action)
        alone, reward, _, over, info = one.step(action[0])
        assert rewards[0] == pytest.approx(reward, rel=1e-6)
        assert dones[0] == over
        if over:
            ended = infos[0]["terminal_observation"]
            np.testing.assert_array_equal(ended["features"], alone["features"])
            break
        assert infos[0] == info


def test_episodes_follow_one_another_and_masks_always_leave_a_choice(scenario):
    env = VectorSelectionEnv(scenario, 6, n_max=16, seed=1)
    seen = env.reset()
    ended = 0
    for _ in range(120):
        masks = env.action_masks()
        np.testing.assert_array_equal(seen["mask"].astype(bool), masks)
        assert masks.any(axis=1).all()
        seen, rewards, dones, infos = env.step(first_legal(masks))
        assert np.isfinite(rewards).all()
        for done, info in zip(dones, infos, strict=True):
            assert done == ("terminal_observation" in info)
        for name, space in env.observation_space.spaces.items():
            assert seen[name].shape == (6, *space.shape)
            assert (seen[name] >= space.low).all()
            assert (seen[name] <= space.high).all()
        ended += dones.sum()
    assert ended > 6


def test_the_same_seed_gives_the_same_steps(scenario):
    runs = []
    for _ in range(2):
        env = VectorSelectionEnv(scenario, 4, n_max=16, seed=7)
        env.reset()
        runs.append([env.step(first_legal(env.action_masks()))[1] for _ in range(40)])
    np.testing.assert_array_equal(runs[0], runs[1])


def test_what_is_seen_is_not_changed_by_the_next_step(scenario):
    env = VectorSelectionEnv(scenario, 3, n_max=16, seed=0)
    before = env.reset()
    kept = {name: values.copy() for name, values in before.items()}
    env.step(first_legal(env.action_masks()))
    for name, values in before.items():
        np.testing.assert_array_equal(values, kept[name])


# Its rollout buffer allocates what it is told to; nothing of ours warns.
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_maskable_ppo_learns_on_it(scenario):
    env = VecMonitor(VectorSelectionEnv(scenario, 4, n_max=16, seed=0))
    assert is_masking_supported(env)
    env.reset()
    assert get_action_masks(env).shape == (4, 16)
    model = MaskablePPO("MultiInputPolicy", env, n_steps=8, batch_size=16, n_epochs=1, seed=0)
    model.learn(64)
    assert model.num_timesteps == 64


def test_what_makes_no_sense_is_named(scenario):
    with pytest.raises(ConfigError, match="n_envs = 0"):
        VectorSelectionEnv(scenario, 0)
    env = VectorSelectionEnv(scenario, 2, n_max=16)
    with pytest.raises(ConfigError, match="render"):
        env.env_method("render")
    with pytest.raises(ConfigError, match="scenario"):
        env.set_attr("scenario", None)
    assert env.env_is_wrapped(VecMonitor) == [False, False]
