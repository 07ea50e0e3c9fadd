"""Does the agent that learnt on a proxy also make real training faster, and with less waste.

Thirty recorded phones train the built-in app `digits` for four hours under `TraceGrid`
(`selection_training`). Neither agent nor forecaster has seen a phone, a host, a link or an hour of
it, and the learning proxy was fitted to other phones and other deals. Every selector trains the
same windows: the same phones, hours, data, first model and schedule. Targets were set beforehand,
about where random selection ends in results/selection_proxy.json.

"wait" is FedAvg with over-selection, the first 6 of 8; "late" is FedBuff, 8 out and merges of 4.

Run it with: python benchmarks/agent_training.py RECORDINGS [--quick] [--late]
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from recorded_scenarios import recorded_scenarios
from results_file import write_result
from selection_training import HOURS_S, Trained, Window, train, training_kind
from threadpoolctl import threadpool_limits

from fedstale.agents import AgentSelector
from fedstale.agents.env.forecast_table import ForecastTable
from fedstale.agents.env.scenario import Scenario
from fedstale.comparison.statistics import estimate
from fedstale.simulation.flower_app import FlowerApp
from fedstale.strategies import FedBuff, StaleStrategy
from fedstale.strategies.schedule import k_sync
from fedstale.strategies.selection import (
    RELEASED,
    ExpectedUtility,
    Fastest,
    LeastAvailable,
    MostReliable,
    Oort,
    PowerOfChoice,
    Random,
    Selector,
)
from fedstale.strategies.server.validation import Validation
from fedstale.traces.forecast import embedded

TARGETS = {0.1: 0.6, 0.3: 0.75, 1.0: 0.8}
"""Accuracy to reach by the skew of the data (concentration of the Dirichlet distribution)."""
SEEDS = range(301, 306)
SKEWS = {"wait": tuple(TARGETS), "late": (0.3,)}
MINUTE_S, SMOOTHED = 60.0, 10
"""Accuracy is read every minute and averaged over the last ten readings."""
AGENT, SEEDED = "agent", "agent, training seeds in turn"
SELECTORS: dict[str, Callable[[], Selector]] = {
    "p_finish x utility": ExpectedUtility,
    "p_finish": MostReliable,
    "random": Random,
    "FedCS": Fastest,
    "Oort, paper's constants": Oort,
    "Oort, released constants": lambda: Oort(RELEASED),
    "REFL IPS": LeastAvailable,
    "power of choice": lambda: PowerOfChoice(16),
    AGENT: AgentSelector,
}
LATE = (AGENT, "p_finish x utility", "p_finish", "random", "Oort, paper's constants", "REFL IPS")
"""Who trains with the schedule "late" too."""
Row = dict[str, Any]


def wait(window: Window, selector: Selector) -> StaleStrategy:
    """Return FedAvg that goes on with the first replies; every example counts."""
    schedule = k_sync(window.concurrency, window.buffer_size)
    validation = Validation(examples_cap=None)
    return StaleStrategy(
        selector=selector, schedule=schedule, validation=validation, seed=window.seed
    )


def late(window: Window, selector: Selector) -> StaleStrategy:
    """Return FedBuff, which merges late replies too."""
    validation = Validation(examples_cap=None)
    return FedBuff(
        window.concurrency, 4, selector=selector, validation=validation, seed=window.seed
    )


MODES = {"wait": wait, "late": late}


def outcome(trained: Trained, target: float) -> Row:
    """Return what a run reached, when, and what devices spent on it."""
    at = np.array(trained.at)
    looks = np.arange(0.0, HOURS_S + 1.0, MINUTE_S)
    read = np.array(trained.accuracy)[np.searchsorted(at, looks, side="right") - 1]
    sums = np.cumsum(np.concatenate([np.zeros(SMOOTHED), read]))
    count = np.minimum(np.arange(read.size) + 1, SMOOTHED)
    smooth = (sums[SMOOTHED:] - sums[: read.size]) / count
    reached = np.flatnonzero(smooth >= target)
    when = float(looks[reached[0]]) if reached.size else HOURS_S
    spent = np.append(trained.spent_s, trained.total_s)
    to_target = float(np.interp(when, np.append(at, HOURS_S), spent))
    lost_at, lost_s = trained.lost
    return {
        "reached": bool(reached.size),
        "hours": when / 3600.0,
        "device_hours": to_target / 3600.0,
        "wasted_hours": float(lost_s[lost_at <= when].sum()) / 3600.0,
        "waste_share": float(lost_s.sum() / trained.total_s),
        "valid_ratio": trained.valid_ratio,
        "accuracy": float(smooth[-smooth.size // 10 :].mean()),
        "versions": len(at) - 1,
    }


def means(runs: list[Row]) -> Row:
    """Return means over the windows of one selector."""
    names = ("hours", "device_hours", "wasted_hours", "waste_share", "valid_ratio", "accuracy")
    return {
        "windows": len(runs),
        "reached": sum(run["reached"] for run in runs),
        **{name: round(float(np.mean([run[name] for run in runs])), 4) for name in names},
    }


def ratios(own: list[Row], other: list[Row], what: str) -> list[float] | None:
    """Return by how much more another selector needs than the agent, with its 95 % interval.

    Ratios are taken within windows and averaged over the deals of the same phones and hours. A run
    that never arrives counts with all of its hours; windows where neither arrives are left out.
    Intervals are Student's, of the mean logarithm.
    """
    logs: dict[int, list[float]] = {}
    for one, two in zip(own, other, strict=True):
        if one["reached"] or two["reached"]:
            # Waste may be none at all.
            more = np.log((two[what] + 0.01) / (one[what] + 0.01))
            logs.setdefault(one["seed"], []).append(float(more))
    return spread_of([float(np.mean(each)) for each in logs.values()], np.exp)


def differences(own: list[Row], other: list[Row], what: str) -> list[float] | None:
    """Return by how much the agent is ahead, with its 95 % interval."""
    found: dict[int, list[float]] = {}
    for one, two in zip(own, other, strict=True):
        found.setdefault(one["seed"], []).append(one[what] - two[what])
    return spread_of([float(np.mean(each)) for each in found.values()], np.asarray)


def spread_of(
    values: list[float], scale: Callable[[NDArray[np.float64]], NDArray[np.float64]]
) -> list[float] | None:
    """Return the mean with its 95 % interval, on another scale; None of fewer than two values."""
    if len(values) < 2:
        return None
    found = estimate(values)
    return [round(float(x), 3) for x in scale(np.array([found.mean, found.low, found.high]))]


def tables(runs: list[Row]) -> list[Row]:
    """Return a row for each schedule, skew and selector, and one over all skews."""
    rows = []
    for mode in MODES:
        of_mode = [run for run in runs if run["schedule"] == mode]
        for alpha in (*SKEWS[mode], "all"):
            some = [run for run in of_mode if alpha in {"all", run["alpha"]}]
            by_name: dict[str, list[Row]] = {}
            for run in sorted(some, key=lambda run: (run["alpha"], run["seed"])):
                by_name.setdefault(run["selector"], []).append(run)
            agent = by_name.get(AGENT, [])
            for name, own in by_name.items():
                row = {"schedule": mode, "alpha": alpha, "selector": name, **means(own)}
                if name != AGENT and len(own) == len(agent):
                    for what in ("hours", "device_hours", "wasted_hours"):
                        row[f"{what}_ratio"] = ratios(agent, own, what)
                    for what in ("accuracy", "waste_share", "valid_ratio"):
                        row[f"{what}_ahead"] = differences(agent, own, what)
                rows.append(row)
    return rows


def scenario_of(recordings: Path, cache: Path | None) -> tuple[Scenario, ForecastTable]:
    """Return the phones and hours that no model has learnt from, and what these phones forecast."""
    test = recorded_scenarios(recordings, forecasts="none").testing
    kinds = training_kind(test)
    hours = {"start": test.start, "end": test.end}
    scenario = Scenario.of(test.traces, forecasts="none", kinds=kinds, **hours)
    parts = [(scenario.devices, embedded())]
    said = ForecastTable.of(scenario.traces, kinds, parts, cache=cache, **hours)
    return scenario, said


def run_all(  # noqa: PLR0917 - one benchmark's parts
    task: ModuleType,
    scenario: Scenario,
    said: ForecastTable,
    wanted: list[tuple[str, int, float, str, Callable[[], Selector]]],
    done: list[Row],
    keep: Path | None,
) -> list[Row]:
    """Return the runs that are wanted, those that are done taken as they are."""
    kept = {(r["schedule"], r["seed"], r["alpha"], r["selector"]): r for r in done}
    runs = []
    for mode, seed, alpha, name, make in wanted:
        key = (mode, seed, alpha, name)
        if key not in kept:
            window = Window.drawn(scenario, task, alpha, seed)
            found = outcome(train(window, make(), said, MODES[mode]), TARGETS[alpha])
            row = {"schedule": mode, "seed": seed, "alpha": alpha, "selector": name, **found}
            kept[key] = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
            print(kept[key], flush=True)
            if keep is not None:
                with keep.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(kept[key]) + "\n")
        runs.append(kept[key])
    return runs


def main() -> None:
    """Train, compare, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--quick", action="store_true", help="two windows, one skew, one schedule")
    parser.add_argument("--keep", type=Path, help="file of runs; those in it are not run again")
    parser.add_argument("--cache", type=Path, help="file to keep forecasts in")
    parser.add_argument("--agents", type=Path, help="folder of several training seeds")
    parser.add_argument("--only", nargs="+", help="schedules and selectors to run; not written")
    parser.add_argument("--late", action="store_true", help='both schedules, not only "wait"')
    parser.add_argument("--seeds", type=int, nargs="+", help="windows, instead of all")
    options = parser.parse_args()
    selectors = dict(SELECTORS)
    folders = sorted(options.agents.glob("seed-*")) if options.agents else []
    if folders:
        selectors[SEEDED] = AgentSelector
    only = set(options.only or ())

    def made(name: str, seed: int) -> Callable[[], Selector]:
        if name == SEEDED:
            return lambda: AgentSelector(folders[seed % len(folders)])
        return selectors[name]

    wanted = [
        (mode, seed, alpha, name, made(name, seed))
        for mode in (MODES if options.late else ("wait",))
        for seed in (options.seeds or SEEDS)[: 2 if options.quick else None]
        for alpha in (SKEWS[mode] if not options.quick else (0.3,))
        for name in selectors
        if mode == "wait" or name in LATE
        if not only or (mode in only and name in only)
    ]
    scenario, said = scenario_of(options.recordings, options.cache)
    done = []
    if options.keep is not None and options.keep.exists():
        done = [json.loads(line) for line in options.keep.read_text().splitlines()]
    app = FlowerApp.find("digits")
    with app.importable(), threadpool_limits(1):
        app.load_client()
        from digits_app import task  # only now, while the app is open

        runs = run_all(task, scenario, said, wanted, done, options.keep)
    rows = tables(runs)
    for row in rows:
        print(row, flush=True)
    if not only:
        name = "agent_training-quick" if options.quick else "agent_training"
        command = "python benchmarks/agent_training.py RECORDINGS" + " --quick" * options.quick
        command += " --late" * options.late + " --agents trained" * bool(folders)
        print(write_result(name, [*rows, *runs], command=command))


if __name__ == "__main__":
    main()
