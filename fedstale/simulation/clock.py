"""The virtual clock of a simulation, what moves it when nothing happens, and who sees its time.

`VirtualClock` holds what will happen. `StallDetection` tells a strategy that waits from one that
loops in place. `VirtualTime` makes `time.time` and `time.sleep` of a ServerApp mean the virtual
clock.
"""

import datetime
import heapq
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC
from enum import IntEnum
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from fedstale.errors import RunEnded
from fedstale.strategies.types import Bits, Stateful

T = TypeVar("T")

# A strategy that has sent nothing for this long is waiting for something that will not come.
_PATIENCE_S = 7 * 86_400.0
_LONGEST_STEP_S = 600.0

# A strategy that asks who is online this often at one instant is looping, not looking.
_LOOKS_OF_A_LOOP = 100


@dataclass(eq=False)
class StallDetection(Stateful):
    """Tells whether a strategy waits in vain, and how far the clock then moves.

    A strategy that waits for nodes reads who is online, sleeps, and reads again. It differs from
    one that loops in place only in that nothing else comes between: so a repeated read moves the
    clock, in steps that grow, and a strategy that has waited for a week without a job is stopped.
    """

    saved = ("_busy_at", "_step_s", "_looked_at", "_seen", "_n_looks", "_most_online")

    _busy_at: float = 0.0
    _step_s: float = 0.0
    _looked_at: float = 0.0
    _seen: Bits | None = None
    _n_looks: int = 0
    _most_online: int = 0

    def active(self, now: float) -> None:
        """Note that something has happened: the strategy is not waiting in vain."""
        self._busy_at, self._step_s, self._seen = now, 0.0, None

    def waited(self) -> None:
        """Note that the strategy waits for an instant: it is not looking for nodes."""
        self._seen = None

    def is_stalled(self, online: Bits, now: float) -> bool:
        """Return whether a look at who is online is one too many, with nothing else in between.

        Args:
            online: whom it would see, as bits.
            now: the instant in s.
        """
        if self._seen is None or not np.array_equal(online, self._seen):
            self._n_looks = 0
            return False
        self._n_looks += 1
        return now > self._looked_at or self._n_looks >= _LOOKS_OF_A_LOOP

    def looked(self, online: Bits, now: float, n_online: int) -> None:
        """Note what the strategy has seen."""
        self._seen, self._looked_at = online, now
        self._most_online = max(self._most_online, n_online)

    def step_s(self) -> float:
        """Return how far to move now in s: further each time, so that few steps lead far."""
        self._step_s = min(max(2 * self._step_s, 1.0), _LONGEST_STEP_S)
        return self._step_s

    def check(self, now: float, n_devices: int) -> None:
        """Look whether a strategy without a job out has waited long enough.

        Raises:
            RunEnded: it has.
        """
        if now - self._busy_at > _PATIENCE_S:
            raise RunEnded(
                f"nothing happened for {_PATIENCE_S / 86_400:.0f} days of virtual time, in which "
                f"at most {self._most_online} of {n_devices} devices were seen online at once: "
                "let the strategy wait for fewer nodes, or use more devices",
                stuck=True,
            )


@dataclass(eq=False, slots=True)
class VirtualTime:
    """Replaces the clock of the thread that enters `running`, and of those that it starts.

    A stock strategy sleeps while too few nodes are online, and an app may stamp or pace its own
    loop. Under `TraceGrid` those seconds must be the devices' seconds, and cost none on the wall.
    Only the threads of the ServerApp see virtual time, and only while they train no client.
    """

    now: Callable[[], float]
    """Returns the virtual instant in s."""
    sleep: Callable[[float], None]
    """Moves the virtual clock on by a duration in s."""
    base: float
    """Unix time of the virtual instant 0."""
    is_asked_by_app: Callable[[int], bool] = lambda depth: True
    """Tells whether it is the app that asks, so many frames above, or Flower for it. A library that
    polls what it has started waits on the wall."""
    threads: set[int] = field(default_factory=set)
    """Those that see virtual time now, by `threading.get_ident`."""

    @contextmanager
    def running(self, prefixes: tuple[str, ...]) -> Iterator[None]:
        """Show virtual time to this thread.

        Args:
            prefixes: names of packages that may have bound `from time import sleep` already.
        """

        def unix() -> float:
            return self.base + self.now()

        stand_ins: list[tuple[Any, Any]] = [
            (time.sleep, self._here(self.sleep, time.sleep)),
            (time.time, self._here(unix, time.time)),
            (time.time_ns, self._here(lambda: round(1e9 * unix()), time.time_ns)),
            (time.monotonic, self._here(self.now, time.monotonic)),
            (time.monotonic_ns, self._here(lambda: round(1e9 * self.now()), time.monotonic_ns)),
        ]
        # Libraries measure by these how long they take, which is wall time.
        own: list[tuple[Any, Any]] = [
            (time.perf_counter, self._here(self.now, time.perf_counter)),
            (
                time.perf_counter_ns,
                self._here(lambda: round(1e9 * self.now()), time.perf_counter_ns),
            ),
            (datetime.datetime, self._dates(unix)),
        ]
        own.append((time, _copy_of(time, stand_ins + own)))
        own.append((datetime, _copy_of(datetime, own)))
        waits = "time", "threading", "queue", "sched"
        self.threads.add(threading.get_ident())
        try:
            with replaced(stand_ins, within=(*waits, *prefixes)), replaced(own, within=prefixes):
                yield
        finally:
            self.threads.clear()

    def _dates(self, unix: Callable[[], float]) -> type[datetime.datetime]:
        """Return what stands for the class `datetime`, whose objects are those of the class."""
        real, here = datetime.datetime, self._here

        class Kind(type):
            def __instancecheck__(cls, value: object) -> bool:
                return isinstance(value, real)

        class Dates(datetime.datetime, metaclass=Kind):
            def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the original
                return real(*args, **kwargs)

            now = staticmethod(here(lambda tz=None: real.fromtimestamp(unix(), tz), real.now))
            today = staticmethod(here(lambda: real.fromtimestamp(unix()), real.today))
            utcnow = staticmethod(
                here(lambda: real.fromtimestamp(unix(), UTC).replace(tzinfo=None), real.utcnow)
            )

        return Dates

    def _here(self, virtual: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is virtual in threads of the ServerApp, and else real."""

        def here(*given: Any, **named: Any) -> Any:  # noqa: ANN401 - as the originals
            is_virtual = threading.get_ident() in self.threads and self.is_asked_by_app(2)
            return (virtual if is_virtual else real)(*given, **named)

        return here

    def outside(self, work: Callable[..., T], *given: Any) -> T:  # noqa: ANN401 - what it takes
        """Do something that sees wall time again, such as the work of clients."""
        thread = threading.get_ident()
        if thread not in self.threads:
            return work(*given)
        self.threads.remove(thread)
        try:
            return work(*given)
        finally:
            self.threads.add(thread)


def _copy_of(module: ModuleType, stand_ins: Sequence[tuple[Any, Any]]) -> ModuleType:
    """Return a module like another, with stand-ins for some of what is in it."""
    copied, wanted = ModuleType(module.__name__), {id(original): new for original, new in stand_ins}
    vars(copied).update({k: wanted.get(id(v), v) for k, v in vars(module).items()})
    return copied


@contextmanager
def replaced(stand_ins: Sequence[tuple[Any, Any]], within: Sequence[str]) -> Iterator[None]:
    """Put functions in the place of others wherever modules of some packages have bound these.

    Args:
        stand_ins: each function, class or module with its stand-in.
        within: names of packages or modules; with their sub-modules.
    """
    prefixes = tuple(f"{package}." for package in within)
    wanted = {id(original): (original, stand_in) for original, stand_in in stand_ins}
    bound = [
        (module, name, *wanted[id(value)])
        for path, module in list(sys.modules.items())
        if module is not None and f"{path}.".startswith(prefixes)
        for name, value in list(vars(module).items())
        if id(value) in wanted
    ]
    try:
        for module, name, _, stand_in in bound:
            setattr(module, name, stand_in)
        yield
    finally:
        for module, name, original, _ in bound:
            setattr(module, name, original)


class Kind(IntEnum):
    """Order of events of one instant: a reply at its deadline counts."""

    REPLY = 0
    FAILURE = 1


class VirtualClock(Stateful):
    """Holds what will happen, and moves from one event to the next.

    The heap key is (time, kind, job id), never the payload: on constant traces many events fall
    on one instant, and ties must neither compare payloads nor depend on anything but the order of
    sending.
    """

    saved = ("now", "_heap")

    def __init__(self, until: float = np.inf) -> None:
        """Start at 0.

        Args:
            until: instant in s at which the run ends.
        """
        self.now = 0.0
        self.until = until
        self._heap: list[tuple[float, int, int]] = []

    def schedule(self, time: float, kind: int, job_id: int) -> None:
        """Let a job's event happen at an instant, never before now; inf never happens."""
        if time < np.inf:
            heapq.heappush(self._heap, (max(time, self.now), kind, job_id))

    @property
    def next_event(self) -> float:
        """Instant of the next event in s; inf if there is none."""
        return self._heap[0][0] if self._heap else np.inf

    def advance(self, to: float) -> list[int]:
        """Move to an instant and return the jobs whose events have happened on the way.

        Args:
            to: instant in s; the clock never goes back.

        Returns:
            Job ids in the order of their events.

        Raises:
            RunEnded: the instant lies beyond the end of the run; the clock stands at the end.
        """
        limit = min(to, self.until)
        happened = []
        while self._heap and self._heap[0][0] <= limit:
            happened.append(heapq.heappop(self._heap)[2])
        self.now = max(self.now, limit)
        return happened
