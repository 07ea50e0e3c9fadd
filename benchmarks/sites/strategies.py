"""Which strategy trains a transformer best on a dozen sites: buffers, rounds, and outer momentum.

Twelve synthetic sites, whose speeds are 3, 6, 9 and 12 work units a second, train the built-in app
`letters` for half an hour, all the time but for outages. Only the amount of arithmetic is smaller
than the time that it stands for: a model of 0.1 million weights takes 10 steps of AdamW on 2
examples, and a job costs what the app's own takes, 156 work units (26 s on a site of 6 units a
second), with 25 MB each way.

Every method has the server's rate, of four, with the lowest loss in the end on a seed that is not
used again. What is reported comes from five other seeds, paired with FedBuff: the loss in nats a
character on held-out text of all sites, after half an hour and after as many jobs as the slowest
method merges by then. Jobs have equally many steps, so the latter is the loss at equal tokens;
under FedBuff all sites work all the time, so the former is its loss at equal device-hours.

Run it with: python benchmarks/sites/strategies.py PLAYS [--keep FILE] [--jobs N] [--quick]
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.app.user_config import UserConfig
from flwr.clientapp import ClientApp
from threadpoolctl import threadpool_limits

from fedstale.apps import characters
from fedstale.simulation import RunEnded, TraceGrid
from fedstale.simulation.flower_app import FlowerApp
from fedstale.strategies import FedAvg, FedBuff, StaleStrategy
from fedstale.strategies.server.runtime import Callback, Runtime
from fedstale.strategies.server_optimizer import SGD, Momentum, ServerOptimizer
from fedstale.strategies.types import ClientUpdate
from fedstale.strategies.weighting import ByAge, constant

sys.path.append(str(Path(__file__).parents[1]))
from lab.apps import folder_of
from lab.curves import difference
from lab.kept import Kept
from lab.results import write_result
from sites.outer import AlignedMomentum, DelayedNesterov
from sites.run import (
    IN_BUFFER,
    MODEL,
    QUICK,
    SEEDS,
    TEST_EVERY,
    TIMEOUT_S,
    N,
    Run,
    given,
    measured,
    quick_of,
    sites,
)

UNTIL_S, BYTES, READINGS, TUNING_SEED = 1800.0, 25_000_000, 20, 101


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A strategy before its rate is chosen."""

    make: Callable[[float], StaleStrategy]
    rates: Sequence[float]


def waiting(optimizer: Callable[[float], ServerOptimizer], rate: float) -> StaleStrategy:
    """Return rounds that wait for all sites."""
    return FedAvg(N, server_optimizer=optimizer(rate))


def merging(
    size: int,
    optimizer: Callable[[float], ServerOptimizer],
    rate: float,
    **parts: Any,
) -> StaleStrategy:
    """Return a step after every few updates, whose optimizer is another than FedBuff's."""
    return FedBuff(N, size, server_optimizer=optimizer(rate), **parts)


nesterov = partial(Momentum, nesterov=True)
ALIKE = ByAge(constant())
METHODS = {
    "FedBuff(12, 4)": Method(make=partial(merging, IN_BUFFER, SGD), rates=(0.25, 0.5, 0.7, 1.0)),
    "FedBuff(12, 4), Nesterov": Method(
        make=partial(merging, IN_BUFFER, nesterov), rates=(0.015, 0.03, 0.06, 0.12)
    ),
    "FedBuff(12, 4), Nesterov, aligned": Method(
        make=partial(merging, IN_BUFFER, partial(AlignedMomentum, nesterov=True)),
        rates=(0.015, 0.03, 0.06, 0.12),
    ),
    "each update, delayed Nesterov": Method(
        make=partial(merging, 1, DelayedNesterov, weighting=ALIKE), rates=(0.05, 0.1, 0.25, 0.5)
    ),
    "FedAvg(12)": Method(make=partial(waiting, SGD), rates=(0.5, 0.7, 1.0, 1.4)),
    "FedAvg(12), Nesterov: DiLoCo": Method(
        make=partial(waiting, nesterov), rates=(0.06, 0.12, 0.25, 0.5)
    ),
}


class Merged(Callback):
    """Counts the updates that have become a version."""

    n = 0

    def new_version(
        self, run: Runtime, version: int, arrays: ArrayRecord, updates: Sequence[ClientUpdate]
    ) -> None:
        """Count those of one version."""
        self.n += len(updates)


def run(of: Run, text: str, until_s: float) -> list[list[float]]:
    """Return what one run reached; as `curve`.

    Args:
        of: method, rate and seed.
        text: path of the plays.
        until_s: its end.
    """
    name, rate, seed = of
    grid_of = partial(sites, n_bytes=BYTES, until_s=until_s, seed=seed)
    return curve(METHODS[name].make(rate), seed, text, grid_of, until_s)


def curve(
    strategy: StaleStrategy,
    seed: int,
    text: str,
    grid_of: Callable[[ClientApp, UserConfig], TraceGrid],
    until_s: float,
    *,
    model: Mapping[str, Any] = MODEL,
) -> list[list[float]]:
    """Return what a strategy reached: at each reading the instant in s, the jobs, and the loss.

    Args:
        strategy: how.
        seed: of the strategy and of what sites draw.
        text: path of the plays.
        grid_of: returns the grid, whose run ends at `until_s`, for a ClientApp and a run config.
        until_s: instant in s; there are `READINGS` until then.
        model: what the app's run config says of the model and of jobs.
    """
    torch.set_num_threads(1)
    app = FlowerApp.find(folder_of("letters"))
    config = app.run_config({**model, "text": text, "seed": seed})
    with app.importable(), threadpool_limits(1):
        client, task = app.load_client(), import_module("letters_app.task")
        test = characters.encode(characters.held_out(text), task.LENGTH)[::TEST_EVERY]
        grid = grid_of(client, config)
        network, merged = task.model(config, seed), Merged()
        strategy.seed = seed
        grid.runtime.add(merged)
        found: list[list[float]] = []
        last: list[tuple[float, int, ArrayRecord]] = []

        def read() -> None:
            instant, jobs, arrays = last.pop()
            network.load_state_dict(arrays.to_torch_state_dict())
            found.append([instant, jobs, characters.evaluate(network, test)[0]])

        def evaluate(version: int, arrays: ArrayRecord) -> None:
            last[:] = [(grid.now(), merged.n, arrays)]
            if grid.now() >= until_s * len(found) / READINGS:
                read()

        initial = ArrayRecord(network.state_dict())
        with grid.running(), suppress(RunEnded):
            strategy.start(grid, initial, 10**6, TIMEOUT_S, evaluate_fn=evaluate)
        if last:
            read()
    return found


def loss_at(found: Sequence[Sequence[float]], column: int, where: float) -> float:
    """Return the loss at an instant (column 0) or after some jobs (column 1), between readings."""
    read = np.array(found)
    return float(np.interp(where, read[:, column], read[:, 2]))


def rows_of(
    best: Mapping[str, float], kept: Kept, seeds: Sequence[int], until_s: float
) -> list[dict[str, Any]]:
    """Return a row for each method, paired with the first.

    Args:
        best: rate of each method.
        kept: what the runs reached.
        seeds: that are reported.
        until_s: end of the runs.
    """
    runs = {name: [kept[[name, rate, seed]] for seed in seeds] for name, rate in best.items()}
    first = next(iter(runs.values()))
    same_jobs = min(run[-1][1] for each in runs.values() for run in each)
    rows = []
    for name, each in runs.items():
        rates = METHODS[name].rates
        row: dict[str, Any] = {
            "method": name,
            "rate": best[name],
            "is_end": best[name] in (rates[0], rates[-1]),
            "seeds": list(seeds),
            "jobs": float(np.mean([run[-1][1] for run in each])),
            "same_jobs": same_jobs,
        }
        for what, column, at in (("time", 0, until_s), ("jobs", 1, same_jobs)):
            losses, base = ([loss_at(run, column, at) for run in some] for some in (each, first))
            row[f"loss_at_same_{what}"] = float(np.mean(losses))
            row[f"difference_at_same_{what}"] = difference(base, losses)
        rows.append(row)
    return rows


def main() -> None:
    """Choose rates, measure, print, and write the results."""
    (plays,), kept, jobs, quick = given(__doc__)
    rates, seeds = {name: method.rates for name, method in METHODS.items()}, SEEDS
    until_s = UNTIL_S
    if quick:
        rates, seeds, until_s = quick_of(rates), SEEDS[:3], UNTIL_S * QUICK
    best = measured(
        partial(run, text=str(plays), until_s=until_s),
        rates,
        tuning_seeds=(TUNING_SEED,),
        loss=lambda found: float(found[-1][2]),
        kept=kept,
        jobs=jobs,
        seeds=seeds,
    )
    rows = rows_of(best, kept, seeds, until_s)
    for row in rows:
        print(row)
    command = "python benchmarks/sites/strategies.py PLAYS"
    write_result("site_strategies", rows, command=command, quick=quick)


if __name__ == "__main__":
    main()
