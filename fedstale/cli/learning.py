"""`fedstale agent fit-learning` and `agent evaluate --worlds`: how far to trust simulated learning.

Agents learn and are compared on a proxy of learning. Its constants can be fitted to runs of one's
own, and the comparison can be played in many worlds around them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedstale.cli.output import AsJson, note, one_sentence, steps, table_text

if TYPE_CHECKING:
    import pandas as pd

    from fedstale.agents import Agent, LearningProxy, Scenario, WorldEvaluation

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

    Prints how well runs that were left out are predicted, by the fit and by five regressions.
    """
    from dataclasses import asdict

    from fedstale.agents.env.learning_fit import FREE
    from fedstale.agents.env.learning_proxy import fitted
    from fedstale.errors import ConfigError
    from fedstale.learning_runs import fit_runs

    if out.exists() and not overwrite:
        raise ConfigError(f"{out}: exists already; choose another name, or pass --overwrite")
    if not out.parent.is_dir():
        raise ConfigError(f"{out}: the folder {out.parent} does not exist; make it first")
    made = fit_runs(runs, seed=seed)
    made.write(out)
    found, table, about = made.fit, made.table, made.provenance
    constants, shipped = asdict(found.proxy), asdict(fitted())
    if as_json:
        facts = {"out": str(out), "app": found.fitted.app, **about, "constants": constants}
        typer.echo(json.dumps(facts | {"spread": dict(found.spread)}))
        return
    import pandas as pd

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
    if table.set_index("emulator")["r2"]["learning proxy"] <= 0:
        typer.echo(
            "The fit predicts held-out runs no better than the mean of the others does: use more "
            "or longer runs, and rely on no simulated learning until it does."
        )
    typer.echo(f"constants: {out}")


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
    from fedstale.agents.env.learning_guard import Fitted
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
    from fedstale.learning_runs import plain

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
            "rules": [
                {name: plain(value) for name, value in row.items()}
                for row in found.table.to_dict("records")
            ],
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
