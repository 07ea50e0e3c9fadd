"""Plackett-Luce against enumeration, credit against naive loops, and learning on toy bandits."""

import itertools

import numpy as np
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecEnv

from fedstale.agents.env.gym_env import action_space, observation_space
from fedstale.agents.env.simulator import Reward
from fedstale.agents.policy.features import N_CONTEXT, N_FEATURES
from fedstale.agents.policy.scorer import initial, score
from fedstale.agents.policy_gradient import (
    OFF_BEST,
    ROLLOUTS,
    TEMPERATURE,
    PlackettLuce,
    PolicyGradient,
    RoundBuffer,
    RoundPolicy,
    ScorerNetwork,
    against_the_others,
    is_free,
    normalised,
    returns_to_go,
)
from fedstale.agents.training import Training


def naive_probability(scores, ordered):
    """Draw after draw: the share of the weight that is left."""
    left, chance = dict(enumerate(np.exp(np.asarray(scores, dtype=float)))), 1.0
    for place in ordered:
        chance *= left[place] / sum(left.values())
        del left[place]
    return chance


def distribution(scores, k, mask=None, seed=0):
    scores = torch.as_tensor(np.atleast_2d(scores), dtype=torch.float32)
    mask = torch.ones(scores.shape, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
    generator = torch.Generator().manual_seed(seed)
    return PlackettLuce(generator).proba_distribution(scores, mask, torch.as_tensor(k))


@pytest.mark.parametrize("n", [1, 3, 5])
def test_probabilities_are_those_of_drawing_one_after_another_and_sum_to_one(n):
    scores = np.random.default_rng(n).normal(size=n) * 3
    for k in range(1, n + 1):
        sets = np.array(list(itertools.permutations(range(n), k)))
        found = distribution(np.tile(scores, (len(sets), 1)), [k] * len(sets))
        chances = found.log_prob(torch.as_tensor(sets)).exp().numpy()
        np.testing.assert_allclose(
            chances, [naive_probability(scores, ordered) for ordered in sets], rtol=1e-4
        )
        assert chances.sum() == pytest.approx(1.0, abs=1e-5)


def test_probabilities_stay_exact_where_the_picks_have_nearly_all_the_weight():
    scores = [120.0, 90.0, 60.0, 30.0]
    found = distribution(scores, [3]).log_prob(torch.tensor([[1, 0, 2]]))
    # log(e^90 / (e^120 + ...)) = -30, then 0, then log(1 / (1 + e^-30)) = 0.
    assert float(found) == pytest.approx(-30.0, abs=1e-4)


def test_the_gradient_is_that_of_the_naive_formula():
    rng = np.random.default_rng(0)
    scores = torch.tensor(rng.normal(size=(2, 5)), dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True] * 5, [True, True, False, True, False]])
    k = torch.tensor([2, 3])
    sets = torch.tensor([[3, 1, 0], [3, 0, 1]])
    made = PlackettLuce().proba_distribution(scores, mask, k)
    made.log_prob(sets).sum().backward()
    found, scores.grad = scores.grad.clone(), None
    total = 0.0
    for row, (n, ordered) in enumerate(zip(k.tolist(), sets.tolist(), strict=True)):
        left = [i for i in range(5) if mask[row, i]]
        for place in ordered[:n]:
            total = total + scores[row, place] - scores[row, left].logsumexp(dim=0)
            left.remove(place)
    total.backward()
    np.testing.assert_allclose(found.numpy(), scores.grad.numpy(), atol=1e-9)
    # All that may be drawn is drawn, in the second row: no number is lost to the empty rest.
    assert torch.isfinite(found).all()


def test_padding_and_companions_do_not_change_a_probability():
    rng = np.random.default_rng(1)
    scores, ordered = rng.normal(size=(1, 6)), [4, 2]
    alone = float(distribution(scores, [2]).log_prob(torch.tensor([ordered])))
    # Beside a row of forty candidates and thirty draws, and with padding of any content.
    wide = np.full((2, 40), 7.0)
    wide[0, :6], wide[1] = scores, rng.normal(size=40)
    mask = np.ones((2, 40), dtype=bool)
    mask[0, 6:] = False
    sets = np.zeros((2, 40), dtype=np.int64)
    sets[0, :2], sets[0, 2:] = ordered, 4
    sets[1] = rng.permutation(40)
    for n in (5, 30, 40):
        together = distribution(wide, [2, n], mask).log_prob(torch.as_tensor(sets))
        assert float(together[0]) == pytest.approx(alone, abs=1e-5)


def test_draws_have_the_probabilities_that_are_stated():
    scores, n = np.array([1.0, 0.0, -0.5, 0.7]), 40_000
    mask = np.array([[True, True, True, False]])
    many = distribution(np.tile(scores, (n, 1)), [2] * n, np.repeat(mask, n, axis=0))
    drawn = many.sample()
    assert drawn.shape == (n, 4)
    assert not drawn[:, 2:].any()
    for ordered in itertools.permutations(range(3), 2):
        share = float((drawn[:, :2] == torch.tensor(ordered)).all(dim=1).float().mean())
        chance = naive_probability(scores[:3], ordered)
        assert share == pytest.approx(chance, abs=4 * np.sqrt(chance / n))


def test_the_best_k_and_the_share_off_them():
    made = distribution([[0.0, 3.0, 9.0, 1.0]] * 3, [2, 2, 0], [[True, True, False, True]] * 3)
    np.testing.assert_array_equal(made.mode(), [[1, 3, 0, 0], [1, 3, 0, 0], [0] * 4])
    sets = torch.tensor([[3, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
    assert made.off_best(sets).tolist() == [0.0, 0.5, 0.0]


def test_a_round_of_nothing_is_certain():
    made = distribution(np.zeros((2, 3)), [0, 0], [[False] * 3, [True] * 3])
    assert not made.sample().any()
    assert made.log_prob(made.sample()).tolist() == [0.0, 0.0]


def test_credit_is_that_of_a_naive_loop():
    rng = np.random.default_rng(0)
    rewards, clock = rng.normal(size=(5, 12)), np.sort(rng.random((5, 12)), axis=0)
    clock[0] = 0.0
    returns = returns_to_go(rewards)
    advantages = against_the_others(rewards, clock, 4)
    ends = np.vstack([clock[1:], np.ones(12)])
    for step in range(5):
        for env in range(12):
            assert returns[step, env] == pytest.approx(rewards[step:, env].sum())
            window = env // 4
            others = [e for e in range(4 * window, 4 * window + 4) if e != env]
            mean = np.mean([rewards[ends[:, e] > clock[step, env], e].sum() for e in others])
            assert advantages[step, env] == pytest.approx(returns[step, env] - mean)


def test_windows_of_any_scale_teach_alike():
    rng = np.random.default_rng(1)
    advantages = rng.normal(size=(6, 12))
    counted = rng.random((6, 12)) < 0.7
    found = normalised(advantages, counted, 4)
    scale = np.repeat([1.0, 1e3, 1e-2], 4)
    again = normalised(advantages * scale, counted, 4)
    np.testing.assert_allclose(again[:, :8], found[:, :8])
    for window in range(3):
        part = np.s_[:, 4 * window : 4 * window + 4]
        assert np.mean(found[part][counted[part]] ** 2) == pytest.approx(1.0)
    # One in which nothing depends on the choice is not blown up.
    assert np.abs(again[:, 8:]).max() < 0.1
    assert not normalised(np.zeros((6, 12)), counted, 4).any()
    assert np.isfinite(normalised(advantages, np.zeros((6, 12), bool), 4)).all()


def observations(rng, n_envs, n_max, counts, slots, *, clock=0.0):
    """Random observations with so many candidates, packed."""
    mask = np.arange(n_max) < np.asarray(counts)[:, None]
    return {
        "features": (rng.normal(size=(n_envs, n_max, N_FEATURES)) * mask[..., None]).astype("f4"),
        "context": rng.normal(size=(n_envs, N_CONTEXT)).astype("f4"),
        "heuristic": (rng.normal(size=(n_envs, n_max)) * mask).astype("f4"),
        "mask": mask.astype("f4"),
        "slots": np.asarray(slots, dtype="f4")[:, None],
        "clock": np.full((n_envs, 1), clock, dtype="f4"),
    }


def random_weights(seed):
    rng = np.random.default_rng(seed)
    return {
        name: (value + 0.3 * rng.standard_normal(value.shape)).astype("f4")
        for name, value in initial(rng).items()
    }


def policy_of(n_max, weights, seed=0):
    made = RoundPolicy(
        observation_space(n_max),
        action_space(n_max, "ranking"),
        lambda _: 1e-3,
        features_extractor_class=ScorerNetwork,
        features_extractor_kwargs={"weights": weights},
    )
    made.generator.manual_seed(seed)
    return made


def tensors(seen):
    return {name: torch.from_numpy(values) for name, values in seen.items()}


def test_the_policy_draws_by_the_scores_of_the_deployed_network_over_its_temperature():
    rng = np.random.default_rng(0)
    weights = random_weights(1)
    seen = observations(rng, 3, 9, [9, 6, 4], [2, 6, 0])
    policy = policy_of(9, weights)
    with torch.no_grad():
        actions, values, found = policy(tensors(seen))
    assert actions.shape == (3, 9)
    assert not values.any()
    mask = seen["mask"] > 0
    scores = score(weights, seen["features"], seen["context"], seen["heuristic"], mask)
    for row, (count, k) in enumerate(((9, 2), (6, 6), (4, 0))):
        ordered = actions[row, :k].tolist()
        assert len(set(ordered)) == k
        chance = naive_probability(scores[row, :count] / TEMPERATURE, ordered)
        assert float(found[row].exp()) == pytest.approx(chance, rel=1e-3)
    best, _ = policy.predict({k: v[0] for k, v in seen.items()}, deterministic=True)
    np.testing.assert_array_equal(best[:2], np.argsort(-scores[0], kind="stable")[:2])


def test_minibatches_hold_each_free_choice_once_with_its_own_probability():
    rng = np.random.default_rng(3)
    n_steps, n_envs, n_max = 5, 2 * ROLLOUTS, 12
    policy = policy_of(n_max, random_weights(2))
    buffer = RoundBuffer(
        n_steps, observation_space(n_max), action_space(n_max, "ranking"), "cpu", n_envs=n_envs
    )
    expected = {}
    rewards = rng.normal(size=(n_steps, n_envs)).astype("f4")
    for step in range(n_steps):
        counts = rng.integers(0, n_max + 1, n_envs)
        slots = np.minimum(rng.integers(0, 6, n_envs), counts)
        seen = observations(rng, n_envs, n_max, counts, slots, clock=step / n_steps)
        with torch.no_grad():
            actions, values, found = policy(tensors(seen))
        buffer.add(seen, actions.numpy(), rewards[step], np.zeros(n_envs), values, found)
        for env in range(n_envs):
            if 0 < slots[env] < counts[env]:
                expected[round(float(seen["context"][env, 0]), 5)] = (step, env, float(found[env]))
    buffer.compute_returns_and_advantage(torch.zeros(n_envs), np.ones(n_envs, dtype=bool))
    free = np.zeros((n_steps, n_envs), dtype=bool)
    for step, env, _ in expected.values():
        free[step, env] = True
    clock = np.repeat(np.arange(n_steps)[:, None] / n_steps, n_envs, axis=1)
    advantages = against_the_others(rewards, clock, ROLLOUTS)
    advantages = normalised(advantages, free, ROLLOUTS)
    met = []
    for batch in buffer.get(7):
        _, found, entropy = policy.evaluate_actions(batch.observations, batch.actions)
        assert entropy is None
        np.testing.assert_allclose(found.detach(), batch.old_log_prob, atol=1e-4)
        assert batch.observations["mask"].any(dim=0).all()
        for i, first in enumerate(batch.observations["context"][:, 0].tolist()):
            step, env, chance = expected[round(first, 5)]
            assert float(batch.old_log_prob[i]) == pytest.approx(chance)
            assert float(batch.advantages[i]) == pytest.approx(advantages[step, env], abs=1e-5)
            met.append((step, env))
    assert len(met) == len(set(met)) == len(expected) > 20


def test_choices_without_an_alternative_are_not_free():
    mask = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    assert is_free(mask, np.array([[1.0], [2.0], [0.0]])).tolist() == [True, False, False]


class Bandit(VecEnv):
    """One round of six arms that differ in the first feature; picking two earns their values."""

    values = np.array([0.0, 0.1, 0.2, 0.3, 1.0, 0.9])

    def __init__(self, n_envs):
        self.rng, self.shuffled = np.random.default_rng(0), True
        self.render_mode = None
        super().__init__(n_envs, observation_space(6), action_space(6, "ranking"))

    def reset(self):
        arms = np.tile(np.arange(6), (self.num_envs, 1))
        self.arms = self.rng.permuted(arms, axis=1) if self.shuffled else arms
        seen = observations(self.rng, self.num_envs, 6, [6] * self.num_envs, [2] * self.num_envs)
        seen["features"][:] = seen["context"][:] = seen["heuristic"][:] = 0.0
        seen["features"][np.arange(self.num_envs)[:, None], np.arange(6), self.arms] = 1.0
        return seen

    def step_async(self, actions):
        self.picked = np.take_along_axis(self.arms, actions[:, :2], axis=1)

    def step_wait(self):
        rewards = self.values[self.picked].sum(axis=1).astype("f4")
        done = np.ones(self.num_envs, dtype=bool)
        return self.reset(), rewards, done, [{} for _ in range(self.num_envs)]

    def close(self): ...

    def get_attr(self, attr_name, indices=None):
        return [None] * self.num_envs

    def set_attr(self, attr_name, value, indices=None): ...

    def env_method(self, method_name, *args, indices=None, **kwargs): ...

    def env_is_wrapped(self, wrapper_class, indices=None):
        return [False] * self.num_envs


def bandit_model(rate, n_envs=16 * ROLLOUTS):
    model = PPO(
        RoundPolicy,
        Bandit(n_envs),
        learning_rate=rate,
        n_steps=1,
        batch_size=n_envs,
        n_epochs=1,
        gamma=1.0,
        clip_range=1.0,
        normalize_advantage=False,
        vf_coef=0.0,
        rollout_buffer_class=RoundBuffer,
        policy_kwargs={
            "features_extractor_class": ScorerNetwork,
            "features_extractor_kwargs": {"weights": initial(np.random.default_rng(0))},
        },
        device="cpu",
    )
    model.policy.generator.manual_seed(0)
    return model


def arm_scores(policy):
    env = Bandit(1)
    seen = env.reset()
    with torch.no_grad():
        scores = policy.features_extractor(tensors(seen))[0].numpy()
    return scores[np.argsort(env.arms[0])]


@pytest.mark.usefixtures("logs")
def test_training_on_a_bandit_of_sets_finds_the_best_two_arms():
    model = bandit_model(0.02)
    assert not arm_scores(model.policy).any()
    earned = []
    for _ in range(40):
        model.learn(model.n_envs, reset_num_timesteps=False)
        earned.append(float(model.rollout_buffer.rewards.mean()))
        model.policy.steer()
    assert set(np.argsort(-arm_scores(model.policy))[:2].tolist()) == {4, 5}
    # Two of six at random earn 2 x 2.5 / 6 = 0.83, the best 1.9; a quarter of the picks is random.
    assert earned[0] == pytest.approx(0.83, abs=0.15)
    assert np.mean(earned[-5:]) > 1.4


@pytest.mark.parametrize("times", [0.05, 20.0])
def test_scores_are_scaled_until_a_quarter_of_the_picks_is_off_the_best(times):
    rng = np.random.default_rng(0)
    policy = policy_of(20, random_weights(5))
    policy.features_extractor.scale(times)
    seen = tensors(observations(rng, 8, 20, [20] * 8, [5] * 8))
    with torch.no_grad():
        ranked = policy.features_extractor(seen).argsort(dim=1)
        shares = []
        for _ in range(60):
            policy(tensors(observations(rng, 64, 20, [20] * 64, [5] * 64)))
            shares.append(policy.steer())
        assert np.mean(shares[-20:]) == pytest.approx(OFF_BEST, abs=0.03)
        # No ranking has changed, and rounds without an alternative steer nothing.
        scores = policy.features_extractor(seen)
        assert torch.equal(scores.argsort(dim=1), ranked)
        policy(tensors(observations(rng, 8, 20, [5] * 8, [5] * 8)))
        policy.steer()
        assert torch.equal(policy.features_extractor(seen), scores)


def small(**changed):
    return Training(**{"windows": 2, "updates": 4, "rate": 0.02, **changed})


def test_the_same_seed_gives_the_same_weights_and_another_one_others(scenario):
    learners = [PolicyGradient([scenario], small(seed=seed), Reward()) for seed in (0, 0, 1)]
    torch.manual_seed(5)
    for learner in learners:
        # Whatever else draws from torch's own generator in between.
        torch.rand(3)
        for _ in range(2):
            metrics = learner.update()
        assert all(np.isfinite(list(metrics.values())))
    one, two, other = (learner.weights() for learner in learners)
    for name, value in one.items():
        np.testing.assert_array_equal(two[name], value)
    assert not np.array_equal(other["last"], one["last"])
