"""`fedstale agent fit-learning` and `agent evaluate --worlds`: how far to trust simulated learning.

Agents learn and are compared on a proxy of learning. Its constants can be fitted to runs of one's
own, and the comparison can be played in many worlds around them.
"""

import json
from collections.abc import Sequence
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstale.cli.output import AsJson, note, one_sentence, steps, table_text
from fedstale.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

    from fedstale.agents import Agent, LearningProxy, LearningRun, Scenario, WorldEvaluation

LOSS = "loss"
"""Metric of the server that is fitted to."""
WORLD_WINDOWS = 50
"""Windows that are played in each world."""
_GUARDED = 200


@one_sentence()
def fit_learning_command(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Folders of runs of one app, at least 5, with a strategy of fedstale and a loss "
            "that the server measured.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="File of constants to write.")
    ] = Path("learning.toml"),
    overwrite: Annotated[bool, typer.Option(help="Replace the file if there is one.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the deals and of what is held out.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Fit how a model learns to runs of your app, for `agent train` and `agent evaluate`.

    Prints how well runs that were left out are predicted, by the fit and by their mean.
    """
    from dataclasses import asdict

    import pandas as pd

    from fedstale import __version__
    from fedstale.agents.env.learning_fit import FREE, PROXY, fit_learning, out_of_sample
    from fedstale.agents.env.learning_proxy import fitted

    if out.exists() and not overwrite:
        raise ConfigError(f"{out}: exists already; choose another name, or pass --overwrite")
    if not out.parent.is_dir():
        raise ConfigError(f"{out}: the folder {out.parent} does not exist; make it first")
    known = read_learning_runs(runs)
    found = fit_learning(known, seed=seed)
    table = out_of_sample(known, found, seed=seed)
    about: dict[str, Any] = {
        "fedstale": __version__,
        "runs": [folder.name for folder in runs],
        "seed": seed,
        "skew": found.skew,
        "kept": [name for name in found.spread if name not in FREE],
        # TOML has no null: what is not known is left out.
        "out_of_sample": [
            {name: value for name, value in row.items() if value is not None}
            for row in _plain_rows(table)
        ],
    }
    found.write(out, about)
    constants, shipped = asdict(found.proxy), asdict(fitted())
    if as_json:
        facts = {"out": str(out), "app": found.fitted.app, **about, "constants": constants}
        typer.echo(json.dumps(facts | {"spread": dict(found.spread)}))
        return
    rows = [
        {
            "constant": name,
            "fitted": constants[name],
            "spread": found.spread[name],
            "comes with fedstale": shipped[name],
        }
        for name in FREE
    ]
    typer.echo(
        f"{found.fitted.app}: {found.fitted.runs} runs; the change of the log loss, predicted of "
        f"runs that were left out\n\n{_table(table)}\n\nConstants, and the standard deviation of "
        f"their logarithm\n\n{_table(pd.DataFrame(rows))}\n"
    )
    if table.set_index("emulator")["r2"][PROXY] <= 0:
        typer.echo(
            "The fit predicts held-out runs no better than the mean of the others does: use more "
            "or longer runs, and rely on no simulated learning until it does."
        )
    typer.echo(f"constants: {out}")


def _plain_rows(table: "pd.DataFrame") -> list[dict[str, Any]]:
    """Return the rows of a table as JSON has them: six digits, and None for NaN."""

    def plain(value: object) -> object:
        if not isinstance(value, float):
            return value
        return None if isnan(value) else round(value, 6)

    rows = table.to_dict("records")
    return [{str(name): plain(value) for name, value in row.items()} for row in rows]


def read_learning_runs(folders: Sequence[str | Path]) -> "list[LearningRun]":
    """Return what run folders tell of how their app learns.

    Args:
        folders: what `fedstale simulate` wrote, or deployed apps with a run folder; at least 5,
            each once.

    Raises:
        ConfigError: a folder has not what is needed, occurs twice, or they are too few, or of
            different apps.
        ProtocolError: a file in one cannot be read.
    """
    from fedstale.agents.env.learning_fit import checked

    places = [Path(folder).resolve() for folder in folders]
    for folder, place in zip(folders, places, strict=True):
        if places.count(place) > 1:
            raise ConfigError(f"run = {str(folder)!r} is given twice: expected each run once")
    runs = [learning_run(folder) for folder in folders]
    checked(runs)
    return runs


def learning_run(folder: str | Path) -> "LearningRun":
    """Return what one run folder tells; errors as of `read_learning_runs`.

    Needed are the model's loss on the server at some versions, the first one among them, and which
    jobs went into each version. Strategies of fedstale record both where the app evaluates the
    model on the server; Flower's own do not say which reply went into which version.
    """
    import numpy as np

    from fedstale.agents.env.learning_fit import LearningRun
    from fedstale.reports.run import Run

    run, name = Run(folder), f"run = {str(folder)!r}"
    jobs = run.jobs
    merged = jobs[jobs["aggregated_version"] >= 1]
    if merged.empty:
        raise ConfigError(
            f"{name}: no job says which version it went into: expected a run by a strategy of "
            "fedstale, such as -c \"strategy='fedavg'\""
        )
    metrics = run.metrics
    losses = metrics[metrics["source"].eq("server") & metrics["name"].eq(LOSS)]
    if losses.empty:
        raise ConfigError(
            f"{name}: the server measured no {LOSS}: expected an app whose server evaluates the "
            f"model and reports {LOSS!r}"
        )
    # A version that was evaluated twice is the same model.
    losses = losses.drop_duplicates("version").sort_values("version")
    last = int(merged["aggregated_version"].max())
    losses = losses[losses["version"] <= last]
    # Devices that never got a job are part of the fleet; each known one has a place.
    places = {device: i for i, device in enumerate(dict.fromkeys(jobs["device_id"]))}
    each = [merged[merged["aggregated_version"].eq(v)] for v in range(1, last + 1)]
    busy = merged["delivered_at"] - merged["sent_at"]
    moved = merged[["downloaded_bytes", "uploaded_bytes"]].max(axis=1)
    return LearningRun(
        name=name,
        app=Path(str(run.summary["app"])).name,
        n_devices=max(int(run.summary["devices"]), len(places)),
        versions=losses["version"].to_numpy(dtype=np.int64),
        losses=losses["value"].to_numpy(dtype=np.float64),
        merged=[part["device_id"].map(places).to_numpy(dtype=np.int64) for part in each],
        weights=[part["weight"].fillna(1.0).to_numpy(dtype=np.float64) for part in each],
        staleness=np.array(
            [part["staleness"].fillna(0.0).mean() if len(part) else 0.0 for part in each]
        ),
        job_s=float(busy.median()),
        n_bytes=float(moved.median()),
    )


def proxy_in(path: Path | None) -> "LearningProxy | None":
    """Return the constants in a file, None without one.

    Raises:
        ConfigError: the file is none of constants.
    """
    from fedstale.agents.env.learning_proxy import read_proxy

    return None if path is None else read_proxy(path)


def outside(scenario: "Scenario", path: Path | None, *, seed: int) -> list[str]:
    """Return what of a scenario's windows the constants in a file were not fitted to.

    Args:
        scenario: windows are drawn from it.
        path: of the constants; those that come with the package if None.
        seed: of the draw.

    Raises:
        ConfigError: the file does not say what its constants were fitted to.
    """
    from fedstale.agents.env.learning_fit import Fitted
    from fedstale.agents.env.learning_proxy import CONSTANTS
    from fedstale.traces.arrays import stream

    fitted = Fitted.read(CONSTANTS if path is None else path)
    if fitted is None:
        return [f"{path}: does not say what its constants were fitted to"]
    return fitted.outside(scenario.draw(_GUARDED, stream(seed, 76)), scenario.kinds)


def warn(sentences: Sequence[str]) -> None:
    """Say on stderr what lies outside of a fit."""
    for sentence in sentences:
        note(f"fedstale: outside of the fit: {sentence}")


def say_worlds(
    scenario: "Scenario",
    agents: Sequence["Agent"],
    worlds: int,
    windows: int,
    seed: int,
    *,
    learning: Path | None,
    out: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Compare an agent with rules of one line in many worlds; write and print how it does."""
    from fedstale.agents import evaluate_worlds
    from fedstale.agents.env.worlds import read_spread

    spread, beyond = read_spread(learning), outside(scenario, learning, seed=seed)
    with steps(is_shown=not (quiet or as_json)) as step:
        found = evaluate_worlds(
            scenario,
            agents,
            worlds=worlds,
            windows=windows,
            seed=seed,
            spread=spread,
            watch=lambda name, done, total: step(f"playing: {name}", done, total),
        )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        world_table(found).to_csv(out / "worlds.csv", index=False)
    if as_json:
        facts = {
            "worlds": worlds,
            "windows": windows,
            "seed": seed,
            "prefer": found.prefer,
            "rules": _plain_rows(found.table),
            "spread": spread,
            "outside": beyond,
        }
        typer.echo(json.dumps(facts))
        return
    warn(beyond)
    typer.echo(worlds_text(found, windows, spread))


def worlds_text(found: "WorldEvaluation", windows: int, spread: dict[str, float]) -> str:
    """Return how an agent does in many worlds, in words and a table."""
    n = len(found.worlds)
    shown = found.table.drop(columns=["share"])
    shown["ahead"] = [f"{ahead} of {n}" for ahead in shown["ahead"]]
    shown = shown.rename(
        columns={"median": "advantage", "low": "5 %", "high": "95 %", "reward": "rule's reward"}
    )
    widths = ", ".join(f"{name} {value:.2f}" for name, value in spread.items())
    doubtful = found.table[found.table["share"] < 0.9]
    names = ", ".join(doubtful["rule"])
    verdict = (
        f"The agent is ahead of every rule in at least 90 % of the worlds: prefer {found.prefer}."
        if doubtful.empty
        else f"The agent is ahead in fewer than 90 % of the worlds of {names}: prefer "
        f"{found.prefer}."
    )
    return (
        f"\nAdvantage of the agent in reward, {n} worlds of {windows} held-out windows\n\n"
        f"{_table(shown)}\n\n`matters`: the constant with the strongest rank correlation with the "
        f"advantage.\nSpread, the standard deviation of the logarithm: {widths}.\n{verdict}"
    )


def world_table(found: "WorldEvaluation") -> "pd.DataFrame":
    """Return a row for each world: its constants, and the advantage over each rule."""
    import pandas as pd

    constants = pd.DataFrame({name: values for name, values in found.worlds.constants.items()})
    return pd.concat([constants, found.advantages.add_prefix("advantage over ")], axis=1)


def _table(table: "pd.DataFrame") -> str:
    return table_text(table.set_index(table.columns[0]).rename_axis(None))
