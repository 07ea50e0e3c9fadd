"""`fedstale train-forecaster`, `backtest`, `train-agent` and `evaluate-agent`: learn from traces.

All split the traces by device and by time from the same seed, so nothing is ever tested on a device
or an hour that it learnt from. Several trainings of an agent, one for each seed, run in processes
of their own, which map one copy of the traces and of the devices' forecasts into their memory; what
a training gives does not depend on where it ran.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstale import __version__
from fedstale.cli.output import AsJson, Quiet, note, one_sentence, say
from fedstale.errors import ConfigError, FedstaleError, TraceError

if TYPE_CHECKING:
    from fedstale.agents import Agent, Scenario, Scenarios, Training, TrainingProgress
    from fedstale.parallel import Report
    from fedstale.traces import TraceSet
    from fedstale.traces.forecast import Forecaster
    from fedstale.traces.io.mapped import Shared

Watch = Callable[["TrainingProgress"], None]

_Traces = Annotated[
    str, typer.Option("--traces", metavar="PATH|synthetic:N[@desktops]", help="Device traces.")
]
_Forecaster = Annotated[
    str,
    typer.Option(
        "--forecaster",
        metavar="FOLDER|embedded|embedded:FLEET|fit",
        help="Source of forecasts: a trained forecaster that has not learnt from these devices, "
        "one that comes with fedstale (FLEET is phones, desktops or cars), or new ones, each "
        "fitted to the half that it does not forecast.",
    ),
]
_Fleets = Annotated[
    list[str],
    typer.Option(
        "--traces",
        metavar="PATH|synthetic:N[@desktops]",
        help="Device traces; repeated, the agent learns on several fleets in turn.",
    ),
]
_Forecasters = Annotated[
    list[str] | None,
    typer.Option(
        "--forecaster",
        metavar="FOLDER|embedded|embedded:FLEET|fit",
        help="As of `evaluate-agent`; one for all traces, or one for each; default embedded.",
    ),
]
_Seed = Annotated[int, typer.Option(min=0, help="Of the split and of everything random.")]
_Folder = Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")]
_Tables = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Folder for the tables, and a page if there is one."),
]
_Windows = Annotated[int, typer.Option(min=10, help="Held-out windows that are played.")]

LOG = "log.txt"
"""File in the output folder with what training processes print."""


@one_sentence()
def train_forecaster(
    traces: _Traces,
    out: _Folder,
    kind: Annotated[str, typer.Option(help="What to train; see `backtest`.")] = "lstm",
    stop_on: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Other traces to stop early on, instead of a fifth."),
    ] = None,
    examples: Annotated[int, typer.Option(min=100, help="Number of examples.")] = 40_000,
    seed: _Seed = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a forecaster on traces; writes forecaster.toml and forecaster.safetensors."""
    from fedstale.traces.forecast import Perceptron, forecaster_class
    from fedstale.traces.forecast.dataset import draw_parts

    forecaster = forecaster_class(kind)()
    if forecaster.reads_the_future:
        raise ConfigError(f"kind = {kind!r}: reads the future and learns nothing")
    if not forecaster.saved:
        raise ConfigError(f"kind = {kind!r}: only compared with others, by `fedstale backtest`")
    if (out / "forecaster.toml").exists():
        raise ConfigError(f"{out}: holds a forecaster; expected a new folder")
    devices = _recorded(traces, seed=seed)
    other = None if stop_on is None else _recorded(stop_on, seed=seed)
    training, held_out = draw_parts(devices, other, n=examples, seed=seed)
    if isinstance(forecaster, Perceptron):
        progress = None if quiet else _show_epoch
        forecaster.fit(training, held_out, seed=seed, progress=progress)
    else:
        forecaster.fit(training, held_out, seed=seed)
    provenance = {
        "traces": Path(traces).name,
        "stop_on": "" if stop_on is None else Path(stop_on).name,
        "devices": devices.n_devices,
        "examples": examples,
        "seed": seed,
    }
    forecaster.save(out, provenance)
    say(f"forecaster: {out}", out, as_json=as_json, kind=kind, **provenance)


@one_sentence()
def backtest(
    traces: _Traces,
    forecasters: Annotated[
        str, typer.Option(help="Kinds to fit and test, with commas between.")
    ] = "last-value,ewma,hourly-markov,oracle",
    trained: Annotated[
        list[Path] | None, typer.Option(help="Folder of a trained forecaster; may be repeated.")
    ] = None,
    out: _Tables = None,
    work: Annotated[float, typer.Option(min=0.0, help="Work of the job, in units.")] = 300.0,
    download_bytes: Annotated[int, typer.Option(min=0, help="Size of the model.")] = 5_000_000,
    upload_bytes: Annotated[int, typer.Option(min=0, help="Size of the update.")] = 5_000_000,
    deadline_s: Annotated[float, typer.Option(help="Time for the job, in s.")] = 1800.0,
    step_s: Annotated[float, typer.Option(min=1.0, help="Time between origins, in s.")] = 900.0,
    k: Annotated[int, typer.Option(min=1, help="Devices picked in a round.")] = 10,
    examples: Annotated[int, typer.Option(min=100, help="Examples to fit on.")] = 40_000,
    seed: _Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Test forecasters at rolling origins, on devices and hours that they did not learn from."""
    from fedstale.reports.backtest import PAGE, figures
    from fedstale.reports.page import write_figures
    from fedstale.traces import Job
    from fedstale.traces.forecast.evaluation import SHOWN, backtested, wide

    job = Job(work=work, download_bytes=download_bytes, upload_bytes=upload_bytes, ttl_s=deadline_s)
    tables = backtested(
        _recorded(traces, seed=seed),
        [name for name in forecasters.split(",") if name],
        trained or [],
        job,
        step_s=step_s,
        k=k,
        examples=examples,
        seed=seed,
    )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for name, table in tables.items():
            table.to_csv(out / f"{name}.csv", index=False)
        write_figures(
            "Backtest of forecasts",
            f"{Path(traces).name}, seed {seed}: devices and hours that no forecaster learnt "
            f"from. The job: {work:g} work units, {download_bytes:,} bytes down, "
            f"{upload_bytes:,} bytes up, a deadline of {deadline_s:g} s.",
            figures(tables),
            out / PAGE,
        )
    if as_json:
        # pandas writes NaN as null; the standard library would write NaN, which is not JSON.
        parts = (f"{json.dumps(n)}: {t.to_json(orient='records')}" for n, t in tables.items())
        typer.echo("{" + ", ".join(parts) + "}")
    else:
        for name, table in tables.items():
            if name in SHOWN:
                text = wide(name, table).to_string(float_format="{:.3f}".format)
                typer.echo(f"\n{SHOWN[name]}\n\n{text}")


@one_sentence()
def train_agent(
    traces: _Fleets,
    out: _Folder,
    forecaster: _Forecasters = None,
    updates: Annotated[int, typer.Option(min=1, help="Updates of the weights.")] = 60,
    seed: _Seed = 0,
    seeds: Annotated[
        int, typer.Option(min=1, help="Trainings; the best in validation is kept as the agent.")
    ] = 1,
    no_forecasts: Annotated[
        bool, typer.Option("--no-forecasts", help="Without forecasts: a reactive agent.")
    ] = False,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Do not start as the heuristic.")
    ] = False,
    windows: _Windows = 200,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write events for TensorBoard.")
    ] = False,
    resume: Annotated[bool, typer.Option(help="Continue an interrupted training.")] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Trainings at a time; default one for each core.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a selection agent on traces; writes agent.toml and agent.safetensors."""
    from fedstale.agents import Training, save
    from fedstale.strategies.arrays import n_cores

    if not resume and (out / "agent.toml").exists():
        raise ConfigError(f"{out}: holds an agent; expected a new folder, or --resume")
    is_shown = not (quiet or as_json)
    forecasters = forecaster or ["embedded"]
    if len(forecasters) not in {1, len(traces)}:
        raise ConfigError(
            f"{len(forecasters)} forecasters for {len(traces)} traces: expected one, or one each"
        )
    # Of several fleets, each keeps its forecasts in a folder of its own.
    caches = [out / "cache" / str(i) for i in range(len(traces))]
    fleets = [
        _scenarios(name, by, seed, no_forecasts=no_forecasts, cache=cache)
        for name, by, cache in zip(traces, cycle(forecasters), caches, strict=False)
    ]
    trainings = {
        out / f"seed-{n}" if seeds > 1 else out: Training(
            updates=updates, seed=n, residual=not from_scratch
        )
        for n in range(seed, seed + seeds)
    }
    with _watching(out, is_shown=is_shown, tensorboard=tensorboard) as watch:
        agents = train_all(
            trainings,
            fleets,
            provenance={
                "fedstale": __version__,
                "traces": [Path(name).name for name in traces],
                "devices": [int(fleet.training.devices.size) for fleet in fleets],
                "forecasters": [] if no_forecasts else [Path(name).name for name in forecasters],
            },
            resume=resume,
            workers=workers or n_cores(),
            out=out,
            watch=watch,
        )
    best = _best(agents, list(trainings))
    if seeds > 1:
        save(best, out)
    tested = dict(zip(traces, (fleet.testing for fleet in fleets), strict=True))
    _evaluate(tested, agents, windows, seed, out=out, quiet=quiet, as_json=as_json)
    if not as_json:
        typer.echo(f"agent: {out}")


@one_sentence()
def evaluate_agent(
    traces: _Traces,
    agents: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[AGENT]...",
            help="Folders of trained agents, one for each training seed, or of one training with "
            "several; the agent that comes with fedstale if none is given.",
        ),
    ] = None,
    forecaster: _Forecaster = "embedded",
    reactive: Annotated[
        Path | None, typer.Option(help="Folder of an agent trained with --no-forecasts.")
    ] = None,
    scratch: Annotated[
        Path | None, typer.Option(help="Folder of an agent trained with --from-scratch.")
    ] = None,
    windows: _Windows = 200,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="Devices of a window; drawn from 32 to 256 if not given."),
    ] = None,
    all_devices: Annotated[
        bool,
        typer.Option(
            "--all-devices", help="Test on every device: none of these traces was learnt from."
        ),
    ] = False,
    seed: _Seed = 0,
    out: _Tables = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Let an agent and every other selector play the same held-out windows, and compare."""
    from fedstale.agents import Scenario
    from fedstale.agents.policy.scorer import embedded
    from fedstale.traces.forecast import split

    loaded = [agent for folder in agents or [embedded()] for agent in _loaded(folder)]
    cache = None if out is None else out / "cache"
    if all_devices:
        devices_read = _recorded(traces, seed=seed)
        parts = split(devices_read, seed=0)
        testing = Scenario.of(
            devices_read,
            forecaster=_forecaster(forecaster),
            start=parts.turn,
            end=parts.end,
            cache=None if cache is None else cache / "forecasts-all.npz",
        )
    else:
        testing = _scenarios(traces, forecaster, seed, cache=cache).testing
    if devices is not None:
        testing = testing.with_devices(devices)
    rivals: dict[str, Any] = {
        "reactive": [] if reactive is None else _loaded(reactive),
        "scratch": [] if scratch is None else _loaded(scratch),
    }
    shown: dict[str, Any] = {"out": out, "quiet": quiet, "as_json": as_json}
    _evaluate({traces: testing}, loaded, windows, seed, **shown, **rivals)


def train_all(
    trainings: Mapping[Path, "Training"],
    fleets: Sequence["Scenarios"],
    *,
    provenance: Mapping[str, Any],
    resume: bool,
    workers: int,
    out: Path,
    watch: Watch,
) -> list["Agent"]:
    """Train agents, and return them in the order of their folders.

    Args:
        trainings: by folder, each with a seed of its own.
        fleets: where all of them learn and are validated.
        provenance: what the agents' descriptions are to say besides the settings.
        resume: whether to continue interrupted trainings.
        workers: processes at a time; with one, or one training, this process does all.
        out: folder for what processes print and, meanwhile, for what they share.
        watch: is told how far they are.

    Raises:
        FedstaleError: a folder holds an agent already and `resume` is not set, a checkpoint belongs
            to another training or is damaged, or a process died.
    """
    from fedstale.agents import load, train
    from fedstale.parallel import WorkerPool
    from fedstale.traces.io.mapped import share

    options: dict[str, Any] = {"provenance": dict(provenance), "resume": resume}
    if min(workers, len(trainings)) == 1:
        parts = [f.training for f in fleets], [f.validation for f in fleets]
        for folder, training in trainings.items():
            train(*parts, training, folder, watch=watch, **options)
        return [load(folder) for folder in trainings]
    out.mkdir(parents=True, exist_ok=True)
    shared = share(tuple(fleets), out / ".scenarios")
    jobs = ((shared, training, folder, options) for folder, training in trainings.items())
    try:
        with WorkerPool(_train_shared, out / LOG) as pool:
            for (_, training, _, _), news, what in pool.work(jobs, workers):
                if news == "progress":
                    watch(what)
                elif news != "done":
                    raise FedstaleError(f"seed {training.seed}: {what}")
    finally:
        shared.path.unlink()
    return [load(folder) for folder in trainings]


def _train_shared(
    given: tuple["Shared[tuple[Scenarios, ...]]", "Training", Path, dict[str, Any]],
    report: "Report",
) -> None:
    """Train in a process of its own."""
    from fedstale.agents import train

    shared, training, folder, options = given
    fleets = shared.open()
    parts = [f.training for f in fleets], [f.validation for f in fleets]
    train(*parts, training, folder, watch=report, **options)


def _best(agents: Sequence["Agent"], folders: Sequence[Path]) -> "Agent":
    """Return the best agent in validation of those without faults, or of all if each has one."""
    from fedstale.agents import AgentSelector, faults

    sound = []
    for agent, folder in zip(agents, folders, strict=True):
        found = faults(AgentSelector(folder))
        for fault in found:
            note(f"fedstale: {folder}: {fault}")
        if not found:
            sound.append(agent)
    return max(sound or agents, key=lambda agent: agent.provenance["validation"])


def _loaded(folder: Path) -> list["Agent"]:
    from fedstale.agents import load

    parts = sorted(folder.glob("seed-*/agent.toml"))
    return [load(part.parent) for part in parts] or [load(folder)]


def _recorded(spec: str, *, seed: int) -> "TraceSet":
    """Return devices that take time: of others there is nothing to learn or to forecast."""
    from fedstale.traces import TraceSet

    traces = TraceSet.load(spec, seed=seed)
    if traces.is_ideal:
        raise TraceError(
            f"traces = {spec!r}: devices that take no time have nothing to forecast or to choose "
            "by; expected a recording or synthetic:N"
        )
    return traces


def _scenarios(
    traces: str, forecaster: str, seed: int, *, no_forecasts: bool = False, cache: Path | None
) -> "Scenarios":
    from fedstale.agents import Scenarios

    return Scenarios.of(
        _recorded(traces, seed=seed),
        forecaster=_forecaster(forecaster),
        forecasts="none" if no_forecasts else "forecaster",
        seed=seed,
        cache=cache,
    )


def _forecaster(name: str) -> "Forecaster | None":
    """Return the forecaster that an option names, None for new ones."""
    from fedstale.traces.forecast import Forecaster, embedded

    if name == "fit":
        return None
    if name == "embedded" or name.startswith("embedded:"):
        return embedded(name.removeprefix("embedded").removeprefix(":") or "any")
    return Forecaster.load(name)


def _evaluate(
    tested: Mapping[str, "Scenario"],
    agents: Sequence["Agent"],
    windows: int,
    seed: int,
    *,
    out: Path | None,
    quiet: bool,
    as_json: bool,
    **rivals: Sequence["Agent"],
) -> None:
    """Let agents and all others play in each fleet, and write and print how they did."""
    import pandas as pd

    from fedstale.agents import contenders, evaluate
    from fedstale.agents.evaluation import wide

    def watch(name: str, done: int, total: int) -> None:
        if not (quiet or as_json):
            note(f"evaluation {done + 1}/{total}: {name}")

    tables = []
    for i, (traces, testing) in enumerate(tested.items()):
        persistence = testing.with_forecasts("persistence")
        playing = contenders(testing, agents, persistence=persistence, **rivals)
        result = evaluate(playing, windows=windows, seed=seed, watch=watch)
        tables.append(result.table.assign(traces=traces))
        if out is not None:
            folder = out if len(tested) == 1 else out / f"fleet-{i}"
            folder.mkdir(parents=True, exist_ok=True)
            result.table.to_csv(folder / "evaluation.csv", index=False)
            result.windows.to_csv(folder / "windows.csv", index=False)
        if not as_json:
            seeds = result.windows.groupby("contender")["training_seed"].nunique().max()
            typer.echo(
                f"\n{traces}: means over {result.table['windows'].max():.0f} held-out windows "
                f"({seeds} training seeds); advantage of the agent in reward, with its 95 % "
                "interval\n\n" + wide(result.table).to_string(float_format="{:.3f}".format)
            )
    if as_json:
        # pandas writes NaN as null; the standard library would write what is no JSON.
        typer.echo(pd.concat(tables).to_json(orient="records"))


@contextmanager
def _watching(out: Path, *, is_shown: bool, tensorboard: bool) -> Iterator[Watch]:
    """Show trainings: a bar each on a terminal, a line a validation elsewhere; write events."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    count = "{task.completed:.0f}/{task.total:.0f}", "{task.fields[validation]}"
    columns = ("seed {task.fields[seed]}", BarColumn(bar_width=20), *count)
    times = TimeElapsedColumn(), TimeRemainingColumn()
    bars = Progress(*columns, *times, console=Console(stderr=True))
    has_bars, rows = is_shown and sys.stderr.isatty(), {}
    with ExitStack() as stack:
        writer = None
        if tensorboard:
            from fedstale.live.watching import event_writer

            writer = stack.enter_context(event_writer(out / "tensorboard"))
        if has_bars:
            stack.enter_context(bars)

        def watch(progress: "TrainingProgress") -> None:
            seed, metrics = progress.seed, progress.metrics
            if writer is not None:
                for name, value in metrics.items():
                    writer.add_scalar(f"seed-{seed}/{name}", value, progress.update)
            if has_bars:
                if seed not in rows:
                    rows[seed] = bars.add_task("", total=progress.updates, seed=seed, validation="")
                bars.update(rows[seed], completed=progress.update)
                if "validation" in metrics:
                    bars.update(rows[seed], validation=f"held out {metrics['validation']:+.2f}")
            elif is_shown and "validation" in metrics:
                note(
                    f"seed {seed}  update {progress.update}/{progress.updates}  held out "
                    f"{metrics['validation']:+.3f} +- {metrics['validation_error']:.3f} over the "
                    f"heuristic, {progress.left_s / 60:.1f} min left"
                )

        yield watch


def _show_epoch(network: str, epoch: int, loss: float, held_out: float) -> None:
    note(f"{network:8s}  epoch {epoch:2d}  loss {loss:.4f}  held out {held_out:.4f}")
