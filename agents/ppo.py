"""MaskablePPO on single picks: the scorer as a torch network and policy, and its training.

The network has the weights and the numbers of `fedstale.agents.policy.scorer`. The actor's logits
are the scores, divided by a temperature: the deployed agent takes the k best, so sampling must not
stray far from them. The critic sees the pooled context alone, since the value of a round belongs to
no candidate. Checkpoints hold nothing but arrays.

Reference:
    Schulman, Wolski, Dhariwal, Radford, Klimov. Proximal Policy Optimization Algorithms. 2017.
    Huang, Ontanon. A Closer Look at Invalid Action Masking in Policy Gradient Algorithms. 2020.
"""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, MlpExtractor
from stable_baselines3.common.type_aliases import Schedule
from torch import Tensor, nn

from fedstale.agents.env.gym_env import VectorSelectionEnv
from fedstale.agents.env.scenario import Scenario
from fedstale.agents.env.simulator import Reward
from fedstale.agents.policy.scorer import POOLED, Weights
from fedstale.agents.training import Learner, Training
from fedstale.strategies.state import State

PICKS = 64
"""Picks of each window between updates."""
TEMPERATURE = 0.25
"""Divisor of the scores while picks are sampled."""
CRITIC = 32
"""Width of the critic's hidden layer; it is not deployed."""


class ScorerNetwork(BaseFeaturesExtractor):
    """`fedstale.agents.policy.scorer` in torch: the logits of the picks, and what the critic sees.

    Args:
        observation_space: a Dict of `features` (n, f), `context` (g,), `heuristic` (n,) and `mask`
            (n,).
        weights: to begin with.
        train_beta: whether the heuristic's weight may change.
    """

    def __init__(
        self, observation_space: spaces.Dict, weights: Weights, *, train_beta: bool = True
    ) -> None:
        (self.n_places,) = cast("tuple[int]", observation_space["heuristic"].shape)
        super().__init__(observation_space, self.n_places + len(weights["pool"]))
        tensors = {name: torch.from_numpy(value.copy()) for name, value in weights.items()}
        self.weights = nn.ParameterDict(tensors)
        self.weights["beta"].requires_grad_(train_beta)

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        """Return scores over the temperature, then context, mean and spread; (b, n + g + 2 f)."""
        w, features, mask = self.weights, obs["features"], obs["mask"]
        here = mask.unsqueeze(-1)
        count = mask.sum(dim=1, keepdim=True).clamp(min=1.0)
        mean = (features * here).sum(dim=1) / count
        square = (features.square() * here).sum(dim=1) / count
        # The gradient of a root is infinite at 0, where all candidates are alike.
        spread = (square - mean.square()).clamp(min=1e-12).sqrt()
        summary = torch.cat([obs["context"], mean, spread], dim=1)
        about = torch.tanh(summary @ w["pool"] + w["pool_bias"])
        offset = about @ w["context"] + w["candidate_bias"]
        hidden = torch.relu(features @ w["candidate"] + offset.unsqueeze(1))
        hidden = torch.relu(hidden @ w["hidden"] + w["hidden_bias"])
        scores = w["beta"] * obs["heuristic"] + (hidden @ w["last"]).squeeze(-1)
        return torch.cat([scores / TEMPERATURE, summary], dim=1)

    def exported(self) -> Weights:
        """Return the weights for `fedstale.agents.policy.scorer`."""
        return {name: value.detach().numpy().copy() for name, value in self.weights.items()}


class _Heads(MlpExtractor):
    """Divides what `ScorerNetwork` returns: logits for the actor, the rest for the critic."""

    def __init__(self, n_places: int, n_summary: int) -> None:
        super().__init__(n_summary, {"pi": [], "vf": [CRITIC, POOLED]}, nn.Tanh, device="cpu")
        self.n_places = n_places

    def forward_actor(self, features: Tensor) -> Tensor:
        return features[:, : self.n_places]

    def forward_critic(self, features: Tensor) -> Tensor:
        return cast("Tensor", self.value_net(features[:, self.n_places :]))


class ScorerPolicy(MaskableActorCriticPolicy):
    """Actor and critic for observations of `SelectionEnv`; its features come from `ScorerNetwork`.

    The layers begin as torch draws them, in the order critic, value.
    """

    features_extractor: ScorerNetwork

    def _build(self, lr_schedule: Schedule) -> None:
        n_places = self.features_extractor.n_places
        self.mlp_extractor = _Heads(n_places, self.features_dim - n_places)
        self.action_net, self.value_net = nn.Identity(), nn.Linear(POOLED, 1)
        settings: dict[str, Any] = {"lr": lr_schedule(1), **self.optimizer_kwargs}
        self.optimizer = self.optimizer_class(self.parameters(), **settings)


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
                "features_extractor_class": ScorerNetwork,
                "features_extractor_kwargs": {
                    "weights": training.start_weights(),
                    "train_beta": training.residual,
                },
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
        return self._policy.features_extractor.exported()

    def state_dict(self) -> State:
        """Return weights, the optimizer's moments and the generator's state."""
        policy = self._policy
        moments = policy.optimizer.state_dict()["state"]
        return {
            "policy": {k: v.numpy() for k, v in policy.state_dict().items()},
            "moments": {i: {k: v.numpy() for k, v in of.items()} for i, of in moments.items()},
            "generator": torch.get_rng_state().numpy(),
            "updates": self._updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, with new windows."""
        policy, tensor = self._policy, torch.tensor
        policy.load_state_dict({k: tensor(v) for k, v in state["policy"].items()})
        moments = {i: {k: tensor(v) for k, v in of.items()} for i, of in state["moments"].items()}
        policy.optimizer.load_state_dict({**policy.optimizer.state_dict(), "state": moments})
        self._updates = state["updates"]
        torch.set_rng_state(tensor(state["generator"]))
        self._env.seed(self._training.seed + 1_000_003 * self._updates)
