"""Numbers, rates, lengths of time and states out of the cells of a log.

What has one reading is taken. What has two is asked for: 1,500 which may be 1.5, a rate without its
unit, a word that is neither yes nor no.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Set
from fnmatch import fnmatch

import numpy as np
import pandas as pd

from fedstale.errors import nearest
from fedstale.traces.tables.reading import Reading, fault, seen, where
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

NUMBER = r"[-+]?(?:\d+|\d{1,3}(?:[,.'\s]\d{3})+)?(?:[.,]\d*)?(?:[eE][-+]?\d+)?"
_PLUGGED = (0, 1, 2, 4, 8)
"""Android's numbers of what a device is plugged into."""
_COMPARISONS: dict[str, Callable[["pd.Series[float]", float], "pd.Series[bool]"]] = {
    "<": pd.Series.lt,
    "<=": pd.Series.le,
    ">": pd.Series.gt,
    ">=": pd.Series.ge,
}


def of_texts(cells: pd.Series, means: Callable[["pd.Series[str]"], pd.Series]) -> pd.Series:
    """Translate cells as texts, with each distinct one looked at once."""
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
        units = [*TIME_UNITS, *RATE_UNITS]
        if unit not in units:
            raise fault("unit_unknown", text=text, near=nearest(unit, units))
        yield "downlink" if role == "rate" else role, unit


def check_units(log: Reading) -> None:
    """Raise a TraceError for a unit that is none, or is of no column that is read."""
    known = set()
    for role, unit in _stated(log):
        is_time = unit in TIME_UNITS
        measured = {"start", "end", "duration", "time", "interval"} if is_time else set(RATES)
        if (role, is_time) in known:
            raise fault("unit_twice", unit=unit, role=role or "each of time and rate")
        known.add((role, is_time))
        if not measured & {role or column for column in log.of} & log.of.keys():
            raise fault("unit_of_none", unit=unit, columns=", ".join(log.of))


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
    wrong = texts.notna() & ~np.isfinite(values)
    log.drop(wrong, f"no {what}", cells, f"expected a number with the decimal mark {mark!r}")
    return values


def _decimal_mark(log: Reading, texts: "pd.Series[str]") -> str:
    """Return the decimal mark of a column, and ask where it has none for sure."""
    commas = texts[texts.str.contains(",", regex=False, na=False)]
    has_point = bool(texts.str.contains(".", regex=False, na=False).any())
    both = commas[commas.str.contains(".", regex=False).astype(bool)]
    mark = "."
    if not both.empty:
        mark = "," if (both.str.rfind(",") > both.str.rfind(".")).all() else "."
    elif not commas.empty and commas.str.count(",").max() < 2:
        if not commas.str.fullmatch(r"[-+]?[1-9]\d{0,2},\d{3}").all():
            mark = ","
        elif not has_point:
            log.ask("decimal", ".", where=where(commas, np.array([True])))
    if mark == "," or has_point:
        log.interpretation["decimal mark"] = f"{mark!r}, by the numbers"
    return mark


def rates(log: Reading, role: str) -> tuple["pd.Series[float]", str]:
    """Return a column of rates in bit/s, or of counted bits, and its unit; drops bad rows."""
    cells, column = log.cells(role), log.of[role]
    unit, how = unit_of(log, role, RATE_UNITS)
    size: float | pd.Series[float] | None = None
    if not pd.api.types.is_numeric_dtype(cells.dtype):
        parts = plain(cells).str.extract(rf"^({NUMBER})\s*([A-Za-z].*)$")
        if parts[1].notna().mean() > 0.5:
            units = {text: unit_of_text(text) for text in parts[1].dropna().unique()}
            sizes = {text: RATE_UNITS.get(name or "", np.nan) for text, name in units.items()}
            size, unit, how = parts[1].map(sizes), "the units", "of its cells"
            log.drop(parts[1].notna() & size.isna(), f"no {role}", cells, "expected a rate")
            cells = parts[0].str.strip().rename(column)
    if unit is None:
        unit, how = "bit/s", ""
        log.ask("unit_of_rate", _likely_unit(log, role), column=column, units=", ".join(RATE_UNITS))
    values = not_negative(log, cells, role) * (RATE_UNITS[unit] if size is None else size)
    log.interpretation[role] += f", in {unit}, {how}"
    expected = f"{unit}: expected at most 1 Pbit/s"
    log.drop(values > 1e15, f"a {role} above 1 Pbit/s", cells, expected)
    return values, unit


def _likely_unit(log: Reading, role: str) -> str:
    """Return the unit that is likely for numbers of that size, and that a counter has."""
    values = pd.to_numeric(plain(log.cells(role).astype("str")), errors="coerce")
    name = name_and_unit(log.name_of(log.of[role]))[0]
    if re.search("octets|bytes|traffic", name):
        steps = values.groupby(log.cells("device")).diff() if "device" in log.of else values.diff()
        grows = (steps.dropna() >= 0).mean() > 0.9
        unit = IN_ALL if grows or "octets" in name else PER_INTERVAL
    else:
        middle = values.median()
        unit = "bit/s" if middle > 1e6 else "kbit/s" if middle > 1e4 else "Mbit/s"
    return unit if role == "downlink" or "downlink" not in log.of else f"{role}={unit}"


def lengths_s(log: Reading, role: str) -> "pd.Series[float]":
    """Return a column of lengths of time in s; drops bad rows."""
    cells, column = log.cells(role), log.of[role]
    if pd.api.types.is_timedelta64_dtype(cells.dtype):
        return cells.dt.total_seconds()
    texts = plain(cells)
    if texts.str.fullmatch(NUMBER, na=True).all():
        unit, how = unit_of(log, role, TIME_UNITS)
        if unit is None:
            unit, what = "s", "an interval" if role == "interval" else f"a {role}"
            about = {"column": column, "what": what, "units": ", ".join(TIME_UNITS), "role": role}
            log.ask("unit_of_length", f"{role}=s", **about)
        log.interpretation[role] += f", in {unit}, {how}"
        return not_negative(log, cells, role) * (TIME_UNITS[unit] / 1e6)
    log.interpretation[role] += ", in the units of its cells"
    clean = texts.str.replace(",", " ").str.replace(r"(?i)\bsecs?\b", "s", regex=True)
    seconds = pd.to_timedelta(clean, errors="coerce").dt.total_seconds()
    expected = "expected a length of time, such as 1h 20m or 01:20:00"
    log.drop(texts.notna() & ~(seconds >= 0), f"no {role}", cells, expected)
    return seconds


def not_negative(log: Reading, cells: pd.Series, what: str) -> "pd.Series[float]":
    """Return a column of numbers of which none is below 0; drops rows that are."""
    values = numbers(log, cells, what)
    log.drop(values < 0, f"a {what} below 0", cells, "expected a number >= 0")
    return values


def states(log: Reading, role: str) -> "pd.Series[float]":
    """Return a column of yes and no as 1 and 0, NaN where there is neither."""
    cells = log.cells(role)
    yes, no = SETS["yes"] | STATE_WORDS[role][0], SETS["no"] | STATE_WORDS[role][1]
    texts = of_texts(
        plain(cells, "none"),
        lambda few: few.str.lower().str.replace(r"(\d)\.0+$", r"\1", regex=True),
    )
    is_empty = texts.isna()
    spelt = of_texts(texts, lambda few: few.str.replace(r"[\s_-]+", "_", regex=True))
    known = spelt.isin(yes | no)
    values = of_texts(texts, lambda few: pd.to_numeric(few, errors="coerce"))
    above = (values > 0).astype("float64").where(values.notna())
    if role == "plugged" and (values.isin(_PLUGGED) | is_empty).all():
        return above
    stated = log.options.online_values
    others = [other for other in STATE_WORDS if other != role and other in log.of]
    if stated and not (others and (known | is_empty).all() and not texts.isin(stated).any()):
        return _as_stated(log, cells, texts)
    is_yes = spelt.isin(yes).astype("float64")
    if (known | is_empty).all():
        return is_yes.where(known)
    if (values.notna() | is_empty).all():
        least, most = values.min(), values.max()
        guesses = {
            "2,5": role == "charging" and values.dropna().isin(range(1, 6)).all(),
            "<100": "loss" in str(cells.name).lower(),
            ">0": least == 0 and values.nunique() <= 12,
        }
        likely = next((text for text, is_likely in guesses.items() if is_likely), None)
        about = {"column": cells.name, "least": least, "most": most, "seen": seen(texts)}
        log.ask("online_numbers", likely, role=role, **about)
        return above
    # Lines of a log say it in a sentence.
    words = texts.str.replace("_", " ")
    says = [_says(words, known - SETS["yes"] - SETS["no"]) for known in (yes, no)]
    sure = (says[0] != says[1]) & ~_says(words, {"not", "no", "never", "lost"})
    if (sure | is_empty).all() or (texts.nunique() > 12 and sure.mean() >= 0.5):
        log.interpretation[role] += f", by its words: {seen(texts[says[0] & sure])} are online"
        return says[0].astype("float64").where(sure)
    likely_yes = [v for v in texts.dropna().unique() if v.replace(" ", "_") in yes]
    if role == "charging" and "full" in set(texts):
        likely_yes.append("full")
    # Where some have no reply, the numbers are those of the others.
    if looks(texts) == "reply" and not likely_yes:
        ends = set(texts[~known].dropna().str.replace(r"^[-+\d.,\s]+", "", regex=True))
        likely_yes = [f"* {end}" if end else ">=0" for end in sorted(ends)]
    unknown = where(cells, texts.notna() & ~known)
    log.ask(
        "online_words", ",".join(likely_yes) or None, where=unknown, role=role, seen=seen(texts)
    )
    return is_yes.where(~is_empty)


def _says(texts: "pd.Series[str]", words: Set[str]) -> "pd.Series[bool]":
    return texts.str.contains(rf"\b(?:{'|'.join(sorted(words))})\b", na=False).astype(bool)


def _as_stated(log: Reading, cells: pd.Series, texts: "pd.Series[str]") -> "pd.Series[float]":
    """Return a column of states by what is stated to be online."""
    on, stated = pd.Series(data=False, index=texts.index), log.options.online_values
    for value in (text.strip().lower() for text in stated):
        if found := re.fullmatch(r"([<>]=?)\s*(-?[\d.]+)", value):
            # A word that no reply came is no number, and is below none.
            size = numbers(log, cells.mask(texts.isin(NO_STATE)))
            on |= _COMPARISONS[found[1]](size, float(found[2]))
        else:
            on |= texts.isin([v for v in texts.dropna().unique() if fnmatch(v, value)])
    if not on.any():
        about = {"values": ", ".join(stated), "column": cells.name, "seen": seen(texts)}
        raise fault("online_none", **about)
    return on.astype("float64").where(texts.notna())
