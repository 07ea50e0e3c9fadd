"""Several sets of devices as one: many devices' own recordings, or fleets of several kinds.

They are laid on one time line by the hour of the day, or of the week, so that recordings of
different weeks overlap. Records repeat, which fills the time before a recording began, too.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd

from fedstale.errors import TraceError
from fedstale.traces.arrays import DAY_S
from fedstale.traces.availability import Availability
from fedstale.traces.series import Series
from fedstale.traces.trace_set import CHANNELS, TraceSet

Align = Literal["time-of-day", "time-of-week"]
_CYCLE_S = {"time-of-day": DAY_S, "time-of-week": 7 * DAY_S}


def merged(sets: Mapping[str, TraceSet], *, align: Align = "time-of-day") -> TraceSet:
    """Return the devices of several sets as one set, on one time line.

    Args:
        sets: by the name that an error calls them by; at least one; their devices are distinct.
        align: whether devices keep the hour of the week at which they were recorded
            ("time-of-week"), or its hour of the day alone ("time-of-day").

    Returns:
        All devices, whose rows stay shared, with the channels that every set knows; `repairs` has
        those that are left out. Instant 0 is the midnight before the first set begins.

    Raises:
        TraceError: the sets do not fit together.

    Example:
        >>> from dataclasses import replace
        >>> phones = replace(TraceSet.ideal(2), epoch="2024-01-04T06:00:00")
        >>> cars = replace(phones, device_ids=pd.Index(["a", "b"]), epoch="2024-01-01T00:00:00")
        >>> both = merged({"phones": phones, "cars": cars}, align="time-of-week")
        >>> list(both.device_ids), both.epoch
        (['device-0', 'device-1', 'a', 'b'], '2024-01-01T00:00:00')
    """
    if align not in get_args(Align):
        raise TraceError(f"align = {align!r}: expected 'time-of-day' or 'time-of-week'")
    lacking = {x: sum(x not in one.known for one in sets.values()) for x in CHANNELS}
    channels = [name for name, n in lacking.items() if not n]
    left_out = {name: n for name, n in lacking.items() if 0 < n < len(sets)}
    _check_alike(sets, channels)
    begins = [pd.Timestamp(traces.epoch or "nat") for traces in sets.values()]
    midnight = min(begins).normalize()
    leads = [(began - midnight).total_seconds() % _CYCLE_S[align] for began in begins]
    later = np.repeat(leads, [traces.n_devices for traces in sets.values()])
    fleet: dict[str, Any] = {}
    for name in channels:
        kind: type[Any] = Availability if name == "availability" else Series
        joined = kind.joined([getattr(traces, name) for traces in sets.values()])
        # Records begin later, and are preceded by their own repetition.
        fleet[name] = joined.shifted(np.mod(-later, joined.record_s()))
    unit = next(iter(sets.values())).compute_unit
    return TraceSet(
        device_ids=pd.Index(
            [device for traces in sets.values() for device in traces.device_ids], dtype="str"
        ),
        **fleet,
        compute_unit=unit if "compute" in channels else None,
        epoch=midnight.isoformat(),
        repairs=sum(
            (Counter(traces.repairs) for traces in sets.values()),
            Counter({f"left out: {name}, not in a recording": n for name, n in left_out.items()}),
        ),
    )


def _check_alike(sets: Mapping[str, TraceSet], channels: Sequence[str]) -> None:
    first_name, first = next(iter(sets.items()))
    origin: dict[str, str] = {}
    for path, traces in sets.items():
        if traces.epoch is None or traces.availability is None:
            what = "no calendar time" if traces.epoch is None else "not when it is online"
            raise TraceError(f"{path}: knows {what}: expected a recording of a device")
        if "compute" in channels and traces.compute_unit != first.compute_unit:
            raise TraceError(
                f"{path}: counts compute in {traces.compute_unit!r}, {first_name} in "
                f"{first.compute_unit!r}: expected one unit; record with the same unit in --compute"
            )
        for name in channels:
            channel = getattr(traces, name)
            if np.isfinite(channel.until):
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
