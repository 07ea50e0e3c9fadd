"""The threads of a ServerApp: how they begin, take turns on a virtual clock, and end.

An app may ask clients from threads of its own, a pool or an event loop of asyncio. Those that it
starts while it runs are of the app, and one of them runs at a time: until it waits for an instant
or an event of the clock, or for another thread; what they wait in is in `waits`. Then the next one
goes on whose wait is over, in the order in which they began to wait and were started; so a run
repeats. If no wait is over, the clock moves to the first instant that a thread waits for. Threads
that a library starts for itself see wall time.

A thread that waits for what is not seen here, such as a socket, is found by its processor clock,
which stands still, and the others go on without it. Who waits for a turn looks for that now and
then; no thread watches.
"""

import logging
import threading
import time
import weakref
from _thread import LockType, allocate_lock
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import NoReturn, ParamSpec, TypeVar

from fedstale.compat.callers import pools_of, set_app
from fedstale.compat.virtual_time import VirtualTime
from fedstale.compat.waits import Mutex, acquire_lock, release_lock, waiting_on
from fedstale.errors import ConfigError, FedstaleError, RunEnded
from fedstale.strategies.server import Callback, Runtime

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

_sleep, _wall, _wall_ns = time.sleep, time.perf_counter, time.perf_counter_ns
_clock_of = getattr(time, "pthread_getcpuclockid", None)
_clock_ns: Callable[[int], int] = getattr(time, "clock_gettime_ns", lambda _: 0)

_LOOK_S, _POLL_S = 1.0, 0.002
"""Wall time from one look at the thread whose turn it is to the next; and, while all wait for what
no thread of the app does, at what they wait for."""
_IDLE_S, _IDLE_SHARE = 5.0, 0.05
"""Wall time for which a thread stands still; it may have run for a share of it, since it may look
from time to time."""
_DEADLOCK_S, _LONG_S = 5.0, 60.0
"""Wall time after which threads that wait for each other end the run, and after which one that runs
on is told of."""
_SPINS = 100
"""Calls at one instant that wait for nothing, after which each takes time."""
_GIVEN_UP_S = 10.0
"""Wall time for which a thread stands still that is left behind when the app has ended."""


Ended = FedstaleError | RunEnded | KeyboardInterrupt
"""What ends a run in one thread, and so in all."""


@dataclass(eq=False, slots=True)
class AppThread:
    """A thread of the app, and what it waits for."""

    order: int
    """Of being started."""
    thread: threading.Thread
    until: float = -inf
    """Instant in s at which its wait is over in any case."""
    event: Callable[[], bool] | None = None
    """Tells whether it is over for what has arrived; then it waits for the next event too."""
    ready: Callable[[], bool] | None = None
    """Tells whether it is over for what another thread has done; None for a wait in the grid."""
    target: float = -inf
    """Instant in s to which it moves the clock, once chosen; -inf if its wait is over."""
    asked: int = 0
    """Turns that had been taken when it began to wait."""
    waiting: bool = False
    chosen: bool = False
    raises: bool = False
    """Whether its wait ends with the end of the run."""
    not_of_app: bool = False
    """Whether it may wait for what no thread of the app does."""
    away_since: float = inf
    """Wall time since which the others go on without it, for it stands still; inf if not."""
    depth: int = 0
    """Operations of the grid that it is in."""
    spins: int = 0
    go: LockType = field(default_factory=allocate_lock)

    def __post_init__(self) -> None:
        acquire_lock(self.go)


class ServerThreads(Callback):
    """The threads of one app; the first is the one that runs it."""

    def __init__(
        self,
        virtual: VirtualTime,
        next_event: Callable[[], float],
        advance: Callable[[float], object],
    ) -> None:
        """Begin without a thread.

        Args:
            virtual: tells which threads see virtual time.
            next_event: returns the instant in s of the next reply or failure; inf for none.
            advance: moves the clock to an instant.
        """
        self.time, self._next_event, self._advance = virtual, next_event, advance
        self.several = False
        """Whether the app has more than one thread now."""
        self._app: list[AppThread] = []
        self._by_ident: dict[int, AppThread] = {}
        self._holder: AppThread | None = None
        # Python may run anything while it holds this, such as the end of a pool.
        self._mutex = Mutex()
        self._gone: list[threading.Thread] = []
        self.computing: list[Callable[[], bool]] = []
        """Each tells whether processes work for a thread, which takes no virtual time."""
        self._n_turns = 0
        self._seen, self._seen_at = 0, 0.0
        """Number of the turn that was last looked at, and the wall time at which it was first."""
        self._stood = 0, 0.0
        """Processor time in ns of the thread whose turn it is, and since when it is about that."""
        self._ended: Ended | None = None
        self._is_closing = False
        self._n_others = 0
        """Threads that were there before the run."""
        self._pools: tuple[Callable[[], ThreadPoolExecutor | None], ...] = ()
        """Those of the app, as long as it holds them."""
        self.first: int | None = None
        """Identity of the thread that runs the app, while it runs."""
        self._n_started, self._of_loop = 1, 0

    def current(self) -> AppThread | None:
        """Return this thread, if it is one of the app and sees virtual time."""
        ident = threading.get_ident()
        return self._by_ident.get(ident) if ident in self.time.threads else None

    def has(self, thread: threading.Thread) -> bool:
        """Return whether a thread takes turns; it does until it ends."""
        return any(one.thread is thread for one in self._app)

    def until(self, until: float, event: Callable[[], bool] | None = None) -> float:
        """Give others the turn until the clock may move to the instant that this thread waits for.

        Args:
            until: instant in s.
            event: tells whether the wait is over for a reply or failure, if it may be.

        Returns:
            The instant to which the clock is to move, for the next event if that is earlier; -inf
            if the wait is over, and inf if no thread waits for an instant.
        """
        me, now = self._by_ident[threading.get_ident()], self.time.now()
        me.spins = me.spins + 1 if until <= now else 0
        if me.spins > _SPINS:
            # It polls: what it polls for takes time, in steps that grow.
            until = now + 0.001 * 2 ** min(me.spins - _SPINS, 20)
            event = self._has_moved(now)
        self._wait(me, until, event=event)
        self._check()
        return me.target

    def _has_moved(self, now: float) -> Callable[[], bool]:
        return lambda: self.time.now() > now

    def others_wait(self) -> bool:
        """Return whether another thread waits for an instant, or may go on."""
        me = self.current()
        return any(
            one.ready is None or one.until < inf or one.ready()
            for one in self._app
            if one.waiting and one is not me
        )

    def end(self, problem: RunEnded) -> None:
        """Note that the run has ended in this thread, if there are others, which end too."""
        if self.several:
            self._ended = self._ended or problem

    def _check(self) -> None:
        if self._ended is not None:
            raise self._ended

    def wait_until(
        self,
        me: AppThread,
        timeout: float | None,
        ready: Callable[[], bool],
        taken: Callable[[], bool] | None = None,
        *,
        not_of_app: bool = False,
    ) -> bool:
        """Wait for another thread, at most for a time in virtual s; return whether it is ready."""
        end = inf if timeout is None else self.time.now() + timeout
        while True:
            self._wait(me, end, ready=ready, not_of_app=not_of_app)
            if (taken or ready)():
                return True
            if self.time.now() >= end:
                return False
            if me.target > -inf:
                try:
                    self._advance(me.target)
                except RunEnded as problem:
                    self.end(problem)
                    raise

    def _wait(
        self,
        me: AppThread,
        until: float = inf,
        *,
        event: Callable[[], bool] | None = None,
        ready: Callable[[], bool] | None = None,
        not_of_app: bool = False,
        arrived: LockType | None = None,
    ) -> None:
        """Give others the turn until this thread's comes, whose wait is over or is the next.

        Raises:
            RunEnded: the run has ended, and nothing else ends this wait.
        """
        with self._mutex:
            me.until, me.event, me.ready, me.asked = until, event, ready, self._n_turns
            me.not_of_app, me.chosen, me.away_since, me.waiting = not_of_app, False, inf, True
            acquire_lock(me.go, False)
            chooses = self._holder in (me, None)
            if chooses:
                self._holder = me
        if arrived is not None:
            release_lock(arrived)
        try:
            while not me.chosen:
                if chooses:
                    self._choose(me)
                if not me.chosen:
                    chooses = self._rest(me)
        except KeyboardInterrupt as problem:
            # On its way out the app may wait for its threads, which would go on.
            self._ended = self._ended or problem
            raise
        finally:
            me.waiting = False
        self._join_finished()
        if me.raises:
            me.raises = False
            assert self._ended is not None
            raise self._ended

    def _choose(self, me: AppThread) -> None:
        """Give the turn, which this thread has, to the one that goes on; possibly to this one."""
        try:
            one = self._next()
        except (RunEnded, FedstaleError) as problem:
            self._ended = self._ended or problem
            one = self._next()
        with self._mutex:
            self._holder = one
            if one is not None:
                self._n_turns += 1
                one.chosen = True
                if one is not me:
                    release_lock(one.go)

    def _next(self) -> AppThread | None:
        """Return the thread whose turn it is; None if all wait for others that do not."""
        waiting = [one for one in self._app if one.waiting]
        while not (over := self._ready(waiting)) and any(is_busy() for is_busy in self.computing):
            _sleep(_POLL_S)
        if over:
            one = min(over, key=lambda one: (one.asked, one.order))
            one.target = -inf
            return one
        if self._ended is not None:
            # Nobody is left to end these waits. The first thread goes first, unless it has ended.
            held = [one for one in waiting if not (self._is_closing and one.order == 0)]
            for one in held[:1]:
                one.raises = True
            return held[0] if held else None
        event = self._next_event() if any(one.event for one in waiting) else inf
        for one in waiting:
            one.target = min(one.until, event) if one.event else one.until
        first = min(waiting, key=lambda one: (one.target, one.asked, one.order))
        if first.target < inf:
            return first
        return next((one for one in waiting if one.ready is None), None)

    def _ready(self, waiting: list[AppThread]) -> list[AppThread]:
        """Return the threads whose wait is over."""
        now, has_ended = self.time.now(), self._ended is not None

        def is_ready(one: AppThread) -> bool:
            if one.until <= now:
                return True
            if one.ready is not None:
                return one.ready()
            return has_ended or (one.event is not None and one.event())

        return [one for one in waiting if is_ready(one)]

    # Threads that wait for what is not seen here.

    def _rest(self, me: AppThread) -> bool:
        """Wait to be told to choose, or look after a while; return whether to choose now."""
        # Whoever ends these waits is no thread of the app, and tells nobody.
        polls = self._holder is None and me is next(one for one in self._app if one.waiting)
        if acquire_lock(me.go, True, _POLL_S if polls else _LOOK_S):
            return True
        with self._mutex:
            holder = self._holder
            if holder is None:
                # First, for whatever lets a lock go looks for one who chooses.
                self._holder = me
                self._end_deadlock()
            elif holder is not me and self._is_blocked(holder):
                holder.away_since, self._holder = _wall(), me
            else:
                return False
        return True

    def _is_blocked(self, holder: AppThread) -> bool:
        """Test if the thread in turn has waited for long for something that is not seen."""
        if holder.waiting or holder.depth or holder.thread.ident not in self.time.threads:
            return False  # It is in the grid, or runs what sees wall time.
        lasts_s, now, spent_ns = self._turn_s(), _wall(), _processor_ns(holder.thread)
        before_ns, since = self._stood
        if not lasts_s or spent_ns - before_ns > 1e9 * _IDLE_SHARE * (now - since):
            self._stood = spent_ns, now
        elif now - since > _IDLE_S:
            return True
        if lasts_s > _LONG_S:
            self._seen_at = inf
            logger.warning(
                "for %.0f s the other threads of the app have waited for %r, which does not",
                *(lasts_s, holder.thread.name),
            )
        return False

    def _turn_s(self) -> float:
        """Return for how long this turn has been looked at, in wall s; 0 at the first look."""
        if self._seen != self._n_turns:
            self._seen, self._seen_at = self._n_turns, _wall()
            return 0.0
        return _wall() - self._seen_at

    def _end_deadlock(self) -> None:
        """End a run in which each thread has waited for another one for some wall time."""
        n_others = threading.active_count() - len(self._app)
        may_go_on = n_others > self._n_others or any(
            one.not_of_app or not one.waiting for one in self._app
        )
        if self._turn_s() > _DEADLOCK_S and not may_go_on and self._ended is None:
            self._ended = RunEnded(
                "nothing can ever happen again: each thread of the app waits for another one",
                stuck=True,
            )

    def _join_finished(self) -> None:
        """Wait until threads have really ended that were the last to run: `is_alive` tells."""
        while self._gone:
            thread = self._gone.pop()
            self.time.outside(thread.join)

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
            return not one.waiting and _wall() - one.away_since > _GIVEN_UP_S

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


def _processor_ns(thread: threading.Thread) -> int:
    """Return the processor time of a thread in ns; where none is told, it is taken to run."""
    if _clock_of is None or thread.ident is None:
        return _wall_ns()
    return _clock_ns(_clock_of(thread.ident))
