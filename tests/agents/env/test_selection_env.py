"""`SelectionEnv` keeps the contracts of Gymnasium and of Stable-Baselines3, and its own."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from small_episodes import fleet
from stable_baselines3.common import env_checker

from fedstale.agents.env.episodes import EpisodeSettings
from fedstale.agents.env.gym_env import ID, SelectionEnv
from fedstale.agents.env.scenario import Scenario
from fedstale.agents.env.simulator import Reward
from fedstale.agents.evaluation import episode_metrics
from fedstale.agents.policy.scorer import by_heuristic
from fedstale.errors import ConfigError, TraceError
from fedstale.traces import TraceSet


def play_at_random(env, seed, steps=10_000):
    rng = np.random.default_rng(seed)
    seen = [env.reset(seed=seed)[0]]
    rewards = []
    for _ in range(steps):
        action = rng.choice(np.flatnonzero(env.action_masks()))
        observation, reward, terminated, truncated, info = env.step(action)
        assert not terminated
        seen.append(observation)
        rewards.append((reward, info))
        if truncated:
            break
    return seen, rewards


def test_gymnasium_finds_nothing_wrong(scenario):
    for where in (scenario, scenario.with_forecasts("none")):
        env = gymnasium.make(ID, n_max=16, scenario=where)
        check_env(env.unwrapped, skip_render_check=True)


# It knows vectors and images, and says so of anything else.
@pytest.mark.filterwarnings("ignore:.*unconventional shape:UserWarning")
def test_stable_baselines_finds_nothing_wrong(scenario):
    env_checker.check_env(SelectionEnv(scenario, n_max=16))


def test_it_is_made_by_its_id_from_traces():
    traces = TraceSet.synthetic(40, days=1, seed=0)
    env = gymnasium.make(f"fedstale.agents.env.gym_env:{ID}", scenario=traces)
    observation, _ = env.reset(seed=1)
    assert observation["mask"].sum() == env.unwrapped.action_masks().sum() > 0
    assert env.action_space.n == 64


def test_the_same_seed_gives_the_same_episode_and_another_one_another(scenario):
    one, two, other = (play_at_random(SelectionEnv(scenario, n_max=16), seed) for seed in (3, 3, 4))
    assert len(one[0]) == len(two[0])
    for a, b in zip(one[0], two[0], strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])
    assert [r for r, _ in one[1]] == [r for r, _ in two[1]]
    assert not np.array_equal(one[0][0]["features"], other[0][0]["features"])


def test_reward_comes_when_a_round_closes_with_its_terms(scenario):
    _, rewards = play_at_random(SelectionEnv(scenario, n_max=16), 5)
    closed = [(r, info) for r, info in rewards if info]
    assert closed
    assert all(r == 0.0 for r, info in rewards if not info)
    for reward, info in closed:
        terms = info["gain"] + info["time"] + info["waste"] + info["baseline"]
        assert reward == pytest.approx(terms)
        assert info["sent"] >= 1


def test_the_heuristic_earns_nothing_beyond_itself(scenario):
    env = SelectionEnv(scenario, n_max=20)
    earned = []
    for seed in range(6):
        observation, _ = env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            score = np.where(env.action_masks(), observation["heuristic"], -np.inf)
            observation, reward, _, over, _ = env.step(int(score.argmax()))
            total += reward
        earned.append(total)
    # Ties between devices of which nothing is known are broken by chance.
    assert abs(np.mean(earned)) < 2.5


def test_without_baseline_an_episode_earns_what_playing_it_does(scenario):
    env = SelectionEnv(
        scenario=scenario, n_max=20, baseline=False, reward=Reward(time=0.2, waste=0.1)
    )
    env.reset(seed=9)
    episode = env._rounds._pool
    _, rewards = play_at_random(env, 9)
    total = sum(r for r, _ in rewards)
    table = episode_metrics(
        scenario.simulator(1), episode, by_heuristic, reward=Reward(time=0.2, waste=0.1)
    )
    assert len(table) == 1
    assert np.sign(table["time"][0]) == -1
    assert total == pytest.approx(sum(i["gain"] + i["time"] + i["waste"] for _, i in rewards if i))


def test_a_place_that_may_not_be_picked_picks_no_device(scenario):
    env = SelectionEnv(scenario, n_max=30)
    env.reset(seed=0)
    wrong = int(np.flatnonzero(~env.action_masks())[0])
    sent = []
    for _ in range(40):
        _, _, _, over, info = env.step(wrong)
        if info:
            sent.append(info["sent"])
        if over:
            break
    assert sent
    assert min(sent) == 0


def test_more_candidates_than_places_are_shown_in_part(scenario):
    env = SelectionEnv(scenario, n_max=2)
    _, rewards = play_at_random(env, 0)
    assert max(info["sent"] for _, info in rewards if info) <= 2


def test_a_step_after_the_end_is_one_clear_error(scenario):
    env = SelectionEnv(scenario, n_max=16)
    with pytest.raises(ConfigError, match="reset"):
        env.step(0)
    play_at_random(env, 0)
    with pytest.raises(ConfigError, match="reset"):
        env.step(0)


def test_what_cannot_be_played_is_named(scenario):
    with pytest.raises(ConfigError, match="n_max = 0"):
        SelectionEnv(scenario, n_max=0)
    never = Scenario.of(
        fleet([[(0.0, 1.0)]]),
        forecasts="none",
        start=10.0,
        end=9000.0,
        settings=EpisodeSettings(devices=(1, 2)),
    )
    with pytest.raises(TraceError, match="no device is online"):
        SelectionEnv(never).reset()
