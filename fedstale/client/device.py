"""What the mod measures of the device that it runs on, real or replayed.

A simulation implements the same protocol on a replayed trace (`fedstale.simulation.clients`):
there clocks are virtual, and the history is the trace up to now.
"""

import importlib
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict

from fedstale.client.history import MessageHistory
from fedstale.errors import ConfigError
from fedstale.traces.forecast.observation import Observation
from fedstale.traces.recording.monitor import PsutilMonitor, Reading, ResourceMonitor

COUNTERS_RECORD = "fedstale.counters"
"""Name of the record in the Context's state."""
_NAMES = ("boot", "idle", "total")
# Kernels derive the instant of their start from a clock that time servers adjust.
_SAME_BOOT_S = 60.0
_SHORTEST_S = 1.0

Cost = tuple[float, float, float]
"""Work units, bytes down and bytes up of a message."""


class Device(ResourceMonitor, Protocol):
    """A device while it works on one message. The mod reads it once at each end of the work."""

    def worked_s(self) -> float:
        """Return the time between the first and the last reading in s, by a steady clock."""

    def travel_s(self) -> float:
        """Return how long the message was under way, in s; NaN if unknown."""

    def uploaded_s(self, message_id: str) -> float:
        """Return how long the reply to an earlier message was under way, in s, or NaN."""

    def cost(self) -> Cost | None:
        """Return what the message costs, where that is known before the work is done."""

    def observed(self, history: MessageHistory) -> Observation:
        """Return what the device knew of itself before the work and after it; two observations."""


class CountingMonitor:
    """Reads the machine it runs on; its first reading covers the time since the last message.

    psutil compares with its own last call, which another process may have made. The counters of the
    kernel are older than any process: kept in the node's state, they measure what happened since
    the last message.

    Args:
        state: of the node; counters are read from it at the first reading, and written at each.

    Raises:
        ConfigError: psutil is not installed.
    """

    def __init__(self, state: RecordDict) -> None:
        self._monitor = PsutilMonitor()
        self._psutil: Any = importlib.import_module("psutil")
        self._state = state

    def read(self) -> Reading:
        """Return the machine as it is now."""
        reading = self._monitor.read()
        before, now = self._stored(), self._counted()
        if now is None:
            return reading
        self._state[COUNTERS_RECORD] = ConfigRecord(dict(zip(_NAMES, now, strict=True)))
        if before is None or not math.isnan(reading.processor_left):
            return reading
        idle, total = now[1] - before[1], now[2] - before[2]
        restarted = abs(now[0] - before[0]) > _SAME_BOOT_S or idle < 0
        if restarted or not total >= _SHORTEST_S:
            return reading
        return replace(reading, processor_left=min(idle / total, 1.0))

    def _counted(self) -> tuple[float, float, float] | None:
        try:
            times = self._psutil.cpu_times()
            boot = float(self._psutil.boot_time())
        # What psutil lets through from hidden files and unknown platforms.
        except (OSError, AttributeError, NotImplementedError, RuntimeError, ValueError):
            return None
        idle = times.idle + getattr(times, "iowait", 0.0)
        # Linux counts guests within user and nice; they must not count twice.
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        return boot, float(idle), float(sum(times) - guests)

    def _stored(self) -> tuple[float, ...] | None:
        record = self._state.config_records.get(COUNTERS_RECORD, ConfigRecord())
        values = [record.get(name) for name in _NAMES]
        if any(not isinstance(v, float) or not math.isfinite(v) for v in values):
            return None
        return tuple(v for v in values if isinstance(v, float))


class Machine:
    """The device that this process runs on.

    Args:
        message: that it works on.
        state: of the node, where counters are kept between processes.
        monitor: reads the device; None takes psutil where it is installed, else nothing is read.
        wall: returns s since 1970, UTC.
        steady: returns s of a clock that is never set.
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

        It crosses two clocks and includes the waiting of the server and the link. A time that is
        not positive comes of a wrong clock, and is NaN.
        """
        took = self._instants[0] - self._created_at
        return took if took > 0 else np.nan

    def uploaded_s(self, message_id: str) -> float:
        """Return NaN: no device knows when its reply has arrived."""
        del message_id
        return np.nan

    def cost(self) -> Cost | None:
        """Return None: only the server or the app knows how much work a message is."""

    def observed(self, history: MessageHistory) -> Observation:
        """Return what the device's messages showed at its last answer, and what they show now."""
        # The time of a job is compared with the forecast that was sent before it, in that answer.
        answered_at = history["ready"][-2:-1]
        before = np.fmin.reduce(answered_at, initial=self._instants[0])
        instants = np.array([before, self._instants[-1]])
        offset = time.localtime(instants[-1]).tm_gmtoff
        return history.observation(instants, float(offset))
