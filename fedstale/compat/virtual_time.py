"""The clock that a ServerApp reads: `time` and `datetime` mean the virtual clock of its grid.

Only the threads of the ServerApp see virtual time, only while they train no client, and only where
the app asks or Flower for it. The class `datetime` stays the one that it is: its methods that read
the clock do so. What cannot be reached reads the clock in C without Python: `numpy.datetime64`.

Virtual time begins at the hour and on the weekday of the traces, where no old results lie: apps
name folders by the clock, and a run that began on the date of an earlier one would meet that one's.
So it is the first date, in whole weeks after that of the traces, of whose week no file or folder
says that it is from then. A run then differs from another in the date alone: floats near its Unix
times are as far apart as those near the traces' for hundreds of weeks.
"""

import datetime
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from threading import get_ident
from typing import Any, TypeVar

from fedstale.compat.callers import changed, is_called_by_app, replaced

T = TypeVar("T")

_WAITING = "time", "threading", "queue", "sched"
"""Modules of Python that have bound functions of `time` by name, and `time` itself."""

_running: "VirtualTime | None" = None
"""The clock of the run that goes on in this process."""


@dataclass(eq=False, slots=True)
class VirtualTime:
    """The virtual clock of the thread that enters `running`, and of those that it starts.

    A stock strategy sleeps while too few nodes are online, and an app may stamp or pace its own
    loop. Under `TraceGrid` those seconds must be the devices' seconds, and cost none on the wall.
    """

    now: Callable[[], float]
    """Returns the virtual instant in s."""
    sleep: Callable[[float], None]
    """Moves the virtual clock on by a duration in s."""
    base: float
    """Unix time of the virtual instant 0."""
    threads: set[int] = field(default_factory=set)
    """Those that see virtual time now, by `threading.get_ident`."""

    @contextmanager
    def running(self, packages: tuple[str, ...]) -> Iterator[None]:
        """Show virtual time to this thread.

        Args:
            packages: names of those whose modules may have bound `from time import sleep` already.
        """
        global _running  # noqa: PLW0603 - there is one run a process
        before, _running = _running, self
        self.threads.add(get_ident())
        with ExitStack() as stack:
            stack.enter_context(replaced(_STAND_INS, within=(*_WAITING, *packages)))
            for kind, methods in _METHODS.items():
                stack.enter_context(changed(kind, methods))
            try:
                yield
            finally:
                self.threads.clear()
                _running = before

    def unix(self) -> float:
        """Return the Unix time of the virtual instant."""
        return self.base + self.now()

    def outside(self, work: Callable[..., T], *given: Any) -> T:
        """Do something that sees wall time again, such as the work of clients."""
        thread = get_ident()
        if thread not in self.threads:
            return work(*given)
        self.threads.remove(thread)
        try:
            return work(*given)
        finally:
            self.threads.add(thread)


def _asked() -> VirtualTime | None:
    """Return the clock of the run, if it is the app that asks for it."""
    running = _running
    is_asked = running is not None and get_ident() in running.threads and is_called_by_app()
    return running if is_asked else None


def _virtually(real: Callable[..., Any], virtual: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is virtual where the app asks, and else real."""

    @wraps(real)
    def here(*given: Any, **named: Any) -> Any:
        clock = _asked()
        return real(*given, **named) if clock is None else virtual(clock, *given, **named)

    return here


def _in_ns(read: Callable[..., float]) -> Callable[..., int]:
    return lambda clock, *given: round(1e9 * read(clock, *given))


def _of_kind(clock: VirtualTime, kind: int) -> float:
    """Return a clock of the system by its number, virtually; processor time stays as it is."""
    if kind == getattr(time, "CLOCK_REALTIME", None):
        return clock.unix()
    name = next((n for n in dir(time) if n.startswith("CLOCK_") and getattr(time, n) == kind), "")
    return _read(kind) if name.endswith("CPUTIME_ID") or not name else clock.now()


def _at(clock: VirtualTime, seconds: float | None) -> float:
    return clock.unix() if seconds is None else seconds


def _parts_of(clock: VirtualTime, given: tuple[Any, ...]) -> Any:
    return given[0] if given else _local(clock.unix())


_read: Callable[[int], float] = getattr(time, "clock_gettime", lambda _: 0.0)
_local, _ascii = time.localtime, time.asctime
_gmtime, _ctime, _formatted = time.gmtime, time.ctime, time.strftime

_VIRTUAL: dict[str, Callable[..., Any]] = {
    "sleep": lambda clock, seconds: clock.sleep(seconds),
    "time": VirtualTime.unix,
    "time_ns": _in_ns(VirtualTime.unix),
    "monotonic": lambda clock: clock.now(),
    "monotonic_ns": _in_ns(lambda clock: clock.now()),
    "perf_counter": lambda clock: clock.now(),
    "perf_counter_ns": _in_ns(lambda clock: clock.now()),
    "clock_gettime": _of_kind,
    "clock_gettime_ns": _in_ns(_of_kind),
    "localtime": lambda clock, seconds=None: _local(_at(clock, seconds)),
    "gmtime": lambda clock, seconds=None: _gmtime(_at(clock, seconds)),
    "ctime": lambda clock, seconds=None: _ctime(_at(clock, seconds)),
    "asctime": lambda clock, *given: _ascii(_parts_of(clock, given)),
    "strftime": lambda clock, text, *given: _formatted(text, _parts_of(clock, given)),
}
"""What functions of `time` do on a clock."""

_STAND_INS = [
    (getattr(time, name), _virtually(getattr(time, name), virtual))
    for name, virtual in _VIRTUAL.items()
    if hasattr(time, name)
]


@contextmanager
def importing() -> Iterator[None]:
    """Give modules that are imported inside functions that can be virtual.

    So those are, too, that an app keeps in a table, as a default, or in a class.
    """
    with ExitStack() as stack:
        stack.enter_context(replaced(_STAND_INS, within=_WAITING))
        for kind, methods in _METHODS.items():
            stack.enter_context(changed(kind, methods))
        yield


def _class_method(
    kind: type, name: str, virtual: Callable[..., Any]
) -> "classmethod[Any, ..., Any]":
    real, of_kind = vars(kind)[name], getattr(kind, name)

    @wraps(of_kind)
    def here(cls: type, *given: Any, **named: Any) -> Any:
        clock = _asked()
        if clock is None:
            # Flower asks for each message.
            read = of_kind if cls is kind else real.__get__(None, cls)
            return read(*given, **named)
        return virtual(clock, cls, *given, **named)

    return classmethod(here)


def _utc_now(clock: VirtualTime, cls: Any) -> Any:
    return cls.fromtimestamp(clock.unix(), datetime.UTC).replace(tzinfo=None)


_METHODS: dict[type, dict[str, Any]] = {
    datetime.datetime: {
        "now": _class_method(
            datetime.datetime,
            "now",
            lambda clock, cls, tz=None: cls.fromtimestamp(clock.unix(), tz),
        ),
        "utcnow": _class_method(datetime.datetime, "utcnow", _utc_now),
    },
    datetime.date: {
        "today": _class_method(
            datetime.date, "today", lambda clock, cls: cls.fromtimestamp(clock.unix())
        )
    },
}
"""Methods that read the clock, of types that stay what they are."""


_WEEK_S = 7 * 86_400
_DEEP, _MOST = 4, 20_000
"""Folders below one another, and names in all, that are looked at."""
_DATE = re.compile(r"(?<!\d)(\d{4})([-_.]?)(\d\d)\2(\d\d)(?!\d{5})")
_SECONDS = re.compile(r"(?<!\d)(\d{9,10})(?!\d)")


def free_start(first: float, folders: Iterable[Path]) -> float:
    """Return the Unix time at which virtual time begins, in s.

    Args:
        first: that of the traces.
        folders: in which an app may keep results of earlier runs.

    Example:
        >>> free_start(946684800.0, [])
        946684800.0
    """
    taken = set[int]()
    for name in _names(folders):
        taken.update(int((at - first) // _WEEK_S) for at in _instants(name))
    week = 0
    while week in taken:
        week += 1
    return first + week * _WEEK_S


def _instants(name: str) -> Iterator[float]:
    """Yield the Unix times in s that a name may tell."""
    for year, _, month, day in _DATE.findall(name):
        try:
            noon = datetime.datetime(int(year), int(month), int(day), 12, tzinfo=datetime.UTC)
            yield noon.timestamp()
        except ValueError:
            continue  # It is another number.
    yield from map(float, _SECONDS.findall(name))


def _names(folders: Iterable[Path]) -> Iterator[str]:
    """Yield names of what lies in folders, the nearest first, up to a number."""
    todo, n = [(str(folder), 0) for folder in dict.fromkeys(folders)], 0
    for folder, depth in todo:
        try:
            with os.scandir(folder) as entries:
                found = [(entry.name, entry.path, entry.is_dir()) for entry in entries]
        except OSError:
            continue
        for name, path, is_folder in found:
            n += 1
            if n > _MOST:
                return
            yield name
            if is_folder and depth + 1 < _DEEP and not name.startswith("."):
                todo.append((path, depth + 1))
