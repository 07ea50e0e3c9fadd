"""Advice on runs with known faults: the first is the fault, and taking it brings what it says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

import fedstale
from fedstale.client import CompressionMod
from fedstale.reports.account import IDLE, UPLOADS, with_causes
from fedstale.reports.advice import advise
from fedstale.reports.run import Run
from fedstale.runs import with_costs
from fedstale.strategies import parse
from fedstale.traces import TraceSet

LIVES_LONG, N_WEIGHTS = 36_000.0, 2000


def apps(mods: Sequence[Any] = (CompressionMod(),)) -> tuple[ServerApp, ClientApp]:
    """Return an app of which the run config tells the strategy; nothing is learnt in it."""
    server, client = ServerApp(), ClientApp(mods=list(mods))

    @server.main()
    def main(grid, context):
        told = context.run_config
        parse(told["strategy"], seed=1).start(
            grid=grid,
            initial_arrays=ArrayRecord([np.zeros(N_WEIGHTS, dtype=np.float32)]),
            num_rounds=told["num-server-rounds"],
            timeout=told["round-timeout"],
        )

    @client.train()
    def train(message, context):
        given = message.content
        seed = context.node_id, given["config"]["server-round"]
        update = np.random.default_rng(seed).lognormal(size=2)
        (weights,) = given["arrays"].to_numpy_ndarrays()
        with np.errstate(over="ignore"):
            new = weights + np.float32(context.run_config["learning-rate"] * update[0])
        metrics = MetricRecord({"num-examples": 10, "train_loss": float(update[1])})
        content = RecordDict({"arrays": ArrayRecord([new]), "metrics": metrics})
        return Message(content, reply_to=message)

    return server, client


def settings(strategy: str, **more: Any) -> dict[str, Any]:
    """Return what a run is told: traces, the work and the bytes of a job, and the run config."""
    told = {"round-timeout": LIVES_LONG, "num-server-rounds": 40, "learning-rate": 0.1}
    told |= {"local-epochs": 5}
    options = {"traces": "synthetic:100", "model_bytes": 14_000_000, "epochs": 5}
    options |= {"work_per_example": 0.9, "examples": 18}
    options |= {name: more.pop(name) for name in options if name in more}
    told |= {name.replace("_", "-"): value for name, value in more.items()}
    return {**options, "run_config": {**told, "strategy": strategy}}


@dataclass
class Fault:
    """A run with a fault, what its first advice must be, and the run without it."""

    cause: str
    setting: str
    faulty: dict[str, Any]
    mended: Callable[[Any], dict[str, Any]]
    """Returns the settings with the value that is proposed."""


STOCK = "flower.FedAvg(fraction_train={}, fraction_evaluate=0.0, min_train_nodes=1, {})"
ALL = STOCK.format(0.5, "min_available_nodes=1")
FAULTS = {
    "timeout of a stock strategy": Fault(
        "too late",
        "round-timeout",
        settings(ALL, round_timeout=100.0),
        lambda value: settings(ALL, round_timeout=value),
    ),
    "messages that live too short": Fault(
        "too late",
        "round-timeout",
        settings("FedBuff(20, 5)", round_timeout=120.0),
        lambda value: settings("FedBuff(20, 5)", round_timeout=value),
    ),
    "slow phones": Fault(
        "too late",
        "round-timeout",
        settings("FedBuff(20, 5)", round_timeout=300.0, epochs=30),
        lambda value: settings("FedBuff(20, 5)", round_timeout=value, epochs=30),
    ),
    "deadline of a schedule": Fault(
        "too late",
        "deadline_s",
        settings('FedAvg(schedule=semi_synchronous(20, 60, stragglers="cancel"))'),
        lambda value: settings(
            f'FedAvg(schedule=semi_synchronous(20, {value}, stragglers="cancel"))'
        ),
    ),
    "over-selection": Fault(
        "over-selected",
        "concurrency",
        settings("FedAvg(schedule=over_selection(10, 4))", traces="synthetic:300"),
        lambda value: settings(f"FedAvg(schedule=k_sync({value:.0f}, 10))", traces="synthetic:300"),
    ),
    "limit of staleness": Fault(
        "too stale",
        "max_staleness",
        settings("FedBuff(40, 2, validation=Validation(max_staleness=2))", num_server_rounds=80),
        lambda value: settings(
            f"FedBuff(40, 2, validation=Validation(max_staleness={value:.0f}))",
            num_server_rounds=80,
        ),
    ),
    "jobs longer than devices stay": Fault(
        "went offline",
        "local-epochs",
        settings("FedBuff(40, 5)", epochs=200, local_epochs=200, traces="synthetic:300"),
        lambda value: settings(
            "FedBuff(40, 5)",
            epochs=value,
            local_epochs=value,
            num_server_rounds=80,
            traces="synthetic:300",
        ),
    ),
    "bound of norms": Fault(
        "rejected",
        "Validation(norm_bound=...)",
        settings("FedBuff(20, 5, validation=Validation(norm_bound=1))", model_bytes=10**6),
        lambda _: settings("FedBuff(20, 5)", model_bytes=10**6),
    ),
    "learning rate": Fault(
        "rejected",
        "the learning rate, by which the training diverges",
        settings("FedBuff(20, 5)", learning_rate=1e39),
        lambda _: settings("FedBuff(20, 5)"),
    ),
    "model larger than links": Fault(
        "uploads",
        'stages=[Compression("int8")]',
        settings("FedBuff(20, 5)", model_bytes=200_000_000),
        lambda _: settings('FedBuff(20, 5, stages=[Compression("int8")])', model_bytes=200_000_000),
    ),
    "more nodes than are ever online": Fault(
        "no job in flight",
        "min_available_nodes",
        settings(STOCK.format(0.1, "min_available_nodes=45"), num_server_rounds=10),
        lambda _: settings(STOCK.format(0.1, "min_available_nodes=1"), num_server_rounds=10),
    ),
}


def measured(run: Run, cause: str) -> float:
    """Return what a cause is judged by: a share of the run, or device-hours of a job."""
    if cause == IDLE:
        return next((each.saves for each in run.advice if each.cause == IDLE), 0.0)
    spent = run.jobs["busy_s"]
    if cause == UPLOADS:
        return float(spent.mean())
    return float(spent[run.jobs["outcome"] == "wasted"].sum() / spent.sum())


@pytest.mark.parametrize("name", FAULTS)
def test_first_advice_is_the_fault_and_brings_what_it_predicts(name, tmp_path):
    fault = FAULTS[name]

    def run(options: dict[str, Any], folder: str) -> Run:
        return fedstale.simulate(apps(), out=tmp_path / folder, seed=2, **options)

    before = run(fault.faulty, "before")
    first = before.advice[0]
    assert (first.cause, first.setting) == (fault.cause, fault.setting)
    after = run(fault.mended(first.value), "after")
    was, now = measured(before, fault.cause), measured(after, fault.cause)
    saved = (was - now) / (was if fault.cause == UPLOADS else 1.0)
    assert saved == pytest.approx(first.saves, rel=0.25)


def test_a_format_that_the_app_does_not_know_is_the_mod_that_it_lacks(tmp_path):
    options = settings('FedBuff(20, 5, stages=[Compression("int8")])', model_bytes=200_000_000)
    before = fedstale.simulate(apps(mods=()), out=tmp_path / "before", seed=2, **options)
    first = before.advice[0]
    assert (first.cause, first.setting) == (UPLOADS, "CompressionMod()")
    assert str(first).startswith("Add CompressionMod() to the mods of the ClientApp. Uploads took")
    assert "add CompressionMod() to the mods" in before.summary["hint"]
    after = fedstale.simulate(apps(), out=tmp_path / "after", seed=2, **options)
    was, now = measured(before, UPLOADS), measured(after, UPLOADS)
    assert (was - now) / was == pytest.approx(first.saves, rel=0.25)
    assert UPLOADS not in [each.cause for each in after.advice]


def test_clients_that_fail_are_the_first_advice(tmp_path):
    server, client = apps()[0], ClientApp()

    @client.train()
    def train(message, context):
        if context.node_id % 3 == 0:
            raise ValueError("no data here")
        metrics = MetricRecord({"num-examples": 10})
        content = {"arrays": message.content["arrays"], "metrics": metrics}
        return Message(RecordDict(content), reply_to=message)

    run = fedstale.simulate(
        (server, client),
        out=tmp_path / "run",
        **settings("FedBuff(10, 5)", num_server_rounds=10),
    )
    first = run.advice[0]
    failed = run.jobs["status"] == "client-error"
    assert first.cause == "client error"
    assert "ValueError: no data here" in str(first)
    assert first.saves == pytest.approx(run.jobs["busy_s"][failed].sum() / run.jobs["busy_s"].sum())


def test_of_real_devices_jobs_count_alike(tmp_path):
    run = fedstale.simulate(
        apps(),
        out=tmp_path / "run",
        **settings("FedAvg(schedule=over_selection(10, 4))", traces="synthetic:300"),
    )
    unknown = ("started_at", "reported_at", "ended_at", "download_s", "compute_s", "upload_s")
    jobs = with_costs(run.jobs.assign(**dict.fromkeys(unknown, np.nan)))
    (first, *_) = advise(with_causes(jobs), end_s=run.end_s)
    assert (first.cause, first.device_hours) == ("over-selected", 0.0)
    assert first.share == pytest.approx((jobs["status"] == "rejected").mean(), abs=0.05)
    assert "of the jobs" in str(first)


def test_device_whose_rate_stays_zero_is_named(tmp_path):
    run = fedstale.simulate(
        apps(),
        out=tmp_path / "run",
        **settings(
            "FedBuff(4, 2)",
            traces=TraceSet.constant(
                4, compute=[1.0, 1.0, 1.0, 0.0], downlink_bit_per_s=1e7, uplink_bit_per_s=1e7
            ),
            round_timeout=1000.0,
        ),
    )
    (stalled,) = [each for each in run.advice if each.cause == "stalled"]
    assert run.jobs["device_id"][run.jobs["status"] == "stalled"].iloc[0] in str(stalled)
