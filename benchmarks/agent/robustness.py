"""What forecasts are worth to a selector, and what wrong ones cost it, in real training.

Each run trains `digits` in a window of `training.py`, with a selector and a way to forecast: not at
all, by the forecasters, by whoever knows the future, and wrongly. Wrong are forecasts of other
devices, ten times the duration, and forecasts of another app's job. What a run needs to reach 0.9
of what random selection reaches in the end, and all of that, is put in proportion to a run of the
same selector without forecasts in the same window.

Runs that are kept are not played again. What is tuned is tuned by `--part learn`.

    python benchmarks/agent/robustness.py RECORDINGS --keep RUNS --jobs 1
"""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from fedstale.agents import AgentSelector
from fedstale.strategies.selection import BALANCED, Enough, ExpectedUtility, Random, Selector
from fedstale.traces import Job, Status
from fedstale.traces.arrays import stream
from fedstale.traces.forecast import AVAILABLE_S, Forecaster, LastValue, draw_parts, embedded

sys.path.append(str(Path(__file__).parents[1]))
from agent.ratios import RATIOS, SHARES, Row, pairs, ratio
from agent.training import LEARN_SEEDS, LYING, SEEDS, Run, agent_digest, place, recorded, trained_by
from lab.apps import opened
from lab.curves import final
from lab.kept import Kept, play_missing
from lab.results import write_result
from lab.training import (
    REGIMES,
    SCHEDULES,
    OwnForecasts,
    Window,
    WindowForecasts,
    curves,
    judged,
    own_jobs,
)

NAME = "agent_robustness"
SELECTORS: dict[str, Callable[[], Selector]] = {
    "rule": lambda: ExpectedUtility(BALANCED),
    "rule, enough": lambda: Enough(ExpectedUtility(BALANCED)),
    "agent": AgentSelector,
}
NONE, RANDOM = "none", "random"
FLEETS, REGIME_NAMES = ("phones", "cars"), ("choice", "long")
ALPHA = 0.3
EXAMPLES = 4_000
"""That the simple forecaster counts its shares on, of devices of the part `learn`."""
STEP_S = 300.0
"""From one forecast of a device to its next."""


@dataclass(frozen=True, slots=True)
class Told:
    """What devices of a window may forecast of their jobs."""

    window: Window
    jobs: Job
    """Of each device; shape (n,)."""
    learnt: WindowForecasts
    """By the forecaster of the fleet."""
    simple: WindowForecasts
    """By the last values."""

    @property
    def rng(self) -> np.random.Generator:
        """A generator of the window's seed."""
        return stream(self.window.seed, 83)

    def own(self, times: float = 1.0) -> OwnForecasts:
        """Return what the forecaster of the fleet says of jobs of so many times the work."""
        return self.learnt.of(replace(self.jobs, work=times * np.asarray(self.jobs.work)))

    def scaled(self, share: float) -> OwnForecasts:
        """Return forecasts with ten times the duration, by a share of the devices."""
        values, n = self.own().values.copy(), self.window.n_devices
        values[2, self.rng.permutation(n)[: round(share * n)]] *= 10.0
        return OwnForecasts(values, STEP_S)

    def others(self, *, anew: bool) -> OwnForecasts:
        """Return forecasts that are another device's: always the same one's, or each time's."""
        values, rng = self.own().values, self.rng
        is_online = ~np.isnan(values[0])
        if anew:
            mixed = values.copy()
            for step in range(values.shape[2]):
                here = np.flatnonzero(is_online[:, step])
                mixed[:, here, step] = values[:, rng.permutation(here), step]
            return OwnForecasts(mixed, STEP_S)
        # Who is offline when another one states its forecast last said something else.
        steps = np.arange(values.shape[2])
        for device in np.flatnonzero(is_online.any(axis=1)):
            known = np.flatnonzero(is_online[device])
            last = known[np.maximum(np.searchsorted(known, steps, side="right") - 1, 0)]
            values[:, device] = values[:, device, last]
        other = rng.permutation(np.flatnonzero(is_online.any(axis=1)))
        mixed = np.full_like(values, np.nan)
        mixed[:, np.sort(other)] = values[:, other]
        return OwnForecasts(np.where(is_online, mixed, np.nan), STEP_S)

    def truth(self) -> OwnForecasts:
        """Return what would become of a job in each step."""
        traces, n = self.window.traces, self.window.n_devices
        availability = traces.channel("availability")
        begins = STEP_S * np.arange(int(np.ceil(self.window.hours_s / STEP_S)))
        row, step = (x.ravel() for x in np.indices((n, begins.size)))
        first, until = availability.window_at_or_after(row, begins[step])
        online = np.flatnonzero(first < begins[step] + STEP_S)
        row, step, first, until = row[online], step[online], first[online], until[online]
        names = ("work", "download_bytes", "upload_bytes", "ttl_s")
        each = Job(**{name: np.asarray(getattr(self.jobs, name))[row] for name in names})
        trips = traces.trips(row, first, each)
        finishes = trips.status == Status.REPORTED
        values = np.full((3, n, begins.size), np.nan)
        values[:, row, step] = (
            finishes,
            until >= first + AVAILABLE_S,
            np.where(finishes, trips.reported - first, np.nan),
        )
        return OwnForecasts(values, STEP_S)


WRONG: dict[str, Callable[[Told], OwnForecasts]] = {
    "another device's": lambda told: told.others(anew=False),
    "another's each time": lambda told: told.others(anew=True),
    "10 x duration": lambda told: told.scaled(1.0),
    "10 x duration, 30 %": lambda told: told.scaled(LYING),
    "an app of 0.1 x work": lambda told: told.own(0.1),
    "an app of 10 x work": lambda told: told.own(10.0),
}
SAID: dict[str, Callable[[Told], OwnForecasts]] = {
    "LSTM": Told.own,
    "oracle": Told.truth,
    "last value": lambda told: told.simple.of(told.jobs),
    **WRONG,
}
"""What devices say, by name."""


def wanted(part: str, n_windows: int, *, quick: bool = False) -> list[Run]:
    """Return the runs, those of random selection first; what is said is in the place of `lies`.

    Args:
        part: of the fleet.
        n_windows: of each fleet and regime; every other one has another schedule.
        quick: phones, `choice`, one selector and three things to say.
    """
    first = (SEEDS if part == "test" else LEARN_SEEDS)[0]
    arms = [(RANDOM, NONE), *product(SELECTORS, (NONE, *SAID))]
    if quick:
        arms = [(RANDOM, NONE), *product(["rule, enough"], (NONE, "LSTM", "another device's"))]
    return [
        Run(
            part=part,
            regime=regime,
            app="digits",
            fleet=fleet,
            schedule=list(SCHEDULES)[(i + window) % 2],
            alpha=ALPHA,
            lies=said,
            forecasts=said != NONE,
            # Windows of two regimes are of different hours, and have different names.
            seed=first + 2 * window + i,
            selector=selector,
            agent=agent_digest() if selector == "agent" else "",
        )
        for (selector, said), window, fleet, (i, regime) in product(
            arms,
            range(n_windows),
            FLEETS[: 1 if quick else None],
            list(enumerate(REGIME_NAMES))[: 1 if quick else None],
        )
    ]


def play(recordings: Path, run: Run) -> dict[str, list[float]]:
    """Return the curves of a run, see `lab.training.curves`."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with threadpool_limits(1):
        window, _ = place(recordings, replace(run, forecasts=False))
        said = SAID[run.lies](_told(recordings, run)) if run.forecasts else None
        selector = Random() if run.selector == RANDOM else SELECTORS[run.selector]()
        return curves(trained_by(window, said, replace(run, lies=""), selector))


def _told(recordings: Path, run: Run) -> Told:
    """Return what may be said where a run plays."""
    about = replace(run, lies="", forecasts=False, selector="", agent="", schedule="")
    window, ttl_s = place(recordings, about)[0], REGIMES[run.regime].ttl_s
    jobs = own_jobs(window, opened(run.app), run.alpha, ttl_s=ttl_s)
    return Told(window, jobs, *_forecasts(recordings, about))


@lru_cache(maxsize=2)
def _forecasts(recordings: Path, of: Run) -> tuple[WindowForecasts, WindowForecasts]:
    window, _ = place(recordings, of)
    traces = recorded(recordings, of.fleet, REGIMES[of.regime].fleets[of.fleet].times)[of.part]
    made = (embedded(of.fleet), _simple(recordings, of.fleet))
    learnt, simple = (WindowForecasts(traces, each, window, STEP_S) for each in made)
    return learnt, simple


@lru_cache(maxsize=2)
def _simple(recordings: Path, fleet: str) -> Forecaster:
    learn, stop = draw_parts(recorded(recordings, fleet, 1)["learn"], n=EXAMPLES, seed=0)
    return LastValue().fit(learn, stop, seed=0)


def table(runs: Sequence[Run], kept: Kept) -> list[Row]:
    """Return what selectors need by what is said, in proportion to themselves if nothing is.

    Both targets of a run count, and each window once; see `agent.ratios`.

    Args:
        runs: by `wanted`.
        kept: those that were played.
    """
    known = [run for run in runs if asdict(run) in kept]
    random = {
        (run.fleet, run.seed): final(np.array(kept[asdict(run)]["accuracy"]))
        for run in known
        if run.selector == RANDOM
    }
    found: dict[tuple[str, str], list[list[Row]]] = {}
    for run in known:
        if run.selector == RANDOM:
            continue
        own = found.setdefault((run.selector, run.lies), [[] for _ in SHARES])
        for at, share in zip(own, SHARES, strict=True):
            target = share * random[run.fleet, run.seed]
            at.append(asdict(run) | judged(kept[asdict(run)], target))
    rows = []
    for (selector, said), own in found.items():
        without = found[selector, NONE]
        both = [pair for pair_of in zip(without, own, strict=True) for pair in pairs(*pair_of)]
        reached = [row["reached"] for at in own for row in at]
        row: Row = {"selector": selector, "said": said, "runs": len(reached) // len(SHARES)}
        row |= {"reached": round(float(np.mean(reached)), 3)}
        rows.append(row | {f"{name}_ratio": ratio(both, name) for name in RATIOS})
    return rows


def main() -> None:
    """Train, compare, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--quick", action="store_true", help="four runs")
    parser.add_argument("--keep", type=Path, help="file of runs; those in it are not run again")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--windows", type=int, default=2, help="of each fleet and regime")
    parser.add_argument("--part", choices=("learn", "test"), default="test", help="of the fleets")
    options = parser.parse_args()
    runs = wanted(options.part, options.windows, quick=options.quick)
    kept = Kept(options.keep)
    # A process makes a window and its forecasts once, if its runs come together.
    together = sorted(runs, key=lambda run: (run.seed, run.fleet))
    play_missing(
        kept,
        ((asdict(run), partial(play, options.recordings, run)) for run in together),
        options.jobs,
        each=lambda key, _: print(
            *(key[name] for name in ("fleet", "seed", "selector", "lies")), flush=True
        ),
    )
    rows = table(runs, kept)
    print(*rows, sep="\n")
    if options.part == "test":
        command = "python benchmarks/agent/robustness.py RECORDINGS --keep RUNS"
        command += f" --windows {options.windows}"
        print(write_result(NAME, rows, command=command, quick=options.quick))


if __name__ == "__main__":
    main()
