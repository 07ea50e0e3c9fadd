"""How many devices worked, who took part how often, and whether forecasts came true."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedstale.reports.figure import (
    SHARES,
    Array,
    Figure,
    Index,
    bars,
    curve,
    thinned,
    time_unit,
)
from fedstale.simulation.jobs import IN_FLIGHT, UNCLAIMED
from fedstale.strategies.server.runtime import CLIENT_ERROR, REJECTED, REPORTED

if TYPE_CHECKING:
    from fedstale.reports.run import Run

DEVICES = 1000
"""Devices that the curve of participation shows at most."""
BINS = 10
"""Intervals of the reported chance to finish in the curve of reliability."""
FEWEST = 5
"""Jobs behind a point of that curve at least; fewer say more about chance than about a forecast."""
_FINISHED = (REPORTED, REJECTED, UNCLAIMED)


def gini(amounts: npt.ArrayLike) -> float:
    """Return the Gini coefficient of amounts >= 0: 0 if all are equal, near 1 if one has all.

    Args:
        amounts: shape (n,); NaN is returned if there are none or they sum to 0.

    Example:
        >>> gini([3, 3, 3])
        0.0
        >>> gini([0, 0, 0, 4])
        0.75
    """
    ordered = np.sort(np.asarray(amounts, dtype=np.float64))
    n, total = len(ordered), ordered.sum()
    if not n or not total:
        return float("nan")
    ranks = np.arange(1, n + 1)
    return float((2 * ranks - n - 1) @ ordered / (n * total))


def used_jobs(run: "Run") -> Index:
    """Return how many training jobs of each enrolled device were used, the most first.

    A device that was never used counts 0; shape (devices,).
    """
    events = run.jobs
    is_training = events["kind"].str.startswith("train").to_numpy(bool)
    used = events.loc[is_training & (events["outcome"] == "used"), "device_id"].value_counts()
    counts = np.zeros(max(int(run.summary["devices"]), len(used)), dtype=np.int64)
    counts[: len(used)] = used.to_numpy()
    return counts


def participation(run: "Run") -> Figure | None:
    """Return used training jobs over devices, or None if no device's work was used."""
    counts = used_jobs(run)
    if not counts.sum():
        return None
    n_used, kept = int((counts > 0).sum()), thinned(len(counts), DEVICES)
    about = (
        f"{n_used:,} of {len(counts):,} devices had at least one training job used; "
        f"Gini {gini(counts):.2f} (0: all alike, 1: one device does everything)."
    )
    if len(kept) < len(counts):
        about += f" {DEVICES:,} of the devices are drawn, evenly spread."
    more = {"fill": "tozeroy", "line": {"shape": "hvh", "width": 2}, "showlegend": False}
    trace = curve("training jobs used", "series-0", kept + 1, counts[kept], **more)
    levels = [0, 10, 25, 50, 75, 90, 100]
    return Figure(
        id="participation",
        title="Participation",
        about=about,
        traces=[trace],
        x_title="devices, the most used first",
        y_title="training jobs used",
        layout={"yaxis": {"rangemode": "tozero"}},
        header=("share of devices with at most", "jobs used"),
        rows=[(f"{q}%", f"{np.quantile(counts, q / 100):g}") for q in levels],
    )


def working(run: "Run") -> Figure | None:
    """Return how many devices worked on average in each hour, or None if none ever did."""
    start = run.jobs["started_at"].to_numpy(np.float64)
    end = np.minimum(run.jobs["ended_at"].to_numpy(np.float64), run.end_s)
    drawn = np.isfinite(start) & (end > start)
    if not drawn.any() or not run.end_s:
        return None
    step_s = _step(run.end_s)
    edges = np.append(np.arange(0.0, run.end_s, step_s), run.end_s)
    mean = np.diff(worked_by(start[drawn], end[drawn], edges)) / np.diff(edges)
    unit, length_s = time_unit(run.end_s)
    step_unit, step_length_s = time_unit(step_s * 2)
    trace = bars("devices at work", "series-2", edges / length_s, mean)
    return Figure(
        id="working",
        title="Devices at work",
        about=f"Mean number of devices between the start and the end of a job, in steps of "
        f"{step_s / step_length_s:g} {step_unit}; {mean.max():.3g} at most.",
        traces=[trace],
        x_title=f"device time ({unit})",
        y_title="devices at work",
        layout={"bargap": 0},
    )


def worked_by(start: Array, end: Array, instants: Array) -> Array:
    """Return the device-seconds of work before each instant.

    Args:
        start: starts of the intervals of work in s; shape (n,).
        end: their ends, same shape.
        instants: in s; shape (k,).

    Returns:
        Device-seconds, shape (k,).
    """

    def since(moments: Array) -> Array:
        """Return the sum over all moments before each instant of the time since then."""
        ordered = np.sort(moments)
        total = np.append(0.0, np.cumsum(ordered))
        n = np.searchsorted(ordered, instants, side="right")
        return n * instants - total[n]

    return since(start) - since(end)


def _step(span_s: float) -> float:
    """Return an hour, unless a run is too short or too long for it to show anything."""
    if span_s < 6 * 3600.0:
        choices = (1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0)
        return next((step for step in choices if span_s / step <= 60), 600.0)
    return next(
        (hours * 3600.0 for hours in (1, 6, 24, 168) if span_s / hours / 3600.0 <= 720),
        30 * 86_400.0,
    )


def reliability(run: "Run") -> Figure | None:
    """Return how often jobs finished against the chance that their devices had reported.

    A job finished if its reply arrived before its message expired, even if the server rejected it.
    Jobs in flight at the end of the run, and those in which the app failed, are left out. None if
    no device forecast itself, or the run was written before the column was.
    """
    if "reported_p_finish" not in run.jobs:
        return None
    status = run.jobs["status"].to_numpy(object)
    reported = run.jobs["reported_p_finish"].to_numpy(np.float64)
    known = np.isfinite(reported) & (status != IN_FLIGHT) & (status != CLIENT_ERROR)
    if not known.any():
        return None
    reported, finished = reported[known], np.isin(status[known].astype(str), _FINISHED)
    bins = np.minimum((reported * BINS).astype(np.int64), BINS - 1)
    jobs = pd.DataFrame({"reported": reported, "finished": finished, "n": finished})
    table = jobs.groupby(bins).agg({"reported": "mean", "finished": "mean", "n": "size"})
    shown = table[table["n"] >= FEWEST]
    brier = float(np.mean((reported - finished) ** 2))
    base = float(finished.mean())
    hover = "reported %{x:.0%}, finished %{y:.0%}, %{text}"
    more = {"text": [f"{count:,} jobs" for count in shown["n"]], "hovertemplate": hover}
    dots = {"mode": "lines+markers", "marker": {"size": 7}}
    dashed = {"hoverinfo": "skip", "line": {"width": 1, "dash": "dash"}}
    traces = [
        curve("devices", "series-0", shown["reported"], shown["finished"], **dots, **more),
        curve("as reported", "still", [0.0, 1.0], [0.0, 1.0], **dashed),
    ]
    return Figure(
        id="reliability",
        title="Reliability of reported forecasts",
        about=f"Before {len(reported):,} training jobs their devices had reported the chance to "
        f"finish: on average {reported.mean():.0%}, and {base:.0%} finished in time. "
        f"Brier score {brier:.3f}; always reporting {base:.0%} has {base * (1 - base):.3f}. "
        f"Points stand for {FEWEST} jobs or more.",
        traces=[trace for trace in traces if trace["x"]],
        x_title="reported",
        y_title="finished",
        layout=SHARES,
        header=("reported", "finished", "jobs"),
        rows=[(f"{r.reported:.2f}", f"{r.finished:.2f}", f"{r.n:,}") for r in table.itertuples()],
    )
