"""`fedstale compare`: variants of a simulation over seeds, each paired with a reference."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstale.cli.output import one_sentence

if TYPE_CHECKING:
    from fedstale.compare.judged import Comparison
    from fedstale.compare.running import Ending, Watch

REPORT, NUMBERS, LINES, MARKDOWN = (
    f"comparison.{ending}" for ending in ("html", "json", "csv", "md")
)
LOG, RUNS = "log.txt", "runs"


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
        from fedstale.errors import ConfigError
        from fedstale.strategies.arrays import n_cores

        if workers is not None and workers < 1:
            raise ConfigError(f"workers = {workers}: expected a number of processes >= 1")
        plans = [source for source in sources if source.suffix == ".toml"]
        if plans and len(sources) > 1:
            raise ConfigError(
                f"{str(plans[0])!r} and {len(sources) - 1} more: expected one plan, or folders of "
                "finished runs"
            )
        if plans:
            folder = out or Path("comparisons") / plans[0].stem
            shown = sys.stderr.isatty() and not (quiet or as_json)
            comparison, text = _from_plan(
                plans[0],
                folder,
                workers=workers or n_cores(),
                overrides={"target": target, "reference": reference},
                overwrite=overwrite,
                shown=shown,
            )
        else:
            folder = out or Path("comparisons") / RUNS
            comparison, text = _from_runs(sources, target, reference), ""
        table = _written(comparison, folder, text)
    if as_json:
        typer.echo(json.dumps({"out": str(folder), **table}))
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


def _from_plan(
    path: Path,
    folder: Path,
    *,
    workers: int,
    overrides: dict[str, Any],
    overwrite: bool,
    shown: bool,
) -> "tuple[Comparison, str]":
    """Run what a plan asks for and return how its variants compare, and the plan as TOML."""
    import tomli_w

    from fedstale.compare import folders, running
    from fedstale.compare.judged import judge
    from fedstale.compare.measured import read
    from fedstale.compare.plan import Plan

    plan = Plan.read(path)
    given = {key: value for key, value in overrides.items() if value is not None}
    plan = Plan.from_table({**plan.table(), **given}, where=str(path))
    tasks = [
        folders.Task(
            variant=variant,
            seed=seed,
            config=plan.config(variant, seed),
            folder=folder / RUNS / folders.folder_name(variant) / str(seed),
        )
        # All variants of a seed, then the next: a comparison that is stopped has whole pairs.
        for seed in plan.seeds
        for variant in plan.variants
    ]
    _make(folder)
    with _progress(shown=shown) as watch:
        try:
            failed: list[Ending] = running.run(
                tasks, workers=workers, log=folder / LOG, overwrite=overwrite, watch=watch
            )
        except KeyboardInterrupt:
            n_done = sum(folders.state(task) == "done" for task in tasks)
            typer.echo(
                f"fedstale: interrupted with {n_done} of {len(tasks)} runs done; the same command "
                "goes on",
                err=True,
            )
            raise typer.Exit(130) from None
    without = {ending.task.folder for ending in failed}
    comparison = judge(
        [read(task.variant, task.folder) for task in tasks if task.folder not in without],
        list(plan.variants),
        reference=plan.reference,
        target=plan.target,
        failures=[(ending.task.variant, ending.task.seed, ending.reason) for ending in failed],
    )
    return comparison, tomli_w.dumps(plan.table())


def _from_runs(folders: list[Path], target: str | None, reference: str | None) -> "Comparison":
    """Return how finished runs compare, grouped by the settings in which they differ."""
    from fedstale.compare.judged import judge
    from fedstale.compare.measured import grouped, read
    from fedstale.compare.plan import check_target
    from fedstale.errors import ConfigError

    check_target(target)
    variants = grouped(folders)
    names = list(dict.fromkeys(variants.values()))
    if reference is not None and reference not in names:
        raise ConfigError(f"reference = {reference!r}: expected one of {names}")
    runs = [read(variant, folder) for folder, variant in variants.items()]
    return judge(runs, names, reference=reference or names[0], target=target)


def _written(comparison: "Comparison", folder: Path, plan: str) -> dict[str, Any]:
    """Write the report, the numbers and the table, and return the numbers."""
    from fedstale.compare.judged import as_table
    from fedstale.compare.table import as_csv, markdown
    from fedstale.reports.comparison import write_judged

    _make(folder)
    table = as_table(comparison, root=folder)
    _write(folder / NUMBERS, json.dumps(table, indent=2, allow_nan=False) + "\n")
    _write(folder / LINES, as_csv(comparison))
    _write(folder / MARKDOWN, markdown(comparison))
    write_judged(comparison, folder / REPORT, plan=plan)
    return table


def _show(comparison: "Comparison", folder: Path) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from fedstale.compare.measured import printable
    from fedstale.compare.table import notes, parts, table

    header, rows = table(comparison)
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
    console.print(Text(f"report: {folder / REPORT}"), soft_wrap=True)


@contextmanager
def _progress(*, shown: bool) -> "Iterator[Watch]":
    """Show how many runs are done and how long the rest may take."""
    if not shown:
        yield lambda shares: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.fields[state]}"), BarColumn(bar_width=30), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("runs", total=1.0, state="starting")
        started, at_start = time.monotonic(), -1.0

        def watch(shares: dict[Path, float]) -> None:
            nonlocal at_start
            done = sum(shares.values())
            if at_start < 0:
                at_start = done
            elapsed = time.monotonic() - started
            said = _left(elapsed, done - at_start, len(shares) - done)
            n_done = sum(share >= 1.0 for share in shares.values())
            state = f"{n_done} of {len(shares)} runs{said}"
            bar.update(task, total=len(shares), completed=done, state=state)

        yield watch


def _left(elapsed_s: float, done: float, left: float) -> str:
    """Return how long the rest may take, if that can be told yet.

    Example:
        >>> _left(60.0, 1.0, 4.0)
        ', about 4 min left'
    """
    if done <= 0.05 or left <= 0:
        return ""
    seconds = elapsed_s / done * left
    if seconds < 90:
        return f", about {max(seconds, 1):.0f} s left"
    return (
        f", about {seconds / 60:.0f} min left"
        if seconds < 5400
        else (f", about {seconds / 3600:.1f} h left")
    )


def _make(folder: Path) -> None:
    from fedstale.errors import ConfigError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ConfigError(f"out = {str(folder)!r} cannot be made: {problem.strerror}") from None


def _write(path: Path, text: str) -> None:
    from fedstale.errors import ConfigError
    from fedstale.traces.io.atomic import replacing

    try:
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as problem:
        raise ConfigError(f"out = {str(path)!r} cannot be written: {problem.strerror}") from None
