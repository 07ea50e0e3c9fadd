"""What saves joules and grams of CO2, and what it costs in hours.

A hundred or three hundred recorded phones, some third of them in each of three regions that are
eight hours apart, train the app `digits` from the hour of the seed on until the mean accuracy of
ten evaluations is .9. Each region's phones are those of `methods.runs`, in the hours of their own
day. Its electricity is the synthetic day of `fedstale energy`, at its own time: 480 g/kWh by night,
202 about noon; no grid was recorded. Joules are those of `phone`.

Each arm has the server's rate of four with which it reached the target for the fewest grams, on 300
phones of two other seeds, within eight hours. What is reported comes from five seeds, paired with
FedBuff: grams and joules of all jobs until the target, and hours.

Run it with: python benchmarks/energy/run.py RECORDINGS [--keep FILE] [--quick]
"""

import argparse
import logging
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from flwr.app import ArrayRecord, MetricRecord

from fedstale.agents import AgentPace, AgentSelector
from fedstale.contrib.energy import Fleet, Intensity, with_carbon, with_energy
from fedstale.runs import with_costs
from fedstale.simulation import RunEnded, TraceGrid
from fedstale.strategies import FedBuff, StaleStrategy
from fedstale.strategies.selection import Oort, Random, Selector
from fedstale.strategies.server_optimizer import SGD
from fedstale.traces import TraceSet
from fedstale.traces.arrays import DAY_S, stream
from fedstale.traces.merge import merged

sys.path.append(str(Path(__file__).parents[1]))
from energy.clean import CleanFirst, CleanHours
from energy.eafl import EAFL
from lab.apps import opened
from lab.curves import ratio
from lab.fleets import ASSUMED, fleets
from lab.kept import Kept
from lab.results import write_result
from methods.runs import PRESENT_S, SEEDS, TIMEOUT_S, TUNING_SEEDS, WINDOW, Setting, online

ZONES_H = {"eu": 0, "asia": 8, "us": 16}
"""Hours of each region's clock before that of the first."""
SIZES = (300, 100)
"""Phones; of a hundred no more than twenty are online at most times."""
STARTS_H = {1: 0, 2: 5, 3: 10, 4: 15, 5: 20} | dict(zip(TUNING_SEEDS, (8, 13), strict=True))
"""Hour of the first region at which each seed's training begins."""
RATES = (0.6, 1.2, 2.4, 4.8)
TARGET, HORIZON_S, TUNING_S = 0.9, 2 * DAY_S, DAY_S / 3
_DRAWN = 103
"""Stream of random numbers, apart from those of the app."""


@dataclass(frozen=True, slots=True)
class Arm:
    """Who is chosen, and how many."""

    selector: Callable[[Intensity, Mapping[int, str]], Selector] = lambda *known: Random()
    """Makes one of the intensities and the nodes' regions."""
    jobs: int = 20
    """In flight, at most."""
    hour_price: float | None = None
    """Of an hour in device-hours, by which the agent sets how many; None for all, five a step."""


ARMS = {
    "FedBuff(20, 5)": Arm(),
    "FedBuff(10, 5)": Arm(jobs=10),
    "FedBuff(5, 5)": Arm(jobs=5),
    "Oort": Arm(lambda *known: Oort()),
    "EAFL": Arm(lambda _, regions: EAFL(regions)),
    "agent": Arm(lambda *known: AgentSelector()),
    "agent, 20 an hour": Arm(lambda *known: AgentSelector(), hour_price=20.0),
    "agent, 5 an hour": Arm(lambda *known: AgentSelector(), hour_price=5.0),
    "agent, 1 an hour": Arm(lambda *known: AgentSelector(), hour_price=1.0),
    "clean first": Arm(CleanFirst),
    "clean hours": Arm(CleanHours),
}
FEW = ("FedBuff(20, 5)", "agent, 5 an hour", "clean hours")
"""Arms of the quick form; the first is what all are paired with."""


@cache
def phones(recordings: Path, seed: int, n: int) -> tuple[TraceSet, list[str]]:
    """Return the phones of a seed, whose hour is instant 0, and the region of each."""
    fleet = merged(fleets(recordings, seed, "phones", assumed=ASSUMED), align="time-of-week")
    rng, parts, owners = stream(seed, _DRAWN), {}, {}
    for region, own in zip(
        ZONES_H, np.array_split(rng.permutation(fleet.n_devices), len(ZONES_H)), strict=True
    ):
        # Their clocks are ahead of the first region's, on whose clock all are put.
        epoch = pd.Timestamp(fleet.epoch) - pd.Timedelta(hours=ZONES_H[region])
        parts[region] = replace(fleet.take(np.sort(own)), epoch=epoch.isoformat())
        owners |= dict.fromkeys(parts[region].device_ids, region)
    start = 3 * DAY_S + STARTS_H[seed] * 3600.0
    window = merged(parts, align="time-of-week").between(start, start + HORIZON_S)
    present = np.flatnonzero(online(window, DAY_S).mean(0) * DAY_S >= PRESENT_S)
    window = window.take(np.sort(rng.choice(present, n, replace=False)))
    return window, [owners[name] for name in window.device_ids]


def files(folder: Path, traces: TraceSet, regions: Sequence[str], seed: int) -> tuple[str, Path]:
    """Write the intensities of regions, and the class and region of devices; return both paths."""
    day = Intensity.synthetic()
    rows = ["time,region,g_per_kwh"]
    for region, zone_h in ZONES_H.items():
        hours = np.arange(4 * 24)
        g = day.at((hours + STARTS_H[seed] + zone_h) * 3600.0)[0]
        rows += [f"{3600 * hour},{region},{x}" for hour, x in zip(hours, g, strict=True)]
    (folder / "grid.csv").write_text("\n".join(rows), encoding="utf-8")
    places = [f"{d},phone,{r}" for d, r in zip(traces.device_ids, regions, strict=True)]
    (folder / "fleet.csv").write_text("\n".join(["device_id,class,region", *places]), "utf-8")
    return str(folder / "grid.csv"), folder / "fleet.csv"


def run(arm: str, n: int, seed: int, recordings: Path, rate: float) -> dict[str, float]:
    """Return the hours, grams and kWh that one run took to the target."""
    own = ARMS[arm]
    traces, places = phones(recordings, seed, n)
    setting = Setting(opened("digits"), traces, seed, slow=False, grid_s=60.0)
    grid = TraceGrid(
        traces,
        setting.executor(),
        costs=setting.costs,
        seed=seed,
        run_config=setting.config,
        until_s=TUNING_S if seed in TUNING_SEEDS else HORIZON_S,
    )
    last: deque[float] = deque(maxlen=WINDOW)

    def evaluate(version: int, arrays: ArrayRecord) -> MetricRecord:
        last.append(setting.right(arrays)[0])
        if np.mean(last) >= TARGET and len(last) == WINDOW:
            raise RunEnded("the target is reached")
        return MetricRecord({"accuracy": last[-1]})

    with tempfile.TemporaryDirectory() as folder:
        path, table = files(Path(folder), traces, places, seed)
        intensity = Intensity.read(path)
        regions = {1000 + i: region for i, region in enumerate(places)}
        strategy: StaleStrategy = FedBuff(
            own.jobs,
            5,
            selector=own.selector(intensity, regions),
            pace=None if own.hour_price is None else AgentPace(own.hour_price),
            server_optimizer=SGD(rate),
        )
        with grid.running(), suppress(RunEnded):
            strategy.start(grid, setting.app.initial(seed), 10**6, TIMEOUT_S, evaluate_fn=evaluate)
        fleet, end_s = Fleet(table), grid.now()
        jobs = with_energy(with_costs(grid.events().to_pandas()), fleet)
        jobs = with_carbon(jobs, fleet, intensity, end_s=end_s)
    return {
        "reached": float(bool(last) and np.mean(last) >= TARGET),
        "hours": end_s / 3600.0,
        "grams": float(jobs["carbon_g"].sum()),
        "kwh": float(jobs["energy_j"].sum() / 3.6e6),
        "wasted_g": float(jobs.loc[jobs["outcome"] != "used", "carbon_g"].sum()),
    }


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs on recorded phones, those that are kept and those that are made now."""

    recordings: Path
    kept: Kept

    def of(self, arm: str, n: int, seed: int, rate: float) -> dict[str, float]:
        """Return what a run took."""
        made = partial(run, arm, n, seed, self.recordings, rate)
        found: dict[str, float] = self.kept.get([arm, n, seed, rate], made)
        print(n, seed, arm, rate, found, flush=True)
        return found

    def best(self, arm: str, rates: Sequence[float]) -> float:
        """Return the rate with which an arm needs least; the one rate if there is no other."""
        if len(rates) == 1:
            return rates[0]

        def took(rate: float) -> tuple[float, float]:
            each = [self.of(arm, SIZES[0], seed, rate) for seed in TUNING_SEEDS]
            return -sum(one["reached"] for one in each), sum(one["grams"] for one in each)

        return min(rates, key=took)


def rows_of(
    runs: Runs, rates: Mapping[str, float], n: int, seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """Return a row for each arm on so many phones, paired with the first.

    Args:
        runs: on recorded phones.
        rates: of each arm.
        n: phones.
        seeds: one of each run.
    """
    each_arm = {arm: [runs.of(arm, n, seed, rates[arm]) for seed in seeds] for arm in rates}
    first = next(iter(each_arm.values()))
    rows = []
    for arm, each in each_arm.items():
        row: dict[str, Any] = {"arm": arm, "phones": n, "seeds": list(seeds), "rate": rates[arm]}
        for key in ("reached", "hours", "grams", "kwh", "wasted_g"):
            row[key] = float(np.mean([one[key] for one in each]))
        row["g_per_kwh"] = row["grams"] / row["kwh"]
        for key in ("hours", "grams", "kwh"):
            # How many times as much as FedBuff.
            row[f"{key}_ratio"] = ratio([one[key] for one in each], [one[key] for one in first])
        rows.append(row)
    return rows


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--keep", type=Path, help="file of runs; those in it are not run again")
    parser.add_argument("--quick", action="store_true", help="one seed, few arms, 300 phones")
    args = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    sizes, seeds = (SIZES[:1], SEEDS[:1]) if args.quick else (SIZES, SEEDS)
    arms, rates = (FEW, RATES[1:2]) if args.quick else (tuple(ARMS), RATES)
    runs = Runs(args.recordings, Kept(args.keep))
    best = {arm: runs.best(arm, rates) for arm in arms}
    rows = [row for n in sizes for row in rows_of(runs, best, n, seeds)]
    for row in rows:
        print(row)
    write_result(
        "energy", rows, command="python benchmarks/energy/run.py RECORDINGS", quick=args.quick
    )


if __name__ == "__main__":
    main()
