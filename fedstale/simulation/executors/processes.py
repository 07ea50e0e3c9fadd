"""Clients in a warm pool of worker processes, on the cores of this machine.

Arrays travel through shared memory. Workers keep the few that they read last.
"""

import multiprocessing
import pickle
import signal
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory

from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp

from fedstale.simulation.executors.base import ClientCall, ClientReply
from fedstale.simulation.executors.workers import VERSIONS_KEPT, ClientWorker, WorkerExecutor

_PARTS_PER_WORKER = 4


@dataclass(frozen=True, slots=True)
class SharedArrays:
    """Arrays of a message that lie in shared memory."""

    memory: str
    n_bytes: int


_Part = list[tuple[ClientCall, dict[str, SharedArrays]]]


class ProcessExecutor(WorkerExecutor[SharedArrays]):
    """Runs clients in spawned worker processes, each of which loads the app once."""

    def __init__(self, load: Callable[[], ClientApp], workers: int) -> None:
        """Start the pool.

        Args:
            load: returns the ClientApp; pickled to the workers.
            workers: number of processes, >= 1.
        """
        super().__init__(workers, parts_per_worker=_PARTS_PER_WORKER)
        self._load = load
        self._memory: dict[str, SharedMemory] = {}
        self._pool = self._new_pool()

    def __exit__(self, *problem: object) -> None:
        """Stop the workers."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._drop_all_but(0)

    @property
    def description(self) -> str:
        """What runs the clients, in words."""
        return f"{self._workers} processes"

    def _run_parts(self, parts: Sequence[_Part]) -> list[list[ClientReply] | None]:
        replies: list[list[ClientReply] | None] = []
        for future in [self._submitted(part) for part in parts]:
            try:
                replies.append(future.result())
            except BrokenProcessPool:
                replies.append(None)
        if None in replies:
            self._pool.shutdown(cancel_futures=True)
            self._pool = self._new_pool()
        return replies

    def _submitted(self, part: _Part) -> Future[list[ClientReply]]:
        try:
            return self._pool.submit(_run_in_worker, part)
        except BrokenProcessPool as problem:
            failed: Future[list[ClientReply]] = Future()
            failed.set_exception(problem)
            return failed

    def _new_pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            self._workers,
            # Forking a process with threads (torch, Flower's telemetry) can deadlock.
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(self._load,),
        )

    def _put(self, record: ArrayRecord) -> SharedArrays:
        arrays = [(n, a.dtype, a.shape, a.stype, a.data) for n, a in record.items()]
        data = pickle.dumps(arrays, protocol=pickle.HIGHEST_PROTOCOL)
        memory = SharedMemory(create=True, size=len(data))
        assert memory.buf is not None
        memory.buf[: len(data)] = data
        self._memory[memory.name] = memory
        return SharedArrays(memory.name, len(data))

    def _drop(self, place: SharedArrays) -> None:
        memory = self._memory.pop(place.memory)
        memory.close()
        memory.unlink()


_workers: list[ClientWorker] = []
_read_before: OrderedDict[str, ArrayRecord] = OrderedDict()


def _start_worker(load: Callable[[], ClientApp]) -> None:
    # Ctrl-C belongs to the main process, which stops the workers when it has saved the run.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _workers.append(ClientWorker(load))


def _run_in_worker(part: _Part) -> list[ClientReply]:
    (worker,) = _workers
    arrays = [{name: _read(place) for name, place in places.items()} for _, places in part]
    return worker.run([call for call, _ in part], arrays)


def _read(place: SharedArrays) -> ArrayRecord:
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
        while len(_read_before) > VERSIONS_KEPT:
            _read_before.popitem(last=False)
    return record
