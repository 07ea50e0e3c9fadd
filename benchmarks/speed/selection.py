"""How fast the selection environment picks, and selectors choose among very many candidates.

The environment is the task of phones, played with random rankings on one core. A choice of one
episode is hundreds of calls of NumPy on some numbers each: a third of its time are the jobs that
are sent, a third is the observation, 23 numbers of each candidate.

Run it with: OMP_NUM_THREADS=1 python benchmarks/speed/selection.py [--quick]
"""

import argparse
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np

from fedstale.agents import AgentSelector, tasks
from fedstale.agents.env.gym_env import N_MAX
from fedstale.agents.evaluation import episode_metrics
from fedstale.agents.policy.scorer import by_heuristic
from fedstale.strategies.selection import ExpectedUtility, Random, Selector
from fedstale.strategies.types import Candidates

sys.path.append(str(Path(__file__).parents[1]))
from lab.results import spread, write_result

K = 100
TASK = "fedstale/Selection-phones-v1"
Row = dict[str, object]


def played(n_envs: int, n_steps: int, repeats: int, *, baseline: bool) -> Row:
    """Return choices per second of episodes at once, the drawing of windows included."""
    rng, rates = np.random.default_rng(0), []
    options = {"baseline": baseline, "action": "ranking"}
    one = gymnasium.make(TASK, **options) if n_envs == 1 else None
    env = one or gymnasium.make_vec(TASK, n_envs, **options)
    env.reset(seed=0)
    rankings = rng.permuted(np.tile(np.arange(N_MAX), (n_envs, 1)), axis=1)
    for _ in range(repeats):
        begin = time.process_time()
        for _ in range(n_steps):
            actions = rng.permuted(rankings, axis=1)
            over = env.step(actions if one is None else actions[0])[2]
            if one is not None and over:
                one.reset()
        rates.append(n_envs * n_steps / (time.process_time() - begin))
    what = {"what": "choices per second", "episodes": n_envs, "baseline": baseline}
    return {**what, **spread(rates)}


def whole(n: int, repeats: int) -> Row:
    """Return picks per second of whole rounds, as evaluation plays them."""
    scenario = tasks.scenario(TASK)
    episodes, simulator = scenario.draw(n, np.random.default_rng(0)), scenario.simulator(n)
    rates = []
    for seed in range(repeats):
        begin = time.process_time()
        table = episode_metrics(simulator, episodes, by_heuristic, seed=seed)
        rates.append(float(table["sent"].sum()) / (time.process_time() - begin))
    return {"what": "picks per second of whole rounds", "episodes": n, **spread(rates)}


def fleet(n: int) -> Candidates:
    """Return n candidates of which most things are known of nine in ten."""
    rng = np.random.default_rng(0)
    picked = rng.integers(0, 20, n)
    finished = rng.binomial(picked, 0.7)
    known = rng.random(n) < 0.9

    def some(values: np.ndarray) -> np.ndarray:
        return np.where(known, values, np.nan)

    return Candidates.of(
        np.arange(n),
        forecast_p_finish=some(rng.random(n)),
        forecast_p_available=some(rng.random(n)),
        forecast_duration_s=some(rng.lognormal(6, 1, n)),
        forecast_at=some(rng.uniform(0, 9e4, n)),
        duration_s=some(rng.lognormal(6, 1, n)),
        loss=some(rng.lognormal(0, 0.5, n)),
        examples=some(rng.lognormal(5, 1, n)),
        staleness=some(rng.integers(0, 9, n)),
        last_version=some(rng.integers(0, 90, n)),
        picked_at=some(rng.uniform(0, 9e4, n)),
        expected_finishes=0.7 * picked,
        times_picked=picked,
        times_finished=finished,
        times_failed=picked - finished,
    )


def milliseconds(selector: Selector, nodes: Candidates, repeats: int) -> list[float]:
    """Return how long each of some selections took; columns are gathered anew each time."""
    rng = np.random.default_rng(1)
    everyone = np.arange(len(nodes))
    taken = []
    for _ in range(repeats):
        fresh = nodes.take(everyone)
        begin = time.perf_counter()
        selector.select(fresh, K, 1e5, rng)
        taken.append(1e3 * (time.perf_counter() - begin))
    return taken


def environment(*, quick: bool) -> list[Row]:
    """Return how fast episodes are played."""
    steps, repeats = (24, 2) if quick else (48, 5)
    sizes = [1, 256] if quick else [1, 64, 256, 1024]
    # Of few at a time more steps: the rule plays hundreds of windows ahead at once.
    rows = [
        played(n, steps * min(max(1, 512 // n), 20), repeats, baseline=baseline)
        for n in sizes
        for baseline in (False, True)
    ]
    return [*rows, whole(256, repeats)]


def scale(*, quick: bool) -> list[Row]:
    """Return how long selectors take."""
    rows: list[Row] = []
    for n in (100, 10_000, 100_000) if quick else (100, 10_000, 100_000, 1_000_000):
        nodes = fleet(n)
        for selector in (AgentSelector(), ExpectedUtility(), Random()):
            taken = milliseconds(selector, nodes, 5 if quick else 20)
            found = {"median": float(np.median(taken)), "min": min(taken), "max": max(taken)}
            row: Row = {"what": f"ms to choose {K}, {type(selector).__name__}", "candidates": n}
            row |= {name: round(x, 2) for name, x in found.items()}
            rows.append(row | {"repeats": len(taken)})
    return rows


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps and candidates")
    options = parser.parse_args()
    found = {
        "selection_env": environment(quick=options.quick),
        "selection_scale": scale(quick=options.quick),
    }
    command = "OMP_NUM_THREADS=1 python benchmarks/speed/selection.py"
    for name, rows in found.items():
        print(*rows, sep="\n", flush=True)
        write_result(name, rows, command=command, quick=options.quick)


if __name__ == "__main__":
    main()
