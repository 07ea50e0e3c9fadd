"""One run of a strategy on recorded devices, and what it reached when.

A hundred devices of one kind come from `lab.fleets`, all of its parts together: nothing is learnt
from them here, so nothing has to be held back. They are drawn from those that are online for at
least five minutes of a window of four hours; the window is another one for each seed, on another
day. They train the app `digits`, or `shakespeare`, each on the first sixteen of its lines;
a job costs the device as much as the app says of all that it holds (`lab.apps`). A seed also sets
the loads and links of the devices, the deal, the initial model and all choices.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.app.user_config import UserConfig

from fedstale.simulation import Executor, RunEnded, TraceGrid
from fedstale.strategies import StaleStrategy
from fedstale.strategies.types import Array
from fedstale.traces import Job, Status, TraceSet
from fedstale.traces.arrays import DAY_S, stream
from fedstale.traces.merge import merged
from lab.apps import LINES, Digits, Shakespeare, TrainingApp
from lab.curves import final
from lab.fleets import ASSUMED, fleets

N_DEVICES = 100
TIMEOUT_S, WINDOW_S = 3600.0, 4 * 3600.0
PRESENT_S = 300.0
"""For how long a device is online in a window at least, to be drawn for it."""
SEEDS, TUNING_SEEDS = (1, 2, 3, 4, 5), (101, 102)
STARTS = {
    "phones": {1: (0, 2), 2: (1, 2), 3: (2, 2), 4: (3, 2), 5: (4, 2), 101: (5, 23), 102: (6, 23)},
    "desktops": {1: (67, 8), 2: (74, 8), 3: (81, 8), 4: (88, 8), 5: (95, 8)}
    | {101: (64, 8), 102: (99, 8)},
}
"""Day of the recordings and hour at which each seed's window starts.

Half of the phones were recorded for five days or less, which then repeat: seeds that tune have
another hour, too. Desktops have Fridays of a term, and Tuesdays to tune.
"""
ALPHA = 0.1
SLOW_CLASSES = (7, 8, 9)
_DRAWN, _DEAL_RARE = 102, 101
"""Streams of random numbers, apart from those of the app."""
TEST_EVERY, SLOW_EVERY, VERSIONS = 6, 2, 4
"""Every so many held-out lines of plays, and versions, are evaluated."""
WINDOW = 10
"""Over how many readings accuracy is averaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What a run reached; arrays of shape (readings,)."""

    accuracy: Array
    """Share of right answers, averaged over the last ten readings."""
    slow: Array
    """The same on the digits 7 to 9, or on lines of the slow devices."""
    gigabytes: Array
    """Both ways, of all jobs that have begun by then."""
    versions: int
    """Server steps within the horizon."""
    grid_s: float
    """Time between two readings in s."""

    def to_target_s(self, target: float) -> float:
        """Return the instant at which the accuracy reaches a target, or the end, in s."""
        reached = np.flatnonzero(self.accuracy >= target)
        return float(self.grid_s * ((reached[0] if reached.size else len(self.accuracy) - 1) + 1))

    def reaches(self, target: float) -> bool:
        """Return whether the accuracy reaches a target."""
        return bool((self.accuracy >= target).any())

    def outcome(self, target: float) -> dict[str, float]:
        """Return the numbers that are compared; finals are means over the last tenth."""
        when = round(self.to_target_s(target) / self.grid_s) - 1
        return {
            "hours_to_target": self.to_target_s(target) / 3600.0,
            "gigabytes_to_target": float(self.gigabytes[when]),
            "final_accuracy": final(self.accuracy),
            "final_slow_accuracy": final(self.slow),
        }


class Setting:
    """Devices and data of one seed."""

    def __init__(
        self,
        app: TrainingApp,
        traces: TraceSet,
        seed: int,
        *,
        slow: bool,
        grid_s: float,
        config: UserConfig | None = None,
    ) -> None:
        """Deal the data to the devices.

        Args:
            app: digits or shakespeare.
            traces: of the devices.
            seed: of the deal and of all that follows.
            slow: deal the digits 7 to 9 to the slow devices alone.
            grid_s: time between two readings of the accuracy.
            config: what the run config has besides the app's defaults, the skew and the seed.
        """
        self.app, self.traces, self.seed, self.grid_s = app, traces, seed, grid_s
        own = {"alpha": ALPHA} if app.has_skew else {"text": app.settings["text"]}
        self.config = app.flower.run_config({**own, "seed": seed, **(config or {})})
        self.costs = app.flower.costs.resolved(self.config)
        self.deal: list[Array] | None = None
        if isinstance(app, Digits):
            if slow:
                labels = app.task.load_data(seed)[0][1].numpy()
                owners = slowest_third(traces)
                self.deal = deal_rare_to(owners, labels, SLOW_CLASSES, alpha=ALPHA, seed=seed)
        elif isinstance(app, Shakespeare):
            assert self.costs.work_per_example is not None
            assert self.costs.examples is not None
            work = self.costs.work_per_example * self.costs.examples / LINES
            self.costs = replace(self.costs, work_per_example=work, examples=LINES)
            slow_ones = np.flatnonzero(slowest_third(traces)).tolist()
            lines = torch.cat([app.own_lines(i, N_DEVICES)[1] for i in slow_ones])
            self._lines = app.held_out[::TEST_EVERY], lines[::SLOW_EVERY]

    def executor(self) -> Executor:
        """Return what trains the devices."""
        if self.deal is None:
            return self.app.executor()
        assert isinstance(self.app, Digits)
        dealt = partial(self.app.of, self.deal, self.seed)
        return self.app.executor(lambda partition, n, config: dealt(partition))

    def right(self, arrays: ArrayRecord) -> tuple[float, float]:
        """Return the share of right answers, and that on what the slow hold."""
        if isinstance(self.app, Digits):
            right, _, labels = self.app.answers(arrays, self.seed)
            return float(right.mean()), float(right[np.isin(labels, SLOW_CLASSES)].mean())
        assert isinstance(self.app, Shakespeare)
        all_lines, slow = (self.app.right(arrays, lines) for lines in self._lines)
        return all_lines, slow

    def run(self, strategy: StaleStrategy, until_s: float) -> Curve:
        """Return what a strategy reaches by some instant."""
        grid = TraceGrid(
            self.traces,
            self.executor(),
            costs=self.costs,
            seed=self.seed,
            run_config=self.config,
            until_s=until_s,
        )
        seen: list[tuple[float, float, float]] = []
        every = 1 if self.app.has_skew else VERSIONS

        def evaluate(version: int, arrays: ArrayRecord) -> MetricRecord | None:
            if version % every:
                return None
            right = self.right(arrays)
            seen.append((grid.now(), *right))
            return MetricRecord({"accuracy": right[0]})

        with grid.running(), suppress(RunEnded):
            strategy.start(
                grid, self.app.initial(self.seed), 10**6, TIMEOUT_S, evaluate_fn=evaluate
            )
        return read_curve(np.array(seen), grid.events().to_pandas(), until_s, self.grid_s)


def deal_rare_to(
    owners: Array, labels: Array, rare: Sequence[int], *, alpha: float, seed: int
) -> list[Array]:
    """Deal some classes to some devices alone.

    Each rare class is split among the owners by a Dirichlet distribution of concentration 1. Of
    every other class the owners share a twentieth in the same way; the rest goes to the other
    devices, by a Dirichlet distribution of concentration `alpha`.

    Args:
        owners: whether a device owns the rare classes, bool of shape (devices,).
        labels: of the examples, int of shape (examples,).
        rare: the classes that only owners hold.
        alpha: > 0; small is uneven.
        seed: of the draw.

    Returns:
        The examples of each device, at least one each.
    """
    rng = np.random.default_rng((seed, _DEAL_RARE))
    own, others = np.flatnonzero(owners), np.flatnonzero(~owners)
    owner = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        places = rng.permutation(np.flatnonzero(labels == label))
        cut = len(places) if label in rare else len(places) // 20
        owner[places[:cut]] = _split(cut, own, 1.0, rng)
        owner[places[cut:]] = _split(len(places) - cut, others, alpha, rng)
    for device in np.flatnonzero(np.bincount(owner, minlength=len(owners)) == 0):
        spare = (np.bincount(owner, minlength=len(owners))[owner] > 1) & ~np.isin(labels, rare)
        owner[rng.choice(np.flatnonzero(spare))] = device
    return [np.flatnonzero(owner == device) for device in range(len(owners))]


def _split(n: int, devices: Array, alpha: float, rng: np.random.Generator) -> Array:
    """Return who gets each of n examples."""
    ends = np.cumsum(rng.dirichlet(np.full(len(devices), alpha)))
    ranks = (np.arange(n) + 0.5) / max(n, 1)
    return devices[np.minimum(np.searchsorted(ends, ranks), len(devices) - 1)]


def read_curve(seen: Array, events: pd.DataFrame, until_s: float, grid_s: float) -> Curve:
    """Read a run on the grid of instants.

    Args:
        seen: (instant, accuracy, accuracy on some) of each version; shape (versions, 3).
        events: of the run, one row a job.
        until_s: end of the run in s.
        grid_s: time between two readings in s.
    """
    instants = np.arange(grid_s, until_s + grid_s / 2, grid_s)
    at = np.searchsorted(seen[:, 0], instants, side="right") - 1
    weights = np.ones(WINDOW) / WINDOW
    padded = np.concatenate([np.repeat(at[:1], WINDOW - 1), at])
    smooth = [np.convolve(seen[padded, column], weights, mode="valid") for column in (1, 2)]
    return Curve(
        accuracy=smooth[0],
        slow=smooth[1],
        gigabytes=_gigabytes(events, instants),
        versions=len(seen) - 1,
        grid_s=grid_s,
    )


def _gigabytes(events: pd.DataFrame, instants: Array) -> Array:
    """Return what all jobs that have begun by some instants moved, both ways."""
    moved = events[["downloaded_bytes", "uploaded_bytes"]].sum(axis=1).to_numpy()
    begun = events["started_at"].to_numpy()
    order = np.argsort(begun)
    sums = np.concatenate([[0.0], np.cumsum(moved[order])])
    return np.asarray(sums[np.searchsorted(begun[order], instants, side="right")] / 1e9)


@cache
def devices(recordings: Path, kind: str, seed: int) -> TraceSet:
    """Return the devices of a seed in their window, whose start is instant 0.

    Args:
        recordings: folder of the published files.
        kind: of the fleet, "phones" or "desktops".
        seed: one of `SEEDS` or `TUNING_SEEDS`.
    """
    fleet = merged(fleets(recordings, seed, kind, assumed=ASSUMED), align="time-of-week")
    day, hour = STARTS[kind][seed]
    start = day * DAY_S + hour * 3600.0
    window = fleet.between(start, start + WINDOW_S)
    present = np.flatnonzero(online(window, WINDOW_S).mean(0) * WINDOW_S >= PRESENT_S)
    drawn = stream(seed, _DRAWN).choice(present, N_DEVICES, replace=False)
    return window.take(np.sort(drawn))


def online(traces: TraceSet, until_s: float) -> Array:
    """Return which devices are online every half minute; bool of shape (instants, devices)."""
    assert traces.availability is not None
    instants = np.arange(0.0, until_s, 30.0)
    everyone = np.arange(traces.n_devices)
    return np.array(
        [traces.availability.is_available(everyone, np.full(everyone.size, t)) for t in instants]
    )


def slowest_third(traces: TraceSet) -> Array:
    """Return which devices are the slowest third of those that ever finish a job.

    Jobs of a median device's examples are sent every three minutes; a device's time is the median
    of those that it finishes.

    Returns:
        bool of shape (devices,).
    """
    sent = np.arange(0.0, WINDOW_S, 180.0)
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
