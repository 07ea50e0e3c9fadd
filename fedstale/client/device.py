"""The one door between the mod and the device under it, real or replayed.

A simulation opens the same door on a replayed trace (`fedstale.simulation.replayed`): there clocks
are virtual, and the past is the trace up to now.
"""

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
from flwr.app import Message, RecordDict

from fedstale.client import past
from fedstale.client.counters import CountingMonitor
from fedstale.client.history import History
from fedstale.errors import ConfigError
from fedstale.traces.forecast.observation import Observation
from fedstale.traces.recording.monitor import Reading, ResourceMonitor

Cost = tuple[float, float, float]
"""Work units, bytes down and bytes up of a message."""


class Device(ResourceMonitor, Protocol):
    """A device while it works on one message. The mod reads it once at each end of the work."""

    def worked_s(self) -> float:
        """Return the time between the first and the last reading in s, by a steady clock."""

    def travel_s(self) -> float:
        """Return how long the message was under way, in s; NaN if nobody can tell."""

    def uploaded_s(self, message_id: str) -> float:
        """Return how long the reply to an earlier message was under way, in s, or NaN."""

    def cost(self) -> Cost | None:
        """Return what the message costs, where that is known before the work is done."""

    def past(self, history: History) -> Observation:
        """Return what the device knew of itself before the work and after it; two observations."""


class Machine:
    """The device that this process runs on.

    Args:
        message: that it works on.
        state: of the node, where counters are kept between processes.
        monitor: reads the device; None takes psutil where it is installed, else nothing is read.
        wall: returns s since 1970, UTC.
        steady: returns s of a clock that nobody sets.
    """

    def __init__(
        self,
        message: Message,
        state: RecordDict,
        monitor: ResourceMonitor | None = None,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        if monitor is None:
            try:
                monitor = CountingMonitor(state)
            except ConfigError:
                # A phone without psutil still has clocks, and its own trainings.
                monitor = None
        self._monitor = monitor
        self._created_at = message.metadata.created_at
        self._wall, self._steady = wall, steady
        self._instants: list[float] = []
        self._ticks: list[float] = []

    def read(self) -> Reading:
        """Return the device as it is now."""
        self._ticks.append(self._steady())
        now = self._wall()
        reading = Reading(instant=now) if self._monitor is None else self._monitor.read()
        self._instants.append(now)
        return reading

    def worked_s(self) -> float:
        """Return the time between the first and the last reading in s."""
        return max(self._ticks[-1] - self._ticks[0], 0.0)

    def travel_s(self) -> float:
        """Return the time from the message's creation to the first reading.

        It crosses two clocks and holds what the server and the link waited. What is not positive is
        a clock that is wrong, and NaN.
        """
        took = self._instants[0] - self._created_at
        return took if took > 0 else np.nan

    def uploaded_s(self, message_id: str) -> float:
        """Return NaN: no device sees when its reply has arrived."""
        del message_id
        return np.nan

    def cost(self) -> Cost | None:
        """Return None: only the server or the app can say how much work a message is."""

    def past(self, history: History) -> Observation:
        """Return what the device's own messages told at its last answer, and what they tell now."""
        # What a job took is held against the forecast that was sent before it, in that answer.
        answered_at = history["ready"][-2:-1]
        before = np.fmin.reduce(answered_at, initial=self._instants[0])
        instants = np.array([before, self._instants[-1]])
        offset = time.localtime(instants[-1]).tm_gmtoff
        return past.observe(history, instants, float(offset))
