"""`fedstale train-agent` and `fedstale evaluate-agent`: learn to select clients, and evaluate it.

Both split the traces by device and by time from the same seed, as the forecaster's commands do, so
an agent is never tested on a device or an hour that it learnt from. Several trainings, one for each
seed, run in processes of their own, which map one copy of the traces and of the devices' forecasts
into their memory; what a training gives does not depend on where it ran.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedstale import __version__
from fedstale.cli.output import one_sentence
from fedstale.errors import ConfigError, FedstaleError

if TYPE_CHECKING:
    from fedstale.agents import Agent, Evaluation, Scenario, Scenarios, Training, TrainingProgress
    from fedstale.parallel import Report
    from fedstale.traces import TraceSet
    from fedstale.traces.forecast import Forecaster
    from fedstale.traces.io.mapped import Shared

Watch = Callable[["TrainingProgress"], None]

_Traces = Annotated[
    str, typer.Option("--traces", metavar="PATH|synthetic:N", help="Complete device traces.")
]
_Forecaster = Annotated[
    str,
    typer.Option(
        "--forecaster",
        metavar="FOLDER|embedded|fit",
        help="Source of forecasts: a trained forecaster that has not learnt from these devices, "
        "the one that comes with fedstale, or new ones, each fitted to the half that it does not "
        "forecast.",
    ),
]
_Windows = Annotated[int, typer.Option(min=10, help="Held-out windows that are played.")]
_Json = Annotated[bool, typer.Option("--json", help="Print the table as JSON.")]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]

LOG = "log.txt"
"""File in the output folder with what training processes print."""


def train_agent(
    traces: _Traces,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")],
    forecaster: _Forecaster = "embedded",
    algorithm: Annotated[
        Literal["evolution", "ppo"], typer.Option(help="How to learn; see docs/agent.md.")
    ] = "evolution",
    updates: Annotated[int, typer.Option(min=1, help="Generations, or updates of PPO.")] = 80,
    seed: Annotated[int, typer.Option(min=0, help="Of the split and of the training.")] = 0,
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
    as_json: _Json = False,
    quiet: _Quiet = False,
) -> None:
    """Train a selection agent on traces; writes agent.toml and agent.safetensors."""
    with one_sentence():
        from fedstale.agents import Training, save
        from fedstale.strategies.arrays import n_cores

        if not resume and (out / "agent.toml").exists():
            raise ConfigError(f"{out}: holds an agent; expected a new folder, or --resume")
        with _shown(quiet=quiet or as_json) as shown, _events(out, wanted=tensorboard) as recorded:
            scenarios = _scenarios(
                traces, forecaster, seed, no_forecasts=no_forecasts, cache=out / "cache"
            )
            trainings = {
                out / f"seed-{n}" if seeds > 1 else out: Training(
                    algorithm=algorithm, updates=updates, seed=n, residual=not from_scratch
                )
                for n in range(seed, seed + seeds)
            }

            def watch(progress: "TrainingProgress") -> None:
                shown(progress)
                recorded(progress)

            agents = train_all(
                trainings,
                scenarios,
                provenance={
                    "fedstale": __version__,
                    "traces": Path(traces).name,
                    "devices": int(scenarios.training.devices.size),
                    "forecaster": "none" if no_forecasts else Path(forecaster).name,
                },
                resume=resume,
                workers=workers or n_cores(),
                out=out,
                watch=watch,
            )
        best = _best(agents, list(trainings))
        if seeds > 1:
            save(best, out)
        result = _evaluated(
            scenarios.testing, agents, windows=windows, seed=seed, quiet=quiet or as_json
        )
        _report(result, out, as_json=as_json)
        if not as_json:
            typer.echo(f"agent: {out}")


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
    seed: Annotated[int, typer.Option(min=0, help="Of the split and of the windows.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the tables.")] = None,
    as_json: _Json = False,
    quiet: _Quiet = False,
) -> None:
    """Let an agent and every other selector play the same held-out windows, and compare."""
    with one_sentence():
        from fedstale.agents.policy.scorer import embedded

        loaded = [agent for folder in agents or [embedded()] for agent in _loaded(folder)]
        cache = None if out is None else out / "cache"
        if all_devices:
            testing = _all_devices(traces, forecaster, seed, cache=cache)
        else:
            scenarios = _scenarios(traces, forecaster, seed, no_forecasts=False, cache=cache)
            testing = scenarios.testing
        if devices is not None:
            testing = testing.with_devices(devices)
        result = _evaluated(
            testing,
            loaded,
            reactive=[] if reactive is None else _loaded(reactive),
            scratch=[] if scratch is None else _loaded(scratch),
            windows=windows,
            seed=seed,
            quiet=quiet or as_json,
        )
        _report(result, out, as_json=as_json)


def train_all(
    trainings: Mapping[Path, "Training"],
    scenarios: "Scenarios",
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
        scenarios: where all of them learn and are validated.
        provenance: what the agents' descriptions are to say besides the settings.
        resume: whether to continue interrupted trainings.
        workers: processes at a time; with one, or one training, this process does all.
        out: folder for what processes print and, meanwhile, for what they share.
        watch: is told how far they are.

    Raises:
        FedstaleError: a folder holds an agent already and `resume` is not set, a checkpoint belongs
            to another training or is damaged, or a process died.
    """
    from fedstale.agents import load
    from fedstale.parallel import WorkerPool
    from fedstale.traces.io.mapped import share

    options = {"provenance": dict(provenance), "resume": resume}
    if min(workers, len(trainings)) == 1:
        for folder, training in trainings.items():
            _train(scenarios, training, folder, options, watch)
        return [load(folder) for folder in trainings]
    out.mkdir(parents=True, exist_ok=True)
    shared = share(scenarios, out / ".scenarios")
    todo = deque((shared, training, folder, options) for folder, training in trainings.items())
    try:
        with WorkerPool(_train_shared, out / LOG) as pool:
            while todo or pool.n_busy:
                while todo and pool.n_busy < workers:
                    pool.submit(todo.popleft())
                for (_, training, _, _), news, what in pool.events():
                    if news == "progress":
                        watch(what)
                    elif news != "done":
                        raise FedstaleError(f"seed {training.seed}: {what}")
    finally:
        shared.path.unlink()
    return [load(folder) for folder in trainings]


def _train_shared(
    given: tuple["Shared[Scenarios]", "Training", Path, dict[str, Any]], report: "Report"
) -> None:
    shared, training, folder, options = given
    _train(shared.open(), training, folder, options, report)


def _train(
    scenarios: "Scenarios",
    training: "Training",
    folder: Path,
    options: dict[str, Any],
    watch: Watch,
) -> None:
    from fedstale.agents import train

    train(scenarios.training, scenarios.validation, training, folder, watch=watch, **options)


def _best(agents: Sequence["Agent"], folders: Sequence[Path]) -> "Agent":
    """Return the best agent in validation of those without faults, or of all if each has one."""
    from fedstale.agents import AgentSelector, faults

    sound = []
    for agent, folder in zip(agents, folders, strict=True):
        found = faults(AgentSelector(folder))
        for fault in found:
            typer.echo(f"fedstale: {folder}: {fault}", err=True)
        if not found:
            sound.append(agent)
    return max(sound or agents, key=lambda agent: agent.provenance["validation"])


def _loaded(folder: Path) -> list["Agent"]:
    from fedstale.agents import load

    parts = sorted(folder.glob("seed-*/agent.toml"))
    return [load(part.parent) for part in parts] or [load(folder)]


def _scenarios(
    traces: str, forecaster: str, seed: int, *, no_forecasts: bool, cache: Path | None
) -> "Scenarios":
    from fedstale.agents import Scenarios

    return Scenarios.of(
        _read(traces, seed),
        forecaster=_forecaster(forecaster),
        forecasts="none" if no_forecasts else "forecaster",
        seed=seed,
        cache=cache,
    )


def _all_devices(traces: str, forecaster: str, seed: int, *, cache: Path | None) -> "Scenario":
    from fedstale.agents import Scenario
    from fedstale.traces.forecast import split

    read = _read(traces, seed)
    parts = split(read, seed=0)
    return Scenario.of(
        read,
        forecaster=_forecaster(forecaster),
        start=parts.turn,
        end=parts.end,
        cache=None if cache is None else cache / "forecasts-all.npz",
    )


def _read(traces: str, seed: int) -> "TraceSet":
    from fedstale.traces import TraceSet

    return TraceSet.load(traces, seed=seed)


def _forecaster(name: str) -> "Forecaster | None":
    """Return the forecaster that an option names, None for new ones."""
    from fedstale.traces.forecast import Forecaster, embedded

    if name == "fit":
        return None
    return embedded() if name == "embedded" else Forecaster.load(name)


def _evaluated(
    testing: "Scenario",
    agents: Sequence["Agent"],
    *,
    windows: int,
    seed: int,
    quiet: bool,
    reactive: Sequence["Agent"] = (),
    scratch: Sequence["Agent"] = (),
) -> "Evaluation":
    from fedstale.agents import contenders, evaluate

    persistence = testing.with_forecasts("persistence")
    playing = contenders(
        testing, agents, persistence=persistence, reactive=reactive, scratch=scratch
    )

    def watch(name: str, done: int, total: int) -> None:
        if not quiet:
            typer.echo(f"evaluation {done + 1}/{total}: {name}", err=True)

    return evaluate(playing, windows=windows, seed=seed, watch=watch)


def _report(result: "Evaluation", out: Path | None, *, as_json: bool) -> None:
    from fedstale.agents.evaluation import wide

    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        result.table.to_csv(out / "evaluation.csv", index=False)
        result.windows.to_csv(out / "windows.csv", index=False)
    if as_json:
        # pandas writes NaN as null; the standard library would write what is no JSON.
        typer.echo(result.table.to_json(orient="records"))
        return
    seeds = result.windows.groupby("contender")["training_seed"].nunique().max()
    n = int(result.table["windows"].max())
    typer.echo(
        f"\nMeans over {n} held-out windows ({seeds} training seeds); advantage of the agent in "
        "reward, with its 95 % interval\n"
    )
    typer.echo(wide(result.table).to_string(float_format=lambda x: f"{x:.3f}"))


@contextmanager
def _shown(*, quiet: bool) -> Iterator[Watch]:
    """Show progress: a bar a training on a terminal, a line a validation elsewhere."""
    if quiet:
        yield lambda progress: None
        return
    if not sys.stderr.isatty():
        yield _line
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("seed {task.fields[seed]}"),
        BarColumn(bar_width=20),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[validation]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        rows: dict[int, Any] = {}

        def watch(progress: "TrainingProgress") -> None:
            seed = progress.seed
            if seed not in rows:
                rows[seed] = bars.add_task("", total=progress.updates, seed=seed, validation="")
            bars.update(rows[seed], completed=progress.update)
            if "validation" in progress.metrics:
                held_out = f"held out {progress.metrics['validation']:+.2f}"
                bars.update(rows[seed], validation=held_out)

        yield watch


def _line(progress: "TrainingProgress") -> None:
    if "validation" in progress.metrics:
        typer.echo(
            f"seed {progress.seed}  update {progress.update}/{progress.updates}  held out "
            f"{progress.metrics['validation']:+.3f} +- "
            f"{progress.metrics['validation_error']:.3f} over the heuristic, "
            f"{progress.left_s / 60:.1f} min left",
            err=True,
        )


@contextmanager
def _events(out: Path, *, wanted: bool) -> Iterator[Watch]:
    """Write progress as events for TensorBoard, if wanted."""
    if not wanted:
        yield lambda progress: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "tensorboard: not installed; run `pip install tensorboard`, or leave out --tensorboard "
            "(the same numbers are in progress.jsonl)"
        ) from None
    with SummaryWriter(str(out / "tensorboard")) as writer:

        def watch(progress: "TrainingProgress") -> None:
            for name, value in progress.metrics.items():
                writer.add_scalar(f"seed-{progress.seed}/{name}", value, progress.update)

        yield watch
