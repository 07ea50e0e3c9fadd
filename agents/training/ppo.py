"""MaskablePPO on single picks, with checkpoints that hold nothing but arrays.

Reference:
    Schulman, Wolski, Dhariwal, Radford, Klimov. Proximal Policy Optimization Algorithms. 2017.
    Huang, Ontanon. A Closer Look at Invalid Action Masking in Policy Gradient Algorithms. 2020.
"""

from typing import cast

import numpy as np
import torch
from sb3_contrib import MaskablePPO

from fedstale.agents.env.scenario import Scenario
from fedstale.agents.env.simulator import Reward
from fedstale.agents.env.vector_env import VectorSelectionEnv
from fedstale.agents.policy.scorer import Weights
from fedstale.agents.policy.torch_policy import ScorerPolicy
from fedstale.agents.training.base import Learner, State, Training

PICKS = 64
"""Picks of each window between updates."""
TEMPERATURE = 0.25
"""Divisor of the scores while picks are sampled."""


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
