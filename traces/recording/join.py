"""One set of traces out of many devices' own recordings.

Recordings start when their owners start them. They are laid on one time line, either by the
calendar, which keeps what happened to all at once, or by the hour of the day alone, which lets
recordings of different weeks overlap. Records repeat: by the hour of the day that fills the time
before a recording began too; by the calendar a device is not online until then.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd

from fedstale.errors import TraceError
from fedstale.traces.arrays import Array
from fedstale.traces.series import Series
from fedstale.traces.trace_set import CHANNELS, DeviceTrace, TraceSet

Align = Literal["time-of-day", "calendar"]


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
    devices: list[DeviceTrace] = []
    leads: list[float] = []
    origin: dict[str, str] = {}
    for name, traces in sets.items():
        lead_s = (begins[name] - midnight).total_seconds()
        if align == "time-of-day":
            lead_s %= 86_400.0
        absent_s = lead_s if align == "calendar" else 0.0
        for device_id in traces.device_ids:
            if device_id in origin:
                raise TraceError(
                    f"{name}: device {device_id!r} is in {origin[device_id]} too; expected "
                    "distinct devices: record each with a --device of its own"
                )
            origin[device_id] = name
            devices.append(_placed(traces.device(device_id), absent_s, channels))
            leads.append(lead_s)
    fleet, first = TraceSet.from_devices(devices), next(iter(sets.values()))
    repairs: Counter[str] = Counter()
    for traces in sets.values():
        repairs.update(traces.repairs)
    return replace(
        fleet,
        **_in_place(fleet, np.array(leads), align),
        compute_unit=first.compute_unit if "compute" in channels else None,
        epoch=midnight.isoformat(),
        repairs=dict(repairs),
    )


def _in_place(fleet: TraceSet, lead_s: Array, align: Align) -> dict[str, Any]:
    online = fleet.channel("availability")
    placed: dict[str, Any] = {
        name: _begun_later(getattr(fleet, name), lead_s) for name in fleet.known[1:]
    }
    if align == "time-of-day":
        placed["availability"] = online.shifted(np.mod(-lead_s, online.lengths[online.rows]))
    return placed


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


def _placed(device: DeviceTrace, absent_s: float, channels: Sequence[str]) -> DeviceTrace:
    """Return a device that is not online at first, with the channels that are kept."""
    assert device.available is not None
    assert device.available_length_s is not None
    left_out: dict[str, Any] = {name: None for name in CHANNELS[1:] if name not in channels}
    return replace(
        device,
        available=device.available + absent_s,
        available_length_s=device.available_length_s + absent_s,
        **left_out,
    )


def _begun_later(series: Series, lead_s: Array) -> Series:
    """Return rates whose records begin later, and are preceded by their own repetition."""
    return series.shifted(np.mod(-lead_s, series.lengths[series.rows]))
