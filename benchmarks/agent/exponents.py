"""Tune the exponents of `ExpectedUtility` on real training, on devices that agents learn from.

Each run trains `digits` in a random setting of `training.py`, part `learn`, and picks by random
exponents. Of the logarithm of the device-hours that it needs, what the setting accounts for is
taken away; what is left is fitted by a quadratic function of the logarithms of the exponents. The
result is its least point within what was drawn, and what it promises against other exponents.

Run it with: python benchmarks/agent/exponents.py RECORDINGS --keep RUNS --jobs 2
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import combinations_with_replacement, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from fedstale.strategies.selection import BALANCED, ExpectedUtility, Exponents, Random, Selector
from fedstale.traces import Array, Index

sys.path.append(str(Path(__file__).parents[1]))
from agent.training import Run, place, trained_by
from lab.curves import final
from lab.kept import Kept, play_missing
from lab.results import write_result
from lab.training import FLEETS, SCHEDULES, curves, judged

SETTINGS = [
    Run(
        part="learn",
        regime=regime,
        app="digits",
        fleet=fleet,
        schedule=list(SCHEDULES)[(i + seed) % 2],
        alpha=alpha,
        lies="",
        forecasts=True,
        seed=seed,
        selector="",
        agent="",
    )
    for fleet, regime, seed in product(FLEETS, ("published", "choice", "long"), (401, 402, 403))
    for i, alpha in enumerate((0.1, 0.3, 1.0))
]
MIDDLE = Exponents(chance=3.0, utility=0.6, duration=1.2, picked=1.0, temperature=0.15)
SPREAD = Exponents(chance=0.5, utility=0.7, duration=0.4, picked=0.6, temperature=0.7)
"""Standard deviations of logarithms."""
NAMES = ("chance", "utility", "duration", "picked", "temperature")
TARGETS = (0.9, 1.0)
"""Shares of the final accuracy of random selection in the same setting."""


class Least(NamedTuple):
    """Where a fitted function is least."""

    exponents: dict[str, float]
    """There."""
    against: float
    """Device-hours there, in proportion to those at other exponents, as the function says."""
    error: float
    """Standard deviation of a run's logarithm around the function."""


def drawn(rng: np.random.Generator) -> dict[str, float]:
    """Return random exponents around the middle."""
    return {
        name: round(float(getattr(MIDDLE, name) * np.exp(z * getattr(SPREAD, name))), 4)
        for name, z in zip(NAMES, np.clip(rng.normal(size=len(NAMES)), -2.0, 2.0), strict=True)
    }


def terms(exponents: Sequence[dict[str, float]]) -> Array:
    """Return linear and quadratic terms of logarithms, in standard deviations of the draw."""
    z = np.array(
        [
            [np.log(one[name] / getattr(MIDDLE, name)) / getattr(SPREAD, name) for name in NAMES]
            for one in exponents
        ]
    )
    pairs = combinations_with_replacement(range(len(NAMES)), 2)
    return np.column_stack([z, *(z[:, i] * z[:, j] for i, j in pairs)])


def least(
    settings: Index,
    exponents: Sequence[dict[str, float]],
    hours: Array,
    other: dict[str, float],
) -> Least:
    """Fit the function and return its least point within two standard deviations of the draw.

    Args:
        settings: of each run.
        exponents: of each run.
        hours: device-hours that each run needed.
        other: exponents to compare with.
    """
    _, own = np.unique(settings, return_inverse=True)
    x, y = terms(exponents), np.log(hours)
    for values in (*x.T, y):
        values[:] = values - (np.bincount(own, values) / np.bincount(own))[own]
    # A little of the ridge keeps directions that the runs say nothing of where they are.
    weights = np.linalg.solve(x.T @ x + 2.0 * np.eye(x.shape[1]), x.T @ y)
    rng = np.random.default_rng(0)
    tried = [drawn(rng) for _ in range(20_000)]
    # Where little changes, the mean of the best stays in the middle.
    best = np.argsort(terms(tried) @ weights)[: len(tried) // 20]
    found = {name: float(np.exp(np.mean([np.log(tried[i][name]) for i in best]))) for name in NAMES}
    ratio = np.exp(((terms([found]) - terms([other])) @ weights)[0])
    return Least(found, float(ratio), float((y - x @ weights).std()))


def play(recordings: Path, run: Run, selector: Selector) -> dict[str, list[float]]:
    """Return the curves of a run, see `lab.training.curves`."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with threadpool_limits(1):
        return curves(trained_by(*place(recordings, run), run, selector))


def needed(
    recordings: Path, tried: Sequence[tuple[int, Selector]], *, kept: Kept, jobs: int
) -> Array:
    """Return the device-hours that selectors need to each target, shape (n, 2).

    A run that never gets there counts with all of its hours.

    Args:
        recordings: folder of the published files.
        tried: places in `SETTINGS`, and who picks there.
        kept: runs that were played.
        jobs: processes.
    """
    wanted = [*tried, *((i, Random()) for i in sorted({i for i, _ in tried}))]
    keys = [[asdict(SETTINGS[i]), selector.described()] for i, selector in wanted]
    tasks = [
        (key, partial(play, recordings, SETTINGS[i], selector))
        for key, (i, selector) in sorted(
            zip(keys, wanted, strict=True), key=lambda each: each[1][0]
        )
    ]
    play_missing(kept, tasks, jobs)
    random = {
        i: final(np.array(kept[key]["accuracy"]))
        for key, (i, _) in zip(keys[len(tried) :], wanted[len(tried) :], strict=True)
    }
    return np.array(
        [
            [judged(kept[key], share * random[i])["device_hours"] for share in TARGETS]
            for key, (i, _) in zip(keys, tried, strict=False)
        ]
    )


def main() -> None:
    """Train, fit, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--keep", type=Path, help="file of runs; those in it are not run again")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--draws", type=int, default=8, help="random exponents in each setting")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    places = np.repeat(np.arange(len(SETTINGS)), options.draws)
    exponents = [drawn(rng) for _ in places]
    tried = [
        (int(place), ExpectedUtility(Exponents(**one)))
        for place, one in zip(places, exponents, strict=True)
    ]
    hours = needed(options.recordings, tried, kept=Kept(options.keep), jobs=options.jobs)
    shipped = {name: getattr(BALANCED, name) for name in NAMES}
    found = least(places, exponents, np.exp(np.log(hours).mean(axis=1)), shipped)
    row = {"runs": len(tried), "settings": len(SETTINGS), **found._asdict(), "other": shipped}
    print(row)
    command = "python benchmarks/agent/exponents.py RECORDINGS --keep RUNS"
    print(write_result("agent_exponents", [row], command=command))


if __name__ == "__main__":
    main()
