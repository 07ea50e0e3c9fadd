"""Selection tasks that do not change: devices, windows and reward are fixed by a name.

Importing this module registers them with Gymnasium:

    import gymnasium
    import fedstale.agents.tasks

    env = gymnasium.make("fedstale/Selection-phones-v1")
    envs = gymnasium.make_vec("fedstale/Selection-phones-v1", num_envs=64)

Devices are generated from populations that were fitted to recordings, and forecast by the
forecasters that come with fedstale, which have seen none of them. Those of `split="test"` are
others, and its windows are played for a score alone: `TEST_WINDOWS` of seed 0, by `score`. The
reward is the gain of the learning proxy (docs/agent.md), without prices. A task whose windows or
rewards change gets another version.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import numpy.typing as npt

from fedstale.agents.env import (
    Action,
    Episodes,
    EpisodeSettings,
    JobKinds,
    Reward,
    Scenario,
    SelectionEnv,
    VectorSelectionEnv,
    WindowList,
)
from fedstale.errors import ConfigError
from fedstale.traces import DAY_S, Array, TraceSet
from fedstale.traces.forecast import embedded

Split = Literal["train", "test"]
SEEDS = {"train": 1, "test": 2}
"""Of the devices of each split."""
TEST_WINDOWS = 200
"""Windows of seed 0 that a policy is scored on."""
REWARD = Reward(time=0.0, waste=0.0)
"""The gain alone."""

_SETTINGS = EpisodeSettings(devices=(32, 128), over_reporting_share=0.0, inflating_share=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a task is made of."""

    name: str
    """Of the task, in its id."""
    population: str | Path
    """What devices are drawn from, see `TraceSet.synthetic`."""
    forecaster: str
    """Fleet of the embedded forecaster."""
    devices: int
    """Devices of each split."""
    history_days: int
    """Days before the first window, so that devices have a history to forecast from."""
    days: int
    """Days of windows."""
    step_s: float
    """Time from one forecast of a device to its next in s."""
    n_max: int = 64
    """Candidates that are shown."""
    settings: EpisodeSettings = _SETTINGS
    """What windows are drawn from."""

    @property
    def id(self) -> str:
        """What Gymnasium knows it by."""
        return f"fedstale/Selection-{self.name}-v1"


TASKS = {
    task.id: task
    for task in (
        Task(
            name="phones",
            population="phones",
            forecaster="phones",
            devices=300,
            history_days=1,
            days=2,
            step_s=900.0,
        ),
        Task(
            name="cars",
            population=Path(__file__).with_name("cars.toml"),
            forecaster="cars",
            devices=200,
            history_days=7,
            days=7,
            step_s=1800.0,
        ),
        Task(
            name="desktops",
            population="desktops",
            forecaster="desktops",
            devices=200,
            history_days=7,
            days=7,
            step_s=1800.0,
        ),
        Task(
            name="1000",
            population="phones",
            forecaster="phones",
            devices=2_500,
            history_days=1,
            days=1,
            step_s=1800.0,
            n_max=256,
            settings=replace(_SETTINGS, devices=(1_000, 1_000), concurrency_share=(0.02, 0.2)),
        ),
    )
}
"""The tasks by their ids."""


@lru_cache(maxsize=2)
def scenario(task: str, split: Split = "train") -> Scenario:
    """Return where a task takes place; the last two are kept.

    Args:
        task: its id, one of `TASKS`.
        split: whose devices.

    Raises:
        ConfigError: there is no such task or split.
    """
    if task not in TASKS:
        raise ConfigError(f"task = {task!r}: expected one of {', '.join(TASKS)}")
    if split not in SEEDS:
        raise ConfigError(f"split = {split!r}: expected one of {', '.join(SEEDS)}")
    about = TASKS[task]
    days = about.history_days + about.days
    fleets = {
        name: TraceSet.synthetic(
            about.devices, days=days, seed=SEEDS[name], population=about.population
        )
        for name in {"train", split}
    }
    return Scenario.of(
        fleets[split],
        forecaster=embedded(about.forecaster),
        # Both splits have the same jobs.
        kinds=JobKinds.of_fleet(fleets["train"]),
        start=about.history_days * DAY_S,
        end=(about.history_days + about.days) * DAY_S,
        settings=about.settings,
        step_s=about.step_s,
    )


def make(
    task: str, *, split: Split = "train", baseline: bool = False, **options: Any
) -> SelectionEnv:
    """Return the environment of a task; `gymnasium.make` calls it.

    Args:
        task: its id.
        split: "train", or "test", which a policy is only scored on.
        baseline: whether to subtract from each reward what the highest scores of the balanced rule
            earn in the window, which makes learning easier and changes no order of policies.
        options: further ones of `SelectionEnv`, such as `action`.
    """
    place = scenario(task, split)
    return SelectionEnv(place, n_max=TASKS[task].n_max, baseline=baseline, reward=REWARD, **options)


def make_vec(
    task: str, num_envs: int = 1, *, split: Split = "train", baseline: bool = False, **options: Any
) -> VectorSelectionEnv:
    """Return many episodes of a task at once; `gymnasium.make_vec` calls it.

    Args:
        task: its id.
        num_envs: episodes at a time.
        split: as in `make`, as what follows.
        baseline: whether to subtract what the heuristic earns.
        options: further ones of `VectorSelectionEnv`, such as `rollouts`.
    """
    return VectorSelectionEnv(
        scenario(task, split),
        num_envs,
        n_max=TASKS[task].n_max,
        baseline=baseline,
        reward=REWARD,
        **options,
    )


def score(
    task: str,
    policy: Callable[[dict[str, npt.NDArray[np.float32]]], npt.NDArray[Any]],
    *,
    action: Action = "scores",
    windows: int = TEST_WINDOWS,
) -> Array:
    """Sum a policy's rewards in each test window; their mean is the score of the task.

    Args:
        task: its id.
        policy: from observations of b choices, as of `VectorSelectionEnv`, to actions (b, n_max).
        action: what its actions are.
        windows: how many; the first of the test windows, if not all.

    Returns:
        Sums of rewards; shape (windows,).
    """
    envs = make_vec(task, windows, split="test", action=action, rollouts=1)
    observation, _ = envs.reset(seed=0)
    earned, over = np.zeros(windows), np.zeros(windows, dtype=bool)
    while not over.all():
        observation, rewards, ended, _, _ = envs.step(policy(observation))
        earned += rewards
        over |= ended
    return earned


def held_out(task: str, windows: int = TEST_WINDOWS) -> Episodes:
    """Return the test windows as episodes, for policies that play without an environment."""
    place = scenario(task, "test")
    listed = WindowList(place, ahead=windows, reward=REWARD, baseline=False)
    return listed.take(windows).episodes


for _id in TASKS:
    gymnasium.register(
        _id,
        entry_point="fedstale.agents.tasks:make",
        vector_entry_point="fedstale.agents.tasks:make_vec",
        kwargs={"task": _id},
    )
