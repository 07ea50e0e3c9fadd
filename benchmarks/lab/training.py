"""One real training run of a built-in app under some selector, on recorded devices and hours.

A window is some devices that appear within some hours, and those hours. A regime says how many
devices there are for each job in flight, and how long a job is. The server asks each device for a
forecast of its own job before it picks. Every merge is written down: what the model's loss was on
each group of data before and after, and whose updates went in.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from fedstale.agents.env.episodes import JobKinds
from fedstale.agents.evaluation import gini as gini_of_rows
from fedstale.simulation import Executor, RunEnded, TraceGrid
from fedstale.simulation.executors import ClientCall, ClientReply
from fedstale.strategies import FedBuff, StaleStrategy
from fedstale.strategies.schedule import k_sync
from fedstale.strategies.selection import Selector
from fedstale.strategies.stages import QUERY, Stage
from fedstale.strategies.types import FORECAST_RECORD, Candidates
from fedstale.traces import Job, TraceSet
from fedstale.traces.arrays import DAY_S, Array, Index, Mask
from fedstale.traces.forecast import AVAILABLE_S, HORIZONS_S, Forecaster, TraceObserver
from lab.apps import TrainingApp
from lab.curves import MINUTE_S, by_minute, final
from lab.fleets import span

HOUR_S = 3600.0
HOURS_S = 4 * HOUR_S
TTL_S = 1800.0
PATIENCE = 10.0
"""Time to live of a message in the mean device's training time: without an interruption some 95 %
of the jobs on recorded phones and cars take less, whatever the skew, and all on desktops."""
SPENT = ("download_s", "compute_s", "upload_s")
FIRST_NODE = 1000
ROUNDS = 8
"""How often the days of a log are gone through for windows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPart:
    """How windows of a fleet are drawn."""

    least: int
    """Devices that appear in a window at least; all that do are in it."""
    history_s: float
    """For how long each of them was logged before."""
    concurrency: int
    """Jobs in flight."""
    times: int = 1
    """How often a recorded device is in the fleet, on other days; see `lab.fleets`."""


FLEETS = {
    "phones": FleetPart(least=30, history_s=DAY_S / 2, concurrency=4),
    "desktops": FleetPart(least=30, history_s=DAY_S, concurrency=8),
    "cars": FleetPart(least=20, history_s=DAY_S, concurrency=4),
}
"""A third of the devices that are online in the mean is in flight: with as many jobs as devices
there is no choice. Half of the phones were logged for five days, and 30 cars never appear in the
same hours."""
MANY = {
    "phones": FleetPart(least=120, history_s=DAY_S / 2, concurrency=4, times=5),
    "desktops": FleetPart(least=60, history_s=DAY_S, concurrency=4, times=2),
    "cars": FleetPart(least=60, history_s=DAY_S, concurrency=4, times=4),
}
"""About one in twelve of the devices that are online in the mean is in flight: of 40 phones, and of
50 desktops and cars. No part of the recordings has as many, so that devices recur on other days."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """How much choice a server has, and how long jobs are."""

    fleets: Mapping[str, FleetPart]
    """How windows of each fleet are drawn."""
    minutes: float
    """Of the training of the device with the mean number of examples, at the fleet's median speed,
    > 0."""
    hours: float
    """That a window lasts: 36 such jobs, one after another, or more."""

    @property
    def hours_s(self) -> float:
        """Length of a window in s."""
        return self.hours * HOUR_S

    @property
    def ttl_s(self) -> float:
        """Time to live of a message in s: `PATIENCE` jobs, at least half an hour."""
        return max(TTL_S, PATIENCE * MINUTE_S * self.minutes)


WIDE = {
    "desktops": FleetPart(least=240, history_s=DAY_S, concurrency=20, times=8),
    "cars": FleetPart(least=160, history_s=DAY_S, concurrency=20, times=16),
}
"""As many devices as the recordings have on other days; no phone was logged for long enough."""
REGIMES = {
    "published": Regime(fleets=FLEETS, minutes=2.0, hours=4.0),
    "choice": Regime(fleets=MANY, minutes=2.0, hours=4.0),
    "long": Regime(fleets=MANY, minutes=8.0, hours=8.0),
    "longest": Regime(fleets=MANY, minutes=20.0, hours=12.0),
    "wide": Regime(fleets=WIDE, minutes=2.0, hours=4.0),
}
PUBLISHED = REGIMES["published"]


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
    hours_s: float = HOURS_S
    """Length in s."""

    @property
    def n_devices(self) -> int:
        """Number of devices."""
        return self.devices.size

    @classmethod
    def of(
        cls,
        traces: TraceSet,
        devices: Index,
        *,
        start: float,
        seed: int,
        work: float,
        hours_s: float = HOURS_S,
    ) -> "Window":
        """Return the window that begins at an instant."""
        hours = traces.between(start, start + hours_s).take(devices)
        return cls(
            traces=hours, devices=devices, start=start, seed=seed, work=work, hours_s=hours_s
        )


def appearing(
    traces: TraceSet, devices: Index, start: float, *, history_s: float, hours_s: float
) -> Index:
    """Return the devices that appear in the hours from an instant on.

    Args:
        traces: the fleet.
        devices: positions to choose from.
        start: instant in s.
        history_s: for how long a device must have been logged by then, and on to the end of the
            hours; a record that begins again is another log.
        hours_s: length of the hours in s.
    """
    availability, when = traces.channel("availability"), np.full(devices.size, start)
    first, _ = availability.window_at_or_after(devices, when)
    begin, end = traces.log_at(devices, when)
    is_there = (first < start + hours_s) & (begin + history_s <= start) & (end >= start + hours_s)
    return devices[is_there]


def work_of(traces: TraceSet, minutes: float) -> float:
    """Return the work units of some minutes at the median speed of a fleet."""
    kinds = JobKinds.of_fleet(traces, minutes=(minutes,), megabytes=(1.0,), patience=(1.0,))
    return float(kinds.work[0])


def windows(
    traces: TraceSet, fleet: str, seeds: Sequence[int], regime: Regime = PUBLISHED
) -> list[Window]:
    """Return a window for each seed: of another day of the log, or else of other hours.

    Days are used once before one is used again. More seeds add windows to those of fewer.

    Raises:
        ValueError: there are too few hours in which enough devices appear.
    """
    part, hours_s = regime.fleets[fleet], regime.hours_s
    rng = np.random.default_rng((seeds[0], list(FLEETS).index(fleet), 61))
    end, everyone = span(traces), np.arange(traces.n_devices)
    work = work_of(traces, regime.minutes)
    found: list[Window] = []
    days = rng.permutation(int(end / DAY_S))
    for day in chain.from_iterable(repeat(days, ROUNDS)):
        for start in DAY_S * (day + rng.random(50)):
            if start + hours_s > end or any(abs(start - w.start) < hours_s for w in found):
                continue
            there = appearing(traces, everyone, start, history_s=part.history_s, hours_s=hours_s)
            if there.size >= part.least:
                found.append(
                    Window.of(
                        traces,
                        rng.permutation(there),
                        start=float(start),
                        seed=seeds[len(found)],
                        work=work,
                        hours_s=hours_s,
                    )
                )
                break
        if len(found) == len(seeds):
            return found
    raise ValueError(
        f"{len(found)} times {hours_s:g} s in which {part.least} {fleet} appear: expected "
        f"{len(seeds)}"
    )


def own_jobs(window: Window, app: TrainingApp, alpha: float | None, *, ttl_s: float = TTL_S) -> Job:
    """Return the job of each device of a window, by the examples that it is dealt.

    Args:
        window: devices and hours.
        app: what they train.
        alpha: concentration of the deal; None for an app that deals in one way.
        ttl_s: time to live of a message in s.

    Returns:
        Jobs of shape (n,), in the order of the window's devices.
    """
    n = window.n_devices
    examples = app.examples(n, alpha, window.seed)
    n_bytes = np.full(n, float(app.model_bytes))
    return Job(
        work=window.work * examples / examples.mean(),
        download_bytes=n_bytes,
        upload_bytes=n_bytes,
        ttl_s=np.full(n, ttl_s),
    )


@dataclass(frozen=True, eq=False, slots=True)
class OwnForecasts:
    """What each device of a window forecasts of the job that it would do itself."""

    values: Array
    """Chance to finish, chance to stay online and duration in s; NaN where the device was not
    online; shape (3, devices, steps)."""
    step_s: float
    """From one step to the next in s."""

    def at(self, devices: Index, now: Array) -> tuple[Array, Array, Array]:
        """Return the last forecasts at or before some instants.

        Args:
            devices: positions in the window; shape (n,).
            now: instants in s, from the start of the window; shape (n,).

        Returns:
            Chance to finish, chance to stay online and duration in s; shape (n,) each.
        """
        step = np.floor(now / self.step_s).astype(np.int64)
        p, available, duration = self.values[:, devices, step.clip(0, self.values.shape[2] - 1)]
        return p, available, duration


class WindowForecasts:
    """Lets the devices of a window forecast their own jobs, once in each step.

    What they will do does not depend on the job, so that it is forecast once for all deals.
    """

    def __init__(
        self, traces: TraceSet, forecaster: Forecaster, window: Window, step_s: float = 300.0
    ) -> None:
        """Forecast what the devices will do.

        Args:
            traces: the fleet.
            forecaster: of all devices.
            window: devices and hours.
            step_s: from one forecast of a device to its next in s.
        """
        self._n, self._step_s = window.n_devices, step_s
        steps = window.start + step_s * np.arange(int(np.ceil(window.hours_s / step_s)))
        row, step = (x.ravel() for x in np.indices((window.n_devices, steps.size)))
        # A device that comes online within a step forecasts when it comes.
        first, _ = traces.channel("availability").window_at_or_after(
            window.devices[row], steps[step]
        )
        online = np.flatnonzero(first < steps[step] + step_s)
        self._row, self._step, self._n_steps = row[online], step[online], steps.size
        observed = TraceObserver(traces).at(window.devices[self._row], first[online])
        self._forecast = forecaster.forecast(observed)

    def of(self, jobs: Job) -> OwnForecasts:
        """Return what the devices forecast of jobs, one each, in the order of the window."""
        row = self._row
        own = {
            name: np.asarray(getattr(jobs, name))[row]
            for name in ("work", "download_bytes", "upload_bytes", "ttl_s")
        }
        forecast = self._forecast.of_job(Job(**own))
        horizon = int(np.searchsorted(HORIZONS_S, AVAILABLE_S))
        values = np.full((3, self._n, self._n_steps), np.nan)
        values[:, row, self._step] = (
            forecast.p_finish,
            self._forecast.survival[:, horizon],
            forecast.total_s[:, 1],
        )
        return OwnForecasts(values, self._step_s)


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

    def __init__(self, *args: Any, liars: Liars, **options: Any) -> None:
        """Set who lies; the rest is for `TraceGrid`."""
        super().__init__(*args, **options)
        self._liars = liars

    def receive(self, until: float, message_ids: Set[str] | None) -> list[Message]:
        """Return replies as their devices would have them."""
        replies = super().receive(until, message_ids)
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


class Stating(Stage):
    """Tells the server before each choice what the candidates forecast, as if it had asked them."""

    requires = frozenset({"start"})
    query = QUERY

    def __init__(self, forecasts: OwnForecasts, *, liars: Liars) -> None:
        """Set what is said.

        Args:
            forecasts: of the window.
            liars: devices of the window that forecast something else than they know.
        """
        self._forecasts, self._liars = forecasts, liars

    def __deepcopy__(self, memo: dict[int, object]) -> "Stating":
        # A run of a strategy copies its stages; the forecasts are large, and never change.
        return Stating(self._forecasts, liars=self._liars)

    def queries(self, candidates: Candidates, now: float) -> list[int]:
        """Note what the candidates forecast, and ask nobody."""
        places = candidates.node_ids.astype(np.int64) - FIRST_NODE
        p, available, duration = self._forecasts.at(places, np.full(places.size, now))
        lies, lie = self._liars.who[places], self._liars.lie
        p = p if lie.chance is None else np.where(lies, lie.chance, p)
        duration = np.where(lies, lie.duration * duration, duration)
        stated = np.column_stack([p, available, duration]).tolist()
        for node, own in zip(candidates.node_ids.tolist(), stated, strict=True):
            self._run.history.forecast(node, dict(zip(_STATED, own, strict=True)), now)
        return []


_STATED = ("p_finish", "p_available", "duration_s")


@dataclass(kw_only=True)
class Trained:
    """What a run did; lists have one entry for each version that was evaluated."""

    hours_s: float = HOURS_S
    """Length of the window in s."""
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
    device_accuracy: Array = field(default_factory=lambda: np.zeros(0))
    """Accuracy on what each device holds, in the last tenth of the hours; shape (devices,)."""

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
    forecasts: OwnForecasts | None,
    strategy: Callable[[Selector, int], StaleStrategy],
    ttl_s: float = TTL_S,
    liars: Liars | None = None,
) -> Trained:
    """Train for the hours of a window.

    Args:
        window: devices and hours.
        app: what they train.
        alpha: concentration of the deal; None for an app that deals in one way.
        selector: chooses.
        forecasts: what devices say when asked; None if they say nothing.
        strategy: made of a selector and a seed.
        ttl_s: time to live of a message in s.
        liars: devices that lie; none if None.
    """
    n, seed = window.n_devices, window.seed
    lying = liars or Liars.of(NO_LIE, n, 0.0, seed)
    trained = Trained(hours_s=window.hours_s)
    own_work = np.asarray(own_jobs(window, app, alpha).work)
    grid = LyingGrid(
        window.traces,
        _Noting(app.executor(), trained),
        liars=lying,
        costs=app.costs(window.work, n, alpha, seed),
        # A device knows its examples before its first reply has told the server.
        work=lambda message: float(own_work[message.metadata.dst_node_id - FIRST_NODE]),
        seed=seed,
        run_config=app.config(alpha, seed),
        until_s=window.hours_s,
    )
    last_tenth = MINUTE_S * np.arange(*(int(x * window.hours_s / MINUTE_S) for x in (0.9, 1.0)))
    late: list[tuple[float, ArrayRecord]] = []

    def evaluate(version: int, arrays: ArrayRecord) -> MetricRecord | None:
        if version % app.every:
            return None
        now = grid.now()
        if now <= last_tenth[0]:
            late.clear()
        late.append((now, arrays))
        accuracy, losses = app.evaluate(arrays, seed)
        trained.at.append(now)
        trained.losses.append(losses)
        trained.accuracy.append(accuracy)
        return MetricRecord({"loss": float(losses.mean())})

    if forecasts is not None:
        grid.runtime.own_stages = (Stating(forecasts, liars=lying),)
    made = strategy(selector, seed)
    with grid.running(), suppress(RunEnded):
        made.start(grid, app.initial(seed), 10**6, ttl_s, evaluate_fn=evaluate)
    events = grid.events().to_pandas()
    devices = events["node_id"].to_numpy(dtype=np.int64) - FIRST_NODE
    version = events["aggregated_version"].to_numpy(dtype=np.int64)
    trained.merged = [devices[version == v] for v in range(1, int(version.max(initial=0)) + 1)]
    trained.begun = events["started_at"].to_numpy()
    trained.spent_s = events[list(SPENT)].sum(axis=1).to_numpy()
    is_over = (events["status"] != "in-flight").to_numpy()
    trained.ended = np.where(is_over, events["ended_at"].to_numpy(), np.inf)
    trained.used, trained.devices = version > 0, devices
    holds = np.searchsorted([at for at, _ in late], last_tenth, side="right") - 1
    minutes = np.bincount(holds, minlength=len(late))
    trained.device_accuracy = sum(
        (share * app.of_devices(arrays, n, alpha, seed))
        for share, (_, arrays) in zip(minutes / minutes.sum(), late, strict=True)
        if share
    )
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


Curves = Mapping[str, Sequence[float]]
"""Accuracy, and what devices had spent, at every minute of a run."""


def curves(trained: Trained) -> dict[str, list[float]]:
    """Return accuracy, device-hours and wasted hours at every minute, rounded to 0.0001.

    Whoever has them can judge a run at any target.
    """
    accuracy = by_minute(trained.at, trained.accuracy, trained.hours_s)
    instants = MINUTE_S * np.arange(accuracy.size)
    found = {
        "accuracy": accuracy,
        "device_hours": [trained.spent_by(t) / HOUR_S for t in instants],
        "wasted_hours": [trained.wasted_by(t) / HOUR_S for t in instants],
    }
    return {name: [round(float(x), 4) for x in values] for name, values in found.items()}


def judged(curves: Curves, target: float) -> dict[str, Any]:
    """Return when a run reached an accuracy, and what devices had spent by then.

    Args:
        curves: of the run, by `curves`.
        target: accuracy.

    Returns:
        `reached`, `hours`, `device_hours` and `wasted_hours`: at the first minute with this
        accuracy, or at the end of the run.
    """
    reached = np.flatnonzero(np.asarray(curves["accuracy"]) >= target)
    minute = int(reached[0]) if reached.size else len(curves["accuracy"]) - 1
    return {
        "reached": bool(reached.size),
        "hours": round(minute * MINUTE_S / HOUR_S, 4),
        "device_hours": curves["device_hours"][minute],
        "wasted_hours": curves["wasted_hours"][minute],
    }


def outcome(trained: Trained, n_devices: int) -> dict[str, Any]:
    """Return what came of all hours of a run, whatever its target."""
    end = trained.hours_s
    total = trained.spent_by(end)
    jobs = np.bincount(trained.devices, minlength=n_devices)
    lowest = np.sort(trained.device_accuracy)[: max(1, round(n_devices / 3))]
    return {
        "waste_share": trained.wasted_by(end) / total if total else 0.0,
        "valid_ratio": trained.valid_ratio,
        "accuracy": final(by_minute(trained.at, trained.accuracy, end)),
        "worst_third": float(lowest.mean()),
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
