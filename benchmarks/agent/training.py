"""Does the agent that learnt on a proxy also make real training faster, and with less waste.

Recorded devices train the built-in apps for some hours under `TraceGrid` (`lab.training`,
`lab.apps`). A setting is a regime, an app, a fleet, a schedule and a skew of the data; it is played
in some windows, each of another day of the log. No model has seen a device, a host, a link or an
hour of them, and the learning proxy was fitted to other phones and other deals. Every selector
trains the same windows: the same devices, hours, data, first model and schedule; with forecasts,
and without them where a selector uses any.

What to reach follows from runs of random selection on other devices, which are part of the
comparison. A run is kept with its accuracy and what devices had spent at every minute, so that it
is judged at each target without training again.

Runs that are kept are not played again, and the result is written from all that are there, so that
parts can be played one by one into the same file, and more windows added:

    python benchmarks/agent/training.py RECORDINGS --keep RUNS --jobs 2 --only choice phones
"""

import argparse
import csv
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, lru_cache, partial
from itertools import product
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from fedstale.agents import AgentSelector, load
from fedstale.agents.policy import digest
from fedstale.agents.policy.scorer import embedded as embedded_agent
from fedstale.contrib.selectors import PISCES, TiFL
from fedstale.strategies.selection import (
    BALANCED,
    RELEASED,
    Enough,
    ExpectedUtility,
    Exponents,
    Fastest,
    LeastAvailable,
    LeastRecent,
    MostReliable,
    Oort,
    PowerOfChoice,
    Random,
    Selector,
)
from fedstale.traces import TraceSet
from fedstale.traces.forecast import embedded

sys.path.append(str(Path(__file__).parents[1]))
from agent.flash_rl import FlashRL
from agent.lin_ucb import LinUCB
from agent.ratios import AGENT, AT_TARGET, RANDOM, RULE, Row, judge, tables
from lab.apps import APPS, opened
from lab.fleets import ASSUMED, fleets
from lab.kept import Kept, play_missing
from lab.results import RESULTS, write_result
from lab.training import (
    FLEETS,
    NO_LIE,
    REGIMES,
    SCHEDULES,
    Liars,
    Lie,
    OwnForecasts,
    Trained,
    Window,
    WindowForecasts,
    curves,
    outcome,
    own_jobs,
    train,
    windows,
)

SKEWS: dict[str, tuple[float | None, ...]] = {
    "digits": (0.1, 0.3, 1.0),
    "fashion": (0.3,),
    "shakespeare": (None,),
}
"""Concentrations of the Dirichlet distribution; roles of a play are dealt as they are."""
SEEDS, LEARN_SEEDS = range(301, 306), range(401, 406)
"""Of the windows, if no more are asked for; and of those that say what to reach."""
PLAYED = ("published", "choice", "long", "longest")
"""Regimes of the comparison."""
SMALL_APP, MAIN_FLEET = "digits", "phones"
"""Train in all regimes, with all selectors, and without forecasts."""
LYING = 0.3
"""Share of the devices that lie, in the settings `LIED_TO`."""
LIED_TO = [(regime, "digits", "phones", "fedavg", 0.3) for regime in ("published", "choice")]
LIES = {
    "": NO_LIE,
    "loss": Lie(loss=10.0),
    "chance": Lie(chance=1.0),
    "duration": Lie(duration=1.0 / 3.0),
}
"""What devices lie about; nothing at first."""
FORECASTS = {"with-forecasts": True, "without-forecasts": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A selector of the comparison, and where it plays."""

    make: Callable[[], Selector]
    """Returns a new one."""
    without: bool = False
    """Whether it plays without forecasts, too; a rule that uses none would play the same again."""
    everywhere: bool = False
    """Whether it also plays on other fleets, larger apps, the longest jobs, and among liars."""


UNTUNED = Exponents(chance=3.0, utility=0.5, duration=1.0, picked=1.0, temperature=0.25)
"""As the balanced rule was first written down."""
FAIR = f"{AGENT}, fairness 0.25"
SELECTORS: dict[str, Arm] = {
    AGENT: Arm(make=AgentSelector, without=True, everywhere=True),
    FAIR: Arm(make=lambda: AgentSelector(fairness=0.25)),
    "p_finish": Arm(make=MostReliable, without=True, everywhere=True),
    "p_finish x utility": Arm(make=ExpectedUtility, without=True, everywhere=True),
    RULE: Arm(make=lambda: ExpectedUtility(BALANCED), without=True, everywhere=True),
    "balanced, enough": Arm(make=lambda: Enough(ExpectedUtility(BALANCED)), everywhere=True),
    "balanced, untuned": Arm(make=lambda: ExpectedUtility(UNTUNED), without=True, everywhere=True),
    RANDOM: Arm(make=Random, everywhere=True),
    "least recent": Arm(make=LeastRecent),
    "FedCS": Arm(make=Fastest),
    "Oort, paper's constants": Arm(make=Oort, everywhere=True),
    "Oort, released constants": Arm(make=lambda: Oort(RELEASED)),
    "REFL IPS": Arm(make=LeastAvailable, everywhere=True),
    "Pisces": Arm(make=lambda: ExpectedUtility(PISCES)),
    "TiFL": Arm(make=TiFL),
    "power of choice": Arm(make=lambda: PowerOfChoice(8)),
    "LinUCB": Arm(make=LinUCB, without=True, everywhere=True),
    "FLASH-RL": Arm(make=FlashRL),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the comparison; two runs with equal fields are the same."""

    part: str
    """Of the fleet: "test", or "learn" for those that say what to reach."""
    regime: str
    app: str
    fleet: str
    schedule: str
    alpha: float | None
    lies: str
    forecasts: bool
    seed: int
    selector: str
    agent: str
    """Which agent picks: a hash of its weights; empty where none does."""


def wanted(
    only: Iterable[str] = (), *, n_windows: int = len(SEEDS), quick: bool = False
) -> list[Run]:
    """Return the runs of the comparison, or those that `only` names; then those that say targets.

    Args:
        only: names of regimes, apps, fleets, schedules, selectors, lies ("honest", "loss",
            "chance", "duration") and `FORECASTS`; a run is one of them if, of each sort that is
            named at all, its own is.
        n_windows: of each setting, >= 1.
        quick: two windows of two settings, and three selectors.

    Raises:
        ValueError: a name is unknown.
    """
    sorts = {
        "regime": list(PLAYED),
        "app": list(APPS),
        "fleet": list(FLEETS),
        "schedule": list(SCHEDULES),
        "selector": list(SELECTORS),
        "lies": ["honest", *list(LIES)[1:]],
        "forecasts": list(FORECASTS),
    }
    known = {name for names in sorts.values() for name in names}
    if unknown := set(only) - known:
        raise ValueError(f"only = {sorted(unknown)}: expected some of {sorted(known)}")
    allowed = {sort: set(only) & set(names) or set(names) for sort, names in sorts.items()}
    seeds = [SEEDS[0] + i for i in range(2 if quick else n_windows)]
    found = [
        run
        for run in _all(seeds)
        if {run.regime, run.app, run.fleet, run.schedule, run.selector}
        <= set().union(*allowed.values())
        if (run.lies or "honest") in allowed["lies"]
        if run.forecasts in {FORECASTS[name] for name in allowed["forecasts"]}
        if not quick or (setting(run) in LIED_TO and not run.lies and run.selector in QUICK)
    ]
    learn = list(LEARN_SEEDS)[: 2 if quick else None]
    targets = [
        replace(run, part="learn", lies="", forecasts=True, seed=seed, selector=RANDOM, agent="")
        for run in dict.fromkeys(
            replace(r, seed=0, lies="", selector="", agent="", forecasts=True) for r in found
        )
        for seed in learn
    ]
    return [*found, *targets]


QUICK = (AGENT, RULE, RANDOM)


def _all(seeds: Sequence[int]) -> Iterable[Run]:
    """Yield every run of the comparison, but those that say what to reach."""
    own = agent_digest()
    everything = product(
        PLAYED, APPS, FLEETS, SCHEDULES, LIES, FORECASTS.values(), SELECTORS, seeds
    )
    for regime, app, fleet, schedule, lies, forecasts, selector, seed in everything:
        arm = SELECTORS[selector]
        for alpha in SKEWS[app]:
            run = Run(
                part="test",
                regime=regime,
                app=app,
                fleet=fleet,
                schedule=schedule,
                alpha=alpha,
                lies=lies,
                forecasts=forecasts,
                seed=seed,
                selector=selector,
                agent=own if selector in {AGENT, FAIR} else "",
            )
            main = (app, fleet) == (SMALL_APP, MAIN_FLEET)
            if (
                (arm.everywhere or (main and regime != "longest" and not lies))
                and (app == SMALL_APP or (fleet == MAIN_FLEET and regime == "published"))
                and (fleet == MAIN_FLEET or regime != "longest")
                and (not lies or setting(run) in LIED_TO)
                and (forecasts or (arm.without and main and not lies))
            ):
                yield run


def setting(run: Run) -> tuple[str, str, str, str, float | None]:
    """Return what has a target of its own."""
    return run.regime, run.app, run.fleet, run.schedule, run.alpha


@cache
def agent_digest() -> str:
    """Return which agent comes with fedstale: a hash of its weights."""
    return digest(load(embedded_agent()).weights)[:12]


@lru_cache(maxsize=2)
def recorded(recordings: Path, fleet: str, times: int) -> Mapping[str, TraceSet]:
    """Return a fleet by its parts; no part to learn from has more devices than that to test on."""
    parts = fleets(recordings, seed=0, kind=fleet, assumed=ASSUMED, times=times)
    test, learn = parts["test"], parts["learn"]
    if learn.n_devices > test.n_devices:
        rng = np.random.default_rng(79)
        learn = learn.take(np.sort(rng.permutation(learn.n_devices)[: test.n_devices]))
    return {"test": test, "learn": learn}


def _traces(recordings: Path, run: Run) -> TraceSet:
    times = REGIMES[run.regime].fleets[run.fleet].times
    return recorded(recordings, run.fleet, times)[run.part]


@lru_cache(maxsize=2)
def _windows(recordings: Path, of: Run, n: int) -> list[Window]:
    """Return the first n windows of the regime, fleet and part of a run."""
    first = _first_seed(of)
    return windows(_traces(recordings, of), of.fleet, range(first, first + n), REGIMES[of.regime])


@lru_cache(maxsize=2)
def _forecasts(recordings: Path, of: Run) -> WindowForecasts:
    """Return what the devices of a run's window will do, as they forecast it."""
    return WindowForecasts(_traces(recordings, of), embedded(of.fleet), _window(recordings, of))


def _window(recordings: Path, run: Run) -> Window:
    # Those of fewer windows are among those of more.
    place = run.seed - _first_seed(run)
    return _windows(recordings, replace(_anybody(run), seed=0), max(len(SEEDS), place + 1))[place]


def _first_seed(run: Run) -> int:
    return (SEEDS if run.part == "test" else LEARN_SEEDS)[0]


def _anybody(run: Run) -> Run:
    """Return what is the same for all runs in a window."""
    nothing = {"app": "", "schedule": "", "lies": "", "selector": "", "agent": ""}
    return replace(run, alpha=None, forecasts=True, **nothing)


def place(recordings: Path, run: Run) -> tuple[Window, OwnForecasts | None]:
    """Return where a run plays: its window, and what devices say of their own jobs there.

    Args:
        recordings: folder of the published files.
        run: to play.
    """
    window = _window(recordings, run)
    if not run.forecasts:
        return window, None
    jobs = own_jobs(window, opened(run.app), run.alpha, ttl_s=REGIMES[run.regime].ttl_s)
    return window, _forecasts(recordings, _anybody(run)).of(jobs)


def play(recordings: Path, run: Run) -> Row:
    """Return what a run reached at every minute and in the end, as it is kept, and print its cost.

    Args:
        recordings: folder of the published files.
        run: to play.
    """
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with threadpool_limits(1):
        window, forecasts = place(recordings, run)
        began = time.process_time()
        trained = trained_by(window, forecasts, run, SELECTORS[run.selector].make())
        took = time.process_time() - began
    found = {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in outcome(trained, window.n_devices).items()
    }
    row = {**asdict(run), "start_h": round(window.start / 3600.0, 2), **found}
    print(f"{took:5.1f} s  {json.dumps(row)}", flush=True)
    return {**row, "cpu_s": round(took, 2), "curves": curves(trained)}


def trained_by(
    window: Window, forecasts: OwnForecasts | None, run: Run, selector: Selector
) -> Trained:
    """Train where a run plays, with any selector.

    Args:
        window: of the run, by `place`.
        forecasts: of its devices, by `place`.
        run: to play; its own selector does not matter.
        selector: picks the devices.
    """
    regime = REGIMES[run.regime]
    return train(
        window,
        opened(run.app),
        run.alpha,
        selector,
        forecasts=forecasts,
        strategy=partial(SCHEDULES[run.schedule], concurrency=regime.fleets[run.fleet].concurrency),
        ttl_s=regime.ttl_s,
        liars=Liars.of(LIES[run.lies], window.n_devices, LYING, window.seed),
    )


def compare(recordings: Path, runs: Sequence[Run], *, kept: Kept, jobs: int) -> list[Row]:
    """Play the runs that are not kept yet, and return what came of all, in their order.

    Args:
        recordings: folder of the published files.
        runs: that are wanted.
        kept: runs that were played.
        jobs: processes.
    """
    missing = [run for run in runs if asdict(run) not in kept]
    for app in dict.fromkeys(run.app for run in missing):
        # Data that are not there are missed now, not in an hour.
        opened(app)
    # A process makes a fleet, its windows and their forecasts once, if their runs come together.
    missing.sort(key=lambda run: (run.fleet, run.regime, run.part, run.seed))
    play_missing(kept, ((asdict(run), partial(play, recordings, run)) for run in missing), jobs)
    return [kept[asdict(run)] for run in runs]


def costs(runs: Sequence[Run], kept: Kept) -> list[Row]:
    """Return for each regime and app how many runs are played, and how long one takes.

    Args:
        runs: that are wanted.
        kept: those that were played.

    Returns:
        Rows with `played` and `wanted` runs, and processor seconds `each`, None if none is played.
    """
    rows = []
    for regime, app in dict.fromkeys((run.regime, run.app) for run in runs):
        own = [asdict(run) for run in runs if (run.regime, run.app) == (regime, app)]
        took = [kept[run]["cpu_s"] for run in own if run in kept]
        each = round(float(np.mean(took)), 2) if took else None
        about = {"about": "costs", "regime": regime, "app": app}
        rows.append({**about, "played": len(took), "wanted": len(own), "each": each})
    return rows


def to_go(rows: Sequence[Row]) -> str:
    """Return how long what is missing takes, as text; without apps of which no run is played."""
    left_s = sum((row["wanted"] - row["played"]) * (row["each"] or 0.0) for row in rows)
    unknown = [f"{row['app']} in {row['regime']}" for row in rows if row["each"] is None]
    without = f", without {', '.join(unknown)}" if unknown else ""
    return f"{left_s / 3600.0:.2f} processor hours to go{without}"


def main() -> None:
    """Train, compare, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--quick", action="store_true", help="two windows, three selectors")
    parser.add_argument("--keep", type=Path, help="file of runs; those in it are not run again")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--windows", type=int, default=len(SEEDS), help="of each setting; 9 at most on phones"
    )
    parser.add_argument("--only", nargs="+", default=(), help="names of what to play; see `wanted`")
    parser.add_argument("--plan", action="store_true", help="say how long it takes; play nothing")
    options = parser.parse_args()

    everything = wanted(n_windows=options.windows, quick=options.quick)
    runs = wanted(options.only, n_windows=options.windows, quick=options.quick)
    kept = Kept(options.keep)
    if options.plan:
        planned = costs(runs, kept)
        print(*planned, to_go(planned), sep="\n")
        return
    compare(options.recordings, runs, kept=kept, jobs=options.jobs)
    found = [kept[asdict(run)] for run in everything if asdict(run) in kept]
    judged, played_so_far = judge(found), costs(everything, kept)
    rows = [*played_so_far, *tables(judged)]
    print(*played_so_far, to_go(played_so_far), sep="\n", flush=True)
    command = (
        f"python benchmarks/agent/training.py RECORDINGS --keep RUNS --windows {options.windows}"
    )
    if not judged:
        return
    path = write_result("agent_training", rows, command=command, quick=options.quick)
    print(path)
    write_runs(RESULTS / f"{path.stem}_runs.csv", judged)


def write_runs(path: Path, judged: Sequence[Row]) -> None:
    """Write every run, one a line, with what it needed to each of its targets.

    Args:
        path: of the CSV file.
        judged: runs, by `judge`.
    """
    names = [field.name for field in fields(Run) if field.name != "part"]
    lines: dict[tuple[object, ...], Row] = {}
    for row in judged:
        whole = {
            k: v for k, v in row.items() if k not in {"part", "cpu_s", "of_random", *AT_TARGET}
        }
        line = lines.setdefault(tuple(row[name] for name in names), whole)
        line |= {f"{name} at {row['of_random']}": row[name] for name in AT_TARGET}
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(next(iter(lines.values()))), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines.values())


if __name__ == "__main__":
    main()
