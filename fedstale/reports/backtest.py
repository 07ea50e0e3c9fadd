"""The page of a backtest: how reliable probabilities are, and how wide a forecast is.

Every curve differs in colour, dash and marker, so that no reader needs to tell colours apart.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedstale.reports.figure import Figure, numbers, plain, time_unit
from fedstale.reports.page import write_figures

PAGE = "backtest.html"
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_MARKERS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star")
_RATES = {
    "compute": ("processor", "work units/s", 1.0),
    "downlink": ("downlink", "Mbit/s", 1e6),
    "uplink": ("uplink", "Mbit/s", 1e6),
}
# A bin with fewer is mostly noise.
_FEWEST = 10


def write_backtest(tables: Mapping[str, pd.DataFrame], folder: Path, lead: str) -> Path:
    """Write the page of a backtest.

    Args:
        tables: from `fedstale.traces.forecast.evaluation.backtested`.
        folder: where to write backtest.html.
        lead: what was tested, in a sentence.

    Returns:
        The file.

    Raises:
        ConfigError: the file cannot be written.
    """
    return write_figures("Backtest of forecasts", lead, figures(tables), folder / PAGE)


def figures(tables: Mapping[str, pd.DataFrame]) -> list[Figure]:
    """Return the figures of the tables that are not empty."""
    drawn = []
    if "reliability" in tables:
        what = "to finish the job by its deadline"
        drawn.append(_curves("finish", "Probability to finish", what, tables["reliability"]))
    survival = tables.get("survival")
    if survival is not None:
        for horizon, table in survival.groupby("horizon_s"):
            unit, length_s = time_unit(float(str(horizon)))
            span = f"{float(str(horizon)) / length_s:g} {unit}"
            what = f"to stay online for another {span}"
            name = f"survival-{float(str(horizon)):.0f}"
            title = f"Probability to stay online for {span}"
            drawn.append(_curves(name, title, what, table))
    if "fan" in tables:
        drawn += _fans(tables["fan"])
    return [figure for figure in drawn if figure.traces]


def _curves(name: str, title: str, what: str, table: pd.DataFrame) -> Figure:
    """Return the reliability curves of a probability."""
    shown = table[table["n"] >= _FEWEST]
    traces: list[dict[str, Any]] = []
    for i, forecaster in enumerate(dict.fromkeys(table["forecaster"])):
        one = shown[shown["forecaster"] == forecaster]
        if len(one):
            traces.append(_curve(i, str(forecaster), one))
    if traces:
        ideal = {"name": "as forecast", "meta": "still", "hoverinfo": "skip"}
        line = {"line": {"width": 1, "dash": "solid"}, "x": [0.0, 1.0], "y": [0.0, 1.0]}
        traces.append({"type": "scatter", "mode": "lines", **ideal, **line})
    share = {"tickformat": ".0%", "range": [-0.03, 1.03]}
    return Figure(
        id=f"reliability-{name}",
        title=title,
        about=f"How often devices that were forecast {what} with a probability did; on the "
        f"diagonal as often as forecast. Points stand for {_FEWEST} forecasts or more.",
        traces=traces,
        x_title="forecast",
        y_title="observed",
        layout={"xaxis": share, "yaxis": share},
        height=380,
        header=["forecaster", "forecast", "observed", "forecasts"],
        rows=[
            [str(row.forecaster), f"{row.predicted:.2f}", f"{row.observed:.2f}", f"{row.n:,.0f}"]
            for row in shown.itertuples()
        ],
    )


def _curve(i: int, forecaster: str, table: pd.DataFrame) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": plain(forecaster),
        "meta": f"series-{i % 7}",
        "line": {"width": 2, "dash": _DASHES[i % len(_DASHES)]},
        "marker": {"size": 7, "symbol": _MARKERS[i % len(_MARKERS)]},
        "x": numbers(table["predicted"]),
        "y": numbers(table["observed"]),
        "text": [f"{n:,.0f} forecasts" for n in table["n"]],
        "hovertemplate": "forecast %{x:.0%}, observed %{y:.0%}, %{text}",
    }


def _fans(table: pd.DataFrame) -> list[Figure]:
    """Return the fan of each rate, by the last forecaster of the table."""
    names = [name for name in dict.fromkeys(table["forecaster"]) if name]
    return [
        _fan(str(channel), part, str(names[-1]))
        for channel, part in table.groupby("channel", sort=False)
        if names
    ]


def _fan(channel: str, table: pd.DataFrame, forecaster: str) -> Figure:
    what, unit, size = _RATES[channel]
    past = table[table["forecaster"] == ""]
    ahead = table[table["forecaster"] == forecaster]
    device, now = table["device_id"].iloc[0], float(table["now"].iloc[0])
    minutes = np.concatenate([past["offset_s"], ahead["offset_s"]]) / 60.0
    actual = np.concatenate([past["actual"], ahead["actual"]]) / size
    x = numbers(ahead["offset_s"] / 60.0)
    edge = {"type": "scatter", "mode": "lines", "meta": "series-0", "x": x, "hoverinfo": "skip"}
    traces: list[dict[str, Any]] = [
        {**edge, "name": "10 %", "line": {"width": 0}, "showlegend": False},
        {**edge, "name": "80 % of futures", "line": {"width": 0}, "fill": "tonexty"},
        {**edge, "name": "median", "line": {"width": 2, "dash": "dash"}},
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": "what the device did",
            "meta": "series-1",
            "line": {"width": 2},
            "marker": {"size": 4},
            "x": numbers(minutes),
            "y": numbers(actual),
        },
    ]
    for trace, column in zip(traces, ("q10", "q90", "q50"), strict=False):
        trace["y"] = numbers(ahead[column] / size)
    return Figure(
        id=f"fan-{channel}",
        title=f"The {what} of one device, by {forecaster}",
        about=f"Device {device} at {now / 3600.0:.1f} h: the middle one of the test, not picked by "
        "its values. Left of 0, means of five minutes; right of it, the mean rate from now to that "
        "minute, as forecast and as it came.",
        traces=traces,
        x_title="time from now (min)",
        y_title=f"{what} ({unit})",
        layout={"yaxis": {"rangemode": "tozero"}},
        header=["until, min", "10 %", "median", "90 %", "came"],
        rows=[
            [f"{row[0] / 60.0:g}", *(f"{value / size:.3g}" for value in row[1:])]
            for row in ahead[["offset_s", "q10", "q50", "q90", "actual"]].to_numpy()
        ],
    )
