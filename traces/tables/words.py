"""The words of logs: units, names of columns, words for states, and how cells are written.

The tables are in words.toml. A unit at the end of a name, and what is left, tell `ts_ms`,
`deviceUUID` and `rxkB/s` apart by rule.
"""

import re
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

_TABLES: dict[str, Any] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)


def _set(text: str) -> frozenset[str]:
    """Return the words of a text, with those of the sets that it names."""
    words = text.split()
    own = {word for word in words if word[0] != "@"}
    return frozenset(own.union(*(SETS[word[1:]] for word in words if word[0] == "@")))


SETS: dict[str, frozenset[str]] = {}
for _name, _text in _TABLES["sets"].items():
    SETS[_name] = _set(_text)
NAMES = {role: _set(names) for role, names in _TABLES["names"].items()}
"""Names of columns that are known, by role."""
STATE_WORDS = {
    role: (_set(words["yes"]), _set(words["no"])) for role, words in _TABLES["states"].items()
}
"""Words of each role that mean so, and that mean not so."""
NO_STATE = frozenset[str]().union(*(no for _, no in STATE_WORDS.values()))
BATTERY_STATES = SETS["battery_states"] | {"not charging"}
MISSING = SETS["missing"] | {""}
"""Texts of a cell that says nothing, in lower case."""
LINK = SETS["down"] | SETS["up"]

RATES = ("downlink", "uplink")
STATES = ("online", "charging", "plugged")
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

_TIME_OF = {spelt: unit for unit, names in _TABLES["times"].items() for spelt in names.split()}
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
    # Rates are spelt like nothing else, and need nothing before them.
    ending = r"(?<=[a-zA-Z0-9)\]])(?=[\s_.\[(-])", r"(?<=[a-z0-9])(?=[A-Z])", _RATE.pattern + "$"
    for end in sorted({found.start() for form in ending for found in re.finditer(form, column)}):
        unit = unit_of_text(column[end:].lstrip(" _.-")) if end else None
        if unit is not None:
            column = column[:end]
            break
    column = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", column).lower()
    return re.sub(r"[^a-z0-9]+", "_", column).strip("_"), unit


def words_of(column: str) -> set[str]:
    """Return the words of a column's name; a sign of percent is one."""
    return {*name_and_unit(column)[0].split("_")} | ({"percent"} if "%" in column else set())


def role_of(column: str) -> str | None:
    """Return the role that the words of a name have by rule."""
    (name, unit), words = name_and_unit(column), words_of(column)
    if direction := _direction(words, is_rate=unit in RATE_UNITS):
        return direction
    return next((role for role, rule in _RULES if rule(name, words)), None)


class _Rule:
    """A rule of words.toml."""

    def __init__(self, rule: dict[str, Any]) -> None:
        self._has = [_set(text) for text in rule.get("has", ())]
        self._not = _set(rule.get("not", ""))
        self._beside = _set(rule["beside"]) if "beside" in rule else None
        either = {name: "|".join(sorted(words)) for name, words in SETS.items()}
        form = re.sub(r"@(\w+)", lambda found: either[found[1]], rule.get("form", ""))
        self._form = re.compile(form)

    def __call__(self, name: str, words: set[str]) -> bool:
        return (
            all(words & one_of for one_of in self._has)
            and not words & self._not
            and (self._beside is None or len(words - self._beside) < 2)
            and self._form.search(name) is not None
        )


_RULES = [(rule["role"], _Rule(rule)) for rule in _TABLES["rule"]]


def _direction(words: set[str], *, is_rate: bool) -> str | None:
    """Find the direction of a link in words that are of its traffic."""
    is_carried = is_rate or bool(words & SETS["carried"])
    if (is_carried or words & LINK) and not words & SETS["not_carried"]:
        if words & SETS["up"] or (is_carried and words & SETS["out"]):
            return "uplink"
        if words & (SETS["down"] | SETS["in"]) or is_rate or words - SETS["counted"]:
            return "downlink"
    return None


def is_datum(cells: pd.Series) -> pd.Series:
    """Return which cells look like a number or a time, and not like a name."""
    texts = cells.astype("str").str.strip()
    month = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
    form = rf"(?i:[-+]?[.,]?\d|(?:(?:mon|tue|wed|thu|fri|sat|sun)\w*,? )?(?:{month})\w* +\d)"
    return texts.str.match(form + r"|\w{3}, \d", na=False)


_SAID = SETS["yes"] | SETS["no"] | BATTERY_STATES | NO_STATE
_SAID = _SAID.union(*(yes for yes, _ in STATE_WORDS.values()))
_LOOKS = {
    look: "|".join(forms).replace("@said", "|".join(re.escape(word) for word in sorted(_SAID)))
    for look, forms in _TABLES["looks"].items()
}


def texts_of(cells: pd.Series) -> "pd.Series[str]":
    """Return the cells that are not empty, as words are compared."""
    return cells.dropna().astype("str").str.strip().str.lower()


def looks(cells: pd.Series) -> str:
    """Return the look of cells: state, instant, clock, length, reply, number or word."""
    if pd.api.types.is_datetime64_any_dtype(cells.dtype):
        return "instant"
    if pd.api.types.is_timedelta64_dtype(cells.dtype):
        return "length"
    texts = texts_of(cells).drop_duplicates()
    if texts.empty:
        return "word"
    for look, form in _LOOKS.items():
        if texts.str.fullmatch(form).mean() >= (1.0 if look == "state" else 0.9):
            return look
    # A time that a thing took to answer, or a word that it did not.
    is_number, is_lost = is_datum(texts), texts.isin(NO_STATE)
    if is_lost.any() and (is_number | is_lost).all():
        return "reply"
    return "number" if is_number.mean() > 0.9 else "word"
