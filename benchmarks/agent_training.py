"""Does the agent that learnt on a proxy also make real training faster, and with less waste.

Recorded devices train the built-in apps for four hours under `TraceGrid` (`selection_training`,
`training_apps`). A setting is an app, a fleet, a schedule and a skew of the data; it is played in
five windows, each of another day of the log. No model has seen a device, a host, a link or an hour
of them, and the learning proxy was fitted to other phones and other deals. Every selector trains
the same windows: the same devices, hours, data, first model and schedule.

Parts are run one by one into the same file, and the result is written from all runs in it:

    python benchmarks/agent_training.py RECORDINGS --keep RUNS --cache FOLDER --jobs 2 --only digits
    python benchmarks/agent_training.py RECORDINGS --targets     # prints TARGETS
"""

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from lin_ucb import LinUCB
from recorded_fleets import ASSUMED, fleets, span
from results_file import write_result
from selection_training import (
    HOURS_S,
    NO_LIE,
    Liars,
    Lie,
    Trained,
    Window,
    appearing,
    train,
    training_kinds,
)
from threadpoolctl import threadpool_limits
from training_apps import APPS, opened
from training_tables import AGENT, Row, tables

from fedstale.agents import AgentSelector
from fedstale.agents.env.forecast_table import Forecasts, ForecastTable, NoForecasts
from fedstale.agents.evaluation import gini as gini_of_rows
from fedstale.agents.policy.scorer import embedded as embedded_agent
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
from fedstale.traces import TraceSet
from fedstale.traces.arrays import DAY_S, Array
from fedstale.traces.forecast import embedded


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPart:
    """How windows of a fleet are drawn."""

    least: int
    """Devices that appear in a window at least; all that do are in it."""
    history_s: float
    """For how long each of them was logged before."""
    concurrency: int
    """Jobs in flight, a third of the devices that are online in the mean: with as many jobs as
    devices there is no choice."""


FLEETS = {
    "phones": FleetPart(least=30, history_s=DAY_S / 2, concurrency=4),
    "desktops": FleetPart(least=30, history_s=DAY_S, concurrency=8),
    "cars": FleetPart(least=20, history_s=DAY_S, concurrency=4),
}
"""Half of the phones were logged for five days, and 30 cars never appear in the same hours."""
SKEWS: dict[str, tuple[float | None, ...]] = {
    "digits": (0.1, 0.3, 1.0),
    "fashion": (0.1, 0.3, 1.0),
    "shakespeare": (None,),
}
"""Concentrations of the Dirichlet distribution; roles of a play are dealt as they are."""
SEEDS, TARGET_SEEDS = range(301, 306), range(311, 314)
MINUTE_S, SMOOTHED = 60.0, 10
"""Accuracy is read every minute and averaged over the last ten readings."""
LYING = 0.3
"""Share of the devices that lie, in the setting `LIED_TO`."""
LIED_TO = ("digits", "phones", "fedavg", 0.3)
LIES = {"": NO_LIE, "loss": Lie(loss=10.0), "chance": Lie(chance=1.0)}
"""What devices lie about; nothing at first."""
TARGETS: dict[tuple[str, str, str], tuple[float, ...]] = {
    ("digits", "phones", "fedavg"): (0.73, 0.79, 0.83),
    ("digits", "phones", "fedbuff"): (0.78, 0.81, 0.83),
    ("digits", "desktops", "fedavg"): (0.81, 0.84, 0.86),
    ("digits", "desktops", "fedbuff"): (0.84, 0.85, 0.86),
    ("digits", "cars", "fedavg"): (0.77, 0.84, 0.86),
    ("digits", "cars", "fedbuff"): (0.81, 0.85, 0.86),
    ("fashion", "phones", "fedavg"): (0.49, 0.63, 0.66),
    ("fashion", "phones", "fedbuff"): (0.56, 0.63, 0.67),
    ("fashion", "desktops", "fedavg"): (0.64, 0.67, 0.69),
    ("fashion", "desktops", "fedbuff"): (0.67, 0.69, 0.7),
    ("fashion", "cars", "fedavg"): (0.55, 0.65, 0.69),
    ("fashion", "cars", "fedbuff"): (0.61, 0.68, 0.69),
    ("shakespeare", "phones", "fedavg"): (0.24,),
    ("shakespeare", "phones", "fedbuff"): (0.26,),
    ("shakespeare", "desktops", "fedavg"): (0.28,),
    ("shakespeare", "desktops", "fedbuff"): (0.3,),
    ("shakespeare", "cars", "fedavg"): (0.26,),
    ("shakespeare", "cars", "fedbuff"): (0.26,),
}
"""Accuracy to reach, by the skews of a setting.

The rule was set before any comparison: 0.9 times what `Random` reaches at the end of the hours, in
the mean over three windows of other devices (the part "learn" of the fleet), rounded to 0.01.
Printed by `--targets`.
"""
FAIR = f"{AGENT}, fairness 0.25"
SELECTORS: dict[str, Callable[[], Selector]] = {
    AGENT: AgentSelector,
    FAIR: lambda: AgentSelector(fairness=0.25),
    "p_finish": MostReliable,
    "p_finish x utility": ExpectedUtility,
    "random": Random,
    "FedCS": Fastest,
    "Oort, paper's constants": Oort,
    "Oort, released constants": lambda: Oort(RELEASED),
    "REFL IPS": LeastAvailable,
    "power of choice": lambda: PowerOfChoice(8),
    "LinUCB": LinUCB,
}
FEWER = (
    *(AGENT, "p_finish", "p_finish x utility", "random"),
    *("Oort, paper's constants", "REFL IPS", "LinUCB"),
)
"""Who trains the larger apps, and among liars."""


def fedavg(selector: Selector, seed: int, *, concurrency: int) -> StaleStrategy:
    """Return FedAvg that goes on with the first three quarters; every example counts."""
    schedule = k_sync(concurrency, 3 * concurrency // 4)
    return StaleStrategy(selector=selector, schedule=schedule, seed=seed)


def fedbuff(selector: Selector, seed: int, *, concurrency: int) -> StaleStrategy:
    """Return FedBuff, which merges stale replies too, half of those in flight at a time."""
    size = concurrency // 2
    return FedBuff(concurrency, size, selector=selector, seed=seed)


SCHEDULES = {"fedavg": fedavg, "fedbuff": fedbuff}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the comparison; two runs with equal fields are the same."""

    app: str
    fleet: str
    schedule: str
    alpha: float | None
    lies: str
    seed: int
    selector: str
    agent: str
    """Which agent picks: a hash of its files; empty where none does."""


def wanted(only: Iterable[str] = (), *, quick: bool = False) -> list[Run]:
    """Return the runs of the comparison, or those that `only` names.

    Args:
        only: names of apps, fleets, schedules, selectors and lies ("honest", "loss", "chance"); a
            run is one of them if, of each sort that is named at all, its own is.
        quick: two windows of one setting.

    Raises:
        ValueError: a name is unknown.
    """
    sorts = {
        "app": list(APPS),
        "fleet": list(FLEETS),
        "schedule": list(SCHEDULES),
        "selector": list(SELECTORS),
        "lies": ["honest", *list(LIES)[1:]],
    }
    known = {name for names in sorts.values() for name in names}
    if unknown := set(only) - known:
        raise ValueError(f"only = {sorted(unknown)}: expected some of {sorted(known)}")
    allowed = {sort: set(only) & set(names) or set(names) for sort, names in sorts.items()}
    digest = _agent_digest()
    return [
        Run(
            app=app,
            fleet=fleet,
            schedule=schedule,
            alpha=alpha,
            lies=lies,
            seed=seed,
            selector=selector,
            agent=digest if selector in {AGENT, FAIR} else "",
        )
        for app in APPS
        for fleet in FLEETS
        for schedule in SCHEDULES
        for alpha in SKEWS[app]
        for lies in LIES
        for seed in (SEEDS[:2] if quick else SEEDS)
        for selector in SELECTORS
        if not lies or (app, fleet, schedule, alpha) == LIED_TO
        if selector in FEWER or (app == "digits" and not lies)
        if {app, fleet, schedule, selector, lies or "honest"} <= set().union(*allowed.values())
        if not quick or ((app, fleet, schedule, alpha) == LIED_TO and not lies)
    ]


def _agent_digest() -> str:
    folder = Path(embedded_agent())
    files = sorted(folder.glob("agent.*")) if folder.is_dir() else [folder]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def windows(traces: TraceSet, fleet: str, seeds: Sequence[int]) -> list[Window]:
    """Return a window for each seed, each of another day of the log.

    Raises:
        ValueError: there are too few days on which enough devices appear.
    """
    part = FLEETS[fleet]
    rng = np.random.default_rng((seeds[0], list(FLEETS).index(fleet), 61))
    end, everyone = span(traces), np.arange(traces.n_devices)
    work = float(training_kinds(traces, (1,)).work[0])
    found: list[Window] = []
    for day in rng.permutation(int(end / DAY_S)):
        for start in DAY_S * (day + rng.random(50)):
            there = appearing(traces, everyone, start, part.history_s)
            if start + HOURS_S <= end and there.size >= part.least:
                devices = rng.permutation(there)
                seed = seeds[len(found)]
                found.append(Window.of(traces, devices, float(start), seed, work=work))
                break
        if len(found) == len(seeds):
            return found
    raise ValueError(
        f"{len(found)} days of {fleet} on which {part.least} devices appear within {HOURS_S:g} s: "
        f"expected {len(seeds)}"
    )


def told(traces: TraceSet, fleet: str, window: Window, cache: Path | None) -> ForecastTable:
    """Return what the devices of a window forecast of the jobs of all apps, in their order."""
    kinds = training_kinds(traces, [app.model_bytes for app in APPS.values()])
    file = None if cache is None else cache / f"{fleet}-{window.seed}.npz"
    return ForecastTable.of(
        traces,
        kinds,
        [(np.sort(window.devices), embedded(fleet))],
        start=window.start,
        end=window.start + HOURS_S,
        cache=file,
    )


def played(run: Run, window: Window, forecasts: Forecasts, target: float) -> tuple[Row, float]:
    """Return what a run reached, as it is kept, and the CPU seconds that it took here."""
    began, concurrency = time.process_time(), FLEETS[run.fleet].concurrency
    with threadpool_limits(1):
        trained = train(
            window,
            opened(run.app),
            run.alpha,
            SELECTORS[run.selector](),
            forecasts=forecasts,
            strategy=partial(SCHEDULES[run.schedule], concurrency=concurrency),
            kind=list(APPS).index(run.app),
            liars=Liars.of(LIES[run.lies], window.n_devices, LYING, window.seed),
        )
    found = {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in outcome(trained, target, window.n_devices).items()
    }
    return {**asdict(run), "start_h": round(window.start / 3600.0, 2), "target": target} | found, (
        time.process_time() - began
    )


def outcome(trained: Trained, target: float, n_devices: int) -> Row:
    """Return what a run reached, when, and what devices spent on it."""
    smooth, looks = smoothed(trained)
    reached = np.flatnonzero(smooth >= target)
    when = float(looks[reached[0]]) if reached.size else HOURS_S
    total = trained.spent_by(HOURS_S)
    jobs = np.bincount(trained.devices, minlength=n_devices)
    return {
        "reached": bool(reached.size),
        "hours": when / 3600.0,
        "device_hours": trained.spent_by(when) / 3600.0,
        "wasted_hours": trained.wasted_by(when) / 3600.0,
        "waste_share": trained.wasted_by(HOURS_S) / total if total else 0.0,
        "valid_ratio": trained.valid_ratio,
        "accuracy": final(smooth),
        "gini": gini(jobs),
        "ever_merged": float(np.unique(trained.devices[trained.used]).size / n_devices),
        "devices": n_devices,
        "versions": len(trained.merged),
        "jobs": int(jobs.sum()),
    }


def smoothed(trained: Trained) -> tuple[Array, Array]:
    """Return the accuracy, averaged over the last ten minutes, and the instants of it in s."""
    looks = np.arange(0.0, HOURS_S + 1.0, MINUTE_S)
    read = np.array(trained.accuracy)[np.searchsorted(trained.at, looks, side="right") - 1]
    sums = np.cumsum(np.concatenate([np.zeros(SMOOTHED), read]))
    count = np.minimum(np.arange(read.size) + 1, SMOOTHED)
    return (sums[SMOOTHED:] - sums[: read.size]) / count, looks


def final(smooth: Array) -> float:
    """Return the mean accuracy of the last tenth of the hours."""
    return float(smooth[-(smooth.size // 10) :].mean())


def gini(counts: Array) -> float:
    """Return Gini's coefficient of some counts: 0 if all are equal, and of no jobs.

    Example:
        >>> gini(np.array([1, 1])), gini(np.array([0, 2]))
        (0.0, 0.5)
    """
    found = gini_of_rows(counts[None], np.ones((1, counts.size), dtype=bool))
    return float(np.nan_to_num(found[0]))


def read_kept(path: Path | None) -> dict[Run, Row]:
    """Return the runs in a file; a line that was cut off is left out."""
    kept = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path and path.exists() else []
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        kept[Run(**{name: row[name] for name in Run.__slots__})] = row
    return kept


def compare(
    runs: Sequence[Run],
    fleet_of: Callable[[str], TraceSet],
    *,
    keep: Path | None,
    cache: Path | None,
    jobs: int,
) -> dict[Run, Row]:
    """Play the runs that are not kept yet, and return those and all that were kept.

    Args:
        runs: that are wanted.
        fleet_of: returns a fleet by its name.
        keep: file of JSON lines that runs are added to.
        cache: folder to keep forecasts in.
        jobs: processes.
    """
    kept = read_kept(keep)
    missing = [run for run in runs if run not in kept]
    for run, (row, seconds) in _each(_tasks(missing, fleet_of, cache), jobs):
        kept[run] = row
        print(f"{seconds:5.1f} s  {json.dumps(row)}", flush=True)
        if keep is not None:
            # A line that was cut off stays alone.
            is_cut = keep.exists() and not keep.read_bytes().endswith(b"\n")
            with keep.open("a", encoding="utf-8") as file:
                file.write("\n" * is_cut + json.dumps(row) + "\n")
    return kept


Task = tuple[Run, Window, Forecasts, float]


def _tasks(
    runs: Sequence[Run], fleet_of: Callable[[str], TraceSet], cache: Path | None
) -> Iterator[Task]:
    for fleet in dict.fromkeys(run.fleet for run in runs):
        traces = fleet_of(fleet)
        drawn = {window.seed: window for window in windows(traces, fleet, SEEDS)}
        tables = {seed: told(traces, fleet, window, cache) for seed, window in drawn.items()}
        for run in runs:
            if run.fleet == fleet:
                if (run.app, fleet, run.schedule) not in TARGETS:
                    raise ValueError(
                        f"{run.app}, {fleet}, {run.schedule}: no targets: run --targets"
                    )
                skew = SKEWS[run.app].index(run.alpha)
                target = TARGETS[run.app, fleet, run.schedule][skew]
                yield run, drawn[run.seed], tables[run.seed], target


def _each(tasks: Iterable[Task], jobs: int) -> Iterator[tuple[Run, tuple[Row, float]]]:
    """Yield the outcomes of tasks, in the order in which they end."""
    if jobs == 1:
        for task in tasks:
            yield task[0], played(*task)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(played, *task): task[0] for task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()


def targets(
    fleet_of: Callable[[str], TraceSet], only: Iterable[str], jobs: int
) -> dict[tuple[str, str, str], list[float]]:
    """Return the targets of the settings, by the rule of `TARGETS`.

    Args:
        fleet_of: returns the part "learn" of a fleet by its name.
        only: as for `wanted`.
        jobs: processes.
    """
    runs = [run for run in wanted(only) if run.selector == "random" and not run.lies]
    settings = dict.fromkeys((run.fleet, run.app, run.schedule, run.alpha) for run in runs)
    tasks: list[Task] = []
    for fleet in dict.fromkeys(setting[0] for setting in settings):
        for window in windows(fleet_of(fleet), fleet, TARGET_SEEDS):
            for place, app, schedule, alpha in settings:
                if place == fleet:
                    case = {"app": app, "fleet": fleet, "schedule": schedule, "alpha": alpha}
                    run = Run(**case, lies="", seed=window.seed, selector="random", agent="")
                    tasks.append((run, window, NoForecasts(), 1.0))
    found: dict[tuple[str, str, str, float | None], list[float]] = {}
    for run, (row, seconds) in _each(tasks, jobs):
        print(f"{seconds:5.1f} s  {json.dumps(row)}", flush=True)
        found.setdefault((run.app, run.fleet, run.schedule, run.alpha), []).append(row["accuracy"])
    return {
        (app, fleet, schedule): [
            round(0.9 * float(np.mean(found[app, fleet, schedule, alpha])), 2)
            for alpha in SKEWS[app]
        ]
        for app, fleet, schedule in dict.fromkeys(key[:3] for key in sorted(found, key=str))
    }


def main() -> None:
    """Train, compare, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--quick", action="store_true", help="two windows of one setting")
    parser.add_argument("--keep", type=Path, help="file of runs; those in it are not run again")
    parser.add_argument("--cache", type=Path, help="folder to keep forecasts in")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", nargs="+", default=(), help="apps, fleets, schedules, selectors")
    parser.add_argument("--targets", action="store_true", help="print the targets, compare nothing")
    options = parser.parse_args()

    def fleet_of(kind: str, part: str = "test") -> TraceSet:
        return fleets(options.recordings, seed=0, kind=kind, assumed=ASSUMED)[part]

    if options.targets:
        for setting, values in targets(
            lambda kind: fleet_of(kind, "learn"), options.only, options.jobs
        ).items():
            print(f"    {setting}: {tuple(values)},")
        return
    runs = wanted(options.only, quick=options.quick)
    kept = compare(runs, fleet_of, keep=options.keep, cache=options.cache, jobs=options.jobs)
    current = [row for run, row in kept.items() if run.agent in {"", _agent_digest()}]
    rows = tables(current)
    for row in rows:
        print(row, flush=True)
    name = "agent_training-quick" if options.quick else "agent_training"
    command = "python benchmarks/agent_training.py RECORDINGS --keep RUNS"
    order = {run: place for place, run in enumerate(wanted())}
    played_runs = sorted(current, key=lambda row: order.get(_run_of(row), len(order)))
    print(write_result(name, [*rows, *played_runs], command=command + " --quick" * options.quick))


def _run_of(row: Row) -> Run:
    return Run(**{name: row[name] for name in Run.__slots__})


if __name__ == "__main__":
    main()
