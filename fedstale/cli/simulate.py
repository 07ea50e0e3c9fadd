"""`fedstale simulate`: make a run, show its progress, and print its result."""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import tomli_w
import typer
from click.core import ParameterSource
from rich.console import Console
from rich.table import Column, Table

from fedstale.cli.output import (
    ADVANCED,
    AsJson,
    app_log,
    note,
    one_sentence,
    say_json,
    stdout_kept_free,
)
from fedstale.config import Costs, ExecutorKind, SimulationConfig
from fedstale.interrupts import CTRL_C, end_on_signals, exit_code

if TYPE_CHECKING:
    from fedstale.reports import Run
    from fedstale.strategies.server import Callback
    from fedstale.traces import TraceSet

_BESIDE_RESUME = {
    *("resume", "until", "executor", "workers", "client_limit_s", "more"),
    *("live", "as_json"),
}
"""Options of a run that goes on: none changes what comes out, but how far it goes."""

_MORE = (
    *("node_config", "partitions", "on_interrupt", "after_end"),
    *("client_limit_s", "gpus", "checkpoint_every", "seed_key"),
)
"""Settings that `--set` says, as those of [costs]: few runs need another."""
_SETTINGS = ("traces", "strategy", "devices", "seed", "until", "executor", "workers")
"""Settings that an option of their own says."""
_NAMES = ", ".join(name.replace("_", "-") for name in _MORE)
_COSTS = "costs."
_LINE_EVERY_S, _NOTE_EVERY_S = 0.5, 30.0
"""Wall time from one look at a run to the next: on a terminal, and elsewhere."""

_WORDS = {"failed": "failed", "stuck": "got stuck", "interrupted": "was interrupted"}


@one_sentence()
def simulate(
    context: typer.Context,
    app: Annotated[
        str,
        typer.Argument(
            metavar="[APP]",
            help="Directory of a Flower app, digits for the built-in one, or the config.toml of an "
            "earlier run.",
            show_default=False,
        ),
    ] = "",
    traces: Annotated[
        str,
        typer.Option(
            help="File of device traces, synthetic:N, synthetic:N@desktops or @sites, or ideal:N: "
            "always online and infinitely fast."
        ),
    ] = "synthetic:100",
    run_config: Annotated[
        list[str] | None,
        typer.Option("--run-config", "-c", help="Overrides as in flwr run: 'key=1 name=\"x\"'."),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(help="What takes the place of the app's own strategy: 'FedBuff(20, 5)'."),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(help="How many of the traces to enrol, drawn with the seed; default all."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seeds everything that is random, in the app too.")] = 0,
    until: Annotated[
        str | None,
        typer.Option(
            help="When to end: a virtual time (2d), rounds (100 rounds) or a metric (accuracy 0.9)."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Folder of the run; default runs/APP, or the next free runs/APP-N."
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Go on with the run in this folder, which was interrupted or killed, or stopped "
            "before this --until."
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Train nothing: say who will be online, and how long jobs and rounds will take.",
        ),
    ] = False,
    live: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            min=0,
            max=65_535,
            help="Serve a page that shows the run while it goes on, such as 8760; 0 takes any.",
        ),
    ] = None,
    executor: Annotated[
        ExecutorKind,
        typer.Option(
            help="What runs clients; auto measures what is faster. All but batched, which trains "
            "many clients as one program, give the same bytes.",
            rich_help_panel=ADVANCED,
        ),
    ] = "auto",
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes that run clients; 1 runs them in this one. Default: as many as pay.",
            rich_help_panel=ADVANCED,
        ),
    ] = None,
    more: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help=f"Settings of a config.toml that no option says: {_NAMES}, or a cost, as in "
            "'on-interrupt=\"pause\" costs.epochs=2'.",
            rich_help_panel=ADVANCED,
        ),
    ] = None,
    measure_costs: Annotated[
        bool,
        typer.Option(
            "--measure-costs",
            help="Run a few clients for real instead, and print the app's costs as TOML.",
            rich_help_panel=ADVANCED,
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace an earlier run in the folder.",
            rich_help_panel=ADVANCED,
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a Flower app on replayed devices, and report used and lost work."""
    from fedstale.app_folder import app_folder
    from fedstale.errors import ConfigError

    if (resume is None) == (not app):
        raise ConfigError("expected an APP to simulate, or --resume RUN to go on with a run")
    options = {
        name: o for o in context.command.params if (name := o.name) and _is_given(context, o)
    }
    further, costs = _further(more or [])
    if resume is not None:
        names = [name.replace("_", "-") for name in sorted(further.keys() - _BESIDE_RESUME)]
        names += [_COSTS + key for key in costs]
        fixed = [o.opts[0] for name, o in options.items() if name not in _BESIDE_RESUME]
        if fixed := [*fixed, *(f"--set {name}" for name in names)]:
            raise ConfigError(
                f"{', '.join(fixed)} beside --resume {resume}: a run that goes on keeps its "
                "settings; leave it out"
            )
    if resume is None and not app.endswith(".toml"):
        before = SimulationConfig(app=app, traces=traces)
    else:
        before = SimulationConfig.read(Path(app) if resume is None else resume / "config.toml")
    # What is misspelt is told before Flower and torch are imported.
    app_folder(before.app)
    out = resume or out
    settings = {name: context.params[name] for name in _SETTINGS if name in options} | further
    if run_config or before.run_config:
        from fedstale.simulation import changed

        config = changed(before, settings, run_config=run_config or [], costs=costs)
    else:
        config = replace(before, **settings, costs={**before.costs, **costs})
    if config.strategy is not None:
        from fedstale.strategies import parse

        parse(config.strategy)
    from fedstale.traces import TraceSet

    trace_set = TraceSet.load(config.traces, seed=config.seed)
    from fedstale.live import RepeatedInterrupt
    from fedstale.simulation import simulate as simulate_config

    if measure_costs:
        _measure_costs(config, trace_set, as_json=as_json)
        return
    if dry_run:
        with end_on_signals(), app_log():
            _show_dry_run(config, trace_set, as_json=as_json)
        return
    watching = _watching(config, shown=not as_json, live=live)
    free = stdout_kept_free() if as_json else nullcontext()
    name = Path(config.app).resolve().name if Path(config.app).is_dir() else config.app
    place = _new_place(Path("runs") / name, replaces=overwrite) if out is None else nullcontext(out)
    with end_on_signals() as heard, free, watching as callbacks, app_log(), place as folder:
        run = simulate_config(
            config,
            folder,
            traces=trace_set,
            overwrite=overwrite,
            resume=resume is not None,
            callbacks=[*callbacks, RepeatedInterrupt(heard)],
        )
    _show_end(run, is_new=resume is None, as_json=as_json)
    if run.status in _WORDS:
        again = f"; fedstale simulate --resume {run.folder} goes on with it"
        can_go_on = run.status == "interrupted"
        note(f"fedstale: the run {_WORDS[run.status]}: {run.reason}{again if can_go_on else ''}")
        is_ended = can_go_on and heard() not in {"", CTRL_C}
        raise typer.Exit(exit_code(heard()) if is_ended else 1)


@contextmanager
def _new_place(path: Path, *, replaces: bool) -> Iterator[Path]:
    """Yield a folder for a run whose user names none, and print it if others had its name.

    Args:
        path: the folder, if it does not exist.
        replaces: whether an earlier run there may be removed; else the next free name is taken.
    """
    from fedstale.runs import is_unfinished, new_folder

    if replaces:
        yield path
        return
    folder = new_folder(path)
    namesakes = (one for one in sorted(path.parent.iterdir()) if one.name.startswith(path.name))
    for one in filter(is_unfinished, namesakes):
        note(f"{one} holds a run that did not come to its end: --resume {one} goes on with it")
    if folder != path:
        note(f"this run is in {folder}, since {path} is there already")
    try:
        yield folder
    finally:
        # Settings that are not usable leave nothing.
        for empty in (folder, folder.parent):
            with suppress(OSError):
                empty.rmdir()


def _further(texts: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings in the texts of --set, by their fields, and the costs, by their keys."""
    if not texts:
        return {}, {}
    from fedstale.errors import ConfigError, nearest
    from fedstale.simulation import overrides_in

    settings, costs = {}, {}
    for key, value in overrides_in(texts, "set").items():
        name = key.replace("-", "_")
        if key.startswith(_COSTS):
            costs[key.removeprefix(_COSTS)] = value
        elif name in _MORE:
            settings[name] = value
        else:
            known = [*(one.replace("_", "-") for one in _MORE), f"{_COSTS}KEY"]
            raise ConfigError(f"set has unknown key {key!r}: expected {nearest(key, known)}")
    Costs.from_table(costs)
    return settings, costs


def _is_given(context: typer.Context, option: click.Parameter) -> bool:
    """Return whether a command line has an option, and not its default alone."""
    source = context.get_parameter_source(option.name or "")
    return source not in (None, ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)


@contextmanager
def _watching(
    config: "SimulationConfig",
    *,
    shown: bool,
    live: int | None,
) -> Iterator[list["Callback"]]:
    """Show a run as it goes on: to who waits, and on a page; yields its callbacks."""
    from fedstale.live import ProgressNotes, progress_line
    from fedstale.until import Until

    callbacks: list[Callback] = []
    until = Until.parse(config.until)
    is_watched = shown or live is not None
    resolved = _resolved(config) if is_watched else config
    if is_watched and until.share(0.0, 0) is None:
        until = Until(rounds=resolved.planned_rounds)
    with ExitStack() as stack:
        if shown:
            line = stack.enter_context(progress_line(sys.stderr.isatty()))
            every_s = _NOTE_EVERY_S if line is None else _LINE_EVERY_S
            callbacks.append(ProgressNotes(line or note, until, every_s=every_s))
        if live is not None:
            # Only who asks for a page waits for it.
            from fedstale.live import Board, serving
            from fedstale.reports import without_folders

            title = without_folders(f"{config.app} on {config.traces}")
            board = Board(
                title,
                until=until,
                settings=without_folders(tomli_w.dumps(resolved.table())),
                time_name="virtual time",
            )
            url = stack.enter_context(serving(board, live))
            note(f"live page: {url}")
            callbacks.append(board)
        yield callbacks


def _resolved(config: "SimulationConfig") -> "SimulationConfig":
    """Complete settings by those of the app."""
    from fedstale.simulation import FlowerApp

    return FlowerApp.find(config.app).resolved(config)


def _measure_costs(config: "SimulationConfig", traces: "TraceSet", *, as_json: bool) -> None:
    """Print what clients cost that run for real."""
    from fedstale.simulation import measure, node_configs, pasted

    nodes = node_configs(config, traces.device_ids, traces.device_ids[: config.devices])
    measured = measure(config, traces.n_devices, nodes)
    typer.echo(json.dumps(measured.costs.table()) if as_json else pasted(measured))
    for warning in measured.warnings() if as_json else ():
        typer.echo(f"warning: {warning}", err=True)


def _show_dry_run(config: "SimulationConfig", traces: "TraceSet", *, as_json: bool) -> None:
    """Print what a run will meet."""
    from fedstale.reports import time_text
    from fedstale.simulation import dry_run

    found = dry_run(config, traces)
    if as_json:
        facts = asdict(found)
        lists = {name: facts[name].tolist() for name in ("online", "job_s")}
        typer.echo(json.dumps({**facts, **lists}))
        return
    low, high = found.online.min(), found.online.max()
    hours = f"{found.horizon_s / 3600:.3g} h"
    lines = [
        f"{found.n_devices:,} devices of {config.traces}, looked at over {hours}",
        f"online: {found.online.mean():.0%} on average, {low:.0%} to {high:.0%} by the hour",
        f"first message: to {found.n_asked:,} devices, {found.download_bytes / 1e6:,.3g} MB each",
        f"jobs that report: {found.finished:.0%} of {found.n_jobs:,} drawn",
    ]
    lines += [f"  {reason}: {share:.1%}" for reason, share in found.reasons.items()]
    if found.finished:
        middle, long = (time_text(seconds) for seconds in found.job_s)
        parts = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in found.phases_s.items())
        lines += [
            f"such a job: {middle} in the median, 90% within {long}; {parts}",
            f"{found.round}: {time_text(found.round_s)} on average",
        ]
    # On ideal devices no time passes.
    if found.round_s > 0.0:
        fitting = f"such rounds in {hours}: {found.horizon_s / found.round_s:,.0f}"
        n = found.planned_rounds
        lines.append(f"{n:,} such rounds: {time_text(n * found.round_s)}" if n else fitting)
    for line in lines:
        typer.echo(line)


def _show_end(run: "Run", *, is_new: bool, as_json: bool) -> None:
    """Print the end of a run; one in which nothing happened leaves nothing to look at."""
    is_empty = is_new and run.status == "failed" and not run.summary["jobs"]["sent"]
    if is_empty:
        shutil.rmtree(run.folder)
    if as_json:
        say_json(None if is_empty else run.folder, **run.summary)
    elif not is_empty:
        _show_run(run)


def _show_run(run: "Run") -> None:
    """Print what stands at the head of a run's page, and how its jobs ended."""
    from fedstale.reports import REPORT, cards, client_errors_in_words, lead
    from fedstale.runs import LOG

    table = Table(Column(), Column(justify="right"), show_header=False)
    for row in cards(run):
        table.add_row(*row)
    for status, n in run.summary["jobs"].items():
        if status != "sent":
            table.add_row(f"jobs {status}", f"{n:,}")
    console = Console(highlight=False, markup=False)
    console.print(table)
    typer.echo(lead(run))
    for line in client_errors_in_words(run):
        typer.echo(f"client error: {line}")
    if run.advice:
        typer.echo(f"what cost most: {run.advice[0]}")
    if record := run.summary.get("record"):
        typer.echo(f"record: {record['lines']:,} lines, head {record['head']}")
    for name, file in (("report", REPORT), ("log", LOG)):
        typer.echo(f"{name}: {run.folder / file}")
