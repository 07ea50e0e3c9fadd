"""Clients in a warm pool of worker processes, on the cores of this machine.

A model version travels to the workers once, through shared memory, and not once a job: messages of
a round hold the same arrays, so each distinct set of arrays is written down once and a job names
it. Workers keep the few that they read last.
"""

import multiprocessing
import pickle
import signal
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory

from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp

from fedstale.simulation.executors.base import (
    ClientCall,
    ClientReply,
    ClientWorker,
    Executor,
    died_twice,
    version_of,
    without_arrays,
)
from fedstale.simulation.replayed import pack

# Tasks that a worker gets in one run: fewer cost less to send, more are shared out more evenly.
_TASKS_PER_WORKER = 4
_VERSIONS_KEPT = 8

_Key = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Shared:
    """Stands for the arrays of a message that lie in shared memory."""

    memory: str
    n_bytes: int


_Packed = tuple[ClientCall, dict[str, _Shared]]


class ProcessExecutor(Executor):
    """Runs clients in spawned worker processes, each of which loads the app once."""

    def __init__(self, load: Callable[[], ClientApp], workers: int) -> None:
        """Start the pool.

        Args:
            load: returns the ClientApp; pickled to the workers.
            workers: number of processes, >= 1.
        """
        self._load = load
        self._workers = workers
        self.batch = workers if workers > 1 else 1
        self._versions = _Versions()
        self._pool = self._new_pool()

    def run(self, calls: Sequence[ClientCall]) -> list[ClientReply]:
        """Return the replies in the order of the calls.

        The jobs of a worker that dies run once more, one at a time; one whose worker dies again
        gets an error reply.
        """
        self._versions.forget_old()
        pack(call.context for call in calls)
        packed = [self._versions.pack(call) for call in calls]
        size = -(-len(calls) // (self._workers * _TASKS_PER_WORKER)) or 1
        parts = [packed[i : i + size] for i in range(0, len(packed), size)]
        done: list[list[ClientReply] | None] = []
        for future in self._submitted(parts):
            try:
                done.append(future.result())
            except BrokenProcessPool:
                done.append(None)
        if None in done:
            self._renew_pool()
        replies: list[ClientReply] = []
        for part, theirs in zip(parts, done, strict=True):
            replies += [self._second_try(one) for one in part] if theirs is None else theirs
        return replies

    def __exit__(self, *problem: object) -> None:
        """Stop the workers."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._versions.close()

    @property
    def description(self) -> str:
        """What runs the clients, in words."""
        return f"{self._workers} processes"

    def _submitted(self, parts: Iterable[list[_Packed]]) -> list[Future[list[ClientReply]]]:
        futures: list[Future[list[ClientReply]]] = []
        for part in parts:
            try:
                futures.append(self._pool.submit(_run_in_worker, part))
            except BrokenProcessPool as problem:
                futures.append(Future())
                futures[-1].set_exception(problem)
        return futures

    def _second_try(self, one: _Packed) -> ClientReply:
        try:
            return self._pool.submit(_run_in_worker, [one]).result()[0]
        except BrokenProcessPool:
            self._renew_pool()
        return died_twice(one[0])

    def _renew_pool(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._pool = self._new_pool()

    def _new_pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            self._workers,
            # Forking a process with threads (torch, Flower's telemetry) can deadlock.
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(self._load,),
        )


class _Versions:
    """The arrays that lie in shared memory, by the identity of their bytes, which never change."""

    def __init__(self) -> None:
        self._held: OrderedDict[_Key, tuple[SharedMemory, _Shared, list[bytes]]] = OrderedDict()

    def pack(self, call: ClientCall) -> _Packed:
        """Take the arrays out of a call; the names of shared memory stand for them."""
        records = call.message.content.array_records
        if not records:
            return call, {}
        return without_arrays(call), {name: self._place(r) for name, r in records.items()}

    def forget_old(self) -> None:
        """Free all but the arrays used last; no worker may be at work."""
        while len(self._held) > _VERSIONS_KEPT:
            self._free(next(iter(self._held)))

    def close(self) -> None:
        """Free everything."""
        for key in list(self._held):
            self._free(key)

    def _place(self, record: ArrayRecord) -> _Shared:
        key = version_of(record)
        held = self._held.get(key)
        if held is None:
            arrays = [(n, a.dtype, a.shape, a.stype, a.data) for n, a in record.items()]
            data = pickle.dumps(arrays, protocol=pickle.HIGHEST_PROTOCOL)
            memory = SharedMemory(create=True, size=len(data))
            assert memory.buf is not None
            memory.buf[: len(data)] = data
            # Holding the bytes keeps their identities from being given to others.
            owned = [array.data for array in record.values()]
            held = self._held[key] = memory, _Shared(memory.name, len(data)), owned
        self._held.move_to_end(key)
        return held[1]

    def _free(self, key: _Key) -> None:
        memory, _, _ = self._held.pop(key)
        memory.close()
        memory.unlink()


_workers: list[ClientWorker] = []
_read_before: OrderedDict[str, ArrayRecord] = OrderedDict()


def _start_worker(load: Callable[[], ClientApp]) -> None:
    # Ctrl-C belongs to the main process, which stops the workers when it has saved the run.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _workers.append(ClientWorker(load))


def _run_in_worker(part: list[_Packed]) -> list[ClientReply]:
    (worker,) = _workers
    arrays = [{name: _read(place) for name, place in places.items()} for _, places in part]
    return worker.run([call for call, _ in part], arrays)


def _read(place: _Shared) -> ArrayRecord:
    record = _read_before.get(place.memory)
    if record is None:
        memory = SharedMemory(place.memory)
        try:
            assert memory.buf is not None
            # Written by this run's main process a moment ago, for its own workers.
            arrays = pickle.loads(memory.buf[: place.n_bytes])
        finally:
            memory.close()
        record = ArrayRecord({name: Array(*fields) for name, *fields in arrays})
        _read_before[place.memory] = record
        while len(_read_before) > _VERSIONS_KEPT:
            _read_before.popitem(last=False)
    return record
