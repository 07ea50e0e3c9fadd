"""Which column of a log is what: by its role that a user states, or by the words of its name.

A name that could be two things, or two names for one thing, are asked for, unless both columns say
the same.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import pandas as pd

from fedstale.errors import nearest
from fedstale.traces.tables.reading import Reading, fault, listed, seen
from fedstale.traces.tables.words import (
    BATTERY_STATES,
    NAMES,
    RATE_UNITS,
    RATES,
    SETS,
    STATES,
    TIME_UNITS,
    is_datum,
    looks,
    name_and_unit,
    role_of,
    texts_of,
    words_of,
)

FILE = "name of the file"
"""Column of a log in several files."""
DATED = frozenset(["time", "start", "end"])
VALUE = ("value", "reading")
_QUANTITIES = ("online", "charging", "plugged", "level", "downlink", "uplink")
"""What a cell may call the value that stands beside it."""
_MOST_QUANTITIES = 50


@dataclass(slots=True)
class Roles:
    """Columns of a log by their roles."""

    log: Reading
    given: dict[str, str] = field(default_factory=dict)
    """Those that a user states."""
    unused: set[str] = field(default_factory=set)
    """Roles that are stated to be of none."""
    found: dict[str, list[str]] = field(default_factory=dict)
    """Those that may have each other role, the likeliest ones."""

    @property
    def present(self) -> set[str]:
        """Roles that are given or found."""
        return {*self.given, *(role for role, columns in self.found.items() if columns)}

    def free(self) -> list[str]:
        """Return the columns that are not given."""
        return [c for c in self.log.frame.columns if c not in self.given.values() and c != FILE]

    def find(self) -> None:
        """Find the columns of all roles that are not given."""
        log, free = self.log, self.free()
        called = {c: name_and_unit(log.name_of(c))[0] for c in free}
        known = {c: [role for role, names in NAMES.items() if called[c] in names] for c in free}
        told = {c: None if known[c] else role_of(log.name_of(c)) for c in free}
        self.found = {}
        for role in NAMES:
            columns = [c for c in free if role in known[c]] or [c for c in free if told[c] == role]
            # What is called a time alone is meant to be one, with faults.
            is_meant = role in DATED and len(columns) == 1 and bool(known[columns[0]])
            fits = [c for c in columns if is_meant or _fits(log, role, c)]
            self.found[role] = [] if role in self.given else fits
        found = self.found
        if "interval" not in self.given and not found["interval"]:
            found["interval"] = found["duration"]
        if len(log.frame) > 2 and any(log.look(c) == "instant" for c in log.frame.columns):
            # A value of one row is of no device, if it is a number or another column is of several.
            rows = [c for c in found["device"] if log.frame[c].is_unique]
            if len(rows) == len(found["device"]):
                is_number = [c for c in rows if told[c] and log.look(c) == "number"]
                rows = [c for c in rows if called[c] == "id" or c in is_number]
            found["device"] = [c for c in found["device"] if c not in rows]
        for role, columns in found.items():
            # What is raw says the same as its twin.
            twins = {c: c.removesuffix("(RAW)").strip() for c in columns}
            found[role] = [c for c in columns if twins[c] not in {*columns} - {c}]
        self._settle_states()
        if found["time"] and len(log.frame) > 1:
            # The range of a query stands in each row of its result.
            for role in ("start", "end"):
                found[role] = [c for c in found[role] if log.frame[c].nunique() > 1]
        if len(found["time"]) == 1:
            clocks = [c for c in free if not (known[c] or told[c]) and log.look(c) == "clock"]
            found["time"] = joined(log, [*found["time"], *clocks])[:1]
        found["time"] = joined(log, found["time"])
        self.found = {role: _alike(log, role, columns) for role, columns in found.items()}
        for role in self.unused & self.found.keys():
            self.found[role] = []

    def _settle_states(self) -> None:
        """Settle by their cells the roles of columns with ambiguous names."""
        log, found = self.log, self.found
        # A battery has a state too, in words or in the numbers of Android.
        for column in list(found["online"]):
            texts = texts_of(log.sample[column])
            of_battery = bool(found["level"] or found["plugged"])
            if texts.isin(BATTERY_STATES).all() or (of_battery and texts.isin([*"12345"]).all()):
                found["online"].remove(column)
                found["charging"] = [*found["charging"], column]
        # What is up or down is a state, unless its numbers or its unit are those of a link.
        for column in set(found["online"]) & set(found["uplink"]):
            is_rate = name_and_unit(log.name_of(column))[1] in RATE_UNITS
            is_rate |= log.look(column) != "state"
            found["online" if is_rate else "uplink"].remove(column)

    def melt(self, role: str) -> None:
        """Make rows out of columns that are each of one device, whose name is the column's."""
        log, given = self.log, self.given
        if "time" not in given:
            self.find()
            column = self.only("time", set())
            if column is None:
                return
            given["time"] = column
        value, device = "value of a column", "name of a column"
        wide = [c for c in self.free() if log.frame[c].notna().any()]
        if not wide:
            raise fault("columns_of_no_device", role=role)
        units = {c: name_and_unit(c)[1] for c in wide}
        is_stated = len({*units.values()}) == 1 and units[wide[0]] in RATE_UNITS
        if is_stated:
            log.names[value] = f"value ({units[wide[0]]})"
        names = {c: re.sub(r"\s*[(\[][^(\[]*$", "", c) if is_stated else c for c in wide}
        long = log.frame[[given["time"], *wide]].rename(columns=names)
        long = long.melt(given["time"], var_name=device, value_name=value, ignore_index=False)
        # A host that has no value at an instant was not asked then.
        log.take(long[long[value].notna()])
        given |= {role: value, "device": device}
        log.interpretation["devices by"] = f"columns: {listed(wide)}"

    def only(self, role: str, taken: set[str]) -> str | None:
        """Return the one column that has a role; asks where there are several, or none."""
        log, columns = self.log, self.found[role]
        if len(columns) == 1:
            return columns[0]
        names = list(log.frame.columns)
        if columns:
            # What states a rate needs no interval, and no unit.
            columns = sorted(columns, key=lambda c: name_and_unit(c)[1] not in RATE_UNITS)
            likely = columns[0]
            log.ask("columns_several", f"{role}={likely}", columns=listed(columns), role=role)
            return likely
        if role != "device":
            raise fault("columns_none", columns=listed(names), role=role)
        if FILE in names:
            return FILE
        repeated = self.repeated(taken)
        if repeated:
            log.ask("device_none", f"device={repeated}", columns=listed(names))
        else:
            file = log.frame.attrs.get("name")
            log.ask("device_none", file or None, option="--device", columns=listed(names))
        return repeated

    def repeated(self, taken: set[str]) -> str | None:
        """Return the column that most likely names devices: words, or ids, that come again."""
        frame = self.log.frame
        digits: dict[str, float] = {}
        for c in frame.columns:
            name = name_and_unit(c)[0]
            if (
                c != FILE
                and c not in taken
                and 1 < frame[c].nunique() < len(frame)
                and not SETS["no_device"] & set(name.split("_"))
                and (name.endswith("id") or self.log.look(c) == "word")
            ):
                digits[c] = frame[c].astype("str").str.contains(r"\d").mean()
        return min(digits, key=lambda c: (-frame[c].nunique(), -digits[c]), default=None)


def given_roles(log: Reading) -> Roles:
    """Return the columns that are given by role, and the roles that are given to none."""
    roles, everywhere, names = Roles(log), None, list(log.frame.columns)
    for role, column in log.options.columns.items():
        # A rate of which no direction is said is that towards the device.
        known = "downlink" if role == "rate" else role
        if known not in NAMES:
            raise fault("columns_of_no_role", role=role, near=nearest(role, NAMES))
        parts = column.split("+")
        bare = [c for c in names if c.rpartition(" (")[0] == column]
        if column in names:
            roles.given[known] = column
        elif column == "none":
            roles.unused.add(known)
        elif column == "*":
            everywhere = known
        elif len(parts) == 2 and set(parts) <= set(names):
            roles.given[known] = _both(log, *parts)
        elif len(bare) == 1:
            roles.given[known] = bare[0]
        else:
            near = nearest(column, names)
            raise fault("columns_unknown", role=role, column=column, near=near)
    if everywhere is not None:
        roles.melt(everywhere)
    return roles


def _fits(log: Reading, role: str, column: str) -> bool:
    """Test if a column can be as its name says, by some of its cells."""
    some = log.sample[column].dropna()
    if some.empty:
        return False
    look, is_date = log.look(column), pd.api.types.is_datetime64_any_dtype(some.dtype)
    if role == "device":
        # A whole number with an empty cell in its column is a float.
        form = r"-?\d+[.,](?:\d*[1-9]\d*|\d\d+)"
        return not some.astype("str").str.fullmatch(form).all()
    if role in STATES:
        return not is_date and (look == "state" or some.nunique() <= 12)
    if role == "duration" and "length" in words_of(log.name_of(column)):
        return look in ("clock", "length") or name_and_unit(column)[1] in TIME_UNITS
    is_clock = role in DATED and (look == "length" or (look == "clock" and role != "time"))
    if is_date:
        return role in DATED
    return not is_clock and bool(is_datum(some).mean() >= 0.5)


def joined(log: Reading, columns: list[str]) -> list[str]:
    """Return a date and a time of day as one column, where times are in two."""
    if len(columns) == 2:
        for date, time in (columns, columns[::-1]):
            texts = log.sample[date].dropna().astype("str")
            if not texts.str.contains(":", regex=False).any() and log.look(time) == "clock":
                return [_both(log, date, time)]
    return columns


def _both(log: Reading, date: str, time: str) -> str:
    name = f"{date}+{time}"
    both = log.frame[date].astype("str") + " " + log.frame[time].astype("str")
    log.frame[name] = both.where(log.frame[date].notna() & log.frame[time].notna())
    return name


def _alike(log: Reading, role: str, columns: list[str]) -> list[str]:
    """Return the first of several columns, where the others say the same."""
    cells = [log.frame[c] for c in columns]
    if role == "device":
        cells = [pd.Series(pd.factorize(each)[0]) for each in cells]
    return columns[:1] if all(each.equals(cells[0]) for each in cells) else columns


def name_by_cells(log: Reading) -> None:
    """Name a value as another column says, or ask which of several is meant."""
    values = [c for c in log.frame.columns if name_and_unit(c)[0].endswith(VALUE)]
    if len(values) != 1:
        return
    value, frame, some = values[0], log.frame, log.sample
    given: Mapping[str, str] = log.options.columns
    for column in frame.columns.difference([value, *given.values()], sort=False):
        if log.look(column) != "word" or some[column].nunique() > _MOST_QUANTITIES:
            continue
        of = {str(name): cells for name, cells in some[value].groupby(some[column])}
        called = {name: _quantity(name) for name in of}
        roles: dict[str, str] = {}
        for name, cells in of.items():
            role, is_state = called[name], looks(cells) == "state"
            if role is not None and (is_state or role in ("level", *RATES)):
                roles[name] = role
            elif is_state and len(of) > 1:
                roles[name] = "online"
        if len(of) == 1 and roles:
            log.names[value] = next(iter(roles))
            return
        # Rows of hosts are all alike; those of quantities are not.
        is_told = any(called[name] for name in roles) or 0 < len(roles) < len(of)
        if is_told and value not in given.values() and not _is_role(log, column):
            likely = min(roles, key=lambda name: _QUANTITIES.index(roles[name]))
            told = ", ".join(f"{name!r}, which may be {role}" for name, role in roles.items())
            about = {"value": value, "column": column, "seen": seen(frame[column]), "told": told}
            log.ask("columns_of_quantities", f"{column}={likely}", **about)
            log.take(frame[frame[column] == likely].copy())
            log.names[value] = likely
            return


def _quantity(name: str) -> str | None:
    """Return the role of what a cell calls a value."""
    known = name_and_unit(name)[0]
    role = next((r for r in _QUANTITIES if known in NAMES[r]), None) or role_of(name)
    return role if role in _QUANTITIES else None


def _is_role(log: Reading, column: str) -> bool:
    """Return whether a column says a state or a device itself."""
    is_device = name_and_unit(column)[0] in NAMES["device"] or role_of(column) == "device"
    return is_device or log.look(column) == "state"
