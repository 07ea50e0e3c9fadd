"""What an executor is: it runs calls of clients, with the same replies wherever the clients run.

A call carries everything that the result may depend on: the message, the node's own context, and a
seed derived from run, node and job. Clients are users' code, which may draw from the global streams
of `random`, NumPy and torch, so these are seeded for each call and restored afterwards. The result
is then the same in every executor, with any number of workers and in any order.
"""

import _thread
import concurrent.futures.thread
import random
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from ctypes import memmove, string_at
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from sysconfig import get_path
from typing import Any, Self

import numpy as np
from flwr.app import ArrayRecord, Context, Error, Message, UserConfig
from flwr.clientapp import ClientApp
from numpy.random import bit_generator as _bit_generator
from numpy.random import mtrand

from fedstale.compat import is_of_app
from fedstale.errors import quoted
from fedstale.flower import ErrorCode, own_copy, with_content
from fedstale.interrupts import is_of_signal
from fedstale.simulation.flower_app import LIBRARIES

_MIN_SEED, _MAX_SEED = -0x8000_0000_0000_0000, 0xFFFF_FFFF_FFFF_FFFF
_N_BYTES = 4 * (624 + 1)
"""Bytes of a Mersenne twister's words and its place in them, in NumPy."""
# How long a client's own threads may outlast it; a device's process waits for them too.
_THREADS_PATIENCE_S = 60.0


@dataclass(slots=True)
class ClientCall:
    """One message to one client."""

    message: Message
    context: Context
    seed: int
    """Seeds every global random stream that the client may use, in [0, 2^32)."""


@dataclass(slots=True)
class ClientReply:
    """A client's reply to a call, and the context that it leaves."""

    reply: Message
    context: Context
    """The context that was given, or its changed copy where the client ran in another process."""


class Executor(ABC):
    """Runs calls; a context manager that owns its workers."""

    batch: int = 1
    """Calls that are worth bringing together; a grid may train jobs ahead to reach so many."""
    is_remote: bool = False
    """Whether clients run in other processes, which calls are pickled to."""
    description: str = ""
    """What runs the clients, in words."""

    @abstractmethod
    def run(self, calls: Sequence[ClientCall]) -> list[ClientReply]:
        """Return the replies in the order of the calls; a client's exception is an error reply."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        """Release the workers, if there are any."""
        return


class InlineExecutor(Executor):
    """Runs clients one after the other in this process; nothing is serialised."""

    description = "inline, in this process"

    def __init__(self, client_app: ClientApp) -> None:
        self._client_app = client_app

    def run(self, calls: Sequence[ClientCall]) -> list[ClientReply]:
        """Return the replies in the order of the calls."""
        with ServerStreams():
            return [run_client(self._client_app, call) for call in calls]


def version_of(record: ArrayRecord) -> tuple[int, ...]:
    """Return the identity of arrays: those of their bytes, which never change.

    Valid for as long as the bytes are kept.
    """
    return tuple(id(array.data) for array in record.values())


def run_client(client_app: ClientApp, call: ClientCall) -> ClientReply:
    """Run one call with its own random streams.

    An exception becomes the error reply that Flower would send; `sys.exit` counts as a crash.
    """
    seed_streams(call.seed)
    n_threads = _thread._count()
    before = set(threading.enumerate()) if n_threads else {threading.current_thread()}
    given = call.context.run_config.copy()
    try:
        reply = client_app(call.message, call.context)
        if call.context.run_config != given:
            raise written_to(call.context, given)
        if not isinstance(reply, Message):
            raise TypeError(f"the ClientApp returned {type(reply).__name__}, expected a Message")
        if _thread._count() > n_threads:
            _wait_for_threads(before)
        # The app may keep the records, and write to them for its next message.
        if not reply.has_error():
            reply = with_content(reply, own_copy(reply.content, arrays=False))
        return ClientReply(reply, call.context)
    except (Exception, SystemExit, KeyboardInterrupt) as problem:
        call.context.run_config = given
        return failed_reply(call, problem)


def written_to(context: Context, given: UserConfig) -> ValueError:
    """Return the error of a client that has not left its run config, the run's, as it was given."""
    written = context.run_config
    keys = sorted(k for k in {*given, *written} if given.get(k) != written.get(k))
    return ValueError(
        f"context.run_config was written to ({', '.join(keys)}): a client cannot change the run's "
        "settings; what its node is to remember goes into context.state"
    )


def failed_reply(call: ClientCall, problem: BaseException) -> ClientReply:
    """Return the error reply that Flower would send for what a client has raised.

    Raises:
        KeyboardInterrupt: the problem itself, if it is not the client's but of a signal.
    """
    if isinstance(problem, KeyboardInterrupt) and is_of_signal(problem):
        raise problem
    if isinstance(problem, SystemExit):
        code = ErrorCode.CLIENT_APP_CRASHED
        text = f"the ClientApp called sys.exit({quoted(problem.code, 100, repr)})"
    else:
        code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
        last = _in_the_app(traceback.extract_tb(problem.__traceback__))
        where = f"{Path(last.filename).name}:{last.lineno}"
        text = f"{type(problem).__name__}: {quoted(problem, 400)} ({where})"
    return ClientReply(Message(Error(code, text), reply_to=call.message), call.context)


def _in_the_app(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary:
    """Return where an exception left the app: the last line of its own, or else of all."""
    others = (str(get_path("stdlib")), __file__, "<")
    own = [
        frame
        for frame in frames
        if not frame.filename.startswith(others) and not LIBRARIES & {*Path(frame.filename).parts}
    ]
    return (own or frames)[-1]


def _wait_for_threads(before: set[threading.Thread]) -> None:
    """Wait for the threads that a client has left behind, as the end of a process does.

    One that ran on would draw from the random streams of the next client. Those that a library has
    started for itself, such as joblib for its processes, stay as long as the library wants.

    Raises:
        RuntimeError: one does not end.
    """
    # Idle workers of a thread pool wait for work that never comes.
    pooled = concurrent.futures.thread._threads_queues
    for thread in set(threading.enumerate()) - before:
        if thread.daemon or thread in pooled or not is_of_app(thread):
            continue
        thread.join(_THREADS_PATIENCE_S)
        if thread.is_alive():
            raise RuntimeError(
                f"the ClientApp left the thread {thread.name!r} running: join it before returning"
            )


@dataclass(slots=True)
class _Entropy:
    """What NumPy seeds a generator with that is given no seed."""

    seed: int = 0
    source: random.Random | None = None
    """Made when it is needed: most clients do not."""

    def draw(self, n_bits: int) -> int:
        if self.source is None:
            self.source = random.Random(self.seed)
        return self.source.getrandbits(n_bits)


_ENTROPY = _Entropy()
_FOR_CLIENTS = np.random.MT19937(0)
"""NumPy's stream while clients run, who each seed it anew."""
_NUMPY: Any = _bit_generator


@contextmanager
def seeded_entropy() -> Iterator[None]:
    """Seed NumPy's generators that are given no seed by that of the streams, not by the system.

    An app that calls `numpy.random.default_rng()` means that its runs differ, not that the same
    run is never to be seen again.
    """
    before = _ENTROPY.seed, _ENTROPY.source, _NUMPY.randbits
    _ENTROPY.seed, _ENTROPY.source, _NUMPY.randbits = 0, None, _ENTROPY.draw
    try:
        yield
    finally:
        _ENTROPY.seed, _ENTROPY.source, _NUMPY.randbits = before


def seed_streams(seed: int) -> None:
    """Seed every global stream that exists; seed is in [0, 2^32)."""
    _ENTROPY.seed, _ENTROPY.source = seed, None
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    keras: Any = sys.modules.get("keras")
    if keras is not None:
        keras.utils.set_random_seed(seed)
    elif (tensorflow := sys.modules.get("tensorflow")) is not None:
        tensorflow.random.set_seed(seed)
    torch = sys.modules.get("torch")
    if torch is not None:
        # What torch.manual_seed does, less its 150 microseconds of looking for every accelerator.
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)


class ServerStreams:
    """The server's global random streams, given back after clients have run in its process.

    NumPy's is exchanged for another meanwhile, since to set its state takes as long as an empty
    client.
    """

    def __enter__(self) -> None:
        self._torch = sys.modules.get("torch")
        self._seed = nullcontext() if self._torch is None else quick_manual_seed()
        self._entropy = _ENTROPY.seed, _ENTROPY.source, _NUMPY.randbits
        _NUMPY.randbits = _ENTROPY.draw
        self._of_torch = None if self._torch is None else self._torch.get_rng_state()
        self._python = random.getstate()
        self._generator = mtrand.get_bit_generator()
        self._numpy: Any = None
        """What a stream forgets that is exchanged: the second one of a pair of normal numbers."""
        if type(self._generator) is np.random.MT19937:
            at = self._generator.ctypes.state_address
            before = string_at(at, _N_BYTES)
            # To draw a second one moves nothing.
            second = np.random.standard_normal()  # noqa: NPY002
            if string_at(at, _N_BYTES) == before:
                words = np.frombuffer(before, np.uint32)
                self._numpy = "MT19937", words[:-1], int(words[-1]), 1, second
            else:
                memmove(at, before, _N_BYTES)
        else:
            self._numpy = np.random.get_state(legacy=False)  # noqa: NPY002
        mtrand.set_bit_generator(_FOR_CLIENTS)
        self._seed.__enter__()

    def __exit__(self, *problem: object) -> None:
        self._seed.__exit__(None, None, None)
        _ENTROPY.seed, _ENTROPY.source, _NUMPY.randbits = self._entropy
        random.setstate(self._python)
        mtrand.set_bit_generator(self._generator)
        if self._numpy is not None:
            np.random.set_state(self._numpy)  # noqa: NPY002
        if self._torch is not None:
            self._torch.set_rng_state(self._of_torch)


@contextmanager
def quick_manual_seed() -> Iterator[None]:
    """Make `torch.manual_seed` seed the CPU alone where there is nothing else to seed.

    For each kind of accelerator that is missing, torch 2.13 formats the call stack and keeps it
    for when there is one: a millisecond a call, a fifth of what a small client takes, and
    memory that is never given back. The stream that is seeded is the same.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or _has_accelerator():
        yield
        return
    generator, original = torch.default_generator, torch.manual_seed

    def manual_seed(seed: int) -> Any:
        number = int(seed)
        if not _MIN_SEED <= number <= _MAX_SEED:
            return original(seed)  # which says what is accepted
        return generator.manual_seed(number)

    torch.manual_seed = torch.random.manual_seed = manual_seed
    try:
        yield
    finally:
        torch.manual_seed = torch.random.manual_seed = original


@cache
def _has_accelerator() -> bool:
    torch = imported_torch()
    return bool(torch.accelerator.is_available() or torch.cuda.is_available())


def imported_torch() -> Any:
    """Return torch if something has imported it; an app without torch should not pay for it."""
    return sys.modules.get("torch")
