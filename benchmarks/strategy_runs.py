"""One run of a strategy on recorded devices, and what it reached when.

A hundred devices are composed of recordings: hours of FLASH phones, speeds of the AI Benchmark
ranking under PlanetLab's background load, 5G links. They train the built-in app `digits` (see
`numpy_digits`). A seed sets the devices, the deal, the initial model and all choices.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from numpy_digits import NumpyDigits, deal_rare_to, forward, read_model

from fedstale.simulation import RunEnded, TraceGrid
from fedstale.simulation.flower_app import FlowerApp
from fedstale.strategies import StaleStrategy
from fedstale.strategies.arrays import Array
from fedstale.traces import Job, Status, TraceSet

RECORDINGS = Path(__file__).parents[1] / ".." / "shared" / "traces"
SOURCES = {
    "availability": "flash-days.json",
    "compute": "ai-benchmark-devices.json",
    "background": "planetlab-cpu.tar.gz",
    "network": "uccmisl-5g.zip",
}
N_DEVICES = 100
TIMEOUT_S, HORIZON_S = 3600.0, 2 * 3600.0
START_S = 3 * 3600.0
"""Instant of the recorded days at which training starts: most phones are online in those hours."""
ALPHA = 0.1
SLOW_CLASSES = (7, 8, 9)
GRID_S, WINDOW = 60.0, 10
"""Accuracy is read every GRID_S seconds and averaged over the last WINDOW readings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What a run reached; arrays of shape (readings,)."""

    accuracy: Array
    """Share of right answers, averaged over the last ten minutes."""
    slow: Array
    """The same on the digits 7 to 9."""
    versions: int
    """Merges within the horizon."""

    def to_target_s(self, target: float) -> float:
        """Return the instant at which the accuracy reaches a target, or the end, in s."""
        reached = np.flatnonzero(self.accuracy >= target)
        return float(GRID_S * ((reached[0] if reached.size else len(self.accuracy) - 1) + 1))

    def reaches(self, target: float) -> bool:
        """Return whether the accuracy reaches a target."""
        return bool((self.accuracy >= target).any())

    def outcome(self, target: float) -> dict[str, float]:
        """Return the numbers that are compared; finals are means over the last tenth."""
        last = len(self.accuracy) // 10
        return {
            "hours_to_target": self.to_target_s(target) / 3600.0,
            "final_accuracy": float(self.accuracy[-last:].mean()),
            "final_slow_accuracy": float(self.slow[-last:].mean()),
        }


class Setting:
    """Devices and digits of one seed."""

    def __init__(self, app: FlowerApp, sources: dict[str, TraceSet], seed: int, slow: bool) -> None:
        """Compose the devices; `slow` deals the digits 7 to 9 to the slow ones alone."""
        app.load_client()
        from digits_app import task  # only now, while the app is open

        self.app, self.seed, self.task = app, seed, task
        self.config = app.run_config({"alpha": ALPHA, "seed": seed})
        self.costs = app.costs.resolved(self.config)
        train, self.test = task.load_data(seed)
        self.traces = devices(sources, seed)
        self.deal = None
        if slow:
            labels = train[1].numpy()
            owners = slowest_third(self.traces)
            self.deal = deal_rare_to(owners, labels, SLOW_CLASSES, alpha=ALPHA, seed=seed)

    def run(self, strategy: StaleStrategy, until_s: float = HORIZON_S) -> Curve:
        """Return what a strategy reaches by some instant."""
        grid = TraceGrid(
            self.traces,
            NumpyDigits(self.task, self.deal),
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
        return read_curve(np.array(seen), until_s)


def read_curve(seen: Array, until_s: float) -> Curve:
    """Read the step function of (instant, accuracy, accuracy on some) on the grid of instants."""
    instants = np.arange(GRID_S, until_s + 1.0, GRID_S)
    at = np.searchsorted(seen[:, 0], instants, side="right") - 1
    weights = np.ones(WINDOW) / WINDOW
    padded = np.concatenate([np.repeat(at[:1], WINDOW - 1), at])
    smooth = [np.convolve(seen[padded, column], weights, mode="valid") for column in (1, 2)]
    return Curve(accuracy=smooth[0], slow=smooth[1], versions=len(seen) - 1)


def read_sources() -> dict[str, TraceSet]:
    """Return the recordings, or nothing where they are not there."""
    if not RECORDINGS.is_dir():
        return {}
    return {part: TraceSet.read(RECORDINGS / name) for part, name in SOURCES.items()}


def devices(sources: dict[str, TraceSet], seed: int) -> TraceSet:
    """Return the devices of a seed, synthetic ones where there are no recordings."""
    if not sources:
        return TraceSet.synthetic(N_DEVICES, days=2, seed=seed)
    traces = TraceSet.compose(**sources, n=N_DEVICES, seed=seed, uplink_share=0.2, days=1)
    assert traces.availability is not None
    return replace(traces, availability=traces.availability.shifted(np.full(N_DEVICES, START_S)))


def slowest_third(traces: TraceSet) -> Array:
    """Return which devices are the slowest third of those that ever finish a job.

    Jobs of a median device's examples are sent every three minutes; a device's time is the median
    of those that it finishes.

    Returns:
        bool of shape (devices,).
    """
    sent = np.arange(0.0, HORIZON_S, 180.0)
    job = Job(work=60.0, download_bytes=14e6, upload_bytes=14e6, ttl_s=TIMEOUT_S)
    each = np.repeat(np.arange(traces.n_devices), len(sent))
    trips = traces.trips(each, np.tile(sent, traces.n_devices), job)
    done = trips.status == Status.REPORTED
    seconds = np.full(len(each), np.nan)
    seconds[done] = trips.reported[done] - trips.started[done]
    typical = [
        np.nanmedian(own) if np.isfinite(own).any() else np.nan
        for own in seconds.reshape(traces.n_devices, -1)
    ]
    # NaN is never at or above the limit.
    return np.asarray(typical >= np.nanquantile(typical, 2 / 3))
