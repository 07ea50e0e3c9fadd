"""Clients in worker processes: a warm pool on the cores of this machine, or the actors of Ray.

A model version travels to the workers once, and not once a job: messages of a round hold the same
arrays, so each distinct set of arrays is put where workers find it, and a call names the place:
shared memory in a pool, of which workers keep what they read last, and Ray's object store in a
cluster, which is the way beyond one machine. An actor loads the app once, which is sent to it.
"""

import faulthandler
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import time
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache, partial
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from flwr.app import ArrayRecord, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from fedstale.errors import ConfigError, needs
from fedstale.flower import ErrorCode, identity, own_copy, quick_arrays, with_content
from fedstale.parallel import Report, WorkerPool
from fedstale.simulation.executors.base import (
    ClientCall,
    ClientReply,
    Executor,
    imported_torch,
    quick_manual_seed,
    run_client,
    seeded_entropy,
    version_of,
)
from fedstale.simulation.flower_app import FlowerApp

if TYPE_CHECKING:
    from fedstale.cluster import Bundle

Place = TypeVar("Place")
"""Names arrays that workers can fetch."""
Part = list[tuple[ClientCall, dict[str, Place]]]
"""Calls with empty array records, and the place of each record's arrays."""

VERSIONS_KEPT = 8


class WorkerExecutor(Executor, Generic[Place]):
    """Runs clients in worker processes.

    The calls of a worker that dies run once more, one at a time; one whose worker dies again gets
    an error reply.
    """

    is_remote = True

    def __init__(self, workers: int, *, parts_per_worker: int) -> None:
        """Start without any arrays put.

        Args:
            workers: number of processes, >= 1.
            parts_per_worker: parts that a worker gets in one run: fewer cost less to send, more
                are shared out more evenly.
        """
        self._workers, self._n_parts = workers, workers * parts_per_worker
        self.batch = workers
        self.how = ""
        """How the worker that died last did so, in words that follow, if it is known."""
        self._places: OrderedDict[tuple[int, ...], tuple[Place, list[bytes]]] = OrderedDict()

    def run(self, calls: Sequence[ClientCall]) -> list[ClientReply]:
        """Return the replies in the order of the calls."""
        self._drop_all_but(VERSIONS_KEPT)
        packed = [self._packed(call) for call in calls]
        size = -(-len(calls) // self._n_parts) or 1
        parts = [packed[i : i + size] for i in range(0, len(packed), size)]
        replies: list[ClientReply] = []
        for part, theirs in zip(parts, self._run_parts(parts), strict=True):
            replies += [self._run_again(one) for one in part] if theirs is None else theirs
        return replies

    @abstractmethod
    def _run_parts(self, parts: Sequence[Part[Place]]) -> list[list[ClientReply] | None]:
        """Return the replies of each part; None for that of a worker that died and was replaced."""

    @abstractmethod
    def _put(self, record: ArrayRecord) -> Place:
        """Put arrays where workers find them."""

    @abstractmethod
    def _drop(self, place: Place) -> None:
        """Free arrays that were put; no worker is at work."""

    def _run_again(self, one: tuple[ClientCall, dict[str, Place]]) -> ClientReply:
        (replies,) = self._run_parts([[one]])
        if replies is not None:
            return replies[0]
        call, _ = one
        error = Error(ErrorCode.CLIENT_APP_CRASHED, f"the worker process died twice{self.how}")
        return ClientReply(Message(error, reply_to=call.message), call.context)

    def _packed(self, call: ClientCall) -> tuple[ClientCall, dict[str, Place]]:
        """Return a call with empty array records, and the place of each record's arrays."""
        content, places = RecordDict(dict(call.message.content.items())), {}
        for name, record in call.message.content.array_records.items():
            places[name] = self._place_of(record)
            content[name] = ArrayRecord()
        return ClientCall(with_content(call.message, content), call.context, call.seed), places

    def _place_of(self, record: ArrayRecord) -> Place:
        key = version_of(record)
        if key not in self._places:
            # Holding the bytes keeps their identities from being given to others.
            self._places[key] = self._put(record), [array.data for array in record.values()]
        self._places.move_to_end(key)
        return self._places[key][0]

    def _drop_all_but(self, n: int) -> None:
        while len(self._places) > n:
            _, (place, _) = self._places.popitem(last=False)
            self._drop(place)


class ClientWorker:
    """A ClientApp that is loaded once in a process of its own, for the calls that are sent."""

    def __init__(self, load: Callable[[], ClientApp], limit_s: float | None = None) -> None:
        with seeded_entropy():
            self._client_app, self._limit_s = load(), limit_s
        torch = imported_torch()
        if torch is not None:
            torch.set_num_threads(1)

    def run(self, part: Part[Place], fetch: Callable[[Place], ArrayRecord]) -> list[ClientReply]:
        """Return the replies in the order of the calls.

        Args:
            part: the calls.
            fetch: returns the arrays at a place.
        """
        replies = []
        with quick_manual_seed(), quick_arrays(), seeded_entropy():
            for call, places in part:
                content = call.message.content
                for name, place in places.items():
                    content[name] = fetch(place)
                with identity(call.message.metadata.run_id):
                    message = with_content(call.message, own_copy(content))
                    own = ClientCall(message, call.context, call.seed)
                    if self._limit_s:
                        faulthandler.dump_traceback_later(self._limit_s, exit=True)
                    replies.append(run_client(self._client_app, own))
        faulthandler.cancel_dump_traceback_later()
        return replies


_PARTS_PER_WORKER = 4


class ProcessExecutor(WorkerExecutor[str]):
    """Runs clients in spawned worker processes, each of which loads the app once.

    The place of arrays is the name of a shared memory.
    """

    def __init__(
        self, load: Callable[[], ClientApp], workers: int, limit_s: float | None = None
    ) -> None:
        """Start the pool.

        Args:
            load: returns the ClientApp; pickled to the workers.
            workers: number of processes, >= 1.
            limit_s: wall-clock s after which a client that has not answered ends its worker; inf
                if None. What Python did is on the worker's standard error then.

        Raises:
            ConfigError: no worker gets ready.
        """
        super().__init__(workers, parts_per_worker=_PARTS_PER_WORKER)
        self.description = f"{workers} processes"
        self._limit_s = limit_s
        self._memory: dict[str, SharedMemory] = {}
        # They compute with as many threads as this process, so that they give the same bytes.
        work = partial(_run_in_worker, load, limit_s)
        self._pool = WorkerPool[tuple[int, Part[str]]](work, one_thread=False)
        if self._run_parts([[]]) == [None]:
            # No call is to blame: every process after this one would end the same way.
            raise ConfigError(
                "a process that trains clients ended before it was ready; what it said is above"
            )

    def __exit__(self, *problem: object) -> None:
        """Stop the workers."""
        self._pool.__exit__(*problem)
        self._drop_all_but(0)

    def _run_parts(self, parts: Sequence[Part[str]]) -> list[list[ClientReply] | None]:
        started = time.perf_counter()
        replies: list[list[ClientReply] | None] = [None] * len(parts)
        try:
            for (i, _), event, what in self._pool.work(enumerate(parts), self._workers):
                if event == "done":
                    replies[i] = what
                else:
                    took_s = time.perf_counter() - started
                    self.how = _how(self._pool.exit_code, took_s, self._limit_s)
        except KeyboardInterrupt:
            # What they train is lost in any case, and nobody waits for it.
            self._pool.__exit__()
            raise
        return replies

    def _put(self, record: ArrayRecord) -> str:
        data = pickle.dumps(record, protocol=pickle.HIGHEST_PROTOCOL)
        memory = SharedMemory(create=True, size=len(data))
        assert memory.buf is not None
        memory.buf[: len(data)] = data
        self._memory[memory.name] = memory
        return memory.name

    def _drop(self, place: str) -> None:
        memory = self._memory.pop(place)
        memory.close()
        memory.unlink()


def _how(code: int | None, took_s: float, limit_s: float | None) -> str:
    """Return in words how a worker died."""
    if limit_s is not None and code == 1 and took_s >= limit_s:
        return f": its client did not end within {limit_s:g} s (client-limit-s)"
    if code is not None and code < 0:
        return f": killed by {signal.Signals(-code).name}"
    return f": exit code {code}"


_workers: list[ClientWorker] = []


def _start_worker(load: Callable[[], ClientApp], limit_s: float | None) -> None:
    # What a client starts, such as the workers of a DataLoader, starts as everywhere else here.
    multiprocessing.set_start_method(None, force=True)
    # What a client trains is lost in any case.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable()
    # Python joins them at the end of a worker, before joblib has told its own that it is over.
    multiprocessing.util.Finalize(None, _end_children, exitpriority=0)
    _workers.append(ClientWorker(load, limit_s))


def _end_children() -> None:
    """End the processes that clients have left behind for their next messages."""
    for child in multiprocessing.active_children():
        child.terminate()


def _run_in_worker(
    load: Callable[[], ClientApp], limit_s: float | None, job: tuple[int, Part[str]], _: Report
) -> list[ClientReply]:
    if not _workers:
        _start_worker(load, limit_s)
    (worker,) = _workers
    return worker.run(job[1], _read)


@lru_cache(maxsize=VERSIONS_KEPT)
def _read(place: str) -> ArrayRecord:
    memory = SharedMemory(place)
    try:
        assert memory.buf is not None
        # Written by this run's main process a moment ago, for its own workers. The system rounds
        # the memory up to whole pages: pickle stops at its own end.
        record: ArrayRecord = pickle.loads(memory.buf)
    finally:
        memory.close()
    return record


_Reference = Any  # Ray is an extra, whose types may be missing


class RayExecutor(WorkerExecutor[_Reference]):
    """Runs clients in Ray actors; the place of arrays is a reference to Ray's object store."""

    def __init__(
        self, app: FlowerApp, workers: int | None = None, *, gpus: float | None = None
    ) -> None:
        """Join the cluster of RAY_ADDRESS, or start one here, and start the actors.

        Args:
            app: a directory; the actors load its ClientApp.
            workers: number of actors, of one core each; None takes all cores of the cluster, or as
                many as it has GPUs for.
            gpus: of each actor, such as 0.25 where four share one.

        Raises:
            ConfigError: Ray is not installed, or the cluster cannot be joined, has a node with
                other versions, or has not so many GPUs.
        """
        try:
            import ray  # noqa: PLC0415 - an extra
        except ImportError:
            raise ConfigError(f"executor = 'ray' {needs('ray')}") from None
        self._ray: Any = ray
        self._ends = ExitStack()
        self._load: Callable[[], ClientApp] = app.load_client
        if address := os.environ.get("RAY_ADDRESS"):
            from fedstale.cluster import joined, send  # noqa: PLC0415 - few runs join one

            self._ends.enter_context(joined(address))
            if not app.is_built_in:
                self._load = partial(_load_sent, app, send(app.directory, of_app=True))
        elif not ray.is_initialized():
            # Else Ray joins whatever cluster was started last on this machine.
            ray.init(address="local", log_to_driver=False, include_dashboard=False)
            self._ends.callback(ray.shutdown)
        resources, each = self._ray.cluster_resources(), gpus or 0.0
        cores, gpus_found = int(resources["CPU"]), resources.get("GPU", 0.0)
        workers = workers or (min(cores, int(gpus_found / each)) or 1 if each else cores)
        super().__init__(workers, parts_per_worker=1)
        self.description = f"{workers} Ray actors"
        # Ray waits without end for an actor that needs more than the cluster has.
        if each * workers > gpus_found:
            self._ends.close()
            raise ConfigError(
                f"gpus = {gpus} for each of {workers} Ray actors: the cluster has "
                f"{gpus_found:g}; ask for a smaller share or for fewer workers"
            )
        self._remote = self._ray.remote(num_cpus=1, num_gpus=each, max_restarts=0)(_Actor)
        self._actors = [self._remote.remote(self._load) for _ in range(self._workers)]

    def __exit__(self, *problem: object) -> None:
        """Stop the actors, and the cluster if it was started here."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._ends.close()

    def _run_parts(self, parts: Sequence[Part[_Reference]]) -> list[list[ClientReply] | None]:
        actors = self._actors[: len(parts)]
        sent = [a.run_part.remote(part) for a, part in zip(actors, parts, strict=True)]
        replies: list[list[ClientReply] | None] = []
        for i, future in enumerate(sent):
            try:
                replies.append(self._ray.get(future))
            except self._ray.exceptions.RayActorError:
                self._actors[i] = self._remote.remote(self._load)
                replies.append(None)
        return replies

    def _put(self, record: ArrayRecord) -> _Reference:
        return self._ray.put(record)

    def _drop(self, place: _Reference) -> None:
        """Drop the last reference to the arrays, so that Ray frees them."""


_kept = ExitStack()
"""The app's files stay for as long as this process."""


def _load_sent(app: FlowerApp, sent: "Bundle") -> ClientApp:
    """Load the ClientApp of an app that was sent to this machine, in an actor."""
    from fedstale.cluster import own_folder, placed  # noqa: PLC0415 - as above

    return replace(app, directory=placed(sent, _kept.enter_context(own_folder()))).load_client()


class _Actor(ClientWorker):
    def run_part(self, part: Part[_Reference]) -> list[ClientReply]:
        """Run some calls; the arrays at each place are fetched once."""
        import ray  # noqa: PLC0415 - an extra

        references = list({place for _, places in part for place in places.values()})
        arrays = dict(zip(references, ray.get(references), strict=True))
        return self.run(part, arrays.__getitem__)
