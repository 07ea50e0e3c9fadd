"""Instants, numbers and states out of the cells of a log.

What has one reading is taken: a number of 13 digits counts ms since 1970, 21.10.2024 begins with
the day. What has two is asked for: a local time without its zone, 1,500 which may be 1.5.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from fnmatch import fnmatch

import numpy as np
import pandas as pd

from fedstale.errors import TraceError, nearest
from fedstale.traces import Array
from fedstale.traces.tables.reading import Reading, seen, where
from fedstale.traces.tables.words import (
    IN_ALL,
    MISSING,
    NO_STATE,
    PER_INTERVAL,
    RATE_UNITS,
    RATES,
    SETS,
    STATE_WORDS,
    TIME_UNITS,
    looks,
    name_and_unit,
    unit_of_text,
)

# Between 2000 and 2100 a number of one size is of one unit.
_SINCE_US, _UNTIL_US = 946_684_800_000_000, 4_102_444_800_000_000
# A number before 1990 counts from the beginning of a log, not from 1970.
_CALENDAR_US = 631_152_000_000_000
_SINCE_1970 = ("s", "ms", "us", "ns")
_NUMBER = r"[-+]?(?:\d+|\d{1,3}(?:[,.'\s]\d{3})+)?(?:[.,]\d*)?(?:[eE][-+]?\d+)?"
_FORMS_FROM = 10_000
"""How many cells tell how times are written."""
_PLUGGED = (0, 1, 2, 4, 8)
_OFFSET = r"(?: ?(Z|UTC|GMT|[+-]\d{2}:?\d{2}|[+-]\d{2}))$"
_BY_DAY = re.compile(r"^(\d{1,2})([-/.])(\d{1,2})\2(\d{4}|\d{2})\b")


def of_texts(cells: pd.Series, means: Callable[["pd.Series[str]"], pd.Series]) -> pd.Series:
    """Return what cells mean as texts, with each distinct one looked at once."""
    codes, distinct = pd.factorize(cells)
    found = means(pd.Series(distinct).astype("str"))
    whole = found.array.take(codes, allow_fill=True)
    return pd.Series(whole, index=cells.index, name=cells.name)


def plain(cells: pd.Series, but: str | None = None) -> "pd.Series[str]":
    """Return cells as texts, NaN where they say nothing, but for one text that does."""

    def means(few: "pd.Series[str]") -> "pd.Series[str]":
        texts = few.str.strip()
        return texts.mask(texts.str.lower().isin(MISSING - {but}))

    return of_texts(cells, means)


def _stated(log: Reading) -> Iterator[tuple[str, str]]:
    """Yield the role of each unit that is stated, empty if it has none, and the unit."""
    for text in log.options.unit:
        role, _, unit = text.rpartition("=")
        if unit not in TIME_UNITS and unit not in RATE_UNITS:
            units = [*TIME_UNITS, *RATE_UNITS]
            raise TraceError(f"unit = {text!r}: expected {nearest(unit, units)}, or ROLE=UNIT")
        yield "downlink" if role == "rate" else role, unit


def check_units(log: Reading) -> None:
    """Raise a TraceError for a unit that is none, or is of no column that is read."""
    seen_units = set()
    for role, unit in _stated(log):
        is_time = unit in TIME_UNITS
        measured = {"start", "end", "duration", "time", "interval"} if is_time else set(RATES)
        if (role, is_time) in seen_units:
            raise TraceError(f"unit = {unit!r}: expected one for {role or 'each of time and rate'}")
        seen_units.add((role, is_time))
        if not measured & {role or column for column in log.of} & log.of.keys():
            raise TraceError(
                f"unit = {unit!r}: expected a unit of a column that is read: {', '.join(log.of)}"
            )


def unit_of(log: Reading, role: str, known: Mapping[str, float]) -> tuple[str | None, str]:
    """Return the unit of a column, None if neither a user nor its name says it, and who does."""
    stated = {of: unit for of, unit in _stated(log) if unit in known}
    # What a unit without a role is of, its kind says; lengths seldom have that of instants.
    is_length = role in ("interval", "duration")
    if (unit := stated.get(role, None if is_length else stated.get(""))) is not None:
        return unit, "given"
    named = name_and_unit(log.name_of(log.of[role]))[1]
    if named in known:
        return named, "by its name"
    return (stated[""], "given") if role == "duration" and "" in stated else (None, "")


def numbers(log: Reading, cells: pd.Series, what: str = "number") -> "pd.Series[float]":
    """Return a column as numbers, NaN where there are none; drops rows that are no number.

    A sign of percent, or one unit after all numbers, is passed over.
    """
    if pd.api.types.is_numeric_dtype(cells.dtype):
        return cells.astype("float64")
    values = pd.to_numeric(cells, errors="coerce").astype("float64")
    if log.options.decimal is None and np.isfinite(values).all():
        return values
    texts = plain(cells).str.replace(r"\s*%$", "", regex=True)
    mark = log.options.decimal or _decimal_mark(log, texts)
    other = "," if mark == "." else "."
    groups = rf"[-+]?(?:\d+|\d{{1,3}}(?:[\s'{other}]\d{{3}})+)(?:\{mark}\d*)?(?:[eE][-+]?\d+)?"
    right = texts.str.fullmatch(rf"{groups}|[-+]?\{mark}\d+", na=False)
    digits = texts.where(right).str.replace(rf"[\s'{other}]", "", regex=True)
    values = pd.to_numeric(digits.str.replace(mark, "."), errors="coerce").astype("float64")
    wrong = (texts.notna() & ~np.isfinite(values)).to_numpy()
    log.drop(wrong, f"no {what}", cells, f"expected a number with the decimal mark {mark!r}")
    return values


def _decimal_mark(log: Reading, texts: "pd.Series[str]") -> str:
    """Return the decimal mark of a column, and ask where it has none for sure."""
    commas = texts[texts.str.contains(",", regex=False, na=False)]
    mark = "."
    if not commas.empty:
        both = commas[commas.str.contains(".", regex=False)]
        if not both.empty:
            mark = "," if (both.str.rfind(",") > both.str.rfind(".")).all() else "."
        elif commas.str.count(",").max() > 1:
            mark = "."
        elif commas.str.fullmatch(r"[-+]?[1-9]\d{0,2},\d{3}").all():
            points = texts.str.contains(".", regex=False, na=False).any()
            if not points:
                log.ask(
                    f"{where(commas, np.array([True]))}: may be a decimal or thousands: expected a "
                    "decimal mark (--decimal), ',' or '.'",
                    "--decimal",
                    ".",
                )
        else:
            mark = ","
    if mark == "," or texts.str.contains(".", regex=False, na=False).any():
        log.told["decimal mark"] = f"{mark!r}, by the numbers"
    return mark


def rates(log: Reading, role: str) -> tuple["pd.Series[float]", str]:
    """Return a column of rates in bit/s, or of counted bits, and its unit; drops bad rows."""
    cells = log.cells(role)
    unit, how = unit_of(log, role, RATE_UNITS)
    size: float | pd.Series[float] = 1.0
    if not pd.api.types.is_numeric_dtype(cells.dtype):
        parts = plain(cells).str.extract(rf"^({_NUMBER})\s*([A-Za-z].*)$")
        if parts[1].notna().mean() > 0.5:
            units = {text: unit_of_text(text) for text in parts[1].dropna().unique()}
            wrong = parts[1].map(lambda text: units.get(text) not in RATE_UNITS, na_action="ignore")
            log.drop(
                wrong.fillna(value=False).to_numpy(bool), f"no {role}", cells, "expected a rate"
            )
            unit, how = "the units", "of its cells"
            known = {text: RATE_UNITS.get(name or "", np.nan) for text, name in units.items()}
            size = parts[1].map(known)
            cells = parts[0].str.strip().rename(log.of[role])
    if unit is None:
        unit, how = "bit/s", ""
        log.ask(
            f"column {log.of[role]!r}: a rate without its unit: expected one (--unit) of "
            f"{', '.join(RATE_UNITS)}",
            "--unit",
            _likely_unit(log, role),
        )
    values = not_negative(log, cells, role) * (size if how == "of its cells" else RATE_UNITS[unit])
    log.told[role] += f", in {unit}, {how}"
    above = (values > 1e15).to_numpy()
    log.drop(above, f"a {role} above 1 Pbit/s", cells, f"{unit}: expected at most 1 Pbit/s")
    return values, unit


def _likely_unit(log: Reading, role: str) -> str:
    """Return the unit that is likely for numbers of that size, and that a counter has."""
    values = pd.to_numeric(plain(log.cells(role).astype("str")), errors="coerce")
    if re.search("octets|bytes|traffic", name_and_unit(log.name_of(log.of[role]))[0]):
        steps = values.groupby(log.cells("device")).diff() if "device" in log.of else values.diff()
        grows = (steps.dropna() >= 0).mean() > 0.9
        unit = (
            IN_ALL
            if grows or "octets" in name_and_unit(log.name_of(log.of[role]))[0]
            else PER_INTERVAL
        )
    else:
        middle = values.median()
        unit = "bit/s" if middle > 1e6 else "kbit/s" if middle > 1e4 else "Mbit/s"
    return unit if role == "downlink" or "downlink" not in log.of else f"{role}={unit}"


def lengths_s(log: Reading, role: str) -> "pd.Series[float]":
    """Return a column of lengths of time in s; drops bad rows."""
    cells = log.cells(role)
    texts = plain(cells)
    if pd.api.types.is_timedelta64_dtype(cells.dtype):
        return cells.dt.total_seconds()
    if texts.str.fullmatch(_NUMBER, na=True).all():
        unit, how = unit_of(log, role, TIME_UNITS)
        if unit is None:
            unit = "s"
            article = "an interval" if role == "interval" else f"a {role}"
            log.ask(
                f"column {log.of[role]!r}: {article} without its unit: expected one (--unit) of "
                f"{', '.join(TIME_UNITS)}, such as {role}=ms",
                "--unit",
                f"{role}=s",
            )
        log.told[role] += f", in {unit}, {how}"
        return not_negative(log, cells, role) * (TIME_UNITS[unit] / 1e6)
    log.told[role] += ", in the units of its cells"
    clean = texts.str.replace(",", " ").str.replace(r"(?i)\bsecs?\b", "s", regex=True)
    spans = pd.to_timedelta(clean, errors="coerce")
    seconds = spans.dt.total_seconds()
    log.drop(
        (texts.notna() & ~(seconds >= 0)).to_numpy(),
        f"no {role}",
        cells,
        "expected a length of time, such as 1h 20m or 01:20:00",
    )
    return seconds


def not_negative(log: Reading, cells: pd.Series, what: str) -> "pd.Series[float]":
    """Return a column of numbers of which none is below 0; drops rows that are."""
    values = numbers(log, cells, what)
    log.drop((values < 0).to_numpy(), f"a {what} below 0", cells, "expected a number >= 0")
    return values


def states(log: Reading, role: str) -> "pd.Series[float]":
    """Return a column of yes and no as 1 and 0, NaN where there is neither."""
    cells = log.cells(role)
    sure_words = SETS["yes"] | SETS["no"]
    yes, no = (SETS[name] | STATE_WORDS[role][k] for k, name in enumerate(("yes", "no")))
    texts = of_texts(
        plain(cells, "none"),
        lambda few: few.str.lower().str.replace(r"(\d)\.0+$", r"\1", regex=True),
    )
    spelt = of_texts(texts, lambda few: few.str.replace(r"[\s_-]+", "_", regex=True))
    known = spelt.isin(yes | no)
    values = of_texts(texts, lambda few: pd.to_numeric(few, errors="coerce"))
    if role == "plugged" and (values.isin(_PLUGGED) | texts.isna()).all():
        # Android numbers what a device is plugged into.
        return (values > 0).astype("float64").where(values.notna())
    stated = log.options.online_values
    others = [other for other in STATE_WORDS if other != role and other in log.of]
    if stated and not (others and (known | texts.isna()).all() and not texts.isin(stated).any()):
        return _as_stated(log, cells, texts)
    if (known | texts.isna()).all():
        return spelt.isin(yes).astype("float64").where(known)
    if (values.notna() | texts.isna()).all():
        likely = ""
        if role == "charging" and values.dropna().isin(range(1, 6)).all():
            likely = "2,5"
        elif "loss" in str(cells.name).lower():
            likely = "<100"
        elif values.min() == 0 and values.nunique() <= 12:
            likely = ">0"
        log.ask(
            f"column {cells.name!r}: numbers from {values.min():g} to {values.max():g}, of which "
            f"most are {seen(texts)}: expected which mean {role} (--online-values), such as "
            "'1,2', '>0' or '<100'",
            "--online-values" if likely else None,
            likely,
        )
        return (values > 0).astype("float64").where(values.notna())
    # Lines of a log say it in a sentence.
    words = texts.str.replace("_", " ")
    says = [_says(words, known - sure_words) for known in (yes, no)]
    sure = (says[0] != says[1]) & ~_says(words, {"not", "no", "never", "lost"})
    if (sure | texts.isna()).all() or (texts.nunique() > 12 and sure.mean() >= 0.5):
        log.told[role] += f", by its words: {seen(texts[says[0] & sure])} are online"
        return says[0].astype("float64").where(sure)
    likely_yes = [v for v in texts.dropna().unique() if v.replace(" ", "_") in yes]
    if role == "charging" and "full" in set(texts):
        likely_yes.append("full")
    # Where some have no reply, the numbers are those of the others.
    rest = texts[~known].dropna()
    if looks(texts) == "reply" and not likely_yes:
        ends = set(rest.str.replace(r"^[-+\d.,\s]+", "", regex=True))
        likely_yes = [f"* {end}" if end else ">=0" for end in sorted(ends)]
    unknown = (texts.notna() & ~known).to_numpy()
    log.ask(
        f"{where(cells, unknown)}: expected true or false for {role}, or online values "
        f"(--online-values), or {role}=none if it says something else; the column has "
        f"{seen(texts)}",
        "--online-values" if likely_yes else None,
        ",".join(likely_yes),
    )
    return spelt.isin(yes).astype("float64").where(texts.notna())


def _says(texts: "pd.Series[str]", words: Set[str]) -> "pd.Series[bool]":
    return texts.str.contains(rf"\b(?:{'|'.join(sorted(words))})\b", na=False).astype(bool)


def _as_stated(log: Reading, cells: pd.Series, texts: "pd.Series[str]") -> "pd.Series[float]":
    """Return a column of states by what is stated to be online."""
    wanted = [value.strip().lower() for value in log.options.online_values]
    on = pd.Series(data=False, index=texts.index)
    for value in wanted:
        if found := re.fullmatch(r"([<>]=?)\s*(-?[\d.]+)", value):
            # A word that no reply came is no number, and is below none.
            size, limit = numbers(log, cells.mask(texts.isin(NO_STATE))), float(found[2])
            on |= {"<": size < limit, "<=": size <= limit, ">": size > limit, ">=": size >= limit}[
                found[1]
            ]
        else:
            on |= texts.isin([v for v in texts.dropna().unique() if fnmatch(v, value)])
    if not on.any():
        raise TraceError(
            f"online values (--online-values) {', '.join(log.options.online_values)}: none is in "
            f"column {cells.name!r}, which has {seen(texts)}"
        )
    return on.astype("float64").where(texts.notna())


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
    told: dict[str, str] = {}
    if log.options.time_zone is not None:
        _check_zone(log.options.time_zone)
    parsed = {role: _parsed(log, role, roles, told) for role in roles}
    own = told.pop("zone", None)
    log.told.update(told)
    dated = {role: pd.api.types.is_datetime64_any_dtype(s.dtype) for role, s in parsed.items()}
    if len(set(dated.values())) > 1:
        names = " and ".join(log.of[role] for role in roles)
        raise TraceError(f"{names}: one is dated, the other is not")
    if not any(column.notna().any() for column in parsed.values()):
        raise TraceError(f"{' and '.join(log.of[role] for role in roles)}: hold no time at all")
    if not all(dated.values()):
        seconds = {role: column.to_numpy(np.float64) for role, column in parsed.items()}
        least = min(float(np.nanmin(values)) for values in seconds.values())
        log.told["epoch"] = "none: times count from no date, so hours of the day are unknown"
        if least < 0:
            raise TraceError(f"times begin at {least:g} s: expected times from 0 on")
        return Instants(of=seconds, midnight=None)
    zone = log.options.time_zone or own
    local = {role: column.dt.tz_convert(zone) for role, column in parsed.items()}
    first = min(column.min() for column in local.values())
    last = max(column.max() for column in local.values())
    midnight = first.normalize()
    offsets = pd.concat(
        [c.dt.tz_localize(None) - parsed[r].dt.tz_localize(None) for r, c in local.items()]
    )
    if offsets.nunique() > 1:
        log.told["clock changes"] = (
            "within the log: durations are true, hours of the day are off from then on"
        )
    n_days = (last.date() - first.date()).days + 1
    log.told["dates"] = f"{first.date()} to {last.date()}, {n_days:,} days"
    return Instants(
        of={
            role: ((column - midnight) / pd.Timedelta(seconds=1)).to_numpy(np.float64)
            for role, column in local.items()
        },
        midnight=midnight.tz_localize(None).isoformat(),
    )


def _parsed(log: Reading, role: str, roles: tuple[str, ...], told: dict[str, str]) -> pd.Series:
    """Return a column as instants in UTC, or as seconds that count from no date."""
    cells, options = log.cells(role), log.options
    if not cells.notna().any():
        raise TraceError(f"column {cells.name!r}: holds no {role}")
    times = cells
    if not pd.api.types.is_datetime64_any_dtype(cells.dtype):
        is_number = pd.api.types.is_numeric_dtype(cells.dtype)
        texts = of_texts(plain(cells), _bare)
        some = texts.dropna().head(_FORMS_FROM).drop_duplicates()
        compact = r"(?:19|20)\d{2}[01]\d[0-3]\d(?:[0-2]\d[0-5]\d[0-5]\d)?"
        if some.empty or not some.str.fullmatch(compact).all():
            is_counted = is_number or some.str.fullmatch(_NUMBER).mean() >= 0.5
            if options.time_format is None and is_counted:
                return _counted(log, role, cells if is_number else texts, told)
        times = _dated(log, role, roles, texts, told)
    zone = options.time_zone
    if times.dt.tz is not None:
        told.setdefault("zone", str(times.dt.tz))
        told["time zone"] = f"{zone}, given" if zone else f"{told['zone']}, of the times themselves"
    else:
        if zone is None and not times.notna().any():
            return times.dt.tz_localize("UTC")
        if zone is None:
            log.ask(
                f"{where(cells.astype('str'), times.notna().to_numpy())}: a local time without its "
                "zone: expected a time zone (--time-zone), such as Europe/Oslo or UTC",
                "--time-zone",
                "UTC",
            )
            told["zone"] = zone = "UTC"
        told["time zone"] = f"{zone}, given"
        utc = times.dt.tz_localize(zone, ambiguous="NaT", nonexistent="NaT")
        changed = (utc.isna() & times.notna()).to_numpy()
        log.drop(changed, "local time that came twice or never, as clocks were changed")
        times = utc
    us = times.dt.tz_convert("UTC").astype("datetime64[us, UTC]")
    outside = us.notna() & ~us.dt.year.between(1990, 2099)
    log.drop(
        outside.to_numpy(),
        "a date before 1990 or after 2100",
        cells,
        "expected a date from 1990 to 2100",
    )
    return us.mask(outside)


def _bare(texts: "pd.Series[str]") -> "pd.Series[str]":
    """Return times without the colon of a table of rrdtool, brackets, and an interval's end."""
    return texts.str.strip(" :[]").str.replace(r"(\d) - \d.*$", r"\1", regex=True)


def _counted(log: Reading, role: str, cells: pd.Series, told: dict[str, str]) -> pd.Series:
    """Return numbers as instants in UTC if they count since 1970, else as seconds."""
    values = numbers(log, cells, "time")
    middle = values.quantile([0.05, 0.95]).to_numpy()
    fitting = [
        unit
        for unit in _SINCE_1970
        if np.all(
            (middle * TIME_UNITS[unit] >= _SINCE_US) & (middle * TIME_UNITS[unit] < _UNTIL_US)
        )
    ]
    unit, how = unit_of(log, role, TIME_UNITS)
    if unit is None:
        if not fitting and values.notna().any():
            log.ask(
                f"{where(cells, values.notna().to_numpy())}: a number without its unit: expected "
                "a unit of time (--unit), s, ms, us or ns, or a format (--time-format)",
                "--unit",
                "s",
            )
        unit, how = (fitting or ["s"])[0], "by the size of the numbers"
    if not values.notna().any():
        return values
    us = values * TIME_UNITS[unit]
    is_dated = bool(middle[1] * TIME_UNITS[unit] >= _SINCE_US)
    late, early = (us >= _UNTIL_US).to_numpy(), (us < _CALENDAR_US).to_numpy() & is_dated
    after = f"after the year 2100 in {unit}: expected another unit of time (--unit)"
    before = "before 1990, other rows after 2000: expected all of a column to count from one date"
    log.drop(late, "a time after 2100", cells, after)
    log.drop(early, "a time before 1990", cells, before)
    us = us.mask(late | early)
    if not is_dated:
        told[f"unit of {role}"] = f"{unit}, {how}"
        if log.options.time_zone is not None:
            raise TraceError(
                f"time_zone = {log.options.time_zone!r}: expected none, since times count from no "
                "date"
            )
        return us / 1e6
    told[f"unit of {role}"] = f"{unit} since 1970, {how}"
    told["zone"] = "UTC"
    told["time zone"] = (
        "UTC, as none is stated: hours of the day are those of UTC"
        if log.options.time_zone is None
        else f"{log.options.time_zone}, given"
    )
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
        log.ask(
            f"{where(texts, texts.notna().to_numpy())}: a time without its year: expected a format "
            "of time (--time-format) with the year before it, such as '2024 %b %d %H:%M:%S'",
            "--time-format",
            form,
        )
    if form is not None:
        told["format of time"] = f"{form}, given"
        found = re.match(r"(\d{4}) ", form)
        whole = found[0] + texts if found and not re.search("%[yYGcx]", form) else texts
        if found and whole is not texts:
            form = f"%Y {form[found.end() :]}"
        try:
            times = pd.to_datetime(whole, format=form, errors="coerce", utc="%z" in form)
        except ValueError as problem:
            raise TraceError(f"time_format = {form!r}: {problem}") from None
        expected = f"expected a time as {form!r} says (--time-format)"
    else:
        if texts.str.endswith("Z").all():
            zones, bare = pd.Series("Z", index=texts.index), texts.str.slice(0, -1)
        else:
            zones = texts.str.extract(_OFFSET, expand=False)
            zones = zones.where(texts.str.contains(r":|T\d", na=False))
            bare = texts.str.replace(_OFFSET, "", regex=True).where(zones.notna(), texts)
        has_zone = zones.notna()
        if has_zone.any() and (texts.notna() & ~has_zone).any():
            naive = np.append(~has_zone, False)[codes]
            log.drop(naive, "no zone", every, "has no zone, other rows do: expected one zone")
            texts = texts.where(has_zone)
        times, told["format of time"], expected = _local(log, roles, bare.where(texts.notna()))
        if has_zone.any():
            ahead = of_texts(zones, _ahead)
            times = (times - ahead).dt.tz_localize("UTC")
            distinct = sorted(set(zones.dropna()))
            single = len(distinct) == 1 and distinct[0][0] in "+-"
            told["zone"] = (
                f"UTC{distinct[0][:3]}:{distinct[0][3:][-2:] or '00'}" if single else "UTC"
            )
    wrong = np.append(texts.notna() & times.isna(), False)[codes]
    log.drop(wrong, f"no {role}", every, expected)
    return pd.Series(times.array.take(codes, allow_fill=True), index=every.index)


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
    if texts.str.contains(",", regex=False, na=False).any():
        texts = texts.str.replace(r"(:\d\d),(\d+)$", r"\1.\2", regex=True)
    expected = "expected year, month and day, or a format of time (--time-format)"
    first = texts.dropna()
    week = first.str.match(r"\d{4}-?W\d\d")
    if week.any():
        parts: pd.DataFrame = texts.str.extract(r"^(\d{4})-?W(\d\d)-?(\d)?(?:[T ]?(.*))?$")
        days = parts[0] + "-W" + parts[1] + "-" + parts[2].fillna("1")
        date = pd.to_datetime(days, format="%G-W%V-%u", errors="coerce")
        clock = parts[3].replace("", "00:00").fillna("00:00")
        clock = clock.where(clock.str.count(":") != 1, clock + ":00")
        return date + pd.to_timedelta(clock, errors="coerce"), "ISO 8601, by week", expected
    numeric = first.str.match(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{8}|\d{14}$")
    if numeric.mean() >= 0.5:
        iso: pd.Series[str] = texts.where(texts.str.match(r"\d{4}", na=False))
        times = pd.to_datetime(iso, format="ISO8601", errors="coerce")
        if times.notna().equals(iso.notna()):
            return times, "ISO 8601", expected
        iso = iso.str.replace(r"^(\d{4})[/.](\d{1,2})[/.]", r"\1-\2-", regex=True)
        iso = iso.str.replace(r"_(\d\d)[.:](\d\d)[.:](\d\d)", r" \1:\2:\3", regex=True)
        iso = iso.str.replace(r"^(\d{8})(\d{6})$", r"\1T\2", regex=True)
        return pd.to_datetime(iso, format="ISO8601", errors="coerce"), "ISO 8601", expected
    by_parts: pd.DataFrame = first.str.extract(_BY_DAY.pattern)
    if by_parts[0].notna().mean() >= 0.5:
        dated = first[by_parts[0].notna()].iloc[0]
        # All times of a log are written alike.
        dates = pd.concat(
            [
                plain(log.cells(role).drop_duplicates()).str.extract(_BY_DAY.pattern)
                for role in roles
            ]
        )
        one, two = (dates[k].dropna().astype(int) for k in (0, 2))
        by_day, by_month = bool((one > 12).any()), bool((two > 12).any())
        if by_day and by_month:
            by_day = bool((one > 12).sum() > (two > 12).sum())
        elif not by_day and not by_month:
            log.ask(
                f"{where(first, by_parts[0].notna().to_numpy())}: may be the day or the month that "
                "comes first: expected a format of time (--time-format), "
                f"{_format(dated, by_day=True)!r} or "
                f"{_format(dated, by_day=False)!r}",
                "--time-format",
                _format(dated, by_day=True),
            )
            by_day = True
        form = _format(dated, by_day=by_day)
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
    spelt = texts.str.contains("[A-Za-z]{3}", na=False) & texts.str.contains(r"\d{4}", na=False)
    return times.where(spelt).astype("datetime64[us]"), "by the names of the months", expected


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
    clock = re.sub(r"\d+:\d+:\d+", "%H:%M:%S", clock, count=1)
    clock = re.sub(r"\d+:\d+", "%H:%M", clock, count=1)
    clock = re.sub(r"(?<=%S)\.\d+", ".%f", clock)
    clock = clock.replace("%H", "%I") if half else clock
    return f"{date}{sign}%{'Y' if len(found[4]) == 4 else 'y'}{clock}{' %p' if half else ''}"


def _check_zone(zone: str) -> None:
    try:
        pd.Timestamp("2024-01-01").tz_localize(zone)
    except (ValueError, KeyError, OSError):
        raise TraceError(
            f"time_zone = {zone!r}: expected an IANA name, such as Europe/Oslo or UTC"
        ) from None
