"""One figure of a report as data: traces in the words of plotly, words around them, and a table.

Colours are roles ("download", "wasted"), not values: the page looks them up, in light and in dark.
A page draws figures with Chart.js, which comes with fedstale (vendor/); a notebook gets them from
plotly, if that is installed.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedstale.errors import ConfigError, needs

if TYPE_CHECKING:
    from plotly.graph_objects import Figure as PlotlyFigure


Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]

SOURCES = {
    "server": "central",
    "evaluate": "clients",
    "train": "clients, training",
    "query": "clients, queries",
}
"""Where a metric was measured, as figures call it, the source that decides first."""
FROM_ZERO = {"rangemode": "tozero"}
"""An axis of a count, a share or a duration."""
MARKERS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star")
SHARES: dict[str, Any] = {
    axis: {
        "range": [-0.03, 1.03],
        "tickvals": [0.0, 0.2, 0.4, 0.6, 0.8, 1.0],
        "ticktext": ["0%", "20%", "40%", "60%", "80%", "100%"],
    }
    for axis in ("xaxis", "yaxis")
}
"""The layout of a figure of one share against another."""
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_N_COLOURS = 7
_FEW_POINTS = 60
_QUOTED_PATH = re.compile(
    r"""(?<=['"])(?:/|[A-Za-z]:[\\/])(?:[^'"\n]*[\\/])?([^'"\n\\/]+)[\\/]*(?=['"])"""
)
_BARE_PATH = re.compile(r"""(^|[\s(=])(?:/|[A-Za-z]:\\)(?:[^\s'"/\\,;:]+[/\\])+([^\s'"/\\,;:]+)""")
_TIME_UNITS = ((2 * 86_400.0, "days", 86_400.0), (2 * 3600.0, "h", 3600.0), (120.0, "min", 60.0))
_BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure: what is drawn, and the words around it."""

    id: str
    """Name in the page, distinct."""
    title: str
    about: str
    """What the figure shows, in a sentence or two; plain text."""
    traces: Sequence[dict[str, Any]]
    """Traces in the words of plotly, as far as page.js knows them; `meta` is a colour's role."""
    x_title: str
    """What the horizontal axis shows, with its unit."""
    y_title: str = ""
    others: Sequence[tuple[dict[str, Any], Sequence[Sequence[float | None]]]] = ()
    """Further horizontal axes to choose, in the words of plotly, with each trace's positions."""
    layout: dict[str, Any] = field(default_factory=dict)
    """Further settings of the layout; axes are merged into the page's own."""
    height: int = 320
    """Height in CSS pixels."""
    is_wide: bool = False
    """Whether it takes the whole width of the page."""
    header: Sequence[str] = ()
    """Columns of the table below the figure; no table if empty."""
    rows: Sequence[Sequence[str]] = ()

    def plot(self) -> dict[str, Any]:
        """Return the data of the figure for the page's script."""
        layout = dict(self.layout)
        for axis, title in (("xaxis", self.x_title), ("yaxis", self.y_title)):
            layout[axis] = {"title": {"text": title}, **layout.get(axis, {})}
        others = {"others": [list(other) for other in self.others]} if self.others else {}
        return {"id": self.id, "traces": list(self.traces), "layout": layout, **others}

    def plotly(self) -> "PlotlyFigure":
        """Return the figure for a notebook, in the colours of plotly.

        Raises:
            ConfigError: plotly is not installed.
        """
        try:
            # Slow to import, and few need it.
            from plotly.graph_objects import Figure as PlotlyFigure  # noqa: PLC0415
        except ImportError:
            raise ConfigError(f"a figure in a notebook {needs('plotly')}") from None
        layout = {**self.plot()["layout"], "title": {"text": self.title}}
        # Plotly reads tags and entities in whatever text it shows; JSON has texts in quotes.
        told = json.dumps({"data": list(self.traces), "layout": layout})
        escaped = told.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return PlotlyFigure(**json.loads(escaped))


def curve(
    name: str,
    look: str | int,
    x: npt.ArrayLike,
    y: npt.ArrayLike,
    **more: object,
) -> dict[str, Any]:
    """Return a trace of lines, or of markers if a mode says so.

    Args:
        name: in the legend; plain text.
        look: role of the colour, or a number: each has a colour, a dash and a marker, so that no
            reader needs to tell colours apart.
        x: positions, shape (n,).
        y: heights, shape (n,).
        more: what differs from a plain line, in the words of plotly.
    """
    style: dict[str, Any] = {"meta": look, "line": {"width": 2}}
    if isinstance(look, int):
        style = {
            "meta": f"series-{look % _N_COLOURS}",
            "line": {"width": 2, "dash": _DASHES[look % len(_DASHES)]},
            "marker": {"size": 7, "symbol": MARKERS[look % len(MARKERS)]},
        }
    xy = {"x": numbers(x), "y": numbers(y)}
    return {"type": "scatter", "mode": "lines", **style, "name": name, **xy, **more}


def stepped(
    name: str, look: str | int, x: npt.ArrayLike, y: npt.ArrayLike, **more: object
) -> dict[str, Any]:
    """Return a trace that keeps each height until the next position; arguments as of `curve`."""
    own = curve(name, look, x, y, **more)
    return {**own, "line": {**own["line"], "shape": "hv"}}


def reference(name: str, x: npt.ArrayLike, y: npt.ArrayLike, **more: object) -> dict[str, Any]:
    """Return a thin line that curves are compared with, and of which nothing is said."""
    thin: dict[str, Any] = {"hoverinfo": "skip", "line": {"width": 1, "dash": "dash"}}
    return curve(name, "still", x, y, **thin, **more)


def band(
    name: str, look: str | int, x: npt.ArrayLike, low: npt.ArrayLike, high: npt.ArrayLike
) -> list[dict[str, Any]]:
    """Return the traces of an area between two heights; without a name it is not in the legend."""
    unseen: dict[str, Any] = {"hoverinfo": "skip", "line": {"width": 0}}
    legend: dict[str, Any] = {} if name else {"showlegend": False}
    return [
        curve("", look, x, low, **unseen, showlegend=False),
        curve(name, look, x, high, **unseen, **legend, fill="tonexty"),
    ]


def accuracy_axis(traces: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the vertical axis of accuracies: from 0, and in percent if all of them are shares."""
    is_share = all(0.0 <= y <= 1.0 for trace in traces for y in trace["y"] if y is not None)
    return {**FROM_ZERO, **({"tickformat": ".0%"} if is_share else {})}


def line_mode(n_points: int) -> str:
    """Return the mode of a curve: where points are few, a mark at each; one alone is no line."""
    return "lines+markers" if n_points <= _FEW_POINTS else "lines"


def rows_of_bars(
    name: str,
    role: str,
    lengths: Iterable[float],
    labels: Iterable[object],
    **more: object,
) -> dict[str, Any]:
    """Return a trace of horizontal bars, one a label."""
    xy = {"x": numbers(list(lengths)), "y": [str(label) for label in labels]}
    return {"type": "bar", "orientation": "h", "name": name, "meta": role, **xy, **more}


def numbers(values: npt.ArrayLike) -> list[float | None]:
    """Return numbers for JSON, with seven digits; what is not finite becomes null.

    Example:
        >>> numbers([1 / 3, float("nan")])
        [0.3333333, None]
    """
    array = np.asarray(values, dtype=np.float64).tolist()
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in array]


def time_unit(span_s: float) -> tuple[str, float]:
    """Return the unit in which a span reads best, and its length in s.

    Example:
        >>> time_unit(10_000.0)
        ('h', 3600.0)
    """
    found = ((unit, length_s) for least, unit, length_s in _TIME_UNITS if span_s >= least)
    return next(found, ("s", 1.0))


def byte_unit(largest: float) -> tuple[str, float]:
    """Return the decimal unit in which a number of bytes reads best, and its size.

    Example:
        >>> byte_unit(5e6)
        ('MB', 1000000.0)
    """
    return next(((unit, size) for size, unit in _BYTE_UNITS if largest >= size), ("bytes", 1.0))


def byte_text(n_bytes: float) -> str:
    """Return a number of bytes in the unit in which it reads best.

    Example:
        >>> byte_text(5e6)
        '5 MB'
    """
    unit, size = byte_unit(n_bytes)
    return f"{n_bytes / size:.3g} {unit}"


def time_text(span_s: float) -> str:
    """Return a span in the unit in which it reads best.

    Example:
        >>> time_text(10_000.0)
        '2.78 h'
    """
    unit, length_s = time_unit(span_s)
    return f"{span_s / length_s:.3g} {unit}"


def without_folders(text: str) -> str:
    """Return text with the last part of each whole path: who reads a page has other folders.

    Example:
        >>> without_folders("app = '/home/me/my app', which /home/me/log.txt names")
        "app = 'my app', which log.txt names"
    """
    return _BARE_PATH.sub(r"\1\2", _QUOTED_PATH.sub(r"\1", text))


def cell_text(value: object) -> str:
    """Return a cell of a table: a float has four digits, and what is not there is a hyphen.

    Example:
        >>> cell_text(2 / 3), cell_text(7), cell_text(float("nan")), cell_text(None), cell_text("")
        ('0.6667', '7', '-', '-', '-')
    """
    if isinstance(value, float):
        return "-" if isnan(value) else f"{value:,.4g}"
    return "-" if value is None else str(value) or "-"


def metric_text(name: str, value: float) -> str:
    """Return a metric in words: a share in percent if it is an accuracy.

    Example:
        >>> metric_text("accuracy", 0.5), metric_text("loss", 0.5)
        ('50.0%', '0.5')
    """
    if isnan(value):
        return "not a number"
    is_share = "acc" in name.lower() and 0 <= value <= 1
    return f"{value:.1%}" if is_share else f"{value:.3g}"


def thinned(n: int, limit: int) -> Index:
    """Return at most `limit` positions out of n, evenly spread, with the first and the last.

    Example:
        >>> thinned(10, 4)
        array([0, 3, 6, 9])
    """
    if n <= limit:
        return np.arange(n, dtype=np.int64)
    return np.linspace(0, n - 1, limit).round().astype(np.int64)
