"""Make `time.time` and `time.sleep` of a ServerApp mean the virtual clock.

A stock strategy sleeps while too few nodes are online, and an app may stamp or pace its own loop.
Under `TraceGrid` those seconds must be the devices' seconds, and cost none on the wall. Only the
thread that runs the ServerApp is fooled, and only while it is not training a client.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

_NAMES = ("time", "sleep", "monotonic")


class VirtualTime:
    """Replaces the clock of the thread that enters `running`."""

    def __init__(
        self, now: Callable[[], float], sleep: Callable[[float], None], base: float
    ) -> None:
        """Set what the clock shows.

        Args:
            now: virtual instant in s.
            sleep: moves the virtual clock on by a duration in s.
            base: Unix time of the virtual instant 0.
        """
        self._now, self._sleep, self._base = now, sleep, base
        self._thread: int | None = None
        self._real = {name: getattr(time, name) for name in _NAMES}
        self._virtual: dict[str, Callable[..., float | None]] = {
            "time": self._time,
            "sleep": self._sleep_for,
            "monotonic": self._monotonic,
        }

    @contextmanager
    def running(self, prefixes: tuple[str, ...]) -> Iterator[None]:
        """Show virtual time to this thread.

        Args:
            prefixes: names of packages that may have bound `from time import sleep` already.
        """
        self._thread = threading.get_ident()
        bound = [
            (module, attribute, value)
            for module in _modules(prefixes)
            for attribute, value in list(vars(module).items())
            if any(value is real for real in self._real.values())
        ]
        names = {id(real): name for name, real in self._real.items()}
        try:
            for name in _NAMES:
                setattr(time, name, self._virtual[name])
            for module, attribute, value in bound:
                setattr(module, attribute, self._virtual[names[id(value)]])
            yield
        finally:
            for name in _NAMES:
                setattr(time, name, self._real[name])
            for module, attribute, value in bound:
                setattr(module, attribute, value)
            self._thread = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Show wall time again, for the duration of a client's work."""
        thread, self._thread = self._thread, None
        try:
            yield
        finally:
            self._thread = thread

    def _is_fooled(self) -> bool:
        return self._thread is not None and self._thread == threading.get_ident()

    def _time(self) -> float:
        return self._base + self._now() if self._is_fooled() else float(self._real["time"]())

    def _monotonic(self) -> float:
        return self._now() if self._is_fooled() else float(self._real["monotonic"]())

    def _sleep_for(self, seconds: float) -> None:
        if self._is_fooled():
            self._sleep(seconds)
        else:
            self._real["sleep"](seconds)


def _modules(prefixes: tuple[str, ...]) -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if module is not None and any(name == p or name.startswith(p + ".") for p in prefixes)
    ]
