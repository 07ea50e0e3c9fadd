"""Figure of the devices over time: the first one of a run.

Each device is a row, with its jobs in the colours of their phases. Of many devices some are drawn,
evenly spread.
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
from fedstale.reports.figure import Array, Index, thinned, time_unit, without_folders

if TYPE_CHECKING:
    from fedstale.reports.run import Run

JOBS, DEVICES = 12_000, 2_000
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
    n_drawn = min(DEVICES, max(JOBS * len(table) // len(jobs), 1))
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
