"""What a device can read of itself: processor left, traffic, battery, mains, link.

A recorder and a forecaster read real machines and replayed ones through `ResourceMonitor`.
`PsutilMonitor` reads the machine it runs on. What cannot be read is NaN or None and never an error:
phones hide their counters, and desktops have no battery. How fast the processor is when idle is
measured by `calibrate`.
"""

import importlib
import math
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from fedstale.errors import ConfigError, needs

CALIBRATION_UNIT = "1e9 floating-point operations of a float32 matrix product"

_T = TypeVar("_T")

# What psutil lets through from hidden files, absent sensors and unknown platforms.
_UNREADABLE = (OSError, AttributeError, NotImplementedError, RuntimeError, ValueError)

# Kernels derive the instant of their start from a clock that time servers adjust.
_SAME_BOOT_S = 60.0
_SHORTEST_S = 1.0
_CALIBRATION_S, _SIZE = 2.0, 512
_LINK_LOCAL = ("127.", "169.254.", "::1", "fe80")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A device at one instant, as it sees itself; NaN or None where it cannot tell."""

    instant: float
    """When it was read, in s of the monitor's own clock (psutil: since 1970, UTC)."""
    processor_left: float = math.nan
    """Share of all processors that was idle since the last reading, in [0, 1]."""
    received_bit_per_s: float = math.nan
    """Mean rate received since the last reading, by all programs, >= 0."""
    sent_bit_per_s: float = math.nan
    """Mean rate sent since the last reading, by all programs, >= 0."""
    battery: float = math.nan
    """Charge of the battery, in [0, 1]."""
    charging: bool | None = None
    """Whether the device is on mains power."""
    online: bool | None = None
    """Whether the device has a link that leaves it."""


class ProcessorTimes(NamedTuple):
    """Counters of the kernel, in s; those of all processors together."""

    boot: float
    """When the kernel started, since 1970, UTC."""
    idle: float
    """Time since then in which processors had nothing to do."""
    total: float
    """Time since then."""

    def share_left(self, before: "ProcessorTimes | None") -> float:
        """Return the idle share since earlier counters, in [0, 1].

        NaN if there are none, if they are of another start of the machine, or if hardly any time
        has passed.
        """
        if before is None or not abs(self.boot - before.boot) <= _SAME_BOOT_S:
            return math.nan
        idle, total = self.idle - before.idle, self.total - before.total
        return min(idle / total, 1.0) if idle >= 0 and total >= _SHORTEST_S else math.nan


class ResourceMonitor(Protocol):
    """Reads one device; each reading covers the time since the reading before."""

    def read(self) -> Reading:
        """Return the device as it is now; never raises for what it cannot read."""


class PsutilMonitor:
    """Reads the machine it runs on.

    The first reading knows no rates and no load, since there is no reading before it. `online` says
    that an interface other than the loopback is up and has an address that can be routed; it does
    not say that a server answers. Load and traffic are those of all programs, so those of a job
    that trains at the time count as not left.

    Args:
        wall: returns the instant in s since 1970, UTC.
        steady: returns s of a clock that cannot be set.
        times: of the processors at the last reading by another process; load is known since then.

    Raises:
        ConfigError: psutil is not installed.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
        times: ProcessorTimes | None = None,
    ) -> None:
        try:
            self._psutil: Any = importlib.import_module("psutil")
        except ImportError:
            raise ConfigError(f"reading this machine {needs('psutil')}") from None
        self._wall = wall
        self._steady = steady
        self.times = times
        """Of the processors at the last reading; None if there was none or it cannot be told."""
        self._read_before: float | None = None
        self._moved: tuple[int, int] | None = None

    def read(self) -> Reading:
        """Return the machine as it is now."""
        now = self._steady()
        span_s = math.nan if self._read_before is None else now - self._read_before
        received, sent = self._rates(span_s)
        battery, charging = self._power()
        before, self.times = self.times, _or(None, self._processor_times)
        reading = Reading(
            instant=self._wall(),
            processor_left=math.nan if self.times is None else self.times.share_left(before),
            received_bit_per_s=received,
            sent_bit_per_s=sent,
            battery=battery,
            charging=charging,
            online=_or(None, self._online),
        )
        self._read_before = now
        return reading

    def _processor_times(self) -> ProcessorTimes:
        times = self._psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # Linux counts guests within user and nice; they must not count twice.
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        boot = float(self._psutil.boot_time())
        return ProcessorTimes(boot, float(idle), float(sum(times) - guests))

    def _rates(self, span_s: float) -> tuple[float, float]:
        before, self._moved = self._moved, _or(None, self._bytes_moved)
        if before is None or self._moved is None or not span_s > 0:
            return math.nan, math.nan
        received, sent = (8 * (b - a) / span_s for a, b in zip(before, self._moved, strict=True))
        # A counter that went back was reset: an interface left, or the machine slept.
        if received < 0 or sent < 0:
            return math.nan, math.nan
        return received, sent

    def _bytes_moved(self) -> tuple[int, int]:
        counters = self._psutil.net_io_counters(pernic=True)
        outside = [c for name, c in counters.items() if not _is_loopback(name)]
        return sum(c.bytes_recv for c in outside), sum(c.bytes_sent for c in outside)

    def _power(self) -> tuple[float, bool | None]:
        # Some platforms lack the function itself.
        battery = _or(None, getattr(self._psutil, "sensors_battery", lambda: None))
        if battery is None:
            return math.nan, None
        share = min(max(float(battery.percent) / 100.0, 0.0), 1.0)
        plugged = battery.power_plugged
        return share, None if plugged is None else bool(plugged)

    def _online(self) -> bool:
        addresses = self._psutil.net_if_addrs()
        return any(
            state.isup
            and not _is_loopback(name)
            and any(_is_routable(a.address, a.family) for a in addresses.get(name, ()))
            for name, state in self._psutil.net_if_stats().items()
        )


def steady_clock() -> float:
    """Return s of a clock that cannot be set and that goes on while the device sleeps."""
    # time.monotonic stops in the sleep of Linux and macOS; these two do not, each on its own.
    for name in ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC"):
        if hasattr(time, name):
            return time.clock_gettime(getattr(time, name))
    return time.monotonic()


def calibrate() -> float:
    """Measure for two seconds how fast this machine multiplies matrices, as busy as it is now.

    Returns:
        Speed in units of `CALIBRATION_UNIT` per s, > 0; the first product is not counted.
    """
    matrix = np.random.default_rng(0).standard_normal((_SIZE, _SIZE)).astype(np.float32)
    out = matrix @ matrix
    start, products = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < _CALIBRATION_S or products == 0:
        np.matmul(matrix, matrix, out=out)
        products += 1
    return products * 2.0 * _SIZE**3 / 1e9 / spent


def _is_loopback(name: str) -> bool:
    return name == "lo" or name.lower().startswith(("lo0", "loopback"))


def _is_routable(address: str, family: int) -> bool:
    is_internet = family in (socket.AF_INET, socket.AF_INET6)
    return is_internet and not address.lower().startswith(_LINK_LOCAL)


def _or(default: _T, reading: Callable[[], _T]) -> _T:
    try:
        return reading()
    except _UNREADABLE:
        return default
