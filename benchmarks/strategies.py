"""Which strategy reaches a good model first on recorded devices, and which forgets the slow ones.

A hundred devices are composed of recordings: hours of FLASH phones, speeds of the AI Benchmark
ranking under PlanetLab's background load, 5G links. They train the built-in app `digits` (see
`numpy_digits`), dealt with a Dirichlet concentration of 0.1. In the setting "mixed" a device's
digits have nothing to do with its speed; in "slow hold 7-9" the slowest of the devices that ever
finish a job hold most of the digits 7 to 9.

Every strategy is tuned alike: the server's rate, out of three, by the mean accuracy over the
first half of the time on two seeds that are not used again. What is reported comes from five other
seeds, paired with FedBuff's runs. A seed sets the devices, the deal, the initial model and all
choices.

Run it with: python benchmarks/strategies.py [--quick]
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from numpy_digits import NumpyDigits, forward, read_model
from results_file import write_result
from threadpoolctl import threadpool_limits

from fedstale.simulation import RunEnded, TraceGrid
from fedstale.simulation.flower_app import FlowerApp
from fedstale.strategies import (
    SGD,
    AdaSync,
    ByAge,
    DirectionalGap,
    FedAsync,
    FedAvg,
    FedAvgOverSelected,
    FedBuff,
    Gap,
    Oort,
    StaleStrategy,
    constant,
    inverse,
    k_async,
    polynomial,
)
from fedstale.strategies.arrays import Array
from fedstale.traces import Job, Status, TraceSet
from fedstale.traces.compose import compose
from fedstale.traces.sources import read
from fedstale.traces.synthetic import synthesise

RECORDINGS = Path(__file__).parents[1] / ".." / "shared" / "traces"
SOURCES = {
    "availability": "flash-ready-strict.json",
    "compute": "ai-benchmark-devices.json",
    "background": "planetlab-cpu.tar.gz",
    "network": "uccmisl-5g.zip",
}
N_DEVICES, IN_FLIGHT, MERGE_SIZE = 100, 20, 5
TIMEOUT_S, HORIZON_S = 3600.0, 2 * 3600.0
START_S = 20 * 3600.0
"""Instant of the recorded hours at which training starts: a fifth of the phones are there."""
ALPHA = 0.1
TARGET = 0.8
SLOW_CLASSES = (7, 8, 9)
RATES = (0.3, 1.0, 3.0)
TUNING_SEEDS, SEEDS = (101, 102), (1, 2, 3, 4, 5)
GRID_S, WINDOW = 60.0, 10
"""Accuracy is read every GRID_S seconds and averaged over the last WINDOW readings."""
T_95 = 2.776
"""Student's t for five pairs."""
REFERENCE = "FedBuff"

Make = Callable[[float, int], StaleStrategy]
Row = dict[str, object]


def _buffered(**parts: Any) -> Make:  # noqa: ANN401 - options of a strategy
    """Return FedBuff with some of its parts replaced."""
    size = parts.pop("merge_size", MERGE_SIZE)
    return lambda rate, seed: FedBuff(IN_FLIGHT, size, rate=rate, seed=seed, **parts)


STRATEGIES: dict[str, Make] = {
    REFERENCE: _buffered(),
    "FedBuff, age ignored": _buffered(weighting=ByAge(constant())),
    "FedBuff, 1/(1+tau)": _buffered(weighting=ByAge(inverse())),
    "Gap-Aware": _buffered(weighting=Gap()),
    "directional gap": _buffered(weighting=DirectionalGap()),
    "FedBuff, Oort": _buffered(selector=Oort()),
    "FedBuff, AdaSync": _buffered(merge_size=AdaSync(start=2, most=IN_FLIGHT)),
    "K-async": lambda rate, seed: StaleStrategy(
        schedule=k_async(IN_FLIGHT, MERGE_SIZE),
        weighting=ByAge(polynomial(0.5)),
        server_optimizer=SGD(rate),
        normalise="merge_size",
        seed=seed,
    ),
    # Mixing whole models is unstable above 1, so its three rates are a fifth of the others'.
    "FedAsync": lambda rate, seed: FedAsync(IN_FLIGHT, mix=rate / 5, seed=seed),
    "FedAvg": lambda rate, seed: FedAvg(IN_FLIGHT, server_optimizer=SGD(rate), seed=seed),
    "FedAvg, over-selected": lambda rate, seed: FedAvgOverSelected(
        IN_FLIGHT * 3 // 4, 4 / 3, server_optimizer=SGD(rate), seed=seed
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What a run reached; arrays of shape (readings,)."""

    accuracy: Array
    """Share of right answers, averaged over the last ten minutes."""
    slow: Array
    """The same on the digits 7 to 9."""
    versions: int
    """Merges within the horizon."""

    @property
    def to_target_s(self) -> float:
        """Instant at which the accuracy reaches the target, in s; the horizon if it never does."""
        reached = np.flatnonzero(self.accuracy >= TARGET)
        return float(GRID_S * (reached[0] + 1)) if reached.size else HORIZON_S

    def outcome(self) -> dict[str, float]:
        """Return the numbers that are compared; finals are means over the last tenth."""
        last = len(self.accuracy) // 10
        return {
            "hours_to_target": self.to_target_s / 3600.0,
            "final_accuracy": float(self.accuracy[-last:].mean()),
            "final_slow_accuracy": float(self.slow[-last:].mean()),
        }


class Setting:
    """Devices and digits of one seed."""

    def __init__(self, app: FlowerApp, sources: dict[str, TraceSet], seed: int, slow: bool) -> None:
        """Compose the devices; `slow` gives the digits 7 to 9 to the slow ones."""
        app.load_client()
        from digits_app import task  # only now, while the app is open

        self.app, self.seed, self.task = app, seed, task
        self.config = app.run_config({"alpha": ALPHA, "seed": seed})
        self.costs = app.costs.resolved(self.config)
        self.test = task.load_data(seed)[1]
        traces = _devices(sources, seed)
        if slow:
            rank = np.argsort(-_seconds_per_job(traces), kind="stable")
            partitions = np.argsort(-self._share_of_slow_classes(), kind="stable")
            order = np.empty(N_DEVICES, dtype=np.int64)
            order[partitions] = rank
            traces = traces.take(order)
        self.traces = traces

    def _share_of_slow_classes(self) -> Array:
        labels = self.task.load_data(self.seed)[0][1].numpy()
        deal = self.task.deal(N_DEVICES, ALPHA, self.seed)
        return np.array([np.isin(labels[mine], SLOW_CLASSES).mean() for mine in deal])

    def run(self, strategy: StaleStrategy, until_s: float = HORIZON_S) -> Curve:
        """Return what a strategy reaches by some instant."""
        grid = TraceGrid(
            self.traces,
            NumpyDigits(self.task),
            costs=self.costs,
            seed=self.seed,
            run_config=self.config,
            until_s=until_s,
        )
        seen: list[tuple[float, float, float]] = []

        def evaluate(version: int, arrays: ArrayRecord) -> MetricRecord:
            images, labels = (part.numpy() for part in self.test)
            right = forward(read_model(arrays), images)[1].argmax(1) == labels
            rare = np.isin(labels, SLOW_CLASSES)
            seen.append((grid.now(), right.mean(), right[rare].mean()))
            return MetricRecord({"accuracy": float(right.mean())})

        initial = ArrayRecord(self.task.Network(self.seed).state_dict())
        with grid.running(*self.app.packages), suppress(RunEnded):
            strategy.start(grid, initial, 10**6, TIMEOUT_S, evaluate_fn=evaluate)
        return _curve(np.array(seen), until_s)


def _curve(seen: Array, until_s: float) -> Curve:
    """Read the step function of (instant, accuracy, accuracy on some) on the grid of instants."""
    instants = np.arange(GRID_S, until_s + 1.0, GRID_S)
    at = np.searchsorted(seen[:, 0], instants, side="right") - 1
    weights = np.ones(WINDOW) / WINDOW
    padded = np.concatenate([np.repeat(at[:1], WINDOW - 1), at])
    smooth = [np.convolve(seen[padded, column], weights, mode="valid") for column in (1, 2)]
    return Curve(accuracy=smooth[0], slow=smooth[1], versions=len(seen) - 1)


def _devices(sources: dict[str, TraceSet], seed: int) -> TraceSet:
    if not sources:
        return synthesise(N_DEVICES, days=2, seed=seed)
    traces = compose(**sources, n=N_DEVICES, seed=seed, uplink_share=0.2)
    assert traces.availability is not None
    return replace(traces, availability=traces.availability.shifted(np.full(N_DEVICES, START_S)))


def _seconds_per_job(traces: TraceSet) -> Array:
    """Return the median duration of the jobs that a device finishes, 0 for one that finishes none.

    Jobs of a median device's examples are sent every three minutes.
    """
    sent = np.arange(0.0, HORIZON_S, 180.0)
    job = Job(work=60.0, download_bytes=14e6, upload_bytes=14e6, ttl_s=TIMEOUT_S)
    devices = np.repeat(np.arange(traces.n_devices), len(sent))
    trips = traces.trips(devices, np.tile(sent, traces.n_devices), job)
    done = trips.status == Status.REPORTED
    seconds = np.full(len(devices), np.nan)
    seconds[done] = trips.reported[done] - trips.started[done]
    return np.array(
        [
            np.nanmedian(own) if np.isfinite(own).any() else 0.0
            for own in seconds.reshape(traces.n_devices, -1)
        ]
    )


def measure(
    name: str, settings: dict[int, Setting], rates: tuple[float, ...], seeds: tuple[int, ...]
) -> tuple[float, list[Curve]]:
    """Tune a strategy and return its rate and its runs."""
    make = STRATEGIES[name]
    if len(rates) == 1:
        return rates[0], [settings[s].run(make(rates[0], s)) for s in seeds]

    def score(rate: float) -> float:
        curves = [settings[s].run(make(rate, s), HORIZON_S / 2) for s in TUNING_SEEDS]
        return float(np.mean([curve.accuracy.mean() for curve in curves]))

    best = max(rates, key=score)
    return best, [settings[s].run(make(best, s)) for s in seeds]


def row(curves: list[Curve], reference: list[Curve]) -> Row:
    """Return means, and paired differences from the reference with their 95% intervals."""
    found: Row = {
        "reached": sum(curve.to_target_s < HORIZON_S for curve in curves),
        "versions": float(np.mean([curve.versions for curve in curves])),
    }
    outcomes = [curve.outcome() for curve in curves]
    others = [curve.outcome() for curve in reference]
    for key in outcomes[0]:
        values, base = (np.array([o[key] for o in each]) for each in (outcomes, others))
        found[key] = float(values.mean())
        found[f"{key}_by_seed"] = [round(float(value), 4) for value in values]
        if key == "hours_to_target":
            # Times are compared as ratios: above 1 is faster than the reference.
            mean, half = _interval(np.log(base / values))
            found["speed_up"] = [float(np.exp(x)) for x in (mean, mean - half, mean + half)]
        else:
            mean, half = _interval(values - base)
            found[f"{key}_difference"] = [mean, mean - half, mean + half]
    return found


def _interval(differences: Array) -> tuple[float, float]:
    if len(differences) < 2:
        return float(differences.mean()), float("nan")
    half = T_95 * differences.std(ddof=1) / np.sqrt(len(differences))
    return float(differences.mean()), float(half)


def compare(slow: bool, rates: tuple[float, ...], seeds: tuple[int, ...]) -> list[Row]:
    """Return a row for each strategy in one setting."""
    title = "slow hold 7-9" if slow else "mixed"
    sources = {}
    if RECORDINGS.is_dir():
        sources = {part: read(RECORDINGS / name) for part, name in SOURCES.items()}
    app, rows, reference = FlowerApp.find("digits"), [], []
    with app.importable(), threadpool_limits(1):
        tuning = TUNING_SEEDS if len(rates) > 1 else ()
        settings = {s: Setting(app, sources, s, slow) for s in (*tuning, *seeds)}
        for name in STRATEGIES:
            started = time.perf_counter()
            rate, curves = measure(name, settings, rates, seeds)
            reference = reference or curves
            facts = row(curves, reference)
            rows.append({"setting": title, "strategy": name, "server_rate": rate} | facts)
            print(
                f"{title:14s} {name:28s} rate {rate:3.1f}  "
                f"{facts['hours_to_target']:5.2f} h ({facts['reached']}/{len(seeds)})  "
                f"{facts['final_accuracy']:.3f}  slow {facts['final_slow_accuracy']:.3f}  "
                f"({time.perf_counter() - started:.0f} s)",
                flush=True,
            )
    return rows


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, no tuning, not written")
    quick = parser.parse_args().quick
    seeds, rates = (SEEDS[:1], (1.0,)) if quick else (SEEDS, RATES)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        both = [pool.submit(compare, slow, rates, seeds) for slow in (False, True)]
        rows = [line for setting in both for line in setting.result()]
    if not quick:
        write_result("strategies", rows, command="python benchmarks/strategies.py")


if __name__ == "__main__":
    main()
