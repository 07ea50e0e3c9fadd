"""The largest costs of a run, the settings that govern them, and the effect of other values.

Rules over the jobs of a run. What a rule expects follows from the same jobs: how long late replies
took, how stale rejected ones would have been, which lost jobs would have ended with less work. It
knows neither whom a selector would pick then nor how well the model would learn, so it is checked
by taking it: tests/system/reports/test_advice_taken.py repeats runs with known faults without them.

Real devices tell less: how long a reply took that never came is not known, and nothing is expected
of another timeout.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedstale.errors import ConfigError, first_line
from fedstale.reports.figure import Array
from fedstale.runs import EXPIRED, IN_FLIGHT, INTERRUPTED, LATE, STALLED, UNCLAIMED
from fedstale.strategies import parse, with_arguments
from fedstale.strategies.server import CLIENT_ERROR, REJECTED, REPORTED

TOO_LATE, OVER_SELECTED, TOO_STALE = "too late", "over-selected", "too stale"
DROPOUT, REFUSED, FAILED_CLIENT = "went offline", "rejected", "client error"
NEVER_STARTED, NEVER_ENDS, RUN_ENDED = "never started", "stalled", "run ended"
UPLOADS, DOWNLOADS, EVALUATION, IDLE = "uploads", "downloads", "evaluation", "no job in flight"
CAUSES = (
    *(TOO_LATE, OVER_SELECTED, TOO_STALE, DROPOUT, REFUSED, FAILED_CLIENT, NEVER_STARTED),
    *(NEVER_ENDS, RUN_ENDED, UPLOADS, DOWNLOADS, EVALUATION, IDLE),
)
"""What device-hours are lost by, and virtual time by the last one; the last four fail no job."""
WON = 0.9
"""Share of the late device-hours that a proposed timeout waits for."""
LESS_WORK = 0.5
"""Share of the work that is proposed where devices go offline before they are done."""
EVALUATED = 0.25
"""Share of the devices that evaluate, where evaluation costs much."""
FEW = 0.05
"""A cause with a smaller share of the jobs, and of the device-hours, is left out."""
MUCH = 0.1
"""The same of virtual time without a job, and of device-hours that a longer run would use."""
_HOUR_S = 3600.0
_AT_ONCE_S = 1.0
"""A server that has enough goes on within this long after the reply that it waited for."""
_STALE = re.compile(r"too stale: more than max_staleness = (\d+)")
_CANCELLED = "late: the job was cancelled"
_ROUND_TIMEOUT, _TIMEOUT, _EPOCHS = "round-timeout", "timeout of start", "local-epochs"
STRATEGY = "strategy"
_REJECTED_BY = (
    (r"NaN or infinity|at most 1e\+15", "the learning rate, by which the training diverges"),
    (r"the norm of the update", "Validation(norm_bound=...)"),
    (r"the reply has", "the limits of Validation(...)"),
)
"""Reasons of rejections that a setting governs; all others are of the ClientApp's own making."""


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
    """Share of all device-hours, or jobs, that this saves; of "no job in flight", of the time."""
    do: str
    """What to change: "Set round-timeout = 870"."""
    then: str = ""
    """What that is expected to bring, and to cost."""
    change: Mapping[str, int | float | str] = field(default_factory=dict)
    """What `fedstale advise --apply` sets: keys of the run config, where "strategy" is the text of
    the strategy; empty where the app has no such key."""

    @property
    def why(self) -> str:
        """What happened, and what it cost."""
        if not self.n_jobs:
            return f"{self.what[0].upper()}{self.what[1:]}"
        cost = f"; their {self.device_hours:.3g} device-hours ({self.share:.0%}) were lost"
        return f"{self.n_jobs:,} {self.what}{cost if self.device_hours else ''}"

    def __str__(self) -> str:
        return " ".join(f"{text}." for text in (self.do, self.why, self.then) if text)


@dataclass(slots=True)
class _Account:
    """The jobs of a run by cause, and what all rules look at."""

    jobs: pd.DataFrame
    end_s: float
    run_config: Mapping[str, Any]
    unknown: float
    in_int8: Callable[[], float]
    total_s: float = field(init=False)
    unit: str = "device-hours"
    """What shares are shares of."""
    keeps_stragglers: bool = field(init=False)

    def __post_init__(self) -> None:
        if not self.jobs["busy_s"].any():
            # Of real devices it is not known how long they work: all jobs count alike.
            self.jobs, self.unit = self.jobs.assign(busy_s=1.0), "jobs"
        self.total_s = max(float(self.jobs["busy_s"].sum()), 1.0)
        self.keeps_stragglers = keeps_stragglers(self.jobs)

    def of(self, cause: str) -> pd.DataFrame:
        """Return the jobs that were lost by a cause; none if they are too few for a word."""
        lost = self.jobs[self.jobs["cause"] == cause]
        is_few = len(lost) < FEW * len(self.jobs)
        return lost[:0] if is_few and lost["busy_s"].sum() < FEW * self.total_s else lost

    def strategy_with(self, **arguments: object) -> Mapping[str, str]:
        """Return the text of the strategy with other arguments, by its key; empty without one."""
        try:
            text = with_arguments(str(self.run_config[STRATEGY]), arguments)
            parse(text)
        except (KeyError, ConfigError):
            return {}
        return {STRATEGY: text}

    def edited(self, argument: str, value: float) -> Mapping[str, str]:
        """Return the same with another number for an argument that the text names, at any depth."""
        text = str(self.run_config.get(STRATEGY))
        new, n = re.subn(rf"\b({argument} ?= ?)[\d.]+", rf"\g<1>{value:g}", text)
        return {STRATEGY: new} if n else {}

    def advice(
        self, lost: pd.DataFrame, what: str, setting: str, value: float | None = None, **more: Any
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
            device_hours=0.0 if self.unit == "jobs" else spent_s / _HOUR_S,
            share=spent_s / self.total_s,
            **more,
        )

    def took(self, cause: str, spent_s: float, **more: Any) -> Advice:
        """Return advice on what took device-hours, and lost no job."""
        hours, share = spent_s / _HOUR_S, spent_s / self.total_s
        what = f"{cause} took {hours:.3g} device-hours ({share:.0%})"
        return Advice(cause=cause, what=what, device_hours=hours, share=share, **more)


def advise(
    jobs: pd.DataFrame,
    *,
    end_s: float,
    run_config: Mapping[str, Any] | None = None,
    unknown: float = 0.0,
    in_int8: Callable[[], float] = lambda: 1.0,
) -> list[Advice]:
    """List the largest costs of a run with the settings that govern them, by their savings.

    Args:
        jobs: one row a job in the order of sending, by `with_causes`.
        end_s: when the run ended, in s of virtual time.
        run_config: of the app, and "strategy", the text of the strategy, if it was given as one; a
            setting that is a key of it is called by that key.
        unknown: share of the devices' time in the run of which their traces say nothing.
        in_int8: returns the bytes of the model in int8 in proportion to those in full.
    """
    account = _Account(jobs, end_s, run_config or {}, unknown, in_int8)
    by_cause = {cause: account.of(cause) for cause in _RULES}
    of_jobs = [_RULES[cause](account, lost) for cause, lost in by_cause.items() if len(lost)]
    besides = (_moved(account, UPLOADS), _moved(account, DOWNLOADS), _evaluation(account))
    found = [each for each in (*of_jobs, *besides, _idle(account)) if each is not None]
    return sorted(found, key=lambda advice: (-advice.saves, -advice.device_hours))


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
    is_after = ~(_arrived_at(jobs) <= stopped_at)
    is_over = is_late & had_enough & (stopped_at < expired_at) & is_after
    is_stale = (status == REJECTED) & reason.str.match(_STALE.pattern)
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
    last_used = _arrived_at(jobs).where(jobs["status"] == REPORTED).groupby(keys).transform("max")
    at_reply = stopped_at - last_used.fillna(-inf).to_numpy(np.float64) <= _AT_ONCE_S
    lasted_s, is_over = stopped_at - last_sent, np.isfinite(stopped_at)
    rounds = pd.DataFrame({"lasted_s": lasted_s, "at_reply": at_reply}, index=jobs.index)
    ends = rounds[is_over].groupby([key[is_over] for key in keys]).first()
    by_time = ends["lasted_s"][~ends["at_reply"]]
    limit_s = float(by_time.median()) if len(by_time) > FEW * len(ends) else inf
    return stopped_at, at_reply & is_over & (lasted_s < limit_s)


def _arrived_at(jobs: pd.DataFrame) -> "pd.Series[float]":
    """Return when replies arrived, in s; NaN or inf of those that never did.

    An app may pull all replies of a round together. Of real devices only that is known.
    """
    pulled_at = jobs["delivered_at"].where(jobs["status"].isin([REPORTED, REJECTED]))
    return jobs["reported_at"].fillna(pulled_at)


# Rules: each returns advice on the jobs that were lost by a cause, or none.


def _too_late(account: _Account, late: pd.DataFrame) -> Advice:
    limit_s, setting = _timeout(account, late)
    what = f"replies came after {limit_s:,.0f} s" if limit_s < inf else "replies came too late"
    waits, own = waits_of(account.jobs)
    spent = late["busy_s"].to_numpy(np.float64)
    known_s = float(spent[np.isfinite(waits)].sum())
    if not known_s:
        unknown = "How long they took is not known"
        return account.advice(late, what, setting=setting, do=f"Raise {setting}", then=unknown)
    order = np.argsort(waits, kind="stable")
    reached = int(np.searchsorted(np.cumsum(spent[order]), WON * known_s))
    value = _rounded_up(float(waits[order][reached]))
    within = own <= value
    saved = float(spent[within].sum()) / account.total_s
    longer = "" if account.keeps_stragglers else f", and rounds may take {value:,.0f} s"
    return account.advice(
        late,
        what,
        setting=setting,
        value=value,
        saves=saved,
        do=f"Set {setting} = {value:g}",
        then=f"Another {saved:.0%} of the {account.unit} are used then{longer}",
    )


def waits_of(jobs: pd.DataFrame) -> tuple[Array, Array]:
    """Return the durations of late replies in s; inf for those that never came.

    Args:
        jobs: all jobs of a run, by `with_causes`.

    Returns:
        From the sending to the last byte; and the same without what the device had spent on an
        earlier job until then. With a timeout of the first, few devices are sent to that are still
        at work, so the second is what their next replies take. Both of shape (late jobs,).
    """
    arrived_at = _arrived_at(jobs)
    free_at = jobs.groupby("device_id", sort=False)["ended_at"].shift(fill_value=-inf)
    began_at = jobs["started_at"].where(jobs["started_at"] <= free_at, jobs["sent_at"])
    late = jobs["cause"] == TOO_LATE
    both = [(arrived_at - since)[late] for since in (jobs["sent_at"], began_at)]
    waits, own = (np.where(np.isfinite(each), each, inf) for each in both)
    return waits, own


def _timeout(account: _Account, late: pd.DataFrame) -> tuple[float, str]:
    """Return after which time replies were late, in s, and the setting that says so."""
    expired = late[late["status"] == LATE]
    lived_s = float((expired["delivered_at"] - expired["sent_at"]).min()) if len(expired) else inf
    round_s = float((late["stopped_at"] - late["sent_at"]).median())
    is_round = not account.keeps_stragglers and round_s < lived_s - _AT_ONCE_S
    if is_round and (account.jobs["base_version"] >= 0).any():
        return round_s, "deadline_s"
    limit_s = round_s if is_round else lived_s
    stated = account.run_config.get(_ROUND_TIMEOUT)
    if isinstance(stated, int | float) and not limit_s > stated + _AT_ONCE_S:
        return float(stated), _ROUND_TIMEOUT
    return limit_s, _TIMEOUT


def _over_selected(account: _Account, cut: pd.DataFrame) -> Advice:
    jobs = account.jobs
    rounds = jobs[jobs["kind"].isin(cut["kind"].unique()) & np.isfinite(jobs["stopped_at"])]
    by_round = rounds.groupby("round")
    n_sent = int(by_round.size().median())
    n_used = int((rounds["status"] == REPORTED).groupby(rounds["round"]).sum().median())
    fails = float(rounds["cause"].isin([DROPOUT, FAILED_CLIENT, NEVER_ENDS]).mean())
    value = min(ceil(n_used / max(1.0 - fails, FEW)), n_sent)
    saved = float(cut["busy_s"].sum()) / account.total_s - _wasted_of(by_round, value, n_used)
    # A schedule comes before a concurrency.
    has_schedule = "schedule" in str(account.run_config.get(STRATEGY))
    named = {"schedule": f"k_sync({value}, {n_used})"} if has_schedule else {"concurrency": value}
    return account.advice(
        cut,
        "replies came when the server had enough",
        setting="concurrency",
        value=float(value),
        saves=max(saved, 0.0),
        do=f"Set concurrency = {value}",
        then=f"Of {n_sent} jobs a round {n_used} are used. That saves {max(saved, 0.0):.0%} of the "
        f"{account.unit}, and rounds wait for slower devices; FedBuff uses late replies, too",
        change=account.strategy_with(**named),
    )


def _wasted_of(by_round: Any, n_sent: int, n_used: int) -> float:
    """Return which share of the device-hours is wasted if fewer of a round's jobs are sent.

    They are drawn from those that were sent, and the first to answer are used.
    """
    rng = np.random.default_rng(0)
    spent_s = wasted_s = 0.0
    for _, sent in by_round:
        drawn = sent.iloc[np.sort(rng.permutation(len(sent))[:n_sent])]
        busy = drawn.sort_values("reported_at", kind="stable")["busy_s"]
        spent_s, wasted_s = spent_s + float(busy.sum()), wasted_s + float(busy[n_used:].sum())
    return wasted_s / spent_s if spent_s else 0.0


def _too_stale(account: _Account, stale: pd.DataFrame) -> Advice:
    limit = max(int(found[1]) for found in map(_STALE.match, stale["reason"]) if found)
    used = account.jobs[account.jobs["status"] == REPORTED]
    versions = used["aggregated_version"][used["aggregated_version"] >= 0]
    size = float(versions.value_counts().median()) if len(versions) else 1.0
    # With a larger limit, what was rejected fills buffers too, and the version grows faster.
    arrivals = np.sort(pd.concat([used, stale])["delivered_at"].to_numpy(np.float64))
    before = np.searchsorted(arrivals, stale["sent_at"], side="right")
    staleness = np.ceil((np.searchsorted(arrivals, stale["delivered_at"]) - before) / size)
    value = max(float(np.quantile(staleness, 0.9, method="higher")), limit + 1.0)
    saved = float(stale["busy_s"][staleness <= value].sum()) / account.total_s
    return account.advice(
        stale,
        f"replies were more than {limit} versions behind",
        setting="max_staleness",
        value=value,
        saves=saved,
        do=f"Set max_staleness = {value:.0f}",
        then=f"Another {saved:.0%} of the {account.unit} are used then. A lower concurrency makes "
        "replies less stale",
        change=account.edited("max_staleness", value),
    )


def _dropout(account: _Account, lost: pd.DataFrame) -> Advice:
    setting = _EPOCHS if _EPOCHS in account.run_config else "local epochs"
    what = "jobs ended with their device offline"
    jobs = account.jobs[account.jobs["kind"].isin(lost["kind"].unique())]
    done = jobs[jobs["status"] == REPORTED]
    if done.empty:
        less = f"Ask for fewer {setting}, or use LocalWork"
        return account.advice(lost, what, setting=setting, do=less)
    phases = ["compute_s", "upload_s"]
    usual = done.groupby("device_id")[phases].median().reindex(lost["device_id"])
    own = usual.fillna(done[phases].median()).to_numpy(np.float64)
    spent = lost[["download_s", *phases]].to_numpy(np.float64)
    stated, value, part = account.run_config.get(_EPOCHS), None, LESS_WORK
    if isinstance(stated, int) and stated > 1:
        value = int(LESS_WORK * stated)
        part = value / stated
    less = f"Ask for {part:.0%} of the {setting}" if value is None else f"Set {setting} = {value}"
    # What was cut off would have taken longer than it had.
    needs = spent[:, 0] + part * np.fmax(own[:, 0], spent[:, 1]) + own[:, 1]
    had = lost["busy_s"].to_numpy(np.float64)
    ends = (spent[:, 1] > 0.0) & (had >= needs)
    # If its device is sent to again before it goes offline, the next job is lost in its place; the
    # server comes back to a device as much sooner as jobs are shorter.
    again_s = part * (done.groupby("device_id")["sent_at"].shift(-1) - done["ended_at"])
    left_s = (had - needs)[ends, np.newaxis] - again_s.fillna(inf).to_numpy(np.float64)
    next_s = np.maximum(left_s, 0.0).mean(axis=1).sum()
    lost_s, still_s = float(had.sum()), float(had[~ends].sum() + next_s)
    total_s = account.total_s - lost_s + still_s + float(needs[ends].sum())
    saved = max(lost_s / account.total_s - still_s / total_s, 0.0)
    return account.advice(
        lost,
        what,
        setting=setting,
        value=value,
        saves=saved,
        do=less,
        then=f"{ends.mean():.0%} of these jobs are done in time then, which saves {saved:.0%} of "
        f"the {account.unit}. LocalWork and a selector with forecasts may save as much",
    )


def _rejected(account: _Account, lost: pd.DataFrame) -> Advice:
    governs = {
        reason: next((s for pattern, s in _REJECTED_BY if re.search(pattern, reason)), "")
        for reason in lost["reason"].unique()
    }
    settings = lost["reason"].map(governs)
    most = settings.value_counts().index[0]
    reasons = lost["reason"][settings == most]
    setting = most or "what the ClientApp returns"
    saved = float(lost["busy_s"][settings == most].sum()) / account.total_s
    return account.advice(
        lost,
        "replies were rejected",
        setting=setting,
        saves=saved,
        do=f"{'Change' if most else 'Mend'} {setting}",
        then=f"{len(reasons) / len(lost):.0%} of them say: {reasons.iloc[0]}",
    )


def _client_errors(account: _Account, lost: pd.DataFrame) -> Advice:
    reason, n = lost["reason"].value_counts().index[0], lost["device_id"].nunique()
    return account.advice(
        lost,
        f"jobs of {n:,} device{'s' if n > 1 else ''} failed in the ClientApp",
        setting="the ClientApp",
        saves=float(lost["busy_s"].sum()) / account.total_s,
        do=f"Mend {first_line(reason)}",
    )


def _never_started(account: _Account, expired: pd.DataFrame) -> Advice:
    setting = _ROUND_TIMEOUT if _ROUND_TIMEOUT in account.run_config else _TIMEOUT
    return account.advice(
        expired,
        "messages expired before their device began",
        setting=setting,
        do=f"Raise {setting}",
        then="The devices were offline, or at work on a job that was too late",
    )


def _never_ends(account: _Account, stalled: pd.DataFrame) -> Advice:
    names = list(dict.fromkeys(stalled["device_id"]))
    some = ", ".join(names[:3]) + f" and {len(names) - 3:,} more" * (len(names) > 3)
    return account.advice(
        stalled,
        "jobs could never end",
        setting="the traces",
        saves=float(stalled["busy_s"].sum()) / account.total_s,
        do=f"Leave out {some}",
        then="Their traces say a rate of 0 for good",
    )


def _run_ended(account: _Account, lost: pd.DataFrame) -> Advice | None:
    if lost["busy_s"].sum() < MUCH * account.total_s:
        return None
    return account.advice(lost, "jobs were out at the end", setting="until", do="Run for longer")


def _moved(account: _Account, cause: str) -> Advice | None:
    """Return advice on uploads or downloads, which formats make shorter."""
    jobs, side = account.jobs, "up" if cause == UPLOADS else "down"
    moved_s = float(jobs[f"{side}load_s"].sum())
    share = moved_s / account.total_s
    if share < MUCH:
        return None
    part, asked = account.in_int8(), jobs[jobs["format_up"] != ""]
    saved = (1.0 - part) * share
    in_full = asked["uploaded_bytes"] > (1.0 + part) / 2.0 * asked["downloaded_bytes"]
    is_lacking = len(asked) > 0 and in_full.mean() >= 0.5
    if saved < MUCH or (is_lacking if side == "down" else len(asked) > 0 and not is_lacking):
        return None
    form = '"int8"' if cause == UPLOADS else 'down="int8"'
    setting = "CompressionMod()" if is_lacking else f"stages=[Compression({form})]"
    has_stages = "stages" in str(account.run_config.get(STRATEGY))
    stages = {} if has_stages else account.strategy_with(stages=f"[Compression({form})]")
    saves = f"{part:.0%} of the bytes are sent then, which saves {saved:.0%} of the device-hours"
    return account.took(
        cause,
        moved_s,
        setting=setting,
        saves=saved,
        do=f"Add {setting} to the {'mods of the ClientApp' if is_lacking else 'strategy'}",
        then=saves if is_lacking else f"{saves}, if the ClientApp has CompressionMod()",
        change=stages,
    )


def _evaluation(account: _Account) -> Advice | None:
    spent_s = float(account.jobs["busy_s"][account.jobs["kind"].str.startswith("evaluate")].sum())
    share, setting = spent_s / account.total_s, "fraction_evaluate"
    saved = share * (1.0 - EVALUATED)
    if saved < MUCH or account.unit == "jobs":
        return None
    stated = re.search(rf"\b{setting} ?= ?([\d.]+)", str(account.run_config.get(STRATEGY)))
    value = EVALUATED * float(stated[1]) if stated else None
    return account.took(
        EVALUATION,
        spent_s,
        setting=setting,
        value=value,
        saves=saved,
        do=f"Set {setting} = {value:g}" if value else f"Set {setting} to a quarter",
        then=f"That saves {saved:.0%} of the device-hours, and accuracies are of fewer devices",
        change=account.edited(setting, value) if value else {},
    )


def _idle(account: _Account) -> Advice | None:
    jobs = account.jobs
    stopped_at = inf if account.keeps_stragglers else jobs["stopped_at"].to_numpy(np.float64)
    until = np.fmin(np.fmin(jobs["delivered_at"].to_numpy(np.float64), stopped_at), account.end_s)
    ends = np.maximum.accumulate(until)
    starts = np.append(jobs["sent_at"].to_numpy(np.float64), account.end_s)
    idle_s = float(np.maximum(starts - np.append(0.0, ends), 0.0).sum())
    share = idle_s / account.end_s if account.end_s else 0.0
    if share < MUCH:
        return None
    if account.unknown >= MUCH:
        setting = "the traces"
        do = "Simulate the time that was logged (until), or devices that were logged for longer"
        then = f"For {account.unknown:.0%} of the time nobody logged the devices"
    elif account.keeps_stragglers:
        setting = "the devices"
        do, then = "Simulate more devices", "None was online and free"
    else:
        setting = "min_available_nodes"
        do = "Lower min_available_nodes and min_train_nodes"
        then = "Too few nodes were online to begin a round"
    return Advice(
        cause=IDLE,
        what=f"in {share:.0%} of the virtual time ({idle_s / _HOUR_S:.3g} h) no job was in flight",
        setting=setting,
        share=share,
        saves=share,
        do=do,
        then=then,
    )


_RULES: dict[str, Callable[[_Account, pd.DataFrame], Advice | None]] = {
    TOO_LATE: _too_late,
    OVER_SELECTED: _over_selected,
    TOO_STALE: _too_stale,
    DROPOUT: _dropout,
    REFUSED: _rejected,
    FAILED_CLIENT: _client_errors,
    NEVER_STARTED: _never_started,
    NEVER_ENDS: _never_ends,
    RUN_ENDED: _run_ended,
}


def _rounded_up(seconds: float) -> float:
    """Return the next number of two digits.

    Example:
        >>> _rounded_up(612.3), _rounded_up(60.0)
        (620.0, 60.0)
    """
    step = 10.0 ** max(int(np.floor(np.log10(max(seconds, 1.0)))) - 1, 0)
    return float(ceil(seconds / step) * step)
