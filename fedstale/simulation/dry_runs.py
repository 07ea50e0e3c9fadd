"""Forecast of a run, before it: devices online, times of jobs, lengths of rounds.

The app's own ServerApp says what it sends first, and to how many. Nobody trains: the same message
goes to devices drawn at instants of the time that the run may take, and the traces say what becomes
of it. The rounds of the strategy's schedule are followed from the run's beginning. Devices are
drawn by chance, so this is not what a strategy that chooses makes of them.
"""

import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from flwr.app import Message

from fedstale.config import Costs, SimulationConfig
from fedstale.errors import ConfigError, RunEnded
from fedstale.flower import size_of
from fedstale.simulation.costs import CostModel, kind_of
from fedstale.simulation.flower_app import FlowerApp
from fedstale.simulation.nodes import enrolled
from fedstale.simulation.run import simulate
from fedstale.strategies.pace import numbers_of
from fedstale.strategies.schedule import RECHECK_S
from fedstale.strategies.server import HEARTBEAT_S, Callback, Runtime, StaleStrategy
from fedstale.strategies.stages import asked_share
from fedstale.strategies.types import Candidates, SelectionContext
from fedstale.traces import Job, Status, TraceSet
from fedstale.until import Until

INSTANTS = 240
"""At so many instants, one in each part of the time, devices are drawn."""
_MOST_REPLIES = 4_000
"""Of so many replies rounds are followed, where each is an event of its own."""
_DAY_S, _HOUR_S = 86_400.0, 3600.0
_SEED = 0x0D
Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What devices would do with an app's first message; times in s, NaN if nobody finishes."""

    n_devices: int
    """Devices that are enrolled."""
    horizon_s: float
    """Time that was looked at: that of the run, or a day."""
    online: Array
    """Share of devices that are online in each hour; shape (hours,)."""
    n_asked: int
    """Devices that the first message goes to."""
    download_bytes: int
    """Of the message."""
    n_jobs: int
    """Jobs that were looked at."""
    finished: float
    """Share of jobs that report."""
    reasons: dict[str, float]
    """Share of jobs by why they do not, the commonest first."""
    job_s: Array
    """Duration of jobs that report: quantiles .5 and .9."""
    phases_s: dict[str, float]
    """Their median time in each phase."""
    round_s: float = np.nan
    """Mean time of a round; NaN if none ends."""
    round: str = ""
    """Whom a round asks and what it waits for, in words."""
    planned_rounds: int | None = None
    """Rounds that the app will make, if its run config says so."""


class _First(Callback):
    """Ends a run before the first training is sent."""

    messages: Sequence[Message] = ()
    strategy, timeout_s = StaleStrategy(), np.inf

    def sending(self, run: Runtime, messages: Sequence[Message]) -> None:
        """Keep the messages and what ends their round, and send none."""
        self.messages = [m for m in messages if kind_of(m).startswith("train")]
        if self.messages:
            own = run.strategy
            self.strategy = own if isinstance(own, StaleStrategy) else self.strategy
            self.timeout_s = min(run.timeout_s, self.messages[0].metadata.ttl)
            raise RunEnded("looked ahead")


def dry_run(config: SimulationConfig, traces: TraceSet) -> DryRun:
    """Look ahead at the devices of a run.

    Args:
        config: of the run.
        traces: the devices that `config.traces` names.

    Raises:
        FedstaleError: the app cannot be run, or asks nobody to train.
    """
    app, first = FlowerApp.find(config.app), _First()
    resolved = app.resolved(config)
    with tempfile.TemporaryDirectory() as folder:
        inline = replace(config, executor="inline", workers=None, gpus=None, client_limit_s=None)
        run = simulate(inline, Path(folder) / "run", traces=traces, callbacks=[first])
        if not first.messages:
            raise ConfigError(f"app = {config.app!r}: asked nobody to train; {run.reason}")
    message = first.messages[0]
    with app.importable():
        book = CostModel(Costs.from_table(resolved.costs), app.load_work())
        about, share = message.metadata, asked_share(message.content)
        work = book.work(message, kind_of(message), about.dst_node_id, share).work
    size = size_of(message)
    n_bytes = book.message_bytes(size, book.scale(size))
    job = Job(
        work=work,
        download_bytes=n_bytes,
        upload_bytes=n_bytes,
        ttl_s=message.metadata.ttl,
        on_interrupt=config.on_interrupt,
    )
    limit_s = Until.parse(config.until).time_s
    horizon_s = limit_s if limit_s < np.inf else _DAY_S
    own = enrolled(traces, resolved)
    found = _drawn(own, job, len(first.messages), horizon_s, config.seed)
    found = replace(found, planned_rounds=resolved.planned_rounds)
    return _followed(found, own, job, first, config.seed)


def _drawn(traces: TraceSet, job: Job, n_asked: int, horizon_s: float, seed: int) -> DryRun:
    """Send a job to devices drawn at many instants, and count what becomes of it."""
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_SEED,)))
    everyone = np.arange(traces.n_devices)
    availability = traces.channel("availability")
    # Evenly spaced ones would always meet the same minutes of an hour.
    instants = (np.arange(INSTANTS) + rng.random(INSTANTS)) * (horizon_s / INSTANTS)
    chosen, sent_at, online = list[npt.NDArray[np.int64]](), list[Array](), []
    for instant in instants:
        here = everyone[availability.is_available(everyone, np.full(everyone.size, instant))]
        online.append(here.size / everyone.size)
        drawn = rng.permutation(here)[:n_asked]
        chosen.append(drawn)
        sent_at.append(np.full(drawn.size, instant))
    devices, sent = np.concatenate(chosen), np.concatenate(sent_at)
    if not devices.size:
        raise ConfigError(
            f"traces: no device is online in the {horizon_s / _HOUR_S:.3g} h of the run"
        )
    found = traces.trips(devices, sent, job)
    reports = found.status == Status.REPORTED
    took = (found.reported - sent)[reports]
    failed = [found.reason(int(i)) for i in np.flatnonzero(~reports)]
    counts = dict(zip(*np.unique(failed, return_counts=True), strict=True)) if failed else {}
    hours = np.minimum(instants // _HOUR_S, np.ceil(horizon_s / _HOUR_S) - 1).astype(np.int64)
    by_hour = [np.mean(np.asarray(online)[hours == hour]) for hour in np.unique(hours)]
    phases = {"download": found.download_s, "training": found.compute_s, "upload": found.upload_s}
    return DryRun(
        n_devices=traces.n_devices,
        horizon_s=horizon_s,
        online=np.asarray(by_hour),
        n_asked=n_asked,
        download_bytes=int(np.asarray(job.download_bytes)),
        n_jobs=int(devices.size),
        finished=float(reports.mean()),
        reasons={
            str(reason): count / devices.size
            for reason, count in sorted(counts.items(), key=lambda each: -each[1])
        },
        job_s=np.quantile(took, [0.5, 0.9]) if took.size else np.full(2, np.nan),
        phases_s={
            name: float(np.median(spent[reports])) if reports.any() else np.nan
            for name, spent in phases.items()
        },
    )


def _followed(found: DryRun, traces: TraceSet, job: Job, first: _First, seed: int) -> DryRun:
    """Add the mean time of the rounds that the schedule makes from the run's beginning on."""
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_SEED, 1)))
    pace, schedule = deepcopy(first.strategy.run_pace), first.strategy.schedule
    most = min(found.planned_rounds or INSTANTS, INSTANTS)
    size, limit_s = schedule.buffer_size, min(first.timeout_s, schedule.deadline_s)
    n_out = schedule.concurrency or traces.n_devices
    if again := schedule.send == "after_reply":
        most = min(most, max(_MOST_REPLIES // (size or 1), 1))
        words = f"a server step, with buffer size {size or 1:,} and {n_out:,} jobs in flight"
    else:
        n_out, waited = found.n_asked, f"the first {size:,}" if size else "all"
        words = f"a round of {n_out:,} that waits for {waited}, at most {limit_s:,.4g} s"
    if pace is not None:
        words = f"a server step by {pace!r}, with up to {schedule.concurrency:,} jobs in flight"
        words += ", as long as replies tell it nothing" * pace.reads_replies
    everyone, free_at = np.arange(traces.n_devices), np.zeros(traces.n_devices)
    availability = traces.channel("availability")
    where = SelectionContext(keeps_stragglers=schedule.stragglers == "keep")
    now, ends = 0.0, list[float]()
    # Of replies after which jobs are sent again a step takes several; else `ends` has one a round.
    n_made, n_before, step = -1, 0, 0
    while now < found.horizon_s and n_made < most:
        n_ended = bisect_right(ends, now) if again else len(ends)
        n_busy = again * int(np.count_nonzero(free_at > now))
        while n_ended >= n_before + step and n_made < most:
            n_made, n_before = n_made + 1, n_before + step
            if pace is not None:
                at = first.strategy.progress(
                    version=n_made,
                    now=now,
                    n_in_flight=n_busy,
                    find=lambda: Candidates.of(everyone, where),
                )
                n_out, size = numbers_of(pace, at)
            step = (size or 1) if again else 1
        idle = availability.is_available(everyone, np.full(everyone.size, now))
        idle &= (free_at <= now) | (not again)
        room = max(n_out - n_busy, 0)
        devices = rng.permutation(everyone[idle])[:room]
        trips = traces.trips(devices, np.full(devices.size, now), job, free_at[devices])
        reported = np.where(trips.status == Status.REPORTED, trips.reported, np.inf)
        # The server misses a device by its heartbeat, or when the message expires.
        lost_at = np.minimum(trips.ended + HEARTBEAT_S, now + first.timeout_s)
        seen_at = np.minimum(reported, lost_at)
        free_at[devices] = seen_at if again else trips.ended
        later = now + RECHECK_S if devices.size < room else np.inf
        if again:
            ends = sorted([*ends, *reported[reported < np.inf].tolist()])
            later = min(later, free_at[free_at > now].min(initial=np.inf))
        elif devices.size:
            later = min(np.sort(reported if size else seen_at)[:size][-1], now + limit_s)
            ends.append(later)
        now = later
    ends = ends[:n_before] if n_made == most else ends
    n_rounds = n_made + (len(ends) - n_before) / step
    return replace(found, round=words, round_s=ends[-1] / n_rounds if ends else np.nan)
