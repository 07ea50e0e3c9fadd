"""The threads of a ServerApp: how they begin, use the grid in turns, and end.

An app may ask clients from threads of its own, a pool or an event loop of asyncio. Those that it
starts while it runs are of the app, and take turns on the virtual clock (`turns`); what they wait
in is in `waits`. Threads that a library starts for itself see wall time.
"""

import logging
import threading
import weakref
from _thread import allocate_lock
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import inf
from time import perf_counter
from typing import NoReturn, ParamSpec, TypeVar

from fedstale.compat.callers import pools_of, set_app
from fedstale.compat.turns import AppThread, Ended, Turns
from fedstale.compat.waits import release_lock, waiting_on
from fedstale.errors import ConfigError, FedstaleError, RunEnded
from fedstale.strategies.server import Callback, Runtime

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

_GIVEN_UP_S = 10.0
"""Wall time for which a thread stands still that is left behind when the app has ended."""


class ServerThreads(Turns, Callback):
    """The threads of one app; the first is the one that runs it."""

    _pools: tuple[Callable[[], ThreadPoolExecutor | None], ...] = ()
    """Those of the app, as long as it holds them."""
    first: int | None = None
    """Identity of the thread that runs the app, while it runs."""
    _n_started = 1
    _of_loop: int | None = None

    # The run.

    @contextmanager
    def running(self, packages: Sequence[str]) -> Iterator[None]:
        """Make this thread the app's first; all others have ended when the block has.

        They are waited for, as the end of a process does.

        Args:
            packages: import names of the app.

        Raises:
            RunEnded: the run has ended in one of them.
            FedstaleError: one of them has ended with it.
        """
        self._n_others = threading.active_count() - 1
        main = self._holder = AppThread(0, threading.current_thread())
        self.first = threading.get_ident()
        self._app, self._by_ident = [main], {self.first: main}
        own = weakref.proxy(self)
        set_app(packages, lambda: own.several)
        with waiting_on(self):
            try:
                yield
                ended = self._close(main)
                if ended is not None:
                    raise ended
            except Exception as problem:
                # An app may fail for what a thread has not brought that met the end of the run.
                ended = self._ended
                if ended is not None and ended is not problem:
                    raise ended from problem
                raise
            except (RunEnded, KeyboardInterrupt) as end:
                self._ended = self._ended or end
                raise
            finally:
                self._close(main)
                self._app, self._by_ident, self._holder, self.several = [], {}, None, False
                self.first = None

    def _close(self, main: AppThread) -> Ended | None:
        """Wait for the other threads, and return what has ended the run in one of them."""
        if not self.several:
            self._join_finished()
            return self._ended
        for pool in self._pools:
            if (executor := pool()) is not None:
                executor.shutdown(wait=False)
        self._is_closing = True
        self._wait_to_close(main, lambda t: not t.thread.daemon)
        ended, self._ended = self._ended, self._ended or RunEnded("the app came to its end")
        self._wait_to_close(main, lambda _: True)
        for left in self._app[1:]:
            logger.warning(
                "thread %r waits for something outside the run, and is left behind",
                left.thread.name,
            )
        self._app = [main]
        self._join_finished()
        return ended

    def _wait_to_close(self, main: AppThread, awaited: Callable[[AppThread], bool]) -> None:
        def has_gone(one: AppThread) -> bool:
            return not one.waiting and perf_counter() - one.away_since > _GIVEN_UP_S

        def is_over() -> bool:
            with self._mutex:
                return all(has_gone(one) for one in self._app[1:] if awaited(one))

        while not is_over():
            self._wait(main, ready=is_over)

    # Threads begin and end.

    def start(self, thread: threading.Thread, original: Callable[[threading.Thread], None]) -> None:
        """Start a thread of the app; it runs when its turn comes."""
        one, run, arrived = AppThread(self._n_started, thread), thread.run, allocate_lock()
        self._pools = (*self._pools, *pools_of(thread))
        arrived.acquire()

        def run_in_turn() -> None:
            vars(thread).pop("run", None)
            ident = threading.get_ident()
            self._by_ident[ident] = one
            self.time.threads.add(ident)
            try:
                self._wait(one, until=-inf, arrived=arrived)
                if self._ended is None:
                    run()
            except (RunEnded, FedstaleError, KeyboardInterrupt) as problem:
                self._ended = self._ended or problem
            finally:
                self._leave(one, ident)

        # Python waits for the new thread, which has no turn yet.
        thread.run = run_in_turn  # type: ignore[method-assign]
        with self._mutex:
            self._app.append(one)
            self._n_started += 1
            self.several = True
        try:
            self.time.outside(original, thread)
        except BaseException:
            self._app.remove(one)
            raise
        self.time.outside(arrived.acquire)

    def _leave(self, me: AppThread, ident: int) -> None:
        """End this thread's part, and give the turn to the next."""
        with self._mutex:
            if me in self._app:
                self._app.remove(me)
            self._by_ident.pop(ident, None)
            self.time.threads.discard(ident)
            self._gone.append(me.thread)
            self.several = len(self._app) > 1
            if self._holder is me:
                self._holder = next((one for one in self._app if one.waiting), None)
                if self._holder is not None:
                    release_lock(self._holder.go)

    def enter(self) -> AppThread | None:
        """Wait for this thread's turn to use the grid; return the thread, None outside a run.

        Raises:
            RunEnded: the run has ended in another thread.
            ConfigError: the thread is not one that the app has started during the run.
        """
        if not self._app:
            return None
        me = self._by_ident.get(threading.get_ident())
        if me is None:
            self._refuse(
                "uses the grid: expected one that the ServerApp has started by threading.Thread, "
                "a ThreadPoolExecutor or asyncio while it runs, and not before"
            )
        if self._holder is not me:
            self._wait(me, until=-inf)
        self._check()
        return me

    def take_turn(self, operation: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Do an operation of the grid when the turn of this thread comes."""
        if not self.several and self.first == threading.get_ident() and not self._ended:
            # It is the only one, as in most apps.
            return operation(*args, **kwargs)
        me = self.enter()
        if me is None:
            return operation(*args, **kwargs)
        me.depth += 1
        try:
            return operation(*args, **kwargs)
        except RunEnded as problem:
            self.end(problem)
            raise
        finally:
            me.depth -= 1

    def _refuse(self, what: str) -> NoReturn:
        """End the run for what this thread does."""
        name = threading.current_thread().name
        self._ended = self._ended or ConfigError(f"the thread {name!r} {what}")
        raise self._ended

    def started(self, run: Runtime) -> None:
        """Refuse a second strategy at a time: the rounds of two would be counted as one's.

        Raises:
            ConfigError: another thread is in the midst of one.
        """
        me = threading.get_ident()
        if not run.n_loops:
            self._of_loop = me
        elif self._of_loop != me:
            self._refuse(
                "starts a strategy while another thread is in the midst of one: expected one "
                "strategy at a time"
            )
