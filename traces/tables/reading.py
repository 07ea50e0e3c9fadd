"""What is known, asked and dropped while a log is read, so that all of it is said at once.

What has two readings that differ in outcome is asked for. Reading then goes on with an answer that
is likely, to find what else there is to ask; the answers are the command to type next. Cells that
cannot be read are dropped and counted while they are few, and are faults where they are many.
"""

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pandas as pd

from fedstale.errors import TraceError
from fedstale.traces import Mask
from fedstale.traces.tables.words import looks

Kind = Literal["windows", "samples", "battery", "rates", "pings", "nodes"]

_MOST_BAD = 0.05
"""Share of the rows that may be dropped as bad; a log of more is not what it was taken for."""
_SHOWN = 6
_SAMPLE = 1000


_SENTENCES: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("sentences.toml").read_text(encoding="utf-8")
)


def fault(key: str, /, **about: object) -> TraceError:
    """Return the error of which sentences.toml has the words."""
    return TraceError(_SENTENCES[key]["text"].format(**about))


class UnclearLogError(TraceError):
    """A log that can be read in several ways, with the options that would say which."""

    said: tuple[str, ...]
    """What is unclear or wrong, a sentence each."""
    words: tuple[str, ...]
    """Options of the command and their values, the likeliest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOptions:
    """What a user states of a log in a table; None, or nothing, means not stated."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Column of each role: device, start, end, duration, time, online, charging, plugged, level,
    downlink (or rate), uplink, interval, speed. Two joined by "+" are a date and a time of day,
    "*" is each column that has no other role and is named by its device, "none" is no column."""
    kind: str | None = None
    """One of windows, samples, battery, rates, pings and nodes."""
    unit: str | Sequence[str] = ()
    """Units of time (s, ms, us, ns, min, h, d) and of rates (bit/s or B/s with k, M or G,
    bytes/interval, bytes/total), each alone or as ROLE=UNIT."""
    time_zone: str | None = None
    """IANA name of the zone of the devices' clocks, such as Europe/Oslo."""
    time_format: str | None = None
    """Format of texts of time, as of strptime; a year may stand before it where texts have none."""
    device: str | None = None
    """Id of the one device that the whole table is of."""
    only: str | Sequence[str] = ()
    """COLUMN=VALUE of the rows that are read; several must all hold."""
    online_values: str | Sequence[str] = ()
    """What counts as online, charging or plugged, as texts or as a comparison such as ">0";
    anything else then does not."""
    min_level: float | None = None
    """Level of the battery from which on a device is online, in the column's own unit."""
    max_gap_s: float | None = None
    """For how long a reading holds at most, in s; inf for until the next one."""
    compute_unit: str | None = None
    """What one work unit of a column of speeds is, in words."""
    decimal: str | None = None
    """Decimal mark of numbers in texts, "." or ","."""

    def __post_init__(self) -> None:
        for name in ("unit", "only", "online_values"):
            value = getattr(self, name)
            several = (value,) if isinstance(value, str) else tuple(value)
            object.__setattr__(self, name, several)
        wrong = {
            "kind": (self.kind in (None, *get_args(Kind)), f"one of {', '.join(get_args(Kind))}"),
            "decimal": (self.decimal in (None, ".", ","), "'.' or ','"),
            "max_gap_s": (self.max_gap_s is None or self.max_gap_s > 0, "a time > 0 s"),
        }
        for name, (is_right, expected) in wrong.items():
            if not is_right:
                raise fault("option_wrong", name=name, value=getattr(self, name), expected=expected)


@dataclass(slots=True, kw_only=True)
class Reading:
    """A log that is being read."""

    frame: pd.DataFrame
    """Its rows; the index names them in sentences."""
    options: TableOptions
    """What is stated of it."""
    of: dict[str, str] = field(default_factory=dict)
    """Column of each role that is read."""
    counts: Counter[str] = field(default_factory=Counter)
    """What was dropped, merged or sorted."""
    interpretation: dict[str, str] = field(default_factory=dict)
    """How it was understood, in words."""
    names: dict[str, str] = field(default_factory=dict)
    """What columns are called whose own names do not say it, as another column does."""
    gone: Mask = field(init=False)
    """Rows that are dropped; each is counted for one reason."""
    _looks: dict[str, str] = field(default_factory=dict)
    _said: list[str] = field(default_factory=list)
    _words: list[tuple[str | None, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.take(self.frame)

    def take(self, frame: pd.DataFrame) -> None:
        """Read other rows, of which none is dropped yet."""
        self.frame, self.gone = frame, np.zeros(len(frame), dtype=bool)
        self._looks.clear()

    def name_of(self, column: str) -> str:
        """Return the name of a column, its own or one that another column says."""
        return self.names.get(column, column)

    @property
    def sample(self) -> pd.DataFrame:
        """Some rows: all of a small log, the first and some others of a large one."""
        if len(self.frame) <= 2 * _SAMPLE:
            return self.frame
        places = np.linspace(_SAMPLE, len(self.frame) - 1, _SAMPLE).astype(np.int64)
        return self.frame.iloc[np.append(np.arange(_SAMPLE), places)]

    def look(self, column: str) -> str:
        """Return the look of a column, by some of its rows; see `words.looks`."""
        if column not in self._looks:
            self._looks[column] = looks(self.sample[column])
        return self._looks[column]

    def cells(self, role: str) -> pd.Series:
        """Return the column of a role."""
        cells: pd.Series = self.frame[self.of[role]]
        return cells

    def ask(
        self, key: str, answer: str | None = None, /, *, option: str | None = None, **about: object
    ) -> None:
        """Keep a question.

        Args:
            key: in sentences.toml, which has its words and option.
            answer: the likely one; None where there is none.
            option: another option that answers it.
            about: what the question is of.
        """
        question = _SENTENCES[key]
        self._say(question["text"].format(**about), option or question.get("option"), answer)

    def _say(self, sentence: str, option: str | None = None, answer: str | None = None) -> None:
        if sentence not in self._said:
            self._said.append(sentence)
            self._words.append((None if answer is None else option, answer or ""))

    def drop(
        self,
        bad: "Mask | pd.Series[bool]",
        why: str,
        cells: pd.Series | None = None,
        expected: str = "",
    ) -> None:
        """Drop rows that are not yet, and count them.

        Args:
            bad: which rows; shape (rows,).
            why: in a few words.
            cells: where the rows are wrong, and not merely empty; many of these are a fault.
            expected: what is accepted there.
        """
        new = np.asarray(bad, dtype=bool) & ~self.gone
        n = int(np.count_nonzero(new))
        if not n:
            return
        if cells is not None:
            share = n / new.size
            many = "" if n == 1 else f" ({n:,} of {new.size:,} rows are so)"
            if share > _MOST_BAD:
                self._say(f"{where(cells, new)}: {expected}{many}")
            else:
                self.interpretation[f"dropped for {why}"] = (
                    f"{n:,}, the first in {where(cells, new)}"
                )
        self.counts[f"dropped: {why}"] += n
        self.gone |= new

    def settle(self, last: TraceError | None = None) -> None:
        """Raise what there is to ask, all in one.

        Raises:
            UnclearLogError: there is something, or a last fault that let nothing be read any more.
        """
        if last is not None and not self._said:
            # After others it is what a guess or a fault led to.
            self._said.append(str(last))
        if not self._said:
            return
        problem = UnclearLogError("; ".join(self._said))
        problem.said = tuple(self._said)
        columns = " ".join(answer for option, answer in self._words if option == "--columns")
        words = ["--columns", columns] if columns else []
        for option, answer in dict.fromkeys(self._words):
            if option and (option == "--unit" or option not in (*words, "--columns")):
                words += [option, answer]
        # A command of which a part is missing, or that led to a fault, is none to type.
        is_whole = last is None and all(option for option, _ in self._words)
        problem.words = tuple(words) if is_whole else ()
        raise problem


def where(cells: pd.Series, bad: "Mask | pd.Series[bool]") -> str:
    """Return the first row that is bad, and its value, for a sentence."""
    place = int(np.flatnonzero(bad)[0])
    row = cells.index[place]
    names = cells.index.names
    rows = row if isinstance(row, tuple) else (row,)
    text = ", ".join(f"{name or 'row'} {one}" for name, one in zip(names, rows, strict=True))
    return f"{text}: {cells.name} = {str(cells.iloc[place])!r}"


def listed(names: Sequence[str], most: int = 12) -> str:
    """Return names for a sentence."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(str(name)) for name in names[:most]) + more


def seen(texts: pd.Series) -> str:
    """Return the commonest values with their counts, for a sentence."""
    counts = texts.value_counts()
    shown = ", ".join(f"{value!r} ({n:,})" for value, n in counts[:_SHOWN].items())
    return f"{shown}{f' and {counts.size - _SHOWN:,} more' if counts.size > _SHOWN else ''}"
