"""Which column of a log is what, and so which kind of log it is.

Columns are given by their roles, or found by the words of their names: a unit at the end of a name,
and what is left, tell `ts_ms`, `deviceUUID` and `rxkB/s` apart by rule. What is found is told. A
name that could be two things, or two names for one thing, are asked for, unless both columns say
the same.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import cast

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


@lru_cache(maxsize=4096)
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


@lru_cache(maxsize=4096)
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
    whole = unit_of_text(column)
    if whole is not None and (whole in RATE_UNITS or len(column) > 3):
        return ("rate" if whole in RATE_UNITS else "duration"), whole
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


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_NAMES_OF = {role: _set(names) for role, names in _NAMES.items()}
YES = _set("1 1.0 true t yes y on ja an ein wahr oui")
NO = _set("0 0.0 false f no n off nein aus falsch non")
STATE_WORDS = {
    role: (_set(yes), _set(no))
    for role, yes, no in (
        (
            "online",
            "online available connected up alive reachable ok success active joined associated",
            "offline unavailable disconnected down dead unreachable failed timeout inactive left "
            "disassociated lost",
        ),
        ("charging", "charging", "discharging not_charging"),
        ("plugged", "plugged plugged_in ac usb wireless", "unplugged not_plugged_in battery none"),
    )
}
"""Words of each role that mean so, and that mean not so."""
NO_STATE = frozenset[str]().union(*(no for _, no in STATE_WORDS.values()))

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
    "rule cell area server percent"
)
_QUANTITIES = ("online", "charging", "plugged", "level", "downlink", "uplink")
"""What a cell may call the value that stands beside it."""
_MOST_QUANTITIES = 50
_VALUE = ("value", "reading")
_LOAD = _set("cpu load usage utilization idle iowait user system steal memory mem ram")
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
    ("duration", lambda words, _: words & {"duration", "lasted"} or words > {"length"}),
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
                or (last.removesuffix("id") in _DEVICE)
                or (last in _OF_DEVICE and words & _DEVICE)
            )
        ),
    ),
)
"""What words tell a role, the first that does; names that are known come before all."""


def _words(column: str) -> set[str]:
    """Return the words of a column's name; a sign of percent is one."""
    return {*name_and_unit(column)[0].split("_")} | ({"percent"} if "%" in column else set())


def _role_of(column: str) -> str | None:
    """Return the role that the words of a name have by rule."""
    (name, unit), words = name_and_unit(column), _words(column)
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


_SAID = (YES | NO | _BATTERY | NO_STATE).union(*(yes for yes, _ in STATE_WORDS.values()))
_FORMS = {
    "word": r"\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?|[0-9a-f]{2}(?:[:-][0-9a-f]{2}){5}|[0-9a-f]{8}-.*",
    "state": "|".join(re.escape(word) for word in sorted(_SAID)),
    "instant": r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}.*|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}\b.*"
    r"|\[?1\d{9}(?:\d{3}){0,3}(?:\.\d*)?\D*|1\.\d+e\+?(?:9|09|1[258])|[a-z]{3}\w*,? +\d+ .*"
    r"|\w+, \d.*|\d{1,2}/[a-z]{3}/.*|\d{4}-?w\d.*|20\d{6}(?:t?\d{6}z?)?",
    "clock": r"\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?: [ap]m)?",
    "length": r"\d+ days? .*|(?:\d+(?:[.,]\d+)? ?(?:d|h|m|s|days?|hours?|hrs?|min\w*|sec\w*),? ?)+",
}
"""How cells of each look are written, in lower case; all of a column are."""


def _texts(cells: pd.Series) -> "pd.Series[str]":
    """Return the cells that are not empty, as words are compared."""
    return cells.dropna().astype("str").str.strip().str.lower()


def looks(cells: pd.Series) -> str:
    """Return what cells look like: a state, instant, clock, length, reply, number or word."""
    if pd.api.types.is_datetime64_any_dtype(cells.dtype):
        return "instant"
    if pd.api.types.is_timedelta64_dtype(cells.dtype):
        return "length"
    texts = _texts(cells).drop_duplicates()
    if texts.empty:
        return "word"
    for look, form in _FORMS.items():
        if texts.str.fullmatch(form).mean() >= (1.0 if look == "state" else 0.9):
            return look
    # A time that a thing took to answer, or a word that it did not.
    is_number, is_lost = is_datum(texts), texts.isin(NO_STATE)
    if is_lost.any() and (is_number | is_lost).all():
        return "reply"
    return "number" if is_number.mean() > 0.9 else "word"


def _look(log: Reading, column: str) -> str:
    """Return what a column looks like, by some of its rows."""
    if column not in log.looks:
        log.looks[column] = looks(log.sample[column])
    return log.looks[column]


def _fits(log: Reading, role: str, column: str) -> bool:
    """Return whether a column can be what its name says, from some of its cells."""
    some = log.sample[column].dropna()
    if some.empty:
        return False
    look, texts = _look(log, column), some.astype("str")
    is_date = pd.api.types.is_datetime64_any_dtype(some.dtype)
    if role == "device":
        # A whole number with an empty cell in its column is a float.
        return not texts.str.fullmatch(r"-?\d+[.,](?:\d*[1-9]\d*|\d\d+)").all()
    if role in STATES:
        return not is_date and (look == "state" or some.nunique() <= 12)
    if role == "duration" and "length" in _words(log.name_of(column)):
        return look in ("clock", "length") or name_and_unit(column)[1] in TIME_UNITS
    if role in _DATED:
        is_clock = look in ("clock", "length") and not (role == "time" and look == "clock")
        return is_date or (not is_clock and bool(is_datum(some).mean() >= 0.5))
    return not is_date and bool(is_datum(some).mean() >= 0.5)


def _name_by_cells(log: Reading) -> None:
    """Let a value be called what another column says, or ask which of several is meant."""
    values = [c for c in log.frame.columns if name_and_unit(c)[0].endswith(_VALUE)]
    if len(values) != 1:
        return
    value, frame, some = values[0], log.frame, log.sample
    given = log.options.columns.values()
    for column in frame.columns.difference([value, *given], sort=False):
        if _look(log, column) != "word" or some[column].nunique() > _MOST_QUANTITIES:
            continue
        of = {str(name): cells for name, cells in some[value].groupby(some[column])}
        roles: dict[str, str] = {}
        for name, cells in of.items():
            role = _quantity(name)
            is_state = looks(cells) == "state"
            if role is not None and (is_state or role in ("level", *RATES)):
                roles[name] = role
            elif is_state and len(of) > 1:
                roles[name] = "online"
        if len(of) == 1 and roles:
            log.names[value] = next(iter(roles))
            return
        # Rows of hosts are all alike; those of quantities are not.
        named = [name for name in roles if _quantity(name) is not None]
        is_told = named or 0 < len(roles) < len(of)
        if is_told and value not in given and not _is_role(log, column):
            likely = min(roles, key=lambda name: _QUANTITIES.index(roles[name]))
            told = ", ".join(f"{name!r}, which may be {role}" for name, role in roles.items())
            log.ask(
                f"column {value!r} is of what {column!r} says, {seen(frame[column])}: expected "
                f"one of them (--only {column}=VALUE), such as {told}",
                "--only",
                f"{column}={likely}",
            )
            log.take(frame[frame[column] == likely].copy())
            log.names[value] = likely
            return


def _quantity(name: str) -> str | None:
    """Return the role of what a cell calls a value."""
    known = name_and_unit(name)[0]
    role = next((r for r in _QUANTITIES if known in _NAMES_OF[r]), None) or _role_of(name)
    return role if role in _QUANTITIES else None


def _is_role(log: Reading, column: str) -> bool:
    """Return whether a column says a state or a device itself."""
    name = name_and_unit(column)[0]
    is_device = name in _NAMES_OF["device"] or _role_of(column) == "device"
    return is_device or _look(log, column) == "state"


def _found(log: Reading, given: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the columns that may have each role which is not given, the likeliest ones."""
    free = [c for c in log.frame.columns if c not in given.values() and c != FILE]
    called = {c: name_and_unit(log.name_of(c))[0] for c in free}
    known = {c: [role for role, names in _NAMES_OF.items() if called[c] in names] for c in free}
    told = {c: None if known[c] else _role_of(log.name_of(c)) for c in free}
    found: dict[str, list[str]] = {}
    for role in _NAMES:
        columns = [c for c in free if role in known[c]] or [c for c in free if told[c] == role]
        # What is called a time alone is meant to be one, with faults.
        is_meant = role in _DATED and len(columns) == 1 and bool(known[columns[0]])
        fits = [c for c in columns if (is_meant or _fits(log, role, c))]
        found[role] = [] if role in given else fits
    if "interval" not in given and not found["interval"]:
        found["interval"] = found["duration"]
    if len(log.frame) > 2 and any(_look(log, c) == "instant" for c in log.frame.columns):
        # What is of one row is of no device, if it is a number or another column is of several.
        rows = [c for c in found["device"] if log.frame[c].is_unique]
        if len(rows) == len(found["device"]):
            rows = [c for c in rows if called[c] == "id" or (told[c] and _look(log, c) == "number")]
        found["device"] = [c for c in found["device"] if c not in rows]
    for role, columns in found.items():
        # What is raw says the same as its twin.
        found[role] = [
            c for c in columns if c.removesuffix("(RAW)").strip() not in {*columns} - {c}
        ]
    _settle_states(log, found)
    if found["time"] and len(log.frame) > 1:
        # The range of a query stands in each row of its result.
        for role in ("start", "end"):
            found[role] = [c for c in found[role] if log.frame[c].nunique() > 1]
    if len(found["time"]) == 1:
        clocks = [c for c in free if not known[c] and not told[c] and _look(log, c) == "clock"]
        found["time"] = _joined(log, [*found["time"], *clocks])[:1]
    found["time"] = _joined(log, found["time"])
    return {role: _alike(log, role, columns) for role, columns in found.items()}


def _settle_states(log: Reading, found: dict[str, list[str]]) -> None:
    """Let columns whose names could be two things be what their cells are."""
    # A battery has a state too, in words or in the numbers of Android.
    for column in list(found["online"]):
        texts = _texts(log.sample[column])
        of_battery = bool(found["level"] or found["plugged"])
        if texts.isin(_BATTERY).all() or (of_battery and texts.isin([*"12345"]).all()):
            found["online"].remove(column)
            found["charging"] = [*found["charging"], column]
    # What is up or down is a state, unless its numbers or its unit are those of a link.
    for column in set(found["online"]) & set(found["uplink"]):
        is_rate = name_and_unit(log.name_of(column))[1] in RATE_UNITS
        is_rate |= _look(log, column) != "state"
        found["online" if is_rate else "uplink"].remove(column)


def _joined(log: Reading, columns: list[str]) -> list[str]:
    """Return a date and a time of day as one column, where times are in two."""
    if len(columns) != 2:
        return columns
    for date, time in (columns, columns[::-1]):
        texts = log.sample[date].dropna().astype("str")
        if not texts.str.contains(":", regex=False).any() and _look(log, time) == "clock":
            return [_both(log, date, time)]
    return columns


def _both(log: Reading, date: str, time: str) -> str:
    name = f"{date}+{time}"
    both = log.frame[date].astype("str") + " " + log.frame[time].astype("str")
    log.frame[name] = both.where(log.frame[date].notna() & log.frame[time].notna())
    return name


def _alike(log: Reading, role: str, columns: list[str]) -> list[str]:
    """Return the first of several columns, where the others say the same."""
    if len(columns) < 2:
        return columns
    cells = [log.frame[c] for c in columns]
    if role == "device":
        cells = [pd.Series(pd.factorize(each)[0]) for each in cells]
    return columns[:1] if all(each.equals(cells[0]) for each in cells) else columns


def understand(log: Reading) -> Kind:
    """Find which kind of log a table is, and which of its columns are read.

    Raises:
        TraceError: a column that is given is not there, or none can be what is needed.
    """
    if not log.frame.columns.is_unique:
        twice = log.frame.columns[log.frame.columns.duplicated()][0]
        raise TraceError(f"column {twice!r} occurs twice: expected distinct names")
    _name_by_cells(log)
    given, unused = _given(log)
    names = list(log.frame.columns)
    found = {role: [] if role in unused else c for role, c in _found(log, given).items()}
    present = {*given, *(role for role, columns in found.items() if columns)}
    kind = _kind(log, given, found, present)
    if kind == "rates" and not found["time"]:
        found["time"] = found["start"]
    roles = _KINDS[kind]
    others = given.keys() - {*roles.all, *(() if log.options.device is not None else ("device",))}
    if others:
        raise TraceError(
            f"columns: {', '.join(sorted(others))} = {given[min(others)]!r}: expected none, since "
            f"a log of {kind} has {', '.join(roles.all)}, and device in a column or by --device"
        )
    wanted = [role for role in roles.needs if role not in given]
    if roles.one_of and not any(role in given or found[role] for role in roles.one_of):
        wanted.append(roles.one_of[0])
    # Who names one direction of a link, or one sign of a battery, may not want the other.
    more = roles.also if kind != "nodes" and given.keys() & set(roles.one_of) else roles.all
    if kind == "windows":
        _settle_windows(log, given, found, unused)
    wanted += [role for role in more if role not in roles.needs and found.get(role)]
    if log.options.device is None and "device" not in given:
        wanted.append("device")
    known = {*given.values(), *(c for r in wanted if r != "device" for c in found[r])}
    log.of = given | {
        role: column
        for role in wanted
        if (column := _only(log, role, found[role], known)) is not None
    }
    log.told["kind"] = f"{kind}, {'given' if log.options.kind else 'by its columns'}"
    if log.options.device is not None:
        log.told["device"] = f"{log.options.device!r} for all rows, given"
    for role in ("device", *roles.all):
        if (column := log.of.get(role)) is not None:
            how = "given" if role in given else "by its name"
            how += f", {log.names[column]!r}" if column in log.names else ""
            log.told[role] = f"column {column!r}, {how}"
    if log.of.get("device") == FILE:
        log.told["device"] = "the name of each file"
    rest = [c for c in names if c not in log.of.values() and c != FILE]
    if rest:
        log.told["not read"] = listed(rest)
    return kind


def _settle_windows(
    log: Reading, given: Mapping[str, str], found: dict[str, list[str]], unused: set[str]
) -> None:
    """Let windows have one end and one state, and ask whether a column says which are online."""
    stated = [role for role in STATES if role in given or found[role]]
    if not stated and "online" not in unused:
        devices = [given.get("device"), *found["device"][:1], FILE]
        device = next((c for c in devices if c in log.frame), None)
        rest = [c for c in log.frame.columns if c not in given.values() and c != FILE]
        rest = [c for c in rest if _look(log, c) == "state" and _varies(log, c, device)]
        if rest:
            log.ask(
                f"column {rest[0]!r} holds {seen(log.frame[rest[0]])}: expected online={rest[0]} "
                "(--columns) if it says which rows are online, or online=none if all are",
                "--columns",
                f"online={rest[0]}",
            )
            found["online"], stated = rest[:1], ["online"]
    ends = [role for role in ("end", "duration") if role in given or found[role]]
    found |= {role: [] for role in (*ends[1:], *stated[1:])}


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
    if not wide:
        raise TraceError(f"columns: {role} = '*': expected columns that are each of one device")
    units = {c: name_and_unit(c)[1] for c in wide}
    is_stated = len({*units.values()}) == 1 and units[wide[0]] in RATE_UNITS
    if is_stated:
        log.names[value] = f"value ({units[wide[0]]})"
    long = pd.concat(
        pd.DataFrame(
            {
                given["time"]: log.frame[given["time"]],
                device: re.sub(r"\s*[(\[][^(\[]*$", "", c) if is_stated else c,
                value: log.frame[c],
            }
        )
        for c in wide
    )
    # A host that has no value at an instant was not asked then.
    log.take(long[long[value].notna()])
    given |= {role: value, "device": device}
    log.told["devices by"] = f"columns: {listed(wide)}"


def _kind(
    log: Reading, given: dict[str, str], found: dict[str, list[str]], present: set[str]
) -> Kind:
    if log.options.kind is not None:
        return cast(Kind, log.options.kind)
    # What is given tells it first, then what is found.
    telling = given.keys() - {"device", "time"}
    is_dated = bool(present & _DATED) or any(_look(log, c) == "instant" for c in log.frame.columns)
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
    # A device that says something else with each reading is more than a ping.
    known = {c for columns in found.values() for c in columns} | {*given.values(), FILE}
    least = 1 if len(log.frame) > 1 else 0
    silent = [c for c in log.frame.columns if c not in known and log.frame[c].nunique() > least]
    is_wide = len(found["downlink"]) > 1 and not (present & {"device", "uplink", "interval"})
    if (fitting == ["pings"] and silent) or is_wide:
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
    if fitting:
        return fitting[0]
    return _Proposal(log=log, given=given, found=found, silent=silent).kind()


@dataclass(slots=True, kw_only=True)
class _Proposal:
    """Roles that the cells of a table support where its names do not tell them."""

    log: Reading
    given: dict[str, str]
    found: dict[str, list[str]]
    silent: list[str]
    """Columns whose names tell no role."""
    answers: list[str] = field(default_factory=list)
    sentence: str = field(init=False)
    """What was seen, and the choices."""

    def __post_init__(self) -> None:
        frame = self.log.frame
        shown = ", ".join(
            f"{c!r} (such as {str(frame[c].dropna().iloc[0])[:24]!r})"
            for c in frame.columns[:12]
            if frame[c].notna().any() and c != FILE
        )
        self.sentence = (
            f"cannot tell what the columns {shown} are: expected columns (--columns) device=NAME "
            "and start= end= (or duration=) for windows, time= online= for samples, time= "
            "charging= (or plugged=, level=) for a battery, time= downlink= (and uplink=) for "
            "rates, online=* or downlink=* for one column a device, speed= downlink= uplink= for "
            "a list of nodes, or --kind pings for devices that are online while rows come"
        )

    def kind(self) -> Kind:
        """Return the kind that the table may be of, and ask.

        Raises:
            TraceError: nothing supports one, or several alike.
        """
        log, given, found = self.log, self.given, self.found
        is_timed = bool(given.get("time") or found["time"])
        if is_timed and (wide := self._hosts()):
            return self._asked(wide)
        window = self._window()
        if window is not None:
            kind: Kind | None = "windows"
            for role, column in window.items():
                self._propose(role, column)
        else:
            kind = None if is_timed else self._time()
        if kind not in (None, "windows"):
            return self._asked(kind)
        if not self._is_of_one() and (device := _repeated(log, self._taken())):
            self._propose("device", device)
        return self._asked("windows") if kind else self._state()

    def _is_of_one(self) -> bool:
        is_said = self.log.options.device is not None or FILE in self.log.frame
        return is_said or bool(self.given.get("device") or self.found["device"])

    def _taken(self) -> set[str]:
        columns = {*self.given.values(), *self._values()}
        columns |= {c for role in _DATED for c in self.found[role]}
        return columns | {part for c in columns for part in c.split("+")}

    def _values(self) -> list[str]:
        return [c for c in self.silent if name_and_unit(c)[0].endswith(_VALUE)]

    def _propose(self, role: str, column: str) -> None:
        self.found[role] = [column]
        self.answers.append(f"{role}={column}")
        self.silent = [c for c in self.silent if c not in (column, *column.split("+"))]

    def _asked(self, kind: Kind) -> Kind:
        self.log.ask(self.sentence, "--columns", " ".join(self.answers))
        return kind

    def _dated(self) -> list[str]:
        """Return the columns that hold instants, those of unknown names last."""
        found = [c for r in ("start", "end", "time") if r not in self.given for c in self.found[r]]
        look = {c: _look(self.log, c) for c in self.silent}
        more = [c for c in self.silent if look[c] in ("instant", "clock") and c not in found]
        return [c for c in _joined(self.log, [*found, *more]) if look.get(c) != "clock"]

    def _window(self) -> dict[str, str] | None:
        """Return the columns where windows begin and end, or how long they last."""
        look = {c: _look(self.log, c) for c in self.silent}
        dated, has_state = self._dated(), "state" in look.values()
        lasting = [c for c in self.silent if look[c] in ("length", "clock")]
        if self.given.keys() & _DATED or (has_state and self.found["time"]):
            return None
        if len(dated) == 2:
            return _in_order(self.log, dated)
        if len(dated) == len(lasting) == 1 and not has_state and not self.found["time"]:
            return {"start": dated[0], "duration": lasting[0]}
        return None

    def _time(self) -> Kind | None:
        """Propose the one column of instants, and return the kind if it is all that was wanted."""
        dated, found = self._dated(), self.found
        if len(dated) != 1:
            several = listed(dated) if dated else "no column"
            raise TraceError(f"{self.sentence}; {several} could be the time")
        self._propose("time", dated[0])
        if wide := self._hosts():
            return wide
        whole: dict[str, Kind] = {"online": "samples", "charging": "battery", "downlink": "rates"}
        return next((whole[role] for role in whole if role in self.given or found[role]), None)

    def _hosts(self) -> Kind | None:
        """Make rows out of columns that are each of a device, and return their kind."""
        time = self.given.get("time") or self.found["time"][0]
        role = None if self._is_of_one() else _role_of_hosts(self.log, time)
        if role is None:
            return None
        self.answers.append(f"{role}=*")
        self.given["time"] = time
        _melt(self.log, role, self.given)
        self.found.update({each: [] for each in self.found})
        return "samples" if role == "online" else "rates"

    def _state(self) -> Kind:
        """Propose the one column that may say when devices are online, else pings."""
        values, log = self._values(), self.log
        state = _states_among(log, self.silent, values)
        if len(state) == 1:
            of_battery = _texts(log.sample[state[0]]).isin(_BATTERY).all()
            self._propose("charging" if of_battery else "online", state[0])
            return self._asked("battery" if of_battery else "samples")
        words = {c: set(re.split(r"[\d_]+", name_and_unit(c)[0])) for c in self.silent}
        loads = [c for c in self.silent if words[c] & _LOAD]
        why = {
            f"{listed(state)} could each say when a device is online": state,
            f"the load in {listed(loads)} says neither when a device is online nor how fast it "
            "is: give a column that does, or --kind pings if it is online while rows come": loads,
            f"nothing says what {listed(values)} is a value of": values,
            "nothing says which device a row is of": [] if self._is_of_one() else self.silent,
        }
        if problem := next((text for text, columns in why.items() if columns), None):
            raise TraceError(f"{self.sentence}; {problem}")
        log.ask(self.sentence, "--kind", "pings")
        if self.answers:
            sentence = "their contents say what they may be"
            log.ask(sentence, "--columns", " ".join(self.answers))
        return "pings"


def _in_order(log: Reading, columns: Sequence[str]) -> dict[str, str] | None:
    """Return two columns of times as start and end, if one is never before the other in a row."""
    times = []
    for column in columns:
        cells = log.sample[column].astype("str").str.strip()
        numbers = pd.to_numeric(cells, errors="coerce")
        dates = pd.to_datetime(cells, errors="coerce", format="mixed", dayfirst=True, utc=True)
        dated = pd.Series(dates).astype("int64").where(pd.Series(dates).notna())
        times.append(numbers if numbers.notna().any() else dated)
    first, second = times
    both = first.notna() & second.notna()
    is_before, is_after = (first <= second)[both].all(), (second <= first)[both].all()
    if is_before == is_after:
        return None
    return dict(zip(("start", "end"), columns if is_before else columns[::-1], strict=True))


_MEASURES = _set(
    "loss median mean min max avg average stddev rtt latency jitter uptime total count percent"
)
"""Words of columns that are of one device, each a measure of it."""


def _role_of_hosts(log: Reading, time: str) -> str | None:
    """Return what all columns but the time are of, if each is of one device."""
    frame = log.sample
    taken = {time, *time.split("+")}
    hosts = [c for c in frame.columns if c not in taken and frame[c].notna().any()]
    words = set[str]().union(*map(_words, hosts))
    if len(hosts) < 2 or not frame[time].is_unique or words & (_MEASURES | _LOAD):
        return None
    if all(_look(log, c) == "state" for c in hosts):
        return "online"
    cells = [frame[c].dropna().astype("str").str.extract(r"^[-+\d.,\s]+(\D+)$")[0] for c in hosts]
    units = [
        {name_and_unit(c)[1], *map(unit_of_text, texts.dropna().unique())} - {None}
        for c, texts in zip(hosts, cells, strict=True)
    ]
    are_rates = all(unit and unit <= RATE_UNITS.keys() for unit in units)
    return "downlink" if are_rates and not words & (_DOWN | _UP) else None


def _repeated(log: Reading, taken: set[str]) -> str | None:
    """Return the column that most likely names devices: words, or ids, that come again."""
    frame = log.frame
    several = [c for c in frame.columns if 1 < frame[c].nunique() < len(frame) and c != FILE]
    names = [
        c
        for c in several
        if c not in taken
        and not _NO_DEVICE & set(name_and_unit(c)[0].split("_"))
        and (name_and_unit(c)[0].endswith("id") or _look(log, c) == "word")
    ]
    digits = {c: frame[c].astype("str").str.contains(r"\d").mean() for c in names}
    return min(names, key=lambda c: (-frame[c].nunique(), -digits[c]), default=None)


def _states_among(log: Reading, silent: list[str], values: list[str]) -> list[str]:
    """Return the columns of which one may say when devices are online, by their cells."""
    look = {c: _look(log, c) for c in silent}
    n_values = {c: log.frame[c].nunique() for c in silent}
    groups = (
        [c for c in values if look[c] == "state"],
        [c for c in silent if look[c] == "state" and n_values[c] < 9],
        [c for c in silent if look[c] == "reply"],
        [c for c in silent if look[c] == "number" and "loss" in c.lower()],
        [c for c in silent if look[c] == "word" and 1 < n_values[c] <= 6 and not values],
    )
    return next((group for group in groups if group), [])


def _varies(log: Reading, column: str, device: str | None) -> bool:
    """Return whether a column has several values, also of one device."""
    cells = log.frame[column] if device is None else log.frame.groupby(device)[column]
    return bool(pd.Series(cells.nunique()).max() > 1)


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
    if role != "device":
        raise TraceError(f"{sentence}(--columns)")
    sentence += "(--columns), or a device (--device) if all rows are of one"
    if repeated := _repeated(log, taken):
        log.ask(sentence, "--columns", f"device={repeated}")
        return repeated
    file = log.frame.attrs.get("name")
    log.ask(sentence, "--device" if file else None, str(file))
    return None
