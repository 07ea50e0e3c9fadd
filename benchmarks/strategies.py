"""Which strategy reaches a good model first on recorded devices, and which forgets the slow ones.

A hundred recorded devices train the built-in app `digits` (see `strategy_runs`). In the setting
"mixed" a device's digits have nothing to do with its speed: a Dirichlet deal of concentration 0.1.
In "slow alone hold 7-9" the digits 7 to 9 are with the slowest third of the devices that ever
finish a job, and these have few others; the other digits are dealt to the rest as before.

Every strategy is tuned alike: the server's rate, out of four, by the mean accuracy over the first
hour on two seeds that are not used again. "directional gap, tuned form" then chooses
its share and its grain on the same seeds, at the rate of the default form. What is reported comes
from five other seeds, paired with FedBuff's runs.

Run it with: python benchmarks/strategies.py [--quick] [--setting NAME]
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any, Protocol

import numpy as np
from results_file import RESULTS, write_result
from shakespeare_runs import PLAY_HORIZON_S, TEXT, PlaySetting
from strategy_runs import HORIZON_S, N_DEVICES, Curve, Setting, read_sources
from threadpoolctl import threadpool_limits

from fedstale.comparison.statistics import estimate
from fedstale.simulation.flower_app import FlowerApp
from fedstale.strategies import (
    CA2FL,
    FADAS,
    SGD,
    AdaSync,
    AsyncFedED,
    ByAge,
    DirectionalGap,
    FedAsync,
    FedAvg,
    FedAvgOverSelected,
    FedBuff,
    FedStale,
    Gap,
    Oort,
    RelevanceAware,
    StaleStrategy,
    Validation,
    Weighting,
    constant,
    inverse,
    k_async,
    polynomial,
)
from fedstale.strategies.arrays import Array

IN_FLIGHT, MERGE_SIZE = 20, 5
TARGET = 0.8
RATES = (0.3, 1.0, 3.0, 10.0)
PLAY_TARGET, PLAY_TUNING_SEEDS, PLAY_RATES = 0.3, (101,), RATES[:3]
TUNING_SEEDS, SEEDS = (101, 102), (1, 2, 3, 4, 5)
MIXED, SLOW, LONGER = "mixed", "slow alone hold 7-9", ", four hours"
LONG_S = 4 * 3600.0
"""Time in which each run of FedBuff reaches the target."""
REFERENCE = "FedBuff"
PLAIN = Validation(examples_cap=None)
"""Examples count as they are told: nobody lies here, and papers weigh by them."""
OURS = "directional gap"
TUNED = "directional gap, tuned form"

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

    def run(self, strategy: StaleStrategy, until_s: float = ..., /) -> Curve:
        """Return what a strategy reaches by some instant."""


def buffered(**parts: Any) -> Make:  # noqa: ANN401 - options of a strategy
    """Return FedBuff with some of its parts replaced; a callable part is made anew for each run."""

    def make(rate: float, seed: int) -> StaleStrategy:
        new = {name: part() if callable(part) else part for name, part in parts.items()}
        size = new.pop("buffer_size", MERGE_SIZE)
        return FedBuff(IN_FLIGHT, size, rate=rate, seed=seed, **new)

    return make


def late_come_too(weighting: Weighting, rate: float, seed: int, normalise: Any) -> StaleStrategy:  # noqa: ANN401
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
    "FedBuff, 1/(1+tau)": Trial(make=buffered(weighting=lambda: ByAge(inverse()))),
    "CA2FL": Trial(
        make=lambda rate, seed: CA2FL(
            IN_FLIGHT, MERGE_SIZE, rate=rate, seed=seed, n_clients=N_DEVICES
        )
    ),
    # Adaptive steps have the size of the rate, whatever that of the updates.
    "FADAS": Trial(
        make=lambda rate, seed: FADAS(IN_FLIGHT, MERGE_SIZE, rate=rate, seed=seed), per_rate=0.1
    ),
    # One update a step, so a step is a fifth.
    "AsyncFedED": Trial(
        make=lambda rate, seed: AsyncFedED(IN_FLIGHT, lam=rate, seed=seed), per_rate=0.2
    ),
    "SAA": Trial(make=lambda rate, seed: late_come_too(RelevanceAware(), rate, seed, "weights")),
    "K-async": Trial(
        make=lambda rate, seed: late_come_too(ByAge(polynomial(0.5)), rate, seed, "buffer_size")
    ),
    "FedBuff, Oort": Trial(make=buffered(selector=Oort)),
    "FedBuff, AdaSync": Trial(make=buffered(buffer_size=AdaSync(start=2, most=IN_FLIGHT))),
    # Mixing whole models is unstable above 1.
    "FedAsync": Trial(
        make=lambda rate, seed: FedAsync(IN_FLIGHT, mix=rate, seed=seed), per_rate=0.1
    ),
    "FedAvg": Trial(
        make=lambda rate, seed: FedAvg(
            IN_FLIGHT, server_optimizer=SGD(rate), validation=PLAIN, seed=seed
        )
    ),
    "FedAvg, over-selected": Trial(
        make=lambda rate, seed: FedAvgOverSelected(
            IN_FLIGHT * 3 // 4, 4 / 3, server_optimizer=SGD(rate), validation=PLAIN, seed=seed
        )
    ),
    "FedStale": Trial(
        make=lambda rate, seed: FedStale(
            IN_FLIGHT, n_clients=N_DEVICES, server_optimizer=SGD(rate), validation=PLAIN, seed=seed
        )
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Settings by seed, and how strategies are compared on them."""

    title: str
    settings: Mapping[int, Runs]
    tuning_seeds: tuple[int, ...]
    seeds: tuple[int, ...]
    target: float
    horizon_s: float = HORIZON_S
    tuning_s: float = HORIZON_S / 2

    def best(self, candidates: Mapping[str, Callable[[int], StaleStrategy]]) -> str:
        """Return the candidate with the highest mean accuracy over the time for tuning."""
        if len(candidates) == 1:
            return next(iter(candidates))

        def score(name: str) -> float:
            make, until_s = candidates[name], self.tuning_s
            curves = [self.settings[seed].run(make(seed), until_s) for seed in self.tuning_seeds]
            return float(np.mean([curve.accuracy.mean() for curve in curves]))

        return max(candidates, key=score)

    def measure(self, trial: Trial, rates: Sequence[float]) -> tuple[float, list[Curve]]:
        """Tune a strategy and return its rate and its runs."""
        scaled = [round(rate * trial.per_rate, 6) for rate in rates]
        rate = float(self.best({str(r): partial(trial.make, r) for r in scaled}))
        return rate, self.runs(partial(trial.make, rate))

    def runs(self, make: Callable[[int], StaleStrategy]) -> list[Curve]:
        """Return the runs that are reported."""
        return [self.settings[seed].run(make(seed), self.horizon_s) for seed in self.seeds]

    def row(self, name: str, rate: float, curves: list[Curve], reference: list[Curve]) -> Row:
        """Return means, and paired differences from the reference with their 95% intervals."""
        found: Row = {
            "setting": self.title,
            "strategy": name,
            "server_rate": rate,
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
            if key == "hours_to_target":
                # Times are compared as ratios: above 1 is faster than the reference.
                mean, half = interval(np.log(base / values))
                found["speed_up"] = [float(np.exp(x)) for x in (mean, mean - half, mean + half)]
            else:
                mean, half = interval(values - base)
                found[f"{key}_difference"] = [mean, mean - half, mean + half]
        return found


def interval(differences: Array) -> tuple[float, float]:
    """Return the mean and the half width of its 95% interval."""
    found = estimate(differences.tolist())
    return found.mean, found.high - found.mean


def compare(
    comparison: Comparison, trials: Mapping[str, Trial], rates: Sequence[float]
) -> Iterator[Row]:
    """Yield a row for each strategy; the first of them is the reference."""
    reference: list[Curve] = []
    for name, trial in trials.items():
        rate, curves = comparison.measure(trial, rates)
        reference = reference or curves
        yield comparison.row(name, rate, curves, reference)
        if name == OURS and len(comparison.tuning_seeds) > 1 and trials is STRATEGIES:
            form = comparison.best({form: partial(make, rate) for form, make in FORMS.items()})
            curves = comparison.runs(partial(FORMS[form], rate))
            yield comparison.row(TUNED, rate, curves, reference) | {"form": form}


def on_digits(title: str, rates: Sequence[float], seeds: tuple[int, ...]) -> list[Row]:
    """Return a row for each strategy in one setting of the digits; for the first ones if long."""
    sources, app = read_sources(), FlowerApp.find("digits")
    slow, is_long = title.startswith(SLOW), title.endswith(LONGER)
    with app.importable(), threadpool_limits(1):
        tuning = TUNING_SEEDS if len(rates) > 1 else ()
        comparison = Comparison(
            title=title,
            settings={s: Setting(app, sources, s, slow) for s in (*tuning, *seeds)},
            tuning_seeds=tuning,
            seeds=seeds,
            target=TARGET,
            horizon_s=LONG_S if is_long else HORIZON_S,
        )
        trials = dict(list(STRATEGIES.items())[:2]) if is_long else STRATEGIES
        return shown(compare(comparison, trials, rates))


def on_shakespeare(rates: Sequence[float], seeds: tuple[int, ...]) -> list[Row]:
    """Return a row for each strategy on the roles of a play."""
    if not TEXT.is_file():
        print(f"{TEXT} is not there: shakespeare is left out")
        return []
    sources, app = read_sources(), FlowerApp.find("shakespeare")
    with app.importable(), threadpool_limits(1):
        tuning = PLAY_TUNING_SEEDS if len(rates) > 1 else ()
        comparison = Comparison(
            title="shakespeare",
            settings={s: PlaySetting(app, sources, s) for s in (*tuning, *seeds)},
            tuning_seeds=tuning,
            seeds=seeds,
            target=PLAY_TARGET,
            horizon_s=PLAY_HORIZON_S,
            tuning_s=PLAY_HORIZON_S / 2,
        )
        return shown(compare(comparison, STRATEGIES, rates))


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


SETTINGS: dict[str, Callable[[Sequence[float], tuple[int, ...]], list[Row]]] = {
    **{name: partial(on_digits, name) for name in (MIXED, SLOW, MIXED + LONGER, SLOW + LONGER)},
    "shakespeare": on_shakespeare,
}


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, no tuning, not written")
    parser.add_argument(
        "--setting", choices=SETTINGS, action="append", help="measure only this one, keep the rest"
    )
    args = parser.parse_args()
    wanted = args.setting or list(SETTINGS)
    seeds = SEEDS[:1] if args.quick else SEEDS
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        found = {}
        for name in wanted:
            rates = PLAY_RATES if name == "shakespeare" else RATES
            rates = rates[1:2] if args.quick else rates
            found[name] = pool.submit(SETTINGS[name], rates, seeds)
        measured = {name: rows.result() for name, rows in found.items()}
    if not args.quick:
        kept = {name: measured.get(name) or _measured_before(name) for name in SETTINGS}
        rows = [row for each in kept.values() for row in each]
        write_result("strategies", rows, command="python benchmarks/strategies.py")


def _measured_before(setting: str) -> list[Row]:
    path = RESULTS / "strategies.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return [row for row in rows if row["setting"] == setting]


if __name__ == "__main__":
    main()
