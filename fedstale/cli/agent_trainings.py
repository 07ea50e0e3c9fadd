"""Several trainings of an agent, one for each seed: in processes of their own, or one by one.

Processes map one copy of the traces and of the devices' forecasts into their memory. What a
training gives does not depend on where it ran.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedstale.agents.env.scenario import Stages
from fedstale.agents.policy import files as export
from fedstale.agents.policy.files import Agent
from fedstale.agents.training.train import Progress, Training, train
from fedstale.errors import FedstaleError
from fedstale.parallel import Report, WorkerPool
from fedstale.traces.io.mapped import Shared, share

LOG = "log.txt"

Watch = Callable[[int, Progress], None]
"""Called with the seed of a training and how far it is, after every update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One training."""

    training: Training
    folder: Path
    """Where the agent goes."""
    provenance: Mapping[str, Any]
    resume: bool
    """Whether to go on where an interrupted training was."""


def train_all(
    tasks: Sequence[Task], stages: Stages, *, workers: int, out: Path, watch: Watch
) -> list[Agent]:
    """Train agents, and return them in the order of their tasks.

    Args:
        tasks: the trainings, each with a seed and a folder of its own.
        stages: where all of them learn and are watched.
        workers: processes at a time; with one, or one task, all is done in this process.
        out: folder for what processes print and, meanwhile, for what they share.
        watch: is told how far they are.

    Raises:
        FedstaleError: a folder holds an agent already and is not to be gone on with, a checkpoint
            belongs to another training or is damaged, or a process died.
    """
    if min(workers, len(tasks)) == 1:
        for task in tasks:
            _train(task, stages, partial(watch, task.training.seed))
    else:
        out.mkdir(parents=True, exist_ok=True)
        shared = share(stages, out / ".stages")
        try:
            _train_in_processes(tasks, shared, workers=workers, log=out / LOG, watch=watch)
        finally:
            shared.path.unlink()
    return [export.load(task.folder) for task in tasks]


def _train_in_processes(
    tasks: Sequence[Task], stages: Shared[Stages], *, workers: int, log: Path, watch: Watch
) -> None:
    todo = deque(tasks)
    with WorkerPool(_trained, log) as pool:
        while todo or pool.n_busy:
            while todo and pool.n_busy < workers:
                pool.submit((todo.popleft(), stages))
            for (task, _), news, what in pool.events():
                if news == "progress":
                    watch(task.training.seed, what)
                elif news != "done":
                    raise FedstaleError(f"seed {task.training.seed}: {what}")


def _trained(given: tuple[Task, Shared[Stages]], report: Report) -> None:
    task, stages = given
    _train(task, stages.open(), report)


def _train(task: Task, stages: Stages, watch: Callable[[Progress], None]) -> None:
    train(
        stages.training,
        stages.validation,
        task.training,
        task.folder,
        provenance=dict(task.provenance),
        resume=task.resume,
        watch=watch,
    )
