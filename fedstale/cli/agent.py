"""`fedstale agent`: train selection agents on traces, let them play, and show what they learnt.

Traces are split by device and by time from the same seed, so nothing is ever tested on a device or
an hour that it learnt from. Several trainings of an agent, one for each seed, run in processes of
their own, which map one copy of the traces and of the devices' forecasts into their memory; what a
training gives does not depend on where it ran.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedstale import __version__
from fedstale.cli.forecaster import Folder, Seed, Tables, Traces, recorded
from fedstale.cli.output import AsJson, one_sentence, steps, table_text
from fedstale.errors import ConfigError, FedstaleError

if TYPE_CHECKING:
    import pandas as pd

    from fedstale.agents import Agent, Reward, Scenario, Scenarios, Training, TrainingProgress
    from fedstale.parallel import Report
    from fedstale.traces.forecast import Forecaster
    from fedstale.traces.io import Shared

Watch = Callable[["TrainingProgress"], None]

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
        metavar="PATH|synthetic:N[@FLEET]",
        help="Device traces; repeated, the agent learns on several fleets in turn.",
    ),
]
_Forecasters = Annotated[
    list[str] | None,
    typer.Option(
        "--forecaster",
        metavar="FOLDER|embedded|embedded:FLEET|fit",
        help="As of `fedstale agent evaluate`; one for all traces, or one for each; default "
        "embedded.",
    ),
]
_Windows = Annotated[int, typer.Option(min=10, help="Held-out windows that are played.")]
_WINDOWS = 200
LOG = "log.txt"
"""File in the output folder with what training processes print."""

app = typer.Typer(
    help="Train selection agents on traces, and compare them with other selectors.",
    no_args_is_help=True,
)


@app.command(epilog="Example: fedstale agent train --traces fleet.parquet --out agents/mine")
@one_sentence()
def train(
    traces: _Fleets,
    out: Folder,
    forecaster: _Forecasters = None,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="AGENT", help="Agent to go on from; default the balanced rule."
        ),
    ] = None,
    objective: Annotated[
        Literal["gain", "priced"],
        typer.Option(
            help="What is earned: what is learnt in a fixed time of the clock or of devices, or "
            "that less a price of time and waste.",
        ),
    ] = "gain",
    updates: Annotated[int, typer.Option(min=1, help="Updates of the weights.")] = 60,
    seed: Seed = 0,
    seeds: Annotated[
        int, typer.Option(min=1, help="Trainings; the best in validation is kept as the agent.")
    ] = 1,
    windows: _Windows = _WINDOWS,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Trainings at a time; default one for each core.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a selection agent on traces; writes agent.toml and agent.safetensors.

    How the training went is in progress.jsonl, how the agent does in evaluation.csv.
    """
    from fedstale.agents import Reward, Training, load, save
    from fedstale.strategies.types import n_cores

    if (out / "agent.toml").exists():
        raise ConfigError(f"{out}: holds an agent; expected a new folder")
    begin_with = None if start is None else load(start)
    is_shown = not as_json
    forecasters = forecaster or ["embedded"]
    if len(forecasters) not in {1, len(traces)}:
        raise ConfigError(
            f"{len(forecasters)} forecasters for {len(traces)} traces: expected one, or one each"
        )
    fleets: list[Scenarios] = []
    with steps(is_shown=is_shown) as step:
        for name, by in zip(traces, cycle(forecasters), strict=False):
            step(f"forecasts of {Path(name).name}", len(fleets), len(traces))
            fleets.append(_scenarios(name, by, seed))
    trainings = {
        out / f"seed-{n}" if seeds > 1 else out: Training(updates=updates, seed=n)
        for n in range(seed, seed + seeds)
    }
    with _watching(trainings.values(), is_shown=is_shown) as watch:
        agents = train_all(
            trainings,
            fleets,
            provenance={
                "fedstale": __version__,
                "traces": [Path(name).name for name in traces],
                "devices": [int(fleet.training.devices.size) for fleet in fleets],
                "forecasters": [Path(name).name for name in forecasters],
            },
            reward=Reward() if objective == "gain" else Reward(time=0.1, waste=0.3),
            start=begin_with,
            workers=workers or n_cores(),
            out=out,
            watch=watch,
        )
    best = max(agents, key=lambda agent: agent.provenance["validation"])
    if seeds > 1:
        save(best, out)
    tested = dict(zip(traces, (fleet.testing for fleet in fleets), strict=True))
    _evaluate(tested, agents, windows, seed, out=out, as_json=as_json)
    if not as_json:
        typer.echo(f"agent: {out}")
    if best.advice:
        typer.echo(best.advice, err=as_json)


@app.command(epilog="Example: fedstale agent evaluate --traces fleet.parquet")
@one_sentence()
def evaluate(
    traces: Traces,
    agents: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[AGENT]...",
            help="Folders of trained agents, one for each training seed, or of one training with "
            "several; the agent that comes with fedstale if none is given.",
        ),
    ] = None,
    forecaster: _Forecaster = "embedded",
    windows: _Windows = _WINDOWS,
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
    seed: Seed = 0,
    out: Tables = None,
    as_json: AsJson = False,
) -> None:
    """Compare an agent with every other selector on the same held-out windows.

    With --out, the tables go to evaluation.csv and windows.csv.
    """
    from fedstale.agents import Scenario, load
    from fedstale.agents.policy import embedded
    from fedstale.traces.forecast import split

    folders: list[Path] = []
    for folder in agents or [embedded()]:
        # Those of an agent's trainings, or its own.
        folders += sorted(part.parent for part in folder.glob("seed-*/agent.toml")) or [folder]
    loaded = [load(folder) for folder in folders]
    if all_devices:
        devices_read = recorded(traces, seed=seed)
        parts = split(devices_read, seed=0)
        testing = Scenario.of(
            devices_read,
            forecaster=_forecaster(forecaster),
            start=parts.turn,
            end=parts.end,
        )
    else:
        testing = _scenarios(traces, forecaster, seed).testing
    if devices is not None:
        testing = testing.with_devices(devices)
    _evaluate({traces: testing}, loaded, windows, seed, out=out, as_json=as_json)


def train_all(
    trainings: Mapping[Path, "Training"],
    fleets: Sequence["Scenarios"],
    *,
    provenance: Mapping[str, Any],
    reward: "Reward | None" = None,
    start: "Agent | None" = None,
    workers: int,
    out: Path,
    watch: Watch,
) -> list["Agent"]:
    """Train agents, and return them in the order of their folders.

    Args:
        trainings: by folder, each with a seed of its own.
        fleets: where all of them learn and are validated.
        provenance: what the agents' descriptions are to say besides the settings.
        reward: prices; the defaults if None.
        start: agent to go on from; the balanced rule if None.
        workers: processes at a time; with one, or one training, this process does all.
        out: folder for what processes print and, meanwhile, for what they share.
        watch: is told how far they are.

    Raises:
        FedstaleError: a folder holds an agent already, or a process died.
    """
    from fedstale.agents import load, train
    from fedstale.parallel import WorkerPool
    from fedstale.traces.io import share

    options: dict[str, Any] = {"provenance": dict(provenance), "reward": reward, "start": start}
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


def _scenarios(traces: str, forecaster: str, seed: int) -> "Scenarios":
    from fedstale.agents import Scenarios

    return Scenarios.of(recorded(traces, seed=seed), forecaster=_forecaster(forecaster), seed=seed)


def _forecaster(name: str) -> "Forecaster | None":
    """Return the forecaster that an option names, None for new ones."""
    from fedstale.traces.forecast import Forecaster, forecaster_folder

    return None if name == "fit" else Forecaster.load(forecaster_folder(name))


def _evaluate(
    tested: Mapping[str, "Scenario"],
    agents: Sequence["Agent"],
    windows: int,
    seed: int,
    *,
    out: Path | None,
    as_json: bool,
) -> None:
    """Play agents and all others in each fleet; write and print their comparison."""
    import pandas as pd

    from fedstale.agents import contenders, evaluate

    results = []
    with steps(is_shown=not as_json) as step:
        for testing in tested.values():
            playing = contenders(testing, agents, persistence=testing.with_forecasts("persistence"))
            results.append(evaluate(playing, windows=windows, seed=seed, watch=step))
    for i, (traces, result) in enumerate(zip(tested, results, strict=True)):
        seeds = result.windows.groupby("contender")["training_seed"].nunique().max()
        about = (
            f"{Path(traces).name}: means over {result.table['windows'].max():.0f} held-out windows "
            f"({seeds} training seed{'s' if seeds > 1 else ''})"
        )
        if out is not None:
            folder = out if len(tested) == 1 else out / f"fleet-{i}"
            folder.mkdir(parents=True, exist_ok=True)
            result.table.to_csv(folder / "evaluation.csv", index=False)
            result.windows.to_csv(folder / "windows.csv", index=False)
        if not as_json:
            _print_evaluation(result.table, about)
    if as_json:
        tables = [
            result.table.assign(traces=name) for name, result in zip(tested, results, strict=True)
        ]
        # pandas writes NaN as null; the standard library would write what is no JSON.
        typer.echo(pd.concat(tables).to_json(orient="records"))


def _print_evaluation(table: "pd.DataFrame", about: str) -> None:
    """Print the rewards and their terms, and then what became of the jobs."""
    from fedstale.agents.env import TERMS
    from fedstale.agents.evaluation import tie_sentence, wide

    found = wide(table)
    rewards = ["reward", "agent's advantage", *TERMS[1:]]
    jobs = found.drop(columns=rewards)
    jobs.insert(1, "device-hours wasted", jobs.pop("wasted_s") / 3600.0)
    typer.echo(
        f"\n{about}; advantage of the agent in reward, with its 95 % interval\n\n"
        f"{table_text(found[rewards])}\n\nWhat became of the jobs\n\n{table_text(jobs)}"
    )
    if why := tie_sentence(table):
        typer.echo(f"\n{why}")


@contextmanager
def _watching(trainings: Iterable["Training"], *, is_shown: bool) -> Iterator[Watch]:
    """Show the progress of trainings together."""
    total = sum(training.updates for training in trainings)
    done: dict[int, int] = {}
    with steps(is_shown=is_shown) as step:

        def watch(progress: "TrainingProgress") -> None:
            done[progress.seed] = progress.update
            step("training", sum(done.values()), total)

        yield watch
