"""The largest costs of a run, the settings that govern them, and the effect of other values.

Rules over the jobs of a run. What a rule expects follows from the same jobs: how long late replies
took, how stale rejected ones would have been, which lost jobs would have ended with less work. It
knows neither whom a selector would pick then nor how well the model would learn, so it is checked
by taking it: tests/system/reports/test_advice_taken.py repeats runs with known faults without them.

Real devices tell less: how long a reply took that never came is not known, and nothing is expected
of another timeout.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedstale.errors import first_line
from fedstale.reports.figure import Array
from fedstale.runs import EXPIRED, IN_FLIGHT, INTERRUPTED, LATE, STALLED, UNCLAIMED
from fedstale.strategies.server import CLIENT_ERROR, REJECTED, REPORTED

TOO_LATE, OVER_SELECTED, TOO_STALE = "too late", "over-selected", "too stale"
DROPOUT, REFUSED, FAILED_CLIENT = "went offline", "rejected", "client error"
NEVER_STARTED, NEVER_ENDS, RUN_ENDED = "never started", "stalled", "run ended"
UPLOADS, IDLE = "uploads", "no job in flight"
CAUSES = (
    *(TOO_LATE, OVER_SELECTED, TOO_STALE, DROPOUT, REFUSED, FAILED_CLIENT, NEVER_STARTED),
    *(NEVER_ENDS, RUN_ENDED, UPLOADS, IDLE),
)
"""What device-hours are lost by, and virtual time by the last one; no job fails by the last two."""
WON = 0.75
"""Share of the late device-hours that a proposed timeout waits for."""
LESS_WORK = 0.5
"""Share of the work that is proposed where devices go offline before they are done."""
COMPRESSED = 0.25
"""Bytes of an int8 model in proportion to those of a float32 one."""
IN_FULL = 0.6
"""Bytes of a reply, in proportion to those of its message, that no format has."""
FEW = 0.02
"""A cause with a smaller share of the jobs, and of the device-hours, is left out."""
MUCH = 0.1
"""The same of virtual time without a job, and of device-hours that a longer run would use."""
_HOUR_S, NOTHING = 3600.0, "-"
_AT_ONCE_S = 1.0
"""A server that has enough goes on within this long after the reply that it waited for."""
_STALE = re.compile(r"too stale: more than max_staleness = (\d+)")
_CANCELLED = "late: the job was cancelled"
_ROUND_TIMEOUT, _TIMEOUT, _EPOCHS = "round-timeout", "timeout of start", "local-epochs"
_REJECTED_BY = (
    (r"NaN or infinity|at most 1e\+15", "the learning rate, by which the training diverges"),
    (r"the norm of the update", "Validation(norm_bound=...)"),
    (r"the reply has", "the limits of Validation(...)"),
)
"""Reasons of rejections that a setting governs; all others are of the ClientApp's own making."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A cause of loss, the setting behind it, and what another value is expected to bring.

    Printed, it is a sentence.
    """

    cause: str
    """One of `CAUSES`."""
    what: str
    """What happened, after a number of jobs: "replies came after the timeout of 300 s"."""
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
    proposal: str
    """What to change, and what that is expected to bring."""

    def __str__(self) -> str:
        hours = f" took {self.device_hours:.3g} device-hours ({self.share:.0%} of all)"
        n = f"{self.n_jobs:,} " if self.n_jobs else ""
        return f"{n}{self.what}{hours if self.device_hours else ''}: {self.proposal}."


@dataclass(slots=True)
class _Account:
    """The jobs of a run by cause, and what all rules look at."""

    jobs: pd.DataFrame
    end_s: float
    run_config: Mapping[str, Any]
    unknown: float
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

    def advice(self, lost: pd.DataFrame, what: str, **more: Any) -> Advice:
        """Return advice on jobs that were lost, with their sums."""
        spent_s = float(lost["busy_s"].sum())
        return Advice(
            cause=str(lost["cause"].iloc[0]),
            what=what,
            n_jobs=len(lost),
            device_hours=0.0 if self.unit == "jobs" else spent_s / _HOUR_S,
            share=spent_s / self.total_s,
            **more,
        )


def advise(
    jobs: pd.DataFrame,
    *,
    end_s: float,
    run_config: Mapping[str, Any] | None = None,
    unknown: float = 0.0,
) -> list[Advice]:
    """List the largest costs of a run with the settings that govern them, by their savings.

    Args:
        jobs: one row a job in the order of sending, by `with_causes`.
        end_s: when the run ended, in s of virtual time.
        run_config: of the app; a setting that is a key of it is called by that key.
        unknown: share of the devices' time in the run of which their traces say nothing.
    """
    account = _Account(jobs, end_s, run_config or {}, unknown)
    by_cause = {cause: account.of(cause) for cause in _RULES}
    of_jobs = [_RULES[cause](account, lost) for cause, lost in by_cause.items() if len(lost)]
    found = [each for each in (*of_jobs, _uploads(account), _idle(account)) if each is not None]
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
    what = f"replies that came after the timeout of {_seconds(limit_s)}"
    waits, own = waits_of(account.jobs)
    spent = late["busy_s"].to_numpy(np.float64)
    known_s = float(spent[np.isfinite(waits)].sum())
    if not known_s:
        unknown = f"{setting} governs that; how long they took is not known"
        return account.advice(late, what, setting=setting, proposal=unknown)
    order = np.argsort(waits, kind="stable")
    reached = int(np.searchsorted(np.cumsum(spent[order]), WON * known_s))
    value = _rounded_up(float(waits[order][reached]))
    within = own <= value
    saved = float(spent[within].sum()) / account.total_s
    longer = "" if account.keeps_stragglers else f" in rounds of up to {_seconds(value)}"
    is_work = not late["upload_s"].sum() > 0.5 * spent.sum()
    less = (_EPOCHS if _EPOCHS in account.run_config else "less work") if is_work else "Compression"
    proposal = (
        f"{within.mean():.0%} take at most {_seconds(value)} once their device is free; {setting} "
        f"= {value:g} uses another {saved:.0%} of the {account.unit}{longer}, and {less} makes "
        "jobs shorter"
    )
    return account.advice(late, what, setting=setting, value=value, saves=saved, proposal=proposal)


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
    return account.advice(
        cut,
        "replies that came when the server had enough",
        setting="concurrency",
        value=float(value),
        saves=max(saved, 0.0),
        proposal=f"of {n_sent} jobs a round {n_used} are used; concurrency = {value} saves "
        f"{max(saved, 0.0):.0%} of the {account.unit} and waits for slower devices, FedBuff uses "
        "late replies, too",
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
        f"replies that were more than {limit} versions behind",
        setting="max_staleness",
        value=value,
        saves=saved,
        proposal=f"max_staleness = {value:.0f} uses another {saved:.0%} of the {account.unit}, and "
        "a lower concurrency makes replies less stale",
    )


def _dropout(account: _Account, lost: pd.DataFrame) -> Advice:
    setting = _EPOCHS if _EPOCHS in account.run_config else "local epochs"
    what = "jobs whose device went offline"
    jobs = account.jobs[account.jobs["kind"].isin(lost["kind"].unique())]
    done = jobs[jobs["status"] == REPORTED]
    if done.empty:
        less = f"fewer {setting}, or LocalWork"
        return account.advice(lost, what, setting=setting, proposal=less)
    phases = ["compute_s", "upload_s"]
    usual = done.groupby("device_id")[phases].median().reindex(lost["device_id"])
    own = usual.fillna(done[phases].median()).to_numpy(np.float64)
    spent = lost[["download_s", *phases]].to_numpy(np.float64)
    stated, value, part = account.run_config.get(_EPOCHS), None, LESS_WORK
    if isinstance(stated, int) and stated > 1:
        value = int(LESS_WORK * stated)
        part = value / stated
    less = f"{part:.0%} of the {setting}" if value is None else f"{setting} = {value}"
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
        proposal=f"{less} saves {saved:.0%} of the {account.unit}, since {ends.mean():.0%} of "
        "these jobs end then; so may LocalWork, and a selector with forecasts",
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
        "replies that were rejected",
        setting=setting,
        saves=saved,
        proposal=f"{len(reasons) / len(lost):.0%} because of {setting} ({reasons.iloc[0]})",
    )


def _client_errors(account: _Account, lost: pd.DataFrame) -> Advice:
    reason, n = lost["reason"].value_counts().index[0], lost["device_id"].nunique()
    return account.advice(
        lost,
        f"jobs of {n:,} device{'s' if n > 1 else ''} that failed in the ClientApp",
        setting="the ClientApp",
        saves=float(lost["busy_s"].sum()) / account.total_s,
        proposal=f"mend {first_line(reason)}",
    )


def _never_started(account: _Account, expired: pd.DataFrame) -> Advice:
    setting = _ROUND_TIMEOUT if _ROUND_TIMEOUT in account.run_config else _TIMEOUT
    return account.advice(
        expired,
        "messages that expired before their device began",
        setting=setting,
        proposal=f"it was offline, or at work on a job that was too late; {setting} governs "
        "how long a message lives",
    )


def _never_ends(account: _Account, stalled: pd.DataFrame) -> Advice:
    names = list(dict.fromkeys(stalled["device_id"]))
    some = ", ".join(names[:3]) + f" and {len(names) - 3:,} more" * (len(names) > 3)
    return account.advice(
        stalled,
        "jobs that could never end",
        setting="the traces",
        saves=float(stalled["busy_s"].sum()) / account.total_s,
        proposal=f"leave out {some}, of which the traces say a rate of 0 for good",
    )


def _run_ended(account: _Account, lost: pd.DataFrame) -> Advice | None:
    if lost["busy_s"].sum() < MUCH * account.total_s:
        return None
    what = "jobs that were in flight when the run ended"
    return account.advice(lost, what, setting="until", proposal="a longer run uses them")


def _uploads(account: _Account) -> Advice | None:
    jobs = account.jobs
    uploaded_s = float(jobs["upload_s"].sum())
    share = uploaded_s / account.total_s
    saved = (1.0 - COMPRESSED) * share
    asked = jobs[jobs["format_up"] != ""]
    in_full = asked["uploaded_bytes"] > IN_FULL * asked["downloaded_bytes"]
    if saved < 2.0 * MUCH or (len(asked) and in_full.mean() < 0.5):
        return None
    setting, how = 'stages=[Compression("int8")]', ", with CompressionMod() in the ClientApp,"
    if len(asked):
        setting, how = "CompressionMod()", ", which the ClientApp lacks and was asked for,"
    return Advice(
        cause=UPLOADS,
        what="uploads",
        device_hours=uploaded_s / _HOUR_S,
        share=share,
        setting=setting,
        saves=saved,
        proposal=f"{setting}{how} sends a quarter of the bytes and saves {saved:.0%} of the "
        "device-hours",
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
        proposal = (
            f"for {account.unknown:.0%} of the time devices were unknown, not offline: nobody "
            "logged them, which counts as offline here; simulate the time that was logged (until), "
            "or devices that were logged for longer"
        )
    elif account.keeps_stragglers:
        setting = "the devices"
        proposal = "none was online and free; more of them fill that time"
    else:
        setting = "min_available_nodes"
        proposal = (
            "too few nodes were online to begin a round, which min_available_nodes and "
            "min_train_nodes govern"
        )
    return Advice(
        cause=IDLE,
        what=f"in {share:.0%} of the virtual time ({idle_s / _HOUR_S:.3g} h) no job was in flight",
        setting=setting,
        share=share,
        saves=share,
        proposal=proposal,
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


def table(advice: Sequence[Advice]) -> pd.DataFrame:
    """Return advice as a table of texts, a row for each cause."""
    rows = []
    for each in advice:
        is_idle, hours = each.cause == IDLE, f"{each.device_hours:.3g} ({each.share:.0%})"
        rows.append(
            {
                "what, and what to do": f"{each.what[0].upper()}{each.what[1:]}: {each.proposal}.",
                "governed by": each.setting,
                "jobs": f"{each.n_jobs:,}" if each.n_jobs else NOTHING,
                "device-hours": NOTHING if is_idle or not each.device_hours else hours,
            }
        )
    return pd.DataFrame(rows)


def _rounded_up(seconds: float) -> float:
    """Return the next number of two digits.

    Example:
        >>> _rounded_up(612.3), _rounded_up(60.0)
        (620.0, 60.0)
    """
    step = 10.0 ** max(int(np.floor(np.log10(max(seconds, 1.0)))) - 1, 0)
    return float(ceil(seconds / step) * step)


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s"
