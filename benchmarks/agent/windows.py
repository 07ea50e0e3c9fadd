"""Train the agent that comes with fedstale, and compare it on windows that no model has seen.

It learns on phones and cars (`lab.scenarios`), with forecasts and with the truth in their place,
and is tested on other devices, hosts, links and days of those, of desktops, and of all of them
mixed. All contenders play the same windows. Then some of the clients lie: of their chance to
finish, or of their loss.

Then the embedded agent plays among generated devices, few and many (`--sizes` alone does that).

Agents that are in the folder already are not trained again. `--ship` makes one of those without
faults the embedded one: which needs the fewest device-hours in real training of the devices that
agents learn from.

Run it with: OMP_NUM_THREADS=1 python benchmarks/agent/windows.py RECORDINGS --out FOLDER [--ship]
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedstale import __version__
from fedstale.agents import (
    Agent,
    AgentSelector,
    EpisodeSettings,
    Scenario,
    Scenarios,
    Training,
    load,
    save,
)
from fedstale.agents.env.scenario import Mode
from fedstale.agents.evaluation import (
    AGENT,
    HEURISTIC,
    METRICS,
    Contender,
    contenders,
    evaluate,
)
from fedstale.agents.policy.scorer import Score, by_agent, embedded, score
from fedstale.cli.agent import train_all
from fedstale.strategies.selection import BALANCED, ExpectedUtility
from fedstale.strategies.types import n_cores
from fedstale.traces import TraceSet

sys.path.append(str(Path(__file__).parents[1]))
from agent.exponents import SETTINGS, needed
from agent.faults import faults
from agent.lin_ucb import LinUCB
from lab.kept import Kept, played
from lab.results import write_result
from lab.scenarios import recorded_scenarios

FLEETS = ("phones", "desktops", "cars", "mixed")
LEARNT_ON = ("phones", "cars")
LEARNING = EpisodeSettings(
    devices=(60, 128),
    concurrency_share=(0.03, 0.3),
    over_reporting_share=0.25,
    inflating_share=0.25,
)
"""What agents learn on: many to choose from, as the settings of real training have."""
RECORDINGS = {
    "phones": "FLASH by days",
    "desktops": "library desktops",
    "cars": "Norwegian home chargers",
    "all": "AI Benchmark, PlanetLab, 5G production dataset",
}
SORTS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "agent": (5, {}),
    "reactive": (1, {}),
    "scratch": (1, {"residual": False}),
}
"""Training seeds and settings of each sort of agent; the reactive ones learn without forecasts."""
WINDOWS = 100
RATED = [place for place, run in enumerate(SETTINGS) if run.seed < 403]
"""Settings of real training that say which agent is shipped: two windows each, 54 in all."""
NOBODY = {"over_reporting_share": 0.0, "inflating_share": 0.0}
LIARS: Mapping[str, dict[str, float]] = {
    "nobody lies": NOBODY,
    "30 % of chance": {**NOBODY, "over_reporting_share": 1.0},
    "30 % of loss": {**NOBODY, "inflating_share": 1.0},
}
"""Shares of the windows with clients that lie; what is drawn otherwise stays as it is."""
HOUR_S = 3600.0
SIZES = {16: 200, 64: 200, 1_024: 40, 100_000: 10}
"""Windows of three hours played for each number of generated devices."""
COMPARED = (AGENT, HEURISTIC, "p_finish", "p_finish x utility", "random", "FedCS", "REFL IPS")
AMONG_LIARS = (AGENT, HEURISTIC, "p_finish", "LinUCB", "Oort, paper's constants", "random")
Row = dict[str, Any]


def trained(
    fleets: Mapping[str, Scenarios], sort: str, out: Path, training: Training, n: int
) -> dict[Path, Agent]:
    """Return n trained agents of a sort, by their folders."""
    _, settings = SORTS[sort]
    folders = [out / sort / f"seed-{seed}" for seed in range(n)]
    todo = {
        folder: replace(training, seed=seed, **settings)
        for seed, folder in enumerate(folders)
        if not (folder / "agent.toml").exists()
    }
    if todo:
        learnt_on = {name: fleets[name] for name in LEARNT_ON if name in fleets}
        train_all(
            todo,
            to_learn_on(fleets, sort),
            provenance={
                "fedstale": __version__,
                "fleets": list(learnt_on),
                "devices": [int(fleet.training.devices.size) for fleet in learnt_on.values()],
                "recordings": list(RECORDINGS.values()),
                "forecasts": "none" if sort == "reactive" else "fitted to the other half, and true",
                "command": "python benchmarks/agent/windows.py RECORDINGS --out FOLDER --ship",
            },
            workers=n_cores(),
            out=out / sort,
            watch=partial(_tell, sort),
        )
    return {folder: load(folder) for folder in folders}


def _tell(sort: str, progress: Any) -> None:
    if "validation" in progress.metrics:
        found = progress.metrics["validation"]
        print(sort, progress.seed, progress.update, round(found, 3), flush=True)


def to_learn_on(fleets: Mapping[str, Scenarios], sort: str) -> list[Scenarios]:
    """Return where a sort of agent learns: with forecasts and the truth, or without either."""
    modes: tuple[Mode, ...] = ("none",) if sort == "reactive" else ("forecaster", "oracle")
    return [
        replace(
            fleet,
            training=replace(fleet.training, settings=LEARNING).with_forecasts(mode),
            validation=fleet.validation.with_forecasts(mode),
        )
        for name, fleet in fleets.items()
        if name in LEARNT_ON
        for mode in modes
    ]


def best(agents: Mapping[Path, Agent], recordings: Path, kept: Kept) -> tuple[Path, list[Row]]:
    """Return the folder of the best in real training of those without faults, and what each needs.

    Args:
        agents: by their folders.
        recordings: folder of the published files.
        kept: runs that were played.

    Raises:
        ValueError: each has a fault.
    """
    rule = ExpectedUtility(BALANCED)
    selectors = [rule, *(AgentSelector(agent, sure=1.0) for agent in agents.values())]
    tried = [(place, selector) for selector in selectors for place in RATED]
    hours = needed(recordings, tried, kept=kept, jobs=n_cores())
    logs = np.log(hours).mean(axis=1).reshape(len(selectors), len(RATED))
    rows, sound = [], {}
    for (folder, agent), more in zip(agents.items(), logs[1:] - logs[0], strict=True):
        found, ratio = faults(AgentSelector(folder)), float(np.exp(more.mean()))
        row = {
            "training_seed": agent.provenance["training"]["seed"],
            "device_hours": round(ratio, 3),
            "error": round(float(ratio * more.std() / np.sqrt(more.size)), 3),
            "validation": agent.provenance["validation"],
            "faults": found,
        }
        rows.append(row)
        print(row, flush=True)
        if not found:
            sound[folder] = ratio
    if not sound:
        raise ValueError("each agent has a fault: expected one without; train more seeds")
    return min(sound, key=sound.__getitem__), rows


def table(playing: Mapping[str, Any], windows: int, about: Row) -> list[Row]:
    """Return a row for each contender: means, and the agent's reward minus its own."""
    found = evaluate(playing, windows=windows).table
    means = found.pivot(index="contender", columns="metric", values="mean")
    reward = found[found["metric"].eq("reward")].set_index("contender")
    rows = []
    for name in playing:
        row = about | {"contender": name, "windows": windows}
        row |= {metric: _rounded(means.loc[name, metric]) for metric in METRICS}
        row |= {
            column: _rounded(reward.loc[name, column]) for column in ("difference", "low", "high")
        }
        rows.append(row)
        print(row, flush=True)
    return rows


def _rounded(value: Any) -> float | None:
    return None if np.isnan(value) else round(float(value), 4)


def highest(agent: Agent) -> Score:
    """Return how an agent would pick that takes its highest scores instead of drawing by them."""
    return lambda given, mask, rng: score(agent.weights, *given, mask)


def lied_to(scenario: Scenario, how: Mapping[str, float]) -> Scenario:
    """Return the same scenario with other shares of windows with liars."""
    return replace(scenario, settings=replace(scenario.settings, **how))


def bandit(scenario: Scenario) -> dict[str, Contender]:
    """Return the bandit as a contender."""
    return {"LinUCB": Contender(policies=[LinUCB()], scenario=scenario)}


def otherwise_trained(
    scenario: Scenario, agents: Mapping[str, Sequence[Agent]]
) -> dict[str, Contender]:
    """Return agents that learnt without forecasts, or not from the heuristic on, as contenders."""
    policies = {sort: [by_agent(agent.weights) for agent in of] for sort, of in agents.items()}
    silent = scenario.with_forecasts("none")
    return {
        "agent trained without forecasts": Contender(
            policies=policies["reactive"], scenario=silent
        ),
        "agent from scratch": Contender(policies=policies["scratch"], scenario=scenario),
    }


def tables_of(
    name: str, fleet: Scenarios, agents: Mapping[str, Sequence[Agent]], windows: int
) -> list[Row]:
    """Return how everybody does on the tested windows of a fleet, and then among liars."""
    testing = fleet.testing
    playing = {
        **contenders(testing, agents["agent"], persistence=testing.with_forecasts("persistence")),
        **bandit(testing),
        **otherwise_trained(testing, agents),
    }
    best_k = [highest(agent) for agent in agents["agent"]]
    playing["agent, highest scores"] = Contender(policies=best_k, scenario=testing)
    rows = table(playing, windows, {"fleet": name, "liars": "as in training"})
    for liars, how in LIARS.items():
        among = lied_to(testing, how)
        told = contenders(among, [load(embedded())]) | bandit(among)
        rows += table(
            {who: told[who] for who in AMONG_LIARS}, windows, {"fleet": name, "liars": liars}
        )
    return rows


def scenario_of(n: int) -> Scenario:
    """Return a scenario whose windows have n generated devices, which the agent has never seen."""
    # Not every device appears within a window.
    traces = TraceSet.synthetic(max(4 * n, 1_000) if n < 10_000 else 2 * n, days=2, seed=11)
    few = n < 10_000
    return Scenario.of(
        traces,
        start=18 * HOUR_S,
        end=(30 if few else 22) * HOUR_S,
        step_s=900.0 if few else 1800.0,
        settings=EpisodeSettings(
            devices=(n, n),
            window_s=3 * HOUR_S,
            rounds=12,
            concurrency_share=(0.05, 0.25) if few else (0.001, 0.01),
        ),
    )


def by_size(*, quick: bool) -> list[Row]:
    """Return what the embedded agent earns among 16 to 100,000 devices, and others."""
    rows = []
    for n, windows in ({16: 20, 64: 20} if quick else SIZES).items():
        playing = contenders(scenario_of(n), [load(embedded())])
        found = evaluate(
            {name: playing[name] for name in COMPARED},
            windows=windows,
            at_a_time=max(1, min(64, 20_000 // n)),
        )
        for row in found.table[found.table["metric"].eq("reward")].to_dict("records"):
            numbers = {k: row[k] for k in ("mean", "difference", "low", "high")}
            rounded = {k: None if np.isnan(v) else round(v, 3) for k, v in numbers.items()}
            rows.append({"devices": n, "windows": windows, "who": row["contender"], **rounded})
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Train, ship, compare and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, help="folder of agents and forecasts")
    parser.add_argument("--sizes", action="store_true", help="only numbers of generated devices")
    parser.add_argument("--ship", action="store_true", help="write the best to agents/policy")
    parser.add_argument("--quick", action="store_true", help="phones, one seed, four updates")
    parser.add_argument("--updates", type=int, default=40)
    options = parser.parse_args()
    if options.sizes:
        command = "python benchmarks/agent/windows.py --sizes"
        rows = by_size(quick=options.quick)
        print(write_result("agent_sizes", rows, command=command, quick=options.quick))
        return
    if options.recordings is None or options.out is None:
        parser.error("expected RECORDINGS and --out FOLDER, or --sizes")
    names = FLEETS[:1] if options.quick else FLEETS
    windows = 20 if options.quick else WINDOWS
    cache = options.out / "cache"
    fleets = {
        name: recorded_scenarios(options.recordings, kind=name, cache=cache) for name in names
    }
    # What is best on windows is not best in real training: the last of each training is judged.
    updates = 4 if options.quick else options.updates
    training = Training(updates=updates, windows=6, rate=0.004, validate_every=updates)
    agents = {
        sort: trained(fleets, sort, options.out, training, 1 if options.quick else n)
        for sort, (n, _) in SORTS.items()
    }
    rows: list[Row] = []
    if options.ship:
        found, rows = best(agents["agent"], options.recordings, Kept(options.out / "runs.jsonl"))
        save(load(found), embedded())
    some = {sort: list(of.values()) for sort, of in agents.items()}
    tasks = [(name, partial(tables_of, name, fleets[name], some, windows)) for name in fleets]
    by_fleet = dict(played(tasks, 1 if options.quick else n_cores()))
    rows += [row for name in names for row in by_fleet[name]]
    command = "OMP_NUM_THREADS=1 python benchmarks/agent/windows.py RECORDINGS --out FOLDER"
    print(write_result("agent_windows", rows, command=command, quick=options.quick))


if __name__ == "__main__":
    main()
