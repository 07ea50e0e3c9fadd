"""What each device did when: one row a device, one stroke for each phase of each job."""

from typing import Any

import numpy as np
import pandas as pd

from fedstale.reports.figure import Array, Figure, Index, numbers, plain, thinned, time_unit
from fedstale.reports.run_record import RunRecord

JOBS = 20_000
"""Jobs that the timeline of a page shows at most."""
_LABELLED = 40
_JOBS_AS_SVG = 1500  # prints sharply and needs no WebGL, but zooms slowly beyond
_LINES = {"type": "scatter", "mode": "lines"}
_LINES_AND_DOTS = {
    "type": "scattergl",
    "mode": "lines+markers",
    "marker": {"size": 3, "symbol": "square"},
}
_PHASES = (
    ("download", "started_at", "downloaded_at"),
    ("training", "downloaded_at", "trained_at"),
    ("upload", "trained_at", "reported_at"),
)


def timeline(run: RunRecord) -> Figure | None:
    """Return the timeline of a run, or None if no device ever started a job.

    All strokes of a phase are one line with breaks, so ten thousand jobs stay fluid.
    """
    events = run.events[np.isfinite(run.events["started_at"].to_numpy(np.float64))]
    if events.empty:
        return None
    order = events["device_id"].value_counts(sort=False).sort_index(kind="stable")
    order = order.sort_values(ascending=False, kind="stable")
    shown = _devices_shown(order.to_numpy(np.int64))
    names = order.index[shown]
    events = events[events["device_id"].isin(names)]
    left_out = len(events) - JOBS
    events = events.iloc[thinned(len(events), JOBS)]
    rows = pd.Index(names).get_indexer(events["device_id"]).astype(np.int64)
    unit, length_s = time_unit(run.end_s)
    about = (
        "One row a device, the most used on top. Work is lost when a device goes offline, is too "
        "late, or the server does not use its reply. Drag or use the buttons to zoom; a double "
        "click shows everything again."
    )
    if len(events) > _JOBS_AS_SVG:
        about += " Dots mark the ends of phases; zoom in to see how long they took."
    if len(names) < len(order):
        about += f" Shown: {len(names):,} of {len(order):,} devices, evenly spread over the order."
    if left_out > 0:
        about += f" Shown: {JOBS:,} of their {JOBS + left_out:,} jobs, evenly spread."
    height = int(np.clip(150 + 14 * len(names), 260, 640))
    axis: dict[str, Any] = {"range": [len(names) - 0.4, -0.6], "zeroline": False}
    if len(names) <= _LABELLED:
        labels = [plain(name if len(name) <= 18 else name[:17] + "…") for name in names]
        axis |= {"tickvals": list(range(len(names))), "ticktext": labels, "showgrid": False}
    return Figure(
        id="timeline",
        title="What the devices did",
        about=about,
        traces=_traces(run, events, rows, length_s, stroke=_stroke(height, len(names))),
        x_title=f"device time ({unit})",
        y_title="" if len(names) <= _LABELLED else "device (position)",
        layout={"yaxis": axis, "hovermode": "closest"},
        height=height,
        is_wide=True,
    )


def _devices_shown(jobs: Index) -> Index:
    """Return positions of the devices to show, so that whole rows are left out, not jobs."""
    if jobs.sum() <= JOBS:
        return np.arange(len(jobs), dtype=np.int64)
    return thinned(len(jobs), max(1, int(len(jobs) * JOBS / jobs.sum())))


def _stroke(height: int, n_rows: int) -> float:
    return float(np.clip(0.6 * (height - 110) / n_rows, 1.0, 10.0))


def _traces(
    run: RunRecord, events: pd.DataFrame, rows: Index, length_s: float, *, stroke: float
) -> list[dict[str, Any]]:
    status = events["status"].to_numpy(object)
    is_used = status == "reported"
    is_flying = status == "flying"
    spans = [
        (phase, is_used, events[start].to_numpy(float), events[end].to_numpy(float))
        for phase, start, end in _PHASES
    ]
    started, ended = events["started_at"].to_numpy(float), events["ended_at"].to_numpy(float)
    spans.append(("lost work", ~is_used & ~is_flying, started, ended))
    spans.append(("still at work at the end", is_flying, started, ended))
    traces = []
    for name, mask, start, end in spans:
        end = np.minimum(end, run.end_s)  # noqa: PLW2901
        drawn = mask & (end > start) & np.isfinite(end)
        if not drawn.any():
            continue
        jobs = events["job_id"].to_numpy(np.int64)[drawn].tolist()
        traces.append(
            {
                # A dot at each end keeps jobs in sight that are shorter than a pixel.
                **(_LINES if len(events) <= _JOBS_AS_SVG else _LINES_AND_DOTS),
                "name": name,
                "meta": name.split()[0],
                "line": {"width": round(stroke, 2)},
                "x": _broken(start[drawn] / length_s, end[drawn] / length_s),
                "y": _broken(rows[drawn].astype(float), rows[drawn].astype(float)),
                "customdata": [value for job in jobs for value in (job, job, None)],
                "hovertemplate": "job %{customdata}, %{x:.4~g}",
            }
        )
    return traces


def _broken(first: Array, second: Array) -> list[float | None]:
    """Return pairs of numbers, each followed by a break in the line."""
    return numbers(np.stack([first, second, np.full(len(first), np.nan)], axis=1).ravel())
