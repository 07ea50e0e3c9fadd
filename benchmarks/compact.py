"""What smaller messages are worth: time to a target, device time and bytes both ways.

Recorded phones train the built-in apps for four hours (`compact_runs`), with 14 MB on 5G links and
56 MB on LTE and UMTS links. Every arm, with the full messages among them, has the server's rate
that reaches the highest mean accuracy over the first two hours on other phones, other days and
other seeds. So is the best of the uniform pairs of formats chosen, which formats by forecast are
compared with. The target is what full messages reach there after two hours, rounded down to 0.01.
What is reported comes from five windows of phones that no rate and no forecaster has seen.

Run it with: python benchmarks/compact.py RECORDINGS [--keep FILE] [--only PLACE ...] [--quick]
Runs that are in the file of --keep are not run again. `compact_codec.py` measures the codec.
"""

import argparse
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import floor
from pathlib import Path

import numpy as np
from compact_runs import Arm, ByForecast, Curve, Place, run, windows_of
from results_file import RESULTS, commit, write_result
from scipy import stats
from selection_training import HOURS_S, Window
from threadpoolctl import threadpool_limits

from fedstale.strategies import Compression
from fedstale.strategies.types import Array

SEEDS, TUNING_SEEDS = (501, 502, 503, 504, 505), (511, 512)
PARTS = {"tuning": "stop", "reported": "test"}
RATES = (0.6, 1.2, 2.4, 4.8)
MINUTE_S, SMOOTHED = 60.0, 10
"""Accuracy is read every minute and averaged over the last ten readings."""
FULL, BY_FORECAST, TOP_K = "in full", "by forecast", "top-k in the bytes of "
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

UNIFORM: dict[str, Arm] = {
    FULL: Arm(),
    "float16": Arm(compression=Compression("float16")),
    "int8": Arm(compression=Compression("int8")),
    "int4": Arm(compression=Compression("int4")),
    "int2": Arm(compression=Compression("int2")),
    "int8, int8 down": Arm(compression=Compression("int8", down="int8")),
    "int4, int8 down": Arm(compression=Compression("int4", down="int8")),
    "int2, int8 down": Arm(compression=Compression("int2", down="int8")),
    "int4, int4 down": Arm(compression=Compression("int4", down="int4")),
}
SPARSE: dict[str, Arm] = {
    f"{TOP_K}{form}, int8 down": Arm(compression=Compression(form, down="int8"), is_sparse=True)
    for form in ("int4", "int2")
}
FORECAST: dict[str, Arm] = {
    f"{BY_FORECAST}, {name}, int8 down": Arm(
        compression=ByForecast(down="int8"), forecaster=forecaster
    )
    for name, forecaster in (
        ("the LSTM's", "lstm"),
        ("persistence", "persistence"),
        ("the oracle's", "oracle"),
    )
}
ARMS = UNIFORM | SPARSE | FORECAST
FEWER = (FULL, "int4, int8 down", "int2, int8 down", next(iter(FORECAST)))
"""What is compared where runs take long."""
TUNED_AS = dict.fromkeys(FORECAST, next(iter(FORECAST)))
"""Arms that have the rate of another one: the same rule with other forecasts."""

Row = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is run in a place."""

    place: str
    arms: tuple[str, ...]
    tuning: Sequence[Window]
    windows: Sequence[Window]
    rates: tuple[float, ...]
    until_s: float = HOURS_S


class Kept:
    """Curves of runs, kept in a file of JSON lines if there is one, so that none is run twice."""

    def __init__(self, recordings: Path, path: Path | None = None) -> None:
        """Read the runs that are kept; a line that was cut off is made again."""
        self._recordings, self._path, self._commit = recordings, path, commit()
        self._curves: dict[str, tuple[Curve, str]] = {}
        lines = path.read_text(encoding="utf-8").splitlines() if path and path.exists() else []
        for line in lines:
            try:
                kept = json.loads(line)
            except json.JSONDecodeError:
                continue
            self._curves[kept["of"]] = Curve(**kept["curve"]), kept["commit"]
        self.commits: set[str] = set()
        """Of the runs that were asked for."""

    def curve(self, place: str, arm: str, window: Window, rate: float, until_s: float) -> Curve:
        """Return a run, made only if it is not kept."""
        key = json.dumps([place, arm, window.seed, rate, until_s])
        if key not in self._curves:
            began = time.process_time()
            with threadpool_limits(1):
                made = run(PLACES[place], ARMS[arm], window, rate, self._recordings, until_s)
            self._curves[key] = made, str(self._commit)
            print(f"{key} {made.jobs} jobs, {time.process_time() - began:.1f} s", flush=True)
            if self._path is not None:
                line = json.dumps({"of": key, "commit": self._commit, "curve": asdict(made)})
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
        curve, made_at = self._curves[key]
        self.commits.add(made_at)
        return curve


def smoothed(curve: Curve, until_s: float) -> Array:
    """Return the accuracy every minute, averaged over the last ten of these."""
    looks = np.arange(0.0, until_s + 1.0, MINUTE_S)
    read = np.array(curve.accuracy)[np.searchsorted(curve.at_s, looks, side="right") - 1]
    sums = np.cumsum(np.concatenate([np.zeros(SMOOTHED), read]))
    count = np.minimum(np.arange(read.size) + 1, SMOOTHED)
    return np.asarray((sums[SMOOTHED:] - sums[: read.size]) / count)


def outcome(curve: Curve, target: float, until_s: float) -> dict[str, float]:
    """Return what a run had taken when it reached a target; or by the end, if it did not."""
    smooth = smoothed(curve, until_s)
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
        "final_accuracy": float(smooth[-(smooth.size // 10) :].mean()),
    }


def ratio(base: Sequence[float], values: Sequence[float]) -> list[float]:
    """Return how many times smaller values are than those of the base, paired, with 95 %."""
    logs = np.log(np.asarray(base) / np.asarray(values))
    mean, n = float(logs.mean()), logs.size
    half = float(stats.t.ppf(0.975, n - 1) * logs.std(ddof=1) / np.sqrt(n)) if n > 1 else np.nan
    return [round(float(np.exp(x)), 4) for x in (mean, mean - half, mean + half)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What other phones have said before anything is reported."""

    rates: dict[str, float] = field(default_factory=dict)
    """Of the server, by arm."""
    scores: dict[str, float] = field(default_factory=dict)
    """Mean accuracy over the first half of the time at that rate, by arm."""
    target: float = 0.0
    best_pair: str = FULL
    """The uniform arm with the highest score."""


def tuned(plan: Plan, kept: Kept) -> Tuned:
    """Choose rates, the best pair and the target on other phones."""
    half_s = plan.until_s / 2
    rates: dict[str, float] = {}
    scores: dict[str, float] = {}
    for arm in plan.arms:
        if TUNED_AS.get(arm, arm) != arm:
            continue
        by_rate = {
            rate: float(
                np.mean(
                    [
                        smoothed(kept.curve(plan.place, arm, w, rate, half_s), half_s).mean()
                        for w in plan.tuning
                    ]
                )
            )
            for rate in plan.rates
        }
        rates[arm] = max(by_rate, key=by_rate.__getitem__)
        scores[arm] = by_rate[rates[arm]]
    ends = [
        smoothed(kept.curve(plan.place, FULL, w, rates[FULL], half_s), half_s)[-1]
        for w in plan.tuning
    ]
    return Tuned(
        rates=rates | {arm: rates[TUNED_AS[arm]] for arm in plan.arms if arm in TUNED_AS},
        scores=scores,
        target=floor(100 * float(np.mean(ends))) / 100,
        best_pair=max((arm for arm in scores if arm in UNIFORM), key=scores.__getitem__),
    )


def rows_of(plan: Plan, kept: Kept) -> list[Row]:
    """Return a row for each arm."""
    kept.commits.clear()
    chosen = tuned(plan, kept)
    found = {
        arm: [
            outcome(
                kept.curve(plan.place, arm, window, chosen.rates[arm], plan.until_s),
                chosen.target,
                plan.until_s,
            )
            for window in plan.windows
        ]
        for arm in plan.arms
    }

    def column(arm: str, name: str) -> list[float]:
        return [each[name] for each in found[arm]]

    rows: list[Row] = []
    for arm in plan.arms:
        row: Row = {
            "place": plan.place,
            "arm": arm,
            "server_rate": chosen.rates[arm],
            "score": round(chosen.scores[arm], 4) if arm in chosen.scores else None,
            "target": chosen.target,
            "best_pair": chosen.best_pair,
            "seeds": [window.seed for window in plan.windows],
            "tuning_seeds": [window.seed for window in plan.tuning],
            "devices": [window.n_devices for window in plan.windows],
            "commits": sorted(kept.commits),
        }
        for name in found[arm][0]:
            row[name] = round(float(np.mean(column(arm, name))), 4)
        row["hours_by_seed"] = [round(x, 3) for x in column(arm, "hours")]
        for name in ("hours", "device_hours", "up_gb", "down_gb"):
            row[f"{name}_ratio"] = ratio(column(FULL, name), column(arm, name))
        row["hours_ratio_to_best_pair"] = ratio(
            column(chosen.best_pair, "hours"), column(arm, "hours")
        )
        if arm in SPARSE:
            dense = arm.removeprefix(TOP_K)
            row["hours_ratio_to_same_bytes"] = ratio(column(dense, "hours"), column(arm, "hours"))
        rows.append(row)
    return rows


def line(row: Mapping[str, object]) -> str:
    """Return a row in words."""
    return (
        f"{row['place']} | {row['arm']} | rate {row['server_rate']} | {row['hours']} h to "
        f"{row['target']} ({row['reached']}) | x {row['hours_ratio']} | to the best pair x "
        f"{row['hours_ratio_to_best_pair']} | up {row['up_gb']} GB x {row['up_gb_ratio']}"
    )


def plans(recordings: Path, only: Iterable[str], *, quick: bool = False) -> Iterable[Plan]:
    """Yield what is run in each place that is asked for."""
    for name in only:
        place = PLACES[name]
        tuning, windows = (
            windows_of(recordings, PARTS[part], place.links, seeds)
            for part, seeds in (("tuning", TUNING_SEEDS), ("reported", SEEDS))
        )
        arms = tuple(ARMS) if place.app == "digits" else FEWER
        if quick:
            few = (FULL, "int4, int8 down", next(iter(SPARSE)), next(iter(FORECAST)))
            yield Plan(
                place=name, arms=few, tuning=tuning[:1], windows=windows[:1], rates=(1.2,),
                until_s=600.0,
            )  # fmt: skip
        else:
            yield Plan(place=name, arms=arms, tuning=tuning, windows=windows, rates=RATES)


def measured(
    wanted: Iterable[Plan], kept: Kept, said: Callable[[str], object] = print
) -> list[Row]:
    """Return the rows of some places, and say them as they come."""
    rows = []
    for plan in wanted:
        for row in rows_of(plan, kept):
            said(line(row))
            rows.append(row)
    return rows


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--keep", type=Path, help="file of runs; those in it are not run again")
    parser.add_argument("--only", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--quick", action="store_true", help="ten minutes, not written")
    asked = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    only = asked.only[:1] if asked.quick else asked.only
    kept = Kept(asked.recordings, None if asked.quick else asked.keep)
    rows = measured(plans(asked.recordings, only, quick=asked.quick), kept)
    if not asked.quick:
        rows = sorted(rows + before(only), key=lambda row: list(PLACES).index(str(row["place"])))
        write_result("compact", rows, command="python benchmarks/compact.py RECORDINGS")


def before(measured_now: Iterable[str]) -> list[Row]:
    """Return the rows of places that are not measured now, from the result that is there."""
    path = RESULTS / "compact.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    return [row for row in rows if row["place"] not in set(measured_now)]


if __name__ == "__main__":
    main()
