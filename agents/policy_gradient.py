"""Policy gradient over rounds, inside Stable-Baselines3's PPO: reward is credited to the set.

An action is the ordered set of the k candidates that a choice picks, drawn without replacement by
the scores over a temperature (Plackett-Luce), and its reward is what the window earns from that
choice on. Eight rollouts play each window, and the baseline of one is the mean of the other seven,
which know the window, so that no critic has to learn how windows differ. The deployed agent draws
alike. After each update all scores are scaled so that a quarter of the picks is off the best k,
which changes no ranking: chance can neither die out while there is something to learn nor grow.
With one epoch and a wide clip PPO's loss is the policy gradient.

Reference:
    Plackett. The Analysis of Permutations. Applied Statistics, 1975.
    Kool, van Hoof, Welling. Buy 4 REINFORCE Samples, Get a Baseline for Free. 2019.
    Schulman, Wolski, Dhariwal, Radford, Klimov. Proximal Policy Optimization Algorithms. 2017.
"""

from collections.abc import Generator, Sequence
from typing import Any, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import DictRolloutBuffer
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import DictRolloutBufferSamples, Schedule
from torch import Tensor, nn

from fedstale.agents.env import Reward, SB3VecEnv, Scenario, VectorSelectionEnv
from fedstale.agents.policy import TEMPERATURE, Weights
from fedstale.agents.training import Training
from fedstale.traces import Array, Mask, stream

ROLLOUTS = 8
"""Rollouts of each window; the baseline of one is the mean of the others."""
OFF_BEST = 0.25
"""Share of the picks that sampling takes from outside the best k, where there is a choice."""
MOST_SHOWN = 128
"""Candidates that an agent is shown in training; of more, so many at random."""
STEPS = 4
"""Steps of the optimizer in an update, one for each minibatch."""

_STEERING = 2.0
# Stands for the logarithm of 0: a difference of infinities has no gradient.
_NONE = -1e9


class PlackettLuce:
    """Ordered sets of places, drawn one after another by the exponentials of their scores.

    It is what Stable-Baselines3's policies ask of a distribution.

    Args:
        generator: of the draws; torch's own if None.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self._generator = generator
        self._scores, self._k = torch.zeros(0, 0), torch.zeros(0, dtype=torch.int64)
        self._within = torch.zeros(0, 0, dtype=torch.bool)

    def proba_distribution(self, scores: Tensor, mask: Tensor, k: Tensor) -> Self:
        """Set the parameters.

        Args:
            scores: of the places, finite; shape (b, n).
            mask: which places may be drawn; shape (b, n).
            k: how many are drawn, at most as many as may be; shape (b,).
        """
        self._scores, self._k = scores.masked_fill(~mask, _NONE), k
        # Which positions of a set count: those before k.
        self._within = torch.arange(int(k.max())) < k[:, None]
        return self

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the logarithm of the probability of ordered sets; shape (b,).

        Args:
            x: distinct places that may be drawn, in order; what follows the first k of a row does
                not count; shape (b, m), m >= the largest k.
        """
        places = x[:, : self._within.shape[1]].long()
        chosen = self._scores.gather(1, places).masked_fill(~self._within, _NONE)
        never = self._scores.masked_fill(self._members(x), _NONE).logsumexp(dim=1, keepdim=True)
        # What is left at each draw: all that is never drawn, and all that is drawn from then on.
        later = chosen.flip(1).logcumsumexp(dim=1).flip(1)
        each = chosen - torch.logaddexp(never, later)
        return each.masked_fill(~self._within, 0.0).sum(dim=1)

    def entropy(self) -> None:
        """Return None, by which Stable-Baselines3 takes an estimate: there is no closed form."""

    def sample(self) -> Tensor:
        """Return drawn sets, 0 after the first k; shape (b, n)."""
        uniform = torch.rand(self._scores.shape, generator=self._generator)
        # The k largest of scores with Gumbel noise are such a draw.
        return self._first(self._scores - torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7))))

    def mode(self) -> Tensor:
        """Return the best k, best first, 0 after them; shape (b, n)."""
        return self._first(self._scores)

    def off_best(self, x: Tensor) -> Tensor:
        """Return the share of each set that is not among the best k, 0 of no set; shape (b,).

        Args:
            x: as in `log_prob`.
        """
        off = self._members(x) & ~self._members(self.mode())
        return off.sum(dim=1) / self._k.clamp(min=1)

    def get_actions(self, deterministic: bool = False) -> Tensor:
        """Return drawn sets, or the best k."""
        return self.mode() if deterministic else self.sample()

    def _first(self, keys: Tensor) -> Tensor:
        order = keys.argsort(dim=1, descending=True, stable=True)
        return order * (torch.arange(order.shape[1]) < self._k[:, None])

    def _members(self, x: Tensor) -> Tensor:
        """Return which places are in sets; shape (b, n)."""
        n = self._scores.shape[1]
        places = x[:, : self._within.shape[1]].long().masked_fill(~self._within, n)
        inside = torch.zeros(len(places), n + 1, dtype=torch.bool)
        return inside.scatter(1, places, value=True)[:, :n]


class ScorerNetwork(BaseFeaturesExtractor):
    """`fedstale.agents.policy.scorer` in torch: the scores of the candidates.

    Args:
        observation_space: a Dict of `features` (n, f), `context` (g,), `heuristic` (n,) and `mask`
            (n,).
        weights: to begin with.
        train_beta: whether the heuristic's weight may change.
    """

    def __init__(
        self, observation_space: spaces.Dict, weights: Weights, *, train_beta: bool = True
    ) -> None:
        (n_places,) = cast("tuple[int]", observation_space["heuristic"].shape)
        super().__init__(observation_space, n_places)
        tensors = {name: torch.from_numpy(value.copy()) for name, value in weights.items()}
        self.weights = nn.ParameterDict(tensors)
        self.weights["beta"].requires_grad_(train_beta)

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        """Return scores, 0 for what is no candidate; shape (b, n)."""
        w, here = self.weights, obs["mask"] > 0
        # Most places are empty: only candidates go through the layers.
        row, features = here.nonzero()[:, 0], obs["features"][here]
        count = here.sum(dim=1, keepdim=True).clamp(min=1)
        zeros = torch.zeros(len(here), features.shape[1])
        mean = zeros.index_add(0, row, features) / count
        square = zeros.index_add(0, row, features.square()) / count
        # The gradient of a root is infinite at 0, where all candidates are alike.
        spread = (square - mean.square()).clamp(min=1e-12).sqrt()
        summary = torch.cat([obs["context"], mean, spread], dim=1)
        about = torch.tanh(summary @ w["pool"] + w["pool_bias"])
        offset = about @ w["context"] + w["candidate_bias"]
        hidden = torch.relu(features @ w["candidate"] + offset[row])
        hidden = torch.relu(hidden @ w["hidden"] + w["hidden_bias"])
        found = w["beta"] * obs["heuristic"][here] + (hidden @ w["last"]).squeeze(-1)
        return torch.zeros(here.shape).masked_scatter(here, found)

    def scale(self, factor: float) -> None:
        """Multiply all scores by a factor."""
        with torch.no_grad():
            self.weights["beta"] *= factor
            self.weights["last"] *= factor

    def exported(self) -> Weights:
        """Return the weights for `fedstale.agents.policy.scorer`."""
        return {name: value.detach().numpy().copy() for name, value in self.weights.items()}


class RoundPolicy(ActorCriticPolicy):
    """Draws rounds by the scores of `ScorerNetwork` over a temperature; it has no critic."""

    features_extractor: ScorerNetwork

    def _build(self, lr_schedule: Schedule) -> None:
        self.generator = torch.Generator()
        self.rounds = PlackettLuce(self.generator)
        # Of the free choices since the last steering: shares off the best k, and their number.
        self._off, self._free = 0.0, 0
        settings: dict[str, Any] = {"lr": lr_schedule(1), **self.optimizer_kwargs}
        self.optimizer = self.optimizer_class(self.parameters(), **settings)

    def forward(self, obs: Any, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return drawn rounds, values of 0, and the log-probabilities of the rounds."""
        distribution = self.get_distribution(obs)
        actions = distribution.get_actions(deterministic)
        free = is_free(obs["mask"], obs["slots"])
        self._off += float(distribution.off_best(actions)[free].sum())
        self._free += int(free.sum())
        return actions, self.predict_values(obs), distribution.log_prob(actions)

    def evaluate_actions(self, obs: Any, actions: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return values of 0, the log-probabilities of rounds, and no entropy."""
        return self.predict_values(obs), self.get_distribution(obs).log_prob(actions), None

    def get_distribution(self, obs: Any) -> PlackettLuce:  # type: ignore[override]
        """Return the distribution over rounds."""
        scores = cast("Tensor", self.extract_features(obs)) / TEMPERATURE
        k = obs["slots"][:, 0].long()
        return self.rounds.proba_distribution(scores, obs["mask"] > 0, k)

    def predict_values(self, obs: Any) -> Tensor:
        """Return values of 0; shape (b, 1)."""
        return torch.zeros(len(obs["slots"]), 1)

    def steer(self) -> float:
        """Scale all scores towards `OFF_BEST`, and return the share that was off the best.

        Were the divisor steered instead, scores would grow until the optimizer's steps, which do
        not grow, changed nothing any more.
        """
        share = self._off / max(self._free, 1)
        if self._free:
            self.features_extractor.scale(float(np.exp(_STEERING * (share - OFF_BEST))))
        self._off, self._free = 0.0, 0
        return share


_T = TypeVar("_T", Tensor, Array)


def is_free(mask: _T, slots: _T) -> _T:
    """Return which choices pick some candidates and leave others out; shape (...,).

    Args:
        mask: which places may be picked; shape (..., n).
        slots: how many are picked; shape (..., 1).
    """
    k = slots[..., 0]
    return (k > 0) & (k < mask.sum(-1))


class RoundBuffer(DictRolloutBuffer):
    """Rollouts of whole windows: `ROLLOUTS` in a row play the same one from its first round on.

    Choices without an alternative teach nothing and are left out of the minibatches. Observations
    and actions are cut to what a minibatch needs.
    """

    def compute_returns_and_advantage(
        self, last_values: Tensor, dones: npt.NDArray[np.bool_]
    ) -> None:
        """Compute the returns of each round, and the advantages over other rollouts of its window.

        The latter is in units of the window's own spread: in some fleets a window's rewards hardly
        depend on who is picked, in others much, and none is to drown the others.

        Args:
            last_values: not used: all windows are over.
            dones: not used.
        """
        del last_values, dones
        self.returns = returns_to_go(self.rewards)
        clock = self.observations["clock"][..., 0]
        advantages = against_the_others(self.rewards, clock, ROLLOUTS)
        free = np.asarray(
            is_free(self.observations["mask"], self.observations["slots"]), dtype=bool
        )
        self.advantages = normalised(advantages, free, ROLLOUTS)

    # Its base class overrides alike: observations are dictionaries.
    def get(  # type: ignore[override]
        self, batch_size: int | None = None
    ) -> Generator[DictRolloutBufferSamples, None, None]:
        """Return `STEPS` minibatches, each with choices of all windows and rounds.

        Args:
            batch_size: not used.
        """
        del batch_size
        seen = self.observations
        free, credit = np.argwhere(is_free(seen["mask"], seen["slots"])), self.advantages
        if not len(free):
            # PPO needs a minibatch: a choice that is credited with nothing.
            free, credit = np.zeros((1, 2), dtype=np.int64), np.zeros_like(credit)
        for i in range(min(STEPS, len(free))):
            step, env = free[i::STEPS].T
            # Candidates come first: no place after the last one of any choice is needed.
            width = max(int(seen["mask"][step, env].sum(axis=1).max()), 1)
            deepest = int(seen["slots"][step, env].max())
            cut = {"features": width, "heuristic": width, "mask": width}
            actions = self.actions[step, env, :deepest]
            numbers = (self.values, self.log_probs, credit, self.returns)
            yield DictRolloutBufferSamples(
                {k: self.to_torch(v[step, env, : cut.get(k)]) for k, v in seen.items()},
                self.to_torch(actions.astype(np.float32)),
                *(self.to_torch(each[step, env]) for each in numbers),
            )


def returns_to_go(rewards: Array) -> Array:
    """Sum the rewards from each round on.

    Args:
        rewards: of rounds; shape (rounds, rollouts).

    Example:
        >>> returns_to_go(np.array([[1.0, 0.0], [2.0, 4.0]])).tolist()
        [[3.0, 4.0], [2.0, 4.0]]
    """
    return np.cumsum(rewards[::-1], axis=0)[::-1].copy()


def against_the_others(rewards: Array, clock: Array, n: int) -> Array:
    """Compute each rollout's return from a round on, less the others' mean return from then on.

    Then is the same share of the episode: a rollout that has played faster has more of it left, and
    what the others earn in that time says what it is worth.

    Args:
        rewards: of rounds, n rollouts of each window in a row; shape (rounds, windows x n).
        clock: share of the episode that is over when a round begins, in [0, 1]; same shape.
        n: >= 2.

    Example:
        >>> rewards = np.array([[1.0, 2.0], [4.0, 8.0]])
        >>> against_the_others(rewards, np.array([[0.0, 0.0], [0.5, 0.25]]), 2).tolist()
        [[-5.0, 5.0], [-4.0, 3.0]]
    """
    ends = np.concatenate([clock[1:], np.ones((1, clock.shape[1]))])
    ends = np.maximum.accumulate(ends, axis=0)
    own = returns_to_go(rewards)
    left = np.concatenate([own, np.zeros((1, own.shape[1]))])
    found = own.astype(np.float64)
    for first in range(0, rewards.shape[1], n):
        window = range(first, first + n)
        for i in window:
            for j in window:
                if i != j:
                    begun = np.searchsorted(ends[:, j], clock[:, i], side="right")
                    found[:, i] -= left[begun, j] / (n - 1)
    return found


def normalised(advantages: Array, counted: Mask, n: int) -> Array:
    """Return advantages over the root of their mean square in each window.

    What is divided by is at least a quarter of its median over the windows.

    Args:
        advantages: n rollouts of each window in a row; shape (rounds, windows x n).
        counted: which of them count in the mean; the same shape.
        n: >= 1.

    Example:
        >>> found = normalised(np.array([[1.0, -1.0, 8.0, -8.0]]), np.ones((1, 4), bool), 2)
        >>> found.tolist()
        [[0.8888888888888888, -0.8888888888888888, 1.0, -1.0]]
    """
    shape = len(advantages), -1, n
    squares = np.where(counted, advantages**2, 0.0).reshape(shape).sum(axis=(0, 2))
    count = counted.reshape(shape).sum(axis=(0, 2))
    spread = np.sqrt(squares / np.maximum(count, 1))
    least = 0.25 * np.median(spread[count > 0]) if count.any() else 0.0
    unit = np.maximum(spread, least)
    return np.asarray(advantages / np.repeat(np.where(unit > 0, unit, 1.0), n))


class PolicyGradient:
    """Stable-Baselines3's PPO on rounds, one update at a time.

    Args:
        scenarios: where the windows are, as many in each.
        training: how.
        reward: prices.
        weights: to begin with; those that the training begins with if None.
    """

    def __init__(
        self,
        scenarios: Sequence[Scenario],
        training: Training,
        reward: Reward,
        weights: Weights | None = None,
    ) -> None:
        weights = training.start_weights() if weights is None else weights
        self._training, self._updates = training, 0
        self._env = SB3VecEnv(
            VectorSelectionEnv(
                scenarios,
                ROLLOUTS * training.windows * len(scenarios),
                action="ranking",
                rollouts=ROLLOUTS,
                n_max=min(max(each.settings.devices[1] for each in scenarios), MOST_SHOWN),
                reward=reward,
                baseline=False,
            )
        )
        self._env.seed(training.seed)
        choices = scenarios[0].settings.choices
        self._model = PPO(
            RoundPolicy,
            self._env,
            learning_rate=lambda _: training.rate_at(self._updates),
            n_steps=choices,
            batch_size=choices * self._env.num_envs,
            n_epochs=1,
            gamma=1.0,
            clip_range=1.0,
            normalize_advantage=False,
            vf_coef=0.0,
            rollout_buffer_class=RoundBuffer,
            policy_kwargs={
                "features_extractor_class": ScorerNetwork,
                "features_extractor_kwargs": {
                    "weights": weights,
                    "train_beta": training.residual,
                },
            },
            device="cpu",
        )
        # Its own would leave a folder in the system's temporary one at each update.
        self._model.set_logger(Logger(folder=None, output_formats=[]))

    @property
    def _policy(self) -> RoundPolicy:
        return cast("RoundPolicy", self._model.policy)

    def update(self) -> dict[str, float]:
        """Play new windows, and learn from them."""
        model, env, policy = self._model, self._env, self._policy
        # What is drawn follows from the number of the update.
        seed = stream(self._training.seed, 3, self._updates).integers(2**62)
        policy.generator.manual_seed(int(seed))
        model.learn(model.n_steps * env.num_envs, reset_num_timesteps=False)
        off_best = policy.steer()
        self._updates += 1
        return {
            "reward": float(model.rollout_buffer.rewards.sum(axis=0).mean()),
            "beta": float(self.weights()["beta"][0]),
            "off_best": off_best,
            "approx_kl": float(model.logger.name_to_value["train/approx_kl"]),
        }

    def weights(self) -> Weights:
        """Return the weights as they are now."""
        return self._policy.features_extractor.exported()
