"""One real training run of a built-in app under some selector, on recorded devices and hours.

A window is some devices that appear within four hours, and those hours. The server asks each
device for a forecast before it picks. Every merge is written down: what the model's loss was on
each group of data before and after, and whose updates went in.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from training_apps import TrainingApp

from fedstale.agents.env.episodes import JobKinds
from fedstale.agents.env.forecast_table import Forecasts
from fedstale.simulation import Executor, RunEnded, TraceGrid
from fedstale.simulation.executors import ClientCall, ClientReply
from fedstale.strategies import StaleStrategy
from fedstale.strategies.selection import Selector
from fedstale.strategies.types import FORECAST_RECORD, UNKNOWN, Candidates
from fedstale.traces import TraceSet
from fedstale.traces.arrays import Array, Index, Mask

HOURS_S = 4 * 3600.0
TTL_S = 1800.0
JOB_S = 120.0
"""Of the training of the device with the mean number of examples, at the fleet's median speed."""
SPENT = ("download_s", "compute_s", "upload_s")
FIRST_NODE = 1000


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


class Told(Selector):
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

    def __deepcopy__(self, memo: dict[int, object]) -> "Told":
        # A run of a strategy copies its selector; the forecasts are large, and never change.
        return Told(self.then, self._forecasts, self._window, kind=self._kind, liars=self._liars)

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
            candidates.situation,
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

    told = Told(selector, forecasts, window, kind=kind, liars=lying)
    made = strategy(told, seed)
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
