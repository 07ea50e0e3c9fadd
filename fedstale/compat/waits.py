"""What threads of a ServerApp wait in: locks, queues, joins and event loops, in virtual time.

A thread that waits lets the others go on, and its timeout is one of the virtual clock. For the time
of a run the methods of Python's locks wait so, and with them conditions, events, semaphores,
queues, futures and pools, which are built of locks; so do `queue.SimpleQueue`, `Thread.join` and
the selectors of asyncio. The types stay what they are, and locks that were made before the run wait
as those made in it. What a library makes or waits for with threads of its own sees wall time, as
ever. `threads` decides who goes on.
"""

import os
import queue
import selectors
import threading
from _thread import LockType
from _thread import RLock as RLockType
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from fedstale.compat.callers import changed, computing, is_called_by_app, is_called_by_us, is_of_app

if TYPE_CHECKING:
    from fedstale.compat.threads import AppThread, ServerThreads

_running: "ServerThreads | None" = None
"""The threads of the run that goes on in this process."""

acquire_lock: Callable[..., bool] = LockType.acquire
release_lock = LockType.release
"""What the turns themselves wait in: the methods as Python has them."""
_acquire_rlock: Callable[..., bool] = RLockType.acquire
_release_rlock = RLockType.release
_get: Callable[..., Any] = queue.SimpleQueue.get
_get_now: Callable[..., Any] = queue.SimpleQueue.get_nowait


class Mutex(RLockType):  # type: ignore[misc] # which CPython lets one subclass
    """A lock of the turns' own, which never waits in virtual time."""

    __enter__ = RLockType.__enter__
    __exit__ = RLockType.__exit__


def _forget() -> None:
    """See wall time in a forked child, which has only one of the threads."""
    global _running  # noqa: PLW0603 - there is one run a process
    if _running is not None:
        _running.time.threads.clear()
        _running = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@contextmanager
def waiting_on(threads: "ServerThreads") -> Iterator[None]:
    """Make the threads of an app wait on the virtual clock while the block runs."""
    global _running  # noqa: PLW0603 - there is one run a process
    before, _running = _running, threads
    with ExitStack() as stack:
        for kind, methods in _methods().items():
            stack.enter_context(changed(kind, methods))
        try:
            yield
        finally:
            _running = before


def _methods() -> dict[type, dict[str, Any]]:
    """Return the methods that wait, by the type that has them."""
    take = _taking(acquire_lock, lambda lock: not lock.locked())
    retake = _taking(_acquire_rlock, _may_take)
    kinds = [k for k in vars(selectors).values() if isinstance(k, type) and "select" in vars(k)]
    return {
        LockType: dict.fromkeys(("acquire", "acquire_lock", "__enter__"), take),
        RLockType: {
            **dict.fromkeys(("acquire", "__enter__"), retake),
            "_acquire_restore": _restoring(retake),
        },
        queue.SimpleQueue: {"get": _got},
        threading.Thread: {
            "start": _starting(threading.Thread.start),
            "join": _joining(threading.Thread.join),
        },
        **{kind: {"select": _selecting(vars(kind)["select"])} for kind in kinds},
    }


def _waiter() -> "tuple[ServerThreads, AppThread] | None":
    """Return this thread of the app, if it sees virtual time and is in no operation of the grid."""
    if _running is None:
        return None
    me = _running.current()
    return None if me is None or me.depth else (_running, me)


def _wait(
    real: Callable[[], Any],
    timeout: float | None,
    ready: Callable[[], bool],
    taken: Callable[[], bool] | None = None,
    *,
    not_of_app: bool = False,
) -> Any:
    """Wait for another thread, in virtual time if it is the app that waits; `real` does not.

    `not_of_app` says that it may be for what no thread of the app does.
    """
    found = _waiter()
    is_alone = found is not None and timeout is None and not found[0].several
    if found is None or is_alone or not is_called_by_app():
        return real()
    threads, me = found
    return threads.wait_until(me, timeout, ready, taken, not_of_app=not_of_app)


# Locks.


def _may_take(lock: Any) -> bool:
    # Asked by the thread that chooses who goes on, which may have the lock itself.
    if lock._is_owned() or not _acquire_rlock(lock, blocking=False):
        return False
    _release_rlock(lock)
    return True


def _taking(take: Callable[..., bool], is_free: Callable[[Any], bool]) -> Callable[..., bool]:
    def acquire(lock: Any, blocking: bool = True, timeout: float = -1) -> bool:
        can_wait = blocking and (timeout == -1 or timeout > 0)
        if (can_wait or timeout == -1) and take(lock, False):
            return True
        if not can_wait or _running is None:
            return take(lock, blocking, timeout)
        waited: bool = _wait(
            lambda: take(lock, blocking, timeout),
            None if timeout < 0 else timeout,
            lambda: is_free(lock),
            lambda: take(lock, False),
        )
        return waited

    return acquire


def _restoring(take: Callable[..., bool]) -> Callable[..., None]:
    restore = RLockType._acquire_restore  # type: ignore[attr-defined]

    def restored(lock: Any, state: Any) -> None:
        # Nobody else of the app runs from here on to where it has the lock again.
        take(lock)
        _release_rlock(lock)
        restore(lock, state)

    return restored


# Queues, threads and event loops.


def _got(one: Any, block: bool = True, timeout: float | None = None) -> Any:
    """Get what is next in a `SimpleQueue`."""
    if not block or _waiter() is None or (timeout is not None and timeout <= 0):
        return _get(one, block, timeout)
    found: list[Any] = []

    def took() -> bool:
        try:
            found.append(_get_now(one))
        except queue.Empty:
            return False
        return True

    def really() -> bool:
        found.append(_get(one, block, timeout))
        return True

    if not took() and not _wait(really, timeout, lambda: not one.empty(), took):
        raise queue.Empty
    return found[0]


def _starting(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    def started(thread: threading.Thread) -> None:
        threads = _running
        if threads is None or threads.current() is None:
            start(thread)
        elif is_of_app(thread) and not is_called_by_us():
            threads.start(thread, start)
        else:
            threads.computing += computing(thread)
            threads.time.outside(start, thread)

    return started


def _joining(join: Callable[..., None]) -> Callable[..., None]:
    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        found = _waiter()
        if found is not None and found[1].thread is not thread and found[0].has(thread):
            found[0].wait_until(found[1], timeout, lambda: not found[0].has(thread))
        else:
            join(thread, timeout)

    return joined


def _selecting(select: Callable[..., Any]) -> Callable[..., Any]:
    def selected(loop: Any, timeout: float | None = None) -> Any:
        """Wait as an event loop does, for files or for so many virtual s."""
        if _waiter() is None or (timeout is not None and timeout <= 0):
            return select(loop, timeout)
        ready: list[Any] = select(loop, 0)
        if not ready:
            _wait(
                lambda: ready.extend(select(loop, timeout)),
                timeout,
                lambda: bool(select(loop, 0)),
                not_of_app=True,
            )
        return ready or select(loop, 0)

    return selected
