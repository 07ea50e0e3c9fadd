"""Write what a benchmark measured, with everything needed to judge or repeat it."""

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fedstale.machine import processor

RESULTS = Path(__file__).parents[1] / "results"
QUICK, UNPUBLISHED = "-quick", "-unpublished"
"""Ends of names: of a benchmark's quick form, and of what nobody could repeat."""
MADE = ("benchmarks/results", "*.md", "fedstale/contrib/suite/table.json")
"""What measuring writes, or `pages.py` from results; it changes nothing that is measured next."""
_BEGAN = time.monotonic()


def write_result(
    name: str,
    rows: Sequence[Mapping[str, object]],
    *,
    command: str,
    speed: float | None = None,
    quick: bool = False,
) -> Path:
    """Write benchmarks/results/NAME.json and return its path.

    What is published can be repeated: files are those of a commit, and a branch has it. Otherwise
    the rows go to NAME-unpublished.json. A quick form goes to NAME-quick.json and is not published.

    Args:
        name: of the result.
        rows: what was measured.
        command: repeats the measurement.
        speed: of the machine at that time, by `naive_clients_per_s` of speed/batched.py; for
            figures that are no ratios.
        quick: the measurement's quick form, by --quick.

    Raises:
        RuntimeError: it cannot be repeated.
    """
    RESULTS.mkdir(exist_ok=True)
    made_at = commit()
    lacks = "" if quick else lack(made_at)
    path = RESULTS / f"{name}{QUICK if quick else UNPUBLISHED if lacks else ''}.json"
    result = {
        "command": command + " --quick" * quick,
        "commit": made_at,
        "wall_s": round(time.monotonic() - _BEGAN, 1),
        "versions": {"python": platform.python_version()} | _versions(),
        "hardware": {"cpu": processor(), "cores": os.cpu_count(), "naive_clients_per_s": speed},
        "load_average": os.getloadavg(),
    }
    path.write_text(as_text(result, rows), encoding="utf-8")
    if lacks:
        raise RuntimeError(f"{path} is no result: {lacks}")
    return path


def as_text(about: Mapping[str, object], rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows as JSON, one a line so that changes can be read, below what is said of them."""
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    head = json.dumps({**about, "rows": []}, indent=2).removesuffix("]\n}")
    return f"{head}\n{lines}\n  ]\n}}\n"


def read_result(name: str) -> dict[str, Any]:
    """Return what `write_result` wrote by a name."""
    path = RESULTS / f"{name}.json"
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def commit() -> str | None:
    """Return the commit that is checked out, marked where files differ that no result made."""
    found = git("describe", "--always", "--abbrev=40")
    others = (f":(top,exclude){each}" for each in MADE)
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", *others)
    return f"{found}-dirty" if found and changed else found or None


def lack(made_at: str | None) -> str:
    """Return what keeps anybody from repeating what was measured at a commit; empty if nothing."""
    if made_at is None:
        return "expected a git checkout"
    if made_at.endswith("-dirty"):
        return "files differ from their commit: commit them, and measure again (--keep)"
    if not git("branch", "--all", "--contains", made_at):
        return f"no branch has commit {made_at[:10]}: check one out, and measure again (--keep)"
    return ""


def git(*arguments: str) -> str:
    """Return what git prints; nothing where it fails."""
    run = subprocess.run(
        ["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=False
    )
    return run.stdout.strip()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the range of some repeats."""
    return {
        "median": round(statistics.median(values), 1),
        "min": round(min(values), 1),
        "max": round(max(values), 1),
        "repeats": len(values),
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in ("numpy", "pandas", "torch", "flwr"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
