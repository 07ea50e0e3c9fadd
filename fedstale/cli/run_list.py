"""`fedstale runs`: list run folders, also on a page, say how they differ, and remove them."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from fedstale.cli.output import AsJson, note, one_sentence, say

app = typer.Typer(help="List run folders, compare their settings, remove them.")

_WIDE = 300
_Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")]


@app.command(name="list", epilog="Example: fedstale runs list --sort 'server accuracy'")
@one_sentence()
def list_runs(
    folder: Annotated[Path, typer.Argument(help="Folder that holds runs.")] = Path("runs"),
    sort: Annotated[
        str | None, typer.Option(help="Largest first, by a column such as 'server accuracy'.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the runs in a folder and below it."""
    from fedstale.live import duration
    from fedstale.reports import NAMES, listed_runs, ranked, server_metrics

    runs = listed_runs(folder)
    runs = runs if sort is None else ranked(runs, sort)
    if as_json:
        rows = [{"run": str(r.folder), "status": r.status, **r.facts} for r in runs]
        typer.echo(json.dumps(rows))
        return
    metrics = [name for name in server_metrics(runs) if name != sort]
    names = [*NAMES, "rounds", "virtual_s", *metrics]
    names = names if sort in {None, *names} else [*names, str(sort)]
    left = [Column(name, no_wrap=True) for name in ("run", "status", *NAMES[:-1])]
    right = [Column(name.removesuffix("_s"), justify="right") for name in names[len(NAMES) - 1 :]]
    table = Table(*left, *right, box=None, pad_edge=False)
    for run in runs:
        cells = []
        for name in names:
            value = run.facts.get(name, "")
            if name in NAMES[:-1]:
                value = Path(value or "").name
            if name.endswith("_s") and value != "":
                value = duration(value)
            cells.append(f"{value:.4f}" if isinstance(value, float) else str(value))
        table.add_row(str(run.folder), run.status, *cells)
    # Who reads it from a pipe wants whole rows.
    Console(width=None if sys.stdout.isatty() else _WIDE).print(table)


@app.command(epilog="Example: fedstale runs page runs")
@one_sentence()
def page(
    folder: Annotated[Path, typer.Argument(help="Folder that holds runs.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Write FOLDER/index.html: all runs in a table that sorts, with links to their reports."""
    from fedstale.reports import listed_runs, write_index

    runs = listed_runs(folder)
    written = write_index(folder, runs)
    say(f"page: {written}", written, as_json=as_json, runs=len(runs))


@app.command(epilog="Example: fedstale runs diff runs/a runs/b")
@one_sentence()
def diff(runs: _Runs, as_json: AsJson = False) -> None:
    """Say which settings of runs differ; paths and numbers of workers that mean the same do not."""
    from fedstale.reports import differences

    found = differences(runs)
    if as_json:
        typer.echo(json.dumps(found))
        return
    for name, values in found.items():
        typer.echo(f"{name}: {'  |  '.join(map(repr, values))}")
    if not found:
        note("the settings are the same")


@app.command(epilog="Example: fedstale runs remove runs/a runs/b --yes")
@one_sentence()
def remove(
    runs: _Runs,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove folders of runs that are over, and nothing else."""
    from fedstale.reports import remove as removed

    if not yes:
        typer.confirm(f"remove {', '.join(map(str, runs))}?", abort=True, err=True)
    for run in runs:
        removed(run)
        note(f"removed {run}")
    if as_json:
        typer.echo(json.dumps({"removed": list(map(str, runs))}))
