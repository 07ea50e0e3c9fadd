"""`fedstale train-agent` and `fedstale evaluate-agent`: learn whom to pick, and prove it.

Both split the traces by device and by time from the same seed, as the forecaster's commands do, so
an agent is never tested on a device or an hour that it learnt from.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedstale import __version__
from fedstale.cli.output import one_sentence
from fedstale.errors import ConfigError

if TYPE_CHECKING:
    from fedstale.agents.env.scenario import Stage, Stages
    from fedstale.agents.evaluation import Evaluation
    from fedstale.agents.policy.files import Agent
    from fedstale.agents.policy.scorer import Weights
    from fedstale.agents.training.train import Progress
    from fedstale.cli.agent_trainings import Watch
    from fedstale.traces import TraceSet
    from fedstale.traces.forecast import Forecaster

_Traces = Annotated[
    str, typer.Option("--traces", metavar="PATH|synthetic:N", help="Complete device traces.")
]
_Forecaster = Annotated[
    str,
    typer.Option(
        "--forecaster",
        metavar="FOLDER|embedded|fit",
        help="Who forecasts: a trained one that has not learnt from these devices, the one that "
        "comes with fedstale, or new ones, each fitted to the half that it does not forecast.",
    ),
]
_Windows = Annotated[int, typer.Option(min=10, help="Held-out windows that everybody plays.")]
_Json = Annotated[bool, typer.Option("--json", help="Print the table as JSON.")]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]


_EMBEDDED: list[Path | None] = [None]


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
        bool, typer.Option("--no-forecasts", help="Devices say nothing: a reactive agent.")
    ] = False,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Do not start as the heuristic.")
    ] = False,
    windows: _Windows = 200,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write events for TensorBoard.")
    ] = False,
    resume: Annotated[bool, typer.Option(help="Go on where an interrupted training was.")] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Trainings at a time; default one for each core.")
    ] = None,
    as_json: _Json = False,
    quiet: _Quiet = False,
) -> None:
    """Train a selection agent on traces; writes agent.toml and agent.safetensors."""
    with one_sentence():
        from fedstale.agents.policy import files as export
        from fedstale.agents.training.train import Training
        from fedstale.cli.agent_trainings import Task, train_all
        from fedstale.strategies.cores import n_cores

        if not resume and (out / "agent.toml").exists():
            raise ConfigError(f"{out}: holds an agent; expected a new folder, or --resume")
        with _board(out, wanted=tensorboard) as board:
            parts = _stages(traces, forecaster, seed, silent=no_forecasts, cache=out / "cache")
            tasks = [
                Task(
                    training=Training(
                        algorithm=algorithm, updates=updates, seed=n, residual=not from_scratch
                    ),
                    folder=out / f"seed-{n}" if seeds > 1 else out,
                    provenance={
                        "fedstale": __version__,
                        "traces": Path(traces).name,
                        "devices": int(parts.training.devices.size),
                        "forecaster": "none" if no_forecasts else Path(forecaster).name,
                    },
                    resume=resume,
                )
                for n in range(seed, seed + seeds)
            ]
            with _shown(quiet=quiet or as_json) as shown:
                agents = train_all(
                    tasks, parts, workers=workers or n_cores(), out=out, watch=_both(shown, board)
                )
            best = _best(agents, [task.folder for task in tasks])
            if seeds > 1:
                export.save(best, out)
        result = _evaluated(
            parts.testing,
            [agent.weights for agent in agents],
            windows=windows,
            seed=seed,
            quiet=quiet or as_json,
        )
        _report(result, out, as_json=as_json)
        if not as_json:
            typer.echo(f"agent: {out}")


def _best(agents: "list[Agent]", folders: list[Path]) -> "Agent":
    """Return the best agent in validation of those that are sound, or of all if none is."""
    from fedstale.agents.policy.selector import AgentSelector
    from fedstale.agents.sanity import faults

    found = [faults(AgentSelector(folder)) for folder in folders]
    for folder, sentences in zip(folders, found, strict=True):
        for sentence in sentences:
            typer.echo(f"fedstale: {folder}: {sentence}", err=True)
    sound = [agent for agent, sentences in zip(agents, found, strict=True) if not sentences]
    return max(sound or agents, key=lambda agent: agent.provenance["validation"])


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
        from fedstale.agents.evaluation import of_size

        loaded = [weights for folder in agents or _EMBEDDED for weights in _loaded(folder)]
        if all_devices:
            testing = _everyone(_load(traces, seed), _forecaster(forecaster), out)
        else:
            cache = None if out is None else out / "cache"
            testing = _stages(traces, forecaster, seed, silent=False, cache=cache).testing
        if devices is not None:
            testing = of_size(testing, devices)
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


def _stages(
    traces: str, forecaster: str, seed: int, *, silent: bool, cache: Path | None
) -> "Stages":
    from fedstale.agents.env.scenario import stages

    return stages(
        _load(traces, seed),
        forecaster=_forecaster(forecaster),
        forecasts="none" if silent else "forecaster",
        seed=seed,
        cache=cache,
    )


def _everyone(traces: "TraceSet", forecaster: "Forecaster | None", out: Path | None) -> "Stage":
    from fedstale.agents.env.scenario import Stage
    from fedstale.traces.forecast import split

    parts = split(traces, seed=0)
    cache = None if out is None else out / "cache" / "forecasts-everyone.npz"
    return Stage.of(traces, forecaster=forecaster, start=parts.turn, end=parts.end, cache=cache)


def _forecaster(word: str) -> "Forecaster | None":
    """Return the forecaster that a word means, None for new ones."""
    from fedstale.traces.forecast import Forecaster, embedded

    if word == "fit":
        return None
    return embedded() if word == "embedded" else Forecaster.load(word)


def _loaded(folder: Path | None) -> "list[Weights]":
    from fedstale.agents.policy import files as export

    if folder is None:
        return [export.load(export.embedded()).weights]
    parts = sorted(folder.glob("seed-*/agent.toml"))
    return [export.load(part.parent).weights for part in parts] or [export.load(folder).weights]


def _evaluated(
    testing: "Stage",
    agents: "list[Weights]",
    *,
    windows: int,
    seed: int,
    quiet: bool,
    reactive: "list[Weights] | None" = None,
    scratch: "list[Weights] | None" = None,
) -> "Evaluation":
    from fedstale.agents.env.scenario import Stage
    from fedstale.agents.evaluation import contenders, evaluate

    persistence = Stage.of(
        testing.traces,
        forecasts="persistence",
        devices=testing.devices,
        start=testing.start,
        end=testing.end,
        kinds=testing.kinds,
        settings=testing.settings,
    )
    playing = contenders(
        testing,
        agents,
        persistence=persistence,
        reactive=reactive or [],
        scratch=scratch or [],
    )

    def told(name: str, done: int, total: int) -> None:
        if not quiet:
            typer.echo(f"evaluation {done + 1}/{total}: {name}", err=True)

    return evaluate(playing, windows=windows, seed=seed, watch=told)


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
def _shown(*, quiet: bool) -> Iterator["Watch"]:
    """Show progress: a bar a training on a terminal, a line a validation elsewhere."""
    if quiet:
        yield lambda seed, progress: None
        return
    if not sys.stderr.isatty():
        yield _line
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("seed {task.fields[seed]}"),
        BarColumn(bar_width=20),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:
        rows: dict[int, Any] = {}

        def watch(seed: int, progress: "Progress") -> None:
            if seed not in rows:
                rows[seed] = bars.add_task("", total=progress.updates, seed=seed, said="")
            bars.update(rows[seed], completed=progress.update)
            if "validation" in progress.numbers:
                bars.update(rows[seed], said=f"held out {progress.numbers['validation']:+.2f}")

        yield watch


def _line(seed: int, progress: "Progress") -> None:
    if "validation" in progress.numbers:
        typer.echo(
            f"seed {seed}  update {progress.update}/{progress.updates}  held out "
            f"{progress.numbers['validation']:+.3f} +- "
            f"{progress.numbers['validation_error']:.3f} over the heuristic, "
            f"{progress.left_s / 60:.1f} min left",
            err=True,
        )


@contextmanager
def _board(out: Path, *, wanted: bool) -> Iterator[Any]:
    """Open a writer of TensorBoard events, or yield None."""
    if not wanted:
        yield None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "tensorboard: not installed; run `pip install tensorboard`, or leave out --tensorboard "
            "(the same numbers are in progress.jsonl)"
        ) from None
    writer = SummaryWriter(str(out / "tensorboard"))
    try:
        yield writer
    finally:
        writer.close()


def _both(shown: "Watch", board: Any) -> "Watch":  # noqa: ANN401 - optional
    """Return what tells both of them, the second only if there is one."""

    def told(seed: int, progress: "Progress") -> None:
        shown(seed, progress)
        if board is not None:
            for name, value in progress.numbers.items():
                board.add_scalar(f"seed-{seed}/{name}", value, progress.update)

    return told


def _load(word: str, seed: int) -> "TraceSet":
    from fedstale import trace_spec

    return trace_spec.load(word, seed=seed)
