"""What threads of a ServerApp wait in: locks, joins and event loops, all on the virtual clock.

A thread that waits lets the others go on, and its timeout is one of the virtual clock. For the time
of a run the locks that the app's threads make are `AppLock`, also inside conditions, events,
semaphores, queues, futures and pools, which Python builds of them; `Thread.start`, `Thread.join`
and the selector of asyncio are replaced. Whatever a library makes or waits for with threads of its
own sees wall time, as ever. `server_threads` decides who goes on.
"""

import concurrent.futures.thread
import multiprocessing.pool
import os
import queue
import selectors
import sys
import sysconfig
import threading
from _thread import LockType, allocate_lock
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from fedstale.simulation.clock import replaced

if TYPE_CHECKING:
    from fedstale.simulation.server_threads import ServerThreads
    from fedstale.simulation.turns import Turns

T = TypeVar("T")

_SITE = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("purelib", "platlib"))
_LIBRARIES = (*_SITE, *(f"{sysconfig.get_path(n)}{os.sep}" for n in ("stdlib", "platstdlib")))
# Waiting through these is waiting for what the caller waits for.
_PASSED = ("threading.", "queue.", "contextlib.", "selectors.", "multiprocessing/pool.")
_PASSED_PACKAGES = ("concurrent/futures/thread.", "concurrent/futures/_base.", "asyncio/")
_APP_PACKAGES = ("flwr", "fedstale", "anyio", "joblib")

_running: "ServerThreads | None" = None
"""The threads of the run that goes on in this process."""
_packages: Sequence[str] = ()


def _forget() -> None:
    """See wall time in a forked child, which has only one of the threads."""
    global _running  # noqa: PLW0603 - there is one run a process
    if _running is not None:
        _running.time.threads.clear()
        _running = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class AppLock:
    """A lock of `threading` on which threads of the app wait in virtual time."""

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        """Make it free."""
        self._lock = allocate_lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock, as that of `threading`; a timeout is in virtual s."""
        if not blocking or timeout == 0:
            return self._lock.acquire(blocking, timeout)
        if self._lock.acquire(blocking=False):
            return True
        if _running is None:
            return self._lock.acquire(blocking, timeout)
        return _acquire(_running, self._lock, timeout)

    def release(self) -> None:
        """Let the lock go."""
        self._lock.release()
        if _running is not None:
            _running.look_again()

    def locked(self) -> bool:
        """Return whether someone has the lock."""
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, problem: object, where: TracebackType | None
    ) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        # What Python calls in a forked child.
        self._lock = allocate_lock()


@contextmanager
def waiting_on(threads: "ServerThreads", packages: Sequence[str]) -> Iterator[None]:
    """Let the threads of an app wait on the virtual clock while the block runs.

    Args:
        threads: those of the app.
        packages: import names of the app.
    """
    global _running, _packages
    start, join, select = (
        threading.Thread.start,
        threading.Thread.join,
        selectors.DefaultSelector.select,
    )

    def started(thread: threading.Thread) -> None:
        if threads.current() is None:
            start(thread)
        elif _is_of_app(thread):
            threads.start(thread, start)
        else:
            threads.computing += _computing(thread)
            threads.time.outside(start, thread)

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        _join(threads, thread, timeout, join)

    def selected(
        selector: selectors.DefaultSelector, timeout: float | None = None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        return _select(threads, partial(select, selector), timeout)

    of_app: dict[Any, Callable[[], Any]] = {
        allocate_lock: AppLock,
        threading.Lock: AppLock,
        threading.RLock: threading._PyRLock,  # type: ignore[attr-defined]
        queue.SimpleQueue: queue._PySimpleQueue,  # type: ignore[attr-defined]
    }

    def made_by(original: Callable[[], Any], mine: Callable[[], Any]) -> Callable[[], Any]:
        def make() -> Any:  # noqa: ANN401 - a lock or a queue
            return (original if threads.current() is None else mine)()

        return make

    stand_ins = [(original, made_by(original, mine)) for original, mine in of_app.items()]
    classes: list[tuple[Any, str, Any, Any]] = [
        (threading.Thread, "start", start, started),
        (threading.Thread, "join", join, joined),
        (selectors.DefaultSelector, "select", select, selected),
    ]
    before = _running, _packages
    _running, _packages = threads, (*packages, *_APP_PACKAGES)
    _is_library.cache_clear()
    with ExitStack() as stack:
        stack.enter_context(replaced(stand_ins, within=("threading", "queue", *packages)))
        for owner, name, original, mine in classes:
            setattr(owner, name, mine)
            stack.callback(setattr, owner, name, original)
        try:
            yield
        finally:
            _running, _packages = before


def _acquire(threads: "Turns", lock: LockType, timeout: float) -> bool:
    """Take a lock that another thread has; a timeout is in virtual s, -1 for none."""
    me = threads.current()
    if me is None or (timeout < 0 and not threads.several):
        return lock.acquire(True, timeout)
    if not is_called_by_app():
        with me.waits_for_others():
            return lock.acquire(True, timeout)
    return threads.wait_until(
        me,
        None if timeout < 0 else timeout,
        lambda: not lock.locked(),
        taken=lambda: lock.acquire(blocking=False),
    )


def _join(
    threads: "Turns",
    thread: threading.Thread,
    timeout: float | None,
    join: Callable[[threading.Thread, float | None], None],
) -> None:
    """Wait for the end of a thread, at most for so many virtual s; `join` does in wall time."""
    me = threads.current()
    if me is None or me.thread is thread:
        join(thread, timeout)
    elif threads.has(thread):
        threads.wait_until(me, timeout, lambda: not threads.has(thread))
    else:
        with me.waits_for_others():
            join(thread, timeout)


def _select(
    threads: "Turns", look: Callable[[float | None], list[T]], timeout: float | None
) -> list[T]:
    """Wait as an event loop does, for files or for so many virtual s; `look` does in wall time."""
    me = threads.current()
    found = look(timeout if me is None else 0)
    if me is None or found or (timeout is not None and timeout <= 0):
        return found
    if timeout is None and not threads.several:
        return look(None)
    with me.waits_for_others():
        threads.wait_until(me, timeout, lambda: bool(look(0)))
    return look(0)


def is_called_by_app(depth: int = 1) -> bool:
    """Return whether the app itself waits in this thread, and no library on its own account.

    Args:
        depth: frames above this one at which to begin to look.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and not _is_passed(file):
            return not _is_library(file)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return True


def pools_of(thread: threading.Thread) -> list[Callable[[], ThreadPoolExecutor | None]]:
    """Return the pool, weakly, for which a thread works that has not begun to; if it does."""
    is_worker = getattr(thread, "_target", None) is concurrent.futures.thread._worker
    return [thread._args[0]] if is_worker else []  # type: ignore[attr-defined]


def _computing(thread: threading.Thread) -> list[Callable[[], bool]]:
    """Return what tells whether processes are at work, if a thread waits for their results."""
    target: Any = getattr(thread, "_target", None)
    given: Sequence[Any] = getattr(thread, "_args", ())
    if target is multiprocessing.pool.Pool._handle_results:  # type: ignore[attr-defined]
        open_: Any = given[2]
    else:
        open_ = getattr(thread, "pending_work_items", None)
    return [] if open_ is None else [lambda: bool(open_) and thread.is_alive()]


def _is_of_app(thread: threading.Thread) -> bool:
    """Return whether a thread does the work of the app, and not a library's own."""
    runs: Any = type(thread).run
    if runs is threading.Thread.run:
        runs = getattr(thread, "_target", None)
    runs = getattr(runs, "func", runs)  # of a partial
    runs = getattr(runs, "__func__", runs)
    code = getattr(runs, "__code__", None)
    if code is None:
        return True
    if code.co_filename == multiprocessing.pool.__file__:
        # Those of a ThreadPool; others serve processes, or look after their workers.
        given = getattr(thread, "_args", ())
        is_local = any(isinstance(each, queue._PySimpleQueue) for each in given)  # type: ignore[attr-defined]
        return is_local and code.co_name in ("worker", "_handle_tasks", "_handle_results")
    if code.co_name == "_do_waitpid":
        return False
    return _is_passed(code.co_filename) or not _is_library(code.co_filename)


@cache
def _is_passed(file: str) -> bool:
    stdlib = f"{sysconfig.get_path('stdlib')}{os.sep}"
    return file.startswith(stdlib) and file.removeprefix(stdlib).startswith(
        (*_PASSED, *_PASSED_PACKAGES)
    )


@cache
def _is_library(file: str) -> bool:
    """Return whether a file is one of Python or of an installed package other than the app's."""
    for site in _SITE:
        if file.startswith(site):
            top = file.removeprefix(site).split(os.sep)[0].removesuffix(".py")
            return top not in _packages
    return file.startswith(_LIBRARIES)
