"""Runs carried out on the nodes of a cluster: the folder of a run in, and out.

It is a `WorkerPool` of other machines. A worker is a Ray actor of one core. It unpacks what it is
sent, lets a process of its own simulate, and sends the folder back; on the way too, if there is a
new checkpoint and the last was sent a while ago. Nothing depends on a file system that machines
share. If a client ends the process, its worker says so. If a worker is lost, what it was doing is
begun again on another, from what has come back.
"""

import shutil
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from fedstale.cluster import (
    Bundle,
    Bundles,
    own_folder,
    packed_run,
    placed,
    put_back,
    require_same,
    send,
    unpack,
    versions,
)
from fedstale.comparison.plan import RunJob, carried_out, state_of
from fedstale.config import SimulationConfig
from fedstale.errors import ConfigError
from fedstale.parallel import Event, WorkerPool
from fedstale.runs import CHECKPOINTS, RunFolder
from fedstale.simulation import FlowerApp

_WAIT_S, _STOP_S = 0.5, 60.0
_KEEP_S = 30.0
"""Wall time between two folders that come back on the way."""
_LOSSES = 3
"""Workers that one run may lose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Response:
    """News of a run, and the archive of its folder if it is over or has a new checkpoint."""

    event: Event
    what: Any
    folder: bytes = b""
    printed: bytes = b""


def bundles_of(configs: Iterable[SimulationConfig]) -> Bundles:
    """Put the apps and traces of runs into the object store of the cluster that is joined.

    Built-in apps and generated devices are left out: every node makes its own.

    Raises:
        ConfigError: an app is too large to be sent.
    """
    found: dict[str, Bundle] = {}
    for config in configs:
        for name, is_app in ((config.app, True), (config.traces, False)):
            path = Path(name)
            if name in found or not path.exists() or (is_app and FlowerApp.find(name).is_built_in):
                continue
            found[name] = send(path, of_app=is_app)
    return found


class ClusterPool:
    """Carries out runs on the cluster that is joined; leaving the context ends its workers.

    A busy one writes down what it has then, and sends it.
    """

    def __init__(self, bundles: Bundles, log: Path | None = None) -> None:
        """Start no worker yet.

        Args:
            bundles: apps and traces that runs need, by their names in the settings.
            log: file that gets what runs print, if any.
        """
        self._bundles, self._log, self._ours = ray.put(bundles), log, versions()
        self._idle: list[Any] = []
        self._ending: list[Any] = []
        self._busy: dict[Any, tuple[Any, RunJob, RunFolder]] = {}
        """By the stream of its responses: a worker, its job, and the folder that is held here."""

    def work(self, jobs: Iterable[RunJob], workers: int) -> Iterator[tuple[RunJob, Event, Any]]:
        """Carry out runs, so many at a time, and yield what becomes of them, as `WorkerPool.work`.

        Raises:
            ConfigError: a node that has joined meanwhile has other versions, or a folder is in use.
        """
        waiting, again, losses = iter(jobs), deque[RunJob](), dict[Path, int]()
        while True:
            while len(self._busy) < workers:
                job = again.popleft() if again else next(waiting, None)
                if job is None:
                    break
                self._begin(job)
            if not self._busy:
                return
            if len(self._busy) < workers:
                # A worker that still waits for a core gets that of one that is done.
                self._end_idle()
            for stream in _ready(self._busy):
                worker, job, folder = self._busy[stream]
                try:
                    answer: _Response = ray.get(next(stream))
                except ray.exceptions.RayError as problem:
                    del self._busy[stream]
                    folder.__exit__()
                    _require_lost(worker, problem)
                    losses[job.run.folder] = losses.get(job.run.folder, 0) + 1
                    if losses[job.run.folder] < _LOSSES:
                        again.append(replace(job, begun=state_of(job.run)))
                    else:
                        yield job, "died", f"{_LOSSES} workers were lost with it"
                    continue
                self._take(answer, job)
                if answer.event != "progress":
                    del self._busy[stream]
                    folder.__exit__()
                    self._idle.append(worker)
                is_lost = answer.event == "died" and self._log is not None
                why = f"{answer.what}; {self._log} may say why" if is_lost else answer.what
                yield job, answer.event, why

    def __enter__(self) -> "ClusterPool":
        return self

    def __exit__(self, *problem: object) -> None:
        """Collect the state of busy workers, and end all."""
        until = time.monotonic() + _STOP_S
        for worker, _, _ in self._busy.values():
            worker.stop.remote()
        for stream, (worker, job, folder) in self._busy.items():
            with folder, suppress(ray.exceptions.RayError, StopIteration):
                while time.monotonic() < until:
                    if _ready([stream]):
                        answer: _Response = ray.get(next(stream))
                        self._take(answer, job)
                        if answer.event != "progress":
                            break
            self._idle.append(worker)
        self._busy.clear()
        self._end_idle()
        if self._ending:
            left_s = max(until - time.monotonic(), 0.0)
            ray.wait(self._ending, num_returns=len(self._ending), timeout=left_s)

    def _begin(self, job: RunJob) -> None:
        """Give a run to a worker; its folder here is held, so that no other command begins it."""
        is_begun = job.begun == "half"
        if is_begun:
            folder = RunFolder(job.run.folder)
        else:
            folder = RunFolder.create(job.run.folder, overwrite=job.begun == "failed")
        archive = packed_run(job.run.folder) if is_begun else b""
        if self._idle:
            worker = self._idle.pop()
        else:
            actor: Any = ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(_Worker)
            # One thread carries out a run, and one hears that it is to stop.
            options = {"scheduling_strategy": "SPREAD", "max_concurrency": 2}
            worker = actor.options(**options).remote(self._bundles, self._ours)
        begun = replace(job, begun="half" if is_begun else "new", traces=None)
        stream = worker.carry_out.options(num_returns="streaming").remote(begun, archive)
        self._busy[stream] = worker, job, folder

    def _take(self, answer: _Response, job: RunJob) -> None:
        """Write a response's folder and log to their places here."""
        if answer.folder:
            put_back(answer.folder, job.run.folder)
        if answer.printed and self._log is not None:
            with self._log.open("ab") as file:
                file.write(answer.printed)

    def _end_idle(self) -> None:
        """End workers that have nothing to do, once they have removed their files."""
        for worker in self._idle:
            self._ending.append(worker.end.remote())
        self._idle = []


def _ready(streams: Iterable[Any]) -> list[Any]:
    """Return a stream that has something, as soon as there is one or after a moment."""
    return list(ray.wait([*streams], num_returns=1, timeout=_WAIT_S)[0])


def _require_lost(worker: Any, problem: Exception) -> None:
    """Check that a worker was lost, and did not raise.

    Raises:
        ConfigError: it did.
    """
    with suppress(ray.exceptions.RayError):
        ray.kill(worker)
    has_raised = isinstance(problem, ray.exceptions.RayTaskError)
    if has_raised or getattr(problem, "actor_init_failed", False):
        said = " ".join(str(problem).strip().splitlines()[-1:])
        said = said.removeprefix("fedstale.errors.ConfigError: ")
        raise ConfigError(f"a worker of the cluster could not go on: {said}")


class _Worker:
    """An actor that simulates in a process of its own, and packs the run's folder."""

    def __init__(self, bundles: Bundles, ours: Mapping[str, str]) -> None:
        where = f"node {ray.util.get_node_ip_address()}"  # type: ignore[no-untyped-call]
        require_same(ours, versions(), where)
        self._where, self._bundles, self._ends = where, bundles, ExitStack()
        self._own = self._ends.enter_context(own_folder())
        self._folder, self._log = self._own / "run", self._own / "log.txt"
        self._pool = WorkerPool(carried_out, self._log)
        self._n_printed, self._stopped = 0, threading.Event()

    def carry_out(self, job: RunJob, folder: bytes) -> Iterator[_Response]:
        """Carry out a run, and yield what becomes of it.

        Args:
            job: the run.
            folder: archive of its folder as far as it is; empty of a new run.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        if folder:
            unpack(folder, self._folder)
        app, traces = (self._bundles.get(n) for n in (job.run.config.app, job.run.config.traces))
        here = replace(
            job,
            run=replace(job.run, folder=self._folder),
            app=placed(app, self._own) if app else None,
            recording=placed(traces, self._own) if traces else None,
        )
        sent_at, sent = time.monotonic(), self._last_checkpoint()
        for event, what in self._events(here):
            archive = b""
            if event != "progress":
                is_whole = event != "rejected" and self._folder.is_dir()
                archive = packed_run(self._folder) if is_whole else b""
            elif time.monotonic() - sent_at >= _KEEP_S:
                sent_at, last = time.monotonic(), self._last_checkpoint()
                with suppress(OSError):
                    archive = packed_run(self._folder, goes_on=True) if last > sent else b""
                    sent = last
            said = f"{what.split(';')[0]} on {self._where}" if event == "died" else what
            yield _Response(event=event, what=said, folder=archive, printed=self._printed())

    def _events(self, job: RunJob) -> Iterator[tuple[Event, Any]]:
        """Yield what the process of a run sends."""
        try:
            for _, event, what in self._pool.work([job], 1):
                yield event, what
        except (OSError, ValueError):
            # Its pipe was closed, because it is to end.
            self._stopped.wait(_STOP_S)
            yield "died", "it was stopped"

    def stop(self) -> None:
        """End the process, which writes its state down; its run is over then."""
        self._pool.__exit__()
        self._stopped.set()

    def end(self) -> None:
        """Remove what this worker has unpacked, and end it."""
        self._pool.__exit__()
        self._ends.close()
        # Not asked for from outside: a second call would run beside this one, and end it half done.
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]

    def _last_checkpoint(self) -> str:
        return max((path.name for path in (self._folder / CHECKPOINTS).glob("*")), default="")

    def _printed(self) -> bytes:
        printed = self._log.read_bytes()[self._n_printed :] if self._log.is_file() else b""
        self._n_printed += len(printed)
        return printed
