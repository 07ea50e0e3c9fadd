"""`fedstale report`: the page of a run, or of several runs together."""

from pathlib import Path
from typing import Annotated

import typer

from fedstale.cli.output import one_sentence, say_json


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders that fedstale simulate wrote.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="HTML file to write; default RUN/report.html, or comparison.html for several.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write one HTML file that shows what a run did; of several runs, one that compares them."""
    with one_sentence():
        from fedstale.api import read_run
        from fedstale.reports.page import write_comparison

        read = [read_run(run) for run in runs]
        if len(read) == 1:
            written = read[0].report(out)
        else:
            written = write_comparison(read, out or Path("comparison.html"))
    if as_json:
        say_json(written, runs=[str(run) for run in runs])
    else:
        typer.echo(f"report: {written}")
