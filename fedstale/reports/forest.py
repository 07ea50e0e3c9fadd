"""Figures with one row a name: a forest of intervals, and marks in the look of a row.

Every row has a colour, a dash and a marker of its own, so that no reader needs to distinguish
colours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any

from fedstale.reports.figure import MARKERS, Figure, curve, named_rows, numbers

LONGEST = 28
"""Characters of a name that are shown beside its row."""
ROW_PX = 34
"""Height of a row in CSS pixels."""
AROUND_PX = 130
"""Height of what is above and below the rows in CSS pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A value with its interval."""

    name: str
    look: int
    """Number of the colour and the marker."""
    value: float
    low: float = nan
    """Lower end of the interval; NaN if there is none."""
    high: float = nan
    """Upper end of the interval; NaN if there is none."""
    text: str
    """The value and its interval in words."""
    n: int
    """How many pairs or windows the value stands for."""


def forest(
    name: str,
    title: str,
    about: str,
    rows: Sequence[Row],
    *,
    x_title: str,
    level: float | None,
    header: Sequence[str] = ("variant", "mean and interval", "pairs"),
    is_wide: bool = False,
) -> Figure:
    """Return a mark and its interval for each row, and a line at what means no difference.

    Args:
        name: of the figure.
        title: of the figure.
        about: what it shows, in a sentence or two.
        rows: from top to bottom.
        x_title: of the axis.
        level: what means no difference; None for values that are no differences.
        header: of the table: the name, the value in words, and what is counted.
        is_wide: whether it takes the whole width of the page.
    """
    traces: list[dict[str, Any]] = []
    for i, row in enumerate(rows):
        more: dict[str, Any] = {"text": [row.text], "hovertemplate": "%{text}"}
        if isfinite(row.low):
            # Of rounded numbers, as the mark is: an interval from 0 must not begin below it.
            value, low, high = (x or 0.0 for x in numbers([row.value, row.low, row.high]))
            ends = {"array": [high - value], "arrayminus": [value - low]}
            more["error_x"] = {"type": "data", "symmetric": False, **ends}
        traces.append(marks(row.name, row.look, [row.value], [i], **more))
    if traces and level is not None:
        still = {"hoverinfo": "skip", "showlegend": False, "line": {"width": 1}}
        span = [-0.5, len(rows) - 0.5]
        traces.append(curve("no difference", "still", [level, level], span, **still))
    return Figure(
        id=name,
        title=title,
        about=f"{about} The bars are 95% intervals.",
        traces=traces,
        x_title=x_title,
        layout={"yaxis": named_rows([row.name for row in rows], longest=LONGEST)},
        height=AROUND_PX + ROW_PX * len(rows),
        is_wide=is_wide,
        header=header,
        rows=[[row.name, row.text, str(row.n)] for row in rows],
    )


def marks(
    name: str,
    look: int,
    x: Sequence[float],
    y: Sequence[float],
    hollow: str = "",
    **more: object,
) -> dict[str, Any]:
    """Return marks in the colour and with the marker of a number."""
    marker = {"size": 10, "symbol": MARKERS[look % len(MARKERS)] + hollow}
    return curve(name, look, x, y, mode="markers", showlegend=False, **{"marker": marker, **more})
