"""Which column of a log is what, and so which kind of log it is.

Columns are given by their roles, or found by the words of their names: a unit at the end of a name,
and what is left, tell `ts_ms`, `deviceUUID` and `rxkB/s` apart by rule. What is found is told. A
name that could be two things, or two names for one thing, are asked for, unless both columns say
the same.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
import pandas as pd

from fedstale.errors import TraceError, nearest
from fedstale.traces.tables.reading import Kind, Reading, listed, seen

RATES = ("downlink", "uplink")
STATES = ("online", "charging", "plugged")
FILE = "name of the file"
"""Column of a log in several files."""
TIME_UNITS = {"s": 1e6, "ms": 1e3, "us": 1.0, "ns": 1e-3, "min": 6e7, "h": 3.6e9, "d": 8.64e10}
"""What a unit of time is in microseconds."""
PER_INTERVAL, IN_ALL = "bytes/interval", "bytes/total"
COUNTED = (PER_INTERVAL, IN_ALL)
RATE_UNITS = {
    f"{prefix}{name}": size * bits
    for name, bits in (("bit/s", 1.0), ("B/s", 8.0))
    for prefix, size in (
        *(("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9)),
        *(("Ki", 2.0**10), ("Mi", 2.0**20)),
    )
} | dict.fromkeys(COUNTED, 8.0)
"""What a unit of a rate is in bit/s, and bytes that are counted in bits."""

_SPELT_TIMES = {
    "ms": "ms msec msecs milli millis millisecond milliseconds",
    "us": "us µs usec usecs micros microsecond microseconds",
    "ns": "ns nsec nanos nanosecond nanoseconds",
    "s": "s sec secs second seconds",
    "min": "min mins minute minutes",
    "h": "h hr hrs hour hours",
    "d": "d day days",
}
_TIME_OF = {spelt: unit for unit, names in _SPELT_TIMES.items() for spelt in names.split()}
_RATE = re.compile(
    r"(?P<size>[kKmMgG]i?)?_?(?P<what>[bB]its?|[bB]ytes?|octets|[bB])"
    r"(?:/s(?:ec(?:onds?)?)?|ps|_?[pP]er_?[sS](?:ec(?:onds?)?)?|_s)",
)


def unit_of_text(text: str) -> str | None:
    """Return the unit that a text is, in the spelling of `RATE_UNITS` and `TIME_UNITS`.

    Example:
        >>> [unit_of_text(text) for text in ("Mbps", "kB/s", "millis", "bytes_per_second", "MBPS")]
        ['Mbit/s', 'kB/s', 'ms', 'B/s', None]
    """
    text = text.strip(" ()[]")
    if found := _RATE.fullmatch(text):
        size, what = found["size"] or "", found["what"]
        size = {"K": "k", "m": "M", "g": "G"}.get(size, size)
        # A capital alone is a byte, but Mbps, mbps and MBps differ by it.
        is_byte = what == "B" or what.lower().startswith(("byte", "octet"))
        unit = f"{size.replace('ki', 'Ki')}{'B' if is_byte else 'bit'}/s"
        return unit if unit in RATE_UNITS else None
    return _TIME_OF.get(text.lower())


def name_and_unit(column: str) -> tuple[str, str | None]:
    """Return a column's name in lower case without its unit, and the unit that it states.

    Example:
        >>> name_and_unit("DL_bitrate (Mbit/s)"), name_and_unit("deviceUUID")
        (('dl_bitrate', 'Mbit/s'), ('device_uuid', None))
        >>> name_and_unit("timestampMillis"), name_and_unit("rxkB/s"), name_and_unit("ts_ms")
        (('timestamp', 'ms'), ('rx', 'kB/s'), ('ts', 'ms'))
    """
    column = column.strip()
    unit: str | None = None
    if (whole := unit_of_text(column)) in RATE_UNITS:
        return "rate", whole
    ends = [found.start() for found in re.finditer(r"(?<=[a-zA-Z0-9)\]])(?=[\s_.\[(-])", column)]
    ends += [found.start() for found in re.finditer(r"(?<=[a-z0-9])(?=[A-Z])", column)]
    # Rates are spelt like nothing else, and need nothing before them.
    ends += [found.start() for found in [re.search(_RATE.pattern + "$", column)] if found]
    for end in sorted(ends):
        unit = unit_of_text(column[end:].lstrip(" _.-"))
        if unit is not None and end:
            column = column[:end]
            break
        unit = None
    column = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", column).lower()
    return re.sub(r"[^a-z0-9]+", "_", column).strip("_"), unit


_NAMES = {
    "device": "device client user node phone machine host hostname target device_id client_id "
    "user_id node_id phone_id machine_id host_id",
    "start": "start start_time started_at begin began from since plugin_time window_start "
    "connected_at connect_time",
    "end": "end end_time ended_at stop stop_time to until plugout_time window_end "
    "disconnected_at disconnect_time",
    "duration": "duration elapsed",
    "time": "time timestamp time_stamp ts t at datetime date_time instant recorded_at",
    "online": "online is_online available is_available availability connected is_connected up",
    "charging": "charging is_charging charge_status charging_status battery_status",
    "plugged": "plugged is_plugged plugged_in power_plugged",
    "level": "level battery_level battery battery_percent soc",
    "downlink": "downlink download down dl dl_bitrate rate bitrate bit_rate throughput bandwidth "
    "data_rate",
    "uplink": "uplink upload up ul ul_bitrate",
    "interval": "interval delta",
    "speed": "speed compute compute_speed flops",
}
_NAMES_OF = {role: frozenset(names.split()) for role, names in _NAMES.items()}


YES = frozenset(["1", "1.0", "true", "t", "yes", "y", "on"])
NO = frozenset(["0", "0.0", "false", "f", "no", "n", "off"])
STATE_WORDS = {
    "online": (
        "online available connected up alive reachable ok success active joined associated",
        "offline unavailable disconnected down dead unreachable failed timeout inactive left "
        "disassociated",
    ),
    "charging": ("charging", "discharging not_charging"),
    "plugged": ("plugged plugged_in ac usb wireless", "unplugged not_plugged_in battery none"),
}
"""Words of each role that mean so, and that mean not so."""


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_START = _set("start started starts begin began begins from since login logon opened plugin")
_END = _set("end ended ends stop stopped until till to finish finished logout logoff plugout")
_TIME = _set(
    "time timestamp timestamps ts datetime date clock instant epoch stamp when timesecs changed "
    "updated"
)
_DEVICE = _set(
    "device client user node phone machine host hostname uid uuid guid imei mac serial instance "
    "sensor probe station endpoint computer vehicle participant subject member peer asset "
    "ip id imsi iccid msisdn target"
)
_OF_DEVICE = _set("name number no key label code address addr hash uuid id identifier")
_NO_DEVICE = _set(
    "event session record row process message error task group category job request transaction "
    "rule cell area server"
)
_OF_TIME = _set("at on session event utc")
_DOWN, _UP = _set("down dl rx download downlink downstream recv"), _set("ul tx upload uplink")
_IN = _set("in received receive ingress inbound incoming")
_OUT = _set("up out sent send transmit transmitted egress outbound outgoing upstream")
_CARRIED = _set("bytes byte octets bits traffic rate bitrate throughput bandwidth goodput")
_NOT_CARRIED = _set(
    "packets packet pkts pck errors error errs err drops dropped drop frames collisions multicast "
    "time total_time utilization util"
)
_BATTERY = frozenset(["charging", "discharging", "not charging", "not_charging", "full"])
_ONLINE = _set(
    "online available availability connected connectivity reachable reachability alive state "
    "status presence active up"
)


def _direction(words: set[str], *, is_rate: bool) -> str | None:
    """Return the direction of a link that words tell, where they are of what it carries."""
    if (is_rate or words & _CARRIED or words & (_DOWN | _UP)) and not words & _NOT_CARRIED:
        if words & (_UP | (_OUT if is_rate or words & _CARRIED else set())):
            return "uplink"
        if words & (_DOWN | _IN) or is_rate or words - {"bytes", "byte", "bits", "octets"}:
            return "downlink"
    return None


def _of_one(words: set[str]) -> bool:
    """Return whether words name no more than one thing that begins or ends."""
    return len(words - _TIME - _OF_TIME) < 2 and not words & (_ONLINE | _set("level ip address id"))


_OF_BATTERY = frozenset(["battery", "charge", "charger", "soc"])
_RULES: tuple[tuple[str, Callable[[set[str], str], object]], ...] = (
    ("", lambda words, _: words & _set("zone timezone tz rtt latency temperature voltage")),
    ("charging", lambda words, _: "charging" in words or (words & _OF_BATTERY and words & _ONLINE)),
    ("plugged", lambda words, _: words & {"plugged", "plug"}),
    (
        "level",
        lambda words, _: words & _OF_BATTERY and words & _set("level percent pct percentage"),
    ),
    ("start", lambda words, _: words & _START and _of_one(words - _START)),
    ("end", lambda words, _: words & _END and _of_one(words - _END)),
    (
        "duration",
        lambda words, _: words & {"duration", "lasted"},
    ),
    ("time", lambda words, name: words & (_TIME | {"seen"}) or name.endswith("_at")),
    (
        "online",
        lambda words, _: words & _ONLINE and not words & _set("code http reason count text"),
    ),
    (
        "device",
        lambda words, name: (
            not words & _NO_DEVICE
            and (
                (last := name.rpartition("_")[2]) in _DEVICE
                or (last in _OF_DEVICE and words & _DEVICE)
            )
        ),
    ),
)
"""What words tell a role, the first that does; names that are known come before all."""


def _role_of(column: str) -> str | None:
    """Return the role that the words of a name have by rule."""
    name, unit = name_and_unit(column)
    words = set(name.split("_"))
    return _direction(words, is_rate=unit in RATE_UNITS) or next(
        (role for role, tells in _RULES if tells(words, name)), None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Roles:
    needs: tuple[str, ...]
    one_of: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.needs, *self.one_of, *self.also)


_KINDS: dict[Kind, _Roles] = {
    "windows": _Roles(needs=("start",), one_of=("end", "duration"), also=STATES),
    "samples": _Roles(needs=("time", "online")),
    "battery": _Roles(needs=("time",), one_of=("charging", "plugged", "level")),
    "rates": _Roles(needs=("time",), one_of=RATES, also=("interval",)),
    "pings": _Roles(needs=("time",)),
    "nodes": _Roles(needs=(), one_of=("speed", *RATES)),
}
_DATED = frozenset(["time", "start", "end"])


def is_datum(cells: pd.Series) -> pd.Series:
    """Return which cells look like a number or a time, and not like a name."""
    texts = cells.astype("str").str.strip()
    month = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
    form = rf"(?i:[-+]?[.,]?\d|(?:(?:mon|tue|wed|thu|fri|sat|sun)\w*,? )?(?:{month})\w* +\d)"
    return texts.str.match(form + r"|\w{3}, \d", na=False)


_SAID = YES | NO | _BATTERY
_SAID |= {word for words in STATE_WORDS.values() for part in words for word in part.split()}


def _fits(role: str, cells: pd.Series) -> bool:
    """Return whether a column can be what its name says, from its first cells."""
    some = cells.dropna()[:500]
    if some.empty:
        return False
    if role == "device":
        return not (pd.api.types.is_float_dtype(some.dtype) and (some % 1).any())
    if pd.api.types.is_datetime64_any_dtype(some.dtype):
        return role in _DATED
    if role in STATES:
        return some.nunique() <= max(12, len(some) // 20)
    return bool(is_datum(some).mean() >= 0.5)


def _found(log: Reading, given: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the columns that may have each role which is not given, the likeliest ones."""
    free = [c for c in log.frame.columns if c not in given.values() and c != FILE]
    found: dict[str, list[str]] = {role: [] for role in _NAMES}
    for role, known in _NAMES_OF.items():
        if role not in given:
            found[role] = [c for c in free if name_and_unit(c)[0] in known]
    named = {c for columns in found.values() for c in columns}
    for column in free:
        told = None if column in named else _role_of(column)
        if told and told not in given and not found[told]:
            found[told] = [c for c in free if c not in named and _role_of(c) == told]
    if "interval" not in given and not found["interval"]:
        found["interval"] = found["duration"]
    found = {
        # What is called a time alone is meant to be one, with faults.
        role: columns
        if role in _DATED and len(columns) == 1 and named.issuperset(columns)
        else [c for c in columns if _fits(role, log.frame[c])]
        for role, columns in found.items()
    }
    # A number for each row is of no device, and what is raw says the same as its twin.
    rows = [c for c in found["device"] if name_and_unit(c)[0] == "id" and log.frame[c].is_unique]
    if len(log.frame) > 2 and (found["time"] or found["start"]):
        found["device"] = [c for c in found["device"] if c not in rows]
    for role, columns in found.items():
        found[role] = [
            c for c in columns if c.removesuffix("(RAW)").strip() not in {*columns} - {c}
        ]
    _settle_states(log, found)
    if found["time"] and len(log.frame) > 1:
        # The range of a query stands in each row of its result.
        for role in ("start", "end"):
            found[role] = [c for c in found[role] if log.frame[c].nunique() > 1]
    if len(found["time"]) == 1:
        clocks = [c for c in free if c not in named and _role_of(c) is None and _is_clock(log, c)]
        found["time"] = _joined(log, [*found["time"], *clocks])[:1]
    found["time"] = _joined(log, found["time"])
    return {role: _alike(log, role, columns) for role, columns in found.items()}


def _settle_states(log: Reading, found: dict[str, list[str]]) -> None:
    """Let columns whose names could be two things be what their cells are."""
    # A battery has a state too, in words or in the numbers of Android.
    for column in list(found["online"]):
        texts = log.frame[column].dropna().astype("str").str.strip().str.lower()
        of_battery = bool(found["level"] or found["plugged"])
        if texts.isin(_BATTERY).all() or (of_battery and texts.isin([*"12345"]).all()):
            found["online"].remove(column)
            found["charging"] = [*found["charging"], column]
    # What is up or down is a state, unless its numbers or its unit are those of a link.
    for column in set(found["online"]) & set(found["uplink"]):
        cells = log.frame[column].dropna().astype("str").str.strip()
        is_state = name_and_unit(column)[1] is None and cells.isin(["0", "1"]).mean() > 0.9
        is_state |= not is_datum(cells).any()
        found["uplink" if is_state else "online"].remove(column)


def _joined(log: Reading, columns: list[str]) -> list[str]:
    """Return a date and a time of day as one column, where times are in two."""
    if len(columns) != 2:
        return columns
    texts = {c: log.frame[c].dropna().astype("str").str.strip() for c in columns}
    is_day = {c: not t.str.contains(":", regex=False).any() for c, t in texts.items()}
    for date, time in (columns, columns[::-1]):
        if is_day[date] and _is_clock(log, time):
            return [_both(log, date, time)]
    return columns


def _is_clock(log: Reading, column: str) -> bool:
    texts = log.frame[column].dropna().astype("str").str.strip()
    return bool(texts.str.match(r"\d{1,2}:\d\d").all() and len(texts))


def _both(log: Reading, date: str, time: str) -> str:
    name = f"{date}+{time}"
    both = log.frame[date].astype("str") + " " + log.frame[time].astype("str")
    log.frame[name] = both.where(log.frame[date].notna() & log.frame[time].notna())
    return name


def _alike(log: Reading, role: str, columns: list[str]) -> list[str]:
    """Return the first of several columns, where the others say the same."""
    if len(columns) < 2:
        return columns
    first = log.frame[columns[0]]
    if role == "device":
        codes = [pd.factorize(log.frame[c])[0] for c in columns]
        same = all((each == codes[0]).all() for each in codes)
    else:
        same = all(log.frame[c].equals(first) for c in columns)
    return columns[:1] if same else columns


def understand(log: Reading) -> Kind:
    """Find which kind of log a table is, and which of its columns are read.

    Raises:
        TraceError: a column that is given is not there.
    """
    names = list(log.frame.columns)
    if not log.frame.columns.is_unique:
        twice = log.frame.columns[log.frame.columns.duplicated()][0]
        raise TraceError(f"column {twice!r} occurs twice: expected distinct names")
    given, unused = _given(log)
    found = {role: [] if role in unused else c for role, c in _found(log, given).items()}
    present = {*given, *(role for role, columns in found.items() if columns)}
    kind = _kind(log, given, found, present)
    roles = _KINDS[kind]
    others = given.keys() - {*roles.all, *(() if log.options.device is not None else ("device",))}
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
    if kind == "windows" and not any(role in given or found[role] for role in STATES):
        devices = [given.get("device"), *found["device"][:1], *([FILE] if FILE in names else [])]
        rest = [] if "online" in unused else [c for c in names if c not in given.values()]
        rest = [c for c in rest if _is_state(log.frame[c]) and _varies(log, c, devices)]
        if rest:
            log.ask(
                f"column {rest[0]!r} holds {seen(log.frame[rest[0]])}: expected online={rest[0]} "
                "(--columns) if it says which rows are online, or online=none if all are",
                "--columns",
                f"online={rest[0]}",
            )
            found["online"] = rest[:1]
    if kind == "windows":
        several = [role for role in ("end", "duration") if role in given or found[role]]
        several = several[1:] + [role for role in STATES if role in given or found[role]][1:]
        found |= {role: [] for role in several}
    wanted += [role for role in more if role not in roles.needs and found.get(role)]
    if log.options.device is None and "device" not in given:
        wanted.append("device")
    known = {*given.values(), *(c for r in wanted if r != "device" for c in found[r])}
    guessed = {
        role: column
        for role in wanted
        if (column := _only(log, role, found[role], known)) is not None
    }
    log.of = {**given, **guessed}
    log.told["kind"] = f"{kind}, {'given' if log.options.kind else 'by its columns'}"
    if log.options.device is not None:
        log.told["device"] = f"{log.options.device!r} for all rows, given"
    for role in ("device", *roles.all):
        if role in log.of:
            how = "given" if role in given else "by its name"
            log.told[role] = f"column {log.of[role]!r}, {how}"
    if log.of.get("device") == FILE:
        log.told["device"] = "the name of each file"
    rest = [c for c in names if c not in log.of.values() and c != FILE]
    if rest:
        log.told["not read"] = listed(rest)
    return kind


def _given(log: Reading) -> tuple[dict[str, str], set[str]]:
    """Return the columns that are given by role, and roles that are given to none."""
    given: dict[str, str] = {}
    unused, everywhere = set(), None
    names = list(log.frame.columns)
    for role, column in log.options.columns.items():
        # A rate of which no direction is said is that towards the device.
        known = "downlink" if role == "rate" else role
        if known not in _NAMES:
            raise TraceError(f"columns: no role {role!r}; expected {nearest(role, _NAMES)}")
        parts = column.split("+")
        if column == "none" and column not in names:
            unused.add(known)
        elif column == "*" and column not in names:
            everywhere = known
        elif column not in names and len(parts) == 2 and set(parts) <= set(names):
            given[known] = _both(log, *parts)
        elif column in names:
            given[known] = column
        else:
            bare = [c for c in names if c.rpartition(" (")[0] == column]
            if len(bare) != 1:
                raise TraceError(f"columns: {role} = {column!r}: expected {nearest(column, names)}")
            given[known] = bare[0]
    if everywhere is not None:
        _melt(log, everywhere, given)
    return given, unused


def _melt(log: Reading, role: str, given: dict[str, str]) -> None:
    """Make rows out of columns that are each of one device, whose name is the column's."""
    if "time" not in given:
        times = _found(log, given)["time"]
        column = _only(log, "time", times, set())
        if column is None:
            return
        given["time"] = column
    value, device = "value of a column", "name of a column"
    wide = [c for c in log.frame.columns if c not in given.values() and c != FILE]
    wide = [c for c in wide if log.frame[c].notna().any()]
    parts = [
        pd.DataFrame({given["time"]: log.frame[given["time"]], device: c, value: log.frame[c]})
        for c in wide
    ]
    if not parts:
        raise TraceError(f"columns: {role} = '*': expected columns that are each of one device")
    long = pd.concat(parts)
    # A host that has no value at an instant was not asked then.
    log.frame = long[long[value].notna()]
    log.gone = np.zeros(len(log.frame), dtype=bool)
    given |= {role: value, "device": device}
    log.told["devices by"] = f"columns: {listed(wide)}"


def _kind(
    log: Reading, given: dict[str, str], found: dict[str, list[str]], present: set[str]
) -> Kind:
    for name in get_args(Kind):
        if name == log.options.kind:
            stated: Kind = name
            return stated
    # What is given tells it first, then what is found.
    telling = given.keys() - {"device", "time"}
    is_dated = bool(present & _DATED) or any(_is_time(log.frame[c]) for c in log.frame.columns)
    fitting: list[Kind] = [
        name
        for name, roles in _KINDS.items()
        if telling <= set(roles.all) and not (name == "nodes" and is_dated)
    ]
    if not telling or len(fitting) > 1:
        # A rate may be told of the time from a start on.
        timed = present | ({"time"} if "start" in present and present & {*RATES} else set())
        fitting = [
            name
            for name in fitting
            if timed.issuperset(_KINDS[name].needs)
            and not (_KINDS[name].one_of and present.isdisjoint(_KINDS[name].one_of))
        ]
    if len(fitting) > 1 and "pings" in fitting:
        fitting.remove("pings")
    # A state that never changes is seldom one, where other columns do.
    online = found["online"]
    if len(log.frame) > 2 and online and log.frame[online].nunique().max() < 2:
        others = [c for c in log.frame.columns if log.frame[c].nunique() > 1 and c != FILE]
        if {*others} - {c for columns in found.values() for c in columns}:
            fitting = [name for name in fitting if name not in ("samples", "windows")]
            found["online"] = []
    # A device that says something else with each reading is more than a ping.
    known = {c for columns in found.values() for c in columns} | {*given.values(), FILE}
    least = 1 if len(log.frame) > 1 else 0
    silent = [c for c in log.frame.columns if c not in known and log.frame[c].nunique() > least]
    if fitting == ["pings"] and silent:
        fitting = []
    if len(fitting) > 1:
        stated_rates = any(name_and_unit(c)[1] in RATE_UNITS for c in found["downlink"])
        order = ("samples", "rates") if stated_rates else ("samples",)
        likely = next((kind for kind in order if kind in fitting), fitting[0])
        log.ask(
            f"this table could be {' or '.join(fitting)}: expected one of them as kind (--kind)",
            "--kind",
            likely,
        )
        return likely
    return fitting[0] if fitting else _likely(log, given, found, silent)


def _likely(
    log: Reading, given: dict[str, str], found: dict[str, list[str]], silent: list[str]
) -> Kind:
    """Return the kind that a table may be of whose names do not tell it, and ask."""
    frame, answers = log.frame, []
    shown = ", ".join(
        f"{c!r} (such as {str(frame[c].dropna().iloc[0])[:24]!r})"
        for c in frame.columns[:12]
        if frame[c].notna().any() and c != FILE
    )
    sentence = (
        f"cannot tell what the columns {shown} are: expected columns (--columns) device=NAME and "
        "start= end= (or duration=) for windows, time= online= for samples, time= charging= (or "
        "plugged=, level=) for a battery, time= downlink= (and uplink=) for rates, online=* or "
        "downlink=* for one column a device, speed= downlink= uplink= for a list of nodes, or "
        "--kind pings for devices that are online while rows come"
    )
    if not given.get("time") and not found["time"]:
        times = _joined(log, [c for c in silent if _is_time(frame[c])])
        if not times:
            raise TraceError(sentence)
        answers.append(f"time={times[0]}")
        found["time"] = times[:1]
        silent = [c for c in silent if c not in times[0].split("+") and c != times[0]]
        whole: dict[str, Kind] = {"online": "samples", "charging": "battery", "downlink": "rates"}
        if role := next((role for role in whole if role in given or found[role]), None):
            log.ask(sentence, "--columns", answers[0])
            return whole[role]
    time = given.get("time") or found["time"][0]
    values = [c for c in silent if "value" in name_and_unit(c)[0].split("_")]
    if not (given.get("device") or found["device"] or log.options.device or FILE in frame):
        if hosts := [] if values else _hosts(log, time):
            role = "online" if all(_is_state(frame[c]) for c in hosts) else "downlink"
            log.ask(sentence, "--columns", " ".join([*answers, f"{role}=*"]))
            given["time"] = time
            _melt(log, role, given)
            found |= {each: [] for each in found}
            return "samples" if role == "online" else "rates"
        found["device"] = _repeated(log, {time, *values})
        answers += [f"device={c}" for c in found["device"]]
        silent = [c for c in silent if c not in found["device"]]
    state = _state_among(log, silent, values, found)
    if state is None:
        log.ask(sentence, "--kind", "pings")
        if answers:
            log.ask("their contents say what they may be", "--columns", " ".join(answers))
        return "pings"
    log.ask(sentence, "--columns", " ".join([*answers, f"{state}={found[state][0]}"]))
    return "battery" if state == "charging" else "samples"


_MEASURES = _set(
    "loss median mean min max avg average stddev rtt latency jitter uptime total count"
)
"""Words of columns that are of one device, each a measure of it."""


def _hosts(log: Reading, time: str) -> list[str]:
    """Return the columns that are each of a device, if all but the time are of one kind."""
    frame = log.frame
    # A column that never changes may be a host, too.
    hosts = [c for c in frame.columns if frame[c].notna().any() and c != time]
    hosts = [c for c in hosts if c not in time.split("+")]
    are_states = all(_is_state(frame[c]) for c in hosts)
    are_numbers = all(is_datum(frame[c].dropna()).mean() > 0.9 for c in hosts)
    is_wide = len(hosts) > 1 and frame[time].is_unique
    is_wide &= not any(_MEASURES & set(name_and_unit(c)[0].split("_")) for c in hosts)
    return hosts if is_wide and (are_states or are_numbers) else []


def _repeated(log: Reading, taken: set[str]) -> list[str]:
    """Return the column that most likely names devices: words, or ids, that come again."""
    frame = log.frame
    if "key" in frame:
        return ["key"]
    several = [c for c in frame.columns if 1 < frame[c].nunique() < len(frame) and c != FILE]
    names = [
        c
        for c in several
        if c not in taken
        and not _is_state(frame[c])
        and not _NO_DEVICE & set(name_and_unit(c)[0].split("_"))
        and (name_and_unit(c)[0].endswith("id") or not is_datum(frame[c].dropna()).any())
    ]
    digits = {c: frame[c].astype("str").str.contains(r"\d").mean() for c in names}
    return sorted(names, key=lambda c: (-frame[c].nunique(), -digits[c]))[:1]


def _state_among(
    log: Reading, silent: list[str], values: list[str], found: dict[str, list[str]]
) -> str | None:
    """Return the role of the column that may say when devices are online, and let it be found."""
    frame = log.frame
    told = [c for c in silent if _is_state(frame[c])]
    words = [c for c in silent if c not in told and not is_datum(frame[c].dropna()).any()]
    numbers = [c for c in silent if c not in words and c not in told]
    losses = [c for c in numbers if "loss" in c.lower()]
    few = [c for c in words if 1 < frame[c].nunique() <= 6]
    of = [*values[:1], *told, *losses, *few] or (numbers if len(numbers) == 1 else [])
    if not of:
        return None
    texts = frame[of[0]].dropna().astype("str").str.strip().str.lower()
    role = "charging" if texts.isin(_BATTERY).all() else "online"
    found[role] = of[:1]
    return role


def _varies(log: Reading, column: str, devices: Sequence[str | None]) -> bool:
    """Return whether a column has several values, also of one device."""
    device = next((name for name in devices if name is not None), None)
    if device is None or log.frame[column].nunique() < 2:
        return log.frame[column].nunique() > 1
    return bool(log.frame.groupby(device)[column].nunique().max() > 1)


def _is_state(cells: pd.Series) -> bool:
    """Return whether all cells are words of a state."""
    return bool(cells.dropna().astype("str").str.strip().str.lower().isin(_SAID).all())


def _is_time(cells: pd.Series) -> bool:
    """Return whether cells are dates, times of day, or numbers that count since 1970."""
    texts = cells.dropna().astype("str").str.strip()
    form = r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}|\d{1,2}:\d\d|\[?1\d{9}|[A-Za-z]{3}\w*,? +\d"
    return bool(texts.str.match(form).mean() > 0.5)


def _only(log: Reading, role: str, columns: list[str], taken: set[str]) -> str | None:
    """Return the one column that has a role; asks where there are several, or none."""
    if len(columns) == 1:
        return columns[0]
    names = list(log.frame.columns)
    if columns:
        # What states a rate needs no interval, and no unit.
        columns = sorted(columns, key=lambda c: name_and_unit(c)[1] not in RATE_UNITS)
        log.ask(
            f"{listed(columns)} could each be {role}: expected {role}=NAME (--columns)",
            "--columns",
            f"{role}={columns[0]}",
        )
        return columns[0]
    if role == "device" and FILE in names:
        return FILE
    sentence = f"none of the columns {listed(names)} is known to be {role}: expected {role}=NAME "
    if role == "device":
        sentence += "(--columns), or a device (--device) if all rows are of one"
        if repeated := _repeated(log, taken):
            log.ask(sentence, "--columns", f"device={repeated[0]}")
            return repeated[0]
        log.ask(sentence, "--device", str(log.frame.attrs.get("name", "NAME")))
        return None
    likely = [c for c in names if c not in taken and c != FILE and _fits(role, log.frame[c])]
    if not likely:
        raise TraceError(f"{sentence}(--columns)")
    log.ask(f"{sentence}(--columns)", "--columns", f"{role}={likely[0]}")
    return likely[0]
