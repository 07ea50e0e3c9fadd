"""The run folders below a folder: what is there, and a page of it."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import nan
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

import pandas as pd

from fedstale.errors import ConfigError
from fedstale.files import is_held
from fedstale.reports.figure import cell_text
from fedstale.reports.page import REPORT, Link, write_figures
from fedstale.reports.run import parts_of
from fedstale.runs import CONFIG, LOCK, SUMMARY

RUNNING, LOST = "running", "lost"
"""Status of a run that goes on, and of one whose process ended without a summary."""


INDEX = "index.html"
NAMES = ("app", "strategy", "selector", "traces", "seed")
"""Facts that say what was run on what."""


@dataclass(frozen=True, slots=True)
class ListedRun:
    """One run folder."""

    folder: Path
    """Where it is."""
    status: str
    """How the run ended; or `RUNNING`, or `LOST`."""
    facts: Mapping[str, Any]
    """Its settings and figures by name; those that it does not have yet are missing."""


def listed_runs(root: Path) -> list[ListedRun]:
    """Return the runs in a folder and in the folders below it, by their paths.

    Raises:
        ConfigError: there is no such folder.
    """
    if not root.is_dir():
        raise ConfigError(f"folder = {str(root)!r} does not exist: expected one that holds runs")
    return [_read(path.parent) for path in sorted(root.rglob(CONFIG)) if _is_run(path.parent)]


def ranked(runs: Sequence[ListedRun], by: str) -> list[ListedRun]:
    """Return runs by a fact, largest first; those without it come last.

    Raises:
        ConfigError: no run has such a fact, or it is no number.
    """
    known = sorted({name for run in runs for name, v in run.facts.items() if _is_number(v)})
    if runs and by not in known:
        raise ConfigError(f"sort = {by!r}: expected one of {', '.join(known)}")
    have = [run for run in runs if _is_number(run.facts.get(by))]
    return sorted(have, key=lambda run: -run.facts[by]) + [run for run in runs if run not in have]


def server_metrics(runs: Sequence[ListedRun]) -> list[str]:
    """Return the names of what the server has measured in some runs.

    Clients' own metrics are many, and say less.
    """
    return sorted({name for run in runs for name in run.facts if name.startswith("server ")})


def write_index(root: Path, runs: Sequence[ListedRun]) -> Path:
    """Write a page that lists runs, with links to theirs, and return it.

    Args:
        root: the folder of the runs, in which the page is written.
        runs: in this order.

    Raises:
        ConfigError: the page cannot be written.
    """
    metrics, rows = server_metrics(runs), []
    for run in runs:
        inside = run.folder.relative_to(root)
        page = inside / REPORT if (run.folder / REPORT).is_file() else None
        took, worked = (run.facts.get(name, nan) / 3600.0 for name in ("virtual_s", "device_s"))
        rows.append(
            {
                "run": Link(str(inside), quote(page.as_posix())) if page else str(inside),
                "began": run.facts.get("began"),
                "status": run.status,
                **{name: PurePath(cell_text(run.facts.get(name))).name for name in NAMES},
                "wasted": f"{run.facts['wasted']:.0%}" if "wasted" in run.facts else None,
                **{name: run.facts.get(name) for name in metrics},
                "rounds": run.facts.get("rounds"),
                "virtual time (h)": took,
                "device-hours": worked,
            }
        )
    first = f"{len(runs):,} runs in {root.resolve().name}. The heads of the table sort it."
    tables = {"The runs": pd.DataFrame(rows, dtype=object)}
    return write_figures("Runs", first, [], root / INDEX, tables=tables)


def _is_run(folder: Path) -> bool:
    """Return whether a folder holds a run, and not an app or a part of one."""
    return (folder / CONFIG).is_file() and any((folder / n).is_file() for n in (SUMMARY, LOCK))


def _read(folder: Path) -> ListedRun:
    facts: dict[str, Any] = {}
    try:
        config = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
        facts |= {name: config[name] for name in ("app", "traces", "seed") if name in config}
        began = datetime.fromtimestamp((folder / CONFIG).stat().st_mtime).astimezone()
        facts["began"] = f"{began:%Y-%m-%d %H:%M}"
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        facts |= {name: summary[name] for name in ("rounds", "virtual_s", "wall_s")}
        facts.setdefault("seed", summary["seed"])
        facts["jobs"], spent = summary["jobs"]["sent"], summary["device_s"]
        if spent["total"]:
            facts |= {"device_s": spent["total"], "wasted": spent["wasted"] / spent["total"]}
        facts = {**parts_of(config, summary), **facts}
        facts |= summary["metrics"]
        return ListedRun(folder, str(summary["status"]), facts)
    except FileNotFoundError:
        return ListedRun(folder, RUNNING if is_held(folder / LOCK) else LOST, facts)
    except (OSError, ValueError, KeyError, TypeError) as problem:
        return ListedRun(folder, f"unreadable: {type(problem).__name__}", facts)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
