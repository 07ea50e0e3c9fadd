"""Workers on the nodes of a cluster that carry out planned runs: the folder of a run in, and out.

It is a `WorkerPool` of other machines. A worker is a Ray actor of one core. It unpacks what it is
sent, lets a process of its own simulate, and sends the folder back; on the way too, if there is a
new checkpoint and the last was sent a while ago. Nothing depends on a file system that machines
share. If a client ends the process, its worker sees that and says so. If a worker is lost, so is
its machine: what it was doing is begun again on another, from what has come back.
"""

import queue
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import ray

from fedstale.cluster import (
    Bundle,
    Bundles,
    NodeStore,
    packed_run,
    put_back,
    require_same,
    send,
    unpack,
    versions,
)
from fedstale.comparison.plan import PlannedRun, RunJob, State, simulated
from fedstale.config import SimulationConfig
from fedstale.errors import ConfigError
from fedstale.parallel import Event, Report, WorkerPool
from fedstale.reports import Run
from fedstale.runs import CHECKPOINTS, RunFolder
from fedstale.simulation import FlowerApp
from fedstale.traces import TraceSet

_WAIT_S = 0.5
_STOP_S, _IDLE_S = 60.0, 1.0
_KEEP_S = 30.0
"""Wall time between two folders that come back on the way."""
_LOSSES = 3
"""Workers that one run may lose on machines that are still there."""
_ONE_PROCESS = ("inline", "batched")

News = tuple[Event, Any]


class RunLost(Exception):  # noqa: N818 - as Ray's own, no fault of the settings
    """The process of a run ended before the run did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """A run for a worker to carry out."""

    run: PlannedRun
    begun: State
    pause_at: float
    folder: bytes
    """Archive of the run's folder as far as it is; empty of a new run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Response:
    """News of a run since the last response."""

    news: tuple[News, ...]
    folder: bytes = b""
    """Archive of the run's folder, if it is over or has a new checkpoint."""
    printed: bytes = b""
    is_over: bool = False


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
        self._idle: list[_WorkerHandle] = []
        self._busy: dict[Any, tuple[_WorkerHandle, RunJob, RunFolder]] = {}
        self._ending: list[Any] = []
        self._lock, self._timer = threading.Lock(), threading.Timer(_IDLE_S, self._release)

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
                self._release()
            for reference in ray.wait([*self._busy], num_returns=1, timeout=_WAIT_S)[0]:
                worker, job, folder = self._busy.pop(reference)
                try:
                    answer = ray.get(reference)
                except ray.exceptions.RayError as problem:
                    folder.__exit__()
                    if self._is_begun_again(worker, job, problem, losses):
                        again.append(job.as_of_now())
                    else:
                        yield job, "died", f"{_LOSSES} workers were lost with it"
                    continue
                self._take(answer, job)
                if answer.is_over:
                    folder.__exit__()
                    self._idle.append(worker)
                else:
                    self._busy[worker.actor.news.remote()] = worker, job, folder
                for event, what in answer.news:
                    is_lost = event == "died" and self._log is not None
                    yield job, event, f"{what}; {self._log} may say why" if is_lost else what

    def reached(self, run: PlannedRun, begun: State, pause_at: float) -> Run:
        """Continue one run to a virtual instant in s, and return it.

        A worker that is not asked again soon is let go: another call may wait for its core.

        Raises:
            ConfigError: it cannot begin.
            RunLost: its process ended.
        """
        self._timer.cancel()
        for _, event, what in self.work([RunJob(run=run, begun=begun, pause_at=pause_at)], 1):
            if event == "rejected":
                raise ConfigError(what)
            if event == "died":
                raise RunLost(what)
        self._timer = threading.Timer(_IDLE_S, self._release)
        self._timer.daemon = True
        self._timer.start()
        return Run(run.folder)

    def __enter__(self) -> "ClusterPool":
        return self

    def __exit__(self, *problem: object) -> None:
        """Collect the state of busy workers, and end all."""
        self._timer.cancel()
        self._release()
        stopped = {
            worker.actor.stop.remote(): (worker, job, folder)
            for worker, job, folder in self._busy.values()
        }
        self._busy.clear()
        until = time.monotonic() + _STOP_S
        for reference, (worker, job, folder) in stopped.items():
            with folder, suppress(ray.exceptions.RayError):
                left_s = max(until - time.monotonic(), 0.0)
                self._take(ray.get(reference, timeout=left_s), job)
            ray.kill(worker.actor)
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
        request = _Request(
            run=job.run,
            begun="half" if is_begun else "new",
            pause_at=job.pause_at,
            folder=packed_run(job.run.folder) if is_begun else b"",
        )
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        worker = worker or _WorkerHandle(self._bundles, self._ours)
        self._busy[worker.actor.begin.remote(request)] = worker, job, folder

    def _take(self, answer: _Response, job: RunJob) -> None:
        """Write a response's folder and log to their places here."""
        if answer.folder:
            put_back(answer.folder, job.run.folder)
        if answer.printed and self._log is not None:
            with self._log.open("ab") as file:
                file.write(answer.printed)

    def _release(self) -> None:
        with self._lock:
            gone, self._idle = self._idle, []
        for worker in gone:
            self._ending.append(worker.actor.stop.remote())
            worker.actor.__ray_terminate__.remote()

    def _is_begun_again(
        self, worker: "_WorkerHandle", job: RunJob, problem: Exception, losses: dict[Path, int]
    ) -> bool:
        """Decide whether a run is begun again on another worker after the loss of its own."""
        with suppress(ray.exceptions.RayError):
            ray.kill(worker.actor)
        has_raised = isinstance(problem, ray.exceptions.RayTaskError)
        if has_raised or getattr(problem, "actor_init_failed", False):
            said = " ".join(str(problem).strip().splitlines()[-1:])
            said = said.removeprefix("fedstale.errors.ConfigError: ")
            raise ConfigError(f"a worker of the cluster could not go on: {said}")
        if worker.is_on_a_living_node():
            losses[job.run.folder] = losses.get(job.run.folder, 0) + 1
        return losses.get(job.run.folder, 0) < _LOSSES


class _WorkerHandle:
    """A worker, on the caller's side."""

    def __init__(self, bundles: object, ours: Mapping[str, str]) -> None:
        actor: Any = ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(_Worker)
        # A search's own actors are in a group of another machine, which would take it in.
        self.actor = actor.options(scheduling_strategy="SPREAD").remote(bundles, ours)
        self._node = self.actor.node.remote()

    def is_on_a_living_node(self) -> bool:
        """Return whether the machine is still there, as far as the cluster knows by now."""
        try:
            own = ray.get(self._node, timeout=0)
        except ray.exceptions.RayError:
            return True
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        return any(node["Alive"] and node["NodeID"] == own for node in nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """A run for the process of a worker, with paths of its machine."""

    run: PlannedRun
    begun: State
    pause_at: float
    app: Path | None
    """Where the app is, if it was sent."""
    traces: str


class _Worker:
    """An actor that simulates in a process of its own, and packs the run's folder."""

    def __init__(self, bundles: Bundles, ours: Mapping[str, str]) -> None:
        where = f"node {ray.util.get_node_ip_address()}"  # type: ignore[no-untyped-call]
        require_same(ours, versions(), where)
        self._where, self._bundles, self._store = where, bundles, NodeStore()
        self._own = self._store.own_folder()
        self._folder, self._log = self._own / "run", self._own / "log.txt"
        self._ends = ExitStack()
        self._pool = self._ends.enter_context(WorkerPool(_carried_out, self._log))
        self._news: queue.Queue[News] = queue.Queue()
        self._n_printed, self._sent_at, self._sent = 0, 0.0, ""

    def node(self) -> str:
        """Return which node this is."""
        return str(ray.get_runtime_context().get_node_id())

    def begin(self, request: _Request) -> _Response:
        """Begin a run, and return the first news."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if request.folder:
            unpack(request.folder, self._folder)
        config = request.run.config
        app, traces = self._bundles.get(config.app), self._bundles.get(config.traces)
        task = _Task(
            run=PlannedRun(variant=request.run.variant, config=config, folder=self._folder),
            begun=request.begun,
            pause_at=request.pause_at,
            app=self._store.place(app) if app else None,
            traces=str(self._store.place(traces)) if traces else config.traces,
        )
        self._news = queue.Queue()
        self._sent_at, self._sent = time.monotonic(), self._last_checkpoint()
        threading.Thread(target=self._listen, args=(task, self._news), daemon=True).start()
        return self.news()

    def news(self) -> _Response:
        """Return the news, after half a second at most."""
        found: list[News] = []
        with suppress(queue.Empty):
            found.append(self._news.get(timeout=_WAIT_S))
            while True:
                found.append(self._news.get_nowait())
        ends = [one for one in found if one[0] != "progress"]
        if ends:
            is_whole = all(event != "rejected" for event, _ in ends)
            folder = packed_run(self._folder) if is_whole and self._folder.is_dir() else b""
            return _Response(news=tuple(ends), folder=folder, printed=self._printed(), is_over=True)
        return _Response(news=tuple(found[-1:]), folder=self._on_the_way())

    def stop(self) -> _Response:
        """End the process, and return the folder that it has written."""
        self._ends.close()
        folder = packed_run(self._folder) if self._folder.is_dir() else b""
        answer = _Response(news=(), folder=folder, printed=self._printed(), is_over=True)
        self._store.close()
        return answer

    def _listen(self, task: _Task, news: "queue.Queue[News]") -> None:
        """Pass on what the process of a run sends."""
        try:
            for _, event, what in self._pool.work([task], 1):
                is_lost = event == "died"
                news.put((event, f"{what.split(';')[0]} on {self._where}" if is_lost else what))
        except (OSError, ValueError):
            # Its pipe was closed, because it is to end.
            return

    def _on_the_way(self) -> bytes:
        """Return an archive with the newest checkpoint, if one is due and was not sent."""
        if time.monotonic() - self._sent_at < _KEEP_S:
            return b""
        self._sent_at, last = time.monotonic(), self._last_checkpoint()
        if last in ("", self._sent):
            return b""
        with suppress(OSError):
            folder = packed_run(self._folder, goes_on=True)
            self._sent = last
            return folder
        return b""

    def _last_checkpoint(self) -> str:
        return max((path.name for path in (self._folder / CHECKPOINTS).glob("*")), default="")

    def _printed(self) -> bytes:
        if not self._log.is_file():
            return b""
        printed = self._log.read_bytes()[self._n_printed :]
        self._n_printed += len(printed)
        return printed


def _carried_out(task: _Task, report: Report) -> str:
    """Simulate, in a process of its own, and return why the run failed if it did."""
    seed = task.run.config.seed if TraceSet.is_synthetic(task.traces) else 0
    result = simulated(
        task.run,
        task.begun,
        _traces(task.traces, seed),
        report,
        app=FlowerApp.find(task.app) if task.app else None,
        pause_at=task.pause_at,
    )
    return (result.reason or "it failed") if result.status == "failed" else ""


@lru_cache(maxsize=4)
def _traces(spec: str, seed: int) -> TraceSet:
    return TraceSet.load(spec, seed=seed)


def require_one_process(configs: Iterable[SimulationConfig]) -> None:
    """Check that each run takes one core, as it does on a worker.

    Raises:
        ConfigError: one asks for processes or actors of its own.
    """
    for config in configs:
        if config.executor not in _ONE_PROCESS or config.client_limit_s is not None:
            raise ConfigError(
                f"executor = {config.executor!r}: with an address each run is one process on one "
                "core of the cluster; leave executor, workers, gpus and client-limit-s out"
            )
