"""One run of a built-in app by its run config on recorded phones, and what it came to when.

Thirty phones train for some hours under `TraceGrid`, with the arithmetic of `lab.apps` and the work
and bytes that the app declares. The strategy is the one that the run config names, as the app would
make it. The model is evaluated at most once a minute of virtual time, whatever strategy, so that
a strategy of many small steps is charged no more for it.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, MetricRecord

from fedstale.apps.strategy import strategy
from fedstale.contrib.tuning.objective import recent_mean
from fedstale.errors import ConfigError
from fedstale.simulation import Costs, RunEnded, TraceGrid
from fedstale.traces import TraceSet
from fedstale.traces.arrays import DAY_S, stream
from lab.apps import TrainingApp, opened
from lab.fleets import fleets

N_DEVICES = 30
TIMEOUT_S = 3600.0
PRESENT_S = 300.0
"""For how long a phone is online in the window at least, to be drawn for it."""
EVERY_S = 60.0
ALPHA = 0.1
_DRAWN = 102

Settings = Mapping[str, bool | int | float | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Devices and hours: those that tune, or those that judge."""

    division: int
    """Seed of the division of phones, loads and links into parts."""
    part: str
    """Of `lab.fleets`: "learn" tunes and "test" judges."""
    day: int
    hour: int
    until_s: float
    """Length in s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What a run came to; lists of one length, in the order of time."""

    at_s: list[float]
    """Instants of virtual time at which the model was evaluated."""
    version: list[int]
    accuracy: list[float]
    cpu_s: list[float]
    """Processor seconds since the beginning."""
    total_cpu_s: float
    """Processor seconds of all of it."""

    def by(self, at_s: float) -> float:
        """Return the accuracy by an instant of virtual time, as `fedstale tune` has it."""
        return recent_mean(np.array(self.at_s), np.array(self.accuracy), at_s)

    def last_by(self, at_s: float) -> float:
        """Return the last accuracy that was measured until an instant."""
        return self.accuracy[max(int(np.searchsorted(self.at_s, at_s, side="right")) - 1, 0)]

    def by_version(self, version: float) -> float:
        """Return the accuracy by a number of server steps, in the mean over the last eighth."""
        return recent_mean(np.array(self.version), np.array(self.accuracy), version)

    def cost_by(self, at_s: float) -> float:
        """Return the processor seconds until an instant of virtual time."""
        times, costs = [*self.at_s, np.inf], [*self.cpu_s, self.total_cpu_s]
        return costs[int(np.searchsorted(times, at_s, side="left"))]

    def cost_by_version(self, version: float) -> float:
        """Return the processor seconds until a number of server steps, or of all of it."""
        costs = [*self.cpu_s, self.total_cpu_s]
        return costs[int(np.searchsorted(self.version, version, side="left"))]


def run(app: str, place: Place, settings: Settings, seed: int, recordings: Path) -> Curve:
    """Train an app in some hours; settings that the strategy refuses are right in no case, at once.

    Args:
        app: digits, fashion or shakespeare.
        place: devices and hours.
        settings: as `described` takes them.
        seed: of the deal, of the first model and of all choices.
        recordings: folder of the published files.
    """
    own = opened(app)
    skew = {"alpha": ALPHA} if own.has_skew else {}
    fixed = {key: own.settings[key] for key in ("text",) if key in own.settings}
    config = own.flower.run_config({**skew, **fixed, **described(app, settings), "seed": seed})
    grid = TraceGrid(
        devices(recordings, place),
        own.executor(),
        costs=_costs(own, config, seed),
        seed=seed,
        run_config=config,
        until_s=place.until_s,
    )
    found = Curve(at_s=[], version=[], accuracy=[], cpu_s=[], total_cpu_s=0.0)
    began = time.process_time()

    def evaluate(version: int, arrays: ArrayRecord) -> MetricRecord | None:
        if found.at_s and grid.now() - found.at_s[-1] < EVERY_S:
            return None
        accuracy, _ = own.evaluate(arrays, seed)
        found.at_s.append(grid.now())
        found.version.append(version)
        found.accuracy.append(accuracy)
        found.cpu_s.append(round(time.process_time() - began, 4))
        return MetricRecord({"accuracy": accuracy})

    try:
        made = strategy(config)
    except ConfigError:
        return Curve(at_s=[0.0], version=[0], accuracy=[0.0], cpu_s=[0.0], total_cpu_s=0.0)
    with grid.running(), suppress(RunEnded), np.errstate(all="ignore"):
        made.start(grid, own.initial(seed), 10**6, TIMEOUT_S, evaluate_fn=evaluate)
    return replace(found, total_cpu_s=round(time.process_time() - began, 4))


def described(app: str, settings: Settings) -> dict[str, bool | int | float | str]:
    """Return the run config of some settings: a method by name, its two sizes, and other keys."""
    found = dict(settings)
    name, n, size = found.pop("strategy"), found.pop("concurrency", 10), found.pop("buffer-size", 5)
    texts = {
        "fedavg": f"FedAvg(fraction_train={0.1 if app == 'shakespeare' else 0.5})",
        "fedbuff": f"FedBuff({n}, {size})",
        "gap-aware": f"GapAware({n}, {size})",
        "direction-aware": f"DirectionAware({n}, {size})",
        "refl": f"REFL({n}, {size})",
        "fedasync": f"FedAsync({n})",
    }
    # The app's default is Flower's own FedAvg.
    return found | ({} if name == "flower-fedavg" else {"strategy": texts[str(name)]})


@cache
def devices(recordings: Path, place: Place) -> TraceSet:
    """Return the phones of a place; instant 0 is the beginning of its hours."""
    fleet = fleets(recordings, place.division, "phones")[place.part]
    start = place.day * DAY_S + place.hour * 3600.0
    window = fleet.between(start, start + place.until_s)
    instants = np.arange(0.0, place.until_s, 30.0)
    everyone = np.arange(window.n_devices)
    availability = window.channel("availability")
    share = np.mean(
        [availability.is_available(everyone, np.full(everyone.size, t)) for t in instants], axis=0
    )
    present = np.flatnonzero(share * place.until_s >= PRESENT_S)
    drawn = stream(place.division, _DRAWN).choice(present, N_DEVICES, replace=False)
    return window.take(np.sort(drawn))


def _costs(own: TrainingApp, config: Settings, seed: int) -> Costs:
    """Return the declared costs, as much on the device with the mean number of examples."""
    declared = own.flower.costs.resolved(config)
    assert declared.work_per_example is not None
    assert declared.examples is not None
    mean = float(own.examples(N_DEVICES, ALPHA if own.has_skew else None, seed).mean())
    work = declared.work_per_example * declared.examples / mean
    return replace(declared, work_per_example=work, examples=mean)
