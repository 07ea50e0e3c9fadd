"""What training that never stops is worth to a few sites: ShadowSync, buffers and rounds.

Six synthetic sites, whose speeds are 3, 6, 9 and 12 work units a second, train a small `letters`.
On their links a model goes both ways in `ratio` times what a job of ten steps takes a site of six
units a second, on some in 0.7 and on others in 1.3 times that. Rounds and buffers train between a
download and an upload; "overlapping" trains on while its reply and the next model travel
(examples/overlapping_upload.py), in jobs of ten steps or as many as fill the transfer; ShadowSync
(fedstale.contrib.shadow) never stops, and answers each message as it comes, by elastic averaging,
model averaging or block updates.

Each arm has the rate, or the elastic parameter, of three or four with the lowest loss in the end on
a seed that is not used again, at ratio 3, where alone average, block updates and overlap with a
buffer of four are measured. What is reported comes from five other seeds, in pairs: characters that
were trained on in an hour, the loss in nats a character of held-out text after the same time, and
after as many characters as the one of both that has trained on fewer in the end.

Run it with: python benchmarks/sites/shadow.py PLAYS [--keep FILE] [--jobs N] [--quick]
"""

import argparse
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.app.user_config import UserConfig
from flwr.clientapp import ClientApp

from fedstale.contrib.shadow import Shadow
from fedstale.contrib.shadow.shadow import SHADOW
from fedstale.simulation import TraceGrid
from fedstale.strategies import FedAvg, FedBuff, StaleStrategy
from fedstale.strategies.server.runtime import Callback, Runtime
from fedstale.strategies.server_optimizer import SGD, Momentum
from fedstale.strategies.weighting import constant
from fedstale.traces import Series, TraceSet

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "examples")]
from overlapping_upload import Ahead, overlapping

from lab.curves import difference, ratio
from lab.kept import Kept
from lab.results import write_result
from sites.run import IN_BUFFER, SEEDS, WORK, Run, measured, sites
from sites.strategies import TUNING_SEED, curve, loss_at

N, BYTES, STEPS, BATCH, LENGTH = 6, 25_000_000, 10, 2, 128
MODEL = {"width": 32, "layers": 1, "batch-size": BATCH, "learning-rate": 0.003}
JOB_S, LINKS = WORK / 6.0, np.linspace(0.7, 1.3, N)
"""Seconds of ten steps; and times of transfers, over that of the ratio."""
UNTIL_S = {0.3: 300.0, 1.0: 400.0, 3.0: 700.0, 7.0: 1400.0}
"""End of a run in s, by ratio."""
TUNED_AT, BETA, PULL = 3.0, 0.9, 0.5
"""Ratio at which rates are chosen; momentum and elastic parameter of block updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """How sites train and exchange, before its rate is chosen."""

    strategy: Callable[[float], StaleStrategy]
    rates: Sequence[float]
    shadow: Callable[[float], Shadow] | None = None
    overlaps: bool = False
    ratios: Sequence[float] = tuple(UNTIL_S)


def every_reply(server_optimizer: Any) -> StaleStrategy:
    """Return a step after each reply, whatever its age."""
    return FedBuff(N, 1, staleness=constant(), server_optimizer=server_optimizer)


def mod(sync: Any, elastic: float) -> Shadow:
    """Return the mod of an algorithm."""
    return Shadow(elastic, sync, work_per_step=WORK / STEPS)


def buffered(rate: float) -> StaleStrategy:
    """Return FedBuff."""
    return FedBuff(N, IN_BUFFER, eta=rate)


BASE, OVERLAP, ROUNDS = "FedBuff(6, 4)", "FedBuff(6, 1), overlapping", "FedAvg(6)"
ARMS = {
    BASE: Arm(strategy=buffered, rates=(0.35, 0.5, 0.7, 1.0)),
    ROUNDS: Arm(strategy=lambda rate: FedAvg(N, server_optimizer=SGD(rate)), rates=(0.7, 1.0, 1.4)),
    "FedBuff(6, 4), overlapping": Arm(
        strategy=buffered, rates=(0.35, 0.5, 0.7, 1.0), overlaps=True, ratios=(TUNED_AT,)
    ),
    # A step at each reply, as the server's side of ShadowSync.
    OVERLAP: Arm(
        strategy=lambda rate: every_reply(SGD(rate)), rates=(0.06, 0.12, 0.17, 0.25), overlaps=True
    ),
    "shadow, elastic": Arm(
        # Sites answer at once: what all of them send moves the model to their mean, not beyond.
        strategy=lambda rate: every_reply(SGD(min(1.0, 1 / (N * rate)))),
        rates=(0.15, 0.3, 0.5),
        shadow=partial(mod, "easgd"),
    ),
    "shadow, average": Arm(
        strategy=lambda rate: every_reply(SGD(1 / N)),
        rates=(0.1, 0.25, 0.5, 1.0),
        shadow=partial(mod, "ma"),
        ratios=(TUNED_AT,),
    ),
    "shadow, block": Arm(
        strategy=lambda rate: every_reply(Momentum(rate, beta=BETA)),
        rates=(0.004, 0.008, 0.017, 0.034),
        ratios=(TUNED_AT,),
        shadow=lambda rate: mod("bmuf", PULL),
    ),
}


Curve = Sequence[Sequence[float]]
"""At each reading s, merged replies and the loss, and behind a run characters."""


class Steps(Callback):
    """Counts the local steps behind the replies that have come."""

    def __init__(self, steps: int) -> None:
        self._each, self.at, self.total = steps, [0.0], [0.0]

    def reply(self, run: Runtime, message_id: str, reply: Message, status: str) -> None:
        """Count those of a reply."""
        if not reply.has_error():
            steps: Any = reply.content.config_records.get(SHADOW, {"steps": self._each})["steps"]
            self.at.append(run.now())
            self.total.append(self.total[-1] + steps)

    def counted(self, found: Curve) -> Curve:
        """Return readings of a curve with the characters behind each."""
        n = np.interp([row[0] for row in found], self.at, self.total) * BATCH * LENGTH
        return [[*row, each] for row, each in zip(found, n.tolist(), strict=True)]


def traces_of(times: float, seed: int) -> TraceSet:
    """Return generated sites behind links on which a model takes some times a job both ways."""
    own = TraceSet.synthetic(N, seed=seed, population="sites")
    each_way = Series.constant(8.0 * BYTES / (LINKS * times * JOB_S / 2))
    return replace(own, downlink=each_way, uplink=each_way)


def run(of: Run, text: str, until_s: float | None = None) -> list[list[float]]:
    """Return what one run reached: at each reading s, merged replies, the loss, and characters.

    Args:
        of: arm, rate and seed; an arm is a ratio and a name of `ARMS`.
        text: path of the plays.
        until_s: end in s; that of the ratio if not given.
    """
    named, rate, seed = of
    times, _, name = named.partition(": ")
    arm, until_s = ARMS[name], until_s or UNTIL_S[float(times)]
    n_steps = max(STEPS, ceil(STEPS * float(times))) if arm.overlaps else STEPS
    traces, steps = traces_of(float(times), seed), Steps(n_steps)

    def grid_of(client: ClientApp, config: UserConfig) -> TraceGrid:
        costs: dict[str, Any] = {"n_bytes": BYTES, "until_s": until_s, "seed": seed}
        ahead = Ahead(traces, WORK * n_steps / STEPS, BYTES)
        if arm.overlaps:
            costs["work"], client = ahead, ClientApp(mods=[overlapping])
        elif arm.shadow is not None:
            costs["work"], client = lambda message: 0.0, ClientApp(mods=[arm.shadow(rate)])
        if arm.overlaps or arm.shadow is not None:
            client.train()(import_module("letters_app.client_app").train)
        grid = ahead.grid = sites(client, config, traces=traces, **costs)
        grid.runtime.add(steps)
        return grid

    model = {**MODEL, "local-steps": n_steps}
    found = curve(arm.strategy(rate), seed, text, grid_of, until_s, model=model)
    return steps.counted(found)


def rows_of(runs: Mapping[str, Mapping[str, Any]], times: float) -> list[dict[str, Any]]:
    """Return a row for each arm at a ratio, paired with three of them.

    Args:
        runs: by arm its `rate` and `found`, what its runs reached.
        times: the ratio.
    """
    ends = [found[-1] for arm in runs.values() for found in arm["found"]]
    until_s = max(end[0] for end in ends)
    rows = []
    for name, arm in runs.items():
        rates, pair = ARMS[name].rates, (runs[BASE]["found"], arm["found"])
        hourly = [[found[-1][3] * 3600 / until_s for found in each] for each in pair]
        exchanges = [found[-1][1] * 3600 / until_s for found in arm["found"]]
        row: dict[str, Any] = {
            "ratio": times,
            "arm": name,
            "rate": arm["rate"],
            "is_end": arm["rate"] in (rates[0], rates[-1]),
            "seconds": until_s,
            "characters_per_hour": float(np.mean(hourly[1])),
            "characters_ratio": ratio(hourly[1], hourly[0]),
            "gigabytes_per_hour": 2 * BYTES * float(np.mean(exchanges)) / 1e9,
        }
        row["loss"] = float(np.mean([found[-1][2] for found in arm["found"]]))
        for key, other in (("base", BASE), ("overlap", OVERLAP), ("rounds", ROUNDS)):
            row |= compared(key, runs[other]["found"], arm["found"])
        rows.append(row)
    return rows


def compared(key: str, base: Sequence[Curve], curves: Sequence[Curve]) -> dict[str, list[float]]:
    """Return how much higher losses are than a base's, in pairs; as `difference`.

    Args:
        key: of the base.
        base: what its runs reached, as `run` returns it.
        curves: what those of an arm reached.

    Returns:
        After the same time, as `to_KEY`, and after as many characters as the one of both that has
        fewer in the end, as `to_KEY_by_characters`.
    """
    pairs = list(zip(base, curves, strict=True))
    same = [min(one[-1][3], two[-1][3]) for one, two in pairs]
    return {
        f"to_{key}": difference(*([pair[i][-1][2] for pair in pairs] for i in (0, 1))),
        f"to_{key}_by_characters": difference(
            *([_after(n, pair[i]) for n, pair in zip(same, pairs, strict=True)] for i in (0, 1))
        ),
    }


def _after(characters: float, found: Sequence[Sequence[float]]) -> float:
    """Return the loss after some characters, between readings."""
    return loss_at([[row[3], 0, row[2]] for row in found], 0, characters)


def main() -> None:
    """Choose rates, measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plays", type=Path)
    parser.add_argument("--keep", type=Path, help="file of runs; those in it are not run again")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--quick", action="store_true", help="one ratio, three seeds")
    args = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    kept, seeds, ratios = Kept(args.keep), SEEDS, list(UNTIL_S)
    if args.quick:
        seeds, ratios = SEEDS[:3], [3.0]
    call = partial(run, text=str(args.plays.resolve()), until_s=400.0 if args.quick else None)
    play = partial(
        measured,
        call,
        tuning_seeds=(TUNING_SEED,),
        loss=lambda found: float(found[-1][2]),
        kept=kept,
        jobs=args.jobs,
        seeds=seeds,
    )
    tried = {name: arm.rates[1:2] if args.quick else arm.rates for name, arm in ARMS.items()}
    tuned = play({f"{TUNED_AT}: {name}": rates for name, rates in tried.items()})
    best = {name: tuned[f"{TUNED_AT}: {name}"] for name in ARMS}
    arms = {t: [name for name, arm in ARMS.items() if t in arm.ratios] for t in ratios}
    play({f"{t}: {name}": [best[name]] for t in ratios for name in arms[t]})
    rows = []
    for t in ratios:
        runs = {
            name: {
                "rate": best[name],
                "found": [kept[[f"{t}: {name}", best[name], s]] for s in seeds],
            }
            for name in arms[t]
        }
        rows += rows_of(runs, t)
    for row in rows:
        print(row)
    rows = [{**row, "seeds": list(seeds)} for row in rows]
    command = "python benchmarks/sites/shadow.py PLAYS"
    write_result("shadow", rows, command=command, quick=args.quick)


if __name__ == "__main__":
    main()
