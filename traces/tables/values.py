"""Instants, numbers and states out of the cells of a log, or one sentence that asks.

What has one reading is taken: a number of 13 digits counts ms since 1970. What has two is never
guessed: a date with day and month in either order, a local time without its zone, 1,500 which may
be 1.5. Errors name the line (of a file) or the row (of a frame), and the value.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedstale.errors import TraceError, nearest
from fedstale.traces import Array, Mask
from fedstale.traces.tables.columns import RATES, TableOptions, name_and_unit

TIME_UNITS = {"s": 1e6, "ms": 1e3, "us": 1.0, "ns": 1e-3}
"""What a unit of time is in microseconds."""
PER_INTERVAL = "bytes/interval"
RATE_UNITS = {
    "bit/s": 1.0,
    "kbit/s": 1e3,
    "Mbit/s": 1e6,
    "Gbit/s": 1e9,
    "B/s": 8.0,
    "kB/s": 8e3,
    "MB/s": 8e6,
    PER_INTERVAL: 8.0,
}
"""What a unit of a rate is in bit/s, and bytes of an interval in bits."""

# Between 2000 and 2100 a number of one size is of one unit.
_SINCE_US, _UNTIL_US = 946_684_800_000_000, 4_102_444_800_000_000
# A number before 1990 counts from the beginning of a log, not from 1970.
_CALENDAR_US = 631_152_000_000_000
_YES = frozenset(["1", "1.0", "true", "t", "yes", "y", "on"])
_NO = frozenset(["0", "0.0", "false", "f", "no", "n", "off"])
_STATES = {
    "online": (
        {"online", "available", "connected", "up"},
        {"offline", "unavailable", "disconnected", "down"},
    ),
    "charging": ({"charging"}, {"discharging", "not charging", "not_charging"}),
    "plugged": ({"plugged", "plugged in"}, {"unplugged", "not plugged in"}),
}
_OFFSET = r"(Z|[+-]\d{2}:?\d{2})$"


def where(rows: "pd.Series[str]", bad: Mask) -> str:
    """Return the first row that is bad, and its value, for a sentence."""
    place = int(np.flatnonzero(bad)[0])
    return (
        f"{rows.index.name or 'row'} {rows.index[place]}: {rows.name} = {str(rows.iloc[place])!r}"
    )


def _stated(options: TableOptions) -> Iterator[tuple[str, str]]:
    """Yield the role of each unit that is stated, empty if it has none, and the unit."""
    for text in options.unit:
        role, _, unit = text.rpartition("=")
        if unit not in TIME_UNITS and unit not in RATE_UNITS:
            units = [*TIME_UNITS, *RATE_UNITS]
            raise TraceError(f"unit = {text!r}: expected {nearest(unit, units)}, or ROLE=UNIT")
        yield "downlink" if role == "rate" else role, unit


def check_units(columns: Mapping[str, str], options: TableOptions) -> None:
    """Raise a TraceError for a unit that is none, or is of no column that is read."""
    seen = set()
    for role, unit in _stated(options):
        measured = {"start", "end", "time", "interval"} if unit in TIME_UNITS else set(RATES)
        if (role, unit in TIME_UNITS) in seen:
            raise TraceError(f"unit = {unit!r}: expected one for {role or 'each of time and rate'}")
        seen.add((role, unit in TIME_UNITS))
        if not measured & {role or column for column in columns} & columns.keys():
            raise TraceError(
                f"unit = {unit!r}: expected a unit of a column that is read: {', '.join(columns)}"
            )


def unit_of(
    column: str, role: str, options: TableOptions, known: Mapping[str, float]
) -> tuple[str | None, str]:
    """Return the unit of a column, None if neither a user nor its name says it, and who does."""
    stated = {of: unit for of, unit in _stated(options) if unit in known}
    # What a unit without a role is of, its kind says; intervals seldom have that of instants.
    unit = stated.get(role, None if role == "interval" else stated.get(""))
    if unit is not None:
        return unit, "given"
    named = name_and_unit(column)[1]
    return named if named in known else None, "by its name"


def numbers(
    cells: "pd.Series[str]", options: TableOptions, told: dict[str, str]
) -> "pd.Series[float]":
    """Return a column as numbers, NaN where there are none; tells the decimal mark.

    Raises:
        TraceError: a cell is no number, or may be two.
    """
    if pd.api.types.is_numeric_dtype(cells.dtype):
        return cells.astype("float64")
    texts = cells.astype("str").where(cells.notna()).str.strip()
    mark = options.decimal
    if mark is None:
        commas = texts[texts.str.fullmatch(r"[-+]?\d+,\d+", na=False)]
        if not commas.empty and commas.str.fullmatch(r"[-+]?[1-9]\d{0,2},\d{3}").all():
            raise TraceError(
                f"{where(commas, np.array([True]))}: may be a decimal or thousands: expected a "
                "decimal mark (--decimal), ',' or '.'"
            )
        mark = "," if not commas.empty else "."
        if mark == "," or texts.str.contains(".", regex=False, na=False).any():
            told["decimal mark"] = f"{mark!r}, by the numbers"
    plain = texts.str.replace(".", "x").str.replace(",", ".") if mark == "," else texts
    values = pd.to_numeric(plain, errors="coerce").astype("float64")
    wrong = (texts.notna() & ~np.isfinite(values)).to_numpy()
    if wrong.any():
        raise TraceError(f"{where(cells, wrong)}: expected a number with the decimal mark {mark!r}")
    return values


def states(cells: "pd.Series[str]", role: str, options: TableOptions) -> "pd.Series[float]":
    """Return a column of yes and no as 1 and 0, NaN where there is neither.

    Raises:
        TraceError: a cell says something else.
    """
    texts = cells.astype("str").where(cells.notna()).str.strip().str.lower()
    if options.online_values:
        yes = {value.strip().lower() for value in options.online_values}
        if not texts.isin(yes).any():
            raise TraceError(
                f"online values (--online-values) {', '.join(options.online_values)}: none is in "
                f"column {cells.name!r}, which has {', '.join(sorted(set(texts.dropna()))[:5])}"
            )
        known = texts.notna()
    else:
        yes = {*_YES, *_STATES[role][0]}
        known = texts.isin({*yes, *_NO, *_STATES[role][1]})
        wrong = (texts.notna() & ~known).to_numpy()
        if wrong.any():
            raise TraceError(
                f"{where(cells, wrong)}: expected true or false for {role}, or online values "
                "(--online-values), such as 'charging,full'"
            )
    return texts.isin(yes).astype("float64").where(known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instants:
    """Columns of time on one time line."""

    of: Mapping[str, Array]
    """Instants of each role in s, NaN where there is none; shape (rows,)."""
    epoch: str | None
    """Local calendar time of instant 0, a midnight; None where times count from no date."""
    told: Mapping[str, str]
    """Unit, zone and dates in words, with whether they were given or guessed."""


def instants(
    frame: pd.DataFrame, columns: Mapping[str, str], options: TableOptions, counts: Counter[str]
) -> Instants:
    """Return columns of time as instants since the midnight before the first of them.

    Args:
        frame: the table.
        columns: column of each role of time.
        options: what is stated.
        counts: gets what has to be dropped.

    Raises:
        TraceError: a cell is no time, or may be two.
    """
    told: dict[str, str] = {}
    if options.time_zone is not None:
        _check_zone(options.time_zone)
    parsed = {
        role: _parsed(frame[column], role, options, told, counts)
        for role, column in columns.items()
    }
    dated = {role: pd.api.types.is_datetime64_any_dtype(s.dtype) for role, s in parsed.items()}
    if len(set(dated.values())) > 1:
        raise TraceError(f"{' and '.join(columns.values())}: one is dated, the other is not")
    if not all(dated.values()):
        seconds = {role: column.to_numpy(np.float64) for role, column in parsed.items()}
        least = min(float(np.nanmin(values)) for values in seconds.values())
        told["epoch"] = (
            f"none: times count from no date, from {least:g} s on, so hours of the day are unknown"
        )
        if least < 0:
            raise TraceError(f"times begin at {least:g} s: expected times from 0 on")
        return Instants(of=seconds, epoch=None, told=told)
    own = told.pop("zone", None)
    zone = options.time_zone or own
    local = {role: column.dt.tz_convert(zone) for role, column in parsed.items()}
    first = min(column.min() for column in local.values())
    last = max(column.max() for column in local.values())
    midnight = first.normalize()
    offsets = pd.concat(
        [c.dt.tz_localize(None) - parsed[r].dt.tz_localize(None) for r, c in local.items()]
    )
    if offsets.nunique() > 1:
        told["clock changes"] = (
            "within the log: durations are true, hours of the day are off from then on"
        )
    n_days = (last.date() - first.date()).days + 1
    told["dates"] = f"{first.date()} to {last.date()}, {n_days:,} days"
    return Instants(
        of={
            role: ((column - midnight) / pd.Timedelta(seconds=1)).to_numpy(np.float64)
            for role, column in local.items()
        },
        epoch=midnight.tz_localize(None).isoformat(),
        told=told,
    )


def _parsed(
    cells: pd.Series,
    role: str,
    options: TableOptions,
    told: dict[str, str],
    counts: Counter[str],
) -> pd.Series:
    """Return a column as instants in UTC, or as seconds that count from no date."""
    if not cells.notna().any():
        raise TraceError(f"column {cells.name!r}: holds no {role}")
    times = cells
    if not pd.api.types.is_datetime64_any_dtype(cells.dtype):
        is_number = pd.api.types.is_numeric_dtype(cells.dtype)
        texts = cells.astype("str").where(cells.notna()).str.strip()
        plain = texts.str.fullmatch(r"[-+]?\d+([.,]\d+)?", na=True).all()
        if options.time_format is None and (is_number or plain):
            return _counted(cells, role, options, told)
        times = _dated(texts.rename(str(cells.name)), options, told)
    zone = options.time_zone
    if times.dt.tz is not None:
        told.setdefault("zone", str(times.dt.tz))
        told["time zone"] = f"{zone}, given" if zone else f"{told['zone']}, of the times themselves"
    elif zone is None:
        raise TraceError(
            f"{where(cells.astype('str'), cells.notna().to_numpy())}: a local time without its "
            "zone: expected a time zone (--time-zone), such as Europe/Oslo or UTC"
        )
    else:
        told["time zone"] = f"{zone}, given"
        utc = times.dt.tz_localize(zone, ambiguous="NaT", nonexistent="NaT")
        counts["dropped: local time that came twice or never, as clocks were changed"] += int(
            (utc.isna() & times.notna()).sum()
        )
        times = utc
    us = times.dt.tz_convert("UTC").astype("datetime64[us, UTC]")
    outside = us.notna() & ~us.dt.year.between(1990, 2099)
    if outside.any():
        raise TraceError(
            f"{where(cells.astype('str'), outside.to_numpy())}: expected a date from 1990 to 2100"
        )
    return us


def _counted(cells: pd.Series, role: str, options: TableOptions, told: dict[str, str]) -> pd.Series:
    """Return numbers as instants in UTC if they count since 1970, else as seconds."""
    values = numbers(cells, options, told)
    ends = values.agg(["min", "max"]).to_numpy()
    fitting = [
        u
        for u, us in TIME_UNITS.items()
        if np.all((ends * us >= _SINCE_US) & (ends * us < _UNTIL_US))
    ]
    unit, how = unit_of(str(cells.name), role, options, TIME_UNITS)
    if unit is None:
        if not fitting:
            raise TraceError(
                f"{where(cells, values.notna().to_numpy())}: a number without its unit: expected "
                "a unit of time (--unit), s, ms, us or ns, or a format (--time-format)"
            )
        unit, how = fitting[0], "by the size of the numbers"
    us = values * TIME_UNITS[unit]
    if us.max() >= _UNTIL_US:
        raise TraceError(
            f"{where(cells, (us >= _UNTIL_US).to_numpy())}: after the year 2100 in {unit}: "
            "expected another unit of time (--unit)"
        )
    if us.min() < _CALENDAR_US:
        if us.max() >= _SINCE_US:
            raise TraceError(
                f"{where(cells, (us < _CALENDAR_US).to_numpy())}: before 1990, other rows "
                "after 2000: expected all of a column to count from one date"
            )
        told[f"unit of {role}"] = f"{unit}, {how}"
        if options.time_zone is not None:
            raise TraceError(
                f"time_zone = {options.time_zone!r}: expected none, since times count from no date"
            )
        return us / 1e6
    told[f"unit of {role}"] = f"{unit} since 1970, {how}"
    told["zone"] = "UTC"
    told["time zone"] = (
        "UTC, as none is stated: hours of the day are those of UTC"
        if options.time_zone is None
        else f"{options.time_zone}, given"
    )
    return pd.to_datetime(us.round().astype("Int64"), unit="us", utc=True)


def _dated(texts: "pd.Series[str]", options: TableOptions, told: dict[str, str]) -> pd.Series:
    """Return texts as instants, with a zone if they have one; NaT where there is no text."""
    form = options.time_format
    if form is not None:
        told["format of time"] = f"{form}, given"
        try:
            times = pd.to_datetime(texts, format=form, errors="coerce", utc="%z" in form)
        except ValueError as problem:
            raise TraceError(f"time_format = {form!r}: {problem}") from None
        expected = f"expected a time as {form!r} says (--time-format)"
    else:
        told["format of time"] = "ISO 8601"
        dates = texts.str.match(r"\d{4}[-/]\d{1,2}[-/]\d{1,2}", na=True)
        zones = texts.str.extract(_OFFSET, expand=False)
        zones = zones.where(texts.str.contains(":", na=False))
        has_zone = zones.notna().any()
        naive = (texts.notna() & zones.isna()).to_numpy()
        if has_zone and naive.any():
            raise TraceError(
                f"{where(texts, naive)}: has no zone, other rows do: expected one zone"
            )
        times = pd.to_datetime(
            texts.where(dates), format="ISO8601", errors="coerce", utc=bool(has_zone)
        )
        if has_zone:
            distinct = sorted(set(zones.dropna()))
            single = len(distinct) == 1 and distinct[0] != "Z"
            told["zone"] = f"UTC{distinct[0][:3]}:{distinct[0][-2:]}" if single else "UTC"
        expected = "expected year, month and day, or a format of time (--time-format)"
        if texts.str.match(r"\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}", na=False).any():
            expected = (
                "may be the day or the month that comes first: expected a format of time "
                "(--time-format), such as '%d/%m/%Y %H:%M'"
            )
    wrong = (texts.notna() & times.isna()).to_numpy()
    if wrong.any():
        raise TraceError(f"{where(texts, wrong)}: {expected}")
    return times


def _check_zone(zone: str) -> None:
    try:
        pd.Timestamp("2024-01-01").tz_localize(zone)
    except (ValueError, KeyError, OSError):
        raise TraceError(
            f"time_zone = {zone!r}: expected an IANA name, such as Europe/Oslo or UTC"
        ) from None
