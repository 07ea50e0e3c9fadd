"""Train an agent: update after update, validated on other devices.

After every few updates the agent plays a fixed set of windows on devices that it does not learn
from, as it would be deployed, against the heuristic on the same windows. The best agent so far is
the result of the training.

How an agent changes its weights is in `fedstale.agents.policy_gradient`.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedstale.agents.env import TERMS, Reward, Scenario, as_scenarios, rollout, training_picks_of
from fedstale.agents.policy import (
    Agent,
    Score,
    Weights,
    by_agent,
    by_heuristic,
    digest,
    initial,
    save,
)
from fedstale.errors import ConfigError
from fedstale.strategies.types import is_count
from fedstale.traces import Array, stream

PROGRESS = "progress.jsonl"
_AT_A_TIME = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How an agent is trained."""

    updates: int = 60
    """Updates of the policy gradient, >= 1."""
    seed: int = 0
    """Of everything drawn."""
    residual: bool = True
    """Whether the heuristic's score is part of the agent's; False learns from scratch."""
    windows: int = 12
    """New windows of each update in each scenario, >= 1."""
    rate: float = 0.01
    """Learning rate at first, > 0; it falls to a tenth."""
    validate_every: int = 10
    """Updates between validations, >= 1."""
    validation_windows: int = 256
    """Windows of a validation in each scenario, >= 2."""

    def __post_init__(self) -> None:
        counts = ("updates", "windows", "validate_every")
        good = {
            **{name: is_count(getattr(self, name)) for name in counts},
            "validation_windows": is_count(self.validation_windows) and self.validation_windows > 1,
            "seed": self.seed >= 0,
            "rate": 0 < self.rate < np.inf,
        }
        for name, holds in good.items():
            if not holds:
                raise ConfigError(
                    f"training.{name} = {getattr(self, name)!r}: expected counts >= 1 (2 "
                    "windows to validate on), a seed >= 0 and a rate > 0; see Training"
                )

    def rate_at(self, update: int) -> float:
        """Return the learning rate, which falls along half a cosine."""
        share = min(update / self.updates, 1.0)
        return self.rate * (0.1 + 0.9 * 0.5 * (1.0 + float(np.cos(np.pi * share))))

    def start_weights(self) -> Weights:
        """Return the weights to begin with: those of the heuristic, or without it from scratch."""
        weights = initial(stream(self.seed, 6))
        weights["beta"][:] = float(self.residual)
        return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProgress:
    """How far a training is."""

    seed: int
    """Of the training."""
    update: int
    """Updates made."""
    updates: int
    """Updates to make."""
    metrics: Mapping[str, float]
    """Of the last update, and of the validation after it if there was one."""


Watch = Callable[[TrainingProgress], None]
"""Called after every update."""


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread, as in processes: on several it is slower and rounds otherwise."""
    import torch  # noqa: PLC0415 - whoever only picks has none

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def train(
    scenarios: Scenario | Sequence[Scenario],
    validation: Scenario | Sequence[Scenario],
    training: Training,
    folder: str | Path,
    *,
    reward: Reward | None = None,
    start: Agent | None = None,
    provenance: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
) -> Agent:
    """Train an agent and write it.

    Args:
        scenarios: to learn on; every update plays as many windows of each.
        validation: to compare agents on, with windows of each; other devices.
        training: how.
        folder: for agent.toml, agent.safetensors and progress.jsonl.
        reward: prices; the defaults if None.
        start: agent to go on from; the balanced rule if None.
        provenance: what the agent's description is to say besides the settings.
        watch: is told after every update.

    Returns:
        The agent that was best in validation.

    Raises:
        ConfigError: the folder holds an agent already, or scenarios differ in rounds.
    """
    folder, reward = Path(folder), reward or Reward()
    if (folder / "agent.toml").exists():
        raise ConfigError(f"{folder}: holds an agent; expected a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    # Stable-Baselines3 and torch are loaded only where they are used.
    from fedstale.agents.policy_gradient import PolicyGradient  # noqa: PLC0415

    grounds, held_out = as_scenarios(scenarios), as_scenarios(validation)
    learner = PolicyGradient(grounds, training, reward, None if start is None else start.weights)
    validate = _Validation(held_out, training, reward)
    best = dict.fromkeys(("validation", "validation_error"), -np.inf)
    weights, best_update = learner.weights(), 0
    (folder / PROGRESS).write_text("", encoding="utf-8")
    for done in range(1, training.updates + 1):
        metrics = learner.update()
        if done % training.validate_every == 0 or done == training.updates:
            found = validate(learner.weights())
            metrics |= found
            if found["validation"] > best["validation"]:
                best, weights, best_update = found, learner.weights(), done
        with (folder / PROGRESS).open("a", encoding="utf-8") as file:
            rounded = {k: round(float(v), 6) for k, v in metrics.items()}
            file.write(json.dumps({"update": done, **rounded}) + "\n")
        if watch is not None:
            seed, updates = training.seed, training.updates
            watch(TrainingProgress(seed=seed, update=done, updates=updates, metrics=metrics))
    agent = Agent(
        weights=weights,
        provenance={
            **(provenance or {}),
            "training": asdict(training),
            "reward": asdict(reward),
            **({} if start is None else {"from": digest(start.weights)}),
            "best_update": best_update,
            **{name: round(best[name], 4) for name in ("validation", "validation_error")},
        },
    )
    save(agent, folder)
    return agent


class _Validation:
    """Fixed windows that an agent plays, and the heuristic's rewards on them.

    Args:
        scenarios: of devices that the agent does not learn from.
        training: how many windows of each, and the seed of their draw.
        reward: prices.
    """

    def __init__(self, scenarios: Sequence[Scenario], training: Training, reward: Reward) -> None:
        rng, n = stream(training.seed, 7), training.validation_windows
        sizes = [min(_AT_A_TIME, n - i) for i in range(0, n, _AT_A_TIME)]
        places = [(scenario, scenario.simulator(sizes[0])) for scenario in scenarios]
        self._parts = [
            (simulator, scenario.draw(size, rng))
            for scenario, simulator in places
            for size in sizes
        ]
        self._reward, self._seed = reward, training.seed
        self._heuristic = self._terms(by_heuristic)

    def __call__(self, weights: Weights) -> dict[str, float]:
        """Return the mean advantage over the heuristic, its standard error and its terms."""
        terms = self._terms(by_agent(weights))
        more = {name: values - self._heuristic[name] for name, values in terms.items()}
        advantage = more.pop("reward")
        return {
            "validation": float(advantage.mean()),
            "validation_error": float(advantage.std(ddof=1) / np.sqrt(advantage.size)),
            **{f"validation_{name}": float(values.mean()) for name, values in more.items()},
        }

    def _terms(self, score: Score) -> dict[str, Array]:
        # Agents are compared by the same draws.
        rng = stream(self._seed, 10)
        played = [
            rollout(simulator, part, training_picks_of(simulator, score, rng), self._reward).terms
            for simulator, part in self._parts
        ]
        return {name: np.concatenate([terms[name] for terms in played]) for name in TERMS}
