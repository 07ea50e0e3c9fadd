"""Causes of loss and what is said of them, of jobs that are made by hand."""

import html
from typing import Any

import numpy as np
import pandas as pd
import pytest
from made_run import write_run

from fedstale.reports import account
from fedstale.reports.account import CAUSES, IDLE, with_causes
from fedstale.reports.advice import advise
from fedstale.reports.run import Run
from fedstale.runs import with_costs


def table(**columns: Any) -> pd.DataFrame:
    """Return jobs with some columns, one row a value; instants in s."""
    n = len(next(iter(columns.values())))
    usual = {"round": 0, "kind": "train", "status": "reported", "reason": "", "device_id": "a"}
    never = ("sent_at", "started_at", "reported_at", "ended_at", "delivered_at")
    zero = ("download_s", "upload_s", "downloaded_bytes", "uploaded_bytes")
    texts = {"format_down": "", "format_up": "", "base_version": 0, "aggregated_version": -1}
    jobs = pd.DataFrame(
        {
            **usual,
            **dict.fromkeys(never, np.inf),
            **dict.fromkeys(zero, 0.0),
            **texts,
            "compute_s": 100.0,
            "work": 100.0,
            **dict.fromkeys(("staleness", "reported_p_finish", "reported_duration_s"), np.nan),
            **columns,
        },
        index=range(n),
    )
    return with_costs(jobs)


def of_rounds(waits_s: list[float], *, next_at_s: float, status: str) -> pd.DataFrame:
    """Return jobs of a first round by how long their replies take, and one job of the next."""
    waits, used = np.array(waits_s), np.array(waits_s) <= next_at_s
    first = np.where(used, "reported", status)
    arrived = np.append(waits, np.inf)
    return table(
        round=[*([0] * waits.size), 1],
        status=[*first, "in-flight"],
        device_id=[f"d{i}" for i in range(waits.size + 1)],
        sent_at=[*([0.0] * waits.size), next_at_s],
        started_at=[*([0.0] * waits.size), next_at_s],
        reported_at=arrived,
        ended_at=arrived,
        delivered_at=np.where(np.append(used, False), arrived, np.inf),
    )


def test_round_that_goes_on_at_a_reply_had_enough():
    causes = with_causes(of_rounds([10.0, 20.0, 300.0], next_at_s=20.0, status="unclaimed"))
    assert causes["cause"].tolist() == ["", "", "over-selected", "run ended"]


def test_round_that_goes_on_without_a_reply_timed_out():
    causes = with_causes(of_rounds([10.0, 20.0, 300.0], next_at_s=60.0, status="unclaimed"))
    assert causes["cause"].tolist() == ["", "", "too late", "run ended"]


def test_message_that_expires_is_too_late_although_the_server_had_enough_later():
    jobs = of_rounds([10.0, 200.0, 300.0], next_at_s=200.0, status="late")
    jobs["delivered_at"] = jobs["delivered_at"].mask(jobs["status"] == "late", 60.0)
    assert with_causes(jobs)["cause"].tolist() == ["", "", "too late", "run ended"]


def test_nothing_is_expected_of_a_timeout_where_replies_never_came():
    jobs = of_rounds([10.0, 20.0, np.inf], next_at_s=60.0, status="late")
    jobs["delivered_at"] = jobs["delivered_at"].mask(jobs["status"] == "late", 60.0)
    (first, *_) = [a for a in advise(with_causes(jobs), end_s=70.0) if a.cause == "too late"]
    assert (first.value, first.saves) == (None, 0.0)


def test_run_without_a_job_had_none_in_flight():
    nothing = with_causes(table(status=["reported"])[:0])
    assert advise(nothing, end_s=0.0) == []
    assert [each.cause for each in advise(nothing, end_s=60.0)] == [IDLE]


def test_page_and_notebook_have_the_advice(page_of, tmp_path):
    run = Run(write_run(tmp_path / "again"))
    assert {each.cause for each in run.advice} <= set(CAUSES)
    text = page_of()
    for each in run.advice:
        assert html.escape(each.do) in text


def test_page_works_out_the_causes_of_its_run_once(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(account, "with_causes", lambda jobs: asked.append(1) or with_causes(jobs))
    Run(write_run(tmp_path / "run")).report()
    assert asked == [1]


def test_fewer_epochs_are_proposed_as_a_number_of_epochs():
    jobs = table(
        status=["reported", "reported", "interrupted"],
        device_id=["a", "b", "c"],
        compute_s=[100.0, 100.0, 80.0],
        sent_at=0.0,
        reported_at=[100.0, 100.0, np.inf],
        ended_at=[100.0, 100.0, 80.0],
        delivered_at=[100.0, 100.0, 80.0],
    )

    def value(**run_config):
        (found,) = (
            each
            for each in advise(with_causes(jobs), end_s=200.0, run_config=run_config)
            if each.cause == "went offline"
        )
        return found.value

    assert value(**{"local-epochs": 20}) == 10
    assert value(**{"local-epochs": 5}) == 2
    # Where there is no such key, or no less of it, no number follows.
    assert value(**{"local-epochs": 1}) is None
    assert value() is None


@pytest.mark.parametrize(
    ("staleness", "setting"), [(0.0, "min_available_nodes"), (1.0, "the devices")]
)
def test_a_server_that_waits_for_no_round_is_told_of_no_setting_of_rounds(staleness, setting):
    at = {"reported_at": 100.0, "ended_at": 100.0, "delivered_at": 100.0}
    jobs = table(status=["reported"] * 3, sent_at=0.0, staleness=staleness, **at)
    (found,) = (a for a in advise(with_causes(jobs), end_s=1000.0) if a.cause == IDLE)
    assert found.setting == setting
    unknown = advise(with_causes(jobs), end_s=1000.0, unknown=0.6)
    (found,) = (a for a in unknown if a.cause == IDLE)
    assert found.setting == "the traces"
    assert "For 60% of the time nobody logged the devices" in str(found)


def of_concurrency(n, text, n_online=30.0, **columns):
    """Return jobs that are sent one after another, as replies that are a version behind."""
    sent = np.arange(n) * 10.0
    usual = {"sent_at": sent, "delivered_at": sent + 40.0, "reported_at": sent + 40.0}
    usual |= {"staleness": 1.0, "aggregated_version": np.arange(n) // 2}
    jobs = with_causes(table(**{**usual, **columns}))
    return advise(
        jobs, end_s=n * 10.0 + 40.0, run_config={"strategy": text}, online=lambda: n_online
    )


@pytest.mark.parametrize(
    ("text", "cause", "change"),
    [
        ("FedBuff(40, 2)", "more in flight than devices", "FedBuff(concurrency=2, buffer_size=2)"),
        ("FedBuff(1, 2)", "buffer above concurrency", "FedBuff(concurrency=1, buffer_size=1)"),
        ("FedBuff(4, 2)", None, None),
    ],
)
def test_what_a_concurrency_does_is_looked_at(text, cause, change):
    found = {a.cause: a.change.get("strategy") for a in of_concurrency(100, text)}
    assert found == ({} if cause is None else {cause: change})


@pytest.mark.parametrize("text", ["FedBuff(40, 2)", "FedBuff(1, 2)", "FedBuff(4, 2)"])
def test_no_number_is_proposed_that_a_pace_would_change(text):
    paced = text.replace(")", ", pace=Ramp(50))")
    assert of_concurrency(100, text, n_online=300.0)
    assert not of_concurrency(100, paced, n_online=300.0)
    jobs = with_causes(of_rounds([10.0] * 4 + [300.0] * 9, next_at_s=10.0, status="unclaimed"))
    fixed, free = (
        [a for a in advise(jobs, end_s=400.0, run_config={"strategy": f"FedAvg(schedule={s})"})]
        for s in ("k_sync(13, 4)", "k_sync(13, 4), pace=Ramp(5)")
    )
    (own,) = (a for a in free if a.cause == "over-selected")
    assert (own.setting, own.value, own.change) == ("pace", None, {})
    assert {a.cause for a in free} <= {a.cause for a in fixed} - {"waiting"}


def test_forecasts_that_say_no_more_than_one_number_are_told():
    rng = np.random.default_rng(0)
    took, ends = rng.uniform(20.0, 60.0, 200), rng.random(200) < 0.8
    of_devices = {
        "status": np.where(ends, "reported", "interrupted"),
        "reported_at": np.where(ends, np.arange(200) * 10.0 + took, np.inf),
        "staleness": np.where(ends, 1.0, np.nan),
    }

    def told(chance, duration_s):
        stated = {"reported_p_finish": chance, "reported_duration_s": duration_s}
        found = of_concurrency(200, "FedBuff(4, 2)", **of_devices, **stated)
        return [str(a) for a in found if a.cause == "forecasts"]

    (text,) = told(rng.random(200), rng.permutation(took) * 2.0)
    assert text.startswith(
        "Train a forecaster of these devices, or select without forecasts. Stated"
    )
    assert told(np.where(ends, 0.9, 0.3), rng.permutation(took) * 2.0) == []
    assert told(rng.random(200), took * 1.1) == []


def test_an_app_without_the_mod_is_told_of_it_and_promised_nothing():
    at = dict.fromkeys(("reported_at", "ended_at", "delivered_at"), 400.0)
    jobs = with_causes(
        table(status=["reported"] * 3, sent_at=0.0, staleness=1.0, upload_s=300.0, **at)
    )

    def found(lacks):
        options = {"in_int8": lambda: 0.25, "lacks": lambda text: lacks * ("Compression" in text)}
        about = {"end_s": 1000.0, "run_config": {"strategy": "FedBuff(20, 5)"}}
        return next(a for a in advise(jobs, **about, **options) if a.cause == "uploads")

    with_mod, without = found(""), found("CompressionMod()")
    assert with_mod.change
    assert with_mod.saves == pytest.approx(0.75 * 0.75)
    assert with_mod.between[0] <= with_mod.saves <= with_mod.between[1]
    assert (without.change, without.saves) == ({}, 0.0)
    assert without.do.startswith("Add CompressionMod() to the mods of the ClientApp and stages=")


STATUSES = [
    *("reported", "rejected", "client-error", "unclaimed", "late", "expired"),
    *("interrupted", "stalled", "in-flight"),
]
STALE = "too stale: more than max_staleness = "
TEXTS = ["", "FedAvg", "FedBuff(4, 8)", "FedAdam(6)", "flower.FedAvg(fraction_train=0.5)", "mine"]


@pytest.mark.parametrize("seed", range(60))
def test_no_jobs_are_too_odd_to_be_advised_on(seed):
    rng = np.random.default_rng(seed)
    n, long_s = int(rng.integers(1, 60)), float(rng.choice([0.0, 1.0, 1000.0]))
    sent = np.sort(rng.integers(0, 5, n) * long_s)
    spent = {f"{phase}_s": rng.random(n) * long_s for phase in ("download", "compute", "upload")}
    status = rng.choice(STATUSES[: rng.integers(1, 10)], n)
    ended = sent + sum(spent.values())
    is_lost = ~np.isin(status, ["reported", "rejected"]) & (rng.random(n) < 0.5)
    arrived = np.where(is_lost, rng.choice([np.nan, np.inf]), ended)
    jobs = table(
        status=status,
        reason=rng.choice(
            ["", "too stale: more than max_staleness = 2", "late: the job was cancelled"], n
        ),
        kind=rng.choice(["train", "train", "evaluate", "query"], n),
        round=rng.integers(0, 4, n),
        device_id=rng.choice(["a", "b", "c"], n),
        sent_at=sent,
        started_at=np.where(is_lost, np.inf, sent),
        reported_at=arrived,
        ended_at=ended,
        delivered_at=arrived,
        staleness=rng.choice([np.nan, 0.0, 1.0], n),
        aggregated_version=rng.integers(-1, 3, n),
        work=rng.choice([0.0, 5.0], n),
        reported_p_finish=rng.choice([np.nan, 0.5], n),
        **spent,
    )
    told = {"strategy": str(rng.choice(TEXTS)), "local-epochs": int(rng.integers(1, 9))}
    options = {"online": lambda: float(rng.choice([np.nan, 0.0, 50.0])), "in_int8": lambda: 0.3}
    for each in advise(with_causes(jobs), end_s=4.0 * long_s, run_config=told, **options):
        assert 0.0 <= each.between[0] <= each.between[1] <= 1.0
        assert 0.0 <= each.saves <= 1.0
        assert "nan" not in str(each).replace("NaN", "")
