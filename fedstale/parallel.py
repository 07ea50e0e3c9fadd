"""Processes that do jobs one after the other, and report progress.

A pool has three methods: `work`, and those of a context. That of `fedstale.comparison.cluster_pool`
has the same, and its processes are on other machines.

Each has a pipe of its own, so that one that dies ends its own job and no other: an executor of
`concurrent.futures` is broken by then, with all that its processes were doing, and a pool of
`multiprocessing` waits for the lost job forever. Nor do these let a busy process write down what it
has when its pool is left. All compute with one thread: sums of floats depend on the number of
threads, and so would results; and two processes with a thread each are faster than one with two.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from fedstale.errors import FedstaleError

Job = TypeVar("Job")
Report = Callable[[object], None]
"""Sends progress of a job to the first process."""
Event = Literal["progress", "done", "rejected", "died"]

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_OF_SCRIPT = ("__file__", "__spec__")
"""By which a process that is started finds the script that is run."""
_WAIT_S = 0.5
_STOP_S = 30.0


class _Process(SpawnProcess):
    """A process that does not import the script that is run.

    Its work is in modules, and a script that is imported would make the call that it makes again.
    """

    def start(self) -> None:
        main = vars(sys.modules["__main__"])
        before: dict[str, Any] = {name: main.pop(name) for name in _OF_SCRIPT if name in main}
        main["__spec__"] = None
        try:
            super().start()
        finally:
            main.update(before)


class _Spawn(SpawnContext):
    Process = _Process


SPAWN = _Spawn()
"""Starts processes anew: a forked one would share torch's threads and Flower's state."""


class WorkerPool(Generic[Job]):
    """Processes that wait for jobs; leaving the context ends them, busy or not.

    A busy one gets a KeyboardInterrupt then, so that its job can write down what it has.
    """

    def __init__(
        self,
        work: Callable[[Job, Report], object],
        log: Path | None = None,
        *,
        one_thread: bool = True,
    ) -> None:
        """Start no process yet.

        Args:
            work: does a job; a function of a module, called with the job and with a function that
                sends progress to the first process. What it returns is sent too.
            log: file that gets what processes print; None lets them print here.
            one_thread: whether processes compute with one thread each.
        """
        self._work, self._log, self._one_thread = work, log, one_thread
        self.exit_code: int | None = None
        """Of the process that died last."""
        self._busy: dict[Connection, tuple[BaseProcess, Job]] = {}
        self._idle: list[tuple[Connection, BaseProcess]] = []

    def work(self, jobs: Iterable[Job], workers: int) -> Iterator[tuple[Job, Event, Any]]:
        """Do jobs, so many at a time, and yield what processes send until all are over.

        Yields:
            The job, and with "progress" what its work reported, with "done" what it returned, with
            "rejected" the FedstaleError that it raised as a string, with "died" how its process
            ended.
        """
        waiting = iter(jobs)
        while True:
            for job in islice(waiting, workers - len(self._busy)):
                ours, process = self._idle.pop() if self._idle else self._started()
                self._busy[ours] = (process, job)
                ours.send((self._work, job))
            if not self._busy:
                return
            yield from self._events()

    def _events(self) -> Iterator[tuple[Job, Event, Any]]:
        """Yield what processes have sent, as soon as there is something or after a moment."""
        for ready in wait(list(self._busy), timeout=_WAIT_S):
            assert isinstance(ready, Connection)
            process, job = self._busy[ready]
            try:
                news, what = ready.recv()
            except (EOFError, OSError):
                process.join(_STOP_S)
                self.exit_code = process.exitcode
                why = "" if self._log is None else f"; {self._log} may say why"
                news, what = "died", f"its process ended with code {process.exitcode}{why}"
                ready.close()
                del self._busy[ready]
            else:
                if news != "progress":
                    del self._busy[ready]
                    self._idle.append((ready, process))
            yield job, news, what

    def __enter__(self) -> "WorkerPool[Job]":
        return self

    def __exit__(self, *problem: object) -> None:
        for process, _ in self._busy.values():
            process.terminate()
        # A job that has missed the interrupt hears of the end by its next report.
        for connection in [*self._busy, *(idle for idle, _ in self._idle)]:
            connection.close()
        everyone = [p for p, _ in self._busy.values()] + [p for _, p in self._idle]
        try:
            for process in everyone:
                process.join(_STOP_S)
        finally:
            for process in everyone:
                if process.is_alive():
                    process.kill()

    def _started(self) -> tuple[Connection, BaseProcess]:
        ours, theirs = multiprocessing.Pipe()
        process = SPAWN.Process(target=_do_jobs, args=(theirs, self._log))
        with _one_thread_each() if self._one_thread else nullcontext():
            process.start()
        theirs.close()
        return ours, process


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Limit processes that are started inside to one thread."""
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


def _do_jobs(parent: Connection, log: Path | None) -> None:
    """Do jobs until no more are given; a job's function is not imported before signals are set."""
    # Ctrl-C reaches every process of a terminal; the first one decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if log is not None:
        # What jobs print has no place between progress and tables.
        with log.open("a", encoding="utf-8") as file:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(file.fileno(), stream.fileno())
    import pyarrow as pa  # noqa: PLC0415 - not before the signals are set

    pa.set_cpu_count(1)

    def report(what: object) -> None:
        try:
            parent.send(("progress", what))
        except OSError:
            # The first process does not wait for this job any more.
            raise KeyboardInterrupt from None

    with suppress(KeyboardInterrupt):
        while True:
            try:
                work, job = parent.recv()
            except (EOFError, OSError):
                return
            news: tuple[Event, object]
            try:
                news = "done", work(job, report)
            except FedstaleError as problem:
                news = "rejected", str(problem)
            with suppress(OSError):
                parent.send(news)
