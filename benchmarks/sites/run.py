"""What adapters of different ranks reach on a dozen sites, merged as products or as padded factors.

Twelve synthetic sites, whose speeds are 3, 6, 9 and 12 work units a second, train adapters of the
app `letters` for a quarter of an hour, all the time but for outages. Only the amount of
arithmetic is smaller than the time that it stands for: the base has 0.1 million weights, and a job
of 10 steps of AdamW on 2 examples costs what the app's own takes, 156 work units (26 s on a site of
6 units a second). Adapters of rank 8 stand for 25 MB. The base was trained on the first half of the
plays; sites have the second. Ranks are dealt to sites in turn, whatever their speeds.

Each has the server's rate, of four, with the lowest mean loss in the end on two seeds that are not
used again. What is reported comes from five other seeds, paired with mixed ranks merged as
products: the loss in nats a character on held-out text of all sites.

Run it with: python benchmarks/sites/run.py PLAYS [--keep FILE] [--jobs N] [--quick]
"""

import argparse
import gzip
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Message
from flwr.app.user_config import UserConfig
from flwr.clientapp import ClientApp
from safetensors.torch import save_file
from threadpoolctl import threadpool_limits

from fedstale.apps import characters
from fedstale.contrib.sites import Adapters
from fedstale.simulation import Costs, RunEnded, TraceGrid
from fedstale.simulation.flower_app import FlowerApp
from fedstale.strategies import FedBuff, Stage
from fedstale.traces import TraceSet

sys.path.append(str(Path(__file__).parents[1]))
from lab.apps import folder_of
from lab.curves import difference
from lab.kept import Kept, play_missing
from lab.results import write_result
from sites.padded import Padded

N, IN_BUFFER, UNTIL_S, TIMEOUT_S = 12, 4, 900.0, 7200.0
SEEDS, TUNING_SEEDS, RATES = (1, 2, 3, 4, 5), (101, 102), (0.25, 0.5, 1.0, 2.0)
MODEL = {"width": 64, "layers": 2, "local-steps": 10, "batch-size": 2, "learning-rate": 0.003}
WORK = 156.0
"""Work units of a job: 400 examples of 0.39 units, as the app declares."""
BYTES_OF_A_RANK = 3_125_000
"""That adapters stand for, by rank."""
BASE_STEPS, TEST_EVERY = 1000, 8
QUICK = 0.125
"""Share of the time that a run of the quick form lasts."""
Run = tuple[str, float, int]
"""Arm, rate and seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Which ranks sites have, and how their adapters are merged."""

    ranks: str
    stage: Stage


ARMS = {
    "2, 4 and 8, as products": Arm(ranks="2,4,8", stage=Adapters(8)),
    "2, 4 and 8, padded": Arm(ranks="2,4,8", stage=Padded()),
    "all 2": Arm(ranks="2", stage=Adapters(2)),
    "all 8": Arm(ranks="8", stage=Adapters(8)),
}


def base_of(plays: Path, folder: Path) -> dict[str, str]:
    """Train a model on the first half of the plays.

    Args:
        plays: the text.
        folder: where the model is written, and the second half.

    Returns:
        The path of the second half as text, and that of the model as base.
    """
    half, base = folder / "second-half.txt", folder / "base.safetensors"
    read = gzip.decompress if plays.suffix == ".gz" else bytes
    speeches = read(plays.read_bytes()).decode().split("\n\n")
    middle = len(speeches) // 2
    half.write_text("\n\n".join(speeches[middle:]), encoding="utf-8")
    app = FlowerApp.find(folder_of("letters"))
    with app.importable():
        app.load_client()
        task = import_module("letters_app.task")
    network = task.Network(0, width=MODEL["width"], layers=MODEL["layers"])
    examples = characters.encode("\n\n".join(speeches[:middle]), task.LENGTH)
    optimizer = torch.optim.AdamW(network.parameters(), lr=MODEL["learning-rate"])
    rng = np.random.default_rng(0)
    for _ in range(BASE_STEPS):
        batch = torch.from_numpy(rng.integers(0, len(examples), 8))
        optimizer.zero_grad()
        characters.mean_loss(network, examples[batch]).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
    save_file(network.state_dict(), base)
    return {"text": str(half), "base": str(base)}


def sites(
    client: ClientApp,
    config: UserConfig,
    *,
    n_bytes: int,
    until_s: float,
    seed: int,
    traces: TraceSet | None = None,
    work: Callable[[Message], float] = lambda message: WORK,
) -> TraceGrid:
    """Return sites, each of whose jobs costs the same unless it is said otherwise.

    Args:
        client: of letters.
        config: its run config.
        n_bytes: that the model stands for.
        until_s: end of the run in s.
        seed: of what they draw.
        traces: of the sites; those that are generated by the seed if not given.
        work: returns the work units of a message.
    """
    return TraceGrid(
        TraceSet.synthetic(N, seed=seed, population="sites") if traces is None else traces,
        client,
        costs=Costs(model_bytes=n_bytes),
        seed=seed,
        run_config=config,
        until_s=until_s,
        work=work,
    )


def run(of: Run, text: str, base: str, share: float = 1.0) -> dict[str, float]:
    """Return what one run reached: the loss before and after, the jobs, and the GB of replies.

    Args:
        of: arm, rate and seed.
        text: path of the plays of the sites.
        base: path of the model that adapters are on.
        share: of the time, that it lasts.
    """
    torch.set_num_threads(1)
    name, rate, seed = of
    arm, app = ARMS[name], FlowerApp.find(folder_of("letters"))
    config = app.run_config({**MODEL, "base": base, "ranks": arm.ranks, "text": text, "seed": seed})
    with app.importable(), threadpool_limits(1):
        client, task = app.load_client(), import_module("letters_app.task")
        test = characters.encode(characters.held_out(text), task.LENGTH)[::TEST_EVERY]
        n_bytes = BYTES_OF_A_RANK * max(task.ranks(config))
        grid = sites(client, config, n_bytes=n_bytes, until_s=UNTIL_S * share, seed=seed)
        network = task.model(config, seed)
        before, _ = characters.evaluate(network, test)
        initial = ArrayRecord(network.state_dict())
        if isinstance(arm.stage, Adapters):
            initial = arm.stage.products(initial)
        strategy = FedBuff(N, IN_BUFFER, eta=rate, stages=[arm.stage], seed=seed)
        with grid.running(), suppress(RunEnded):
            strategy.start(grid, initial, 10**6, TIMEOUT_S)
        arrays = strategy.result.arrays
        if isinstance(arm.stage, Adapters):
            arrays = arm.stage.factors(arrays)
        network.load_state_dict(arrays.to_torch_state_dict())
        after, _ = characters.evaluate(network, test)
    jobs = grid.events().to_pandas()
    return {
        "before": before,
        "loss": after,
        "jobs": float((jobs["aggregated_version"] > 0).sum()),
        "gigabytes_up": float(jobs["uploaded_bytes"].sum()) / 1e9,
    }


def rows_of(best: Mapping[str, float], kept: Kept, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each arm, paired with the first.

    Args:
        best: rate of each.
        kept: what the runs reached.
        seeds: that are reported.
    """
    runs = {name: [kept[[name, rate, seed]] for seed in seeds] for name, rate in best.items()}
    first = [run["loss"] for run in next(iter(runs.values()))]
    return [
        {
            "ranks": name,
            "rate": best[name],
            "is_end": best[name] in (RATES[0], RATES[-1]),
            "seeds": list(seeds),
            **{key: float(np.mean([run[key] for run in each])) for key in each[0]},
            "difference": difference(first, [run["loss"] for run in each]),
        }
        for name, each in runs.items()
    ]


def measured(
    call: Callable[[Run], Any],
    rates: Mapping[str, Sequence[float]],
    *,
    tuning_seeds: Sequence[int],
    loss: Callable[[Any], float],
    kept: Kept,
    jobs: int,
    seeds: Sequence[int] = SEEDS,
) -> dict[str, float]:
    """Run each arm at its best rate on the seeds that are reported; return the rates.

    Args:
        call: returns what a run reached.
        rates: to choose from, by arm; of one there is nothing to choose.
        tuning_seeds: on which the rate with the lowest mean loss is chosen.
        loss: in the end of a run, of what it reached.
        kept: runs that need not be run again; those that are made are added.
        jobs: processes.
        seeds: that are reported.
    """

    def play_all(wanted: Sequence[Run]) -> None:
        play_missing(
            kept,
            ((list(of), partial(call, of)) for of in wanted),
            jobs,
            each=lambda of, found: print(*of, round(loss(found), 4), flush=True),
        )

    def score(arm: str, rate: float) -> float:
        return float(np.mean([loss(kept[[arm, rate, seed]]) for seed in tuning_seeds]))

    several = {arm: some for arm, some in rates.items() if len(some) > 1}
    play_all(
        [(arm, rate, s) for s in tuning_seeds for arm, some in several.items() for rate in some]
    )
    best = {arm: some[0] for arm, some in rates.items()}
    best |= {arm: min(some, key=partial(score, arm)) for arm, some in several.items()}
    play_all([(arm, best[arm], seed) for seed in seeds for arm in rates])
    return best


def quick_of(rates: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """Return two arms of a benchmark, at one rate each: its quick form."""
    return {arm: some[len(some) // 2 :][:1] for arm, some in list(rates.items())[:2]}


def given(about: str | None, *paths: str) -> tuple[list[Path], Kept, int, bool]:
    """Return what the command line says.

    Returns:
        Paths, those of the plays first; runs kept; processes; whether the quick form is asked for.
    """
    parser, named = argparse.ArgumentParser(description=about), ("plays", *paths)
    for name in named:
        parser.add_argument(name, type=Path)
    parser.add_argument("--keep", type=Path, help="file of runs; those in it are not run again")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--quick", action="store_true", help="two arms, a rate, less time")
    args = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    found = [getattr(args, name).resolve() for name in named]
    return found, Kept(args.keep), args.jobs, args.quick


def main() -> None:
    """Choose rates, measure, print, and write the results."""
    (plays,), kept, jobs, quick = given(__doc__)
    rates = dict.fromkeys(ARMS, RATES)
    seeds = SEEDS[:3] if quick else SEEDS
    with TemporaryDirectory() as folder:
        best = measured(
            partial(run, **base_of(plays, Path(folder)), share=QUICK if quick else 1.0),
            quick_of(rates) if quick else rates,
            tuning_seeds=TUNING_SEEDS,
            loss=itemgetter("loss"),
            kept=kept,
            jobs=jobs,
            seeds=seeds,
        )
    rows = rows_of(best, kept, seeds)
    for row in rows:
        print(row)
    command = "python benchmarks/sites/run.py PLAYS"
    write_result("site_adapters", rows, command=command, quick=quick)


if __name__ == "__main__":
    main()
