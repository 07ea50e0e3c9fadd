"""What time it is for a strategy: virtual under a simulation, wall time on real devices.

A grid that keeps a clock of its own answers these two calls itself. Nothing else in this package
asks for the time, so the same strategy runs in both worlds.
"""

import time
from typing import Protocol, runtime_checkable


@runtime_checkable
class Clock(Protocol):
    """Tells the time, and waits."""

    def now(self) -> float:
        """Return the instant in s; only differences mean anything."""
        ...

    def wait(self, until: float) -> bool:
        """Wait until an instant, or until something may have arrived if that is earlier.

        Args:
            until: instant in s; may be inf.

        Returns:
            False only if certainly nothing can be pulled now.
        """
        ...


class WallClock:
    """Real time. It cannot know what has arrived, so it wakes up often and says "maybe".

    Example:
        >>> clock = WallClock(poll_s=0.001)
        >>> clock.wait(float("inf"))
        True
    """

    def __init__(self, poll_s: float = 0.2) -> None:
        """Poll every `poll_s` seconds; a pull from a SuperLink costs some milliseconds."""
        self.poll_s = poll_s

    def now(self) -> float:
        """Return seconds since some fixed instant."""
        return time.monotonic()

    def wait(self, until: float) -> bool:
        """Sleep for one poll, or less if the instant is nearer."""
        time.sleep(min(max(until - self.now(), 0.0), self.poll_s))
        return True


def clock_of(grid: object) -> Clock:
    """Return the grid if it keeps a clock, else wall time."""
    return grid if isinstance(grid, Clock) else WallClock()
