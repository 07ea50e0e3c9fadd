"""`fedstale agent evaluate --worlds`: how far to trust simulated learning.

Agents learn and are compared on a proxy of learning. The comparison can be played in many worlds
around its constants.
"""

import json
from collections.abc import Sequence
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedstale.cli.output import note, steps, table_text

if TYPE_CHECKING:
    import pandas as pd

    from fedstale.agents import Agent, Scenario, WorldEvaluation

WORLD_WINDOWS = 50
"""Windows that are played in each world."""
_GUARDED = 200
"""Windows that are compared with what the learning constants were fitted to."""


def _plain_rows(table: "pd.DataFrame") -> list[dict[str, Any]]:
    """Return the rows of a table as JSON has them: six digits, and None for NaN."""

    def plain(value: object) -> object:
        if not isinstance(value, float):
            return value
        return None if isnan(value) else round(value, 6)

    rows = table.to_dict("records")
    return [{str(name): plain(value) for name, value in row.items()} for row in rows]


def say_worlds(
    scenario: "Scenario",
    agents: Sequence["Agent"],
    worlds: int,
    windows: int,
    seed: int,
    *,
    out: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Compare an agent with rules of one line in many worlds; write and print how it does."""
    from fedstale.agents import evaluate_worlds, outside_of_fit, read_spread
    from fedstale.traces import stream

    spread = read_spread()
    beyond = outside_of_fit(scenario.draw(_GUARDED, stream(seed, 76)), scenario.kinds)
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
    for sentence in beyond:
        note(f"fedstale: outside of the fit: {sentence}")
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
