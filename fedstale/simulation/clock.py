"""The virtual clock: a heap of events.

The key is (time, kind, sequence), never the payload: on constant traces many events fall on one
instant, and ties must neither compare payloads nor depend on anything but the order of scheduling.
"""

import heapq
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np


class Kind(IntEnum):
    """Order of events of one instant: a reply at its deadline counts."""

    REPLY = 0
    FAILURE = 1


class VirtualClock:
    """Holds what will happen, and moves from one event to the next."""

    def __init__(self, until: float = np.inf) -> None:
        """Start at 0.

        Args:
            until: instant in s at which the run ends.
        """
        self.now = 0.0
        self.until = until
        self._heap: list[tuple[float, int, int, int]] = []
        self._sequence = 0

    def schedule(self, time: float, kind: Kind, job_id: int) -> None:
        """Let a job's event happen at an instant, never before now; inf never happens."""
        if time < np.inf:
            heapq.heappush(self._heap, (max(time, self.now), kind, self._sequence, job_id))
            self._sequence += 1

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
            happened.append(heapq.heappop(self._heap)[3])
        self.now = max(self.now, limit)
        return happened

    def state_dict(self) -> dict[str, Any]:
        """Return the instant and what will happen."""
        return {"now": self.now, "heap": self._heap, "sequence": self._sequence}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.now, self._sequence = float(state["now"]), int(state["sequence"])
        self._heap = [
            (float(at), int(kind), int(sequence), int(job_id))
            for at, kind, sequence, job_id in state["heap"]
        ]
