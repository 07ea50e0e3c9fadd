"""`fedstale tune`: search settings of a simulation on virtual time."""

import logging
import os
import sys
from contextlib import nullcontext
from math import isfinite
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedstale.cli.output import (
    AsJson,
    app_log,
    end_with_failures,
    goes_on_when_interrupted,
    one_sentence,
    say_json,
    stdout_kept_free,
)
from fedstale.interrupts import end_on_signals

app = typer.Typer()


@app.command(
    rich_help_panel="Analyse",
    epilog="Example: fedstale tune space.toml --workers 4 --out tunings/phones",
)
@one_sentence()
def tune(
    space: Annotated[
        Path, typer.Argument(metavar="SPACE.toml", help="What to search, and on what to judge it.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder; default tunings/SPACE.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Configurations at a time; default one for each core. With 1, the same command "
            "gives the same result."
        ),
    ] = None,
    search: Annotated[
        Literal["tpe", "random"], typer.Option(help="What proposes configurations.")
    ] = "tpe",
    stop: Annotated[
        Literal["asha", "none"],
        typer.Option(help="What stops configurations that are behind at a rung."),
    ] = "asha",
    seed: Annotated[int, typer.Option(help="Of all proposals.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Search settings on virtual time, then judge them on held-out seeds and devices.

    What is done is kept: the same command goes on after an interrupt or a kill. Where RAY_ADDRESS
    names a Ray cluster, its nodes run configurations.
    """
    from fedstale.contrib.tuning import tune as tune_space
    from fedstale.flower import command_line

    folder = out or Path("tunings") / space.stem
    free = stdout_kept_free() if as_json else nullcontext()
    with end_on_signals() as heard, free, app_log(), goes_on_when_interrupted(heard):
        # What an app logs of each configuration would hide what comes of them.
        command_line.console().setLevel(logging.ERROR)
        found = tune_space(
            space,
            out=folder,
            workers=workers,
            search=search,
            stop=stop,
            seed=seed,
            address=os.environ.get("RAY_ADDRESS"),
            progress=sys.stderr.isatty() and not as_json,
        )
    if as_json:
        say_json(
            folder,
            verdict=found.verdict,
            answer=found.answer,
            best={"trial": found.best.number, "parameters": dict(found.best.parameters)},
            gain={
                name: value if isfinite(value) else None
                for name, value in found.gain.numbers.items()
            },
        )
    else:
        from fedstale.comparison import PAGE
        from fedstale.contrib.tuning import BEST, HELD_OUT

        typer.echo(f"{found.verdict}\n{found.answer}\nsettings: {folder / BEST}")
        typer.echo(f"report: {folder / HELD_OUT / PAGE}")
    end_with_failures(found.comparison.failures, "the held-out runs")
