"""`fedstale runs`: list run folders, also on a page."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from fedstale.cli.output import AsJson, note, one_sentence

_WIDE = 300


@one_sentence()
def runs(
    folder: Annotated[Path, typer.Argument(help="Folder that holds runs.")] = Path("runs"),
    sort: Annotated[
        str | None, typer.Option(help="Largest first, by a column such as 'server accuracy'.")
    ] = None,
    page: Annotated[
        bool,
        typer.Option(
            "--page", help="Write FOLDER/index.html too: a table that sorts, with links to reports."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the runs in a folder and below it."""
    from fedstale.live import duration
    from fedstale.reports import NAMES, listed_runs, ranked, server_metrics, write_index

    found = listed_runs(folder)
    found = found if sort is None else ranked(found, sort)
    if page:
        note(f"page: {write_index(folder, found)}")
    if as_json:
        rows = [{"run": str(r.folder), "status": r.status, **r.facts} for r in found]
        typer.echo(json.dumps(rows))
        return
    metrics = [name for name in server_metrics(found) if name != sort]
    names = [*NAMES, "rounds", "virtual_s", *metrics]
    names = names if sort in {None, *names} else [*names, str(sort)]
    left = [Column(name, no_wrap=True) for name in ("run", "status", *NAMES[:-1])]
    right = [Column(name.removesuffix("_s"), justify="right") for name in names[len(NAMES) - 1 :]]
    table = Table(*left, *right, box=None, pad_edge=False)
    for run in found:
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
