"""Many devices in flat arrays: when each is online, how fast it computes, how fast its links are.

`TraceSet` is the one door to traces: it reads and writes files, reads published recordings,
generates devices and composes complete devices out of independent sources. A set may know only some
of the channels, as most published recordings do; what is unknown is never guessed.

A device imports this file and makes no set, so pandas is imported where a set needs it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import numpy.typing as npt

from fedstale.errors import TraceError
from fedstale.traces.arrays import DAY_S, Array
from fedstale.traces.availability import Availability
from fedstale.traces.series import Series
from fedstale.traces.trip import Job, TripOutcomes, trips

if TYPE_CHECKING:
    import pandas as pd

    from fedstale.traces.synthetic import Population

CHANNELS = ("availability", "compute", "downlink", "uplink")
OWN_LOG = (
    "a log of your own in CSV, JSON or Parquet becomes traces by fedstale traces convert LOG "
    "--out NAME.parquet"
)
"""What ends a refusal of a file that is of another format."""
_SYNTHETIC, _IDEAL = "synthetic:", "ideal:"
_SYNTHETIC_DAYS = 7


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class TraceSet:
    """Recorded or generated behaviour of many devices; instants count in s from the set's epoch.

    Example:
        >>> traces = TraceSet.constant(2, compute=1.0, downlink_bit_per_s=8e6, uplink_bit_per_s=8e6)
        >>> job = Job(work=30.0, download_bytes=1_000_000, upload_bytes=2_000_000)
        >>> traces.trips([0, 1], 100.0, job).reported
        array([133., 133.])
    """

    device_ids: "pd.Index"
    """Name of each device, distinct; length n."""
    availability: Availability | None = None
    """When each device is online."""
    compute: Series | None = None
    """Work units/s left for a job after the device's background load."""
    downlink: Series | None = None
    """Bit/s towards the device."""
    uplink: Series | None = None
    """Bit/s from the device."""
    compute_unit: str | None = None
    """What one work unit is, in words."""
    epoch: str | None = None
    """Local calendar time of instant 0 (ISO 8601), for time-of-day features; None if unknown."""
    repairs: Mapping[str, int] = field(default_factory=dict)
    """What a reader repaired or dropped, counted by kind, in alphabetical order; never 0."""

    def __post_init__(self) -> None:
        counted = {kind: int(n) for kind, n in sorted(self.repairs.items()) if n}
        object.__setattr__(self, "repairs", counted)
        if len(self.device_ids) == 0:
            raise TraceError("a trace set needs at least one device")
        if not self.device_ids.is_unique:
            twice = self.device_ids[self.device_ids.duplicated()][0]
            raise TraceError(f"device {twice!r} occurs twice: expected distinct device ids")
        for name in CHANNELS:
            channel = getattr(self, name)
            if channel is not None and channel.n_devices != len(self.device_ids):
                raise TraceError(
                    f"{name} has {channel.n_devices} devices: expected {len(self.device_ids)}"
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> "TraceSet":
        """Return itself: a set does not change, and may be large."""
        return self

    def _facts(self) -> dict[str, object]:
        facts: dict[str, object] = {"devices": self.n_devices, "channels": ", ".join(self.known)}
        for name in self.known[:1]:
            channel = getattr(self, name)
            facts["record_s"] = float(min(channel.record_s().max(), channel.until))
        return {**facts, "epoch": self.epoch}

    def __repr__(self) -> str:
        return f"TraceSet({', '.join(f'{k}={v!r}' for k, v in self._facts().items())})"

    def _repr_html_(self) -> str:
        """Render a summary of the devices for notebooks."""
        import pandas as pd

        facts = {**self._facts(), "compute_unit": self.compute_unit, **self.repairs}
        return pd.Series(facts).to_frame().to_html(header=False)

    @classmethod
    def load(cls, spec: str, *, seed: int) -> "TraceSet":
        """Return the traces that a command or a configuration names.

        Args:
            spec: `synthetic:N` for N generated phones over a week, `synthetic:N@desktops` for
                desktops, `synthetic:N@sites` for machines of organisations, `ideal:N` for N devices
                that are always online and take no time, a native .parquet file, or a published
                recording in the format of its authors.
            seed: of generated devices; recordings do not depend on it.

        Raises:
            TraceError: it names no traces, or they cannot be read.
        """
        if spec.startswith(_IDEAL):
            return cls.ideal(_number(spec, spec.removeprefix(_IDEAL), _IDEAL))
        if cls.is_synthetic(spec):
            count, at, preset = spec.removeprefix(_SYNTHETIC).partition("@")
            n = _number(spec, count, _SYNTHETIC)
            from fedstale.traces.synthetic import PRESETS

            if at and preset not in PRESETS:
                raise TraceError(
                    f"traces = {spec!r}: no population {preset!r}; expected synthetic:N@NAME with "
                    f"one of {', '.join(PRESETS)}"
                )
            return cls.synthetic(n, seed=seed, population=preset or None)
        if not Path(spec).exists():
            raise TraceError(
                f"traces = {spec!r}: no such file or folder; expected one, synthetic:N for N "
                "generated devices, or ideal:N for N that take no time"
            )
        return cls.read(spec)

    @staticmethod
    def is_synthetic(spec: str) -> bool:
        """Return whether the traces that `load` takes by this name depend on the seed."""
        return spec.startswith(_SYNTHETIC)

    @classmethod
    def read(cls, path: str | Path, source: str | None = None) -> "TraceSet":
        """Return the traces in a file or folder: a native file, or a published recording.

        Args:
            path: file or folder.
            source: "native" or one of `fedstale.traces.sources.SOURCES`; None finds out by name and
                content.

        Returns:
            A set that knows what the source knows, with its repairs counted. A native file gives
            back the arrays that were written, so the same answers to the last bit.

        Raises:
            TraceError: the path is missing, damaged, of no known kind or of a later version.
        """
        from fedstale.traces.sources import read

        return read(Path(path), source)

    def write(self, path: str | Path, *, private: bool = False) -> None:
        """Write a native file, whole or not at all; rows that no device uses are left out.

        Args:
            path: file to make or replace, usually NAME.parquet.
            private: whether only its owner may read it.

        Raises:
            TraceError: the file cannot be written.
        """
        from fedstale.traces.io import parquet

        parquet.write(self, Path(path), private=private)

    @classmethod
    def synthetic(
        cls,
        n: int,
        *,
        seed: int,
        days: int = _SYNTHETIC_DAYS,
        time_zones: Literal["same", "spread"] = "same",
        population: "Population | str | Path | None" = None,
    ) -> "TraceSet":
        """Return n generated devices with all channels; their records repeat after their end.

        Device i is the same whatever n is; only the zeros in its name follow n.

        Args:
            n: number of devices, >= 1.
            seed: of everything drawn, >= 0.
            days: length of the record of availability, >= 1; whole weeks for devices that keep
                weekdays.
            time_zones: "same" makes instant 0 a midnight for all; "spread" puts each device in one
                of 24 zones at random, and the set then has no epoch.
            population: what to draw from: "phones", "desktops" or "sites", a population, or a TOML
                file of one; None is phones.

        Returns:
            Devices named device-0... upwards.

        Raises:
            TraceError: an argument is out of range.

        Example:
            >>> TraceSet.synthetic(3, seed=0, days=1).known
            ('availability', 'compute', 'downlink', 'uplink')
        """
        from fedstale.traces.synthetic import generate

        return generate(n, days, seed, time_zones=time_zones, population=population)

    @classmethod
    def from_frame(cls, frame: "pd.DataFrame", **options: Any) -> "TraceSet":
        """Return the traces of a log in a table, as `fedstale traces convert` makes them.

        What is not stated is taken from the names and values of the columns where they leave one
        reading; `fedstale.traces.tables.read_table` tells what was taken. docs/traces.md has the
        kinds of log and what becomes of each.

        Args:
            frame: one row for each window, reading or node.
            options: what is stated of it, by the names of `fedstale.traces.tables.TableOptions`.

        Returns:
            What the table knows; what was dropped or merged is counted in `repairs`.

        Raises:
            TraceError: something is missing, wrong, or has more than one reading.

        Example:
            >>> import pandas as pd
            >>> log = pd.DataFrame({"phone": ["a"], "from": [7.5], "to": [60.0]})
            >>> TraceSet.from_frame(log, unit="s").availability.windows(0)[0]
            array([[ 7.5, 60. ]])
        """
        from fedstale.traces.tables import TableOptions, read_table

        return read_table(frame, TableOptions(**options)).traces

    @classmethod
    def compose(
        cls,
        *,
        availability: "TraceSet | None" = None,
        compute: "TraceSet | None" = None,
        background: "TraceSet | None" = None,
        network: "TraceSet | None" = None,
        n: int,
        seed: int,
        uplink_share: float | None = None,
        days: int | None = None,
        keep_together: bool = False,
    ) -> "TraceSet":
        """Return n devices with all channels, made of independent sources.

        Every record of a source is used before one is used again. A device keeps the id of its
        record of availability; the second device with it is called ID#2, and comes some whole days
        later in the record, so that hours of the day stay where they are; in a record of several
        whole weeks it comes whole weeks later, and weekdays stay as well. Links and background
        loads, which are short and know no hours, start anywhere and repeat, each at the end of its
        record, or after more than a number of days.

        Args:
            availability: when devices are online.
            compute: speed of idle devices in work units/s, or of devices whose load is counted
                already.
            background: share of the processor that is left; None if `compute` counts it already.
            network: links; a downlink, and an uplink or else `uplink_share`.
            n: number of devices, >= 1.
            seed: of the draw, >= 0.
            uplink_share: rate of the uplink divided by that of the downlink, > 0, for links of
                which only the downlink was recorded.
            days: for how long no link and no load repeats as a whole, in days, >= 1. A link is then
                recorded sessions in a random order, so that each recurs, but at no fixed time; a
                load is all days of one processor (records named DAY/HOST), and processors with
                fewer days are left out. None repeats each record.
            keep_together: whether sources of compute and network that have device ids of
                availability are of the same devices. Each device then has its own link and speed,
                at the hours at which they were recorded if both sources have an epoch; devices
                that one of them does not know are left out, and counted. Other sources are drawn.

        Returns:
            Devices that share the rows of their sources.

        Raises:
            TraceError: a source is missing or does not know its part, or an argument is out of
                range.

        Example:
            >>> parts = TraceSet.constant(2, compute=1, downlink_bit_per_s=8, uplink_bit_per_s=4)
            >>> made = TraceSet.compose(
            ...     availability=parts, compute=parts, network=parts, n=3, seed=0
            ... )
            >>> sorted(made.device_ids)
            ['device-0', 'device-0#2', 'device-1']
        """
        from fedstale.traces.compose import compose

        sources = {"availability": availability, "compute": compute}
        sources |= {"background": background, "network": network}
        return compose(
            sources, n, seed, uplink_share=uplink_share, days=days, keep_together=keep_together
        )

    @classmethod
    def constant(
        cls, n: int, *, compute: float, downlink_bit_per_s: float, uplink_bit_per_s: float
    ) -> "TraceSet":
        """Return n equal devices that are always online, with constant rates."""
        return cls(
            device_ids=numbered("device", n),
            availability=Availability.always(n),
            compute=Series.constant(np.full(n, compute)),
            downlink=Series.constant(np.full(n, downlink_bit_per_s)),
            uplink=Series.constant(np.full(n, uplink_bit_per_s)),
            compute_unit="one unit of the rate given",
        )

    @classmethod
    def ideal(cls, n: int) -> "TraceSet":
        """Return n devices that are always online and take no time for anything.

        Rates are infinite, so every duration is 0 s to the bit, and replies come in the order of
        sending.
        """
        fast = np.inf
        return cls.constant(n, compute=fast, downlink_bit_per_s=fast, uplink_bit_per_s=fast)

    @property
    def is_ideal(self) -> bool:
        """Whether no job takes any time on any device, so that no clock moves."""
        rates = (self.compute, self.downlink, self.uplink)
        return all(channel is not None and channel.is_instant for channel in rates)

    @property
    def n_devices(self) -> int:
        """Number of devices."""
        return len(self.device_ids)

    @property
    def known(self) -> tuple[str, ...]:
        """Names of the channels that this set has."""
        return tuple(name for name in CHANNELS if getattr(self, name) is not None)

    @property
    def midnight_s(self) -> float | None:
        """Time of day of instant 0 in s; None if it is unknown.

        Example:
            >>> replace(TraceSet.ideal(1), epoch="2024-01-01T06:00:00").midnight_s
            21600.0
        """
        return None if (monday_s := self.monday_s) is None else monday_s % DAY_S

    @property
    def monday_s(self) -> float | None:
        """Time of instant 0 since the midnight that began its week's Monday, in s; None if unknown.

        Example:
            >>> replace(TraceSet.ideal(1), epoch="2024-01-02T06:00:00").monday_s
            108000.0
        """
        if self.epoch is None:
            return None
        import pandas as pd

        at = pd.Timestamp(self.epoch)
        return float((at - at.to_period("W-SUN").start_time).total_seconds())

    @property
    def nbytes(self) -> int:
        """Memory of all channels, in bytes, without the device ids."""
        return sum(getattr(self, name).nbytes for name in self.known)

    def complete(self) -> tuple[Availability, Series, Series, Series]:
        """Return availability, compute, downlink and uplink, which must all be known.

        Raises:
            TraceError: one is not; all that are missing are named.
        """
        online, compute, down, up = self.availability, self.compute, self.downlink, self.uplink
        if online is None or compute is None or down is None or up is None:
            raise self._unknown(*CHANNELS)
        return online, compute, down, up

    def _unknown(self, *needed: str) -> TraceError:
        """Return an error that names the channels which are needed and unknown."""
        missing = [name for name in needed if name not in self.known]
        return TraceError(
            f"these traces know {', '.join(self.known) or 'nothing'} but not "
            f"{', '.join(missing)}: compose them with a source that does, or "
            "with what you state (fedstale traces compose --compute --network)"
        )

    @overload
    def channel(self, name: Literal["availability"]) -> Availability: ...
    @overload
    def channel(self, name: Literal["compute", "downlink", "uplink"]) -> Series: ...
    def channel(self, name: str) -> Availability | Series:
        """Return a channel that must be known.

        Raises:
            TraceError: it is not.
        """
        found: Availability | Series | None = getattr(self, name)
        if found is None:
            raise self._unknown(name)
        return found

    def take(self, devices: npt.ArrayLike) -> "TraceSet":
        """Return some devices, in the order given; the recorded rows stay shared.

        Args:
            devices: positions of distinct devices; shape (m,).
        """
        devices = np.asarray(devices, dtype=np.int64)
        channels = {name: getattr(self, name).take(devices) for name in self.known}
        return replace(self, device_ids=self.device_ids[devices], **channels)

    def between(self, start: float, end: float) -> "TraceSet":
        """Cut to [start, end), with start as the new instant 0.

        Nothing is known from `end` on: no device is available and every rate is 0.

        Args:
            start: instant in s, >= 0.
            end: instant in s, > start.

        Raises:
            TraceError: the interval is empty or starts before 0.
        """
        if not 0 <= start < end:
            raise TraceError(f"between({start}, {end}): expected 0 <= start < end")
        channels = {name: getattr(self, name).between(start, end) for name in self.known}
        epoch = self.epoch
        if epoch is not None:
            import pandas as pd

            epoch = (pd.Timestamp(epoch) + pd.Timedelta(seconds=start)).isoformat()
        return replace(self, epoch=epoch, **channels)

    def repeating(self, *, repeat: bool) -> "TraceSet":
        """Return the same devices whose records repeat, or stop, at their end."""
        channels = {name: replace(getattr(self, name), repeat=repeat) for name in self.known}
        return replace(self, **channels)

    def log_at(self, devices: npt.ArrayLike, t: npt.ArrayLike) -> tuple[Array, Array]:
        """Look up the spans in which devices were logged; see `Availability.log_at`.

        Where availability is unknown, what is known holds at any time.
        """
        if self.availability is not None:
            return self.availability.log_at(devices, t)
        endless = np.full(np.broadcast_shapes(np.shape(devices), np.shape(t)), np.inf)
        return -endless, endless

    def trips(
        self, devices: npt.ArrayLike, sent_at: npt.ArrayLike, job: Job, free_at: npt.ArrayLike = 0.0
    ) -> TripOutcomes:
        """Work out the job that is sent to each device; see `fedstale.traces.trip`.

        Raises:
            TraceError: a channel is unknown, a device does not exist, or an instant is negative or
                not a number.
        """
        return trips(self.complete(), devices, sent_at, job, free_at)


def _number(spec: str, count: str, prefix: str) -> int:
    """Return how many devices a text such as synthetic:100 asks for."""
    if not (count.isascii() and count.isdecimal() and int(count) >= 1):
        raise TraceError(f"traces = {spec!r}: expected {prefix}N, such as {prefix}100, with N >= 1")
    return int(count)


def numbered(prefix: str, n: int) -> "pd.Index":
    """Return n device ids that count up, such as device-000 to device-999."""
    import pandas as pd

    width = len(str(max(n - 1, 0)))
    return pd.Index([f"{prefix}-{i:0{width}d}" for i in range(n)], dtype="str")
