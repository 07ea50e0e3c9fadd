"""How an agent is trained, and what an algorithm that trains one does."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedstale.agents.policy.features import N_CONTEXT, N_FEATURES
from fedstale.agents.policy.scorer import Weights, initial
from fedstale.errors import ConfigError
from fedstale.strategies.settings import is_count

State = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How an agent is trained."""

    algorithm: Literal["evolution", "ppo"] = "evolution"
    """Evolution strategies on whole windows, or MaskablePPO on single picks."""
    updates: int = 80
    """Generations, or PPO's updates, >= 1."""
    seed: int = 0
    """Of everything drawn."""
    residual: bool = True
    """Whether the heuristic's score is part of the agent's; False learns from scratch."""
    pairs: int = 24
    """Mirrored pairs of agents in a generation, >= 1."""
    windows: int = 12
    """Windows that each agent of a generation plays, or that PPO plays at a time, >= 1."""
    sigma: float = 0.05
    """Size of evolution's changes, > 0."""
    rate: float = 0.06
    """Learning rate at first, > 0; it falls to a tenth."""
    validate_every: int = 10
    """Updates between validations and checkpoints, >= 1."""
    validation_windows: int = 256
    """Windows of a validation, >= 2."""

    def __post_init__(self) -> None:
        counts = ("updates", "pairs", "windows", "validate_every")
        good = {
            "algorithm": self.algorithm in {"evolution", "ppo"},
            **{name: is_count(getattr(self, name)) for name in counts},
            "validation_windows": is_count(self.validation_windows) and self.validation_windows > 1,
            "seed": self.seed >= 0,
            "sigma": 0 < self.sigma < np.inf,
            "rate": 0 < self.rate < np.inf,
        }
        for name, holds in good.items():
            if not holds:
                raise ConfigError(
                    f"training.{name} = {getattr(self, name)!r}: expected 'evolution' or 'ppo', "
                    "counts >= 1 (2 windows to validate on) and sizes > 0; see Training"
                )

    def rate_at(self, update: int) -> float:
        """Return the learning rate, which falls along half a cosine."""
        share = min(update / self.updates, 1.0)
        return self.rate * (0.1 + 0.9 * 0.5 * (1.0 + float(np.cos(np.pi * share))))

    def start_weights(self) -> Weights:
        """Return the weights to begin with: those of the heuristic, or without it from scratch."""
        rng = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(6,)))
        weights = initial(N_FEATURES, N_CONTEXT, rng)
        weights["beta"][:] = float(self.residual)
        return weights


class Learner(ABC):
    """Changes an agent's weights."""

    @abstractmethod
    def update(self) -> dict[str, float]:
        """Learn once, and return metrics of the update."""

    @abstractmethod
    def weights(self) -> Weights:
        """Return the agent as it is now."""

    @abstractmethod
    def state_dict(self) -> State:
        """Return everything that later updates depend on."""

    @abstractmethod
    def load_state_dict(self, state: State) -> None:
        """Continue from what `state_dict` returned."""
