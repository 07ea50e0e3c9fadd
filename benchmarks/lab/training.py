"""One real training run of a built-in app under some selector, on recorded devices and hours.

A window is some devices that appear within four hours, and those hours. The server asks each
device for a forecast before it picks. Every merge is written down: what the model's loss was on
each group of data before and after, and whose updates went in.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from fedstale.agents.env.episodes import JobKinds
from fedstale.agents.env.forecast_table import Forecasts, ForecastTable
from fedstale.agents.evaluation import gini as gini_of_rows
from fedstale.simulation import Executor, RunEnded, TraceGrid
from fedstale.simulation.executors import ClientCall, ClientReply
from fedstale.strategies import FedBuff, StaleStrategy
from fedstale.strategies.schedule import k_sync
from fedstale.strategies.selection import Selector
from fedstale.strategies.types import FORECAST_RECORD, UNKNOWN, Candidates
from fedstale.traces import TraceSet
from fedstale.traces.arrays import DAY_S, Array, Index, Mask
from fedstale.traces.forecast import embedded
from lab.apps import APPS, TrainingApp
from lab.curves import MINUTE_S, by_minute, final
from lab.fleets import span

HOURS_S = 4 * 3600.0
TTL_S = 1800.0
JOB_S = 120.0
"""Of the training of the device with the mean number of examples, at the fleet's median speed."""
SPENT = ("download_s", "compute_s", "upload_s")
FIRST_NODE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPart:
    """How windows of a fleet are drawn."""

    least: int
    """Devices that appear in a window at least; all that do are in it."""
    history_s: float
    """For how long each of them was logged before."""
    concurrency: int
    """Jobs in flight, a third of the devices that are online in the mean: with as many jobs as
    devices there is no choice."""


FLEETS = {
    "phones": FleetPart(least=30, history_s=DAY_S / 2, concurrency=4),
    "desktops": FleetPart(least=30, history_s=DAY_S, concurrency=8),
    "cars": FleetPart(least=20, history_s=DAY_S, concurrency=4),
}
"""Half of the phones were logged for five days, and 30 cars never appear in the same hours."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Window:
    """Devices and hours of one seed."""

    traces: TraceSet
    """The devices, in these hours alone; instant 0 is `start`."""
    devices: Index
    """Their positions in the fleet, which forecasts go by; shape (n,)."""
    start: float
    """Instant of the fleet in s."""
    seed: int
    """Of the data, the first model and all choices."""
    work: float
    """Of a job of the device with the mean number of examples, in work units."""

    @property
    def n_devices(self) -> int:
        """Number of devices."""
        return self.devices.size

    @classmethod
    def of(
        cls, traces: TraceSet, devices: Index, start: float, seed: int, *, work: float
    ) -> "Window":
        """Return the window that begins at an instant."""
        hours = traces.between(start, start + HOURS_S).take(devices)
        return cls(traces=hours, devices=devices, start=start, seed=seed, work=work)


def appearing(traces: TraceSet, devices: Index, start: float, history_s: float = 0.0) -> Index:
    """Return the devices that appear in the hours from an instant on.

    Args:
        traces: the fleet.
        devices: positions to choose from.
        start: instant in s.
        history_s: for how long a device must have been logged by then, and on to the end of the
            hours; a record that begins again is another log.
    """
    availability, when = traces.channel("availability"), np.full(devices.size, start)
    first, _ = availability.window_at_or_after(devices, when)
    is_there = first < start + HOURS_S
    if history_s:
        begin, end = traces.log_at(devices, when)
        is_there &= (begin + history_s <= start) & (end >= start + HOURS_S)
    return devices[is_there]


def training_kinds(traces: TraceSet, n_bytes: Sequence[int]) -> JobKinds:
    """Return the jobs that training is, for the device with the mean number of examples.

    Args:
        traces: the fleet, whose median rates say how much work `JOB_S` are.
        n_bytes: of the model; one a kind.
    """
    megabytes = tuple(each / 1e6 for each in n_bytes)
    minutes, any_patience = (JOB_S / 60.0,) * len(megabytes), (1.0,) * len(megabytes)
    made = JobKinds.of_fleet(traces, minutes=minutes, megabytes=megabytes, patience=any_patience)
    return replace(made, ttl_s=np.full(len(megabytes), TTL_S))


def windows(traces: TraceSet, fleet: str, seeds: Sequence[int]) -> list[Window]:
    """Return a window for each seed, each of another day of the log.

    Raises:
        ValueError: there are too few days on which enough devices appear.
    """
    part = FLEETS[fleet]
    rng = np.random.default_rng((seeds[0], list(FLEETS).index(fleet), 61))
    end, everyone = span(traces), np.arange(traces.n_devices)
    work = float(training_kinds(traces, (1,)).work[0])
    found: list[Window] = []
    for day in rng.permutation(int(end / DAY_S)):
        for start in DAY_S * (day + rng.random(50)):
            there = appearing(traces, everyone, start, part.history_s)
            if start + HOURS_S <= end and there.size >= part.least:
                devices = rng.permutation(there)
                seed = seeds[len(found)]
                found.append(Window.of(traces, devices, float(start), seed, work=work))
                break
        if len(found) == len(seeds):
            return found
    raise ValueError(
        f"{len(found)} days of {fleet} on which {part.least} devices appear within {HOURS_S:g} s: "
        f"expected {len(seeds)}"
    )


def stated(traces: TraceSet, fleet: str, window: Window, cache: Path | None) -> ForecastTable:
    """Return what the devices of a window forecast of the jobs of all apps, in their order."""
    kinds = training_kinds(traces, [app.model_bytes for app in APPS.values()])
    file = None if cache is None else cache / f"{fleet}-{window.seed}.npz"
    return ForecastTable.of(
        traces,
        kinds,
        [(np.sort(window.devices), embedded(fleet))],
        start=window.start,
        end=window.start + HOURS_S,
        cache=file,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lie:
    """What a device says of itself in place of the truth."""

    chance: float | None = None
    """Chance to finish that it states; None for its forecast."""
    loss: float = 1.0
    """What it multiplies its loss by."""
    examples: float = 1.0
    """What it multiplies its examples by."""
    duration: float = 1.0
    """What it multiplies the duration by that it forecasts."""


NO_LIE = Lie()


@dataclass(frozen=True, kw_only=True, eq=False)
class Liars:
    """Which devices lie, and how."""

    who: Mask
    """Shape (n,)."""
    lie: Lie

    @classmethod
    def of(cls, lie: Lie, n: int, share: float, seed: int) -> "Liars":
        """Draw a share of n devices; the same ones whatever the lie."""
        rng = np.random.default_rng((seed, 67))
        return cls(who=np.isin(np.arange(n), rng.permutation(n)[: round(share * n)]), lie=lie)


class LyingGrid(TraceGrid):
    """A grid some of whose devices lie in their replies to the server.

    The clock takes the examples in a reply for the work that was done. Whoever states ten times its
    examples has not trained ten times as long: so the lie is told to the server alone.
    """

    def __init__(self, *args: Any, liars: Liars, **options: Any) -> None:  # noqa: ANN401
        """Set who lies; the rest is for `TraceGrid`."""
        super().__init__(*args, **options)
        self._liars = liars

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return replies as their devices would have them."""
        replies = list(super().pull_messages(message_ids))
        for reply in replies:
            if not reply.has_error() and self._liars.who[reply.metadata.src_node_id - FIRST_NODE]:
                _lie(self._liars.lie, reply.content)
        return replies


def _lie(lie: Lie, content: RecordDict) -> None:
    metrics = content.metric_records["metrics"]
    metrics["train_loss"] = lie.loss * float(metrics["train_loss"])
    metrics["num-examples"] = round(lie.examples * int(metrics["num-examples"]))
    if (forecast := content.config_records.get(FORECAST_RECORD)) is not None:
        if lie.chance is not None:
            forecast["p_finish"] = lie.chance
        forecast["duration_s"] = lie.duration * float(forecast["duration_s"])


class Stating(Selector):
    """Lets another selector choose, with forecasts that devices give when asked.

    What devices stated before their jobs is added up as the server does it that asks them itself:
    whoever fails more often than stated is believed less.
    """

    def __init__(
        self,
        then: Selector,
        forecasts: Forecasts,
        window: Window,
        *,
        kind: int = 0,
        liars: Liars,
    ) -> None:
        """Set who chooses and what is said.

        Args:
            then: chooses.
            forecasts: of the fleet.
            window: devices and hours.
            kind: of the job, in the forecasts.
            liars: devices of the window that forecast something else than they know.
        """
        self.then, self._forecasts, self._window, self._kind = then, forecasts, window, kind
        self._liars = liars
        n = window.n_devices
        self._stated, self._expected = np.full(n, np.nan), np.zeros(n)
        self._ended, self._finished = np.zeros(n), np.zeros(n)

    def __deepcopy__(self, memo: dict[int, object]) -> "Stating":
        # A run of a strategy copies its selector; the forecasts are large, and never change.
        return Stating(self.then, self._forecasts, self._window, kind=self._kind, liars=self._liars)

    def select(
        self, candidates: Candidates, k: int, now: float, rng: np.random.Generator
    ) -> list[int]:
        """Ask for forecasts, then pick."""
        places = candidates.node_ids.astype(np.int64) - FIRST_NODE
        self._resolve(places, candidates)
        columns = {
            name: getattr(candidates, name)
            for name in UNKNOWN
            if name not in {"durations_s", "expected_finishes"} and not name.startswith("forecast_")
        }
        who = self._window.devices[places]
        when = np.full(who.size, self._window.start + now)
        kinds = np.full(who.size, self._kind, dtype=np.int64)
        p, available, duration = self._forecasts.at(who, kinds, when)
        lies, lie = self._liars.who[places], self._liars.lie
        p = p if lie.chance is None else np.where(lies, lie.chance, p)
        duration = np.where(lies, lie.duration * duration, duration)
        told = Candidates.of(
            candidates.node_ids,
            candidates.context,
            forecast_p_finish=p,
            forecast_p_available=available,
            forecast_duration_s=duration,
            forecast_at=np.where(np.isnan(p), np.nan, now),
            expected_finishes=self._expected[places],
            **columns,
        )
        chosen = self.then.select(told, k, now, rng)
        is_chosen = np.isin(candidates.node_ids, np.array(chosen, dtype=np.uint64))
        self._stated[places[is_chosen]] = p[is_chosen]
        return chosen

    def _resolve(self, places: Index, candidates: Candidates) -> None:
        """Add what was stated before jobs that have ended since."""
        finished = candidates.times_finished.astype(np.float64)
        ended = finished + candidates.times_failed
        new = ended > self._ended[places]
        outcome = finished - self._finished[places]
        stated = self._stated[places]
        expected = np.where(np.isnan(stated), outcome, stated)
        self._expected[places] += np.where(new, expected, 0.0)
        self._ended[places], self._finished[places] = ended, finished


@dataclass(kw_only=True)
class Trained:
    """What a run did; lists have one entry for each version that was evaluated."""

    at: list[float] = field(default_factory=list)
    """Instants in s, from the start of the window."""
    losses: list[Array] = field(default_factory=list)
    """Loss of the model on each group of data."""
    accuracy: list[float] = field(default_factory=list)
    reported: list[tuple[int, int, float]] = field(default_factory=list)
    """Device, version that it was sent, and loss that it measured."""
    merged: list[Index] = field(default_factory=list)
    """Devices whose updates made each version after the first."""
    begun: Array = field(default_factory=lambda: np.zeros(0))
    """Instant at which each job began, inf if it did not; shape (jobs,), as the next ones."""
    ended: Array = field(default_factory=lambda: np.zeros(0))
    """Instant at which its device was free again; inf if it was not by the end."""
    spent_s: Array = field(default_factory=lambda: np.zeros(0))
    """Device-seconds that it took by the end of the hours."""
    used: Mask = field(default_factory=lambda: np.zeros(0, dtype=bool))
    """Whether its update was merged."""
    devices: Index = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """The device that it was sent to."""

    def spent_by(self, instant: float) -> float:
        """Return the device-seconds that all jobs have taken by an instant.

        A device works on a job without a break, since a job that is interrupted is lost.
        """
        return float(np.clip(instant - self.begun, 0.0, self.spent_s).sum())

    def wasted_by(self, instant: float) -> float:
        """Return the device-seconds of the jobs that have ended by then and were never merged."""
        return float(self.spent_s[~self.used & (self.ended <= instant)].sum())

    @property
    def valid_ratio(self) -> float:
        """Share of the ended jobs whose update was merged."""
        over = np.isfinite(self.ended)
        return float(self.used[over].mean()) if over.any() else np.nan


def train(
    window: Window,
    app: TrainingApp,
    alpha: float | None,
    selector: Selector,
    *,
    forecasts: Forecasts,
    strategy: Callable[[Selector, int], StaleStrategy],
    kind: int = 0,
    liars: Liars | None = None,
) -> Trained:
    """Train for the hours of a window.

    Args:
        window: devices and hours.
        app: what they train.
        alpha: concentration of the deal; None for an app that deals in one way.
        selector: chooses.
        forecasts: what devices say when asked.
        strategy: made of a selector and a seed.
        kind: of the job, in the forecasts.
        liars: devices that lie; none if None.
    """
    n, seed = window.n_devices, window.seed
    lying = liars or Liars.of(NO_LIE, n, 0.0, seed)
    trained = Trained()
    grid = LyingGrid(
        window.traces,
        _Noting(app.executor(), trained),
        liars=lying,
        costs=app.costs(window.work, n, alpha, seed),
        seed=seed,
        run_config=app.config(alpha, seed),
        until_s=HOURS_S,
    )

    def evaluate(version: int, arrays: ArrayRecord) -> MetricRecord | None:
        if version % app.every:
            return None
        accuracy, losses = app.evaluate(arrays, seed)
        trained.at.append(grid.now())
        trained.losses.append(losses)
        trained.accuracy.append(accuracy)
        return MetricRecord({"loss": float(losses.mean())})

    stating = Stating(selector, forecasts, window, kind=kind, liars=lying)
    made = strategy(stating, seed)
    with grid.running(), suppress(RunEnded):
        made.start(grid, app.initial(seed), 10**6, TTL_S, evaluate_fn=evaluate)
    events = grid.events().to_pandas()
    devices = events["node_id"].to_numpy(dtype=np.int64) - FIRST_NODE
    version = events["aggregated_version"].to_numpy(dtype=np.int64)
    trained.merged = [devices[version == v] for v in range(1, int(version.max(initial=0)) + 1)]
    trained.begun = events["started_at"].to_numpy()
    trained.spent_s = events[list(SPENT)].sum(axis=1).to_numpy()
    is_over = (events["status"] != "in-flight").to_numpy()
    trained.ended = np.where(is_over, events["ended_at"].to_numpy(), np.inf)
    trained.used, trained.devices = version > 0, devices
    return trained


class _Noting(Executor):
    """Trains, and notes what loss each device measured of which version."""

    def __init__(self, then: Executor, trained: Trained) -> None:
        self._then, self._trained = then, trained

    def run(self, calls: Sequence[ClientCall]) -> list[ClientReply]:
        """Train, then note."""
        replies = self._then.run(calls)
        for call, each in zip(calls, replies, strict=True):
            device = int(call.context.node_config["partition-id"])
            version = int(call.message.content.config_records["config"]["server-round"]) - 1
            metrics = each.reply.content.metric_records["metrics"]
            self._trained.reported.append((device, version, float(metrics["train_loss"])))
        return replies


def fedavg(selector: Selector, seed: int, *, concurrency: int) -> StaleStrategy:
    """Return FedAvg that goes on with the first three quarters; every example counts."""
    schedule = k_sync(concurrency, 3 * concurrency // 4)
    return StaleStrategy(selector=selector, schedule=schedule, seed=seed)


def fedbuff(selector: Selector, seed: int, *, concurrency: int) -> StaleStrategy:
    """Return FedBuff, which merges stale replies too, half of those in flight at a time."""
    size = concurrency // 2
    return FedBuff(concurrency, size, selector=selector, seed=seed)


SCHEDULES = {"fedavg": fedavg, "fedbuff": fedbuff}


def outcome(trained: Trained, target: float, n_devices: int) -> dict[str, Any]:
    """Return what a run reached, when, and what devices spent on it."""
    smooth = by_minute(trained.at, trained.accuracy, HOURS_S)
    reached = np.flatnonzero(smooth >= target)
    when = MINUTE_S * float(reached[0]) if reached.size else HOURS_S
    total = trained.spent_by(HOURS_S)
    jobs = np.bincount(trained.devices, minlength=n_devices)
    return {
        "reached": bool(reached.size),
        "hours": when / 3600.0,
        "device_hours": trained.spent_by(when) / 3600.0,
        "wasted_hours": trained.wasted_by(when) / 3600.0,
        "waste_share": trained.wasted_by(HOURS_S) / total if total else 0.0,
        "valid_ratio": trained.valid_ratio,
        "accuracy": final(smooth),
        "gini": gini(jobs),
        "ever_merged": float(np.unique(trained.devices[trained.used]).size / n_devices),
        "devices": n_devices,
        "versions": len(trained.merged),
        "jobs": int(jobs.sum()),
    }


def gini(counts: Array) -> float:
    """Return Gini's coefficient of some counts: 0 if all are equal, and of no jobs.

    Example:
        >>> gini(np.array([1, 1])), gini(np.array([0, 2]))
        (0.0, 0.5)
    """
    found = gini_of_rows(counts[None], np.ones((1, counts.size), dtype=bool))
    return float(np.nan_to_num(found[0]))
