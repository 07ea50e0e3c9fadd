"""Record this device: a reading every few seconds, into a journal that survives crashes.

`to_traces` makes traces of the readings. Clocks are passed in, so that a test, or a replay, needs
no wall time.
"""

import time
from collections.abc import Callable

import numpy as np

from fedstale.errors import ConfigError
from fedstale.traces.recording.journal import Journal
from fedstale.traces.recording.monitor import ResourceMonitor

SHORTEST_S, LONGEST_S = 1.0, 60.0
CALIBRATION_UNIT = "1e9 floating-point operations of a float32 matrix product"


def record(
    monitor: ResourceMonitor,
    journal: Journal,
    *,
    interval_s: float,
    duration_s: float,
    wait: Callable[[float], bool],
    steady: Callable[[], float],
) -> int:
    """Append readings to a journal until the time is over or a stop is asked for.

    Readings are due at whole intervals from the start; one that comes too late is left out rather
    than made up for, so a suspended device leaves a gap.

    Args:
        monitor: reads the device.
        journal: where readings go.
        interval_s: time between readings, in s, 1 to 60.
        duration_s: time to record, in s; inf until stopped.
        wait: waits for some s; returns whether to stop.
        steady: returns s of a clock that cannot be set and that goes on while the device sleeps.

    Returns:
        The number of readings appended.

    Raises:
        ConfigError: the interval or the duration is out of range.
        TraceError: the journal cannot be written.
    """
    check(interval_s=interval_s, duration_s=duration_s)
    start = steady()
    due, count = start, 0
    while True:
        journal.append(monitor.read(), steady())
        count += 1
        due += interval_s * max(1.0, np.ceil((steady() - due) / interval_s))
        if due > start + duration_s:
            wait(max(start + duration_s - steady(), 0.0))
            return count
        if wait(max(due - steady(), 0.0)):
            return count


def check(*, interval_s: float, duration_s: float) -> None:
    """Raise a ConfigError if an interval or a duration is out of range."""
    if not SHORTEST_S <= interval_s <= LONGEST_S:
        raise ConfigError(f"interval_s = {interval_s:g}: expected 1 to 60 s between readings")
    if not duration_s > 0:
        raise ConfigError(f"duration_s = {duration_s:g}: expected a time in s > 0")


def steady_clock() -> float:
    """Return s of a clock that cannot be set and that goes on while the device sleeps."""
    # time.monotonic stops in the sleep of Linux and macOS; these two do not, each on its own.
    for name in ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC"):
        if hasattr(time, name):
            return time.clock_gettime(getattr(time, name))
    return time.monotonic()


def calibrate(
    *, clock: Callable[[], float] = time.perf_counter, seconds: float = 2.0, size: int = 512
) -> float:
    """Measure how fast this machine multiplies matrices, as busy as it is now.

    Args:
        clock: returns s.
        seconds: how long to measure, > 0; the first product is not counted.
        size: rows and columns of the matrices.

    Returns:
        Speed in units of `CALIBRATION_UNIT` per s, > 0.
    """
    matrix = np.random.default_rng(0).standard_normal((size, size)).astype(np.float32)
    out = matrix @ matrix
    start, products = clock(), 0
    while (spent := clock() - start) < seconds or products == 0:
        np.matmul(matrix, matrix, out=out)
        products += 1
    return products * 2.0 * size**3 / 1e9 / spent
