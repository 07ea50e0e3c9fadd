"""Train an agent: update after update, validated on other devices, with checkpoints.

After every few updates the agent plays a fixed set of windows on devices that it does not learn
from, as it would be deployed, against the heuristic on the same windows. The best agent so far is
the result of the training. A checkpoint is one file that is replaced at once, so a killed training
resumes from the last one.

How an agent changes its weights is in `fedstale.agents.policy_gradient`.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstale.agents.env import (
    TERMS,
    Reward,
    Scenario,
    as_scenarios,
    fitted,
    rollout,
    training_picks_of,
)
from fedstale.agents.policy import (
    SCHEMA,
    Agent,
    Score,
    Weights,
    by_agent,
    by_heuristic,
    digest,
    initial,
    save,
)
from fedstale.errors import ConfigError, ResumeError
from fedstale.strategies.server import read_checkpoint, write_checkpoint
from fedstale.strategies.types import is_count
from fedstale.traces import Array, stream

if TYPE_CHECKING:
    from fedstale.agents.policy_gradient import PolicyGradient

CHECKPOINT, PROGRESS = "training.safetensors", "progress.jsonl"
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
    """Updates between validations and checkpoints, >= 1."""
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
    resume: bool = False,
    watch: Watch | None = None,
) -> Agent:
    """Train an agent and write it.

    Args:
        scenarios: to learn on; every update plays as many windows of each.
        validation: to compare agents on, with windows of each; other devices.
        training: how.
        folder: for agent.toml and agent.safetensors, progress.jsonl, and the checkpoint.
        reward: prices; the defaults if None.
        start: agent to go on from; the balanced rule if None.
        provenance: what the agent's description is to say besides the settings.
        resume: continue from the checkpoint, if there is one.
        watch: is told after every update.

    Returns:
        The agent that was best in validation.

    Raises:
        ConfigError: the folder holds an agent already, and `resume` is not set; or scenarios differ
            in rounds.
        ResumeError: the checkpoint belongs to another training, or is damaged.
    """
    folder, reward = Path(folder), reward or Reward()
    if not resume and (folder / "agent.toml").exists():
        raise ConfigError(f"{folder}: holds an agent; expected a new folder, or --resume")
    folder.mkdir(parents=True, exist_ok=True)
    # Stable-Baselines3 and torch are loaded only where they are used.
    from fedstale.agents.policy_gradient import PolicyGradient  # noqa: PLC0415

    grounds, held_out = as_scenarios(scenarios), as_scenarios(validation)
    learner = PolicyGradient(grounds, training, reward, None if start is None else start.weights)
    validate = _Validation(held_out, training, reward)
    done, best = 0, _Best(value=-np.inf, weights=learner.weights(), update=0)
    belongs = {**asdict(training), "schema": SCHEMA["version"], "scenarios": _fingerprint(grounds)}
    belongs["start"] = digest(learner.weights())
    if resume and (folder / CHECKPOINT).exists():
        done, best = _resumed(folder / CHECKPOINT, belongs, learner)
    # Later updates than the checkpoint's are made again.
    path = folder / PROGRESS
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    path.write_text("".join(lines[:done]), encoding="utf-8")
    while done < training.updates:
        metrics = learner.update()
        done += 1
        validated = done % training.validate_every == 0 or done == training.updates
        if validated:
            metrics |= validate(learner.weights())
            if metrics["validation"] > best.value:
                best = _Best(value=metrics["validation"], weights=learner.weights(), update=done)
        with path.open("a", encoding="utf-8") as file:
            rounded = {k: round(float(v), 6) for k, v in metrics.items()}
            file.write(json.dumps({"update": done, **rounded}) + "\n")
        if validated:
            state = {"belongs": belongs, "done": done, "best": asdict(best)}
            write_checkpoint(folder / CHECKPOINT, {**state, "learner": learner.state_dict()})
        if watch is not None:
            seed, updates = training.seed, training.updates
            watch(TrainingProgress(seed=seed, update=done, updates=updates, metrics=metrics))
    agent = Agent(
        weights=best.weights,
        provenance={
            **(provenance or {}),
            "training": asdict(training),
            "reward": asdict(reward),
            **({} if start is None else {"from": digest(start.weights)}),
            "best_update": best.update,
            "validation": round(float(best.value), 4),
        },
    )
    save(agent, folder)
    return agent


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Best:
    """The best agent so far."""

    value: float
    """Its advantage over the heuristic in validation."""
    weights: Weights
    """Its weights."""
    update: int
    """The update after which it was validated."""


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


def _fingerprint(scenarios: Sequence[Scenario]) -> str:
    """Return a hash of what tells scenarios apart: devices, hours, jobs, settings, learning."""
    digest = hashlib.sha256()
    for scenario in scenarios:
        digest.update(repr((scenario.start, scenario.end, scenario.settings)).encode())
        digest.update("\n".join(map(str, scenario.traces.device_ids[scenario.devices])).encode())
        if scenario.proxy != fitted():
            digest.update(repr(scenario.proxy).encode())
        for array in (scenario.kinds.work, scenario.kinds.n_bytes, scenario.kinds.ttl_s):
            digest.update(array.tobytes())
    return digest.hexdigest()[:16]


def _resumed(path: Path, belongs: dict[str, Any], learner: "PolicyGradient") -> tuple[int, _Best]:
    """Restore a learner from a checkpoint; return the updates made and the best agent."""
    state = read_checkpoint(path)
    for name, value in belongs.items():
        before = state["belongs"].get(name)
        if before != value:
            raise ResumeError(
                f"{path}: {name} was {before!r} and is {value!r}; go on with the settings of "
                "before, or train into a new folder"
            )
    learner.load_state_dict(state["learner"])
    return state["done"], _Best(**state["best"])
