"""How many picks a second the selection environment makes, on one core.

Rankings are random. Half of what a step costs is the observation: 23 numbers of each candidate.

Run it with: OMP_NUM_THREADS=1 python benchmarks/selection_env.py RECORDINGS [--quick]
"""

import argparse
import time
from pathlib import Path

import numpy as np
from recorded_scenarios import recorded_scenarios
from results_file import spread, write_result

from fedstale.agents.env.gym_env import N_MAX, SelectionEnv, VectorSelectionEnv
from fedstale.agents.env.scenario import Scenario
from fedstale.agents.evaluation import episode_metrics
from fedstale.agents.policy.scorer import by_heuristic


def vectorised(scenario: Scenario, n_envs: int, n_steps: int, repeats: int) -> dict[str, object]:
    """Return picks per second of many episodes at once, their drawing and baseline included."""
    env, rng = VectorSelectionEnv(scenario, n_envs, seed=0), np.random.default_rng(0)
    env.reset()
    rankings = rng.permuted(np.tile(np.arange(N_MAX), (n_envs, 1)), axis=1)
    rates, sent, rounds = [], 0.0, 0
    for _ in range(repeats):
        begin, before = time.process_time(), sent
        for _ in range(n_steps):
            infos = env.step(rng.permutation(rankings))[3]
            played = [info["sent"] for info in infos if "sent" in info]
            sent, rounds = sent + sum(played), rounds + len(played)
        rates.append((sent - before) / (time.process_time() - begin))
    what = {"what": "vectorised picks per second", "episodes": n_envs, "candidates": N_MAX}
    return {**what, "picks per round": round(sent / rounds, 1), **spread(rates)}


def single(scenario: Scenario, n_steps: int, repeats: int) -> dict[str, object]:
    """Return picks per second of one episode at a time."""
    env, rng = SelectionEnv(scenario), np.random.default_rng(0)
    env.reset(seed=0)
    rates = []
    for _ in range(repeats):
        begin, sent = time.process_time(), 0.0
        for _ in range(n_steps):
            _, _, _, over, info = env.step(rng.permutation(N_MAX))
            sent += info["sent"]
            if over:
                env.reset()
        rates.append(sent / (time.process_time() - begin))
    what = {"what": "single picks per second", "episodes": 1, "candidates": N_MAX}
    return {**what, **spread(rates)}


def whole(scenario: Scenario, n: int, repeats: int) -> dict[str, object]:
    """Return picks per second of whole rounds, as evaluation plays them."""
    episodes, simulator = scenario.draw(n, np.random.default_rng(0)), scenario.simulator(n)
    rates = []
    for seed in range(repeats):
        begin = time.process_time()
        table = episode_metrics(simulator, episodes, by_heuristic, seed=seed)
        rates.append(float(table["sent"].sum()) / (time.process_time() - begin))
    return {"what": "picks per second of whole rounds", "episodes": n, **spread(rates)}


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer steps, one size")
    parser.add_argument("--cache", type=Path, help="folder to keep forecasts in")
    options = parser.parse_args()
    scenario = recorded_scenarios(options.recordings, cache=options.cache).training
    steps, repeats = (24, 2) if options.quick else (48, 5)
    sizes = [256] if options.quick else [16, 64, 256, 1024]
    rows = [vectorised(scenario, n, steps, repeats) for n in sizes]
    rows += [single(scenario, 5 * steps, repeats), whole(scenario, 256, repeats)]
    for row in rows:
        print(row, flush=True)
    command = "OMP_NUM_THREADS=1 python benchmarks/selection_env.py RECORDINGS"
    name = "selection_env-quick" if options.quick else "selection_env"
    write_result(name, rows, command=command + " --quick" * options.quick)


if __name__ == "__main__":
    main()
