"""Make `time.time` and `time.sleep` of a ServerApp mean the virtual clock.

A stock strategy sleeps while too few nodes are online, and an app may stamp or pace its own loop.
Under `TraceGrid` those seconds must be the devices' seconds, and cost none on the wall. Only the
thread that runs the ServerApp sees virtual time, and only while it is not training a client.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fedstale.simulation.compat import replaced


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
        self._real_time, self._real_monotonic = time.time, time.monotonic
        self._real_sleep = time.sleep

    @contextmanager
    def running(self, prefixes: tuple[str, ...]) -> Iterator[None]:
        """Show virtual time to this thread.

        Args:
            prefixes: names of packages that may have bound `from time import sleep` already.
        """
        stand_ins: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
            (self._real_time, self._time),
            (self._real_monotonic, self._monotonic),
            (self._real_sleep, self._sleep_for),
        ]
        self._thread = threading.get_ident()
        try:
            with replaced(stand_ins, within=("time", *prefixes)):
                yield
        finally:
            self._thread = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Show wall time again, for the duration of a client's work."""
        thread, self._thread = self._thread, None
        try:
            yield
        finally:
            self._thread = thread

    def _is_virtual(self) -> bool:
        return self._thread is not None and self._thread == threading.get_ident()

    def _time(self) -> float:
        return self._base + self._now() if self._is_virtual() else self._real_time()

    def _monotonic(self) -> float:
        return self._now() if self._is_virtual() else self._real_monotonic()

    def _sleep_for(self, seconds: float) -> None:
        if self._is_virtual():
            self._sleep(seconds)
        else:
            self._real_sleep(seconds)
