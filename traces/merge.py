"""Several sets of devices as one: many devices' own recordings, or fleets of several kinds.

They are laid on one time line, either by the calendar, which keeps what happened to all at once, or
by the hour of the day alone, or of the week, which lets recordings of different weeks overlap.
Records repeat: by the hour that fills the time before a recording began too; by the calendar a
device is unknown until then, and so not online.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd

from fedstale.errors import TraceError
from fedstale.traces.arrays import DAY_S
from fedstale.traces.availability import Availability
from fedstale.traces.series import Series
from fedstale.traces.trace_set import CHANNELS, TraceSet

Align = Literal["time-of-day", "time-of-week", "calendar"]
_CYCLE_S = {"time-of-day": DAY_S, "time-of-week": 7 * DAY_S, "calendar": np.inf}


def merge(
    paths: Sequence[str | Path], *, align: Align = "time-of-day", only: Sequence[str] | None = None
) -> TraceSet:
    """Return the devices of several native files as one set; see `merged`.

    Args:
        paths: native files of distinct devices.
        align: as for `merged`.
        only: as for `merged`.

    Raises:
        TraceError: a file cannot be read, or files do not fit together.
    """
    if not paths:
        raise TraceError("no recordings to merge: expected at least one file")
    sets = {str(path): TraceSet.read(path, "native") for path in paths}
    if len(sets) < len(paths):
        raise TraceError("a file is given twice: expected distinct recordings")
    return merged(sets, align=align, only=only)


def merged(
    sets: Mapping[str, TraceSet],
    *,
    align: Align = "time-of-day",
    only: Sequence[str] | None = None,
) -> TraceSet:
    """Return the devices of several sets as one set, on one time line.

    Args:
        sets: by the name that an error calls them by; at least one; their devices are distinct.
        align: whether devices keep the day on which they were recorded ("calendar"), its hour of
            the week ("time-of-week"), or its hour of the day alone ("time-of-day").
        only: channels to keep; None keeps all, which every set must then know.

    Returns:
        All devices, whose rows stay shared; instant 0 is the midnight before the first set begins.

    Raises:
        TraceError: the sets do not fit together.

    Example:
        >>> phones = replace(TraceSet.ideal(2), epoch="2024-01-04T06:00:00")
        >>> cars = replace(phones, device_ids=pd.Index(["a", "b"]), epoch="2024-01-01T00:00:00")
        >>> both = merged({"phones": phones, "cars": cars}, align="time-of-week")
        >>> list(both.device_ids), both.epoch
        (['device-0', 'device-1', 'a', 'b'], '2024-01-01T00:00:00')
    """
    if align not in get_args(Align):
        raise TraceError(f"align = {align!r}: expected 'time-of-day', 'time-of-week' or 'calendar'")
    channels = _channels(sets, only)
    _check_alike(sets, channels, align)
    begins = {name: pd.Timestamp(traces.epoch or "nat") for name, traces in sets.items()}
    midnight = min(begins.values()).normalize()
    leads = {
        name: (began - midnight).total_seconds() % _CYCLE_S[align] for name, began in begins.items()
    }
    fleet: dict[str, Any] = {
        name: Series.joined([getattr(traces, name) for traces in sets.values()])
        for name in channels[1:]
    }
    fleet["availability"] = Availability.joined(
        [
            _begun_at(traces.channel("availability"), leads[name] if align == "calendar" else 0.0)
            for name, traces in sets.items()
        ]
    )
    later = np.repeat([*leads.values()], [traces.n_devices for traces in sets.values()])
    # Records begin later, and are preceded by their own repetition.
    for name in channels[1:] if align == "calendar" else channels:
        fleet[name] = fleet[name].shifted(np.mod(-later, fleet[name].record_s()))
    unit = next(iter(sets.values())).compute_unit
    return TraceSet(
        device_ids=pd.Index(
            [device for traces in sets.values() for device in traces.device_ids], dtype="str"
        ),
        **fleet,
        compute_unit=unit if "compute" in channels else None,
        epoch=midnight.isoformat(),
        repairs=sum((Counter(traces.repairs) for traces in sets.values()), Counter()),
    )


def _begun_at(online: Availability, lead_s: float) -> Availability:
    """Return devices whose records have an unknown time before them, in s."""
    return replace(
        online,
        starts=online.starts + lead_s,
        ends=online.ends + lead_s,
        # Records of whole days remain so, or repetitions would come at other hours.
        lengths=online.lengths
        + np.where(online.lengths % DAY_S == 0, np.ceil(lead_s / DAY_S) * DAY_S, lead_s),
        log_starts=online.log_starts + lead_s,
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


def _check_alike(sets: Mapping[str, TraceSet], channels: Sequence[str], align: Align) -> None:
    first_name, first = next(iter(sets.items()))
    origin: dict[str, str] = {}
    for path, traces in sets.items():
        if traces.epoch is None:
            raise TraceError(f"{path}: knows no calendar time: expected a recording of a device")
        if "compute" in channels and traces.compute_unit != first.compute_unit:
            raise TraceError(
                f"{path}: counts compute in {traces.compute_unit!r}, {first_name} in "
                f"{first.compute_unit!r}: expected one unit; record with the same unit in --compute"
            )
        for name in channels:
            channel = getattr(traces, name)
            moved = align == "calendar" and name == "availability" and np.any(channel.shifts)
            if moved or np.isfinite(channel.until):
                raise TraceError(
                    f"{path}: {name} is a part of another record: expected whole records, as "
                    "fedstale traces record and compose write them"
                )
            if not channel.repeat:
                raise TraceError(f"{path}: {name} stops at its end: expected records that repeat")
        for device in traces.device_ids:
            if device in origin:
                raise TraceError(
                    f"{path}: device {device!r} is in {origin[device]} too; expected "
                    "distinct devices: record each with a --device of its own"
                )
            origin[device] = path
