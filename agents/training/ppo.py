"""MaskablePPO on single picks: the scorer as a torch network and policy, and its training.

The network has the weights and the numbers of `fedstale.agents.policy.scorer`. The actor's logits
are the scores, divided by a temperature: the deployed agent takes the k best, so sampling must not
stray far from them. The critic sees the pooled context alone, since the value of a round belongs to
no candidate. Checkpoints hold nothing but arrays.

Reference:
    Schulman, Wolski, Dhariwal, Radford, Klimov. Proximal Policy Optimization Algorithms. 2017.
    Huang, Ontanon. A Closer Look at Invalid Action Masking in Policy Gradient Algorithms. 2020.
"""

from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.distributions import MaskableDistribution
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.torch_layers import CombinedExtractor
from stable_baselines3.common.type_aliases import Schedule
from torch import Tensor, nn

from fedstale.agents.env.scenario import Scenario
from fedstale.agents.env.simulator import Reward
from fedstale.agents.env.vector_env import VectorSelectionEnv
from fedstale.agents.policy.scorer import POOLED, Weights, initial, shapes
from fedstale.agents.training.base import Learner, State, Training

PICKS = 64
"""Picks of each window between updates."""
TEMPERATURE = 0.25
"""Divisor of the scores while picks are sampled."""
CRITIC = 32
"""Width of the critic's hidden layer; it is not deployed."""


class ScorerNetwork(nn.Module):
    """`fedstale.agents.policy.scorer` in torch.

    Args:
        n_features: features of a candidate.
        n_context: features of a round.
        seed: of the weights before the last layer.
    """

    def __init__(self, n_features: int, n_context: int, seed: int = 0) -> None:
        super().__init__()
        self.n_features, self.n_context = n_features, n_context
        weights = initial(n_features, n_context, np.random.default_rng(seed))
        self.weights = nn.ParameterDict({k: torch.from_numpy(v) for k, v in weights.items()})

    def summary(self, features: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        """Return context, mean and spread of the candidates; shape (b, g + 2 f)."""
        here = mask.unsqueeze(-1)
        count = mask.sum(dim=1, keepdim=True).clamp(min=1.0)
        mean = (features * here).sum(dim=1) / count
        square = (features.square() * here).sum(dim=1) / count
        # The gradient of a root is infinite at 0, where all candidates are alike.
        spread = (square - mean.square()).clamp(min=1e-12).sqrt()
        return torch.cat([context, mean, spread], dim=1)

    def forward(self, features: Tensor, summary: Tensor, heuristic: Tensor) -> Tensor:
        """Return scores of shape (b, n)."""
        w = self.weights
        about = torch.tanh(summary @ w["pool"] + w["pool_bias"])
        offset = about @ w["context"] + w["candidate_bias"]
        hidden = torch.relu(features @ w["candidate"] + offset.unsqueeze(1))
        hidden = torch.relu(hidden @ w["hidden"] + w["hidden_bias"])
        return w["beta"] * heuristic + (hidden @ w["last"]).squeeze(-1)

    def exported(self) -> Weights:
        """Return the weights for `fedstale.agents.policy.scorer`."""
        return {
            name: self.weights[name].detach().cpu().numpy().astype(np.float32).copy()
            for name in shapes(self.n_features, self.n_context)
        }

    def take_over(self, weights: Weights) -> None:
        """Set the weights."""
        with torch.no_grad():
            for name, value in weights.items():
                self.weights[name].copy_(torch.from_numpy(value))


class ScorerPolicy(MaskableActorCriticPolicy):
    """Actor and critic for observations of `SelectionEnv`.

    Args:
        observation_space: a Dict of `features` (n, f), `context` (g,), `heuristic` (n,) and `mask`
            (n,).
        action_space: Discrete(n).
        lr_schedule: learning rate by remaining progress.
        temperature: divisor of the scores, > 0.
        start: weights to begin with; None begins as the heuristic.
        seed: of the layers before the last.
        train_beta: whether the heuristic's weight may change.
        other: passed on.
    """

    def __init__(
        self,
        observation_space: spaces.Dict,
        action_space: spaces.Discrete,
        lr_schedule: Schedule,
        *,
        temperature: float = 0.25,
        start: Weights | None = None,
        seed: int = 0,
        train_beta: bool = True,
        **other: Any,  # noqa: ANN401 - Stable-Baselines3's own settings
    ) -> None:
        # The base class calls `_build`, which needs these; torch forbids modules before its turn.
        object.__setattr__(self, "_settings", (temperature, start, seed, train_beta))
        other["features_extractor_class"] = CombinedExtractor
        super().__init__(observation_space, action_space, lr_schedule, **other)

    def _build(self, lr_schedule: Schedule) -> None:
        self.temperature, start, seed, train_beta = cast(
            "tuple[float, Weights | None, int, bool]", self._settings
        )
        space = cast("spaces.Dict", self.observation_space)
        n_features = cast("tuple[int, ...]", space["features"].shape)[1]
        n_context = cast("tuple[int, ...]", space["context"].shape)[0]
        self.scorer = ScorerNetwork(n_features, n_context, seed)
        if start is not None:
            self.scorer.take_over(start)
        self.scorer.weights["beta"].requires_grad_(train_beta)
        n_summary = n_context + 2 * n_features
        self.critic = nn.Sequential(
            nn.Linear(n_summary, CRITIC), nn.Tanh(), nn.Linear(CRITIC, POOLED), nn.Tanh()
        )
        self.value_net = nn.Linear(POOLED, 1)
        settings: dict[str, Any] = {"lr": lr_schedule(1), **self.optimizer_kwargs}
        self.optimizer = self.optimizer_class(self.parameters(), **settings)

    def _both(self, obs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        features, mask = obs["features"].float(), obs["mask"].float()
        summary = self.scorer.summary(features, obs["context"].float(), mask)
        logits = self.scorer(features, summary, obs["heuristic"].float()) / self.temperature
        return logits, self.value_net(self.critic(summary))

    def _distribution(
        self, logits: Tensor, action_masks: np.ndarray | Tensor | None
    ) -> MaskableDistribution:
        distribution = self.action_dist.proba_distribution(action_logits=logits)
        if action_masks is not None:
            distribution.apply_masking(cast("np.ndarray", action_masks))
        return distribution

    def forward(  # type: ignore[override] # the base class takes any observation
        self,
        obs: dict[str, Tensor],
        deterministic: bool = False,
        action_masks: np.ndarray | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return actions, values and log probabilities."""
        logits, values = self._both(obs)
        distribution = self._distribution(logits, action_masks)
        actions = distribution.get_actions(deterministic=deterministic)
        return actions, values, distribution.log_prob(actions)

    def evaluate_actions(  # type: ignore[override]
        self, obs: dict[str, Tensor], actions: Tensor, action_masks: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return values, log probabilities of the actions and entropy."""
        logits, values = self._both(obs)
        distribution = self._distribution(logits, action_masks)
        return values, distribution.log_prob(actions), distribution.entropy()

    def get_distribution(  # type: ignore[override]
        self, obs: dict[str, Tensor], action_masks: np.ndarray | None = None
    ) -> MaskableDistribution:
        """Return the distribution of the next pick."""
        return self._distribution(self._both(obs)[0], action_masks)

    def predict_values(self, obs: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        """Return the values of states."""
        return self._both(obs)[1]

    def _get_constructor_parameters(self) -> dict[str, Any]:
        kept = super()._get_constructor_parameters()
        for name in ("net_arch", "features_extractor_class", "features_extractor_kwargs"):
            kept.pop(name)
        return kept | {"temperature": self.temperature}


class PPOLearner(Learner):
    """Stable-Baselines3's MaskablePPO, one update at a time.

    Windows that were played at a checkpoint are not continued: a resumed training begins new ones,
    and is as good as, but not equal to, one that did not stop.

    Args:
        scenario: where the windows are.
        training: how; `rate` is ten times that of Adam, which takes many steps in an update.
        reward: prices.
    """

    def __init__(self, scenario: Scenario, training: Training, reward: Reward) -> None:
        self._training = training
        self._env = VectorSelectionEnv(
            scenario,
            4 * training.windows,
            n_max=scenario.settings.devices[1],
            reward=reward,
            seed=training.seed,
        )
        self._model = MaskablePPO(
            ScorerPolicy,
            self._env,
            learning_rate=training.rate / 10.0,
            n_steps=PICKS,
            batch_size=PICKS * training.windows,
            n_epochs=4,
            # Picks of a round are paid together at its end.
            gamma=0.998,
            gae_lambda=0.95,
            ent_coef=0.0,
            target_kl=0.05,
            policy_kwargs={
                "temperature": TEMPERATURE,
                "start": training.start_weights(),
                "train_beta": training.residual,
            },
            seed=training.seed,
            device="cpu",
        )
        self._updates = 0

    @property
    def _policy(self) -> ScorerPolicy:
        return cast("ScorerPolicy", self._model.policy)

    def update(self) -> dict[str, float]:
        """Make a rollout, and learn from it."""
        model, training = self._model, self._training
        model.lr_schedule = lambda _: training.rate_at(self._updates) / 10.0
        picks = PICKS * self._env.num_envs
        model.learn(picks, reset_num_timesteps=False)
        self._updates += 1
        measured = model.logger.name_to_value
        return {
            "reward": float(np.mean(model.rollout_buffer.rewards) * PICKS),
            "beta": float(self.weights()["beta"][0]),
            **{
                name.removeprefix("train/"): float(value)
                for name, value in measured.items()
                if name in {"train/explained_variance", "train/approx_kl", "train/entropy_loss"}
            },
        }

    def weights(self) -> Weights:
        """Return the actor's weights."""
        return self._policy.scorer.exported()

    def state_dict(self) -> State:
        """Return weights, the optimizer's moments and the generator's state."""
        policy = self._policy
        state: State = {f"policy.{k}": v.numpy() for k, v in policy.state_dict().items()}
        for i, moments in policy.optimizer.state_dict()["state"].items():
            state |= {f"optimizer.{i}.{k}": v.numpy() for k, v in moments.items()}
        return state | {
            "updates": np.array([self._updates]),
            "torch": torch.get_rng_state().numpy(),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue, with new windows."""
        policy = self._policy
        tensors = {k: torch.from_numpy(v.copy()) for k, v in state.items()}
        policy.load_state_dict(
            {k.removeprefix("policy."): v for k, v in tensors.items() if k.startswith("policy.")}
        )
        optimizer = policy.optimizer.state_dict()
        for name, value in tensors.items():
            if name.startswith("optimizer."):
                _, i, moment = name.split(".")
                optimizer["state"].setdefault(int(i), {})[moment] = value
        policy.optimizer.load_state_dict(optimizer)
        self._updates = int(state["updates"][0])
        torch.set_rng_state(tensors["torch"])
        self._env.seed(self._training.seed + 1_000_003 * self._updates)
