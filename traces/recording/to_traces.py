"""Traces out of a device's own readings: when it was online, what was left, what is not known.

A recording is passive. It sees the processor that other programs leave, so compute is that share
times a speed which the user states or measures. It sees traffic, which only bounds the capacity of
a link from below, so links are stated or stay unknown. A device's clock may be set, or stop: the
trace follows the steady clock within a run, and the wall clock from one run to the next.

`merge` makes one set of many devices' own recordings, which start when their owners start them.
They are laid on one time line, either by the calendar, which keeps what happened to all at once, or
by the hour of the day alone, which lets recordings of different weeks overlap. Records repeat: by
the hour of the day that fills the time before a recording began too; by the calendar a device is
not online until then.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd

from fedstale.errors import TraceError
from fedstale.traces.arrays import DAY_S, Array, Mask
from fedstale.traces.availability import Availability
from fedstale.traces.recording.monitor import Reading
from fedstale.traces.series import Series
from fedstale.traces.trace_set import CHANNELS, TraceSet

Align = Literal["time-of-day", "calendar"]
AvailableWhen = Literal["online", "charging", "recording"]

_NEEDED: dict[AvailableWhen, tuple[str, ...]] = {
    "recording": (),
    "online": ("online",),
    "charging": ("online", "charging"),
}

# A reading that is this many intervals late was not late: the device slept, or was off.
_GAP_INTERVALS = 3.0
# Clocks that are disciplined by a time server drift by less than this between two readings.
_STEP_S = 2.0
# Between runs only the wall clock counts, and one that starts in 1970 must not add half a century.
_LONGEST_SILENCE_S = 31 * DAY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingRules:
    """What the readings of a device are taken to mean."""

    available: AvailableWhen = "online"
    """The device can take a job: while online; while online and on mains; while it records."""
    speed: float | None = None
    """Work units/s of the whole processor, idle, > 0; None leaves compute unknown."""
    compute_unit: str | None = None
    """What one work unit is, in words."""
    link_bit_per_s: tuple[float, float] | None = None
    """Stated capacity of downlink and uplink in bit/s, > 0; None leaves the links unknown."""

    def __post_init__(self) -> None:
        if self.available not in get_args(AvailableWhen):
            raise TraceError(
                f"available = {self.available!r}: expected 'online', 'charging' or 'recording'"
            )
        rates = {"speed": self.speed} if self.speed is not None else {}
        if self.link_bit_per_s is not None:
            rates |= dict(zip(("downlink", "uplink"), self.link_bit_per_s, strict=True))
        for name, rate in rates.items():
            if not (np.isfinite(rate) and rate > 0):
                raise TraceError(f"{name} = {rate}: expected a finite number > 0")


def traces_of(
    readings: pd.DataFrame, rules: RecordingRules, dropped: dict[str, int] | None = None
) -> TraceSet:
    """Return the trace of one device from its journal.

    Instant 0 is the first reading; calendar time follows the clock of the last one. A share of the
    processor holds for the time before its reading, everything else for the time after it. Nothing
    is known of the time after the last reading, so the trace ends there.

    Args:
        readings: of the journal, as `journal.read` returns them; at least two.
        rules: what the readings mean.
        dropped: what reading the journal dropped, by kind, to be counted among the repairs.

    Returns:
        A set of one device with availability, and compute and links where they are known.

    Raises:
        TraceError: there are fewer than two readings, or the rule needs what was never read.
    """
    if len(readings) < 2:
        raise TraceError(
            f"{len(readings)} reading in the journal: expected at least 2; record for longer"
        )
    t, gap, repairs = _timeline(readings)
    online = _available(readings, rules.available)[:-1] & ~gap
    edges = np.diff(np.concatenate([[0], online.astype(np.int8), [0]]))
    windows, length = np.stack([t[edges == 1], t[edges == -1]], axis=1), float(t[-1])
    channels: dict[str, Series] = {}
    share = readings["processor_left"].to_numpy(np.float64)[1:]
    if rules.speed is not None and np.isfinite(share).any():
        left, filled = _held(share, gap)
        repairs["filled: share of the processor not read"] = filled
        rates = left * rules.speed
        new = np.concatenate([[True], np.diff(rates) != 0])
        channels["compute"] = Series.irregular([(t[:-1][new], rates[new])], [length])
    for name, rate in zip(("downlink", "uplink"), rules.link_bit_per_s or (), strict=False):
        channels[name] = Series.irregular([([0.0], [rate])], [length])
    last = readings.iloc[-1]
    began = timedelta(seconds=float(last["instant"]) - length + float(last["utc_offset_s"]))
    epoch = datetime(1970, 1, 1, tzinfo=UTC) + began
    return TraceSet(
        device_ids=pd.Index([last["device_id"]], dtype="str"),
        availability=Availability.of([windows], length),
        **channels,
        compute_unit=rules.compute_unit if "compute" in channels else None,
        epoch=epoch.replace(tzinfo=None).isoformat(),
        repairs={**(dropped or {}), **repairs},
    )


def check_readable(reading: Reading, rule: AvailableWhen) -> None:
    """Raise a TraceError if a device cannot read what a rule of availability needs."""
    for name in _NEEDED[rule]:
        if getattr(reading, name) is None:
            raise _unreadable(rule, name)


def highest_rates(readings: pd.DataFrame) -> tuple[float, float]:
    """Return the highest rates received and sent, in bit/s: the links carry at least that.

    NaN where no traffic was read.
    """
    return float(readings["received_bit_per_s"].max()), float(readings["sent_bit_per_s"].max())


def _timeline(readings: pd.DataFrame) -> tuple[Array, Mask, dict[str, int]]:
    """Return the instant of each reading, whether a gap follows it (n - 1), and the repairs."""
    interval = readings["interval_s"].to_numpy(np.float64)[:-1]
    same = np.diff(readings["run"]) == 0
    by_wall, by_steady = np.diff(readings["instant"]), np.diff(readings["steady"])
    elapsed = np.where(same, by_steady, by_wall)
    step = np.where(same, by_wall - by_steady, 0.0)
    back = (elapsed <= 0) | (step < -_STEP_S)
    forward = step > _STEP_S
    endless = elapsed > _LONGEST_SILENCE_S
    elapsed = np.where(elapsed <= 0, interval, np.minimum(elapsed, _LONGEST_SILENCE_S))
    gap = back | forward | (elapsed > _GAP_INTERVALS * interval)
    t = np.concatenate([[0.0], np.cumsum(elapsed)])
    repairs = {
        "gap: clock was set back": int(back.sum()),
        "gap: clock was set forward": int(forward.sum()),
        "gap: no reading": int((gap & ~back & ~forward).sum()),
        "shortened: silence of over 31 days": int(endless.sum()),
    }
    return t, gap, repairs


def _available(readings: pd.DataFrame, rule: AvailableWhen) -> Mask:
    needed = _NEEDED[rule]
    for name in needed:
        if readings[name].isna().all():
            raise _unreadable(rule, name)
    return (readings[list(needed)] == 1.0).all(axis=1).to_numpy()


def _unreadable(rule: AvailableWhen, name: str) -> TraceError:
    other = "'online' or 'recording'" if name == "charging" else "'recording'"
    return TraceError(
        f"available = {rule!r}: this device cannot read whether it is {name}; expected {other}"
    )


def _held(share: Array, gap: Mask) -> tuple[Array, int]:
    """Return shares with gaps and missing ones filled by the last known, and how many were."""
    known = np.isfinite(share) & ~gap
    if not known.any():
        known = np.isfinite(share)
    held = pd.Series(share).where(known).ffill().bfill().to_numpy(np.float64)
    return np.clip(held, 0.0, 1.0), int((~known).sum())


def merge(
    paths: Sequence[str | Path], *, align: Align = "time-of-day", only: Sequence[str] | None = None
) -> TraceSet:
    """Return the devices of several recordings as one set.

    Args:
        paths: native files as `fedstale traces record` writes them, of distinct devices.
        align: whether devices keep the day on which they were recorded ("calendar"), or only its
            hour ("time-of-day").
        only: channels to keep; None keeps all, which every recording must then know.

    Returns:
        All devices; instant 0 is the midnight before the first recording began.

    Raises:
        TraceError: a file cannot be read or is no recording, or recordings do not fit together.
    """
    if align not in get_args(Align):
        raise TraceError(f"align = {align!r}: expected 'time-of-day' or 'calendar'")
    if not paths:
        raise TraceError("no recordings to merge: expected at least one file")
    sets = {str(path): TraceSet.read(path, "native") for path in paths}
    if len(sets) < len(paths):
        raise TraceError("a file is given twice: expected distinct recordings")
    channels = _channels(sets, only)
    _check_alike(sets, channels)
    begins = {name: pd.Timestamp(traces.epoch or "nat") for name, traces in sets.items()}
    midnight = min(begins.values()).normalize()
    windows: list[Array] = []
    lengths: list[float] = []
    leads: list[float] = []
    origin: dict[str, str] = {}
    for name, traces in sets.items():
        lead_s = (begins[name] - midnight).total_seconds()
        if align == "time-of-day":
            lead_s %= DAY_S
        absent_s = lead_s if align == "calendar" else 0.0
        for i, device_id in enumerate(traces.device_ids):
            if device_id in origin:
                raise TraceError(
                    f"{name}: device {device_id!r} is in {origin[device_id]} too; expected "
                    "distinct devices: record each with a --device of its own"
                )
            origin[device_id] = name
            online, length = traces.channel("availability").windows(i)
            windows.append(online + absent_s)
            lengths.append(length + absent_s)
            leads.append(lead_s)
    fleet: dict[str, Any] = {"availability": Availability.of(windows, lengths)}
    for channel in channels[1:]:
        each = [getattr(s, channel).segments(i) for s in sets.values() for i in range(s.n_devices)]
        fleet[channel] = Series.irregular([row[:2] for row in each], [row[2] for row in each])
    # Records begin later, and are preceded by their own repetition.
    for channel in channels if align == "time-of-day" else channels[1:]:
        fleet[channel] = fleet[channel].shifted(np.mod(-np.array(leads), fleet[channel].record_s()))
    unit = next(iter(sets.values())).compute_unit
    return TraceSet(
        device_ids=pd.Index(list(origin), dtype="str"),
        **fleet,
        compute_unit=unit if "compute" in channels else None,
        epoch=midnight.isoformat(),
        repairs=sum((Counter(traces.repairs) for traces in sets.values()), Counter()),
    )


def _channels(sets: Mapping[str, TraceSet], only: Sequence[str] | None) -> tuple[str, ...]:
    if only is not None:
        unknown = [name for name in only if name not in CHANNELS]
        if unknown or "availability" not in only:
            raise TraceError(
                f"only = {', '.join(only)}: expected availability and some of "
                f"{', '.join(CHANNELS[1:])}"
            )
        wanted = set(only)
    else:
        wanted = {name for traces in sets.values() for name in traces.known} | {"availability"}
    for path, traces in sets.items():
        missing = [name for name in CHANNELS if name in wanted and name not in traces.known]
        if missing:
            raise TraceError(
                f"{path}: does not know {', '.join(missing)}: leave it out, record it again, or "
                "keep only the channels that all recordings know (--only)"
            )
    return tuple(name for name in CHANNELS if name in wanted)


def _check_alike(sets: Mapping[str, TraceSet], channels: Sequence[str]) -> None:
    first_name, first = next(iter(sets.items()))
    for path, traces in sets.items():
        if traces.epoch is None:
            raise TraceError(f"{path}: knows no calendar time: expected a recording of a device")
        if "compute" in channels and traces.compute_unit != first.compute_unit:
            raise TraceError(
                f"{path}: counts compute in {traces.compute_unit!r}, {first_name} in "
                f"{first.compute_unit!r}: expected one unit; record with the same --compute-unit"
            )
        for name in channels:
            channel = getattr(traces, name)
            if np.any(channel.shifts) or np.isfinite(channel.until):
                raise TraceError(
                    f"{path}: {name} is a part of another record: expected a recording as "
                    "fedstale traces record writes it; compose joins sources of other kinds"
                )
            if not channel.repeat:
                raise TraceError(f"{path}: {name} stops at its end: expected records that repeat")
