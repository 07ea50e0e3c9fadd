"""Instants out of the cells of a log, however a program writes them.

What has one reading is taken: a number of 13 digits counts ms since 1970, 21.10.2024 begins with
the day. What has two is asked for: a local time without its zone, 6/7/2024.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedstale.traces import Array
from fedstale.traces.tables.reading import Reading, fault, where
from fedstale.traces.tables.values import NUMBER, numbers, of_texts, plain, unit_of
from fedstale.traces.tables.words import TIME_UNITS

# Between 2000 and 2100 a number of one size is of one unit.
_SINCE_US, _UNTIL_US = 946_684_800_000_000, 4_102_444_800_000_000
# A number before 1990 counts from the beginning of a log, not from 1970.
_CALENDAR_US = 631_152_000_000_000
_SINCE_1970 = ("s", "ms", "us", "ns")
_FORMS_FROM = 10_000
"""How many cells tell how times are written."""
_COMPACT = r"(?:19|20)\d{2}[01]\d[0-3]\d(?:[0-2]\d[0-5]\d[0-5]\d)?"
_OFFSET = r"(?: ?(Z|UTC|GMT|[+-]\d{2}:?\d{2}|[+-]\d{2}))$"
_BY_DAY = re.compile(r"^(\d{1,2})([-/.])(\d{1,2})\2(\d{4}|\d{2})\b")
_BY_WEEK = r"^(\d{4})-?W(\d\d)-?(\d)?(?:[T ]?(.*))?$"
_ISO = r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{8}|\d{14}$"
_TO_ISO = {
    r"^(\d{4})[/.](\d{1,2})[/.]": r"\1-\2-",
    r"_(\d\d)[.:](\d\d)[.:](\d\d)": r" \1:\2:\3",
    r"^(\d{8})(\d{6})$": r"\1T\2",
}
"""How times are written that differ from ISO 8601 in their signs alone."""
_CLOCKS = {r"\d+:\d+:\d+": "%H:%M:%S", r"\d+:\d+": "%H:%M", r"(?<=%S)\.\d+": ".%f"}
"""How times of a day are written after a date."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instants:
    """Columns of time on one time line."""

    of: Mapping[str, Array]
    """Instants of each role in s, NaN where there is none; shape (rows,)."""
    midnight: str | None
    """Local calendar time of instant 0; None where times count from no date."""


def instants(log: Reading, *roles: str) -> Instants:
    """Return columns of time as instants since the midnight before the first of them.

    Raises:
        TraceError: a zone or a format is none, or times are of two kinds.
    """
    columns = " and ".join(log.of[role] for role in roles)
    told: dict[str, str] = {}
    if log.options.time_zone is not None:
        _check_zone(log.options.time_zone)
    parsed = {role: _parsed(log, role, roles, told) for role in roles}
    own = told.pop("zone", None)
    log.interpretation.update(told)
    dated = {pd.api.types.is_datetime64_any_dtype(column.dtype) for column in parsed.values()}
    if len(dated) > 1:
        raise fault("times_of_two_kinds", columns=columns)
    if not any(column.notna().any() for column in parsed.values()):
        raise fault("times_none", columns=columns)
    if not dated.pop():
        seconds = {role: column.to_numpy(np.float64) for role, column in parsed.items()}
        least = min(float(np.nanmin(values)) for values in seconds.values())
        log.interpretation["epoch"] = (
            "none: times count from no date, so hours of the day are unknown"
        )
        if least < 0:
            raise fault("time_below_0", least=least)
        return Instants(of=seconds, midnight=None)
    zone = log.options.time_zone or own
    local = {role: column.dt.tz_convert(zone) for role, column in parsed.items()}
    first = min(column.min() for column in local.values())
    last = max(column.max() for column in local.values())
    midnight = first.normalize()
    offsets = [c.dt.tz_localize(None) - parsed[r].dt.tz_localize(None) for r, c in local.items()]
    if pd.concat(offsets).nunique() > 1:
        log.interpretation["clock changes"] = (
            "within the log: durations are true, hours of the day are off from then on"
        )
    n_days = (last.date() - first.date()).days + 1
    log.interpretation["dates"] = f"{first.date()} to {last.date()}, {n_days:,} days"
    return Instants(
        of={
            role: ((column - midnight) / pd.Timedelta(seconds=1)).to_numpy(np.float64)
            for role, column in local.items()
        },
        midnight=midnight.tz_localize(None).isoformat(),
    )


def _parsed(log: Reading, role: str, roles: tuple[str, ...], told: dict[str, str]) -> pd.Series:
    """Return a column as instants in UTC, or as seconds that count from no date."""
    cells, zone = log.cells(role), log.options.time_zone
    if not cells.notna().any():
        raise fault("time_none", column=cells.name, role=role)
    times = cells
    if not pd.api.types.is_datetime64_any_dtype(cells.dtype):
        is_number = pd.api.types.is_numeric_dtype(cells.dtype)
        # Without the colon of a table of rrdtool, brackets, and an interval's end.
        texts = of_texts(
            plain(cells),
            lambda few: few.str.strip(" :[]").str.replace(r"(\d) - \d.*$", r"\1", regex=True),
        )
        some = texts.dropna().head(_FORMS_FROM).drop_duplicates()
        is_compact = not some.empty and some.str.fullmatch(_COMPACT).all()
        is_counted = is_number or some.str.fullmatch(NUMBER).mean() >= 0.5
        if log.options.time_format is None and is_counted and not is_compact:
            return _counted(log, role, cells if is_number else texts, told)
        times = _dated(log, role, roles, texts, told)
    if times.dt.tz is not None:
        told.setdefault("zone", str(times.dt.tz))
        told["time zone"] = f"{zone}, given" if zone else f"{told['zone']}, of the times themselves"
    else:
        if zone is None and not times.notna().any():
            return times.dt.tz_localize("UTC")
        if zone is None:
            log.ask("time_zone", "UTC", where=where(cells.astype("str"), times.notna()))
            told["zone"] = zone = "UTC"
        told["time zone"] = f"{zone}, given"
        utc = times.dt.tz_localize(zone, ambiguous="NaT", nonexistent="NaT")
        changed = utc.isna() & times.notna()
        log.drop(changed, "local time that came twice or never, as clocks were changed")
        times = utc
    us = times.dt.tz_convert("UTC").astype("datetime64[us, UTC]")
    outside = us.notna() & ~us.dt.year.between(1990, 2099)
    expected = "expected a date from 1990 to 2100"
    log.drop(outside, "a date before 1990 or after 2100", cells, expected)
    return us.mask(outside)


def _counted(log: Reading, role: str, cells: pd.Series, told: dict[str, str]) -> pd.Series:
    """Return numbers as instants in UTC if they count since 1970, else as seconds."""
    values, zone = numbers(log, cells, "time"), log.options.time_zone
    known = values.notna()
    least, most = values.quantile([0.05, 0.95]).to_numpy()
    sizes = {unit: TIME_UNITS[unit] for unit in _SINCE_1970}
    fitting = [u for u, us in sizes.items() if least * us >= _SINCE_US and most * us < _UNTIL_US]
    unit, how = unit_of(log, role, TIME_UNITS)
    if unit is None:
        if not fitting and known.any():
            log.ask("unit_of_time", "s", where=where(cells, known))
        unit, how = (fitting or ["s"])[0], "by the size of the numbers"
    if not known.any():
        return values
    us = values * TIME_UNITS[unit]
    is_dated = bool(most * TIME_UNITS[unit] >= _SINCE_US)
    late, early = us >= _UNTIL_US, (us < _CALENDAR_US) & is_dated
    after = f"after the year 2100 in {unit}: expected another unit of time (--unit)"
    before = "before 1990, other rows after 2000: expected all of a column to count from one date"
    log.drop(late, "a time after 2100", cells, after)
    log.drop(early, "a time before 1990", cells, before)
    us = us.mask(late | early)
    if not is_dated:
        told[f"unit of {role}"] = f"{unit}, {how}"
        if zone is not None:
            raise fault("time_zone_of_no_date", zone=zone)
        return us / 1e6
    told[f"unit of {role}"] = f"{unit} since 1970, {how}"
    told["zone"] = "UTC"
    none_stated = "UTC, as none is stated: hours of the day are those of UTC"
    told["time zone"] = none_stated if zone is None else f"{zone}, given"
    return pd.to_datetime(us.round().astype("Int64"), unit="us", utc=True)


def _dated(
    log: Reading, role: str, roles: tuple[str, ...], texts: "pd.Series[str]", told: dict[str, str]
) -> pd.Series:
    """Return texts as instants, with a zone if they have one; NaT where there is none."""
    form, every = log.options.time_format, texts
    # Few of the times of a long log are distinct.
    codes = pd.factorize(every)[0]
    texts = every.drop_duplicates().dropna()
    if form is None and texts.str.match(r"[A-Z][a-z]{2} +\d+ \d\d:\d\d:\d\d", na=True).all():
        form = f"{log.frame.attrs.get('year', 2024)} %b %d %H:%M:%S"
        log.ask("year", form, where=where(texts, texts.notna()))
    if form is not None:
        told["format of time"] = f"{form}, given"
        times, form = _by_format(texts, form)
        expected = f"expected a time as {form!r} says (--time-format)"
    else:
        zones = texts.str.extract(_OFFSET, expand=False)
        zones = zones.where(
            texts.str.contains(r":|T\d", na=False) | bool(texts.str.endswith("Z").all())
        )
        bare = texts.str.replace(_OFFSET, "", regex=True).where(zones.notna(), texts)
        has_zone = zones.notna()
        if has_zone.any() and not has_zone.all():
            naive = np.append(~has_zone, False)[codes]
            log.drop(naive, "no zone", every, "has no zone, other rows do: expected one zone")
            texts = texts.where(has_zone)
        times, told["format of time"], expected = _local(log, roles, bare.where(texts.notna()))
        if has_zone.any():
            times = (times - of_texts(zones, _ahead)).dt.tz_localize("UTC")
            one, *more = sorted(set(zones.dropna()))
            is_single = not more and one[0] in "+-"
            told["zone"] = f"UTC{one[:3]}:{one[3:][-2:] or '00'}" if is_single else "UTC"
    wrong = np.append(texts.notna() & times.isna(), False)[codes]
    log.drop(wrong, f"no {role}", every, expected)
    return pd.Series(times.array.take(codes, allow_fill=True), index=every.index)


def _by_format(texts: "pd.Series[str]", form: str) -> tuple[pd.Series, str]:
    """Return texts as a format has them, before which a year may stand, and the format used."""
    year = re.match(r"(\d{4}) ", form)
    if year and not re.search("%[yYGcx]", form):
        texts, form = year[0] + texts, f"%Y {form[year.end() :]}"
    try:
        return pd.to_datetime(texts, format=form, errors="coerce", utc="%z" in form), form
    except ValueError as problem:
        raise fault("time_format", form=form, problem=problem) from None


def _ahead(zones: "pd.Series[str]") -> pd.Series:
    """Return by how much clocks are ahead of UTC."""
    offsets = zones.replace({"Z": "+00:00", "UTC": "+00:00", "GMT": "+00:00"})
    hours = offsets.str[:3].astype("float64")
    minutes = offsets.str.replace(":", "").str[3:5].replace("", "0").astype("float64")
    return pd.to_timedelta((hours * 60 + np.sign(hours + 0.5) * minutes) * 60e6, unit="us")


def _local(
    log: Reading, roles: tuple[str, ...], texts: "pd.Series[str]"
) -> tuple[pd.Series, str, str]:
    """Return texts without a zone as local times, how they were read, and what is expected."""
    # A comma may stand before fractions of a second.
    texts = texts.str.replace(r"(:\d\d),(\d+)$", r"\1.\2", regex=True)
    expected = "expected year, month and day, or a format of time (--time-format)"
    first = texts.dropna()
    if first.str.match(r"\d{4}-?W\d\d").any():
        parts: pd.DataFrame = texts.str.extract(_BY_WEEK)
        days = parts[0] + "-W" + parts[1] + "-" + parts[2].fillna("1")
        clock = parts[3].replace("", "00:00").fillna("00:00")
        clock = clock.where(clock.str.count(":") != 1, clock + ":00")
        date = pd.to_datetime(days, format="%G-W%V-%u", errors="coerce")
        return date + pd.to_timedelta(clock, errors="coerce"), "ISO 8601, by week", expected
    if first.str.match(_ISO).mean() >= 0.5:
        iso: pd.Series[str] = texts.where(texts.str.match(r"\d{4}", na=False))
        times = pd.to_datetime(iso, format="ISO8601", errors="coerce")
        if not times.notna().equals(iso.notna()):
            for form, spelt in _TO_ISO.items():
                iso = iso.str.replace(form, spelt, regex=True)
            times = pd.to_datetime(iso, format="ISO8601", errors="coerce")
        return times, "ISO 8601", expected
    by_parts = first[first.str.match(_BY_DAY.pattern)]
    if len(by_parts) >= 0.5 * len(first) and len(first):
        form = _form_by_day(log, roles, by_parts)
        expected = f"expected a time as {form!r} says, by the column, or a --time-format"
        times = pd.to_datetime(texts, format=form, errors="coerce")
        return times, f"{form}, by the numbers above 12", expected
    clean = texts.str.replace(r"^(\d+/\w{3}/\d{4}):", r"\1 ", regex=True)
    try:
        times = pd.to_datetime(clean, errors="coerce", format="mixed", dayfirst=True)
    except (ValueError, TypeError):
        times = pd.Series(pd.NaT, index=texts.index)
    if not pd.api.types.is_datetime64_any_dtype(times.dtype) or times.dt.tz is not None:
        times = pd.Series(pd.NaT, index=texts.index)
    is_spelt = texts.str.contains("[A-Za-z]{3}", na=False) & texts.str.contains(r"\d{4}", na=False)
    return times.where(is_spelt).astype("datetime64[us]"), "by the names of the months", expected


def _form_by_day(log: Reading, roles: tuple[str, ...], texts: "pd.Series[str]") -> str:
    """Return the format of dates such as 21.10.2024; asks whether day or month comes first."""
    # All times of a log are written alike.
    columns = (plain(log.cells(role).drop_duplicates()) for role in roles)
    dates = pd.concat([column.str.extract(_BY_DAY.pattern) for column in columns])
    n_first, n_second = (int((dates[k].dropna().astype(int) > 12).sum()) for k in (0, 2))
    forms = {by_day: _format(texts.iloc[0], by_day=by_day) for by_day in (True, False)}
    if not n_first and not n_second:
        about = {"by_day": forms[True], "by_month": forms[False]}
        log.ask("day_or_month", forms[True], where=where(texts, texts.notna()), **about)
        return forms[True]
    return forms[n_first > n_second]


def _format(text: str, *, by_day: bool) -> str:
    """Return the format of a date of day, month and year, and the time of day after it.

    Example:
        >>> _format("21.10.2024 08:15", by_day=True), _format("6/1/24 8:05:00.5 PM", by_day=False)
        ('%d.%m.%Y %H:%M', '%m/%d/%y %I:%M:%S.%f %p')
    """
    found = _BY_DAY.match(text)
    assert found is not None
    sign, rest = found[2], text[found.end() :]
    date = f"%d{sign}%m" if by_day else f"%m{sign}%d"
    half = re.search(r"(?i)\s[ap]m$", rest)
    clock = rest[: half.start()] if half else rest
    for form, spelt in _CLOCKS.items():
        clock = re.sub(form, spelt, clock, count=1)
    clock = f"{clock.replace('%H', '%I')} %p" if half else clock
    return f"{date}{sign}%{'Y' if len(found[4]) == 4 else 'y'}{clock}"


def _check_zone(zone: str) -> None:
    try:
        pd.Timestamp("2024-01-01").tz_localize(zone)
    except (ValueError, KeyError, OSError):
        raise fault("time_zone_unknown", zone=zone) from None
