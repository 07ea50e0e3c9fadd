"""Figures of what a run cost and what came to nothing, and its clients' errors in words."""

from typing import TYPE_CHECKING

import pandas as pd

from fedstale.reports.figure import Figure, byte_unit, rows_of_bars, time_unit
from fedstale.runs import OUTCOMES, PHASES, REASONS, WAYS

if TYPE_CHECKING:
    from fedstale.reports.run import Run

_SHOWN_AS = {"used": "used", "wasted": "wasted", "in-flight": "in flight at the end"}


def client_errors_in_words(run: "Run") -> list[str]:
    """Return the commonest errors of a run's clients as lines of text."""
    lines = []
    for row in run.summary.get("client_errors", ()):
        where = f" ({row['where']})" if row["where"] else ""
        jobs = f"{row['jobs']:,} job{'s' * (row['jobs'] != 1)}"
        devices = f"{row['devices']:,} device{'s' * (row['devices'] != 1)}"
        lines.append(f"{jobs} of {devices}: {row['error']}{where}")
    return lines


def figures(run: "Run") -> list[Figure]:
    """Return the closed ledger: device time by phase and bytes by direction, by what they became.

    Nothing is returned for an account in which nothing was spent.
    """
    jobs = run.jobs
    unit, length_s = time_unit(float(jobs["busy_s"].sum()))
    size_unit, size = byte_unit(float(jobs["moved_bytes"].sum()))
    phases = dict(zip(PHASES, ("download", "training", "upload"), strict=True))
    ways = dict(zip(WAYS, ("to devices", "to the server"), strict=True))
    sums = jobs.groupby("outcome")[[*phases, *ways]].sum().reindex(OUTCOMES, fill_value=0.0).T
    accounts = (
        ("device-time", "Where device time went", phases, f"device-{unit}", length_s),
        ("traffic", "Where the bytes went", ways, size_unit, size),
    )
    return [
        account_figure(key, title, sums.loc[[*names]].rename(names) / scale, label)
        for key, title, names, label, scale in accounts
        if sums.loc[[*names]].to_numpy().any()
    ]


def account_figure(key: str, title: str, parts: pd.DataFrame, unit: str) -> Figure:
    """Return the bars of what was spent on each part of a job (rows), by outcome (columns)."""
    total = parts.to_numpy().sum()
    used, wasted, in_flight = parts.sum() / total
    table = pd.concat([parts, parts.sum().to_frame("total").T])
    table = table.assign(sum=table.sum(axis=1))
    return Figure(
        id=key,
        title=title,
        about=f"{total:,.4g} {unit} in all: {used:.0%} used, {wasted:.0%} wasted, "
        f"{in_flight:.0%} in flight when the run ended. Every job is counted once.",
        traces=[
            rows_of_bars(_SHOWN_AS[outcome], outcome, parts[outcome], parts.index)
            for outcome in OUTCOMES
            if parts[outcome].any()
        ],
        x_title=unit,
        layout={"barmode": "stack", "yaxis": {"autorange": "reversed"}},
        height=260,
        header=("", *(f"{_SHOWN_AS[name]} ({unit})" for name in OUTCOMES), f"sum ({unit})"),
        rows=[[name, *(f"{value:,.4g}" for value in row)] for name, *row in table.itertuples()],
    )


def failures(run: "Run") -> Figure | None:
    """Return how many jobs came to nothing, by how they ended, or None if none did."""
    wasted = run.jobs[run.jobs["outcome"] == "wasted"]
    if wasted.empty:
        return None
    endings = wasted.groupby("status")["busy_s"].agg(["size", "sum"])
    endings = endings.sort_values("size", ascending=False, kind="stable")
    reasons = wasted.groupby(["status", "reason"]).size().reset_index(name="jobs")
    reasons = reasons.sort_values(["jobs", "status", "reason"], ascending=[False, True, True])
    left_out = len(reasons) - REASONS
    hours = [f"{lost_s / 3600.0:.3g} h lost" for lost_s in endings["sum"]]
    more = {"text": hours, "textposition": "auto", "showlegend": False}
    about = f"{len(wasted):,} of {len(run.jobs):,} jobs came to nothing."
    if left_out > 0:
        about += f" The table lists the {REASONS} most frequent of {len(reasons):,} reasons."
    return Figure(
        id="failures",
        title="Why jobs came to nothing",
        about=about,
        traces=[rows_of_bars("jobs", "wasted", endings["size"], endings.index, **more)],
        x_title="jobs",
        layout={"yaxis": {"autorange": "reversed"}},
        height=140 + 36 * len(endings),
        header=("ended as", "reason", "jobs"),
        rows=[
            (str(row.status), str(row.reason), f"{row.jobs:,}")
            for row in reasons.head(REASONS).itertuples()
        ],
    )
