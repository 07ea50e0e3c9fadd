"""Runs the simulations of a comparison in processes of their own, and goes on where it stopped.

Each run is an ordinary run folder. A run whose folder holds its end is not repeated, one that was
interrupted or killed goes on from its last checkpoint, one that failed begins anew. Traces that
several runs need are read once, and their arrays are in the memory of the machine once.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstale import trace_spec
from fedstale.compare.folders import State, Task, state
from fedstale.errors import ConfigError, FedstaleError
from fedstale.parallel import Say, WorkerPool

if TYPE_CHECKING:
    from fedstale.traces import TraceSet
    from fedstale.traces.io.mapped import Shared

_SAY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended that did not come to its end."""

    task: Task
    reason: str


Watch = Callable[[dict[Path, float]], None]
"""Called with the share of each run that is over, by folder, whenever one has moved."""


def run(
    tasks: Sequence[Task], *, workers: int, log: Path, overwrite: bool = False, watch: Watch
) -> list[Ending]:
    """Run what is not done yet.

    Args:
        tasks: the runs.
        workers: processes at a time.
        log: file that gets what runs print.
        overwrite: whether finished and unfinished runs are begun anew.
        watch: is told how far the runs are.

    Returns:
        The runs that failed, in the order of the tasks; all others are done.

    Raises:
        ConfigError: a folder holds another run, or a run cannot begin; the others keep what they
            have done.
        KeyboardInterrupt: it was asked to stop; the runs keep what they have done.
    """
    states = {task.folder: "failed" if overwrite else state(task) for task in tasks}
    todo = deque(task for task in tasks if states[task.folder] != "done")
    shares = {task.folder: float(states[task.folder] == "done") for task in tasks}
    watch(shares)
    failed: dict[Path, Ending] = {}
    with _Traces(todo, log.parent) as traces, WorkerPool(_simulated, log) as crew:
        while todo or crew.n_busy:
            while todo and crew.n_busy < workers:
                task = todo.popleft()
                crew.give(_Run(task=task, begun=states[task.folder], traces=traces.of(task)))
            for given, news, what in crew.heard():
                task = given.task
                if news == "rejected":
                    raise _refused(task, what)
                if news == "died" or (news == "done" and what):
                    reason = " ".join(what.split())
                    failed[task.folder] = Ending(task=task, reason=reason)
                shares[task.folder] = what if news == "said" else 1.0
            watch(shares)
    return [failed[task.folder] for task in tasks if task.folder in failed]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What a process is given."""

    task: Task
    begun: State
    traces: "Shared[TraceSet] | None"
    """None if it reads them itself."""


class _Traces:
    """Traces that more than one run needs, in files that all processes map into their memory."""

    def __init__(self, tasks: Iterable[Task], folder: Path) -> None:
        self._uses = Counter(_traces_of(task) for task in tasks)
        self._folder = folder
        self._shared: dict[tuple[str, int], Shared[TraceSet]] = {}

    def of(self, task: Task) -> "Shared[TraceSet] | None":
        """Return the traces of a run; None if it is the only one that needs them.

        Raises:
            ConfigError: they cannot be read.
        """
        key = _traces_of(task)
        if self._uses[key] == 1:
            return None
        if key not in self._shared:
            from fedstale.traces.io.mapped import share  # noqa: PLC0415 - imports what reads traces

            path = self._folder / f".traces-{len(self._shared)}"
            try:
                traces = trace_spec.load(task.config.traces, seed=task.seed)
                self._shared[key] = share(traces, path)
            except (FedstaleError, OSError) as problem:
                raise _refused(task, problem) from None
        return self._shared[key]

    def __enter__(self) -> "_Traces":
        return self

    def __exit__(self, *problem: object) -> None:
        """Delete the files; processes that have mapped them keep what they have."""
        for shared in self._shared.values():
            shared.path.unlink(missing_ok=True)


def _traces_of(task: Task) -> tuple[str, int]:
    """Return what decides which traces a run sees: recordings do not depend on its seed."""
    return task.config.traces, task.seed if trace_spec.is_generated(task.config.traces) else 0


def _refused(task: Task, problem: object) -> ConfigError:
    return ConfigError(f"variant {task.variant!r}, seed {task.seed}: {problem}")


def _simulated(run: _Run, say: Say) -> str:
    """Simulate, in a process of its own, and return why the run failed if it did."""
    # Not before the signals are set.
    from fedstale.simulation.progress import Progress  # noqa: PLC0415
    from fedstale.simulation.run import simulate  # noqa: PLC0415
    from fedstale.simulation.trace_grid import TraceGrid  # noqa: PLC0415

    logging.getLogger("flwr").setLevel(logging.ERROR)
    said_at, task, traces = 0.0, run.task, run.traces

    def watch(grid: TraceGrid, progress: Progress) -> None:
        nonlocal said_at
        now = time.perf_counter()
        if now - said_at >= _SAY_S:
            said_at = now
            say(_share(grid.now(), progress))

    result = simulate(
        task.config,
        task.folder,
        traces=traces.open() if traces else trace_spec.load(task.config.traces, seed=task.seed),
        overwrite=run.begun == "failed",
        resume=run.begun == "half",
        watch=watch,
    )
    if result.status == "interrupted":
        raise KeyboardInterrupt
    return (result.reason or "it failed") if result.status == "failed" else ""


def _share(now: float, progress: Any) -> float:  # noqa: ANN401 - heavy to import here
    until = progress.until
    if until.rounds is not None:
        return min(progress.rounds / until.rounds, 1.0) if until.rounds else 1.0
    return float(min(now / until.time_s, 1.0))
