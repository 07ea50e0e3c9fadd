"""Where the device-seconds and bytes of a run went: used, wasted, or in flight at its end.

Work is used if the app got its reply and did not reject it. The sums are over the rows of
events.parquet, in which whatever a device spent appears exactly once.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from fedstale.reports.figure import Array, Figure, byte_unit, rows_of_bars, time_unit
from fedstale.simulation.jobs import IN_FLIGHT
from fedstale.strategies.server.runtime import REPORTED

if TYPE_CHECKING:
    from fedstale.reports.run import Run

_PHASES = ("download_s", "compute_s", "upload_s")
_WAYS = ("downloaded_bytes", "uploaded_bytes")
COST_COLUMNS = ("status", *_PHASES, *_WAYS)
"""What the costs of a run are computed from."""
OUTCOMES = ("used", "wasted", "in-flight")
REASONS = 15
"""Reasons that the table of failures lists at most."""
_SHOWN_AS = {"used": "used", "wasted": "wasted", "in-flight": "in flight at the end"}


def ledger(events: pa.Table) -> dict[str, dict[str, Any]]:
    """Return the closed accounts of a run.

    Args:
        events: one row a job, as `TraceGrid.events` returns it, with at least `COST_COLUMNS`.

    Returns:
        `jobs` by status; and `device_s` (download, training and upload together), `compute_s` and
        `bytes` (both ways), each with its `total` and its parts `used`, `wasted` and `in-flight`.
    """
    status = events["status"]
    counts = {row["values"]: row["counts"] for row in pc.value_counts(status).to_pylist()}
    is_used, is_in_flight = pc.equal(status, REPORTED), pc.equal(status, IN_FLIGHT)
    masks = is_used, pc.invert(pc.or_(is_used, is_in_flight)), is_in_flight

    def account(values: pa.ChunkedArray) -> dict[str, float]:
        parts = [values, *(values.filter(mask) for mask in masks)]
        sums = [float(pc.sum(part).as_py() or 0.0) for part in parts]
        return dict(zip(("total", *OUTCOMES), sums, strict=True))

    download, compute, upload = (events[name] for name in _PHASES)
    return {
        "jobs": {"sent": len(events), **dict(sorted(counts.items()))},
        "device_s": account(pc.add(pc.add(download, compute), upload)),
        "compute_s": account(compute),
        "bytes": account(pc.add(*(events[name] for name in _WAYS))),
    }


def busy_s(jobs: pd.DataFrame) -> Array:
    """Return the seconds that a device is known to have spent on each job; shape (jobs,)."""
    return np.nansum(jobs[list(_PHASES)].to_numpy(np.float64), axis=1)


def moved_bytes(jobs: pd.DataFrame) -> Array:
    """Return the bytes that each job is known to have moved, both ways; shape (jobs,)."""
    return np.nansum(jobs[list(_WAYS)].to_numpy(np.float64), axis=1)


def outcomes(jobs: pd.DataFrame) -> npt.NDArray[np.object_]:
    """Return what each job counts as: used, wasted or in flight; shape (jobs,)."""
    status = jobs["status"].to_numpy(object)
    return np.where(
        status == REPORTED, "used", np.where(status == IN_FLIGHT, "in-flight", "wasted")
    ).astype(object)


def figures(run: "Run") -> list[Figure]:
    """Return the closed ledger: device time by phase and bytes by direction, by what they became.

    Nothing is returned for an account in which nothing was spent.
    """
    unit, length_s = time_unit(float(run.busy_s.sum()))
    size_unit, size = byte_unit(float(run.moved_bytes.sum()))
    phases, ways = ("download", "training", "upload"), ("to devices", "to the server")
    accounts = (
        ("device-time", "Where device time went", phases, _PHASES, f"device-{unit}", length_s),
        ("traffic", "Where the bytes went", ways, _WAYS, size_unit, size),
    )
    sums = run.jobs[[*_PHASES, *_WAYS]].groupby(run.outcome).sum().reindex(OUTCOMES, fill_value=0.0)
    return [
        _account(key, title, names, parts / scale, label)
        for key, title, names, columns, label, scale in accounts
        for parts in (sums[list(columns)].to_numpy(np.float64).T,)
        if parts.sum()
    ]


def _account(key: str, title: str, names: Sequence[str], parts: Array, unit: str) -> Figure:
    total = parts.sum()
    used, wasted, in_flight = parts.sum(axis=0) / total
    traces = [
        rows_of_bars(_SHOWN_AS[outcome], outcome, part, names)
        for outcome, part in zip(OUTCOMES, parts.T, strict=True)
        if part.any()
    ]
    rows = [
        [name, *(f"{value:,.4g}" for value in row), f"{row.sum():,.4g}"]
        for name, row in zip((*names, "total"), [*parts, parts.sum(axis=0)], strict=True)
    ]
    return Figure(
        id=key,
        title=title,
        about=f"{total:,.4g} {unit} in all: {used:.0%} used, {wasted:.0%} wasted, "
        f"{in_flight:.0%} in flight when the run ended. Every job is counted once.",
        traces=traces,
        x_title=unit,
        layout={"barmode": "stack", "yaxis": {"autorange": "reversed"}},
        height=260,
        header=("", *(f"{_SHOWN_AS[name]} ({unit})" for name in OUTCOMES), f"sum ({unit})"),
        rows=rows,
    )


def failures(run: "Run") -> Figure | None:
    """Return how many jobs came to nothing, by how they ended, or None if none did."""
    wasted = run.jobs[run.outcome == "wasted"]
    if wasted.empty:
        return None
    counts = wasted["status"].value_counts().sort_index(kind="stable")
    counts = counts.sort_values(ascending=False, kind="stable")
    lost = wasted.assign(busy_s=busy_s(wasted)).groupby("status")["busy_s"].sum() / 3600.0
    reasons = wasted.groupby(["status", "reason"]).size().reset_index(name="jobs")
    reasons = reasons.sort_values(["jobs", "status", "reason"], ascending=[False, True, True])
    left_out = len(reasons) - REASONS
    hours = [f"{lost[status]:.3g} h lost" for status in counts.index]
    more = {"text": hours, "textposition": "auto", "showlegend": False}
    about = f"{len(wasted):,} of {len(run.jobs):,} jobs came to nothing."
    if left_out > 0:
        about += f" The table lists the {REASONS} most frequent of {len(reasons):,} reasons."
    return Figure(
        id="failures",
        title="Why jobs came to nothing",
        about=about,
        traces=[rows_of_bars("jobs", "wasted", counts, counts.index, **more)],
        x_title="jobs",
        layout={"yaxis": {"autorange": "reversed"}},
        height=140 + 36 * len(counts),
        header=("ended as", "reason", "jobs"),
        rows=[
            (str(row.status), str(row.reason), f"{row.jobs:,}")
            for row in reasons.head(REASONS).itertuples()
        ],
    )
