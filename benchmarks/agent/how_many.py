"""What whom to ask and how many to ask are worth, each by itself, in real training.

Recorded devices train `digits` under `TraceGrid`, as in `training.py`: the same windows, forecasts
and targets, which random selection reached on other devices. An arm is a selector and a schedule's
two numbers, jobs in flight and updates of a step; a pace decides them anew for each step, up to as
many jobs in flight as the setting has.

A run costs hours x price + device-hours, to its target. The price of an hour is in device-hours,
here as multiples of the jobs in flight at most: at 1 an hour of waiting is worth the hour of all
devices that the schedule would have at work. Ratios are taken as in `ratios.py`.

Run it with: python benchmarks/agent/how_many.py RECORDINGS --keep RUNS --jobs 2
"""

import argparse
import logging
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from fedstale.agents import AgentSelector
from fedstale.agents.policy.how_many import AgentPace
from fedstale.strategies import FedBuff, StaleStrategy
from fedstale.strategies.pace import Pace, Progress, Ramp
from fedstale.strategies.schedule import k_sync
from fedstale.strategies.selection import (
    BALANCED,
    RELEASED,
    Enough,
    ExpectedUtility,
    Oort,
    Random,
    Selector,
)

sys.path.append(str(Path(__file__).parents[1]))
from agent.flash_rl import FlashRL
from agent.ratios import RANDOM, SHARES, Row, pairs, ratio
from agent.training import LEARN_SEEDS, SEEDS, Run, place
from agent.whole_trainings import ramped
from lab.apps import opened
from lab.curves import final
from lab.kept import Kept, play_missing
from lab.results import read_result, write_result
from lab.training import FLEETS, NO_LIE, REGIMES, WIDE, Curves, Liars, curves, judged, train

PRICES = (0.25, 1.0, 4.0)
"""Of an hour in device-hours, over the jobs in flight at most."""
PLACES = {
    ("published", "digits"): (tuple(FLEETS), (0.1, 1.0)),
    ("choice", "digits"): (tuple(FLEETS), (0.1, 1.0)),
    ("long", "digits"): (tuple(FLEETS), (0.1, 1.0)),
    ("wide", "digits"): (tuple(WIDE), (0.3,)),
    ("published", "fashion"): (tuple(FLEETS), (0.3,)),
}
"""Fleets and skews of each regime and app."""
SCHEDULES = ("fedavg", "fedbuff")
"""Late jobs are cancelled, or kept; in the plain arms three quarters of those in flight make a step
of the first, and half of them one of the second."""
APART = "desktops"
"""A fleet on which no pace has learnt."""
REFERENCE, AGENT, TUNED = "rule", "agent", "rule, best pace"
REFERENCES = {REFERENCE: "", AGENT: "agent, agent's pace", TUNED: "agent"}
"""Arms that others are measured by, and how the names of these begin."""


def rule() -> Selector:
    """Return the rule that needs no training."""
    return Enough(ExpectedUtility(BALANCED))


class BestRule(Pace):
    """The rule of two numbers or a ramp that needed least at a price where paces are trained.

    `whole_trainings.ramped` says what a rule is; those of result "agent_pace" are taken.
    """

    reads_replies = False

    def __init__(self, hour_price: float) -> None:
        """Set the price of an hour, in device-hours."""
        self.hour_price = hour_price

    def numbers(self, at: Progress) -> tuple[int, int | None]:
        """Return jobs in flight by the version, and updates by the jobs in flight."""
        rule = np.array(best_rules()[self.hour_price / at.concurrency])
        jobs, updates = (int(n) for n in ramped(rule, at.concurrency, at.version))
        size = max(updates, at.least)
        return max(jobs, size) if at.after_step else jobs, size


@cache
def best_rules() -> Mapping[float, Sequence[float]]:
    """Return the best rule at each of `PRICES`."""
    found = read_result("agent_pace")["rows"]
    return {row["price"]: row["rule"] for row in found if row["about"] == "rule"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Who is picked, and how many."""

    selector: Callable[[], Selector] = rule
    """Returns a new one."""
    jobs: int | None = None
    """In flight at most; None for those of the setting."""
    each: bool = True
    """Whether each update makes a step; else as many as in the plain arms."""
    pace: Callable[[float], Pace] | None = None
    """Of a price of an hour, in device-hours."""
    priced: bool = False
    """Whether its runs differ by the price."""


WHOM = {
    REFERENCE: Arm(each=False),
    AGENT: Arm(selector=AgentSelector, each=False),
    "rule, all that is asked": Arm(selector=lambda: ExpectedUtility(BALANCED), each=False),
    "Oort": Arm(selector=lambda: Oort(RELEASED), each=False),
    "Oort, enough": Arm(selector=lambda: Enough(Oort(RELEASED)), each=False),
    RANDOM: Arm(selector=Random, each=False),
    "random, enough": Arm(selector=lambda: Enough(Random()), each=False),
    "FLASH-RL": Arm(selector=FlashRL, each=False),
}
"""Selectors at the same two numbers; "enough" sends no more jobs than a step is likely to need."""
HOW_MANY = {
    "one at a time": Arm(jobs=1),
    "two, a step each": Arm(jobs=2),
    "all, a step each": Arm(),
    **{
        f"one more each {every}": Arm(pace=lambda price, every=every: Ramp(every))
        for every in (25, 50, 100)
    },
}
HOW_MANY |= {
    TUNED: Arm(pace=BestRule, priced=True),
    "agent's pace": Arm(pace=AgentPace, priced=True),
    "agent, agent's pace": Arm(selector=AgentSelector, pace=AgentPace, priced=True),
}
"""The rule at other numbers, or with a pace."""
ARMS = WHOM | HOW_MANY
FEW = {("published", "fashion"): (AGENT, "agent, agent's pace")}
"""The arms of places whose runs take ten times as long."""
QUICK = (REFERENCE, "one at a time", RANDOM)


def strategy(
    selector: Selector, seed: int, *, arm: Arm, schedule: str, jobs: int, price: float
) -> StaleStrategy:
    """Return the strategy of an arm.

    Args:
        selector: around the arm's own, which asks for forecasts.
        seed: of the strategy.
        arm: what is played.
        schedule: one of `SCHEDULES`.
        jobs: in flight at most, of the setting.
        price: of an hour, in device-hours.
    """
    most = arm.jobs or jobs
    pace = arm.pace and arm.pace(price)
    if schedule == "fedbuff":
        size = 1 if arm.each else most // 2
        return FedBuff(most, size, selector=selector, seed=seed, pace=pace)
    size = 1 if arm.each else 3 * most // 4
    return StaleStrategy(schedule=k_sync(most, size), selector=selector, seed=seed, pace=pace)


def jobs_of(run: Run) -> int:
    """Return how many jobs are in flight at most where a run plays."""
    return REGIMES[run.regime].fleets[run.fleet].concurrency


def play(recordings: Path, run: Run, price: float) -> dict[str, list[float]]:
    """Return the curves of a run, see `lab.training.curves`."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    arm, regime = ARMS[run.selector], REGIMES[run.regime]
    made = partial(
        strategy, arm=arm, schedule=run.schedule, jobs=jobs_of(run), price=price * jobs_of(run)
    )
    with threadpool_limits(1):
        window, forecasts = place(recordings, replace(run, selector="", agent=""))
        trained = train(
            window,
            opened(run.app),
            run.alpha,
            arm.selector(),
            forecasts=forecasts,
            strategy=made,
            ttl_s=regime.ttl_s,
            liars=Liars.of(NO_LIE, window.n_devices, 0.0, window.seed),
        )
    return curves(trained)


def wanted(
    arms: Iterable[str],
    *,
    part: str = "test",
    places: Iterable[tuple[str, str]] = PLACES,
    fleets: Sequence[str] = tuple(FLEETS),
    schedules: Sequence[str] = SCHEDULES,
    seeds: Sequence[int] = SEEDS,
) -> list[tuple[Run, float]]:
    """Return runs and the prices that they are for; one price where it makes no difference."""
    return [
        (
            Run(
                part=part,
                regime=regime,
                app=app,
                fleet=fleet,
                schedule=schedule,
                alpha=alpha,
                lies="",
                forecasts=True,
                seed=seed,
                selector=name,
                agent="",
            ),
            price,
        )
        for regime, app in places
        for fleet, seed, alpha, schedule, name in product(
            [each for each in PLACES[regime, app][0] if each in fleets],
            seeds,
            PLACES[regime, app][1],
            schedules,
            [each for each in arms if part != "test" or each in FEW.get((regime, app), ARMS)],
        )
        for price in (PRICES if ARMS[name].priced else PRICES[:1])
    ]


def played_all(
    recordings: Path, runs: Sequence[tuple[Run, float]], *, kept: Kept, jobs: int
) -> list[Curves]:
    """Play what is not kept yet, and return the curves of all."""
    keys = [[asdict(run), price] for run, price in runs]
    tasks = [
        (key, partial(play, recordings, run, price))
        for key, (run, price) in zip(keys, runs, strict=True)
    ]
    play_missing(kept, tasks, jobs)
    return [kept[key] for key in keys]


def rows_of(
    runs: Sequence[tuple[Run, float]],
    found: Sequence[Curves],
    targets: dict[tuple[object, ...], float],
) -> list[Row]:
    """Return what each run needed and cost, once for each target and price."""
    rows = []
    for (run, own), each in zip(runs, found, strict=True):
        for share, price in product(SHARES, PRICES):
            if ARMS[run.selector].priced and price != own:
                continue
            needed = judged(each, share * targets[setting(run)])
            cost = needed["hours"] * price * jobs_of(run) + needed["device_hours"]
            rows.append({**asdict(run), "of_random": share, "price": price, **needed, "cost": cost})
    return rows


def setting(run: Run) -> tuple[object, ...]:
    """Return what has a target of its own."""
    return run.regime, run.app, run.fleet, run.schedule, run.alpha


def tables(rows: Sequence[Row]) -> list[Row]:
    """Return what arms need and cost in proportion to references, by place and schedule.

    Regime "all" holds those where digits are trained with few jobs in flight, and "desktops" those
    of them on desktops, on which no pace has learnt.
    """
    found = []
    of_rows = sorted({(r["regime"], r["app"], r["schedule"]) for r in rows})
    small = [regime for regime, app in PLACES if app == "digits" and regime != "wide"]
    several = [(name, "digits", s) for name in ("all", APART) for s in SCHEDULES]
    for regime, app, schedule in (*of_rows, *several):
        regimes = small if regime in {"all", APART} else [regime]
        here = [
            r
            for r in rows
            if (r["app"], r["schedule"]) == (app, schedule) and r["regime"] in regimes
            if regime != APART or r["fleet"] == APART
        ]
        for share, price in product(SHARES, PRICES):
            at = [r for r in here if (r["of_random"], r["price"]) == (share, price)]
            for name, (reference, whose) in product(
                dict.fromkeys(r["selector"] for r in at), REFERENCES.items()
            ):
                own = [r for r in at if r["selector"] == reference]
                other = [r for r in at if r["selector"] == name]
                if not own or not name.startswith(whose):
                    continue
                both = pairs(own, other)
                kind = "whom" if name in WHOM else "how many"
                about = {"about": kind, "to": reference, "regime": regime, "app": app}
                about |= {"schedule": schedule, "arm": name, "priced": ARMS[name].priced}
                about |= {"of_random": share, "price": price, "runs": len(other)}
                about |= {"reached": sum(r["reached"] for r in other)}
                of = {
                    f"{what}_ratio": ratio(both, what) for what in ("hours", "device_hours", "cost")
                }
                found.append(about | of)
    return found


def main() -> None:
    """Train, compare, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--quick", action="store_true", help="two windows, three arms")
    parser.add_argument("--keep", type=Path, help="file of runs; those in it are not run again")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    names = {f"{regime}-{app}": (regime, app) for regime, app in PLACES}
    parser.add_argument("--places", nargs="+", choices=names, default=list(names), metavar="PLACE")
    options = parser.parse_args()
    quick = options.quick
    some: dict[str, Any] = {"places": [names[each] for each in options.places]}
    if quick:
        some = {"places": [("choice", "digits")], "fleets": ("phones",)}
    arms = QUICK if quick else options.arms
    runs = wanted(arms, seeds=SEEDS[: 3 if quick else None], **some)
    learn = wanted([RANDOM], part="learn", seeds=LEARN_SEEDS[: 2 if quick else None], **some)
    play_here = partial(played_all, options.recordings, kept=Kept(options.keep), jobs=options.jobs)
    reached: dict[tuple[object, ...], list[float]] = {}
    for (run, _), each in zip(learn, play_here(learn), strict=True):
        reached.setdefault(setting(run), []).append(final(np.array(each["accuracy"])))
    targets = {place: float(np.mean(each)) for place, each in reached.items()}
    rows = tables(rows_of(runs, play_here(runs), targets))
    command = "python benchmarks/agent/how_many.py RECORDINGS --keep RUNS"
    if options.places != list(names):
        command += f" --places {shlex.join(options.places)}"
    if options.arms != list(ARMS):
        command += f" --arms {shlex.join(options.arms)}"
    print(write_result("how_many", rows, command=command, quick=quick))


if __name__ == "__main__":
    main()
