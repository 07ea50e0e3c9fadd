"""Train an agent: update after update, watched on other devices, and never lost to a crash.

After every few updates the agent plays a fixed set of windows on devices that it does not learn
from, as it would be deployed, against the heuristic on the same windows. The best so far is what
training ends with. A checkpoint is one file that is replaced at once, so a killed training goes on
from the last one.
"""

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from fedstale.agents.env.episodes import Episodes
from fedstale.agents.env.scenario import Stage
from fedstale.agents.env.simulator import Reward
from fedstale.agents.policy.features import N_CONTEXT, N_FEATURES, SCHEMA
from fedstale.agents.policy.files import Agent, save
from fedstale.agents.policy.scorer import Weights, initial, shapes
from fedstale.agents.training.windows import by_agent, rewards
from fedstale.errors import ConfigError, ResumeError
from fedstale.strategies.settings import is_count
from fedstale.traces.io.atomic import replacing

State = dict[str, npt.NDArray[Any]]

CHECKPOINT, PROGRESS = "training.safetensors", "progress.jsonl"
_AT_A_TIME = 256


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
        good = {
            "algorithm": self.algorithm in {"evolution", "ppo"},
            **{
                name: is_count(getattr(self, name))
                for name in ("updates", "pairs", "windows", "validate_every")
            },
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


class Learner(ABC):
    """Changes an agent's weights."""

    @abstractmethod
    def update(self) -> dict[str, float]:
        """Learn once, and return numbers worth watching."""

    @abstractmethod
    def weights(self) -> Weights:
        """Return the agent as it is now."""

    @abstractmethod
    def state_dict(self) -> State:
        """Return everything that later updates depend on."""

    @abstractmethod
    def load_state_dict(self, state: State) -> None:
        """Continue from what `state_dict` returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a training is."""

    update: int
    """Updates made."""
    updates: int
    """Updates to make."""
    left_s: float
    """Expected time to the end in s, NaN before the first update."""
    numbers: Mapping[str, float]
    """What the last update, or the validation after it, has measured."""


Watch = Callable[[Progress], None]


def start_weights(training: Training) -> Weights:
    """Return the weights that training begins with: the heuristic, or nothing."""
    rng = np.random.default_rng(np.random.SeedSequence(training.seed, spawn_key=(6,)))
    weights = initial(N_FEATURES, N_CONTEXT, rng)
    if not training.residual:
        weights["beta"][:] = 0.0
    return weights


def train(
    stage: Stage,
    validation: Stage,
    training: Training,
    folder: str | Path,
    *,
    reward: Reward | None = None,
    provenance: dict[str, Any] | None = None,
    resume: bool = False,
    watch: Watch | None = None,
) -> Agent:
    """Train an agent and write it.

    Args:
        stage: to learn on.
        validation: to watch the learning on; other devices.
        training: how.
        folder: for agent.toml and agent.safetensors, progress.jsonl, and while it goes on the
            checkpoint.
        reward: prices; the defaults if None.
        provenance: what the agent's description is to say besides the settings.
        resume: go on from the checkpoint, if there is one.
        watch: is told after every update.

    Returns:
        The agent that was best in validation.

    Raises:
        ConfigError: the folder holds an agent already, and `resume` is not set.
        ResumeError: the checkpoint belongs to another training, or is damaged.
    """
    folder, reward = Path(folder), reward or Reward()
    if not resume and (folder / "agent.toml").exists():
        raise ConfigError(f"{folder}: holds an agent; expected a new folder, or --resume")
    folder.mkdir(parents=True, exist_ok=True)
    learner = _learner(stage, training, reward)
    judge = Judge(validation, training, reward)
    done, best = 0, Best(value=-np.inf, weights=learner.weights(), update=0)
    belongs = {**asdict(training), "schema": SCHEMA["version"], "stage": _fingerprint(stage)}
    if resume and (folder / CHECKPOINT).exists():
        done, best = _read(folder / CHECKPOINT, belongs, learner)
    _cut(folder / PROGRESS, done)
    begin, before = time.monotonic(), done
    while done < training.updates:
        numbers = learner.update()
        done += 1
        if done % training.validate_every == 0 or done == training.updates:
            numbers |= judge(learner.weights())
            if numbers["validation"] > best.value:
                best = Best(value=numbers["validation"], weights=learner.weights(), update=done)
            _add(folder / PROGRESS, {"update": done, **numbers})
            _write(folder / CHECKPOINT, belongs, learner, done, best)
        else:
            _add(folder / PROGRESS, {"update": done, **numbers})
        if watch is not None:
            left = (time.monotonic() - begin) / (done - before) * (training.updates - done)
            watch(Progress(update=done, updates=training.updates, left_s=left, numbers=numbers))
    agent = Agent(
        weights=best.weights,
        provenance={
            **(provenance or {}),
            "training": asdict(training),
            "reward": asdict(reward),
            "best_update": best.update,
            "validation": round(float(best.value), 4),
        },
    )
    save(agent, folder)
    return agent


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Best:
    """The best agent so far."""

    value: float
    """Its advantage over the heuristic in validation."""
    weights: Weights
    """Its weights."""
    update: int
    """When it was."""


class Judge:
    """Plays fixed windows with an agent, and compares with the heuristic.

    Args:
        stage: of devices that the agent does not learn from.
        training: how many windows, and the seed of their draw.
        reward: prices.
    """

    def __init__(self, stage: Stage, training: Training, reward: Reward) -> None:
        rng = np.random.default_rng(np.random.SeedSequence(training.seed, spawn_key=(7,)))
        n = training.validation_windows
        self._parts = [stage.draw(min(_AT_A_TIME, n - i), rng) for i in range(0, n, _AT_A_TIME)]
        self._world, self._reward = stage.world(min(_AT_A_TIME, n)), reward
        self._heuristic = self._played(initial(N_FEATURES, N_CONTEXT, np.random.default_rng(0)))

    def __call__(self, weights: Weights) -> dict[str, float]:
        """Return the mean advantage over the heuristic, its standard error and its terms."""
        played = self._played(weights)
        more = {name: played[name] - self._heuristic[name] for name in played}
        advantage = more.pop("reward")
        return {
            "validation": float(advantage.mean()),
            "validation_error": float(advantage.std(ddof=1) / np.sqrt(advantage.size)),
            **{f"validation_{name}": float(values.mean()) for name, values in more.items()},
        }

    def _played(self, weights: Weights) -> dict[str, npt.NDArray[np.float64]]:
        parts = [self._part(episodes, weights) for episodes in self._parts]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _part(self, episodes: Episodes, weights: Weights) -> dict[str, npt.NDArray[np.float64]]:
        return rewards(self._world, episodes, by_agent(weights), self._reward)


def _learner(stage: Stage, training: Training, reward: Reward) -> Learner:
    if training.algorithm == "evolution":
        from fedstale.agents.training.evolution import EvolutionLearner  # noqa: PLC0415 - a cycle

        return EvolutionLearner(stage, training, reward)
    # Stable-Baselines3 and torch are loaded only where they are used.
    from fedstale.agents.training.ppo import PPOLearner  # noqa: PLC0415

    return PPOLearner(stage, training, reward)


def _fingerprint(stage: Stage) -> str:
    """Return what tells a stage from others: its devices, hours, jobs and settings, hashed."""
    digest = hashlib.sha256(repr((stage.start, stage.end, stage.settings)).encode())
    digest.update("\n".join(map(str, stage.traces.device_ids[stage.devices])).encode())
    for array in (stage.kinds.work, stage.kinds.n_bytes, stage.kinds.ttl_s):
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]


def _write(path: Path, belongs: dict[str, Any], learner: Learner, done: int, best: Best) -> None:
    state = {f"learner.{k}": np.ascontiguousarray(v) for k, v in learner.state_dict().items()}
    state |= {f"best.{k}": v for k, v in best.weights.items()}
    about = {"belongs": belongs, "done": done, "value": best.value, "update": best.update}
    with replacing(path) as file:
        file.write(safetensors.numpy.save(state, metadata={"about": json.dumps(about)}))


def _read(path: Path, belongs: dict[str, Any], learner: Learner) -> tuple[int, Best]:
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            about = json.loads((file.metadata() or {})["about"])
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name, value in belongs.items():
            if about["belongs"].get(name) != value:
                raise ResumeError(
                    f"{path}: {name} was {about['belongs'].get(name)!r} and is {value!r}; go on "
                    "with the settings of before, or train into a new folder"
                )
        learner.load_state_dict(
            {k.removeprefix("learner."): v for k, v in state.items() if k.startswith("learner.")}
        )
        weights = {name: state[f"best.{name}"] for name in shapes(N_FEATURES, N_CONTEXT)}
        best = Best(value=about["value"], weights=weights, update=about["update"])
        return int(about["done"]), best
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as problem:
        raise ResumeError(f"{path}: damaged ({problem!r}); train into a new folder") from None


def _add(path: Path, numbers: Mapping[str, float]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({k: round(float(v), 6) for k, v in numbers.items()}) + "\n")


def _cut(path: Path, done: int) -> None:
    """Keep only what was written up to the checkpoint: the rest is going to be made again."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    path.write_text("".join(f"{line}\n" for line in lines[:done]), encoding="utf-8")


__all__ = ["Best", "Judge", "Learner", "Progress", "Training", "start_weights", "train"]
