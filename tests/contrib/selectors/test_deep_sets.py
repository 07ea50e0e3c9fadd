"""The set policy scores candidates alike wherever they stand, and draws them as it says."""

import itertools

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3 import A2C, PPO

from fedstale.agents import SB3VecEnv, VectorSelectionEnv
from fedstale.agents.env.gym_env import action_space, observation_space
from fedstale.agents.policy import N_CONTEXT, N_FEATURES
from fedstale.contrib.selectors import set_policy

pytestmark = pytest.mark.usefixtures("one_thread", "logs")


def policy_of(n, action="scores", base=None, seed=0):
    torch.manual_seed(seed)
    kind = set_policy() if base is None else set_policy(base)
    return kind(observation_space(n), action_space(n, action), lambda _: 1e-3)


def seen(rng, n, counts, slots):
    """Return random observations with so many candidates, packed."""
    counts = np.asarray(counts)
    mask = (np.arange(n) < counts[:, None]).astype("f4")
    found = {
        "features": rng.normal(size=(len(counts), n, N_FEATURES)) * mask[..., None],
        "context": rng.normal(size=(len(counts), N_CONTEXT)),
        "heuristic": rng.normal(size=mask.shape) * mask,
        "mask": mask,
        "slots": np.asarray(slots)[:, None],
        "clock": np.zeros((len(counts), 1)),
    }
    return {name: torch.as_tensor(values.astype("f4")) for name, values in found.items()}


def scores_of(policy, observations):
    with torch.no_grad():
        return policy.get_distribution(observations).mode()


def test_a_candidate_has_the_same_score_in_another_place_and_beside_empty_ones():
    rng, policy = np.random.default_rng(0), policy_of(9)
    one = seen(rng, 9, [6, 9], [2, 3])
    scores = scores_of(policy, one)
    order = torch.as_tensor(rng.permutation(9))
    moved = {
        name: values[:, order] if name in ("features", "heuristic", "mask") else values
        for name, values in one.items()
    }
    again = scores_of(policy, moved)
    candidates = moved["mask"] > 0
    torch.testing.assert_close(again[candidates], scores[:, order][candidates])
    assert scores[0, :6].unique().numel() == 6
    # Without the empty places the first choice is the same.
    wide = policy_of(6)
    wide.load_state_dict(policy.state_dict() | {"log_std": torch.zeros(6)})
    cut = {
        k: v[:1, :6] if k in ("features", "heuristic", "mask") else v[:1] for k, v in one.items()
    }
    torch.testing.assert_close(scores_of(wide, cut)[0], scores[0, :6])


def test_the_probability_of_scores_is_that_of_the_best_k_in_their_order():
    policy = policy_of(5)
    one = seen(np.random.default_rng(1), 5, [4], [2])
    with torch.no_grad():
        made = policy.get_distribution(one)
    weights = made.mode()[0, :4].exp().numpy()
    total = 0.0
    for first, second in itertools.permutations(range(4), 2):
        action = torch.full((1, 5), -3.0)
        action[0, first], action[0, second], action[0, 4] = 5.0, 4.0, -10.0
        chance = made.log_prob(action).exp().item()
        rest = weights.sum() - weights[first]
        assert chance == pytest.approx(
            weights[first] / weights.sum() * weights[second] / rest, rel=1e-4
        )
        total += chance
    assert total == pytest.approx(1.0, abs=1e-4)


def test_draws_have_the_probabilities_that_are_stated():
    policy = policy_of(4)
    one = seen(np.random.default_rng(2), 4, [3], [1])
    many = {name: values.expand(20_000, *values.shape[1:]) for name, values in one.items()}
    torch.manual_seed(0)
    with torch.no_grad():
        actions, _, found = policy(many)
    best = actions[:, :3].argmax(dim=1)
    for place in range(3):
        chance = found[best == place][0].exp()
        assert float((best == place).float().mean()) == pytest.approx(float(chance), abs=0.02)


class Bandit(gymnasium.Env):
    """Picking the candidate with the largest first feature earns 1."""

    observation_space, action_space = observation_space(6), action_space(6, "scores")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seen = {k: v[0].numpy() for k, v in seen(self.np_random, 6, [5], [1]).items()}
        return self.seen, {}

    def step(self, action):
        candidates = self.seen["mask"] > 0
        picked = np.argmax(np.where(candidates, action, -99.0))
        right = np.argmax(np.where(candidates, self.seen["features"][:, 0], -99.0))
        observation, info = self.reset()
        return observation, float(picked == right), True, False, info


@pytest.mark.parametrize("algorithm", [PPO, A2C])
def test_algorithms_of_stable_baselines_play_with_it(scenario, algorithm):
    env = SB3VecEnv(VectorSelectionEnv(scenario, 4, n_max=8))
    model = algorithm(set_policy(), env, n_steps=16, seed=0, device="cpu")
    model.learn(64)
    observation = env.reset()
    action, _ = model.predict(observation, deterministic=True)
    assert action.shape == (4, 8)


@pytest.mark.slow
def test_it_learns_which_candidate_is_best():
    model = PPO(
        set_policy(), Bandit(), n_steps=256, batch_size=64, learning_rate=3e-3, seed=0, device="cpu"
    )
    model.learn(2_000)
    env, right = Bandit(), []
    observation, _ = env.reset(seed=1)
    for _ in range(200):
        action, _ = model.predict(observation, deterministic=True)
        observation, reward, *_ = env.step(action)
        right.append(reward)
    # By chance it is a fifth.
    assert np.mean(right) > 0.5


def test_rankings_of_maskable_ppo_name_candidates(scenario):
    contrib = pytest.importorskip("sb3_contrib")
    policies = pytest.importorskip("sb3_contrib.common.maskable.policies")
    env = SB3VecEnv(VectorSelectionEnv(scenario, 4, n_max=8, action="ranking"))
    policy = set_policy(policies.MaskableMultiInputActorCriticPolicy)
    model = contrib.MaskablePPO(policy, env, n_steps=16, batch_size=16, seed=0, device="cpu")
    model.learn(64)
    observation = env.reset()
    masks = np.stack(env.env_method("action_masks"))
    rankings, _ = model.predict(observation, action_masks=masks)
    for row in range(4):
        named = rankings[row, : int(observation["slots"][row, 0])]
        assert (observation["mask"][row, named] > 0).all()
