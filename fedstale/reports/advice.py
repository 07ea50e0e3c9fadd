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
from math import ceil, inf, nan
from typing import Any

import numpy as np
import pandas as pd

from fedstale.errors import first_line
from fedstale.reports.account import (
    AT_ONCE_S,
    DOWNLOADS,
    DROPOUT,
    EVALUATION,
    FAILED_CLIENT,
    FEW,
    FEW_AT_WORK,
    FORECASTS,
    HOUR_S,
    IDLE,
    LARGE_BUFFER,
    MANY_AT_WORK,
    NEVER_ENDS,
    NEVER_STARTED,
    NOTHING,
    OVER_SELECTED,
    REFUSED,
    RUN_ENDED,
    SLOW,
    STALE,
    STRATEGY,
    TOO_LATE,
    TOO_STALE,
    UPLOADS,
    WAITING,
    Account,
    Advice,
    Saving,
    arrived_at,
    rounded_up,
    waits_of,
)
from fedstale.runs import INTERRUPTED, LATE
from fedstale.strategies.server import REPORTED

WON = 0.9
"""Share of the late device-hours that a proposed timeout waits for."""
LESS_WORK = 0.5
"""Share of the work that is proposed where devices go offline before they are done."""
EVALUATED = 0.25
"""Share of the devices that evaluate, where evaluation costs much."""
ENOUGH = 100
"""Jobs whose forecasts are looked at."""
MUCH = 0.1
"""The same of virtual time without a job, and of device-hours that a longer run would use."""
_MOD = "CompressionMod()"
_ROUND_TIMEOUT, _TIMEOUT, _EPOCHS = "round-timeout", "timeout of start", "local-epochs"
_REJECTED_BY = (
    (r"NaN or infinity|at most 1e\+15", "the learning rate, by which the training diverges"),
    (r"the norm of the update", "Validation(norm_bound=...)"),
    (r"the reply has", "the limits of Validation(...)"),
)
"""Reasons of rejections that a setting governs; all others are of the ClientApp's own making."""


def advise(
    jobs: pd.DataFrame,
    *,
    end_s: float,
    run_config: Mapping[str, Any] | None = None,
    started: str = "",
    unknown: float = 0.0,
    online: Callable[[], float] = lambda: nan,
    in_int8: Callable[[], float] = lambda: 1.0,
    lacks: Callable[[str], str] = lambda _: "",
) -> list[Advice]:
    """List the largest costs of a run with the settings that govern them, by their savings.

    Args:
        jobs: one row a job in the order of sending, by `with_causes`.
        end_s: when the run ended, in s of virtual time.
        run_config: of the app, and "strategy", the text of the strategy, if it was given as one; a
            setting that is a key of it is called by that key.
        started: the strategy that was started, in words.
        unknown: share of the devices' time in the run of which their traces say nothing.
        online: returns how many devices were online on average; NaN where it is not known.
        in_int8: returns the bytes of the model in int8 in proportion to those in full.
        lacks: returns what the app lacks for the text of a strategy; nothing if it can take it.
    """
    account = Account(jobs, end_s, run_config or {}, started, unknown, online, in_int8, lacks)
    if jobs.empty:
        return [each for each in (_idle(account),) if each is not None]
    lost = {cause: account.of(cause) for cause in _RULES}
    tried = [_RULES[cause](account, own) for cause, own in lost.items() if len(own)]
    tried += [_moved(account, UPLOADS), _moved(account, DOWNLOADS)]
    tried += [rule(account) for rule in _OTHER_RULES]
    # What brings next to nothing is told only of large costs.
    found = [
        each
        for each in tried
        if each is not None and (not each.between[1] or max(each.saves, each.share / 2.0) >= FEW)
    ]
    return sorted(found, key=_rank)


def _rank(advice: Advice) -> tuple[bool, float, float]:
    # What is lost comes before what takes long, and before what is not promised of the rest.
    rest = advice.cause in SLOW or not (advice.saves or advice.n_jobs)
    return rest, -max(advice.saves, rest * advice.share), -advice.device_hours


# Rules: each returns advice on the jobs that were lost by a cause, or none.


def _too_late(account: Account, late: pd.DataFrame) -> Advice:
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
    value = rounded_up(float(waits[order][reached]))
    saved = account.saving(late["busy_s"][own <= value])
    longer = "" if account.keeps_stragglers else f", and rounds may take {value:,.0f} s"
    return account.advice(
        late,
        what,
        setting=setting,
        value=value,
        saves=saved,
        do=f"Set {setting} = {value:g}",
        then=f"Another {saved} of the {account.unit} are used then{longer}",
    )


def _timeout(account: Account, late: pd.DataFrame) -> tuple[float, str]:
    """Return after which time replies were late, in s, and the setting that says so."""
    expired = late[late["status"] == LATE]
    lived_s = float((expired["delivered_at"] - expired["sent_at"]).min()) if len(expired) else inf
    round_s = float((late["stopped_at"] - late["sent_at"]).median())
    is_round = not account.keeps_stragglers and round_s < lived_s - AT_ONCE_S
    if is_round and (account.jobs["base_version"] >= 0).any():
        return round_s, "deadline_s"
    limit_s = round_s if is_round else lived_s
    stated = account.run_config.get(_ROUND_TIMEOUT)
    if isinstance(stated, int | float) and not limit_s > stated + AT_ONCE_S:
        return float(stated), _ROUND_TIMEOUT
    return limit_s, _TIMEOUT


def _over_selected(account: Account, cut: pd.DataFrame) -> Advice:
    jobs, what = account.jobs, "replies came when the server had enough"
    if account.is_paced:
        do = "Have fewer jobs in flight, or keep late replies as FedBuff does"
        return account.advice(cut, what, setting="pace", do=do)
    rounds = jobs[jobs["kind"].isin(cut["kind"].unique()) & np.isfinite(jobs["stopped_at"])]
    by_round = rounds.groupby("round")
    n_sent = int(by_round.size().median())
    n_used = int((rounds["status"] == REPORTED).groupby(rounds["round"]).sum().median())
    fails = float(rounds["cause"].isin([DROPOUT, FAILED_CLIENT, NEVER_ENDS]).mean())
    value = min(ceil(n_used / max(1.0 - fails, FEW)), n_sent)
    # Which are sent then is drawn from those that were, and the first to answer are used.
    order = pd.Series(np.random.default_rng(0).random(len(rounds)), rounds.index)
    drawn = rounds[order.groupby(rounds["round"]).rank() <= value]
    arrived = drawn["reported_at"].fillna(inf).groupby(drawn["round"]).rank(method="first")
    saved = account.saving(
        cut["busy_s"],
        drawn["busy_s"],
        drawn["busy_s"][arrived > n_used],
        share=lambda cut, sent, wasted, total: cut / total - wasted / np.fmax(sent, 1.0),
    )
    # A schedule comes before a concurrency.
    has_schedule = "schedule" in str(account.run_config.get(STRATEGY))
    named = {"schedule": f"k_sync({value}, {n_used})"} if has_schedule else {"concurrency": value}
    return account.advice(
        cut,
        what,
        setting="concurrency",
        value=float(value),
        saves=saved,
        do=f"Set concurrency = {value}",
        then=f"Of {n_sent} jobs a round {n_used} are used. That saves {saved} of the "
        f"{account.unit}, and rounds wait for slower devices; FedBuff uses late replies, too",
        change=account.strategy_with(**named),
    )


def _too_stale(account: Account, stale: pd.DataFrame) -> Advice:
    limit = max(int(found[1]) for found in map(STALE.match, stale["reason"]) if found)
    used = account.jobs[account.jobs["status"] == REPORTED]
    # With a larger limit, what was rejected fills buffers too, and the version grows faster.
    arrivals = np.sort(pd.concat([used, stale])["delivered_at"].to_numpy(np.float64))
    before = np.searchsorted(arrivals, stale["sent_at"], side="right")
    staleness = np.ceil(
        (np.searchsorted(arrivals, stale["delivered_at"]) - before) / account.updates
    )
    value = max(float(np.quantile(staleness, 0.9, method="higher")), limit + 1.0)
    saved = account.saving(stale["busy_s"][staleness <= value])
    return account.advice(
        stale,
        f"replies were more than {limit} versions behind",
        setting="max_staleness",
        value=value,
        saves=saved,
        do=f"Set max_staleness = {value:.0f}",
        then=f"Another {saved} of the {account.unit} are used then. A lower concurrency makes "
        "replies less stale",
        change=account.edited("max_staleness", value),
    )


def _dropout(account: Account, lost: pd.DataFrame) -> Advice:
    setting = _EPOCHS if _EPOCHS in account.run_config else "local epochs"
    what = "jobs ended with their device offline"
    jobs = account.jobs[account.jobs["kind"].isin(lost["kind"].unique())]
    done = jobs[jobs["status"] == REPORTED]
    if done.empty:
        less = f"Ask for fewer {setting}, or use LocalWork"
        return account.advice(lost, what, setting=setting, do=less)
    usual = done.groupby("device_id")[["work", "upload_s"]].median().reindex(lost["device_id"])
    work, upload_s = usual.fillna(done[["work", "upload_s"]].median()).to_numpy(np.float64).T
    stated, value, part = account.run_config.get(_EPOCHS), None, LESS_WORK
    if isinstance(stated, int) and stated > 1:
        value = int(LESS_WORK * stated)
        part = value / stated
    less = f"Ask for {part:.0%} of the {setting}" if value is None else f"Set {setting} = {value}"
    # A job that was cut off tells the speed of its device.
    moved_s = lost["download_s"].to_numpy(np.float64) + upload_s
    with np.errstate(divide="ignore", invalid="ignore"):
        compute_s = np.nan_to_num(lost["compute_s"] * work / lost["work"], nan=inf, posinf=inf)
        needs_s = pd.Series(moved_s + part * compute_s, lost.index)
        shorter = float(np.nan_to_num(needs_s / (moved_s + compute_s), nan=part).mean())
    ends = lost["busy_s"] >= needs_s
    # Devices that are always at work begin the next job at once, and lose part of that; others may
    # stay free. How long devices stay does not change.
    online = account.online()
    always = min(account.in_flight[0] / online, 1.0) if online > 0.0 else 1.0
    saved = account.saving(
        lost["busy_s"],
        lost["busy_s"][~ends],
        (done["busy_s"] - (1.0 - part) * done["compute_s"]).add(needs_s[ends], fill_value=0.0),
        share=lambda lost, still, used, total: (
            (1.0 - always * shorter) * lost / total - (1.0 - always) * still / (still + used)
        ),
    )
    return account.advice(
        lost,
        what,
        setting=setting,
        value=value,
        saves=saved,
        do=less,
        then=f"{ends.mean():.0%} of these jobs are done in time then, which saves {saved} of "
        f"the {account.unit}. LocalWork and a selector with forecasts may save as much",
    )


def _rejected(account: Account, lost: pd.DataFrame) -> Advice:
    governs = {
        reason: next((s for pattern, s in _REJECTED_BY if re.search(pattern, reason)), "")
        for reason in lost["reason"].unique()
    }
    settings = lost["reason"].map(governs)
    most = settings.value_counts().index[0]
    reasons = lost["reason"][settings == most]
    setting = most or "what the ClientApp returns"
    saved = account.saving(lost["busy_s"][settings == most])
    return account.advice(
        lost,
        "replies were rejected",
        setting=setting,
        saves=saved,
        do=f"{'Change' if most else 'Mend'} {setting}",
        then=f"{len(reasons) / len(lost):.0%} of them say: {reasons.iloc[0]}",
    )


def _client_errors(account: Account, lost: pd.DataFrame) -> Advice:
    reason, n = lost["reason"].value_counts().index[0], lost["device_id"].nunique()
    return account.advice(
        lost,
        f"jobs of {n:,} device{'s' if n > 1 else ''} failed in the ClientApp",
        setting="the ClientApp",
        saves=account.saving(lost["busy_s"]),
        do=f"Mend {first_line(reason)}",
    )


def _never_started(account: Account, expired: pd.DataFrame) -> Advice:
    setting = _ROUND_TIMEOUT if _ROUND_TIMEOUT in account.run_config else _TIMEOUT
    return account.advice(
        expired,
        "messages expired before their device began",
        setting=setting,
        do=f"Raise {setting}",
        then="The devices were offline, or at work on a job that was too late",
    )


def _never_ends(account: Account, stalled: pd.DataFrame) -> Advice:
    names = list(dict.fromkeys(stalled["device_id"]))
    some = ", ".join(names[:3]) + f" and {len(names) - 3:,} more" * (len(names) > 3)
    return account.advice(
        stalled,
        "jobs could never end",
        setting="the traces",
        saves=account.saving(stalled["busy_s"]),
        do=f"Leave out {some}",
        then="Their traces say a rate of 0 for good",
    )


def _run_ended(account: Account, lost: pd.DataFrame) -> Advice | None:
    if lost["busy_s"].sum() < MUCH * account.total_s:
        return None
    return account.advice(lost, "jobs were out at the end", setting="until", do="Run for longer")


def _moved(account: Account, cause: str) -> Advice | None:
    """Return advice on uploads or downloads, which formats make shorter."""
    jobs, side = account.jobs, "up" if cause == UPLOADS else "down"
    moved_s = float(jobs[f"{side}load_s"].sum())
    if moved_s < MUCH * account.total_s:
        return None
    part, asked = account.in_int8(), jobs[jobs["format_up"] != ""]
    # The first model that a device gets is in full.
    shorter = jobs if side == "up" else jobs[jobs.duplicated("device_id")]
    usual_s = account.total_s / len(jobs)
    saved = account.saving(
        (1.0 - part) * shorter[f"{side}load_s"],
        pd.Series(1.0, jobs.index),
        share=lambda saved, n, total: 1.0 - (total - saved) / n / usual_s,
    )
    in_full = asked["uploaded_bytes"] > (1.0 + part) / 2.0 * asked["downloaded_bytes"]
    is_lacking = len(asked) > 0 and in_full.mean() >= 0.5
    if part > 1.0 - MUCH:
        about = {"setting": "the model", "do": "Send fewer numbers: a smaller model, or adapters"}
        return account.took(cause, moved_s, NOTHING, **about)
    if saved.value < MUCH or (is_lacking if side == "down" else len(asked) > 0 and not is_lacking):
        return None
    stage = f'Compression({"" if cause == UPLOADS else "down="}"int8")'
    setting = _MOD if is_lacking else f"stages=[{stage}]"
    lacking = _MOD if is_lacking else account.lacks(stage)
    is_promised = bool(is_lacking or not lacking)
    has_stages = "stages" in account.strategy
    adds = [f"{lacking} to the mods of the ClientApp"] if lacking else []
    adds += [] if is_lacking else [f"{setting} to the strategy"]
    return account.took(
        cause,
        moved_s,
        setting=setting,
        saves=saved if is_promised else NOTHING,
        do=f"Add {' and '.join(adds)}",
        then=f"{part:.0%} of the bytes are sent then"
        + f", which saves {saved} of the device-hours" * is_promised,
        change={} if has_stages or is_lacking else account.strategy_with(stages=f"[{stage}]"),
    )


def _evaluation(account: Account) -> Advice | None:
    spent = account.jobs["busy_s"][account.jobs["kind"].str.startswith("evaluate")]
    setting, saved = "fraction_evaluate", account.saving((1.0 - EVALUATED) * spent)
    if saved.value < MUCH or account.unit == "jobs":
        return None
    stated = re.search(rf"\b{setting} ?= ?([\d.]+)", account.strategy)
    value = EVALUATED * float(stated[1]) if stated else None
    return account.took(
        EVALUATION,
        float(spent.sum()),
        setting=setting,
        value=value,
        saves=saved,
        do=f"Set {setting} = {value:g}" if value else f"Set {setting} to a quarter",
        then=f"That saves {saved} of the device-hours, and accuracies are of fewer devices",
        change=account.edited(setting, value) if value else {},
    )


def _idle(account: Account) -> Advice | None:
    ends = np.maximum.accumulate(account.until_s)
    starts = np.append(account.jobs["sent_at"].to_numpy(np.float64), account.end_s)
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
        what=f"in {share:.0%} of the virtual time ({idle_s / HOUR_S:.3g} h) no job was in flight",
        setting=setting,
        share=share,
        saves=share,
        between=(0.0, share),
        do=do,
        then=then,
    )


# Rules on versions of the model that take long although no job is lost.


def _slow(
    account: Account, cause: str, what: str, value: int, saved: Saving, **more: Any
) -> Advice:
    """Return advice on what versions of the model take longer by."""
    more.setdefault("setting", "concurrency")
    more.setdefault("change", account.strategy_with(**{more["setting"]: value}))
    return Advice(
        cause=cause,
        what=what,
        value=float(value),
        share=saved.value,
        saves=saved.value,
        between=saved.between,
        do=more.pop("do", f"Set {more['setting']} = {value}"),
        then=f"A version takes {saved} less virtual time then, {more.pop('costs')}",
        **more,
    )


def _waiting(account: Account) -> Advice | None:
    """Return advice on rounds that wait for their last replies."""
    jobs = account.training
    rounds = jobs[np.isfinite(jobs["stopped_at"])]
    if account.keeps_stragglers or account.is_paced or rounds.empty or not account.end_s:
        return None
    is_used, by_round = rounds["status"] == REPORTED, rounds["round"].groupby(rounds["round"])
    n_sent = int(by_round.size().median())
    n_used = max(int(is_used.groupby(rounds["round"]).sum().median()), 1)
    part = 1.0 / by_round.transform("size")
    lasted_s = part * (rounds["stopped_at"] - rounds["sent_at"])
    ends = arrived_at(rounds).where(is_used, rounds["delivered_at"])
    at_work_s = np.fmin(ends, rounds["stopped_at"]) - rounds["sent_at"]
    of_all = float(lasted_s.sum()) / account.end_s
    slower = _of_fast_devices(at_work_s.groupby(rounds["device_id"]).mean(), n_sent, account)
    saved = account.saving(
        *(lasted_s, at_work_s, is_used.astype(float), part),
        share=lambda lasted, at_work, used, n, _: (
            of_all * (1.0 - slower * n * n_used / n_sent * at_work / np.fmax(used, 1.0) / lasted)
        ),
    )
    if saved.value < MUCH or n_sent < 2:
        return None
    schedule, evaluates = f"{n_sent}, {n_used}", len(jobs) < len(account.jobs)
    if account.strategy.startswith("flower.FedAvg(") or account.strategy == "FedAvg":
        stated = re.search(r"fraction_evaluate ?= ?([\d.]+)", account.strategy)
        evaluated = f", fraction_evaluate={stated[1] if stated else 1.0}" if evaluates else ""
        change = account.taken(f"FedBuff({schedule}{evaluated})")
    else:
        change = account.strategy_with(schedule=f"k_batch_async({schedule})")
    at_work = at_work_s.sum() / lasted_s.sum()
    return _slow(
        account,
        WAITING,
        f"rounds waited for the last: of {n_sent} devices with a job {at_work:.3g} were at work",
        n_sent,
        saved,
        costs="and updates may be a version behind",
        do=f"Send the next job at each reply, as FedBuff({schedule}) does",
        setting="schedule",
        change=change,
    )


def _of_fast_devices(took_s: "pd.Series[float]", n_sent: int, account: Account) -> float:
    """Return by how much jobs are shorter on average that are sent as soon as another ends.

    Slow devices are at work for longer, so they are free less often: of the devices online the busy
    ones are a set that is as likely as the product of their times (a closed network of queues).
    """
    online = account.online()
    n = max(n_sent, round(online) if online > 0.0 else len(took_s))
    times = np.quantile(took_s, (np.arange(n) + 0.5) / n) / took_s.mean()
    sums = np.poly(-times)  # elementary symmetric polynomials
    return n_sent * sums[n_sent] / ((n - n_sent + 1) * sums[n_sent - 1])


def _large_buffer(account: Account) -> Advice | None:
    size, value = account.updates, account.concurrency
    if not size >= 2.0 * value:
        return None
    return _slow(
        account,
        LARGE_BUFFER,
        f"a version takes {size:.0f} replies, and {value:.0f} jobs are in flight at a time",
        int(value),
        account.saving_at_rate(value / size),
        costs="and is made of fewer updates",
        setting="buffer_size",
    )


def _few_at_work(account: Account) -> Advice | None:
    online, (mean, most) = account.online(), account.in_flight
    value = int(min(4.0 * account.updates, online / 4.0)) if online > 0.0 else 0
    is_known = account.keeps_stragglers and most and not account.is_paced
    if not is_known or mean > MUCH * online or value < 2 * most:
        return None
    return _slow(
        account,
        FEW_AT_WORK,
        f"{online:.3g} devices were online on average, and {mean:.2g} of them at work",
        value,
        account.saving_at_rate(mean / value),
        costs=f"and updates are about {value / account.updates:.1g} versions behind",
    )


# Rules on settings that do not do what they are for.


def _many_at_work(account: Account) -> Advice | None:
    (mean, most), concurrency = account.in_flight, account.concurrency
    if not most < concurrency or not account.keeps_stragglers:
        return None
    value, size = round(mean / 2.0), account.updates
    is_enough = value >= size
    return Advice(
        cause=MANY_AT_WORK,
        what=f"{most} jobs were in flight at most, of concurrency = {concurrency:.0f}; each device "
        "that comes online gets a job, and no selector chooses",
        setting="concurrency" if is_enough else "the devices",
        value=float(value) if is_enough else None,
        do=f"Set concurrency = {value}" if is_enough else "Simulate more devices",
        then=f"Updates are about {value / size:.1g} versions behind then, and were "
        f"{account.training['staleness'].mean():.2g}"
        if is_enough
        else "",
        change=account.strategy_with(concurrency=value) if is_enough else {},
    )


def _forecasts(account: Account) -> Advice | None:
    """Return advice on forecasts that say no more than one number for all devices would."""
    jobs = account.training
    done = jobs[jobs["status"].isin([REPORTED, INTERRUPTED]) & jobs["reported_p_finish"].notna()]
    took_s = (arrived_at(done) - done["sent_at"]).where(done["status"] == REPORTED)
    if len(done) < ENOUGH:
        return None
    finished = took_s.notna().astype(float)
    brier, usual = (
        float(((p - finished) ** 2).mean()) for p in (done["reported_p_finish"], finished.mean())
    )
    missed_s, usual_s = (
        float((stated - took_s).abs().median())
        for stated in (done["reported_duration_s"], took_s.median())
    )
    if brier < usual or missed_s < usual_s:
        return None
    return Advice(
        cause=FORECASTS,
        what=f"stated chances to finish have a Brier score of {brier:.2g}, and one chance for all "
        f"of {usual:.2g}; stated durations miss by {missed_s:,.0f} s, and one for all by "
        f"{usual_s:,.0f} s",
        setting="forecasts",
        do="Train a forecaster of these devices, or select without forecasts",
    )


_OTHER_RULES = (
    *(_evaluation, _idle, _waiting, _large_buffer, _few_at_work, _many_at_work, _forecasts),
)
_RULES: dict[str, Callable[[Account, pd.DataFrame], Advice | None]] = {
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
