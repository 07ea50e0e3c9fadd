"""A comparison as a table: in words for people, as rows for programs.

A mean is followed by the half width of its interval; a difference by the ends of its own. "at
least" stands before a time in which runs count that never reached the target.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from fedstale.comparison.statistics import Estimate, SpeedUp
from fedstale.reports.figure import time_unit

if TYPE_CHECKING:
    from fedstale.comparison.analysis import Comparison, Variant

_COLUMNS = (
    *("variant", "measure", "n", "mean", "low", "high"),
    *("difference", "difference_low", "difference_high", "pairs", "note"),
)
_NOTHING = "-"
_GAP = 3


def words(comparison: "Comparison") -> tuple[list[str], list[list[str]]]:
    """Return the header and one row a variant, all in words."""
    header = ["variant", "runs"]
    unit, length_s = time_unit(comparison.horizon_s)
    if comparison.target is not None:
        header += [f"{unit} to {comparison.target}", "reached", "speed-up"]
    for metric in comparison.shown:
        header += [f"{metric} at the end", "difference"]
    header += ["device time wasted"]
    rows = []
    for one in comparison.variants:
        row = [one.name, str(len(one.runs))]
        if comparison.target is not None:
            row += _times(one, comparison.reference, length_s)
        for metric in comparison.shown:
            key = comparison.key(metric)
            row.append(mean(one.means.get(key)))
            is_reference = one.name == comparison.reference
            row.append("reference" if is_reference else between(one.differences.get(key)))
        share = one.means.get("device_time_wasted")
        row.append(_NOTHING if share is None else f"{share.mean:.0%}")
        rows.append(row)
    return header, rows


def notes(comparison: "Comparison") -> list[str]:
    """Return the notes below the table, in sentences."""
    found = [
        "Intervals hold 95% (Student's t); differences and speed-ups are paired by seed with "
        f"{comparison.reference}."
    ]
    if any(len(one.runs) < 2 for one in comparison.variants):
        found.append("Fewer than two runs give no interval.")
    if any(one.n_reached < len(one.times) for one in comparison.variants):
        found.append(
            "A run that never reached the target counts with the time that it had, so its variant "
            "took at least the time stated; a speed-up marked ~ bounds nothing, because such runs "
            "are on both sides."
        )
    found += [
        f"Left out: {variant}, seed {seed}, which failed ({reason})."
        for variant, seed, reason in comparison.failures
    ]
    return found


def markdown(comparison: "Comparison") -> str:
    """Return the table and its notes as Markdown."""
    header, rows = words(comparison)
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    cells = [[_in_markdown(cell) for cell in line] for line in lines]
    text = "\n".join(f"| {' | '.join(line)} |" for line in cells)
    below = " ".join(_in_markdown(note) for note in notes(comparison))
    return f"{text}\n\n{below}\n"


def long(comparison: "Comparison") -> pd.DataFrame:
    """Return one row for each variant and measure, numbers in full; NaN where there is none."""
    rows: list[dict[str, object]] = []

    def add(one: "Variant", measure: str, found: Mapping[str, float], note: str = "") -> None:
        rows.append({"variant": one.name, "measure": measure, "note": note, **found})

    for one in comparison.variants:
        for name, found in one.means.items():
            paired = one.differences.get(name, Estimate(mean=np.nan, low=np.nan, high=np.nan, n=0))
            differences = {"difference": paired.mean, "difference_low": paired.low}
            differences |= {"difference_high": paired.high, "pairs": paired.n or np.nan}
            add(one, name, {**asdict(found), **differences})
        if one.time is not None:
            n = len(one.times)
            note = "at least" if one.n_reached < n else ""
            add(one, "time_to_target_s", asdict(one.time), note)
            add(one, "reached_share", {"n": n, "mean": one.n_reached / n})
        if one.speed_up is not None:
            note = "" if one.speed_up.bound == "exact" else one.speed_up.bound
            add(one, "speed_up", asdict(one.speed_up.ratio), note)
    table = pd.DataFrame(rows, columns=list(_COLUMNS)).replace([np.inf, -np.inf], np.nan)
    return table.astype({"n": "Int64", "pairs": "Int64"})


def parts(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """Return columns that fit side by side, each time with the first, which names the row.

    Example:
        >>> parts(["name", "one", "two"], [["a" * 10, "b" * 10, "c" * 10]], width=30)
        [[0, 1], [0, 2]]
    """
    needed = [
        # A header may be broken between words.
        _GAP + max(len(part) for part in (*name.split(), *(row[i] for row in rows)))
        for i, name in enumerate(header)
    ]
    found = [[0]]
    for i in range(1, len(header)):
        if len(found[-1]) > 1 and sum(needed[k] for k in found[-1]) + needed[i] > width:
            found.append([0])
        found[-1].append(i)
    return found


def mean(found: Estimate | None) -> str:
    """Return a mean and half of its interval.

    Example:
        >>> mean(Estimate(mean=0.5, low=0.4, high=0.6, n=5))
        '0.500 ± 0.100'
    """
    if found is None or found.n == 0:
        return _NOTHING
    half = (found.high - found.low) / 2
    return _number(found.mean) if np.isnan(half) else f"{_number(found.mean)} ± {_number(half)}"


def between(found: Estimate | None) -> str:
    """Return a difference and its interval.

    Example:
        >>> between(Estimate(mean=0.1, low=-0.05, high=0.25, n=5))
        '+0.100 (-0.050 to +0.250)'
    """
    if found is None or found.n == 0:
        return _NOTHING
    if np.isnan(found.low):
        return _number(found.mean, "+")
    return f"{_number(found.mean, '+')} ({_number(found.low, '+')} to {_number(found.high, '+')})"


def ratio(found: SpeedUp | None) -> str:
    """Return a speed-up, its interval, and what it is a bound of."""
    if found is None:
        return _NOTHING
    before = {"exact": "", "unknown": "~"}.get(found.bound, f"{found.bound} ")
    one = found.ratio
    ends = "" if np.isnan(one.low) else f" ({one.low:.2f} to {one.high:.2f})"
    return f"{before}{one.mean:.2f}{ends}"


def _times(one: "Variant", reference: str, length_s: float) -> list[str]:
    if one.time is None:
        return [_NOTHING] * 3
    n, half = len(one.times), (one.time.high - one.time.low) / 2
    time = f"{one.time.mean / length_s:.2f}"
    if one.n_reached < n:
        # A bound has no interval that would hold anything.
        time = f"at least {time}"
    elif not np.isnan(half):
        time += f" ± {half / length_s:.2f}"
    return [
        time,
        f"{one.n_reached} of {n}",
        "reference" if one.name == reference else ratio(one.speed_up),
    ]


def _number(value: float, sign: str = "") -> str:
    return format(value, f"{sign}.3f" if abs(value) < 10 else f"{sign},.4g")


def _in_markdown(text: str) -> str:
    """Return text that Markdown shows as it is."""
    marks = ("&", "\\", "|", "`", "*", "_", "<", ">", "[", "]")
    for mark in marks:
        text = text.replace(mark, f"\\{mark}" if mark not in "<>&" else f"&#{ord(mark)};")
    return text
