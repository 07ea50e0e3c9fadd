"""Runs the simulations of a comparison in processes of their own, and goes on where it stopped.

Each run is an ordinary run folder. A run whose folder holds its end is not repeated, one that was
interrupted or killed goes on from its last checkpoint, one that failed begins anew. Every process
computes with one thread: sums of floats depend on the number of threads, and so would results.
Traces that several runs need are read once, and their arrays are in the memory of the machine once.
"""

import logging
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from fedstale import trace_spec
from fedstale.compare.folders import State, Task, state
from fedstale.errors import ConfigError, FedstaleError

if TYPE_CHECKING:
    from fedstale.traces.sharing import SharedTraces

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_SAY_S = 0.5
_STOP_S = 30.0


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
    crew, traces = _Crew(log), _Traces(todo, log.parent)
    try:
        while todo or crew.busy:
            while todo and len(crew.busy) < workers:
                crew.give(todo[0], states[todo[0].folder], traces.of(todo[0]))
                todo.popleft()
            for task, kind, what in crew.heard():
                if kind == "refused":
                    raise _refused(task, what)
                if kind == "failed":
                    reason = " ".join(str(what).split())
                    failed[task.folder] = Ending(task=task, reason=reason)
                shares[task.folder] = float(what) if kind == "share" else 1.0
            watch(shares)
    finally:
        crew.stop()
        traces.remove()
    return [failed[task.folder] for task in tasks if task.folder in failed]


class _Traces:
    """Traces that more than one run needs, in files that all processes map into their memory."""

    def __init__(self, tasks: Iterable[Task], folder: Path) -> None:
        self._uses = Counter(_traces_of(task) for task in tasks)
        self._folder = folder
        self._shared: dict[tuple[str, int], SharedTraces] = {}

    def of(self, task: Task) -> "SharedTraces | None":
        """Return the traces of a run; None if it is the only one that needs them.

        Raises:
            ConfigError: they cannot be read.
        """
        key = _traces_of(task)
        if self._uses[key] == 1:
            return None
        if key not in self._shared:
            from fedstale.traces.sharing import share  # noqa: PLC0415 - imports what reads traces

            path = self._folder / f".traces-{len(self._shared)}"
            try:
                traces = trace_spec.load(task.config.traces, seed=task.seed)
                self._shared[key] = share(traces, path)
            except (FedstaleError, OSError) as problem:
                raise _refused(task, problem) from None
        return self._shared[key]

    def remove(self) -> None:
        """Delete the files; processes that have mapped them keep what they have."""
        for shared in self._shared.values():
            shared.path.unlink(missing_ok=True)


def _traces_of(task: Task) -> tuple[str, int]:
    """Return what decides which traces a run sees: recordings do not depend on its seed."""
    return task.config.traces, task.seed if trace_spec.is_generated(task.config.traces) else 0


def _refused(task: Task, problem: object) -> ConfigError:
    return ConfigError(f"variant {task.variant!r}, seed {task.seed}: {problem}")


class _Crew:
    """Processes that wait for runs; each has a pipe of its own, so one that dies is noticed."""

    def __init__(self, log: Path) -> None:
        self.busy: dict[Connection, tuple[BaseProcess, Task]] = {}
        self._idle: list[tuple[Connection, BaseProcess]] = []
        self._log = log

    def give(self, task: Task, begun: str, traces: "SharedTraces | None") -> None:
        """Let a process take a run, a new one if all are busy."""
        ours, process = self._idle.pop() if self._idle else self._started()
        self.busy[ours] = (process, task)
        ours.send((task, begun, traces))

    def heard(self) -> Iterator[tuple[Task, str, Any]]:
        """Yield what processes say, as soon as one says something or after a moment."""
        for found in wait(list(self.busy), timeout=_SAY_S):
            assert isinstance(found, Connection)
            process, task = self.busy[found]
            try:
                kind, what = found.recv()
            except (EOFError, OSError):
                process.join(_STOP_S)
                kind = "failed"
                what = f"its process ended with code {process.exitcode}; {self._log} may say why"
                found.close()
                del self.busy[found]
            else:
                if kind != "share":
                    del self.busy[found]
                    self._idle.append((found, process))
            yield task, kind, what

    def stop(self) -> None:
        """Let busy processes write down what they have, and end all of them."""
        for process, _ in self.busy.values():
            process.terminate()
        for connection, _ in self._idle:
            connection.close()
        everyone = [p for p, _ in self.busy.values()] + [p for _, p in self._idle]
        try:
            for process in everyone:
                process.join(_STOP_S)
        finally:
            for process in everyone:
                if process.is_alive():
                    process.kill()

    def _started(self) -> tuple[Connection, BaseProcess]:
        ours, theirs = multiprocessing.Pipe()
        # A forked process would share torch's threads and Flower's state with this one.
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_work, args=(theirs, self._log), daemon=False)
        with _one_thread_each():
            process.start()
        theirs.close()
        return ours, process


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Let processes that are started meanwhile compute with one thread."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _work(parent: Connection, log: Path) -> None:
    """Do runs until nobody gives any."""
    # Ctrl-C reaches every process of a terminal; the first one decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _interrupt)
    _write_to(log)
    import pyarrow as pa  # noqa: PLC0415 - not before the signals are set

    pa.set_cpu_count(1)
    try:
        while True:
            task, begun, traces = parent.recv()
            parent.send(_ran(task, begun, traces, parent))
    except (EOFError, OSError, KeyboardInterrupt):
        return


def _ran(
    task: Task, begun: State, traces: "SharedTraces | None", parent: Connection
) -> tuple[str, str]:
    # Not before the signals are set.
    from fedstale.simulation.progress import Progress  # noqa: PLC0415
    from fedstale.simulation.run import simulate  # noqa: PLC0415
    from fedstale.simulation.trace_grid import TraceGrid  # noqa: PLC0415

    logging.getLogger("flwr").setLevel(logging.ERROR)
    said_at = 0.0

    def say(grid: TraceGrid, progress: Progress) -> None:
        nonlocal said_at
        now = time.perf_counter()
        if now - said_at < _SAY_S:
            return
        said_at = now
        try:
            parent.send(("share", _share(grid.now(), progress)))
        except OSError:
            # Nobody waits for this run any more; it can go on later.
            raise KeyboardInterrupt from None

    try:
        result = simulate(
            task.config,
            task.folder,
            traces=traces.open() if traces else trace_spec.load(task.config.traces, seed=task.seed),
            overwrite=begun == "failed",
            resume=begun == "half",
            watch=say,
        )
    except FedstaleError as problem:
        return "refused", str(problem)
    if result.status == "interrupted":
        raise KeyboardInterrupt
    return ("failed" if result.status == "failed" else "done"), result.reason


def _share(now: float, progress: Any) -> float:  # noqa: ANN401 - heavy to import here
    until = progress.until
    if until.rounds is not None:
        return min(progress.rounds / until.rounds, 1.0) if until.rounds else 1.0
    return float(min(now / until.time_s, 1.0))


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _write_to(log: Path) -> None:
    """Let a file have what an app prints, which has no place between progress and tables."""
    with log.open("a", encoding="utf-8") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
