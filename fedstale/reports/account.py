"""The account of a run: its jobs by the cause of their loss, and what advice is made of."""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, inf, nan
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedstale.errors import ConfigError
from fedstale.reports.figure import Array
from fedstale.runs import EXPIRED, IN_FLIGHT, INTERRUPTED, LATE, STALLED, UNCLAIMED
from fedstale.strategies import parse, with_arguments
from fedstale.strategies.server import CLIENT_ERROR, REJECTED, REPORTED

TOO_LATE, OVER_SELECTED, TOO_STALE = "too late", "over-selected", "too stale"
DROPOUT, REFUSED, FAILED_CLIENT = "went offline", "rejected", "client error"
NEVER_STARTED, NEVER_ENDS, RUN_ENDED = "never started", "stalled", "run ended"
UPLOADS, DOWNLOADS, EVALUATION, IDLE = "uploads", "downloads", "evaluation", "no job in flight"
WAITING, LARGE_BUFFER, FEW_AT_WORK = "waiting", "buffer above concurrency", "few in flight"
MANY_AT_WORK, FORECASTS = "more in flight than devices", "forecasts"
SLOW = (WAITING, LARGE_BUFFER, FEW_AT_WORK)
"""What versions of the model take longer by; no job is lost."""
CAUSES = (
    *(TOO_LATE, OVER_SELECTED, TOO_STALE, DROPOUT, REFUSED, FAILED_CLIENT, NEVER_STARTED),
    *(NEVER_ENDS, RUN_ENDED, UPLOADS, DOWNLOADS, EVALUATION, IDLE, *SLOW),
    *(MANY_AT_WORK, FORECASTS),
)
"""What a run loses device-hours by, and virtual time by `IDLE` and those of `SLOW`."""
FEW = 0.05
"""A cause with a smaller share of the jobs, and of the device-hours, is left out."""
AT_ONCE_S = 1.0
"""A server that has enough goes on within this long after the reply that it waited for."""
STALE = re.compile(r"too stale: more than max_staleness = (\d+)")
HOUR_S = 3600.0
_BLOCKS = 50
"""Of jobs, in the order of sending, that an interval draws from."""
STRATEGY = "strategy"
_CANCELLED = "late: the job was cancelled"


def with_causes(jobs: pd.DataFrame) -> pd.DataFrame:
    """Return jobs, by `fedstale.runs.with_costs`, with the columns `cause` and `stopped_at`.

    A late reply is "over-selected" if the server had gone on because it had enough, and "too late"
    if it went on without enough, or the message had expired. `cause` is one of `CAUSES`, empty of a
    job that was used. `stopped_at` is when the server stopped to wait for the job's round, in s.
    """
    status, reason = jobs["status"], jobs["reason"]
    stopped_at, had_enough = _rounds(jobs)
    is_late = status.isin([LATE, UNCLAIMED]) | reason.str.startswith(_CANCELLED)
    # Where stragglers are kept, no round ends their job; the message's time to live does.
    expired_at = jobs["delivered_at"].where(status == LATE, inf)
    is_after = ~(arrived_at(jobs) <= stopped_at)
    is_over = is_late & had_enough & (stopped_at < expired_at) & is_after
    is_stale = (status == REJECTED) & reason.str.match(STALE.pattern)
    by_status = {
        REJECTED: REFUSED,
        INTERRUPTED: DROPOUT,
        CLIENT_ERROR: FAILED_CLIENT,
        EXPIRED: NEVER_STARTED,
        STALLED: NEVER_ENDS,
        IN_FLIGHT: RUN_ENDED,
    }
    conditions = [is_over & (not keeps_stragglers(jobs)), is_late, is_stale]
    causes = [OVER_SELECTED, TOO_LATE, TOO_STALE]
    found = np.select(conditions, causes, status.map(by_status).fillna(""))
    return jobs.assign(stopped_at=stopped_at, cause=found)


def keeps_stragglers(jobs: pd.DataFrame) -> bool:
    """Return whether replies were used that came after a newer version."""
    return bool((jobs["staleness"] > 0).any())


def _rounds(jobs: pd.DataFrame) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Return for each job when the server stopped to wait for its round, and if it had enough.

    A round lasts until the server sends anything else. It had enough if it went on at a reply, and
    sooner than rounds do that end without one: past a deadline the first reply ends a round, too.
    """
    keys = [jobs["round"], jobs["kind"]]
    begun = np.sort(jobs["sent_at"].unique())
    last_sent = jobs["sent_at"].groupby(keys).transform("max").to_numpy(np.float64)
    stopped_at = np.append(begun, inf)[np.searchsorted(begun, last_sent, side="right")]
    last_used = arrived_at(jobs).where(jobs["status"] == REPORTED).groupby(keys).transform("max")
    at_reply = stopped_at - last_used.fillna(-inf).to_numpy(np.float64) <= AT_ONCE_S
    lasted_s, is_over = stopped_at - last_sent, np.isfinite(stopped_at)
    rounds = pd.DataFrame({"lasted_s": lasted_s, "at_reply": at_reply}, index=jobs.index)
    ends = rounds[is_over].groupby([key[is_over] for key in keys]).first()
    by_time = ends["lasted_s"][~ends["at_reply"]]
    limit_s = float(by_time.median()) if len(by_time) > FEW * len(ends) else inf
    return stopped_at, at_reply & is_over & (lasted_s < limit_s)


def arrived_at(jobs: pd.DataFrame) -> "pd.Series[float]":
    """Return when replies arrived, in s; NaN or inf of those that never did.

    An app may pull all replies of a round together. Of real devices only that is known.
    """
    pulled_at = jobs["delivered_at"].where(jobs["status"].isin([REPORTED, REJECTED]))
    return jobs["reported_at"].fillna(pulled_at)


def waits_of(jobs: pd.DataFrame) -> tuple[Array, Array]:
    """Return the durations of late replies in s; inf for those that never came.

    Args:
        jobs: all jobs of a run, by `with_causes`.

    Returns:
        From the sending to the last byte; and the same without what the device had spent on an
        earlier job until then. With a timeout of the first, few devices are sent to that are still
        at work, so the second is what their next replies take. Both of shape (late jobs,).
    """
    arrivals = arrived_at(jobs)
    free_at = jobs.groupby("device_id", sort=False)["ended_at"].shift(fill_value=-inf)
    began_at = jobs["started_at"].where(jobs["started_at"] <= free_at, jobs["sent_at"])
    late = jobs["cause"] == TOO_LATE
    both = [(arrivals - since)[late] for since in (jobs["sent_at"], began_at)]
    waits, own = (np.where(np.isfinite(each), each, inf) for each in both)
    return waits, own


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A cause of loss, the setting behind it, and what another value is expected to bring.

    Printed, it is what to do, what happened, and what follows.
    """

    cause: str
    """One of `CAUSES`."""
    what: str
    """What happened, after a number of jobs if it is of some: "replies came after 300 s"."""
    n_jobs: int = 0
    """Jobs that were lost by it."""
    device_hours: float = 0.0
    """That these jobs cost, in h; of "no job in flight", hours of virtual time."""
    share: float = 0.0
    """The same as a share of all; of the jobs where no device-hours are known."""
    setting: str
    """What governs it: a key of the run config, an argument of the strategy, or what to look at."""
    value: float | None = None
    """What the setting is proposed to be, in its own unit; None where no number follows."""
    saves: float = 0.0
    """Share of all device-hours, or jobs, that this saves; of the causes of `SLOW` and of "no job
    in flight", share of the virtual time of a version."""
    between: tuple[float, float] = (0.0, 0.0)
    """The 95% interval of `saves`."""
    do: str
    """What to change: "Set round-timeout = 870"."""
    then: str = ""
    """What that is expected to bring, and to cost."""
    change: Mapping[str, int | float | str] = field(default_factory=dict)
    """What `fedstale advise --apply` sets: keys of the run config, and "strategy", the text of the
    strategy; empty where it is set in the app's code, or the app lacks what it takes."""

    @property
    def why(self) -> str:
        """What happened, and what it cost."""
        if not self.n_jobs:
            return f"{self.what[0].upper()}{self.what[1:]}"
        cost = f"; their {self.device_hours:.3g} device-hours ({self.share:.0%}) were lost"
        return f"{self.n_jobs:,} {self.what}{cost if self.device_hours else ''}"

    def __str__(self) -> str:
        return " ".join(f"{text}." for text in (self.do, self.why, self.then) if text)


@dataclass(frozen=True, slots=True)
class Saving:
    """A share that is saved, with its interval."""

    value: float
    between: tuple[float, float]

    def __str__(self) -> str:
        low, high = self.between
        return f"{self.value:.0%} ({low:.0%} to {high:.0%})"


NOTHING = Saving(0.0, (0.0, 0.0))


@dataclass
class Account:
    """The jobs of a run by cause, and what all rules look at."""

    jobs: pd.DataFrame
    end_s: float
    run_config: Mapping[str, Any]
    started: str
    unknown: float
    online: Callable[[], float]
    in_int8: Callable[[], float]
    lacks: Callable[[str], str]
    unit: str = "device-hours"
    """What shares are shares of."""

    def __post_init__(self) -> None:
        if not self.jobs["busy_s"].any():
            # Of real devices it is not known how long they work: all jobs count alike.
            self.jobs, self.unit = self.jobs.assign(busy_s=1.0), "jobs"
        self.total_s = max(float(self.jobs["busy_s"].sum()), 1.0)
        self.keeps_stragglers = keeps_stragglers(self.jobs)
        self.training = self.jobs[self.jobs["kind"].str.startswith("train")]
        self.strategy = str(self.run_config.get(STRATEGY, self.started))

    def of(self, cause: str) -> pd.DataFrame:
        """Return the jobs that were lost by a cause; none if they are too few for a word."""
        lost = self.jobs[self.jobs["cause"] == cause]
        is_few = len(lost) < FEW * len(self.jobs)
        return lost[:0] if is_few and lost["busy_s"].sum() < FEW * self.total_s else lost

    @cached_property
    def until_s(self) -> Array:
        """Instants until which jobs are in flight, in s."""
        stopped_at = inf if self.keeps_stragglers else self.jobs["stopped_at"].to_numpy(np.float64)
        delivered_at = self.jobs["delivered_at"].to_numpy(np.float64)
        return np.fmin(np.fmin(delivered_at, stopped_at), self.end_s)

    @cached_property
    def in_flight(self) -> tuple[float, int]:
        """How many trainings are in flight on average, and at most."""
        is_training = self.jobs["kind"].str.startswith("train").to_numpy()
        sent, until = self.training["sent_at"].to_numpy(np.float64), self.until_s[is_training]
        left = np.searchsorted(np.sort(until), np.sort(sent), side="right")
        most = int((np.arange(1, len(sent) + 1) - left).max(initial=0))
        return float((until - sent).sum()) / max(self.end_s, 1.0), most

    @cached_property
    def updates(self) -> float:
        """How many updates a version is made of."""
        versions = self.training["aggregated_version"][self.training["status"] == REPORTED]
        versions = versions[versions >= 0]
        return float(versions.value_counts().median()) if len(versions) else 1.0

    @cached_property
    def concurrency(self) -> float:
        """Jobs in flight that the strategy asks for; NaN where it does not say, or a pace does."""
        text = self.strategy
        with suppress(ConfigError):
            text = repr(parse(text))
        stated = re.search(r"\bconcurrency=(\d+)", text)
        return float(stated[1]) if stated and not self.is_paced else nan

    @cached_property
    def is_paced(self) -> bool:
        """Whether a pace decides the numbers of the schedule: no rule knows what it would do."""
        with suppress(ConfigError):
            return getattr(parse(self.strategy), "run_pace", None) is not None
        return "pace=" in self.strategy

    def saving(
        self,
        *parts: "pd.Series[float]",
        share: Callable[..., Any] = lambda part, total: part / total,
    ) -> Saving:
        """Work out a share, and the interval in which that of another run is expected.

        By a bootstrap of jobs that follow one another.

        Args:
            parts: of some of the jobs, by the index of all.
            share: of the sums of the parts, and last of the device-hours in s.
        """
        n = len(self.jobs)
        columns = pd.concat([*parts, self.jobs["busy_s"]], axis=1, keys=range(len(parts) + 1))
        blocks = np.arange(n) * min(n, _BLOCKS) // n
        sums = columns.fillna(0.0).groupby(blocks).sum().to_numpy(np.float64)
        n = len(sums)
        drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1.0 / n), 200) @ sums
        with np.errstate(invalid="ignore", divide="ignore"):
            shares = np.nan_to_num(share(*np.vstack([sums.sum(axis=0), drawn]).T))
        value, ends = max(float(shares[0]), 0.0), np.quantile(shares[1:], [0.025, 0.975])
        # What came of it is a draw of its own.
        low, high = np.clip(value + np.sqrt(2.0) * (ends - value), 0.0, 1.0)
        return Saving(value, (float(low), float(high)))

    def saving_at_rate(self, part: float) -> Saving:
        """Return what is saved where a version takes a part of its time, at the rate of replies."""
        used = (self.training["status"] == REPORTED).astype(float)
        usual_s = self.total_s / max(float(used.sum()), 1.0)
        return self.saving(
            used, share=lambda used, total: 1.0 - part * total / np.fmax(used, 1.0) / usual_s
        )

    def strategy_with(self, **arguments: object) -> Mapping[str, str]:
        """Return the text of the strategy with other arguments, by its key; empty without one."""
        with suppress(ConfigError):
            return self.taken(with_arguments(self.strategy, arguments))
        return {}

    def taken(self, text: str) -> Mapping[str, str]:
        """Return the text of a strategy by its key; empty if it is none, or the app lacks a mod."""
        with suppress(ConfigError):
            parse(text)
            return {} if self.lacks(text) else {STRATEGY: text}
        return {}

    def edited(self, argument: str, value: float) -> Mapping[str, str]:
        """Return the same with another number for an argument that the text names, at any depth."""
        pattern = rf"\b({argument} ?= ?)[\d.]+"
        new, n = re.subn(pattern, rf"\g<1>{value:g}", self.strategy)
        return self.taken(new) if n else {}

    def advice(
        self,
        lost: pd.DataFrame,
        what: str,
        setting: str,
        value: float | None = None,
        saves: Saving = NOTHING,
        **more: Any,
    ) -> Advice:
        """Return advice on jobs that were lost, with their sums, and the key that it would set."""
        spent_s = float(lost["busy_s"].sum())
        is_key = value is not None and setting in self.run_config
        number = value if value is None or value % 1 else int(value)
        more.setdefault("change", {setting: number} if is_key else {})
        return Advice(
            setting=setting,
            value=value,
            cause=str(lost["cause"].iloc[0]),
            what=what,
            n_jobs=len(lost),
            device_hours=0.0 if self.unit == "jobs" else spent_s / HOUR_S,
            share=spent_s / self.total_s,
            saves=saves.value,
            between=saves.between,
            then=". ".join(filter(None, (self.never_used(lost), more.pop("then", "")))),
            **more,
        )

    def never_used(self, lost: pd.DataFrame) -> str:
        """Say of how many devices nothing was ever used, if it is more than a few."""
        n_used = (self.jobs["status"] == REPORTED).groupby(self.jobs["device_id"]).sum()
        n_lost = lost["device_id"].value_counts()
        n = int((n_used.reindex(n_lost[n_lost > 1].index) == 0).sum())
        devices = f"{n:,} devices" if n > 1 else "one device"
        return f"No reply of {devices} was ever used" if n > FEW * len(n_used) else ""

    def took(self, cause: str, spent_s: float, saves: Saving, **more: Any) -> Advice:
        """Return advice on what took device-hours, and lost no job."""
        hours, share = spent_s / HOUR_S, spent_s / self.total_s
        what = f"{cause} took {hours:.3g} device-hours ({share:.0%})"
        return Advice(
            cause=cause,
            what=what,
            device_hours=hours,
            share=share,
            saves=saves.value,
            between=saves.between,
            **more,
        )


def rounded_up(seconds: float) -> float:
    """Return the next number of two digits.

    Example:
        >>> rounded_up(612.3), rounded_up(60.0)
        (620.0, 60.0)
    """
    step = 10.0 ** max(int(np.floor(np.log10(max(seconds, 1.0)))) - 1, 0)
    return float(ceil(seconds / step) * step)
