"""What an emulator of the simulation is told: measures of devices, a job, a schedule and a target.

Some hundred jobs are sent to devices that are online at instants of the first two days, and the
schedule is played on jobs drawn from these, in slots where late jobs are kept and in rounds where
they are cancelled: without hours of the day, and of learning with 1/sqrt(1 + staleness) alone.
"""

from dataclasses import dataclass

import numpy as np

from fedstale.errors import ConfigError
from fedstale.strategies.server import HEARTBEAT_S
from fedstale.traces import Job, Status, TraceSet

INSTANTS, EACH, MOST, HORIZON_S, LEAST_S = 96, 12, 2_000, 172_800.0, 3_600.0
"""Of a sample: instants, jobs of each, devices that are looked at, longest and shortest window."""
MOST_REPLIES, MOST_ROUNDS = 3_000, 300
"""That are played; more take in proportion."""
OUTPUTS = ("hours", "device-hours", "wasted share", "staleness", "high staleness")
"""What is played and emulated; of staleness 1 more, its median and its quantile .9."""
PLAYED = (*OUTPUTS, "updates of a step", "weight of an update")
SHARES = ("share online", "least share online", "share that reports", "wasted share")
"""Measures that are no logarithms."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A job, a target and a schedule, as `estimate` has them."""

    work: float
    message_bytes: float
    timeout_s: float
    rounds: float
    skew: float
    rate: float
    concurrency: int
    buffer_size: int
    keeps: bool
    balanced: bool


class Sample:
    """What becomes of a job that is sent to devices at many instants."""

    def __init__(self, traces: TraceSet, setting: Setting) -> None:
        """Send the job of a setting.

        Raises:
            ConfigError: no device does it in time.
            TraceError: the traces do not know a channel.
        """
        self._n_devices, rng = traces.n_devices, np.random.default_rng(0)
        looked = np.unique(np.linspace(0, traces.n_devices - 1, MOST).astype(np.int64))
        # The beginning counts in all runs, later hours in long ones alone.
        self._instants = HORIZON_S * ((np.arange(INSTANTS) + rng.random(INSTANTS)) / INSTANTS) ** 2
        at, device = (x.ravel() for x in np.indices((INSTANTS, looked.size)))
        here = traces.channel("availability").is_available(looked[device], self._instants[at])
        online = here.reshape(INSTANTS, -1)
        self._online = online.mean(axis=1)
        order = np.argsort(np.where(online, rng.random(online.shape), 2.0), axis=1)[:, :EACH]
        self._at, place = np.nonzero(np.take_along_axis(online, order, axis=1))
        sent, n, ttl_s = self._instants[self._at], setting.message_bytes, setting.timeout_s
        job = Job(work=setting.work, download_bytes=n, upload_bytes=n, ttl_s=ttl_s)
        found = traces.trips(looked[order[self._at, place]], sent, job)
        self._reports = found.status == Status.REPORTED
        if not self._reports.any():
            raise ConfigError("traces: no device finishes such a job before its time-out")
        self._spent_s = found.download_s + found.compute_s + found.upload_s
        lost_s = np.minimum(found.ended - sent + HEARTBEAT_S, setting.timeout_s)
        self._seen_s = np.where(self._reports, found.reported - sent, lost_s)

    def measures(self, of: Setting) -> dict[str, float]:
        """Return what is told of a setting: logarithms, `SHARES`, and two that are 0 or 1."""
        # The window is as long as the run would be by the first two days.
        first = self._played(HORIZON_S, of, of.rounds)
        window_s = 5400.0 * first[0]
        played = self._played(window_s, of, of.rounds / first[-1])
        last = self._last(window_s)
        here, share = self._at < last, self._online[:last]
        took = np.quantile(self._seen_s[here & self._reports], [0.5, 0.9])
        middle, slow = np.maximum(took, 1e-3)
        online = max(self._n_devices * share.mean(), 1.0)
        told = {
            "devices online": online,
            "share online": share.mean(),
            "least share online": np.quantile(share, 0.1) / max(share.mean(), 1e-3),
            "share that reports": self._reports[here].mean(),
            "seconds of a job": middle,
            "slow jobs over the median": slow / middle,
            "time-out in jobs": of.timeout_s / middle,
            "jobs in flight": of.concurrency,
            "jobs in flight over devices online": of.concurrency / online,
            "rounds": of.rounds,
            "skew": of.skew,
            "rate": of.rate,
            **dict(zip(PLAYED, played, strict=True)),
        }
        logs = {name: float(x if name in SHARES else np.log(x)) for name, x in told.items()}
        return {**logs, "late jobs are kept": float(of.keeps), "balanced": float(of.balanced)}

    def _last(self, window_s: float) -> int:
        """Return the number of instants of a window; of all where no job of it reports."""
        last = int(np.searchsorted(self._instants, max(window_s, LEAST_S)))
        return last if self._reports[self._at < last].any() else INSTANTS

    def _played(self, window_s: float, of: Setting, rounds: float) -> list[float]:
        """Return `PLAYED` of so many rounds on the jobs of a window."""
        last, rng = self._last(window_s), np.random.default_rng(1)
        here = self._at < last
        seen, spent, reports = self._seen_s[here], self._spent_s[here], self._reports[here]
        online = np.maximum(np.rint(self._n_devices * self._online[:last]).astype(np.int64), 1)
        if of.keeps:
            jobs, n = min(of.concurrency, round(online.mean())), of.buffer_size * rounds
            n_played, size = int(np.ceil(min(n, MOST_REPLIES))), float(of.buffer_size)
            shape = int(2.5 * n_played / (jobs * reports.mean())) + 9, jobs
            # A slot goes to the same device again where few others are free.
            again = rng.random(shape) < 1.0 / (1 + online.mean() - jobs)
            source = np.maximum.accumulate(np.where(again, 0, np.arange(shape[0])[:, None]), axis=0)
            job = np.take_along_axis(rng.integers(seen.size, size=shape), source, axis=0)
            job[-1] = np.flatnonzero(reports)[0]
            ok, ends = reports[job], seen[job].cumsum(axis=0)
            begins = ends - seen[job]
            order = np.argsort(ends[ok])[:n_played]
            replies = ends[ok][order]
            end, steps = replies[-1], replies[of.buffer_size - 1 :: of.buffer_size]
            stale = np.searchsorted(steps, replies)
            stale -= np.searchsorted(steps, begins[ok][order], side="right")
            work = np.clip(end - begins, 0.0, spent[job])
            useless, more = work[~ok & (ends <= end)].sum(), n / len(replies)
        else:
            n_played, stale = int(np.ceil(min(rounds, MOST_ROUNDS))), np.zeros(1, dtype=np.int64)
            free = np.minimum(rng.choice(online, n_played), of.concurrency)[:, None]
            job, other = rng.integers(seen.size, size=(2, n_played, int(free.max())))
            # A job that is lost is replaced by another one.
            took = np.where(reports[job], seen[job], seen[job] + seen[other])
            took[np.arange(took.shape[1]) >= free] = np.inf
            ranks, sizes = took.argsort(axis=1).argsort(axis=1), np.minimum(of.buffer_size, free)
            step_s = np.where(ranks == sizes - 1, took, 0.0).sum(axis=1, keepdims=True)
            work = np.where(took < np.inf, np.minimum(spent[job], step_s), 0.0)
            end, useless = step_s.sum(), work[(ranks >= sizes) | ~reports[job]].sum()
            more, size = rounds / n_played, float(sizes.mean())
        total, high = max(work.sum(), 1e-3), 1.0 + np.quantile(stale, [0.5, 0.9])
        hours = more * max(end, 1e-3) / 3600.0, more * total / 3600.0
        return [*hours, useless / total, *high, size, float(np.mean((1.0 + stale) ** -0.5))]
