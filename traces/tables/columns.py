"""Which column of a log is what, and so which kind of log it is.

Columns are given by their roles, or found by their names. What is found is told, never used
silently: a name that could be two things, or two names for one thing, is an error that asks.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import pandas as pd

from fedstale.errors import TraceError, nearest

Kind = Literal["windows", "samples", "battery", "rates", "nodes"]
RATES = ("downlink", "uplink")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOptions:
    """What a user states of a log in a table; None, or nothing, means not stated."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Column of each role: device, start, end, time, online, charging, plugged, level, downlink
    (or rate), uplink, interval, speed."""
    kind: str | None = None
    """One of windows, samples, battery, rates and nodes."""
    unit: tuple[str, ...] = ()
    """Units of time and of rates, each alone or as ROLE=UNIT."""
    time_zone: str | None = None
    """IANA name of the zone of the devices' clocks, such as Europe/Oslo."""
    time_format: str | None = None
    """Format of texts of time, as of strptime."""
    device: str | None = None
    """Id of the one device that the whole table is of."""
    online_values: tuple[str, ...] = ()
    """What counts as online, charging or plugged; anything else then does not."""
    min_level: float | None = None
    """Level of the battery from which on a device is online, in the column's own unit."""
    max_gap_s: float | None = None
    """For how long a reading holds at most, in s; inf for until the next one."""
    compute_unit: str | None = None
    """What one work unit of a column of speeds is, in words."""
    decimal: str | None = None
    """Decimal mark of numbers in texts, "." or ","."""

    def __post_init__(self) -> None:
        wrong = {
            "kind": (self.kind in (None, *get_args(Kind)), f"one of {', '.join(get_args(Kind))}"),
            "decimal": (self.decimal in (None, ".", ","), "'.' or ','"),
            "max_gap_s": (self.max_gap_s is None or self.max_gap_s > 0, "a time > 0 s"),
        }
        for name, (is_right, expected) in wrong.items():
            if not is_right:
                raise TraceError(f"{name} = {getattr(self, name)!r}: expected {expected}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which columns a log is read from."""

    kind: Kind
    """Of the log."""
    of: Mapping[str, str]
    """Column of each role."""
    told: Mapping[str, str]
    """The kind and each column, in words, with whether they were given or guessed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Roles:
    needs: tuple[str, ...]
    one_of: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.needs, *self.one_of, *self.also)


_KINDS: dict[Kind, _Roles] = {
    "windows": _Roles(needs=("start", "end")),
    "samples": _Roles(needs=("time", "online")),
    "battery": _Roles(needs=("time",), one_of=("charging", "plugged", "level")),
    "rates": _Roles(needs=("time",), one_of=RATES, also=("interval",)),
    "nodes": _Roles(needs=(), one_of=("speed", *RATES)),
}

_NAMES = {
    "device": "device client user node phone machine host hostname uid imei device_id client_id "
    "user_id node_id phone_id machine_id host_id device_name id",
    "start": "start start_time started_at begin began from since plugin_time window_start",
    "end": "end end_time ended_at stop stop_time to until plugout_time window_end",
    "time": "time timestamp time_stamp ts t datetime date_time instant recorded_at created_at",
    "online": "online is_online available is_available availability connected is_connected",
    "charging": "charging is_charging charge_status charging_status battery_status",
    "plugged": "plugged is_plugged plugged_in power_plugged",
    "level": "level battery_level battery battery_percent soc",
    "downlink": "downlink download down dl dl_bitrate rate bitrate bit_rate throughput bandwidth "
    "data_rate",
    "uplink": "uplink upload up ul ul_bitrate",
    "interval": "interval elapsed duration delta",
    "speed": "speed compute compute_speed flops",
}
_NAMES_OF = {role: frozenset(names.split()) for role, names in _NAMES.items()}

# Units as they stand at the end of a column's name; what may be two units is none of them.
_UNIT_IN_NAME = {
    r"ms|msec|millis": "ms",
    r"us|µs|micros": "us",
    r"s|sec|secs|seconds": "s",
    r"[kK]bps|[kK]bit/s|kbit_s|kbit_per_s": "kbit/s",
    r"Mbps|mbps|[mM]bit/s|mbit_s|mbit_per_s": "Mbit/s",
    r"Gbps|gbps|[gG]bit/s|gbit_s|gbit_per_s": "Gbit/s",
    r"bps|bit/s|bit_s|bit_per_s": "bit/s",
    r"MBps|MB/s": "MB/s",
    r"kBps|kB/s|KB/s": "kB/s",
    r"B/s|bytes/s|bytes_per_s": "B/s",
}


def name_and_unit(column: str) -> tuple[str, str | None]:
    """Return a column's name in lower case without its unit, and the unit that it states.

    Example:
        >>> name_and_unit("DL_bitrate (Mbit/s)"), name_and_unit("deviceId")
        (('dl_bitrate', 'Mbit/s'), ('device_id', None))
    """
    unit = None
    for spellings, name in _UNIT_IN_NAME.items():
        found = re.fullmatch(
            rf"(.+?)(?:[\s_]*[\[(](?:{spellings})[\])]|[\s_]+(?:{spellings}))", column
        )
        if found:
            column, unit = found[1], name
            break
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", column.strip()).lower()
    return re.sub(r"[^a-z0-9]+", "_", words).strip("_"), unit


def understand(frame: pd.DataFrame, options: TableOptions) -> Columns:
    """Return which kind of log a table is, and which of its columns are read.

    Raises:
        TraceError: a column that is given is not there, or what the table is cannot be told.
    """
    names = list(frame.columns)
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise TraceError(f"column {twice!r} occurs twice: expected distinct names")
    given = _given(names, options.columns)
    found: dict[str, list[str]] = {
        role: [c for c in names if name_and_unit(c)[0] in known and c not in given.values()]
        for role, known in _NAMES_OF.items()
        if role not in given
    }
    present = {*given, *(role for role, columns in found.items() if columns)}
    kind = _kind(names, given, present, options.kind)
    roles = _KINDS[kind]
    others = given.keys() - {*roles.all, *(() if options.device is not None else ("device",))}
    if others:
        raise TraceError(
            f"columns: {', '.join(sorted(others))} = {given[min(others)]!r}: expected none, since "
            f"a log of {kind} has {', '.join(roles.all)}, and device in a column or by --device"
        )
    wanted = [role for role in roles.needs if role not in given]
    if roles.one_of and present.isdisjoint(roles.one_of):
        wanted.append(roles.one_of[0])
    # Who names one direction of a link, or one sign of a battery, may not want the other.
    more = roles.also if kind != "nodes" and given.keys() & set(roles.one_of) else roles.all
    wanted += [role for role in more if role not in roles.needs and found.get(role)]
    if options.device is None and "device" not in given:
        wanted.append("device")
    guessed = {role: _only(role, found[role], names) for role in wanted}
    of = {**given, **guessed}
    told = {"kind": f"{kind}, {'given' if options.kind else 'by its columns'}"}
    if options.device is not None:
        told["device"] = f"{options.device!r} for all rows, given"
    told |= {
        role: f"column {of[role]!r}, {'given' if role in given else 'by its name'}"
        for role in ("device", *roles.all)
        if role in of
    }
    return Columns(kind=kind, of=of, told=told)


def _given(names: list[str], columns: Mapping[str, str]) -> dict[str, str]:
    given = {}
    for role, column in columns.items():
        # A rate of which no direction is said is that towards the device.
        known = "downlink" if role == "rate" else role
        if known not in _NAMES:
            raise TraceError(f"columns: no role {role!r}; expected {nearest(role, _NAMES)}")
        if column not in names:
            raise TraceError(f"columns: {role} = {column!r}: expected {nearest(column, names)}")
        given[known] = column
    return given


def _kind(names: list[str], given: Mapping[str, str], present: set[str], kind: str | None) -> Kind:
    for name in get_args(Kind):
        if name == kind:
            stated: Kind = name
            return stated
    # What is given tells it first, then what is found.
    telling = given.keys() - {"device", "time"}
    is_dated = bool(present & {"time", "start", "end"})
    fitting = [
        name
        for name, roles in _KINDS.items()
        if telling <= set(roles.all) and not (name == "nodes" and is_dated)
    ]
    if not telling or len(fitting) > 1:
        fitting = [
            name
            for name in fitting
            if present.issuperset(_KINDS[name].needs)
            and not (_KINDS[name].one_of and present.isdisjoint(_KINDS[name].one_of))
        ]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise TraceError(
            f"this table could be {' or '.join(fitting)}: expected one of them as kind (--kind)"
        )
    raise TraceError(
        f"cannot tell what the columns {_listed(names)} are: expected columns (--columns) "
        "device=NAME and start= end= for windows, time= online= for samples, time= charging= (or "
        "plugged=, level=) for a battery, time= downlink= (and uplink=) for rates, or speed= "
        "downlink= uplink= for a list of nodes"
    )


def _only(role: str, columns: list[str], names: Iterable[str]) -> str:
    if len(columns) == 1:
        return columns[0]
    if columns:
        raise TraceError(
            f"{_listed(columns)} could each be {role}: expected {role}=NAME (--columns)"
        )
    alone = ", or a device (--device) if all rows are of one" if role == "device" else ""
    raise TraceError(
        f"none of the columns {_listed(names)} is known to be {role}: expected {role}=NAME "
        f"(--columns){alone}"
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
