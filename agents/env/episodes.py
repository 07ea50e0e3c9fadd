"""Episodes of the selection environment: a window of time, its devices, a job, a schedule and data.

Everything that differs between deployments is drawn anew for each episode, so that an agent cannot
learn one fleet by heart: the number of devices, the concurrency, the duration of a job, whether
stragglers are kept, how data are distributed over devices, and whether the server requests
forecasts or has those that came with the last replies.
"""

from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fedstale.errors import ConfigError, TraceError
from fedstale.strategies.types import is_count
from fedstale.traces import Array, Index, Job, Mask, TraceSet, outline, stream

GROUPS = 10
"""Groups of data that a model is to learn."""
AGES = 64
"""Largest staleness with a weight of its own; staler updates have the last weight."""
NOISES = 4
"""Draws of noise in the losses that a device reports, used in turn."""
CHOICES = 2
"""Most choices of an episode, in multiples of its rounds: those that begin a round, and those that
replace failed jobs."""
INFLATION = 10.0
"""How many times its loss an inflating client reports."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class JobKinds:
    """The jobs that episodes choose from; arrays of shape (kinds,)."""

    work: Array
    """Work in the traces' units, of a device with the mean number of examples."""
    n_bytes: Array
    """Size of the message and of the reply."""
    ttl_s: Array
    """Time after which a reply is rejected, in s, finite."""
    median_s: Array
    """Duration on a device with the median rates of the fleet, in s."""

    __repr__ = outline

    def __len__(self) -> int:
        return self.work.size

    def jobs(self, kind: Index, scale: Array) -> Job:
        """Return jobs of single devices, as `TraceSet.trips` takes them; shape (n,).

        Args:
            kind: of each job; shape (n,).
            scale: examples of each device over the mean, > 0; shape (n,).
        """
        n_bytes = self.n_bytes[kind]
        return Job(
            work=self.work[kind] * scale,
            download_bytes=n_bytes,
            upload_bytes=n_bytes,
            ttl_s=self.ttl_s[kind],
        )

    @classmethod
    def of_fleet(
        cls,
        traces: TraceSet,
        *,
        minutes: tuple[float, ...] = (1.0, 2.0, 5.0, 10.0, 20.0, 40.0),
        megabytes: tuple[float, ...] = (5.0, 1.0, 5.0, 20.0, 5.0, 50.0),
        patience: tuple[float, ...] = (8.0, 8.0, 5.0, 4.0, 3.0, 3.0),
    ) -> "JobKinds":
        """Return jobs by their cost on the median device of a fleet.

        Args:
            traces: the fleet.
            minutes: of training on the median device; one each kind.
            megabytes: each way.
            patience: time to live, in multiples of the duration on the median device.

        Raises:
            TraceError: a channel is unknown, or a median rate is 0.

        Example:
            >>> fleet = TraceSet.constant(
            ...     3, compute=2, downlink_bit_per_s=8e6, uplink_bit_per_s=8e6
            ... )
            >>> JobKinds.of_fleet(fleet, minutes=(1,), megabytes=(10,), patience=(5,)).median_s
            array([80.])
        """
        traces.complete()
        rng = stream(0, 41)
        devices = rng.integers(traces.n_devices, size=2_000)
        when = rng.random(2_000) * 86_400.0
        rates = []
        for name in ("compute", "downlink", "uplink"):
            rate = float(np.median(getattr(traces, name).value_at(devices, when)))
            if not 0.0 < rate < np.inf:
                raise TraceError(f"median rate of {name} = {rate}: expected devices that work")
            rates.append(rate)
        compute, downlink, uplink = rates
        work = 60.0 * np.array(minutes, dtype=np.float64) * compute
        n_bytes = np.rint(1e6 * np.array(megabytes, dtype=np.float64))
        median = work / compute + n_bytes * 8.0 / downlink + n_bytes * 8.0 / uplink
        return cls(work=work, n_bytes=n_bytes, ttl_s=median * np.array(patience), median_s=median)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSettings:
    """The ranges that episodes are drawn from; pairs are (least, most)."""

    horizon: tuple[float, float] = (10.0, 40.0)
    """Time of an episode, in durations of its job on the median device; drawn on a logarithmic
    scale."""
    window_s: float = 6 * 3600.0
    """Longest time of an episode in s, > 0."""
    rounds: int = 60
    """Most rounds of an episode, >= 1; replacements of failed jobs are no rounds."""
    budget_share: float = 0.5
    """Share of the episodes that end not by the clock, but when devices have worked for as long as
    all that are in flight at a time would in the horizon."""
    devices: tuple[int, int] = (32, 256)
    """Devices that appear in the window; drawn on a logarithmic scale."""
    concurrency_share: tuple[float, float] = (0.1, 0.6)
    """Concurrency over the mean number of devices online; drawn on a logarithmic scale."""
    buffer_share: tuple[float, float] = (0.6, 1.0)
    """Buffer size over concurrency, in (0, 1]."""
    keep_share: float = 0.5
    """Share of the episodes whose server keeps stragglers and aggregates their stale updates."""
    deadline_share: float = 0.3
    """Share of the episodes whose server aggregates what has arrived by a deadline."""
    request_share: float = 0.5
    """Share of the episodes whose server requests forecasts before each choice; in the others they
    are as old as the last reply."""
    over_reporting_share: float = 0.5
    """Share of the episodes with over-reporting clients, which always report a chance of 1."""
    over_reporting_clients: float = 0.3
    """Share of over-reporting clients in such an episode."""
    inflating_share: float = 0.5
    """Share of the episodes with clients that report `INFLATION` times their loss."""
    inflating_clients: float = 0.3
    """Share of inflating clients in such an episode."""
    skew: tuple[float, float] = (0.1, 3.0)
    """Concentration of the mixtures of data; drawn on a logarithmic scale."""
    spread: tuple[float, float] = (0.2, 1.2)
    """Standard deviation of the logarithm of the number of examples."""

    @property
    def choices(self) -> int:
        """Most choices of an episode."""
        return CHOICES * self.rounds

    def __post_init__(self) -> None:
        low, high = self.devices
        checks = {
            "window_s": self.window_s > 0,
            "rounds": is_count(self.rounds),
            "devices": is_count(low) and is_count(high) and 1 <= low <= high,
            "concurrency_share": 0 < self.concurrency_share[0] <= self.concurrency_share[1] <= 1,
            "buffer_share": 0 < self.buffer_share[0] <= self.buffer_share[1] <= 1,
            "skew": 0 < self.skew[0] <= self.skew[1],
            "horizon": 0 < self.horizon[0] <= self.horizon[1] < np.inf,
            "spread": 0 <= self.spread[0] <= self.spread[1],
        }
        shares = {"keep_share", "deadline_share", "request_share", "budget_share"}
        shares |= {"over_reporting_share", "over_reporting_clients"}
        shares |= {"inflating_share", "inflating_clients"}
        checks |= {name: 0 <= getattr(self, name) <= 1 for name in sorted(shares)}
        for name, good in checks.items():
            if not good:
                raise ConfigError(
                    f"episodes.{name} = {getattr(self, name)!r}: expected shares in [0, 1], pairs "
                    "(least, most), and times > 0 in s; see EpisodeSettings"
                )


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class RowArrays:
    """Arrays with a row for each episode."""

    def take(self, which: npt.NDArray[Any]) -> Self:
        """Return some rows, by position or by a mask."""
        return type(self)(**{f.name: getattr(self, f.name)[which] for f in fields(self)})

    def put(self, rows: Index, other: Self) -> None:
        """Write other rows, of as many devices, into some."""
        for f in fields(self):
            getattr(self, f.name)[rows] = getattr(other, f.name)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Episodes(RowArrays):
    """Some episodes, as arrays; b episodes of at most n devices."""

    devices: Index
    """Position of each device in the traces; shape (b, n)."""
    present: Mask
    """Whether the episode has a device in this column; shape (b, n)."""
    start: Array
    """Instants in s; shape (b,)."""
    end: Array
    """Instants in s; shape (b,)."""
    budget_s: Array
    """Device-seconds after which an episode is over, or inf; shape (b,)."""
    rounds: Index
    """Most rounds; shape (b,)."""
    kind: Index
    """Position of the job in `JobKinds`; shape (b,)."""
    concurrency: Index
    """Jobs in flight at a time; shape (b,)."""
    buffer_size: Index
    """Updates of a server step; shape (b,)."""
    keeps_stragglers: Mask
    """Whether jobs in flight at a server step are aggregated later, or discarded; shape (b,)."""
    deadline_s: Array
    """Time after which the server aggregates what has arrived, in s or inf; shape (b,)."""
    age_weights: Array
    """Weight of an update by its staleness; shape (b, AGES)."""
    requests_forecasts: Mask
    """Whether the server requests forecasts before every choice; shape (b,)."""
    over_reports: Mask
    """Whether a device always reports a chance of 1 to finish; shape (b, n)."""
    inflates: Mask
    """Whether a device reports `INFLATION` times its loss; shape (b, n)."""
    mixtures: Array
    """Share of each group in a device's data; shape (b, n, GROUPS)."""
    examples: Array
    """Number of examples of a device; shape (b, n)."""
    work_scale: Array
    """Work of a device's job over that of the mean device, as its examples are; shape (b, n)."""
    noise: Array
    """Standard normal noise in the losses that a device reports; shape (b, n, NOISES)."""

    __repr__ = outline

    def __len__(self) -> int:
        return self.start.size
