"""`fedstale compare` and `report`: compare runs, and show one again."""

import os
import sys
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedstale.cli.output import (
    AsJson,
    Quiet,
    end_with_failures,
    goes_on_when_interrupted,
    one_sentence,
    say,
    say_json,
)
from fedstale.interrupts import end_on_signals

if TYPE_CHECKING:
    from fedstale.comparison import Comparison


@one_sentence()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="HTML file to write; default RUN/report.html."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file that shows what a run did."""
    from fedstale.reports import Run

    written = Run(run).report(out)
    say(f"report: {written}", written, as_json=as_json, run=str(run))


@one_sentence()
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
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Run everything again, and replace a comparison of other runs."
        ),
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare variants over seeds: means, and differences paired by seed, with 95% intervals.

    Runs that are done are kept, and interrupted ones go on: the same command finishes the rest.
    Where RAY_ADDRESS names a Ray cluster, its nodes run a plan.
    """
    from fedstale import api
    from fedstale.comparison import as_json as plain
    from fedstale.errors import ConfigError

    plans = [source for source in sources if source.suffix == ".toml"]
    if plans and len(sources) > 1:
        raise ConfigError(
            f"{str(plans[0])!r} and {len(sources) - 1} more: expected one plan, or folders of "
            "finished runs"
        )
    if not plans and workers is not None:
        raise ConfigError(
            "--workers beside folders of runs: a run that is over keeps its settings; leave it out"
        )
    folder = out or Path("comparisons") / (plans[0].stem if plans else api.RUNS)
    shown = bool(plans) and sys.stderr.isatty() and not (quiet or as_json)
    with end_on_signals() as heard, goes_on_when_interrupted(heard):
        comparison = api.compare(
            plans[0] if plans else sources,
            out=folder,
            workers=workers,
            target=target,
            reference=reference,
            overwrite=overwrite,
            progress=shown,
            address=os.environ.get("RAY_ADDRESS"),
        )
    if as_json:
        say_json(folder, **plain(comparison, root=folder))
    else:
        _show_comparison(comparison, folder)
    end_with_failures(comparison.failures, "the runs")


def _show_comparison(comparison: "Comparison", folder: Path) -> None:
    """Print what a comparison shows, and its table no wider than the terminal."""
    from fedstale.comparison import PAGE, printable

    console, words = Console(highlight=False), comparison.words
    table = Table(box=None, padding=(0, console.width // 80, 0, 0), pad_edge=False)
    # What else has no blank would be broken at less.
    table.add_column("variant", no_wrap=True)
    for title, *cells in zip(words.columns[1:], *words.to_numpy()[:, 1:], strict=True):
        # A title takes no more room than its longest word, or what stands below it.
        parted = title.replace("device-hours", "device- hours")
        widest = max(map(len, [*parted.split(), *cells]))
        table.add_column(parted, justify="right", overflow="fold", max_width=widest)
    for variant, *rest in words.to_numpy():
        lines = wrap(printable(variant), console.width // 5)
        table.add_row(Text("\n".join(lines)), *(Text(printable(cell)) for cell in rest))
    for line in [*comparison.verdict.split("\n"), "", table, "", *comparison.notes]:
        console.print(Text(printable(line)) if isinstance(line, str) else line)
    console.print(f"report: {folder / PAGE}", soft_wrap=True, markup=False)
