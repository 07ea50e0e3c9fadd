"""Is the band of worlds an honest one: does it hold what the agent is worth in real training?

Four questions, each a part:

- `spread`: by how much do the learning constants scatter from one fit of real training to the next?
  Cells are an app (digits, fashion), a skew of its data and a size of a server step, on phones that
  agents learn on. No comparison of selectors is looked at.
- `seconds`: processor seconds of 200 worlds, and the agent's advantage over rules of one line.
- `schedules`: do the constants rank schedules as real training does?
- `cases`: does the advantage in real training (`agent_training`) lie in the band of the worlds?

Parts are kept in a folder as they are done, and the result is written from all that are there:

    python benchmarks/agent_worlds.py RECORDINGS --out FOLDER --only spread --write
    python benchmarks/agent_worlds.py RECORDINGS --out FOLDER
"""

import argparse
import json
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from agent_training import FLEETS, SCHEDULES, SEEDS, SKEWS, told, windows
from recorded_fleets import ASSUMED, fleets
from recorded_scenarios import DAYS, STEP_S
from results_file import read_result, write_result
from scipy.stats import spearmanr
from selection_proxy import (
    ALPHAS,
    FIT_SELECTORS,
    FIT_SIZES,
    SELECTORS,
    Deal,
    examples_of,
    fitted,
    late_progress,
)
from selection_training import train, training_kinds
from threadpoolctl import threadpool_limits
from training_apps import APPS, opened
from world_cases import Case, advantages

from fedstale.agents import Scenario, evaluate_worlds, load
from fedstale.agents.env.episodes import JobKinds
from fedstale.agents.env.forecast_table import NoForecasts
from fedstale.agents.env.learning_proxy import CONSTANTS
from fedstale.agents.env.learning_proxy import fitted as shipped
from fedstale.agents.env.worlds import VARIED, Spread, Worlds
from fedstale.agents.policy.scorer import embedded
from fedstale.strategies import FedBuff, StaleStrategy
from fedstale.strategies.schedule import k_sync
from fedstale.strategies.selection import Random, Selector
from fedstale.traces import TraceSet
from fedstale.traces.arrays import DAY_S
from fedstale.traces.forecast import embedded as forecaster

Row = dict[str, Any]
SPREAD_APPS, SPREAD_SEEDS = ("digits", "fashion"), range(211, 213)
FURTHEST = 2.0
"""A constant of a cell counts as off by exp(2) at most: some fits end at a bound."""
WORLDS, CASE_WORLDS = 200, 40


def spread(recordings: Path) -> list[Row]:
    """Return the constants of each cell, and how they scatter around those that are shipped."""
    traces = _fleet(recordings, "phones", "learn")
    scenario = Scenario.of(
        traces,
        forecasts="none",
        start=12 * 3600.0,
        end=44 * 3600.0,
        kinds=training_kinds(traces, (opened("digits").model_bytes,)),
    )
    rows = []
    for app in SPREAD_APPS:
        for alpha in ALPHAS:
            for size in FIT_SIZES:
                runs = []
                for seed in SPREAD_SEEDS:
                    deal = Deal.drawn(scenario, alpha, seed, size, app=app)
                    for name in FIT_SELECTORS:
                        trained = deal.train(SELECTORS[name][0](), NoForecasts())
                        if len(trained.merged) >= 12:
                            runs.append(examples_of(deal, trained))
                proxy, quality = fitted(runs)
                cell = {"app": app, "alpha": alpha, "buffer_size": size}
                rows.append({"part": "spread", **cell, **asdict(proxy), "runs": quality["runs"]})
                print(rows[-1], flush=True)
    return rows


def widths(rows: Sequence[Row], apps: Sequence[str]) -> dict[str, float]:
    """Return the root mean square distance of cells to the constants that are shipped, in logs."""
    middle, found = asdict(shipped()), {}
    cells = [row for row in rows if row["app"] in apps]
    for name in VARIED:
        values = np.maximum([row[name] for row in cells], 1e-6)
        off = np.clip(np.log(values / middle[name]), -FURTHEST, FURTHEST)
        found[name] = round(float(np.sqrt((off**2).mean())), 3)
    return found


def seconds(recordings: Path, cache: Path) -> list[Row]:
    """Return how the agent does in worlds on each recorded fleet, and what it takes."""
    rows, agent = [], [load(embedded())]
    for kind in ("phones", "desktops", "cars"):
        scenario = _tested(recordings, kind, cache)
        began = time.process_time()
        with threadpool_limits(1):
            found = evaluate_worlds(scenario, agent, worlds=WORLDS)
        took = round(time.process_time() - began, 1)
        row = {"part": "seconds", "fleet": kind, "worlds": WORLDS, "windows": 50}
        rows.append(row | {"processor_s": took, "prefer": found.prefer})
        for rule in found.table.to_dict("records"):
            values = {k: round(v, 4) if isinstance(v, float) else v for k, v in rule.items()}
            rows.append({"part": "rules", "fleet": kind, **values})
        print(*rows[-7:], sep="\n", flush=True)
    return rows


def schedules(recordings: Path) -> list[Row]:
    """Return what schedules reach in real training and in the proxy's, with random selection."""
    traces, rows = _fleet(recordings, "phones", "learn"), []
    drawn = windows(traces, "phones", range(221, 224))
    for concurrency in (2, 4, 8, 16):
        for name, keeps, size in (
            ("all", False, concurrency),
            ("three quarters", False, max(1, 3 * concurrency // 4)),
            ("buffer of a half", True, concurrency // 2),
            ("buffer of one", True, 1),
        ):
            make = partial(_scheduled, concurrency=concurrency, size=size, keeps=keeps)
            real, made = [], []
            for window in drawn:
                run = train(
                    window, opened("digits"), 0.3, Random(), forecasts=NoForecasts(), strategy=make
                )
                real.append(late_progress(run.at, run.losses))
                case = Case(
                    windows=[window], alphas=[0.3], kind=0, concurrency=concurrency,
                    buffer_size=size, keeps_stragglers=keeps,
                )  # fmt: skip
                made.append(case.progress(traces, NoForecasts(), Random(), shipped()))
            row = {"part": "schedules", "schedule": name, "concurrency": concurrency}
            rows.append(
                row | {"real_progress": _round(real), "proxy_progress": _round(made), "windows": 3}
            )
            print(rows[-1], flush=True)
    pairs = [(row["real_progress"], row["proxy_progress"]) for row in rows]
    rank = round(float(spearmanr(*zip(*pairs, strict=True))[0]), 3)
    return [
        *rows,
        {"part": "schedules", "schedule": "spearman", "schedules": len(pairs), "rank": rank},
    ]


def _scheduled(
    selector: Selector, seed: int, *, concurrency: int, size: int, keeps: bool
) -> StaleStrategy:
    if keeps:
        return FedBuff(concurrency, size, selector=selector, seed=seed)
    return StaleStrategy(selector=selector, schedule=k_sync(concurrency, size), seed=seed)


def cases(recordings: Path, cache: Path, spread_of: Spread) -> list[Row]:
    """Return the band of each case beside the real advantage."""
    real = {
        (row["app"], row["fleet"], row["schedule"], row["selector"]): row["hours_ratio"]
        for row in read_result("agent_training")["rows"]
        if "hours_ratio" in row and not row["lies"]
    }
    rows, worlds = [], Worlds.around(shipped(), spread_of, CASE_WORLDS, seed=0)
    for fleet, part in FLEETS.items():
        traces = _fleet(recordings, fleet, "test")
        drawn = windows(traces, fleet, SEEDS)
        tables = [told(traces, fleet, window, cache) for window in drawn]
        for app in APPS:
            for schedule in SCHEDULES:
                c, keeps = part.concurrency, schedule == "fedbuff"
                case = Case(
                    windows=drawn,
                    alphas=SKEWS[app] if None not in SKEWS[app] else ALPHAS,
                    kind=list(APPS).index(app),
                    concurrency=c,
                    buffer_size=c // 2 if keeps else 3 * c // 4,
                    keeps_stragglers=keeps,
                )
                key = app, fleet, schedule
                rules = [rule for *place, rule in real if tuple(place) == key]
                found = advantages(
                    case, traces, tables, worlds, agent=load(embedded()), rules=rules
                )
                for rule, ratios in found.items():
                    low, median, high = np.quantile(ratios, [0.05, 0.5, 0.95]).round(3).tolist()
                    true = real[(*key, rule)]
                    row = {"part": "cases", "app": app, "fleet": fleet, "schedule": schedule}
                    row |= {"rule": rule, "low": low, "median": median, "high": high}
                    row |= {"real": true["mean"], "bound": true["bound"]}
                    rows.append(row | {"is_inside": low <= true["mean"] <= high})
                    print(rows[-1], flush=True)
    return rows


def held(rows: Sequence[Row]) -> list[Row]:
    """Return in how many of the cases the real advantage lies in the band, app by app."""
    found = []
    for app in [*dict.fromkeys(row["app"] for row in rows), "all"]:
        some = [row for row in rows if app in (row["app"], "all")]
        inside = sum(row["is_inside"] for row in some)
        below = sum(row["real"] < row["low"] for row in some)
        sign = sum((row["real"] > 1) == (row["median"] > 1) for row in some)
        row = {"part": "held", "app": app, "cases": len(some), "inside": inside}
        found.append(row | {"below": below, "same_sign": sign})
    return found


def _round(values: Sequence[float]) -> float:
    return round(float(np.mean(values)), 4)


def _fleet(recordings: Path, kind: str, part: str) -> TraceSet:
    return fleets(recordings, seed=0, kind=kind, assumed=ASSUMED)[part]


def _tested(recordings: Path, kind: str, cache: Path) -> Scenario:
    """Return the tested scenario of `recorded_scenarios`, without the two to learn on."""
    parts = fleets(recordings, seed=0, kind=kind, assumed=ASSUMED)
    first, last = DAYS[kind]["testing"]
    return Scenario.of(
        parts["test"],
        forecaster=forecaster(kind),
        start=first * DAY_S,
        end=last * DAY_S,
        kinds=JobKinds.of_fleet(parts["learn"]),
        step_s=STEP_S[kind],
        cache=cache / f"testing-{kind}.npz",
    )


def main() -> None:
    """Play the parts that are asked for, and write the result from all that are kept."""
    parts = ("spread", "seconds", "schedules", "cases")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of parts and forecasts")
    parser.add_argument("--only", nargs="*", default=parts, help="parts to play; none if empty")
    parser.add_argument("--write", action="store_true", help="write the spread to agents/env/")
    options = parser.parse_args()
    if unknown := set(options.only) - set(parts):
        parser.error(f"--only {' '.join(sorted(unknown))}: expected some of {', '.join(parts)}")
    out, recordings = options.out, options.recordings
    out.mkdir(parents=True, exist_ok=True)

    def kept(name: str, play: Callable[[], list[Row]]) -> list[Row]:
        path = out / f"{name}.json"
        if name in options.only:
            with threadpool_limits(1):
                path.write_text(json.dumps(play()), encoding="utf-8")
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    cells = kept("spread", lambda: spread(recordings))
    found = {"digits": widths(cells, ["digits"]), "digits and fashion": widths(cells, SPREAD_APPS)}
    rows = cells + [{"part": "widths", "of": name, **values} for name, values in found.items()]
    print(*rows[-2:], sep="\n", flush=True)
    if options.write:
        table = tomllib.loads(CONSTANTS.read_text(encoding="utf-8"))
        table["spread"] = found["digits and fashion"]
        CONSTANTS.write_text(tomli_w.dumps(table), encoding="utf-8")
    rows += kept("seconds", lambda: seconds(recordings, out))
    rows += kept("schedules", lambda: schedules(recordings))
    played = kept("cases", lambda: cases(recordings, out, found["digits and fashion"]))
    rows += [*played, *held(played)]
    command = "python benchmarks/agent_worlds.py RECORDINGS --out FOLDER"
    print(write_result("agent_worlds", rows, command=command))


if __name__ == "__main__":
    main()
