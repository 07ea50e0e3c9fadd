"""`fedstale compare`, `report` and `runs`: compare runs, show one again, and list them."""

import json
import os
import sys
import tomllib
from dataclasses import asdict
from math import inf
from pathlib import Path
from shlex import quote
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedstale.cli.output import (
    AsJson,
    app_log,
    end_with_failures,
    goes_on_when_interrupted,
    one_sentence,
    say,
    say_json,
)
from fedstale.errors import ConfigError, printable
from fedstale.interrupts import end_on_signals

if TYPE_CHECKING:
    from fedstale.comparison import Comparison
    from fedstale.reports import Run


RUNNING, LOST = "running", "lost"
"""Status of a run that goes on, and of one whose process ended without a summary."""
_LEAST, _MOST_CHANGES = 0.05, 8
"""Of an advice that is applied, the share that it saves; and how many one call applies."""
_NAMES = ("run", "status", "app", "strategy", "selector", "traces", "seed", "rounds", "virtual_s")


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
def advise(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a simulated run.")],
    apply: Annotated[
        bool,
        typer.Option(
            "--apply", help="Repeat the run with the first change, in a folder beside it."
        ),
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Go on until no change saves 5% or more.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what cost a run most and what to change; repeat it with that, and compare.

    A change that the app cannot take is not applied; the advice names what it lacks.
    """
    from fedstale import api
    from fedstale.reports import Run

    now = Run(run)
    taken: list[dict[str, Any]] = []
    if not as_json:
        _show_advice(now)
    for _ in range(_MOST_CHANGES if everything else int(apply)):
        first = next((a for a in now.advice if a.change and a.saves >= _LEAST), None)
        if first is None or first.do == now.advised.get("do"):
            if not (as_json or taken):
                typer.echo("No change that saves 5% is an option of the run.")
            break
        with end_on_signals(), app_log():
            now = api.with_advice(now, first)
        taken.append({**now.advised, "before": str(now.advised["before"])})
        if not as_json:
            promise = "{promised:.0%} promised ({between[0]:.0%} to {between[1]:.0%})"
            typer.echo(("{do}: " + promise + ", {achieved:.0%} saved").format(**now.advised))
            _show_advice(now)
    if as_json:
        say_json(now.folder, advice=[asdict(each) for each in now.advice], taken=taken)


def _show_advice(run: "Run") -> None:
    """Print what cost a run most, a paragraph each, with the options that change it."""
    from fedstale.reports import STRATEGY

    lines = [f"{run.folder}: {run.costs['device_time_wasted']:.0%} of the device-hours wasted"]
    for n, advice in enumerate(run.advice, 1):
        options = [
            f"--{key} {quote(str(value))}" if key == STRATEGY else f"-c {key}={value}"
            for key, value in advice.change.items()
        ]
        lines += [f"{n}. {advice}", *([f"   {' '.join(options)}"] if options else [])]
    hint = str(run.summary.get("hint") or "")
    lines += [] if run.advice else ["Nothing took a twentieth of the run."]
    typer.echo("\n".join([*lines, *([f"{hint[0].upper()}{hint[1:]}."] if hint else [])]))


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
) -> None:
    """Compare variants over seeds: means, and differences paired by seed, with 95% intervals.

    Runs that are done are kept, and interrupted ones go on: the same command finishes the rest.
    Where RAY_ADDRESS names a Ray cluster, its nodes run a plan.
    """
    from fedstale import api
    from fedstale.comparison import as_json as plain

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
    shown = bool(plans) and sys.stderr.isatty() and not as_json
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
    from fedstale.comparison import PAGE

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

    from fedstale.reports import time_text

    # Clients' own metrics are many, and say less.
    metrics = sorted({key for run in found for key in run if key.startswith("server ")})
    columns = dict.fromkeys([*_NAMES, *metrics, *([] if sort is None else [sort])])
    table = pd.DataFrame(found, columns=[*columns], dtype=object).set_index("run")
    for name in ("app", "traces"):
        table[name] = table[name].map(lambda path: Path(path).name, na_action="ignore")
    table["virtual_s"] = table["virtual_s"].map(time_text, na_action="ignore")
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
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
        status = f"unreadable: {type(problem).__name__}"
    return {**facts, "status": status}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
