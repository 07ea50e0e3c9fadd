"""The page of a backtest: how reliable probabilities are, and how wide a forecast is.

Every curve differs in colour, dash and marker, so that no reader needs to tell colours apart.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from fedstale.reports.figure import SHARES, Figure, curve, time_unit

PAGE = "backtest.html"
_RATES = {
    "compute": ("processor", "work units/s", 1.0),
    "downlink": ("downlink", "Mbit/s", 1e6),
    "uplink": ("uplink", "Mbit/s", 1e6),
}
# A bin with fewer is mostly noise.
_FEWEST = 10


def figures(tables: Mapping[str, pd.DataFrame]) -> list[Figure]:
    """Return the figures of the tables that are not empty.

    Args:
        tables: from `fedstale.traces.forecast.evaluation.backtested`.
    """
    drawn = []
    if "reliability" in tables:
        what = "to finish the job by its deadline"
        drawn.append(_reliability("finish", "Probability to finish", what, tables["reliability"]))
    if "survival" in tables:
        for horizon, table in tables["survival"].groupby("horizon_s"):
            horizon_s = float(str(horizon))
            unit, length_s = time_unit(horizon_s)
            span = f"{horizon_s / length_s:g} {unit}"
            title = f"Probability to stay online for {span}"
            what = f"to stay online for another {span}"
            drawn.append(_reliability(f"survival-{horizon_s:.0f}", title, what, table))
    if "fan" in tables:
        fans = tables["fan"]
        names = [name for name in fans["forecaster"].unique() if name]
        drawn += [
            _fan(str(channel), part, str(names[-1]))
            for channel, part in fans.groupby("channel", sort=False)
            if names
        ]
    return [figure for figure in drawn if figure.traces]


def _reliability(name: str, title: str, what: str, table: pd.DataFrame) -> Figure:
    """Return the reliability curves of a probability, one a forecaster."""
    shown = table[table["n"] >= _FEWEST]
    traces = [
        curve(
            str(forecaster),
            i,
            one["predicted"],
            one["observed"],
            mode="lines+markers",
            text=[f"{n:,.0f} forecasts" for n in one["n"]],
            hovertemplate="forecast %{x:.0%}, observed %{y:.0%}, %{text}",
        )
        for i, forecaster in enumerate(table["forecaster"].unique())
        for one in (shown[shown["forecaster"] == forecaster],)
        if len(one)
    ]
    if traces:
        still = {"hoverinfo": "skip", "line": {"width": 1, "dash": "solid"}}
        traces.append(curve("as forecast", "still", [0.0, 1.0], [0.0, 1.0], **still))
    return Figure(
        id=f"reliability-{name}",
        title=title,
        about=f"How often devices that were forecast {what} with a probability did; on the "
        f"diagonal as often as forecast. Points stand for {_FEWEST} forecasts or more.",
        traces=traces,
        x_title="forecast",
        y_title="observed",
        layout=SHARES,
        height=380,
        header=["forecaster", "forecast", "observed", "forecasts"],
        rows=[
            [str(row.forecaster), f"{row.predicted:.2f}", f"{row.observed:.2f}", f"{row.n:,.0f}"]
            for row in shown.itertuples()
        ],
    )


def _fan(channel: str, table: pd.DataFrame, forecaster: str) -> Figure:
    """Return the fan of a rate, by one forecaster."""
    what, unit, size = _RATES[channel]
    past = table[table["forecaster"] == ""]
    ahead = table[table["forecaster"] == forecaster]
    device, now = table["device_id"].iloc[0], float(table["now"].iloc[0])
    minutes = np.concatenate([past["offset_s"], ahead["offset_s"]]) / 60.0
    actual = np.concatenate([past["actual"], ahead["actual"]]) / size

    dots = {"mode": "lines+markers", "marker": {"size": 4}}

    def quantile(name: str, column: str, **more: object) -> dict[str, Any]:
        x, y = ahead["offset_s"] / 60.0, ahead[column] / size
        return curve(name, "series-0", x, y, hoverinfo="skip", **more)

    return Figure(
        id=f"fan-{channel}",
        title=f"The {what} of one device, by {forecaster}",
        about=f"Device {device} at {now / 3600.0:.1f} h: the middle one of the test, not picked by "
        "its values. Left of 0, means of five minutes; right of it, the mean rate from now to that "
        "minute, as forecast and as it came.",
        traces=[
            quantile("10 %", "q10", line={"width": 0}, showlegend=False),
            quantile("80 % of futures", "q90", line={"width": 0}, fill="tonexty"),
            quantile("median", "q50", line={"width": 2, "dash": "dash"}),
            curve("what the device did", "series-1", minutes, actual, **dots),
        ],
        x_title="time from now (min)",
        y_title=f"{what} ({unit})",
        layout={"yaxis": {"rangemode": "tozero"}},
        header=["until, min", "10 %", "median", "90 %", "came"],
        rows=[
            [f"{row[0] / 60.0:g}", *(f"{value / size:.3g}" for value in row[1:])]
            for row in ahead[["offset_s", "q10", "q50", "q90", "actual"]].to_numpy()
        ],
    )
