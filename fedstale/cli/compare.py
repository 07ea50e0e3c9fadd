"""`fedstale compare`: variants of a simulation over seeds, each paired with a reference."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedstale.cli.output import one_sentence

if TYPE_CHECKING:
    from fedstale.comparison.analysis import Comparison
    from fedstale.comparison.running import Watch


def compare(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="PLAN.toml | RUN...",
            help="What to compare: a plan of variants and seeds, or folders of finished runs.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder; default comparisons/PLAN, or comparisons/runs."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Runs at a time; default one for each core.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Compare times to it, such as 'accuracy 0.9'.")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="Variant to compare with; default the first.")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Run everything again.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Compare variants over seeds: means, and differences paired by seed, with 95% intervals.

    Runs that are done are kept, and interrupted ones go on: the same command finishes the rest.
    """
    with one_sentence():
        from fedstale import api
        from fedstale.comparison.analysis import as_json as plain
        from fedstale.errors import ConfigError

        plans = [source for source in sources if source.suffix == ".toml"]
        if plans and len(sources) > 1:
            raise ConfigError(
                f"{str(plans[0])!r} and {len(sources) - 1} more: expected one plan, or folders of "
                "finished runs"
            )
        folder = out or Path("comparisons") / (plans[0].stem if plans else api.RUNS)
        with _progress(shown=bool(plans) and sys.stderr.isatty() and not (quiet or as_json)) as bar:
            try:
                comparison = api.compare(
                    plans[0] if plans else sources,
                    out=folder,
                    workers=workers,
                    target=target,
                    reference=reference,
                    overwrite=overwrite,
                    watch=bar,
                )
            except KeyboardInterrupt as stop:
                why = str(stop) or "interrupted"
                typer.echo(f"fedstale: {why}; the same command goes on", err=True)
                raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps({"out": str(folder), **plain(comparison, root=folder)}))
    else:
        _show(comparison, folder)
    if comparison.failures:
        variant, seed, reason = comparison.failures[0]
        typer.echo(
            f"fedstale: {len(comparison.failures)} of the runs failed; the first: {variant}, seed "
            f"{seed}: {reason}",
            err=True,
        )
        raise typer.Exit(1)


def _show(comparison: "Comparison", folder: Path) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from fedstale.comparison.metrics import printable
    from fedstale.comparison.page import PAGE
    from fedstale.comparison.table import notes, parts, words

    header, rows = words(comparison)
    console = Console()
    for columns in parts(header, rows, console.width):
        shown = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
        for i in columns:
            name = Text(printable(header[i]))
            shown.add_column(name, justify="right" if i else "left", overflow="fold")
        for row in rows:
            # Text is never read as markup, whatever a variant is called.
            shown.add_row(*(Text(printable(row[i])) for i in columns))
        console.print(shown)
    for note in notes(comparison):
        console.print(Text(printable(note)))
    console.print(Text(f"report: {folder / PAGE}"), soft_wrap=True)


@contextmanager
def _progress(*, shown: bool) -> "Iterator[Watch | None]":
    """Show how many runs are done and how long the rest may take."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    words = TextColumn("{task.completed:.1f} of {task.total} runs")
    columns = (words, BarColumn(bar_width=30), TimeElapsedColumn(), "left:", TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=600.0) as bar:

        def watch(shares: Mapping[Path, float]) -> None:
            done = sum(shares.values())
            if bar.tasks:
                bar.update(bar.tasks[0].id, completed=done)
            else:
                # Runs that were done before say nothing about speed.
                bar.add_task("runs", total=len(shares), completed=int(done))

        yield watch
