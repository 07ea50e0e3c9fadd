"""What a grace window is worth to a few sites, after the quorum that a server step waits for.

The sites, links, small `letters` and jobs of sites/shadow.py, for ten minutes where a transfer
takes .3 times ten steps of a site of middle speed, and for 27 where it takes 3 times as long. Six
sites are sent the model after a step if they have answered, and go on with an older one if not. A
step is made when a quorum of sites has answered and a window has passed for more of them, of 0,
1/4, 1/2 or 1 times the median of their first jobs in s; or all have answered. The updates are
averaged by examples, and weigh 1/sqrt(1 + tau). So Decoupled DiLoCo merges (Douillard et al. 2026,
arXiv 2604.21428, whose abstract alone was read), but for fragments of a model, and for a window
that adapts. A quorum of all is FedAvg(6); under FedBuff(6, 4) a site that has answered is sent the
model at once, and may be in a step twice.

No schedule has such a window. `GraceWindow` is a clock, and a loop takes its replies from its
clock: it holds those of a quorum back until the window is over, and a schedule that waits for no
number steps with what it is handed.

Each arm has the rate, of three to five, with the lowest loss in the end on a seed that is not used
again, at ratio .3. What is reported comes from five other seeds, in pairs: the loss in nats a
character of held-out text after the same time, and after as many characters as the one of both that
has trained on fewer in the end.

Run it with: python benchmarks/sites/grace.py PLAYS [--keep FILE] [--jobs N] [--quick]
"""

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence, Set
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.app.user_config import UserConfig
from flwr.clientapp import ClientApp

from fedstale.simulation import TraceGrid
from fedstale.strategies import FedAvg, StaleStrategy
from fedstale.strategies.schedule import Schedule
from fedstale.strategies.server.runtime import Clock, Runtime
from fedstale.strategies.server_optimizer import SGD
from fedstale.strategies.types import ClientUpdate
from fedstale.strategies.weighting import ByAge, polynomial
from fedstale.traces import Job, TraceSet

sys.path.append(str(Path(__file__).parents[1]))
from lab.kept import Kept
from lab.results import write_result
from sites.run import SEEDS, WORK, Run, measured, sites
from sites.shadow import BYTES, MODEL, STEPS, N, Steps, buffered, compared, traces_of
from sites.strategies import TUNING_SEED, curve

UNTIL_S = {0.3: 600.0, 3.0: 1600.0}
"""End of a run in s, by ratio."""
TUNED_AT, QUORUMS, WINDOWS = 0.3, (2, 4), (0.0, 0.25, 0.5, 1.0)
BASE, ROUNDS = "FedBuff(6, 4)", "FedAvg(6)"
RATES = (0.35, 0.5, 0.7, 1.0, 1.4)


class GraceWindow(Clock):
    """Hands over the replies of a quorum at once, with what comes in a window after it.

    Errors in the place of replies make no quorum. What is held back is in no checkpoint.
    """

    def __init__(self, clock: Clock, quorum: int, window_s: float) -> None:
        """Hold back the replies of a clock until `quorum` are there, and `window_s` s longer."""
        self._clock, self._quorum, self._window_s = clock, quorum, window_s

    def now(self) -> float:
        """Return the instant in s."""
        return self._clock.now()

    def wait(self, until: float) -> bool:
        """Wait on the other clock."""
        return self._clock.wait(until)

    def receive(self, until: float, message_ids: Set[str]) -> list[Message]:
        """Return replies, once the window is over, none is missing, or it is `until`."""
        held, closes = list[Message](), inf
        while True:
            held += self._clock.receive(min(until, closes), message_ids)
            n_answered = sum(not reply.has_error() for reply in held)
            if closes == inf and n_answered >= self._quorum:
                closes = self.now() + self._window_s
            if self.now() >= min(until, closes) or len(held) >= len(message_ids):
                return held


def merging(rate: float) -> StaleStrategy:
    """Return a step with all that the clock hands over."""
    return StaleStrategy(
        schedule=Schedule(concurrency=N, stragglers="keep", deadline_s=1e-6),
        weighting=ByAge(polynomial(0.5)),
        server_optimizer=SGD(rate),
    )


class Seen(Steps):
    """Counts the versions too."""

    n_versions = 0

    def new_version(
        self, run: Runtime, version: int, arrays: ArrayRecord, updates: Sequence[ClientUpdate]
    ) -> None:
        """Note its number."""
        self.n_versions = version


ARMS = {
    BASE: (buffered, RATES[:-1]),
    ROUNDS: (lambda rate: FedAvg(N, server_optimizer=SGD(rate)), RATES[2:]),
    **{f"{quorum} of 6, {window:g}": (merging, RATES) for quorum in QUORUMS for window in WINDOWS},
}
"""Strategies by rate, and rates: of FedBuff, of rounds, and by quorum and window."""


def job_s(traces: TraceSet) -> float:
    """Return the median of what the first job takes the sites, with its transfers, in s."""
    job = Job(work=WORK, download_bytes=BYTES, upload_bytes=BYTES)
    return float(np.median(traces.trips(np.arange(N), np.zeros(N), job).ended))


def run(of: Run, text: str, until_s: float | None = None) -> dict[str, Any]:
    """Return what one run reached.

    Args:
        of: arm, rate and seed; an arm is a ratio and a name of `ARMS`.
        text: path of the plays.
        until_s: end in s; that of the ratio if not given.

    Returns:
        As `curve` at each reading s, merged replies, the loss, and characters; and `versions`.
    """
    named, rate, seed = of
    times, _, name = named.partition(": ")
    until_s = until_s or UNTIL_S[float(times)]
    traces, seen = traces_of(float(times), seed), Seen(STEPS)

    def grid_of(client: ClientApp, config: UserConfig) -> TraceGrid:
        costs: dict[str, Any] = {"n_bytes": BYTES, "until_s": until_s, "seed": seed}
        grid = sites(client, config, traces=traces, **costs)
        grid.runtime.add(seen)
        if name not in (BASE, ROUNDS):
            quorum, window = name.split(" of 6, ")
            window_s = float(window) * job_s(traces)
            grid.runtime.clock = GraceWindow(grid.runtime.clock, int(quorum), window_s)
        return grid

    strategy, model = ARMS[name][0](rate), {**MODEL, "local-steps": STEPS}
    found = curve(strategy, seed, text, grid_of, until_s, model=model)
    return {"curve": seen.counted(found), "versions": seen.n_versions}


def rows_of(runs: Mapping[str, Mapping[str, Any]], times: float, until_s: float) -> list[Any]:
    """Return a row for each arm at a ratio, paired with FedBuff, rounds and no window.

    Args:
        runs: by arm its `rate` and `found`, what its runs reached.
        times: the ratio.
        until_s: end of the runs in s.
    """
    rows = []
    for name, arm in runs.items():
        quorum, _, window = name.partition(" of 6, ")
        rates, curves = ARMS[name][1], [found["curve"] for found in arm["found"]]
        merged = [found["curve"][-1][1] / found["versions"] for found in arm["found"]]
        row: dict[str, Any] = {
            "ratio": times,
            "arm": name,
            "quorum": int(quorum) if window else None,
            "window": float(window) if window else None,
            "rate": arm["rate"],
            "is_end": arm["rate"] in (rates[0], rates[-1]),
            "seconds": until_s,
            "updates_per_step": float(np.mean(merged)),
            "characters_per_hour": float(np.mean([c[-1][3] for c in curves])) * 3600 / until_s,
            "loss": float(np.mean([each[-1][2] for each in curves])),
        }
        others = {"base": BASE, "rounds": ROUNDS}
        if window:
            others["none"] = f"{quorum} of 6, 0"
        for key, other in others.items():
            row |= compared(key, [found["curve"] for found in runs[other]["found"]], curves)
        rows.append(row)
    return rows


def main() -> None:
    """Choose rates, measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plays", type=Path)
    parser.add_argument("--keep", type=Path, help="file of runs; those in it are not run again")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--quick", action="store_true", help="one quorum, three seeds")
    args = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    kept, seeds, ends = Kept(args.keep), SEEDS, UNTIL_S
    tried = {name: rates for name, (_, rates) in ARMS.items()}
    if args.quick:
        seeds, ends = SEEDS[:3], {TUNED_AT: 200.0}
        tried = {name: rates[2:3] for name, rates in tried.items() if name[0] != "4"}
    play = partial(
        measured,
        partial(run, text=str(args.plays.resolve()), until_s=200.0 if args.quick else None),
        tuning_seeds=(TUNING_SEED,),
        loss=lambda found: float(found["curve"][-1][2]),
        kept=kept,
        jobs=args.jobs,
        seeds=seeds,
    )
    tuned = play({f"{TUNED_AT}: {name}": rates for name, rates in tried.items()})
    best = {name: tuned[f"{TUNED_AT}: {name}"] for name in tried}
    play({f"{times}: {name}": [best[name]] for times in ends for name in tried})
    rows = []
    for times, until_s in ends.items():
        runs = {
            name: {
                "rate": best[name],
                "found": [kept[[f"{times}: {name}", best[name], seed]] for seed in seeds],
            }
            for name in tried
        }
        rows += rows_of(runs, times, until_s)
    for row in rows:
        print(row)
    rows = [{**row, "seeds": list(seeds)} for row in rows]
    command = "python benchmarks/sites/grace.py PLAYS"
    write_result("grace", rows, command=command, quick=args.quick)


if __name__ == "__main__":
    main()
