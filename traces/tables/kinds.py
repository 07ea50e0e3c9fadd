"""Which kind of log a table is, by its columns; where names do not tell, by its cells.

The kind that cells support is proposed, and asked for. What they do not support is not proposed:
then the sentence says what was seen and the choices.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import pandas as pd

from fedstale.errors import TraceError
from fedstale.traces.tables.columns import (
    DATED,
    FILE,
    VALUE,
    Roles,
    given_roles,
    joined,
    name_by_cells,
)
from fedstale.traces.tables.reading import Kind, Reading, fault, listed, seen
from fedstale.traces.tables.words import (
    BATTERY_STATES,
    LINK,
    RATE_UNITS,
    RATES,
    SETS,
    STATES,
    name_and_unit,
    texts_of,
    unit_of_text,
    words_of,
)


class _Needs(NamedTuple):
    """Roles of a kind of log."""

    needs: tuple[str, ...]
    one_of: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


_KINDS: dict[Kind, _Needs] = {
    "windows": _Needs(("start",), ("end", "duration"), STATES),
    "samples": _Needs(("time", "online")),
    "battery": _Needs(("time",), ("charging", "plugged", "level")),
    "rates": _Needs(("time",), RATES, ("interval",)),
    "pings": _Needs(("time",)),
    "nodes": _Needs((), ("speed", *RATES)),
}


def understand(log: Reading) -> Kind:
    """Find the kind of log that a table is, and the columns that are read.

    Raises:
        TraceError: a column that is given is not there, or none can be what is needed.
    """
    if not log.frame.columns.is_unique:
        twice = log.frame.columns[log.frame.columns.duplicated()][0]
        raise fault("columns_twice", column=twice)
    name_by_cells(log)
    roles = given_roles(log)
    given, names = roles.given, list(log.frame.columns)
    roles.find()
    kind = _kind(roles)
    found = roles.found
    if kind == "rates" and not found["time"]:
        found["time"] = found["start"]
    needs, one_of, also = _KINDS[kind]
    whole = (*needs, *one_of, *also)
    others = given.keys() - {*whole, *(() if log.options.device is not None else ("device",))}
    if others:
        about = {"roles": ", ".join(sorted(others)), "column": given[min(others)], "kind": kind}
        raise fault("columns_of_other_kind", whole=", ".join(whole), **about)
    wanted = [role for role in needs if role not in given]
    if one_of and not any(role in given or found[role] for role in one_of):
        wanted.append(one_of[0])
    # Who names one direction of a link, or one sign of a battery, may not want the other.
    more = also if kind != "nodes" and given.keys() & set(one_of) else whole
    if kind == "windows":
        _settle_windows(roles)
    wanted += [role for role in more if role not in needs and found.get(role)]
    if log.options.device is None and "device" not in given:
        wanted.append("device")
    known = {*given.values(), *(c for r in wanted if r != "device" for c in found[r])}
    read = {role: roles.only(role, known) for role in wanted}
    log.of = given | {role: column for role, column in read.items() if column is not None}
    log.interpretation["kind"] = f"{kind}, {'given' if log.options.kind else 'by its columns'}"
    if log.options.device is not None:
        log.interpretation["device"] = f"{log.options.device!r} for all rows, given"
    for role in ("device", *whole):
        if (column := log.of.get(role)) is not None:
            how = "given" if role in given else "by its name"
            how += f", {log.names[column]!r}" if column in log.names else ""
            log.interpretation[role] = f"column {column!r}, {how}"
    if log.of.get("device") == FILE:
        log.interpretation["device"] = "the name of each file"
    if rest := [c for c in names if c not in log.of.values() and c != FILE]:
        log.interpretation["not read"] = listed(rest)
    return kind


def _kind(roles: Roles) -> Kind:
    log, given, found, present = roles.log, roles.given, roles.found, roles.present
    if log.options.kind is not None:
        return cast(Kind, log.options.kind)
    # What is given tells it first, then what is found.
    telling = given.keys() - {"device", "time"}
    is_dated = bool(present & DATED) or any(log.look(c) == "instant" for c in log.frame.columns)
    fitting = [
        kind
        for kind, parts in _KINDS.items()
        if telling <= {role for part in parts for role in part}
        and not (kind == "nodes" and is_dated)
    ]
    if not telling or len(fitting) > 1:
        # A rate may be told of the time from a start on.
        timed = present | ({"time"} if "start" in present and present & {*RATES} else set())
        fitting = [
            kind
            for kind in fitting
            if timed.issuperset(_KINDS[kind].needs)
            and not (_KINDS[kind].one_of and present.isdisjoint(_KINDS[kind].one_of))
        ]
    if len(fitting) > 1 and "pings" in fitting:
        fitting.remove("pings")
    # A device that says something else with each reading is more than a ping.
    known = {c for columns in found.values() for c in columns}
    least = 1 if len(log.frame) > 1 else 0
    silent = [c for c in roles.free() if c not in known and log.frame[c].nunique() > least]
    is_wide = len(found["downlink"]) > 1 and not present & {"device", "uplink", "interval"}
    if not fitting or (fitting == ["pings"] and silent) or is_wide:
        return Proposal(roles, silent).kind()
    if len(fitting) == 1:
        return fitting[0]
    stated_rates = any(name_and_unit(c)[1] in RATE_UNITS for c in found["downlink"])
    order: tuple[Kind, ...] = ("samples", "rates") if stated_rates else ("samples",)
    likely = next((kind for kind in order if kind in fitting), fitting[0])
    log.ask("kind", likely, kinds=" or ".join(fitting))
    return likely


def _settle_windows(roles: Roles) -> None:
    """Keep one end and one state of windows, and ask if a column tells the online ones."""
    log, given, found = roles.log, roles.given, roles.found
    stated = [role for role in STATES if role in given or found[role]]
    if not stated and "online" not in roles.unused:
        devices = [given.get("device"), *found["device"][:1], FILE]
        device = next((c for c in devices if c in log.frame), None)
        rest = [c for c in roles.free() if log.look(c) == "state" and _varies(log, c, device)]
        if rest:
            about = {"column": rest[0], "seen": seen(log.frame[rest[0]])}
            log.ask("window_state", f"online={rest[0]}", **about)
            found["online"], stated = rest[:1], ["online"]
    ends = [role for role in ("end", "duration") if role in given or found[role]]
    found |= {role: [] for role in (*ends[1:], *stated[1:])}


def _varies(log: Reading, column: str, device: str | None) -> bool:
    """Return whether a column has several values, also of one device."""
    cells = log.frame[column] if device is None else log.frame.groupby(device)[column]
    return bool(pd.Series(cells.nunique()).max() > 1)


@dataclass(slots=True)
class Proposal:
    """Roles that the cells of a table support where its names do not tell them."""

    roles: Roles
    silent: list[str]
    """Columns whose names tell no role."""
    answers: list[str] = field(default_factory=list)
    shown: str = field(init=False)
    """What was seen."""
    look: dict[str, str] = field(init=False)
    """Of each silent column."""

    def __post_init__(self) -> None:
        frame = self.roles.log.frame
        self.shown = ", ".join(
            f"{c!r} (such as {str(frame[c].dropna().iloc[0])[:24]!r})"
            for c in frame.columns[:12]
            if frame[c].notna().any() and c != FILE
        )
        self.look = {c: self.roles.log.look(c) for c in self.silent}

    def kind(self) -> Kind:
        """Return the kind that the table may be of, and ask.

        Raises:
            TraceError: nothing supports one, or several alike.
        """
        given, found = self.roles.given, self.roles.found
        is_timed = bool(given.get("time") or found["time"])
        if is_timed and (wide := self._hosts()):
            return self._asked(wide)
        window = self._window() or {}
        for role, column in window.items():
            self._propose(role, column)
        kind = None if window or is_timed else self._time()
        if kind is not None:
            return self._asked(kind)
        taken = {*given.values(), *self._values(), *(c for role in DATED for c in found[role])}
        taken |= {part for c in taken for part in c.split("+")}
        if not self._is_of_one() and (device := self.roles.repeated(taken)):
            self._propose("device", device)
        return self._asked("windows") if window else self._state()

    def _is_of_one(self) -> bool:
        log = self.roles.log
        is_said = log.options.device is not None or FILE in log.frame
        return is_said or "device" in self.roles.present

    def _values(self) -> list[str]:
        return [c for c in self.silent if name_and_unit(c)[0].endswith(VALUE)]

    def _propose(self, role: str, column: str) -> None:
        self.roles.found[role] = [column]
        self.answers.append(f"{role}={column}")
        self.silent = [c for c in self.silent if c not in (column, *column.split("+"))]

    def _asked(self, kind: Kind) -> Kind:
        self.roles.log.ask("columns_unclear", " ".join(self.answers), shown=self.shown)
        return kind

    def _unclear(self, problem: str) -> TraceError:
        return TraceError(f"{fault('columns_unclear', shown=self.shown)}; {problem}")

    def _looking(self, *looks: str) -> list[str]:
        return [c for c in self.silent if self.look[c] in looks]

    def _dated(self) -> list[str]:
        """Return the columns that hold instants, those of unknown names last."""
        given, found = self.roles.given, self.roles.found
        named = [c for r in ("start", "end", "time") if r not in given for c in found[r]]
        more = [c for c in self._looking("instant", "clock") if c not in named]
        columns = joined(self.roles.log, [*named, *more])
        return [c for c in columns if self.look.get(c) != "clock"]

    def _window(self) -> dict[str, str] | None:
        """Return the columns where windows begin and end, or how long they last."""
        dated, has_state = self._dated(), bool(self._looking("state"))
        lasting, is_timed = self._looking("length", "clock"), bool(self.roles.found["time"])
        if self.roles.given.keys() & DATED or (has_state and is_timed):
            return None
        if len(dated) == 2:
            return _in_order(self.roles.log, dated)
        if len(dated) == len(lasting) == 1 and not has_state and not is_timed:
            return {"start": dated[0], "duration": lasting[0]}
        return None

    def _time(self) -> Kind | None:
        """Propose the one column of instants, and return the kind if it is all that was wanted."""
        dated = self._dated()
        if len(dated) != 1:
            several = listed(dated) if dated else "no column"
            raise self._unclear(f"{several} could be the time")
        self._propose("time", dated[0])
        if wide := self._hosts():
            return wide
        whole: dict[str, Kind] = {"online": "samples", "charging": "battery", "downlink": "rates"}
        return next((whole[role] for role in whole if role in self.roles.present), None)

    def _hosts(self) -> Kind | None:
        """Make rows out of columns that are each of a device, and return their kind."""
        roles = self.roles
        time = roles.given.get("time") or roles.found["time"][0]
        role = None if self._is_of_one() else _role_of_hosts(roles.log, time)
        if role is None:
            return None
        self.answers.append(f"{role}=*")
        roles.given["time"] = time
        roles.melt(role)
        roles.found.update({each: [] for each in roles.found})
        return "samples" if role == "online" else "rates"

    def _state(self) -> Kind:
        """Propose the one column that may say when devices are online, else pings."""
        values, log = self._values(), self.roles.log
        state = self._states(values)
        if len(state) == 1:
            of_battery = texts_of(log.sample[state[0]]).isin(BATTERY_STATES).all()
            self._propose("charging" if of_battery else "online", state[0])
            return self._asked("battery" if of_battery else "samples")
        words = {c: set(re.split(r"[\d_]+", name_and_unit(c)[0])) for c in self.silent}
        loads = [c for c in self.silent if words[c] & SETS["load"]]
        why = {
            f"{listed(state)} could each say when a device is online": state,
            f"the load in {listed(loads)} says neither when a device is online nor how fast it "
            "is: give a column that does, or --kind pings if it is online while rows come": loads,
            f"nothing says what {listed(values)} is a value of": values,
            "nothing says which device a row is of": [] if self._is_of_one() else self.silent,
        }
        if problem := next((text for text, columns in why.items() if columns), None):
            raise self._unclear(problem)
        log.ask("columns_unclear", "pings", option="--kind", shown=self.shown)
        if self.answers:
            log.ask("contents", " ".join(self.answers))
        return "pings"

    def _states(self, values: list[str]) -> list[str]:
        """List the columns that by their cells may tell the times online."""
        n_values = {c: self.roles.log.frame[c].nunique() for c in self.silent}
        states, words = self._looking("state"), [] if values else self._looking("word")
        groups = (
            [c for c in values if c in states],
            [c for c in states if n_values[c] < 9],
            self._looking("reply"),
            [c for c in self._looking("number") if "loss" in c.lower()],
            [c for c in words if 1 < n_values[c] <= 6],
        )
        return next((group for group in groups if group), [])


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


def _role_of_hosts(log: Reading, time: str) -> str | None:
    """Return the role of all columns but the time, if each is of one device."""
    frame = log.sample
    taken = {time, *time.split("+")}
    hosts = [c for c in frame.columns if c not in taken and frame[c].notna().any()]
    words = set[str]().union(*map(words_of, hosts))
    no_hosts = SETS["measures"] | SETS["load"]
    if len(hosts) < 2 or not frame[time].is_unique or words & no_hosts:
        return None
    if all(log.look(c) == "state" for c in hosts):
        return "online"
    cells = [frame[c].dropna().astype("str").str.extract(r"^[-+\d.,\s]+(\D+)$")[0] for c in hosts]
    units = [
        {name_and_unit(c)[1], *map(unit_of_text, texts.dropna().unique())} - {None}
        for c, texts in zip(hosts, cells, strict=True)
    ]
    are_rates = all(unit and unit <= RATE_UNITS.keys() for unit in units)
    return "downlink" if are_rates and not words & LINK else None
