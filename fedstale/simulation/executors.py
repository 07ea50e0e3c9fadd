"""Where client code really runs: in this process, or in a pool of worker processes.

The contract is one method. A call carries everything that the result may depend on: the message,
the node's own context, and a seed derived from run, node and job. So the result is the same in
every executor, with any number of workers and in any order.
"""

import contextlib
import multiprocessing
import random
import signal
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from flwr.app import Context, Message
from flwr.app.error import Error
from flwr.clientapp import ClientApp

from fedstale.simulation.compat import ErrorCode, identity


@dataclass(frozen=True, slots=True)
class Call:
    """One message to one client."""

    message: Message
    context: Context
    seed: int
    """Seeds every global random stream that the client may use, in [0, 2^32)."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client made of a call."""

    reply: Message
    context: Context
    """The context that was given, or its changed copy where the client ran in another process."""


class Executor(ABC):
    """Runs calls; a context manager that owns its workers."""

    @abstractmethod
    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """Return the answers in the order of the calls; a client's exception is an error reply."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Release the workers, if there are any."""
        return


class InlineExecutor(Executor):
    """Runs clients one after the other in this process; nothing is serialised."""

    def __init__(self, client_app: ClientApp) -> None:
        self._client_app = client_app

    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """Return the answers in the order of the calls."""
        with _own_random_streams():
            return [answer(self._client_app, call) for call in calls]


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
        self._pool = self._new_pool()

    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """Return the answers in the order of the calls; a killed worker's calls run once more."""
        try:
            return list(self._pool.map(_answer_in_worker, calls))
        except BrokenProcessPool:
            self._pool.shutdown(cancel_futures=True)
            self._pool = self._new_pool()
        answers = []
        for call in calls:
            try:
                answers.append(self._pool.submit(_answer_in_worker, call).result())
            except BrokenProcessPool:
                self._pool = self._new_pool()
                error = Error(ErrorCode.CLIENT_APP_CRASHED, "the worker process died twice")
                answers.append(Answer(Message(error, reply_to=call.message), call.context))
        return answers

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Stop the workers."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _new_pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            self._workers,
            # Forking a process with threads (torch, Flower's telemetry) can deadlock.
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(self._load,),
        )


def answer(client_app: ClientApp, call: Call) -> Answer:
    """Run one call with its own random streams.

    An exception becomes the error reply that Flower would send; `sys.exit` counts as a crash.
    """
    _seed_streams(call.seed)
    error: Error
    try:
        reply = client_app(call.message, call.context)
        if not isinstance(reply, Message):
            raise TypeError(f"the ClientApp returned {type(reply).__name__}, expected a Message")
        return Answer(reply, call.context)
    except SystemExit as exit_:
        error = Error(
            ErrorCode.CLIENT_APP_CRASHED, f"the ClientApp called sys.exit({exit_.code!r})"
        )
    except Exception as problem:
        last = traceback.extract_tb(problem.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        text = f"{type(problem).__name__}: {problem} ({where})"
        error = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, text)
    return Answer(Message(error, reply_to=call.message), call.context)


def _seed_streams(seed: int) -> None:
    random.seed(seed)
    # Clients are users' code, which may draw from the global streams: they are its inputs.
    np.random.seed(seed)  # noqa: NPY002
    torch = _imported_torch()
    if torch is not None:
        # What torch.manual_seed does, less its 150 microseconds of looking for every accelerator.
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)


@contextlib.contextmanager
def _own_random_streams() -> Iterator[None]:
    """Give back the server's random streams after clients have run in its process."""
    torch = _imported_torch()
    saved = random.getstate(), np.random.get_state()  # noqa: NPY002
    saved_torch = torch.get_rng_state() if torch is not None else None
    try:
        yield
    finally:
        random.setstate(saved[0])
        np.random.set_state(saved[1])  # noqa: NPY002
        if torch is not None:
            torch.set_rng_state(saved_torch)


def _imported_torch() -> Any:  # noqa: ANN401 - a module or None
    """Return torch if something has imported it; an app without torch should not pay for it."""
    return sys.modules.get("torch")


_worker_app: ClientApp | None = None


def _start_worker(load: Callable[[], ClientApp]) -> None:
    global _worker_app  # noqa: PLW0603 - one app a worker process
    # Ctrl-C belongs to the main process, which stops the workers when it has saved the run.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _worker_app = load()
    torch = _imported_torch()
    if torch is not None:
        torch.set_num_threads(1)


def _answer_in_worker(call: Call) -> Answer:
    assert _worker_app is not None
    with identity(call.message.metadata.run_id):
        return answer(_worker_app, call)
