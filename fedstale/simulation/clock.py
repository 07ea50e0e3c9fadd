"""The virtual clock of a simulation, and what moves it when nothing happens.

`VirtualClock` holds what will happen. `StallDetection` tells a strategy that waits from one that
loops in place.
"""

import heapq
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from fedstale.errors import RunEnded
from fedstale.strategies.types import Bits, Stateful

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
