"""Does Gap-Aware beat age-based weights where its paper says so: asynchronous SGD on digits.

Many workers compute one gradient each on a network of 64-32-10 units, from the version that they
last received; the server has momentum 0.9 and a rate of at most 0.1. The rate is scheduled, as the
unit C of the gap supposes (C keeps the size of a step at the largest rate, so the penalty fades as
the rate falls), or constant, where that property never acts. A gradient takes a log-normal time
with sigma 0.5, so the mean staleness is the number of workers less one. Pixels are standardised.
Weightings and server optimizer are those of `fedstale.strategies`; only the loop is written out
here, without any device or message.

Run it with: python benchmarks/papers/staleness.py [--quick]
"""

import argparse
import heapq
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from fedstale.strategies.server_optimizer import Momentum, Rate
from fedstale.strategies.types import Array
from fedstale.strategies.weighting import (
    ByAge,
    ClientUpdate,
    DirectionalGap,
    Gap,
    Weighting,
    constant,
    polynomial,
    staleness_aware,
)

sys.path.append(str(Path(__file__).parents[1]))
from lab.network import gradient, initial, scores
from lab.results import write_result

UPDATES = {16: 500, 64: 2000, 128: 2000}
BATCH = 32
RATE = 0.1
SPREAD = 0.5
"""Standard deviation of the logarithm of a gradient's time."""


def scheduled(n_updates: int) -> Rate:
    """Return a rate that warms up over 5% of the steps and falls to a tenth at 50% and at 75%.

    Args:
        n_updates: steps in all; the first is number 1.
    """

    def rate(step: int) -> float:
        warm_up = min(step / (0.05 * n_updates), 1.0)
        return RATE * warm_up * 0.1 ** ((step > 0.5 * n_updates) + (step > 0.75 * n_updates))

    return rate


def constant_rate(n_updates: int) -> Rate:
    """Return the rate that never changes."""
    return RATE


RATES: dict[str, Callable[[int], Rate]] = {
    "staleness_scheduled": scheduled,
    "staleness": constant_rate,
}
"""What the server's rate does, by the name of the result."""

WEIGHTINGS: dict[str, Callable[[], Weighting]] = {
    "gap-aware": lambda: Gap(decay=0.999),
    "directional gap": lambda: DirectionalGap(decay=0.999),
    "staleness-aware": lambda: ByAge(staleness_aware()),
    "1/sqrt": lambda: ByAge(polynomial(0.5)),
    "none": lambda: ByAge(constant()),
}


def run(
    weighting: Weighting, n_workers: int, n_updates: int, seed: int, rate: Rate = RATE
) -> float:
    """Return the test accuracy after asynchronous SGD.

    Args:
        weighting: of stale gradients.
        n_workers: workers that compute at the same time.
        n_updates: gradients to apply.
        seed: of the split, the initial weights, the batches and the delays.
        rate: of the server, a number or a function of the number of the step.
    """
    rng = np.random.default_rng(seed)
    (x, y), (x_test, y_test) = _data(rng)
    model = initial(
        lambda n, shape: (
            rng.normal(0.0, np.sqrt(2 / n), shape) if len(shape) > 1 else np.zeros(shape)
        )
    )
    optimizer = Momentum(rate, beta=0.9)
    order = [(float(rng.lognormal(0.0, SPREAD)), worker) for worker in range(n_workers)]
    heapq.heapify(order)
    received = [(0, model)] * n_workers
    for version in range(n_updates):
        now, worker = order[0]
        heapq.heapreplace(order, (now + float(rng.lognormal(0.0, SPREAD)), worker))
        base_version, base = received[worker]
        batch = rng.integers(len(y), size=BATCH)
        delta = {k: -g for k, g in gradient(base, x[batch], y[batch])[1].items()}
        weighting.weigh(
            ClientUpdate(delta=delta, base=base, current=model, staleness=version - base_version)
        )
        after = {name: array.copy() for name, array in model.items()}
        optimizer.step(after, delta)
        weighting.observe(model, after, optimizer.rate)
        model = after
        received[worker] = version + 1, model
    return float((scores(model, x_test)[1].argmax(1) == y_test).mean())


def _data(rng: np.random.Generator) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    digits = load_digits()
    x, y = digits.data / 16.0, digits.target
    order = rng.permutation(len(y))
    test, train = order[:360], order[360:]
    # Some pixels at the edge are always 0: their spread is bounded from below.
    x = (x - x[train].mean(0)) / (x[train].std(0) + 0.01)
    return (x[train], y[train]), (x[test], y[test])


def main() -> None:
    """Measure, print the table, and write it with the other results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three seeds instead of ten")
    quick = parser.parse_args().quick
    n_seeds = 3 if quick else 10
    for result, rate_over in RATES.items():
        rows = []
        print(result)
        for n_workers, n_updates in UPDATES.items():
            rate = rate_over(n_updates)
            for name, weighting in WEIGHTINGS.items():
                by_seed = [
                    run(weighting(), n_workers, n_updates, seed, rate) for seed in range(n_seeds)
                ]
                half = 1.96 * np.std(by_seed, ddof=1) / np.sqrt(n_seeds)
                rows.append(
                    {
                        "workers": n_workers,
                        "updates": n_updates,
                        "weighting": name,
                        "accuracy": float(np.mean(by_seed)),
                        "half_interval_95": float(half),
                        "by_seed": by_seed,
                    }
                )
                low, high = min(by_seed), max(by_seed)
                print(f"{n_workers:4d} {name:16s} {np.mean(by_seed):.3f}  {low:.3f}..{high:.3f}")
        write_result(result, rows, command="python benchmarks/papers/staleness.py", quick=quick)


if __name__ == "__main__":
    main()
