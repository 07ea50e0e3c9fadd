"""Which strategy reaches a good model first on recorded devices, and which forgets the slow ones.

A hundred recorded devices train the built-in app `digits` (see `methods.runs`). In the setting
"mixed" a device's digits have nothing to do with its speed: a Dirichlet deal of concentration 0.1.
In "slow alone hold 7-9" the digits 7 to 9 are with the slowest third of the devices that ever
finish a job, and these have few others; the other digits are dealt to the rest as before. "mixed,
desktops" is the first on another fleet, and "shakespeare" another app.

Every strategy is tuned alike: the server's rate by the mean accuracy over half of the time, on
seeds and days that are not used again. "directional gap, tuned form" then chooses its share and its
grain on the same seeds, at the rate of the default form. What is reported comes from five other
seeds, paired with FedBuff's runs.

Run it with: python benchmarks/methods/run.py RECORDINGS [--keep FILE] [--quick]
Runs that are in the file of --keep are not run again, so a killed measurement goes on with it.
"""

import argparse
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from threadpoolctl import threadpool_limits

from fedstale.strategies import (
    CA2FL,
    FADAS,
    AsyncFedED,
    FedAsync,
    FedAvg,
    FedAvgOverSelected,
    FedBuff,
    FedStale,
    StaleStrategy,
)
from fedstale.strategies.pace import AdaSync
from fedstale.strategies.schedule import k_async
from fedstale.strategies.selection import Oort
from fedstale.strategies.server_optimizer import SGD
from fedstale.strategies.types import Array
from fedstale.strategies.weighting import (
    ByAge,
    ClientUpdate,
    DirectionalGap,
    Gap,
    RelevanceAware,
    Weighting,
    constant,
    polynomial,
)

sys.path.append(str(Path(__file__).parents[1]))
from lab.apps import opened
from lab.curves import difference, ratio
from lab.kept import Kept
from lab.results import read_result, write_result
from methods.runs import (
    N_DEVICES,
    SEEDS,
    STARTS,
    TUNING_SEEDS,
    Curve,
    Setting,
    devices,
    online,
)

IN_FLIGHT, MERGE_SIZE = 20, 5
TARGET, RATES = 0.9, (0.6, 1.2, 2.4, 4.8)
HORIZON_S, DESKTOP_HORIZON_S, PLAY_HORIZON_S = 3 * 3600.0, 1500.0, 2700.0
PLAY_TARGET, PLAY_RATES = 0.3, (1.2, 2.4, 4.8)
MIXED, SLOW = "mixed", "slow alone hold 7-9"
REFERENCE = "FedBuff"
OURS = "directional gap"
TUNED = "directional gap, tuned form"

RATIOS = {"hours_to_target": "speed_up", "gigabytes_to_target": "fewer_gigabytes"}
"""Outcomes that are compared as ratios, and how these are called."""

Make = Callable[[float, int], StaleStrategy]
Row = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A strategy before its tuning."""

    make: Make
    """Return the strategy for a rate and a seed."""
    per_rate: float = 1.0
    """What the rates are multiplied by, where a step means something else."""


class Runs(Protocol):
    """Devices and data of one seed."""

    def run(self, strategy: StaleStrategy, until_s: float, /) -> Curve:
        """Return what a strategy reaches by some instant."""


def buffered(**parts: Any) -> Make:
    """Return FedBuff with some of its parts replaced; a callable part is made anew for each run."""

    def make(rate: float, seed: int) -> StaleStrategy:
        new = {name: part() if callable(part) else part for name, part in parts.items()}
        size = new.pop("buffer_size", MERGE_SIZE)
        return FedBuff(IN_FLIGHT, size, eta=rate, seed=seed, **new)

    return make


def late_come_too(weighting: Weighting, rate: float, seed: int, normalise: Any) -> StaleStrategy:
    """Return a strategy that sends after merges and goes on without the last."""
    return StaleStrategy(
        schedule=k_async(IN_FLIGHT, MERGE_SIZE),
        weighting=weighting,
        server_optimizer=SGD(rate),
        normalise=normalise,
        seed=seed,
    )


FORMS: dict[str, Make] = {
    f"of={of!r}, share={share:g}": buffered(
        weighting=lambda of=of, share=share: DirectionalGap(of=of, share=share)
    )
    for of in ("layer", "model")
    for share in (0.0, 0.05, 0.1, 0.2)
}

STRATEGIES: dict[str, Trial] = {
    REFERENCE: Trial(make=buffered()),
    OURS: Trial(make=buffered(weighting=DirectionalGap)),
    "Gap-Aware": Trial(make=buffered(weighting=Gap)),
    "FedBuff, age ignored": Trial(make=buffered(weighting=lambda: ByAge(constant()))),
    "FedBuff, 1/(1+tau)": Trial(make=buffered(weighting=lambda: ByAge(polynomial(1.0)))),
    "CA2FL": Trial(
        make=lambda rate, seed: CA2FL(
            IN_FLIGHT, MERGE_SIZE, eta=rate, n_clients=N_DEVICES, seed=seed
        )
    ),
    # Adaptive steps have the size of the rate, whatever that of the updates.
    "FADAS": Trial(
        make=lambda rate, seed: FADAS(IN_FLIGHT, MERGE_SIZE, eta=rate, seed=seed),
        per_rate=0.025,
    ),
    # One update a step, so a step is a fifth.
    "AsyncFedED": Trial(
        make=lambda rate, seed: AsyncFedED(IN_FLIGHT, lam=rate, seed=seed),
        per_rate=0.2,
    ),
    "SAA": Trial(make=lambda rate, seed: late_come_too(RelevanceAware(), rate, seed, "weights")),
    "K-async": Trial(
        make=lambda rate, seed: late_come_too(ByAge(polynomial(0.5)), rate, seed, "buffer_size")
    ),
    "FedBuff, Oort": Trial(make=buffered(selector=Oort)),
    "FedBuff, AdaSync": Trial(make=buffered(buffer_size=2, pace=AdaSync)),
    # Mixing whole models is unstable above 1.
    "FedAsync": Trial(
        make=lambda rate, seed: FedAsync(IN_FLIGHT, mix=rate, seed=seed),
        per_rate=0.2,
    ),
    "FedAvg": Trial(
        make=lambda rate, seed: FedAvg(IN_FLIGHT, server_optimizer=SGD(rate), seed=seed)
    ),
    "FedAvg, over-selected": Trial(
        make=lambda rate, seed: FedAvgOverSelected(
            IN_FLIGHT * 3 // 4, 4 / 3, server_optimizer=SGD(rate), seed=seed
        )
    ),
    "FedStale": Trial(
        make=lambda rate, seed: FedStale(
            IN_FLIGHT, n_clients=N_DEVICES, server_optimizer=SGD(rate), seed=seed
        )
    ),
}


SELECTED = (
    REFERENCE,
    OURS,
    "Gap-Aware",
    "FedBuff, age ignored",
    "FedBuff, 1/(1+tau)",
    "FADAS",
    "AsyncFedED",
    "SAA",
    "K-async",
    "FedBuff, AdaSync",
)
"""What is compared where runs take long; the rest is left out for its cost."""


def as_json(curve: Curve) -> dict[str, Any]:
    """Return a curve as a file of kept runs has it."""
    values = asdict(curve)
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}


def of_json(values: Mapping[str, Any]) -> Curve:
    """Return the curve of what `as_json` returned."""
    return Curve(**{k: np.array(v) if isinstance(v, list) else v for k, v in values.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Settings by seed, and how strategies are compared on them."""

    title: str
    settings: Mapping[int, Runs]
    tuning_seeds: tuple[int, ...]
    seeds: tuple[int, ...]
    target: float
    horizon_s: float
    kept: Kept = field(default_factory=Kept)

    def best(self, candidates: Mapping[str, Callable[[int], StaleStrategy]]) -> str:
        """Return the candidate with the highest mean accuracy over half of the time."""
        if len(candidates) == 1:
            return next(iter(candidates))

        def score(name: str) -> float:
            seeds, until_s = self.tuning_seeds, self.horizon_s / 2
            curves = [self.run(name, candidates[name], seed, until_s) for seed in seeds]
            return float(np.mean([curve.accuracy.mean() for curve in curves]))

        return max(candidates, key=score)

    def measure(self, name: str, trial: Trial, rates: Sequence[float]) -> tuple[float, list[Curve]]:
        """Tune a strategy and return its rate and its runs."""
        scaled = {
            f"{name}, rate {rate * trial.per_rate:g}": rate * trial.per_rate for rate in rates
        }
        best = self.best({each: partial(trial.make, rate) for each, rate in scaled.items()})
        return scaled[best], self.runs(best, partial(trial.make, scaled[best]))

    def runs(self, name: str, make: Callable[[int], StaleStrategy]) -> list[Curve]:
        """Return the runs that are reported."""
        return [self.run(name, make, seed, self.horizon_s) for seed in self.seeds]

    def run(
        self, name: str, make: Callable[[int], StaleStrategy], seed: int, until_s: float
    ) -> Curve:
        """Return one run, which its name, its seed and its length identify."""
        of = [self.title, name, seed, until_s]
        return of_json(
            self.kept.get(of, lambda: as_json(self.settings[seed].run(make(seed), until_s)))
        )

    def row(self, name: str, rate: float, curves: list[Curve], reference: list[Curve]) -> Row:
        """Return means, and paired differences from the reference with their 95% intervals."""
        found: Row = {
            "setting": self.title,
            "commit": self.kept.commit,
            "strategy": name,
            "server_rate": rate,
            "seeds": list(self.seeds),
            "tuning_seeds": list(self.tuning_seeds),
            "horizon_s": self.horizon_s,
            "target": self.target,
            "reached": sum(curve.reaches(self.target) for curve in curves),
            "versions": float(np.mean([curve.versions for curve in curves])),
        }
        outcomes = [curve.outcome(self.target) for curve in curves]
        others = [curve.outcome(self.target) for curve in reference]
        for key in outcomes[0]:
            values, base = (np.array([o[key] for o in each]) for each in (outcomes, others))
            found[key] = float(values.mean())
            found[f"{key}_by_seed"] = [round(float(value), 4) for value in values]
            if key in RATIOS:
                # Above 1 is faster, or less, than the reference.
                found[RATIOS[key]] = ratio(base, values)
            else:
                found[f"{key}_difference"] = difference(base, values)
        return found


def compare(
    comparison: Comparison, trials: Mapping[str, Trial], rates: Sequence[float]
) -> Iterator[Row]:
    """Yield a row for each strategy; the first of them is the reference."""
    reference: list[Curve] = []
    for name, trial in trials.items():
        rate, curves = comparison.measure(name, trial, rates)
        reference = reference or curves
        yield comparison.row(name, rate, curves, reference)
        if name == OURS and comparison.tuning_seeds:
            forms = {f"{OURS}, {form}, rate {rate:g}": form for form in FORMS}
            best = comparison.best(
                {each: partial(FORMS[form], rate) for each, form in forms.items()}
            )
            form = forms[best]
            curves = comparison.runs(best, partial(FORMS[form], rate))
            yield comparison.row(TUNED, rate, curves, reference) | {"form": form}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One setting: an app on a fleet, and what is compared there for how long."""

    app: str
    kind: str = "phones"
    slow: bool = False
    """Whether the digits 7 to 9 are dealt to the slow devices alone."""
    strategies: Sequence[str] = tuple(STRATEGIES)
    rates: Sequence[float] = RATES
    target: float = TARGET
    horizon_s: float = HORIZON_S
    grid_s: float = 60.0
    """Time between two readings of the accuracy."""

    def open(self, recordings: Path, seed: int) -> Setting:
        """Return the devices and the data of a seed."""
        traces = devices(recordings, self.kind, seed)
        return Setting(opened(self.app), traces, seed, slow=self.slow, grid_s=self.grid_s)


PLACES = {
    MIXED: Place(app="digits"),
    SLOW: Place(app="digits", slow=True),
    "mixed, desktops": Place(
        app="digits",
        kind="desktops",
        strategies=SELECTED,
        horizon_s=DESKTOP_HORIZON_S,
        grid_s=10.0,
    ),
    "shakespeare": Place(
        app="shakespeare",
        strategies=SELECTED,
        rates=PLAY_RATES,
        target=PLAY_TARGET,
        horizon_s=PLAY_HORIZON_S,
    ),
}


def measure(
    title: str,
    recordings: Path,
    *,
    kept: Kept,
    seeds: tuple[int, ...],
    quick: bool,
) -> list[Row]:
    """Return a row for each strategy in one setting, and print them as they come.

    Args:
        title: one of `PLACES`.
        recordings: folder of the published files.
        kept: runs that need not be run again.
        seeds: that are reported.
        quick: take the middle rate instead of tuning, and a twelfth of the time.
    """
    place = PLACES[title]
    rates = place.rates[len(place.rates) // 2 :][:1] if quick else place.rates
    tuning = () if quick else TUNING_SEEDS
    with threadpool_limits(1):
        comparison = Comparison(
            title=title,
            settings={s: place.open(recordings, s) for s in (*tuning, *seeds)},
            tuning_seeds=tuning,
            seeds=seeds,
            target=place.target,
            horizon_s=place.horizon_s / (12 if quick else 1),
            kept=kept,
        )
        trials = {name: STRATEGIES[name] for name in place.strategies}
        return shown(compare(comparison, trials, rates))


def stalenesses(setting: Setting, until_s: float) -> tuple[Curve, Array]:
    """Return a run of FedBuff at rate 1, and how stale each of its updates was."""
    seen: list[int] = []

    class Noting(ByAge):
        """Weighs as FedBuff does; strategies copy their weightings, so the list is not its own."""

        def weigh(self, update: ClientUpdate) -> float:
            seen.append(update.staleness)
            return super().weigh(update)

    make = buffered(weighting=lambda: Noting(polynomial(0.5)))
    return setting.run(make(1.0, setting.seed), until_s), np.array(seen)


def windows(recordings: Path, n: int | None = None) -> list[Row]:
    """Return for each seed who is online for as long as a run, and how stale updates are.

    Args:
        recordings: folder of them.
        n: seeds a fleet; None for all.
    """
    rows: list[Row] = []
    for kind, starts in STARTS.items():
        place = max(
            (each for each in PLACES.values() if each.kind == kind),
            key=lambda each: each.horizon_s,
        )
        for seed in list(starts)[:n]:
            traces = devices(recordings, kind, seed)
            found = online(traces, place.horizon_s).sum(1)
            with threadpool_limits(1):
                setting = Setting(opened("digits"), traces, seed, slow=False, grid_s=place.grid_s)
                curve, stale = stalenesses(setting, place.horizon_s)
            rows.append(
                {
                    "fleet": kind,
                    "seed": seed,
                    "tuning": seed in TUNING_SEEDS,
                    "begins": traces.epoch,
                    "horizon_s": place.horizon_s,
                    "online_mean": float(found.mean()),
                    "online_least": int(found.min()),
                    "online_most": int(found.max()),
                    "versions": curve.versions,
                    "staleness_median": float(np.median(stale)),
                    "staleness_95": float(np.quantile(stale, 0.95)),
                    "staleness_most": int(stale.max()),
                }
            )
    return rows


def shown(rows: Iterable[Row]) -> list[Row]:
    """Print the rows as they come."""
    found, started = [], time.perf_counter()
    for row in rows:
        found.append(row)
        print(line(row), f"({time.perf_counter() - started:.0f} s)", flush=True)
    return found


def line(row: Mapping[str, Any]) -> str:
    """Return a row in words."""
    n = len(row["hours_to_target_by_seed"])
    return (
        f"{row['setting']:20s} {row['strategy']:28s} rate {row['server_rate']:5.3g}  "
        f"{row['hours_to_target']:5.2f} h ({row['reached']}/{n})  "
        f"{row['final_accuracy']:.3f}  slow {row['final_slow_accuracy']:.3f}  "
        f"{row.get('form', '')}"
    )


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--keep", type=Path, help="file of runs; those in it are not run again")
    parser.add_argument("--quick", action="store_true", help="one seed, no tuning, less time")
    parser.add_argument(
        "--setting", choices=PLACES, action="append", help="measure only this one, keep the rest"
    )
    parser.add_argument("--windows", action="store_true", help="only count who is online")
    args = parser.parse_args()
    command = "python benchmarks/methods/run.py RECORDINGS"
    logging.getLogger("flwr").setLevel(logging.ERROR)
    if args.windows:
        rows = windows(args.recordings, 1 if args.quick else None)
        write_result("strategy_windows", rows, command=command + " --windows", quick=args.quick)
        return
    seeds, kept = SEEDS[:1] if args.quick else SEEDS, Kept(args.keep)
    measured = {
        title: measure(title, args.recordings, kept=kept, seeds=seeds, quick=args.quick)
        for title in args.setting or PLACES
    }
    if not args.quick:
        before = read_result("strategies")["rows"]
        measured = {
            title: measured.get(title) or [row for row in before if row["setting"] == title]
            for title in PLACES
        }
    rows = [row for each in measured.values() for row in each]
    write_result("strategies", rows, command=command, quick=args.quick)
    if not args.quick:
        rows = windows(args.recordings)
        write_result("strategy_windows", rows, command=command + " --windows")


if __name__ == "__main__":
    main()
