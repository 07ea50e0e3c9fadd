"""Who took part, how evenly, and how many devices worked at a time."""

import numpy as np
import numpy.typing as npt

from fedstale.reports.figure import Array, Figure, Index, numbers, thinned, time_unit
from fedstale.reports.run_record import RunRecord

DEVICES = 5000
"""Devices that the curve of participation shows at most."""


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


def used_jobs(run: RunRecord) -> Index:
    """Return how many training jobs of each enrolled device were used, the most first.

    A device that was never used counts 0; shape (devices,).
    """
    events = run.events
    is_training = events["kind"].str.startswith("train").to_numpy(bool)
    used = events.loc[is_training & (run.outcome == "used"), "device_id"].value_counts()
    counts = np.zeros(max(int(run.summary["devices"]), len(used)), dtype=np.int64)
    counts[: len(used)] = used.to_numpy()
    return counts


def participation(run: RunRecord) -> Figure | None:
    """Return used training jobs over devices, or None if nobody's work was used."""
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
    trace = {
        "type": "scatter",
        "mode": "lines",
        "fill": "tozeroy",
        "line": {"shape": "hvh", "width": 2},
        "name": "training jobs used",
        "meta": "series-0",
        "showlegend": False,
        "x": (kept + 1).tolist(),
        "y": counts[kept].tolist(),
    }
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


def working(run: RunRecord) -> Figure | None:
    """Return how many devices worked on average in each hour, or None if none ever did."""
    start = run.events["started_at"].to_numpy(np.float64)
    end = np.minimum(run.events["ended_at"].to_numpy(np.float64), run.end_s)
    drawn = np.isfinite(start) & (end > start)
    if not drawn.any() or not run.end_s:
        return None
    step_s = _step(run.end_s)
    edges = np.append(np.arange(0.0, run.end_s, step_s), run.end_s)
    mean = np.diff(worked_by(start[drawn], end[drawn], edges)) / np.diff(edges)
    unit, length_s = time_unit(run.end_s)
    step_unit, step_length_s = time_unit(step_s * 2)
    trace = {
        "type": "bar",
        "name": "devices at work",
        "meta": "series-2",
        "showlegend": False,
        "x": numbers((edges[:-1] + edges[1:]) / 2 / length_s),
        "width": numbers(np.diff(edges) / length_s),
        "y": numbers(mean),
    }
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
    return _since(np.sort(start), instants) - _since(np.sort(end), instants)


def _since(ordered: Array, instants: Array) -> Array:
    """Return the sum over all events before each instant of the time since then."""
    total = np.concatenate(([0.0], np.cumsum(ordered)))
    n = np.searchsorted(ordered, instants, side="right")
    return n * instants - total[n]


def _step(span_s: float) -> float:
    """Return an hour, unless a run is too short or too long for it to show anything."""
    if span_s < 6 * 3600.0:
        choices = (1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0)
        return next((step for step in choices if span_s / step <= 60), 600.0)
    return next(
        (hours * 3600.0 for hours in (1, 6, 24, 168) if span_s / hours / 3600.0 <= 720),
        30 * 86_400.0,
    )
