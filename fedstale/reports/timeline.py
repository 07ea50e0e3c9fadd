"""What every device did and when: the first figure of a run, and a trace for Perfetto.

Each device is a row, with its jobs in the colours of their phases. Of many devices a raster is
drawn instead: rows stand for groups of devices, and the colour of a cell tells what share of its
device-hours went into each state.
"""

import base64
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedstale.reports.costs import SHOWN_AS
from fedstale.reports.figure import Array, Index, thinned, time_unit, without_folders

if TYPE_CHECKING:
    from fedstale.reports.run import Run

TRACE = "timeline.json"
JOBS, DEVICES = 12_000, 2_000
"""Of more jobs, or more devices with jobs, a raster is drawn."""
ROWS, COLUMNS = 100, 320
"""Cells of a raster."""
USED = ("download", "training", "evaluation", "upload")
STATES = {name: SHOWN_AS.get(name, name) for name in (*USED, "wasted", "in-flight")}
"""What devices do with jobs, by the roles of the colours: phases of used ones, and all others."""
ORDERS = {"used": "most used first", "wasted": "most wasted first", "name": "by name"}
"""How rows can be sorted."""
_TICKS = 1 << 20
_WINDOWS = 6_000
_FULL = 0.995
_LEVELS = 15
_VERSIONS, _ENDINGS = 600, 200
_MICROSECONDS = 1e6
_ROW_PX, _LEAST_PX, _MOST_PX = 15, 200, 620
PHASES = ("started_at", "downloaded_at", "trained_at", "reported_at")
"""Columns of the instants at which the phases of a job begin and end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What a page draws of the devices."""

    about: str
    """What is shown, in sentences."""
    key: Sequence[tuple[str, str]]
    """Roles of the colours, and what they stand for."""
    height: int
    """Height in CSS pixels."""
    orders: dict[str, str]
    """How rows can be sorted: the name of each order and its words."""
    data: dict[str, Any]
    """What timeline.js needs."""

    @property
    def is_raster(self) -> bool:
        """Whether rows stand for groups of devices."""
        return "raster" in self.data


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
    spans = phases(jobs)
    key = [item for i, item in enumerate(STATES.items()) if (spans == i).any()]
    is_raster = len(jobs) > JOBS or len(table) > DEVICES
    unit, unit_s = time_unit(run.end_s)
    data: dict[str, Any] = {
        **{"end": run.end_s, "time": run.time_name, "unit": unit, "unit_s": unit_s},
        **{"n_devices": len(table), "n_jobs": len(jobs), "ticks": _TICKS},
        **{"versions": _versions(run), "states": [*STATES]},
    }
    if is_raster:
        orders = {by: ORDERS[by] for by in ("used", "wasted")}
        ordered = [table.sort_values(by, ascending=False, kind="stable") for by in orders]
        shares = [raster(run, jobs, order.index) for order in ordered]
        full = min(float(np.quantile(shares[0].sum(axis=2), _FULL)) or 1.0, 1.0)
        about = (
            f"The {len(table):,} devices that started a job, in rows of several; the colour of a "
            f"cell tells what they did in that time. It is full where they worked "
            f"{100 * full:.2g}% of it, and half where a quarter of that. {about}"
        )
        # Work that takes little of the time is seen all the same.
        rasters = [np.round(_LEVELS * _brightened(one / full)).astype(np.uint8) for one in shares]
        shape = {"rows": len(rasters[0]), "columns": COLUMNS, "levels": _LEVELS}
        data |= {"raster": shape, "packed": [_packed(one) for one in rasters]}
        return Timeline(about=about, key=key, height=_MOST_PX, orders=orders, data=data)
    windows = _windows(run, table.index)
    grey = "" if windows is None else ", grey while it was online"
    about = f"One row a device{grey}. {about} Click on a job to read it."
    rows = table.index.get_indexer(pd.Index(jobs["device_id"]))
    ticks = np.round(jobs[list(PHASES)].to_numpy(np.float64) / run.end_s * _TICKS)
    which, endings = pd.factorize(_endings(jobs))
    columns = [jobs["job_id"], rows, ticks[:, 0], *np.diff(ticks, axis=1).T, spans[:, 1], which]
    data |= {
        "endings": endings.tolist(),
        "devices": [str(name) for name in table.index],
        "used": table["used"].tolist(),
        "wasted": table["wasted"].tolist(),
        "packed": [_packed(np.stack(columns).astype("<u4"))],
    }
    if windows is not None:
        data["packed"].append(_packed(np.stack(windows).astype("<u4")))
    height = int(np.clip(60 + _ROW_PX * len(table), _LEAST_PX, _MOST_PX))
    return Timeline(about=about, key=key, height=height, orders=ORDERS, data=data)


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


def _brightened(shares: Array) -> Array:
    """Scale shares so that their sum over states becomes its root, at most 1."""
    total = shares.sum(axis=2, keepdims=True)
    return shares * np.minimum(np.sqrt(total), 1.0) / np.maximum(total, np.finfo(float).tiny)


def raster(run: "Run", jobs: pd.DataFrame, order: "pd.Index[Any]") -> Array:
    """Return the shares of device-hours in each state, of groups of devices over time.

    Args:
        run: of the jobs.
        jobs: those that were started, with their four instants and states.
        order: the devices in the order of the rows.

    Returns:
        Shares, shape (rows, columns, states); at most `ROWS` rows.
    """
    n_rows = min(ROWS, len(order))
    row_of = np.arange(len(order)) * n_rows // len(order)
    rows = row_of[order.get_indexer(pd.Index(jobs["device_id"]))]
    instants = jobs[list(PHASES)].to_numpy(np.float64) / run.end_s * COLUMNS
    spent, which = np.zeros((n_rows, COLUMNS, len(STATES))), phases(jobs)
    for s in np.unique(which):
        job, phase = np.nonzero(which == s)
        start, end = instants[job, phase], instants[job, phase + 1]
        spent[:, :, s] = _spread(rows[job], start, end, n_rows)
    # Sums of slopes may end a little below 0.
    return np.asarray(
        np.maximum(spent, 0.0) / np.bincount(row_of, minlength=n_rows)[:, np.newaxis, np.newaxis]
    )


def _spread(rows: Index, start: Array, end: Array, n_rows: int) -> Array:
    """Return how much of each cell spans cover, in columns; spans are in columns, too."""
    # The integral of a span up to a column's end is a ramp: add its slopes, and sum twice.
    covered = np.zeros((n_rows, COLUMNS + 2))
    for at, sign in ((start, 1.0), (end, -1.0)):
        column = np.minimum(at.astype(np.int64), COLUMNS)
        rest = at - column
        np.add.at(covered, (rows, column), sign * (1.0 - rest))
        np.add.at(covered, (rows, column + 1), sign * rest)
    return np.asarray(np.cumsum(covered, axis=1)[:, :COLUMNS])


def _versions(run: "Run") -> list[float]:
    """Return the instants in s at which a version was first measured, thinned."""
    rows = run.metrics[run.metrics["source"] != "query"]
    first = np.sort(rows.groupby("version")["time_s"].min().to_numpy(np.float64))
    return [float(f"{at:.7g}") for at in first[thinned(len(first), _VERSIONS)]]


def _packed(numbers: npt.NDArray[Any]) -> str:
    return base64.b64encode(zlib.compress(numbers.tobytes(), 9)).decode()


def perfetto(run: "Run") -> str:
    """Return the jobs of a run in Chrome's trace format, which opens in ui.perfetto.dev.

    A device is a thread and a phase a slice; time is virtual time. What was wasted is one slice,
    with its reason.
    """
    events = ",\n".join(json.dumps(event, allow_nan=False) for event in _trace_events(run))
    return f'{{"displayTimeUnit":"ms","traceEvents":[\n{events}\n]}}\n'


def _trace_events(run: "Run") -> Iterator[dict[str, Any]]:
    jobs = run.started
    threads = {name: i for i, name in enumerate(sorted(jobs["device_id"].unique()), start=1)}
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": run.name}}
    for name, thread in threads.items():
        yield {"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": name}}
    for at in _versions(run):
        yield {"ph": "i", "pid": 1, "tid": 0, "s": "p", "name": "version", "ts": at * _MICROSECONDS}
    told = jobs[["device_id", "job_id", "status", "reason", "state"]].itertuples(index=False)
    instants = (jobs[list(PHASES)].to_numpy(np.float64) * _MICROSECONDS).tolist()
    words = list(STATES.values())
    for (device, number, status, reason, state), which, at in zip(
        told, phases(jobs).tolist(), instants, strict=True
    ):
        args = {"job": number, "status": status, **({"reason": reason} if state else {})}
        # The phases of a job that was not used are one span.
        for s, (start, end) in list(zip(which, pairwise(at), strict=True))[: 1 if state else 3]:
            slice_ = {"ph": "X", "pid": 1, "tid": threads[device], "cat": "job", "args": args}
            yield {"name": words[s], "ts": start, "dur": end - start, **slice_}
