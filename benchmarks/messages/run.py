"""What smaller messages are worth: time to a target, device-hours and bytes both ways.

Recorded phones train the built-in apps for four hours (`messages.runs`), with 14 MB on 5G links and
56 MB on LTE and UMTS links. Every arm, with the full messages among them, has the server's rate
that reaches the highest mean accuracy over the first two hours on other phones, other days and
other seeds. So is the best of the uniform pairs of formats chosen, which the others are compared
with. The target is what full messages reach there after two hours, rounded down to 0.01. What is
reported comes from five windows of phones that no rate has seen.

Two refinements did not pay, formats by forecast and the largest elements alone. Their rows are in
the result compact_refinements, each with its commits; `benchmarks/compact.py` of these has both.

Run it with: python benchmarks/messages/run.py RECORDINGS [--keep FILE] [--only PLACE ...] [--quick]
Runs that are in the file of --keep are not run again. `codec.py` measures the codec.
"""

import argparse
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import floor
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from fedstale.strategies import Compression

sys.path.append(str(Path(__file__).parents[1]))
from lab.curves import MINUTE_S, by_minute, final, ratio
from lab.kept import Kept
from lab.results import read_result, write_result
from lab.training import HOURS_S, Window
from messages.runs import Curve, Place, run, windows_of

SEEDS, TUNING_SEEDS = (501, 502, 503, 504, 505), (511, 512)
PARTS = {"tuning": "stop", "reported": "test"}
RATES = (0.6, 1.2, 2.4, 4.8)
FULL = "in full"
_5G, _LTE = "uccmisl-5g.zip", "mahimahi"

PLACES = {
    "digits, 14 MB, 5G": Place(app="digits", model_bytes=14_000_000, links=_5G),
    "digits, 56 MB, LTE and UMTS": Place(app="digits", model_bytes=56_000_000, links=_LTE),
    "fashion, 14 MB, 5G": Place(app="fashion", model_bytes=14_000_000, links=_5G),
    "fashion, 56 MB, LTE and UMTS": Place(app="fashion", model_bytes=56_000_000, links=_LTE),
    "shakespeare, 14 MB, 5G": Place(
        app="shakespeare", model_bytes=14_000_000, links=_5G, alpha=None
    ),
    "shakespeare, 56 MB, LTE and UMTS": Place(
        app="shakespeare", model_bytes=56_000_000, links=_LTE, alpha=None
    ),
}

ARMS: dict[str, Compression | None] = {
    FULL: None,
    "float16": Compression("float16"),
    "int8": Compression("int8"),
    "int4": Compression("int4"),
    "int2": Compression("int2"),
    "int8, int8 down": Compression("int8", down="int8"),
    "int4, int8 down": Compression("int4", down="int8"),
    "int2, int8 down": Compression("int2", down="int8"),
    "int4, int4 down": Compression("int4", down="int4"),
}
FEWER = (FULL, "int4, int8 down", "int2, int8 down")
"""What is compared where runs take long."""
Row = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is run in a place, and the runs of it that are kept."""

    place: str
    arms: tuple[str, ...]
    tuning: Sequence[Window]
    windows: Sequence[Window]
    rates: tuple[float, ...]
    kept: Kept
    until_s: float = HOURS_S

    def curve(self, arm: str, window: Window, rate: float, until_s: float) -> Curve:
        """Return a run, made only if it is not kept."""
        of = [self.place, arm, window.seed, rate, until_s]
        make = partial(run, PLACES[self.place], ARMS[arm], window, rate, until_s)
        with threadpool_limits(1):
            return Curve(**self.kept.get(of, make))

    def accuracy(self, arm: str, window: Window, rate: float) -> list[float]:
        """Return the accuracy of each minute of the half of the time that rates are tuned on."""
        half_s = self.until_s / 2
        curve = self.curve(arm, window, rate, half_s)
        return by_minute(curve.at_s, curve.accuracy, half_s).tolist()


def outcome(curve: Curve, target: float, until_s: float) -> dict[str, float]:
    """Return what a run had taken when it reached a target; or by the end, if it did not."""
    smooth = by_minute(curve.at_s, curve.accuracy, until_s)
    reached = np.flatnonzero(smooth >= target)
    when = MINUTE_S * float(reached[0] if reached.size else smooth.size - 1)
    i = int(np.searchsorted(curve.at_s, when, side="right")) - 1
    return {
        "reached": float(bool(reached.size)),
        "hours": when / 3600.0,
        "device_hours": curve.device_s[i] / 3600.0,
        "up_gb": curve.up_bytes[i] / 1e9,
        "down_gb": curve.down_bytes[i] / 1e9,
        "jobs": float(curve.jobs),
        "final_accuracy": final(smooth),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What other phones have said before anything is reported."""

    rates: dict[str, float] = field(default_factory=dict)
    """Of the server, by arm."""
    scores: dict[str, float] = field(default_factory=dict)
    """Mean accuracy over the first half of the time at that rate, by arm."""
    target: float = 0.0
    best_pair: str = FULL
    """The arm with the highest score."""


def tuned(plan: Plan) -> Tuned:
    """Choose rates, the best pair and the target on other phones."""
    rates: dict[str, float] = {}
    scores: dict[str, float] = {}
    for arm in plan.arms:
        by_rate = {
            rate: float(np.mean([plan.accuracy(arm, window, rate) for window in plan.tuning]))
            for rate in plan.rates
        }
        rates[arm] = max(by_rate, key=by_rate.__getitem__)
        scores[arm] = by_rate[rates[arm]]
    ends = [plan.accuracy(FULL, window, rates[FULL])[-1] for window in plan.tuning]
    return Tuned(
        rates=rates,
        scores=scores,
        target=floor(100 * float(np.mean(ends))) / 100,
        best_pair=max(scores, key=scores.__getitem__),
    )


def rows_of(plan: Plan) -> list[Row]:
    """Return a row for each arm."""
    chosen = tuned(plan)
    found = {
        arm: [
            outcome(
                plan.curve(arm, window, chosen.rates[arm], plan.until_s),
                chosen.target,
                plan.until_s,
            )
            for window in plan.windows
        ]
        for arm in plan.arms
    }

    def column(arm: str, name: str) -> list[float]:
        return [each[name] for each in found[arm]]

    def compared(base: str, arm: str, name: str) -> list[float]:
        return [round(x, 4) for x in ratio(column(base, name), column(arm, name))]

    rows: list[Row] = []
    for arm in plan.arms:
        row: Row = {
            "place": plan.place,
            "arm": arm,
            "server_rate": chosen.rates[arm],
            "score": round(chosen.scores[arm], 4),
            "target": chosen.target,
            "best_pair": chosen.best_pair,
            "seeds": [window.seed for window in plan.windows],
            "tuning_seeds": [window.seed for window in plan.tuning],
            "devices": [window.n_devices for window in plan.windows],
            "commits": [plan.kept.commit],
        }
        for name in found[arm][0]:
            row[name] = round(float(np.mean(column(arm, name))), 4)
        row["hours_by_seed"] = [round(x, 3) for x in column(arm, "hours")]
        for name in ("hours", "device_hours", "up_gb", "down_gb"):
            row[f"{name}_ratio"] = compared(FULL, arm, name)
        row["hours_ratio_to_best_pair"] = compared(chosen.best_pair, arm, "hours")
        rows.append(row)
    return rows


def line(row: Mapping[str, object]) -> str:
    """Return a row in words."""
    return (
        f"{row['place']} | {row['arm']} | rate {row['server_rate']} | {row['hours']} h to "
        f"{row['target']} ({row['reached']}) | x {row['hours_ratio']} | to the best pair x "
        f"{row['hours_ratio_to_best_pair']} | up {row['up_gb']} GB x {row['up_gb_ratio']}"
    )


def plans(recordings: Path, only: Iterable[str], kept: Kept, *, quick: bool) -> Iterable[Plan]:
    """Yield what is run in each place that is asked for."""
    for name in only:
        place = PLACES[name]
        tuning, windows = (
            windows_of(recordings, PARTS[part], place.links, seeds)
            for part, seeds in (("tuning", TUNING_SEEDS), ("reported", SEEDS))
        )
        arms = tuple(ARMS) if place.app == "digits" else FEWER
        whole = Plan(place=name, arms=arms, tuning=tuning, windows=windows, rates=RATES, kept=kept)
        yield (
            whole
            if not quick
            else replace(
                whole,
                arms=FEWER[:2],
                tuning=tuning[:1],
                windows=windows[:1],
                rates=(1.2,),
                until_s=600.0,
            )
        )


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--keep", type=Path, help="file of runs; those in it are not run again")
    parser.add_argument("--only", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--quick", action="store_true", help="two arms, ten virtual minutes")
    asked = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    only = asked.only[:1] if asked.quick else asked.only
    kept = Kept(None if asked.quick else asked.keep)
    rows = []
    for plan in plans(asked.recordings, only, kept, quick=asked.quick):
        for row in rows_of(plan):
            print(line(row), flush=True)
            rows.append(row)
    if not asked.quick:
        # What is not measured now stays as it is.
        new = {(row["place"], row["arm"]) for row in rows}
        before = read_result("compact")["rows"]
        rows += [row for row in before if (row["place"], row["arm"]) not in new]
        rows.sort(key=lambda row: list(PLACES).index(str(row["place"])))
    command = "python benchmarks/messages/run.py RECORDINGS"
    write_result("compact", rows, command=command, quick=asked.quick)


if __name__ == "__main__":
    main()
