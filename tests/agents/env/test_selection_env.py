"""`SelectionEnv` keeps the contracts of Gymnasium and of Stable-Baselines3, and its own."""

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from shared_fleets import synthetic
from small_episodes import fleet
from stable_baselines3.common import env_checker

from fedstale.agents.env.episodes import EpisodeSettings
from fedstale.agents.env.gym_env import SelectionEnv
from fedstale.agents.env.scenario import Scenario
from fedstale.agents.env.simulator import Reward
from fedstale.agents.evaluation import episode_metrics
from fedstale.agents.policy.scorer import by_heuristic
from fedstale.errors import ConfigError, TraceError


def play_at_random(env, seed):
    env.action_space.seed(seed)
    seen, rewards, over = [env.reset(seed=seed)[0]], [], False
    while not over:
        observation, reward, over, truncated, info = env.step(env.action_space.sample())
        assert not truncated
        seen.append(observation)
        rewards.append((reward, info))
    return seen, rewards


def by_score(score, mask):
    """Return the ranking of scores, what is no candidate last."""
    return np.argsort(np.where(mask > 0, -score, np.inf), kind="stable")


# Scores beyond 1 are no harm, and those of a Gaussian would often be cut there.
@pytest.mark.filterwarnings("ignore:.*symmetric and normalized")
@pytest.mark.parametrize("action", ["scores", "ranking"])
def test_gymnasium_finds_nothing_wrong(scenario, action):
    for where in (scenario, scenario.with_forecasts("none")):
        check_env(SelectionEnv(where, n_max=16, action=action), skip_render_check=True)


# It knows vectors and images, and says so of anything else.
@pytest.mark.filterwarnings("ignore:.*unconventional shape:UserWarning")
@pytest.mark.filterwarnings("ignore:.*symmetric and normalized")
@pytest.mark.parametrize("action", ["scores", "ranking"])
def test_stable_baselines_finds_nothing_wrong(scenario, action):
    env_checker.check_env(SelectionEnv(scenario, n_max=16, action=action))


def test_it_is_made_from_traces():
    env = SelectionEnv(synthetic(40, days=1))
    observation, _ = env.reset(seed=1)
    assert 1 <= observation["slots"][0] <= observation["mask"].sum()
    assert env.action_space.shape == (64,)


def test_a_seed_names_a_list_of_windows_that_any_of_can_be_played_again(scenario):
    env = SelectionEnv(scenario, n_max=16)
    firsts = []
    for _ in range(20):
        observation, info = env.reset(seed=4) if not firsts else env.reset()
        firsts.append(observation)
        assert info["window"] == len(firsts) - 1
    other = SelectionEnv(scenario, n_max=16)
    for window in (17, 0, 5):
        again, info = other.reset(seed=4, options={"window": window})
        assert info["window"] == window
        for name, values in again.items():
            np.testing.assert_array_equal(values, firsts[window][name])
    assert other.reset()[1]["window"] == 6
    assert not np.array_equal(other.reset(seed=5)[0]["context"], firsts[0]["context"])
    with pytest.raises(ConfigError, match="seed"):
        other.reset(options={"window": 3})


def test_every_step_is_a_round_with_the_terms_of_its_reward(scenario):
    seen, rewards = play_at_random(SelectionEnv(scenario, n_max=16), 5)
    assert 1 < len(rewards) <= scenario.settings.choices
    for before, (reward, info) in zip(seen[:-1], rewards, strict=True):
        terms = info["gain"] + info["time"] + info["waste"] + info["baseline"]
        assert reward == pytest.approx(terms)
        assert info["sent"] <= before["slots"][0]
    assert any(info["sent"] for _, info in rewards)


def test_without_baseline_an_episode_earns_what_playing_it_does(scenario):
    prices = Reward(time=0.2, waste=0.1)
    env = SelectionEnv(scenario=scenario, n_max=20, baseline=False, reward=prices, action="ranking")
    seen, _ = env.reset(seed=9)
    episode = env._envs._parts[0].simulator.episodes.take(np.arange(1))
    total, over, known = 0.0, False, []
    while not over:
        # The number of examples tells devices apart, once they have replied.
        known.append(seen["features"][seen["mask"] > 0])
        seen, reward, over, _, _ = env.step(by_score(seen["heuristic"], seen["mask"]))
        total += reward
    tables = [
        episode_metrics(scenario.simulator(1), episode, by_heuristic, reward=prices, seed=seed)
        for seed in range(30)
    ]
    # Chance breaks ties in both, so the reward is one of several.
    earned = [table["reward"][0] for table in tables]
    assert min(earned) - 0.5 <= total <= max(earned) + 0.5
    assert all(table["time"][0] < 0 for table in tables)


def sent_by(scenario, ranking_of, seed=0):
    """Return the job table of the first round that a ranking of the candidates plays."""
    env = SelectionEnv(scenario, n_max=30, action="ranking")
    seen, _ = env.reset(seed=seed)
    env.step(ranking_of(np.flatnonzero(seen["mask"]), int(seen["slots"][0])))
    return env._envs._parts[0].simulator.known["times_picked"][0].copy()


def padded(places):
    return np.pad(np.asarray(places), (0, 30 - len(places)), constant_values=29)


def test_the_first_places_that_may_be_picked_get_the_jobs(busy):
    plain = sent_by(busy, lambda candidates, k: padded(candidates[:k]))
    assert plain.sum() > 1
    # What follows the first k counts for nothing, nor do places without a candidate, in front.
    longer = sent_by(busy, lambda candidates, k: padded(candidates))
    np.testing.assert_array_equal(longer, plain)
    blocked = sent_by(busy, lambda candidates, k: padded([29, 28, 27, *candidates[:k]]))
    np.testing.assert_array_equal(blocked, plain)
    again = sent_by(busy, lambda candidates, k: padded(np.repeat(candidates[:k], 2)))
    np.testing.assert_array_equal(again, plain)
    turned = sent_by(busy, lambda candidates, k: padded(candidates[::-1]))
    assert turned.sum() == plain.sum()
    assert not np.array_equal(turned, plain)


def test_scores_pick_as_the_ranking_by_them_does(busy):
    both = [SelectionEnv(busy, n_max=30, action=action) for action in ("scores", "ranking")]
    rng, over = np.random.default_rng(2), False
    seen = [env.reset(seed=6)[0] for env in both]
    while not over:
        np.testing.assert_array_equal(seen[0]["features"], seen[1]["features"])
        scores = rng.normal(size=30).astype("f4")
        # Scores of empty places, however high, count for nothing.
        scores[seen[0]["mask"] == 0] = 9.0
        steps = [both[0].step(scores), both[1].step(by_score(scores, seen[0]["mask"]))]
        (_, over, _), _ = (step[1:4] for step in steps)
        assert steps[0][1] == steps[1][1]
        seen = [step[0] for step in steps]


def test_any_ranking_within_the_masks_sends_jobs_and_positions_that_do_not_count_have_one_choice(
    busy,
):
    env = SelectionEnv(busy, n_max=20, action="ranking")
    seen, _ = env.reset(seed=1)
    rng, over = np.random.default_rng(0), False
    while not over:
        masks, k = env.action_masks().reshape(20, 20), int(seen["slots"][0])
        assert masks.any(axis=1).all()
        np.testing.assert_array_equal(masks[0], seen["mask"] > 0)
        assert (masks[2 * k :].sum(axis=1) == 1).all()
        ranking = np.array([rng.choice(np.flatnonzero(row)) for row in masks])
        seen, _, over, _, info = env.step(ranking)
        assert 1 <= info["sent"] <= k


def test_a_step_after_the_end_is_one_clear_error(scenario):
    env = SelectionEnv(scenario, n_max=16)
    with pytest.raises(ConfigError, match="reset"):
        env.step(np.arange(16))
    play_at_random(env, 0)
    with pytest.raises(ConfigError, match="reset"):
        env.step(np.arange(16))


def test_what_cannot_be_played_is_named(scenario):
    with pytest.raises(ConfigError, match="n_max = 0"):
        SelectionEnv(scenario, n_max=0)
    with pytest.raises(ConfigError, match="action = 'picks': expected one of scores, ranking"):
        SelectionEnv(scenario, action="picks")
    never = Scenario.of(
        fleet([[(0.0, 1.0)]]),
        forecasts="none",
        start=10.0,
        end=9000.0,
        settings=EpisodeSettings(devices=(1, 2)),
    )
    with pytest.raises(TraceError, match="no device is online"):
        SelectionEnv(never).reset()
