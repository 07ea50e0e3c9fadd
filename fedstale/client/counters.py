"""Processor and traffic between two messages, although each message may have a process of its own.

psutil compares with its own last call, which another process made. The counters of the kernel are
older than any process: kept in the node's state, they tell what happened since the last message.
"""

import importlib
import math
from dataclasses import replace
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from fedstale.traces.recording.monitor import PsutilMonitor, Reading

STATE_RECORD = "fedstale.counters"
_NAMES = ("boot", "idle", "total")
# Kernels derive the instant of their start from a clock that time servers adjust.
_SAME_BOOT_S = 60.0
_SHORTEST_S = 1.0


class CountingMonitor:
    """Reads the machine it runs on; its first reading covers the time since the last message.

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
        self._state[STATE_RECORD] = ConfigRecord(dict(zip(_NAMES, now, strict=True)))
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
        record = self._state.config_records.get(STATE_RECORD, ConfigRecord())
        values = [record.get(name) for name in _NAMES]
        if any(not isinstance(v, float) or not math.isfinite(v) for v in values):
            return None
        return tuple(v for v in values if isinstance(v, float))
