"""How long selectors take to choose among very many candidates.

Run it with: python benchmarks/selection_scale.py [--quick]
"""

import argparse
import time

import numpy as np
from results_file import write_result

from fedstale.agents import AgentSelector
from fedstale.strategies.selection import ExpectedUtility, Random, Selector
from fedstale.strategies.types import Candidates

K = 100


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


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="up to 100,000 candidates")
    quick = parser.parse_args().quick
    rows = []
    for n in (100, 10_000, 100_000) if quick else (100, 10_000, 100_000, 1_000_000):
        nodes = fleet(n)
        selectors: dict[str, Selector] = {
            "AgentSelector": AgentSelector(),
            "ExpectedUtility": ExpectedUtility(),
            "Random": Random(),
        }
        for name, selector in selectors.items():
            taken = milliseconds(selector, nodes, 5 if quick else 20)
            rows.append(
                {
                    "what": f"ms to choose {K}, {name}",
                    "candidates": n,
                    "median": round(float(np.median(taken)), 2),
                    "min": round(min(taken), 2),
                    "max": round(max(taken), 2),
                    "repeats": len(taken),
                }
            )
            print(rows[-1], flush=True)
    name = "selection_scale-quick" if quick else "selection_scale"
    write_result(name, rows, command="python benchmarks/selection_scale.py" + " --quick" * quick)


if __name__ == "__main__":
    main()
