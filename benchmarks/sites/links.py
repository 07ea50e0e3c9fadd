"""Rounds or a buffer, where links are slow, replies are small, or sites go offline.

The transformer and the jobs of `strategies.py`, elsewhere: a model that stands for 250 MB on wired
links, the same with replies in int4, 25 MB over recorded LTE links, and sixteen recorded desktops
of a library, which are sites while nobody sits at them. Where replies are in int4, sites also train
on while their replies travel (examples/overlapping_upload.py), at the best of four rates on a seed
that is not used again. The others have the rate that was best in `strategies.py`. What is reported
comes from five other seeds, paired with the buffer: the loss in nats a character on held-out text
of all sites, after the same time.

Run it with: python benchmarks/sites/links.py PLAYS RECORDINGS [--keep FILE] [--jobs N] [--quick]
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app.user_config import UserConfig
from flwr.clientapp import ClientApp

from fedstale.client import CompressionMod
from fedstale.simulation import TraceGrid
from fedstale.strategies import Compression, FedAvg, FedBuff, Stage, StaleStrategy
from fedstale.strategies.server_optimizer import SGD
from fedstale.traces import TraceSet

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "examples")]
from overlapping_upload import Ahead, overlapping

from lab.curves import difference
from lab.kept import Kept
from lab.results import write_result
from lab.training import appearing
from sites.run import IN_BUFFER, QUICK, SEEDS, WORK, N, Run, given, measured, quick_of, sites
from sites.strategies import TUNING_SEED, curve, loss_at

RATES = {"buffer": (0.5,), "rounds": (1.0,), "buffer, overlapping": (0.35, 0.5, 0.7, 1.0)}
SPEED, WIRED = 6.0, 100e6
"""Of desktops, in work units and bits a second; no recording has either."""
WEEK_S, MORNING_S, HOURS_S, DESKTOPS = 7 * 24 * 3600.0, 10 * 3600.0, 4 * 3600.0, 16
"""The logs of desktops begin on a Monday."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a model is trained, for how long, and with which stages."""

    traces: Callable[[Path, int], TraceSet]
    """Takes the folder of recordings and a seed."""
    n_bytes: int
    until_s: float
    n: int = N
    stages: Sequence[Stage] = ()
    methods: Sequence[str] = ("buffer", "rounds")
    beside: str = ""
    """Place with which each method is compared, too."""


def over_lte(recordings: Path, seed: int) -> TraceSet:
    """Return generated sites with recorded LTE links."""
    own, links = TraceSet.synthetic(N, seed=seed, population="sites"), read(recordings / "mahimahi")
    lte = links.take(np.flatnonzero(links.device_ids.str.contains("LTE")))
    return TraceSet.compose(availability=own, compute=own, network=lte, n=N, seed=seed, days=1)


def desktops(recordings: Path, seed: int) -> TraceSet:
    """Return sixteen recorded desktops from a Monday's morning on, with recorded loads."""
    logs = read(recordings / "library-desktops")
    start, everyone = (8 + seed % 8) * WEEK_S + MORNING_S, np.arange(logs.n_devices)
    there = appearing(logs, everyone, start, history_s=0.0, hours_s=HOURS_S)
    drawn = np.sort(np.random.default_rng(seed).choice(there, DESKTOPS, replace=False))
    stated = TraceSet.constant(1, compute=SPEED, downlink_bit_per_s=WIRED, uplink_bit_per_s=WIRED)
    return TraceSet.compose(
        availability=logs.take(drawn),
        compute=stated,
        background=read(recordings / "planetlab-cpu.tar.gz"),
        network=stated,
        n=DESKTOPS,
        seed=seed,
        days=1,
    ).between(start, start + HOURS_S)


@cache
def read(path: Path) -> TraceSet:
    """Return a recording."""
    return TraceSet.read(path)


def generated(recordings: Path, seed: int) -> TraceSet:
    """Return generated sites."""
    return TraceSet.synthetic(N, seed=seed, population="sites")


PLACES = {
    "250 MB": Place(traces=generated, n_bytes=250_000_000, until_s=3600.0),
    "250 MB, replies in int4": Place(
        traces=generated,
        n_bytes=250_000_000,
        until_s=3600.0,
        stages=[Compression("int4")],
        methods=list(RATES),
        beside="250 MB",
    ),
    "25 MB, recorded LTE": Place(traces=over_lte, n_bytes=25_000_000, until_s=7200.0),
    "25 MB, 16 recorded desktops": Place(
        traces=desktops, n_bytes=25_000_000, until_s=1800.0, n=DESKTOPS
    ),
}
ARMS = {
    f"{name}: {method}": (name, method)
    for name, place in PLACES.items()
    for method in place.methods
}


def run(of: Run, text: str, recordings: Path, share: float = 1.0) -> list[list[float]]:
    """Return what one run reached; as `sites.strategies.curve`.

    Args:
        of: arm, rate and seed.
        text: path of the plays.
        recordings: folder of them.
        share: of the time, that it lasts.
    """
    arm, rate, seed = of
    place, method = PLACES[ARMS[arm][0]], ARMS[arm][1]
    until_s = place.until_s * share
    options: dict[str, Any] = {"server_optimizer": SGD(rate), "stages": place.stages}
    strategy: StaleStrategy = (
        FedAvg(place.n, **options) if method == "rounds" else FedBuff(place.n, IN_BUFFER, **options)
    )
    traces = place.traces(recordings, seed)

    def grid_of(client: ClientApp, config: UserConfig) -> TraceGrid:
        costs = {"n_bytes": place.n_bytes, "until_s": until_s, "seed": seed}
        if method != "buffer, overlapping":
            return sites(client, config, traces=traces, **costs)
        client = ClientApp(mods=[CompressionMod(), overlapping])
        ahead = Ahead(traces, WORK, place.n_bytes)
        client.train()(import_module("letters_app.client_app").train)
        ahead.grid = sites(client, config, traces=traces, work=ahead, **costs)
        return ahead.grid

    return curve(strategy, seed, text, grid_of, until_s)


def rows_of(
    best: Mapping[str, float], kept: Kept, seeds: Sequence[int], share: float
) -> list[dict[str, Any]]:
    """Return a row for each arm, paired with the buffer in the same place.

    Args:
        best: rate of each.
        kept: what the runs reached.
        seeds: that are reported.
        share: of the time, that runs lasted.
    """
    runs = {arm: [kept[[arm, rate, seed]] for seed in seeds] for arm, rate in best.items()}
    ends = {
        arm: [loss_at(found, 0, PLACES[ARMS[arm][0]].until_s * share) for found in some]
        for arm, some in runs.items()
    }
    rows: list[dict[str, Any]] = []
    for arm in best:
        name, method = ARMS[arm]
        place, rates = PLACES[name], RATES[method]
        other = f"{place.beside}: {method}"
        rows.append(
            {
                "place": name,
                "method": method,
                "hours": place.until_s * share / 3600,
                "rate": best[arm],
                "is_end": len(rates) > 1 and best[arm] in (rates[0], rates[-1]),
                "seeds": list(seeds),
                "jobs": float(np.mean([found[-1][1] for found in runs[arm]])),
                "loss": float(np.mean(ends[arm])),
                "difference": difference(ends[f"{name}: buffer"], ends[arm]),
                "beside": difference(ends[other], ends[arm]) if other in ends else None,
            }
        )
    return rows


def main() -> None:
    """Choose rates, measure, print, and write the results."""
    (plays, recordings), kept, jobs, quick = given(__doc__, "recordings")
    rates, seeds = {arm: RATES[method] for arm, (_, method) in ARMS.items()}, SEEDS
    share = 1.0
    if quick:
        rates, seeds, share = quick_of(rates), SEEDS[:3], QUICK
    best = measured(
        partial(run, text=str(plays), recordings=recordings, share=share),
        rates,
        tuning_seeds=(TUNING_SEED,),
        loss=lambda found: float(found[-1][2]),
        kept=kept,
        jobs=jobs,
        seeds=seeds,
    )
    rows = rows_of(best, kept, seeds, share)
    for row in rows:
        print(row)
    command = "python benchmarks/sites/links.py PLAYS RECORDINGS"
    write_result("site_links", rows, command=command, quick=quick)


if __name__ == "__main__":
    main()
