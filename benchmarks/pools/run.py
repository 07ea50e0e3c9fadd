"""What codistillation brings pools of sites with different networks, beside simpler ways.

Twelve synthetic sites in three pools train `examples/pools` for 20 minutes of virtual time, all the
time but for outages. A job takes 20 steps on 16 images of the site, and under codistillation on
16 public ones as well, which costs twice the work. Digits are 1,797, of which the sites have three
fifths; of Fashion-MNIST they are 6,000. Labels are uneven among the sites of a pool (Dirichlet,
0.3), and pools are alike or have different classes (Dirichlet, 0.1).

Each arm has the best of four settings, by its mean accuracy on three seeds that are not used again:
of its networks, or of the mean that they predict. A setting is the learning rate, or under
codistillation, at the third of these rates, the share of the predictions in the loss and the
versions between exchanges. What is reported comes from five other seeds: accuracies on images of
all classes that no site has, as means of the last five versions, paired with codistillation.

Run it with:
python benchmarks/pools/run.py [FOLDER OF FASHION-MNIST] [--keep FILE] [--jobs N] [--quick]
"""

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedstale

sys.path.append(str(Path(__file__).parents[1]))
from lab.curves import difference
from lab.kept import Kept
from lab.results import write_result
from sites.run import SEEDS, N, Run, measured

APP = Path(__file__).parents[2] / "examples" / "pools"
UNTIL, LAST, PUBLIC, FEW = "20m", 5, 300, 30
TUNING_SEEDS, DIGITS = (101, 102, 103), "digits"
POOLS = {"alike": 100.0, "of different classes": 0.1}
"""Concentration of the classes between pools."""
Config = Mapping[str, float | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A way to train, before the best of its settings is chosen."""

    data: str
    pools: str
    method: str
    tries: tuple[Config, ...]
    public: int = PUBLIC


TOLD, ALONE, MEAN = "codistillation", "each pool alone", "mean of what these predict"
RATES = {DIGITS: (0.1, 0.2, 0.4, 0.8), "Fashion-MNIST": (0.025, 0.05, 0.1, 0.2)}
"""To choose from; the third is that of codistillation."""


def name_of(data: str, pools: str, method: str, public: int) -> str:
    """Return the name of an arm."""
    return f"{data}, {pools}, {method}, {public}"


def arms(data: str) -> dict[str, Arm]:
    """Return the arms of a data set, by name."""
    rates = RATES[data]
    told = tuple(
        {"distillation": share, "exchange-every": every, "learning-rate": rates[2]}
        for share in (0.5, 0.75)
        for every in (2, 8)
    )
    apart = tuple({"learning-rate": rate, "exchange-every": 0} for rate in rates)
    small = tuple({**each, "pools": "small"} for each in apart)
    methods = {TOLD: told, ALONE: apart, "small for all": small}
    made = [
        Arm(data=data, pools=each, method=method, tries=tries)
        for each in POOLS
        for method, tries in methods.items()
    ]
    if data == DIGITS:
        made += (Arm(data=data, pools=each, method=TOLD, tries=told, public=FEW) for each in POOLS)
    return {name_of(data, arm.pools, arm.method, arm.public): arm for arm in made}


ARMS = {name: arm for data in RATES for name, arm in arms(data).items()}


def run(of: Run, folder: str) -> dict[str, float]:
    """Return what one run reached: accuracies, versions, and megabytes a job.

    Args:
        of: arm, number of the setting, and seed.
        folder: of Fashion-MNIST.
    """
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    name, i, seed = of
    arm = ARMS[name]
    config = {
        **arm.tries[int(i)],
        "data": "" if arm.data == DIGITS else folder,
        "pool-alpha": POOLS[arm.pools],
        "public": arm.public,
        "num-server-rounds": 10**6,
        "seed": seed,
    }
    found = fedstale.simulate(
        APP,
        traces=f"synthetic:{N}@sites",
        until=UNTIL,
        seed=seed,
        run_config=config,
        executor="inline",
        workers=1,
        progress=False,
    )
    measured = found.metrics[found.metrics["source"] == "server"].sort_values("version")
    last = measured.groupby("name")["value"].apply(lambda values: float(values[-LAST:].mean()))
    jobs = found.jobs[found.jobs["aggregated_version"] > 0]
    n_bytes = jobs["downloaded_bytes"] + jobs["uploaded_bytes"]
    about = {"versions": int(measured["version"].max()), "megabytes": float(n_bytes.mean()) / 1e6}
    return {**last.to_dict(), **about}


def rows_of(
    best: Mapping[str, float], means: Mapping[str, float], kept: Kept, seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """Return a row for each arm, and the mean of predictions, paired with codistillation.

    Args:
        best: number of each arm's setting.
        means: that of each arm whose predictions are averaged, for the mean.
        kept: what the runs reached.
        seeds: that are reported.
    """
    rows = []
    for name in best:
        arm = ARMS[name]
        base = name_of(arm.data, arm.pools, TOLD, PUBLIC)
        told = [kept[[base, best[base], seed]]["accuracy"] for seed in seeds]
        for method, key, chosen in (
            (arm.method, "accuracy", best),
            (MEAN, "ensemble_accuracy", means),
        ):
            if name not in chosen:
                continue
            setting = arm.tries[int(chosen[name])]
            each = [kept[[name, chosen[name], seed]] for seed in seeds]
            reached = [found[key] for found in each]
            row = {
                "data": arm.data,
                "pools": arm.pools,
                "method": method,
                "public": arm.public,
                "setting": {k: x for k, x in setting.items() if not isinstance(x, str)},
                "seeds": list(seeds),
                "accuracy": float(np.mean(reached)),
                "difference": difference(told, reached),
            }
            shown = () if method == MEAN else each[0].keys() - {"accuracy", "ensemble_accuracy"}
            means_of = {k: float(np.mean([found[k] for found in each])) for k in sorted(shown)}
            rows.append(row | means_of)
    return rows


def main() -> None:
    """Choose settings, measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default="", help="of the files of Fashion-MNIST")
    parser.add_argument("--keep", type=Path, help="file of runs; those in it are not run again")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--quick", action="store_true", help="two arms, a setting, three seeds")
    args = parser.parse_args()
    kept, rows, seeds = Kept(args.keep), [], SEEDS[:3] if args.quick else SEEDS
    for data in RATES:
        tries: dict[str, Sequence[float]]
        tries = {name: range(len(arm.tries)) for name, arm in arms(data).items()}
        if args.quick:
            tries = {name: [2] for name in list(tries)[:2]}
        if data != DIGITS and not args.folder:
            print(f"{data} is left out: no folder of its files was given")
            continue
        choose = partial(
            measured,
            partial(run, folder=args.folder),
            tuning_seeds=TUNING_SEEDS,
            kept=kept,
            jobs=args.jobs,
            seeds=seeds,
        )
        best = choose(rates=tries, loss=lambda found: -float(found["accuracy"]))
        # What pools predict together may want another rate than what each of them predicts.
        alone = {name: some for name, some in tries.items() if ARMS[name].method == ALONE}
        means = choose(rates=alone, loss=lambda found: -float(found["ensemble_accuracy"]))
        rows += rows_of(best, means, kept, seeds)
    for row in rows:
        print(row)
    command = "python benchmarks/pools/run.py FOLDER"
    write_result("pools", rows, command=command, quick=args.quick)


if __name__ == "__main__":
    main()
