"""How fast the selection environment picks, and selectors choose among very many candidates.

The environment plays recorded phones with random rankings, on one core; half of what a step costs
is the observation, 23 numbers of each candidate. Without RECORDINGS only selectors are measured.

Run it with: OMP_NUM_THREADS=1 python benchmarks/speed/selection.py [RECORDINGS] [--quick]
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from fedstale.agents import AgentSelector
from fedstale.agents.env.gym_env import N_MAX, SelectionEnv, VectorSelectionEnv
from fedstale.agents.env.scenario import Scenario
from fedstale.agents.evaluation import episode_metrics
from fedstale.agents.policy.scorer import by_heuristic
from fedstale.strategies.selection import ExpectedUtility, Random, Selector
from fedstale.strategies.types import Candidates

sys.path.append(str(Path(__file__).parents[1]))
from lab.results import spread, write_result
from lab.scenarios import recorded_scenarios

K = 100
Row = dict[str, object]


def vectorised(scenario: Scenario, n_envs: int, n_steps: int, repeats: int) -> dict[str, object]:
    """Return picks per second of many episodes at once, their drawing and baseline included."""
    env, rng = VectorSelectionEnv(scenario, n_envs, action="ranking"), np.random.default_rng(0)
    env.reset(seed=0)
    rankings = rng.permuted(np.tile(np.arange(N_MAX), (n_envs, 1)), axis=1)
    rates, sent, rounds = [], 0.0, 0
    for _ in range(repeats):
        begin, before = time.process_time(), sent
        for _ in range(n_steps):
            infos = env.step(rng.permutation(rankings))[4]
            sent, rounds = sent + infos["sent"].sum(), rounds + n_envs
        rates.append((sent - before) / (time.process_time() - begin))
    what = {"what": "vectorised picks per second", "episodes": n_envs, "candidates": N_MAX}
    return {**what, "picks per round": round(sent / rounds, 1), **spread(rates)}


def single(scenario: Scenario, n_steps: int, repeats: int) -> dict[str, object]:
    """Return picks per second of one episode at a time."""
    env, rng = SelectionEnv(scenario, action="ranking"), np.random.default_rng(0)
    env.reset(seed=0)
    rates = []
    for _ in range(repeats):
        begin, sent = time.process_time(), 0.0
        for _ in range(n_steps):
            _, _, over, _, info = env.step(rng.permutation(N_MAX))
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


def environment(recordings: Path, cache: Path | None, *, quick: bool) -> list[Row]:
    """Return how fast episodes are played."""
    scenario = recorded_scenarios(recordings, cache=cache).training
    steps, repeats = (24, 2) if quick else (48, 5)
    sizes = [256] if quick else [16, 64, 256, 1024]
    rows = [vectorised(scenario, n, steps, repeats) for n in sizes]
    return [*rows, single(scenario, 5 * steps, repeats), whole(scenario, 256, repeats)]


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
    parser.add_argument("recordings", type=Path, nargs="?")
    parser.add_argument("--quick", action="store_true", help="fewer steps and candidates")
    parser.add_argument("--cache", type=Path, help="folder to keep forecasts in")
    options = parser.parse_args()
    found = {"selection_scale": scale(quick=options.quick)}
    command = "OMP_NUM_THREADS=1 python benchmarks/speed/selection.py"
    if options.recordings is not None:
        command += " RECORDINGS"
        found["selection_env"] = environment(options.recordings, options.cache, quick=options.quick)
    command += " --quick" * options.quick
    for name, rows in found.items():
        print(*rows, sep="\n", flush=True)
        write_result(name + "-quick" * options.quick, rows, command=command)


if __name__ == "__main__":
    main()
