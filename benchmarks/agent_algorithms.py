"""Which algorithm trains a better agent in the same processor time.

Fleets are composed as in `recorded_fleets` (agents learn on the devices of its first part, are
validated on those of the second, and tested on those of the last at later hours), or synthetic and
divided as `agent train` does. All agents play the same windows in testing, and intervals of
differences resample windows and training seeds. The time is that of one process with one thread;
it includes the validations, about as many in each training.

A training whose folder has `seconds.json` is not run again, so agents of another version can be
compared: MaskablePPO on single picks ("ppo") and evolution strategies are no longer part of
fedstale, and were trained at commit f436b3b.

Run it with: OMP_NUM_THREADS=1 python benchmarks/agent_algorithms.py RECORDINGS --out FOLDER
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from recorded_fleets import LENGTH_S, fleets
from results_file import write_result

from fedstale.agents import Scenario, Scenarios, Training, train
from fedstale.agents.env.episodes import JobKinds
from fedstale.agents.evaluation import episode_metrics, paired
from fedstale.agents.policy.scorer import by_agent, by_heuristic, load
from fedstale.traces import TraceSet
from fedstale.traces.arrays import stream

TURN_S = 30 * 3600.0
WINDOWS = 400
VALIDATIONS = 8
OWN = "policy-gradient"
BUDGETS = {
    "short": {OWN: 52, "evolution": 24, "ppo": 9},
    "long": {OWN: 170, "evolution": 80},
}
"""Updates of each algorithm that take about the same processor time."""
Row = dict[str, Any]


def recorded(recordings: Path, cache: Path) -> Scenarios:
    """Return scenarios of recorded devices."""
    parts = fleets(recordings, seed=0)
    kinds = JobKinds.of_fleet(parts["learn"])

    def scenario(name: str, start: float, end: float) -> Scenario:
        path = cache / f"recorded-{name}.npz"
        return Scenario.of(parts[name], start=start, end=end, kinds=kinds, cache=path)

    return Scenarios(
        training=scenario("learn", 0.0, TURN_S),
        validation=scenario("stop", 0.0, TURN_S),
        testing=scenario("test", TURN_S, LENGTH_S),
    )


def seconds_of(scenarios: Scenarios, folder: Path, training: Training) -> float:
    """Train an agent, unless it is there already, and return the processor time in s."""
    log = folder / "seconds.json"
    if not log.exists():
        begin = time.process_time()
        train(scenarios.training, scenarios.validation, training, folder, resume=True)
        log.write_text(json.dumps(time.process_time() - begin))
    return float(json.loads(log.read_text()))


def rewards(scenario: Scenario, folder: Path | None) -> NDArray[np.float64]:
    """Return what an agent, or the heuristic, earns in each window of a test."""
    kept = None if folder is None else folder / "rewards.json"
    if kept is not None and kept.exists():
        return np.array(json.loads(kept.read_text()))
    episodes = scenario.draw(WINDOWS, stream(0, 9))
    policy = by_heuristic if folder is None else by_agent(load(folder).weights)
    found = episode_metrics(scenario.simulator(200), episodes, policy)["reward"].to_numpy()
    if kept is not None:
        kept.write_text(json.dumps(found.tolist()))
    return np.asarray(found)


def validated(folder: Path) -> float:
    """Return the best validation of a training."""
    lines = (folder / "progress.jsonl").read_text().splitlines()
    return float(max(row.get("validation", -np.inf) for row in map(json.loads, lines)))


def rounded(values: Any) -> list[float]:  # noqa: ANN401 - any sequence of numbers
    """Return numbers as they are written."""
    return [round(float(x), 3) for x in values]


def compared(  # noqa: PLR0917 - one budget of one fleet
    fleet: str, budget: str, scenarios: Scenarios, counts: dict[str, int], n: int, out: Path
) -> list[Row]:
    """Train and test n seeds of each algorithm, and compare the first with the others."""
    rows: list[Row] = []
    heuristic, earned = rewards(scenarios.testing, None), {}
    for algorithm, count in counts.items():
        every, folders, seconds = max(1, count // VALIDATIONS), [], []
        for seed in range(n):
            folder = out / f"{algorithm}-{count}" / f"seed-{seed}"
            training = Training(updates=count, seed=seed, validate_every=every)
            if algorithm != OWN and not folder.exists():
                raise FileNotFoundError(f"{folder}: expected an agent trained by {algorithm}")
            seconds.append(seconds_of(scenarios, folder, training))
            folders.append(folder)
            print(fleet, folder, seconds[-1], validated(folder), flush=True)
        earned[algorithm] = np.stack([rewards(scenarios.testing, f) for f in folders])
        own, first = earned[algorithm], next(iter(earned))
        row = {
            "fleet": fleet,
            "budget": budget,
            "algorithm": algorithm,
            "updates": count,
            "seeds": n,
            "windows": WINDOWS,
            "seconds": round(float(np.mean(seconds)), 1),
            "validation": round(float(np.mean([validated(f) for f in folders])), 3),
            "test": rounded(paired(own, heuristic)[:3]),
            "test_of_seeds": rounded((own - heuristic).mean(axis=1)),
        }
        if algorithm != first:
            row[f"{first} minus it"] = rounded(paired(earned[first], own)[:3])
        print(row, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    """Train, test, compare and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of the agents")
    parser.add_argument(
        "--runs",
        nargs="+",
        default=["recorded/short/10", "recorded/long/5", "synthetic:1000/short/5"],
        help="FLEET/BUDGET/SEEDS",
    )
    parser.add_argument("--algorithms", nargs="+", default=[OWN], help="the first is compared")
    parser.add_argument("--quick", action="store_true", help="the first run, one seed")
    options = parser.parse_args()
    made: dict[str, Scenarios] = {}
    rows: list[Row] = []
    for run in options.runs[: 1 if options.quick else None]:
        fleet, budget, seeds = run.split("/")
        out = options.out / fleet.replace(":", "-")
        cache = options.out / "cache" / out.name
        if fleet not in made and fleet == "recorded":
            made[fleet] = recorded(options.recordings, cache)
        elif fleet not in made:
            made[fleet] = Scenarios.of(TraceSet.load(fleet, seed=0), cache=cache, seed=0)
        counts = {a: n for a, n in BUDGETS[budget].items() if a in options.algorithms}
        n = 1 if options.quick else int(seeds)
        rows += compared(fleet, budget, made[fleet], counts, n, out)
    command = "OMP_NUM_THREADS=1 python benchmarks/agent_algorithms.py RECORDINGS --out FOLDER"
    command += " --quick" * options.quick
    command += " --algorithms " + " ".join(options.algorithms)
    name = "agent_algorithms-quick" if options.quick else "agent_algorithms"
    print(write_result(name, rows, command=command))


if __name__ == "__main__":
    main()
