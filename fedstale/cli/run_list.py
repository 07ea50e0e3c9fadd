"""`fedstale runs`: list the run folders below a folder."""

import json
import tomllib
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer

from fedstale.cli.output import AsJson, one_sentence
from fedstale.errors import ConfigError

RUNNING, LOST = "running", "lost"
"""Status of a run that goes on, and of one whose process ended without a summary."""
_NAMES = ("run", "status", "app", "strategy", "selector", "traces", "seed", "rounds", "virtual_s")


@one_sentence()
def runs(
    folder: Annotated[Path, typer.Argument(help="Folder that holds runs.")] = Path("runs"),
    sort: Annotated[
        str | None, typer.Option(help="Largest first, by a column such as 'server accuracy'.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the runs in a folder and below it."""
    found = listed_runs(folder)
    if sort is not None:
        known = {key for run in found for key, value in run.items() if _is_number(value)}
        if found and sort not in known:
            raise ConfigError(f"sort = {sort!r}: expected one of {', '.join(sorted(known))}")
        found.sort(key=lambda run: -run.get(sort, -inf))
    if as_json:
        typer.echo(json.dumps(found))
        return
    import pandas as pd

    from fedstale.live import duration

    # Clients' own metrics are many, and say less.
    metrics = sorted({key for run in found for key in run if key.startswith("server ")})
    columns = dict.fromkeys([*_NAMES, *metrics, *([] if sort is None else [sort])])
    table = pd.DataFrame(found, columns=[*columns], dtype=object).set_index("run")
    for name in ("app", "traces"):
        table[name] = table[name].map(lambda path: Path(path).name, na_action="ignore")
    table["virtual_s"] = table["virtual_s"].map(duration, na_action="ignore")
    table = table.rename(columns={"virtual_s": "virtual"})
    text = table.to_string(na_rep="", float_format="{:.4f}".format, index_names=False)
    typer.echo(text if found else "no run there")


def listed_runs(root: Path) -> list[dict[str, Any]]:
    """Return the runs in a folder and in the folders below it, by their paths.

    Returns:
        Of each its folder, how it ended (or `RUNNING`, or `LOST`), and its settings and figures by
        name; those that it does not have yet are missing.

    Raises:
        ConfigError: there is no such folder.
    """
    from fedstale.runs import CONFIG, LOCK, SUMMARY

    if not root.is_dir():
        raise ConfigError(f"folder = {str(root)!r} does not exist: expected one that holds runs")
    folders = (path.parent for path in sorted(root.rglob(CONFIG)))
    # An app, or a part of one, may have a config too.
    are_runs = (one for one in folders if any((one / name).is_file() for name in (SUMMARY, LOCK)))
    return [_facts(folder) for folder in are_runs]


def _facts(folder: Path) -> dict[str, Any]:
    from fedstale.files import is_held
    from fedstale.reports import parts_of
    from fedstale.runs import CONFIG, LOCK, SUMMARY

    facts: dict[str, Any] = {"run": str(folder)}
    try:
        config = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
        facts |= {name: config[name] for name in ("app", "traces", "seed") if name in config}
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        facts |= {name: summary[name] for name in ("status", "rounds", "virtual_s", "wall_s")}
        facts.setdefault("seed", summary["seed"])
        facts["jobs"], spent = summary["jobs"]["sent"], summary["device_s"]
        if spent["total"]:
            facts |= {"device_s": spent["total"], "wasted": spent["wasted"] / spent["total"]}
        return {**parts_of(config, summary), **facts, **summary["metrics"]}
    except FileNotFoundError:
        status = RUNNING if is_held(folder / LOCK) else LOST
    except (OSError, ValueError, KeyError, TypeError) as problem:
        status = f"unreadable: {type(problem).__name__}"
    return {**facts, "status": status}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
