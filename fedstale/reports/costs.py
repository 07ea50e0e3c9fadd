"""Figures of the costs and the waste of a run, and its clients' errors in words."""

import json
import os
from typing import TYPE_CHECKING

import pandas as pd

from fedstale.errors import first_line
from fedstale.reports.account import DOWNLOADS, EVALUATION, IDLE, SLOW, UPLOADS, Advice
from fedstale.reports.figure import Figure, byte_unit, rows_of_bars, without_folders
from fedstale.runs import ADVISED, OUTCOMES, REASONS, WAYS

if TYPE_CHECKING:
    from fedstale.reports.run import Run

NAMED = 0.05
"""Share of an account from which on it is named what took it."""
SHOWN_AS = {"used": "used", "wasted": "wasted", "in-flight": "in flight at the end"}
"""What a page calls each outcome."""


def client_errors_in_words(run: "Run") -> list[str]:
    """Return the commonest errors of a run's clients as lines of text."""
    lines = []
    for row in run.summary.get("client_errors", ()):
        where = f" ({row['where']})" if row["where"] else ""
        jobs = f"{row['jobs']:,} job{'s' * (row['jobs'] != 1)}"
        devices = f"{row['devices']:,} device{'s' * (row['devices'] != 1)}"
        lines.append(f"{jobs} of {devices}: {row['error']}{where}")
    return lines


def besides_training(run: "Run") -> str:
    """Return in a sentence which shares evaluations, queries and downloads took; maybe nothing.

    Downloads are about half of all traffic in any run, so they are named by their time.
    """
    jobs = run.jobs
    accounts = {"work": "work", "busy_s": "device-hours", "moved_bytes": "traffic"}
    names = {column: name for column, name in accounts.items() if jobs[column].any()}
    totals = jobs[[*names]].sum()
    found = {
        what: jobs[of].assign(busy_s=jobs["compute_s"])[[*names]].sum() / totals
        for what, of in _kinds(jobs).items()
        if what != "training"
    }
    moved = jobs.assign(work=0.0, busy_s=jobs["download_s"], moved_bytes=jobs[WAYS[0]])
    downloads = moved[[*names]].sum() / totals
    if "busy_s" in names and downloads["busy_s"] >= NAMED:
        found["downloads"] = downloads
    parts = []
    for what, own in found.items():
        shares = [f"{x:.0%} of the {names[str(column)]}" for column, x in own.items() if x >= NAMED]
        *some, last = shares or [""]
        parts += [f"{what} took {', '.join(some)}{' and ' * bool(some)}{last}"] if last else []
    return f"besides training, {'; '.join(parts)}" if parts else ""


def note_advice(before: "Run", after: "Run", taken: Advice) -> None:
    """Write into a run's folder what advice on an earlier one promised, and what came of it."""
    was, now = _cost(before, taken.cause), _cost(after, taken.cause)
    is_absolute = taken.cause not in (UPLOADS, DOWNLOADS, EVALUATION, *SLOW)
    noted = {
        "before": os.path.relpath(before.folder, after.folder),
        "do": taken.do,
        "change": dict(taken.change),
        "promised": taken.saves,
        "between": list(taken.between),
        "achieved": (was - now) / (1.0 if is_absolute or not was else was),
    }
    (after.folder / ADVISED).write_text(json.dumps(noted, indent=2), encoding="utf-8")


def _cost(run: "Run", cause: str) -> float:
    """Return what advice on a cause lowers: a share of the run, or what a job or a version took."""
    if cause == IDLE:
        return next((each.share for each in run.advice if each.cause == IDLE), 0.0)
    busy_s, n_versions = run.jobs["busy_s"], max(int(run.summary["rounds"]), 1)
    if cause in SLOW:
        return run.end_s / n_versions
    if cause == EVALUATION:
        return float(busy_s.sum()) / n_versions
    if cause in (UPLOADS, DOWNLOADS):
        return float(busy_s.mean())
    return run.costs["device_time_wasted"]


def figures(run: "Run") -> list[Figure]:
    """Return the closed ledger: device-hours by phase, work, and bytes by direction.

    Each by what it became. Nothing is returned for an account in which nothing was spent, nor of
    work that is all of one kind.
    """
    kinds = _kinds(run.jobs)
    own = {name: run.jobs["compute_s"].where(of) for name, of in kinds.items()}
    work = {f"work of {name}": run.jobs["work"].where(of) for name, of in kinds.items()}
    jobs = run.jobs.assign(**own, **work)
    size_unit, size = byte_unit(float(jobs["moved_bytes"].sum()))
    phases = {"download_s": "download", **{name: name for name in own}, "upload_s": "upload"}
    works = dict(zip(work, own, strict=True)) if len(own) > 1 else {}
    ways = dict(zip(WAYS, ("to devices", "to the server"), strict=True))
    sums = jobs.groupby("outcome")[[*phases, *works, *ways]].sum()
    sums = sums.reindex(OUTCOMES, fill_value=0.0).T
    accounts = (
        ("device-hours", "Where device-hours went", phases, "device-hours", 3600.0),
        ("work", "Where the work went", works, "work units", 1.0),
        ("traffic", "Where the bytes went", ways, size_unit, size),
    )
    return [
        account_figure(key, title, sums.loc[[*names]].rename(names) / scale, label)
        for key, title, names, label, scale in accounts
        if sums.loc[[*names]].to_numpy().any()
    ]


def _kinds(jobs: pd.DataFrame) -> dict[str, "pd.Series[bool]"]:
    """Mask the jobs of each kind that there is, by its name."""
    main = jobs["kind"].str.split(".").str[0]
    is_training, is_evaluation = main == "train", main == "evaluate"
    kinds = {
        "training": is_training,
        "evaluation": is_evaluation,
        "queries": ~(is_training | is_evaluation),
    }
    return {name: of for name, of in kinds.items() if of.any()}


def account_figure(key: str, title: str, parts: pd.DataFrame, unit: str) -> Figure:
    """Return the bars of what was spent on each part of a job (rows), by outcome (columns)."""
    total = parts.to_numpy().sum()
    used, wasted, in_flight = parts.sum() / total
    most = (parts.sum(axis=1) / total).sort_values(ascending=False, kind="stable")
    named = ", ".join(f"{name} {x:.0%}" for name, x in most.items() if x >= NAMED)
    table = pd.concat([parts, parts.sum().to_frame("total").T])
    table = table.assign(sum=table.sum(axis=1))
    return Figure(
        id=key,
        title=title,
        about=f"{total:,.4g} {unit} in all: {named}. {used:.0%} used, {wasted:.0%} wasted, "
        f"{in_flight:.0%} in flight when the run ended. Every job is counted once.",
        traces=[
            rows_of_bars(SHOWN_AS[outcome], outcome, parts[outcome], parts.index)
            for outcome in OUTCOMES
            if parts[outcome].any()
        ],
        x_title=unit,
        layout={"barmode": "stack", "yaxis": {"autorange": "reversed"}},
        height=260,
        header=("", *(f"{SHOWN_AS[name]} ({unit})" for name in OUTCOMES), f"sum ({unit})"),
        rows=[[name, *(f"{value:,.4g}" for value in row)] for name, *row in table.itertuples()],
    )


def failures(run: "Run") -> Figure | None:
    """Return the figure of wasted jobs by status, or None if there are none."""
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
            (str(row.status), without_folders(first_line(row.reason)), f"{row.jobs:,}")
            for row in reasons.head(REASONS).itertuples()
        ],
    )
