"""Figures of devices: their jobs over time, participation, and the calibration of forecasts.

The first figure of a run has a row for each device, with its jobs in the colours of their phases.
Of many devices some are drawn, evenly spread.
"""

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedstale.reports.costs import SHOWN_AS
from fedstale.reports.figure import (
    FROM_ZERO,
    SHARES,
    Array,
    Figure,
    Index,
    curve,
    reference,
    thinned,
    time_unit,
    without_folders,
)
from fedstale.runs import IN_FLIGHT, UNCLAIMED
from fedstale.strategies.server import CLIENT_ERROR, REJECTED, REPORTED
from fedstale.traces import DAY_S
from fedstale.traces.forecast.backtest import brier
from fedstale.traces.forecast.backtest import reliability as calibration

if TYPE_CHECKING:
    from fedstale.reports.run import Run

JOBS, DRAWN = 12_000, 2_000
"""Jobs and devices that are drawn at most, where all devices have as many jobs."""
USED = ("download", "training", "evaluation", "upload")
STATES = {name: SHOWN_AS.get(name, name) for name in (*USED, "wasted", "in-flight")}
"""What devices do with jobs, by the roles of the colours: phases of used ones, and all others."""
_TICKS = 1 << 20
_WINDOWS = 6_000
_VERSIONS, _ENDINGS = 600, 200
_ROW_PX, _LEAST_PX, _MOST_PX = 15, 200, 620
PHASES = ("started_at", "downloaded_at", "trained_at", "reported_at")
"""Columns of the instants at which the phases of a job begin and end."""
DEVICES = 1000
"""Devices that the curve of participation shows at most."""
FEWEST = 5
"""Jobs behind a point of the curve of reliability at least; fewer say more about chance."""
_STEPS = 200
_HOUR_S = 3600.0
_FINISHED = (REPORTED, REJECTED, UNCLAIMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What a page draws of the devices."""

    about: str
    """What is shown, in sentences."""
    key: Sequence[tuple[str, str]]
    """Roles of the colours, and what they stand for."""
    height: int
    """Height in CSS pixels."""
    data: dict[str, Any]
    """What timeline.js needs."""


def timeline(run: "Run") -> Timeline | None:
    """Return the timeline of a run, or None if no device ever started a job."""
    jobs = run.started
    if jobs.empty or not run.end_s:
        return None
    table = jobs.groupby("device_id").agg(used=("is_used", "sum"), wasted=("is_wasted", "sum"))
    n_idle = max(int(run.summary["devices"]) - len(table), 0)
    about = (
        "Work is wasted when a device goes offline, is too late, or the server does not use its "
        "reply. Ticks on top are versions of the model."
    )
    if n_idle:
        about += f" {n_idle:,} further devices never started a job."
    n_drawn = min(DRAWN, max(JOBS * len(table) // len(jobs), 1))
    if n_drawn < len(table):
        about += f" Of {len(table):,} devices with jobs {n_drawn:,} are drawn, evenly spread."
        table = table.iloc[thinned(len(table), n_drawn)]
        jobs = jobs[jobs["device_id"].isin(table.index)]
    spans = phases(jobs)
    key = [item for i, item in enumerate(STATES.items()) if (spans == i).any()]
    unit, unit_s = time_unit(run.end_s)
    windows = _windows(run, table.index)
    grey = "" if windows is None else ", grey while it was online"
    about = f"One row a device{grey}. {about} Click on a job to read it."
    rows = table.index.get_indexer(pd.Index(jobs["device_id"]))
    ticks = np.round(jobs[list(PHASES)].to_numpy(np.float64) / run.end_s * _TICKS)
    which, endings = pd.factorize(_endings(jobs))
    columns = [jobs["job_id"], rows, ticks[:, 0], *np.diff(ticks, axis=1).T, spans[:, 1], which]
    packed = [_packed(np.stack(columns).astype("<u4"))]
    if windows is not None:
        packed.append(_packed(np.stack(windows).astype("<u4")))
    data: dict[str, Any] = {
        **{"end": run.end_s, "time": run.time_name, "unit": unit, "unit_s": unit_s},
        **{"n_jobs": len(jobs), "ticks": _TICKS, "versions": _versions(run), "states": [*STATES]},
        "endings": endings.tolist(),
        "devices": [str(name) for name in table.index],
        "used": table["used"].tolist(),
        "wasted": table["wasted"].tolist(),
        "packed": packed,
    }
    height = int(np.clip(60 + _ROW_PX * len(table), _LEAST_PX, _MOST_PX))
    return Timeline(about=about, key=key, height=height, data=data)


def phases(jobs: pd.DataFrame) -> Index:
    """Classify the three spans between the instants of started jobs, by `STATES`.

    Those of a job that was not used are alike, and the last two of them empty.
    """
    state = jobs["state"].to_numpy(np.int64)[:, np.newaxis]
    is_evaluation = jobs["kind"].str.startswith("evaluate").to_numpy(np.int64)
    used = np.array([[0, 1, 3], [0, 2, 3]])[is_evaluation]
    return np.where(state == 0, used, len(USED) - 1 + state)


def _endings(jobs: pd.DataFrame) -> "pd.Series[str]":
    """Return the kind of each job and what became of it, in words; too many reasons are none."""
    words = jobs["state"].map(dict(enumerate(SHOWN_AS.values())))
    why = jobs["status"]
    if jobs["reason"].nunique() <= _ENDINGS:
        why = why + (", " + jobs["reason"].map(without_folders)).where(jobs["reason"] != "", "")
    return jobs["kind"] + ", " + words + (" (" + why + ")").where(jobs["state"] == 1, "")


def _windows(run: "Run", names: "pd.Index[Any]") -> tuple[Array, Array, Array] | None:
    """Return the device, start and length of windows online, in ticks; None if not of all these.

    Breaks that nobody would see are closed; still too many windows are none.
    """
    if run.online is None:
        return None
    windows = run.online[run.online["device_id"].isin(names)]
    if windows["device_id"].nunique() < len(names):
        return None
    rows = names.get_indexer(pd.Index(windows["device_id"]))
    start, end = (windows[key].to_numpy(np.float64) for key in ("start_s", "end_s"))
    is_first = np.append(True, (np.diff(rows) != 0) | (start[1:] - end[:-1] > run.end_s / 2000))
    if is_first.sum() > _WINDOWS:
        return None
    ends = end[np.append(np.flatnonzero(is_first)[1:] - 1, len(end) - 1)]
    begin = np.round(start[is_first] / run.end_s * _TICKS)
    return rows[is_first], begin, np.round(ends / run.end_s * _TICKS) - begin


def _versions(run: "Run") -> list[float]:
    """Return the instants in s at which a version was first measured, thinned."""
    rows = run.metrics[run.metrics["source"] != "query"]
    first = np.sort(rows.groupby("version")["time_s"].min().to_numpy(np.float64))
    return [float(f"{at:.7g}") for at in first[thinned(len(first), _VERSIONS)]]


def _packed(numbers: npt.NDArray[Any]) -> str:
    return base64.b64encode(zlib.compress(numbers.tobytes(), 9)).decode()


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
    jobs = run.jobs
    is_used = jobs["kind"].str.startswith("train") & (jobs["outcome"] == "used")
    used = jobs.loc[is_used, "device_id"].value_counts()
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
    return Figure(
        id="participation",
        title="Participation",
        about=about,
        traces=[trace],
        x_title="devices, the most used first",
        y_title="training jobs used",
        layout={"xaxis": FROM_ZERO, "yaxis": FROM_ZERO},
    )


def states(run: "Run") -> Figure | None:
    """Return in what states devices were over time, or None if none ever worked."""
    jobs = run.started
    if jobs.empty or not run.end_s:
        return None
    step_s = _step(run.end_s)
    edges = np.append(np.arange(0.0, run.end_s, step_s), run.end_s)

    def mean(start: Array, end: Array) -> Array:
        # Differences of long sums may be below 0 by a rounding, and an axis then begins there.
        return np.maximum(np.diff(worked_by(start, end, edges)) / np.diff(edges), 0.0)

    at, which = jobs[list(PHASES)].to_numpy(np.float64), phases(jobs)
    counts = {
        name: mean(at[:, :-1][which == s], at[:, 1:][which == s]) for s, name in enumerate(STATES)
    }
    at_work = np.sum(list(counts.values()), axis=0)
    step_unit, step_length_s = time_unit(step_s * 2)
    about = f"Means over steps of {step_s / step_length_s:g} {step_unit}; at most "
    about += f"{at_work.max():.3g} devices worked."
    if run.online is not None:
        drawn, n_devices = run.online[run.online["is_drawn"]], int(run.summary["devices"])
        n_drawn = drawn["device_id"].nunique()
        windows = (drawn[key].to_numpy(np.float64) for key in ("start_s", "end_s"))
        online = mean(*windows) * n_devices / n_drawn
        # A job may go on where a device is offline, and drawn devices stand for all.
        counts["idle"] = np.maximum(online - at_work, 0.0)
        in_all = [np.average(each, weights=np.diff(edges)) for each in (online, at_work)]
        about += f" On average {in_all[0]:,.3g} of {n_devices:,} devices were online, and "
        about += f"{in_all[1]:,.3g} worked."
        if n_drawn < n_devices:
            about += f" Who was online is drawn from {n_drawn:,} of them."
    unit, length_s = time_unit(run.end_s)
    x = edges / length_s
    stacked = {"stackgroup": "devices", "line": {"width": 0, "shape": "hv"}}
    return Figure(
        id="states",
        title="Could more devices have worked?",
        about=about,
        traces=[
            curve({**STATES, "idle": "idle online"}[name], name, x, np.append(y, y[-1]), **stacked)
            for name, y in counts.items()
            if y.any()
        ],
        x_title=f"{run.time_name} ({unit})",
        y_title="devices",
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
    """Return the length in s of some 50 to 200 steps of a span."""
    choices = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, _HOUR_S, 6 * _HOUR_S, DAY_S, 7 * DAY_S)
    return next((step for step in choices if span_s / step <= _STEPS), 30 * DAY_S)


def reliability(run: "Run") -> Figure | None:
    """Return how often jobs finished against the chance that their devices had reported.

    A job finished if its reply arrived before its message expired, even if the server rejected it.
    Jobs in flight at the end of the run, and those in which the app failed, are left out. None if
    no device forecast itself.
    """
    status = run.jobs["status"].to_numpy(object)
    reported = run.jobs["reported_p_finish"].to_numpy(np.float64)
    known = np.isfinite(reported) & (status != IN_FLIGHT) & (status != CLIENT_ERROR)
    if not known.any():
        return None
    reported = reported[known]
    finished = np.isin(status[known].astype(str), _FINISHED).astype(np.float64)
    table = calibration(reported, finished)
    table = table[table["n"] > 0]
    shown = table[table["n"] >= FEWEST]
    base, score = float(finished.mean()), float(brier(reported, finished).mean())
    hover = "reported %{x:.0%}, finished %{y:.0%}, %{text}"
    more = {"text": [f"{count:,.0f} jobs" for count in shown["n"]], "hovertemplate": hover}
    dots = {"mode": "lines+markers", "marker": {"size": 7}}
    traces = [
        curve("devices", "series-0", shown["predicted"], shown["observed"], **dots, **more),
        reference("as reported", [0.0, 1.0], [0.0, 1.0]),
    ]
    return Figure(
        id="reliability",
        title="Reliability of reported forecasts",
        about=f"Before {len(reported):,} training jobs their devices had reported the chance to "
        f"finish: on average {reported.mean():.0%}, and {base:.0%} finished in time. "
        f"Brier score {score:.3f}; always reporting {base:.0%} has {base * (1 - base):.3f}. "
        f"Points stand for {FEWEST} jobs or more.",
        traces=[trace for trace in traces if trace["x"]],
        x_title="reported",
        y_title="finished",
        layout=SHARES,
        header=("reported", "finished", "jobs"),
        rows=[
            (f"{r.predicted:.2f}", f"{r.observed:.2f}", f"{r.n:,.0f}") for r in table.itertuples()
        ],
    )
