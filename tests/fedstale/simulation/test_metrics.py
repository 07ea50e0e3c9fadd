"""What a run keeps of metrics whose names and numbers devices choose."""

import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from virtual_grid import identity

from fedstale.simulation.metrics import MessageRounds, RunMetrics
from fedstale.strategies.server.runtime import Runtime, WallClock
from fedstale.until import Until


@pytest.fixture(autouse=True)
def _identity():
    with identity():
        yield


def reply(metrics, kind="train", **records):
    sent = Message(RecordDict(), 7, kind)
    return Message(RecordDict({"metrics": MetricRecord(metrics), **records}), reply_to=sent)


def test_fresh_names_in_every_reply_grow_no_table_of_a_run_and_hide_nothing_of_the_servers(caplog):
    metrics = RunMetrics(Until())
    run = Runtime(WallClock(), metrics)
    for k in range(40):
        run.metrics(k, "evaluate", {"accuracy": 0.5, **{f"{k}.{i}" * 99: 0.5 for i in range(100)}})
        run.metrics(k, "server", {f"own.{k}": float("nan")})
        names = {f"{k}.{i}" * 99: float("nan") for i in range(100)}
        run.reply("m", reply(names), "reported")
    names = {name for _, _, source, name, _ in metrics.rows if source == "evaluate"}
    assert len(names) <= 1024
    assert max(map(len, names)) <= 200
    assert sum(name == "accuracy" for _, _, _, name, _ in metrics.rows) == 40
    assert len(metrics.latest) <= 1024 + 40
    assert {f"server own.{k}" for k in range(40)} <= metrics.latest.keys()
    assert sum(metrics.not_numbers.values()) == 40 * 101
    assert len(metrics.not_numbers) <= 1025
    assert metrics.not_numbers["other"] > 2900
    assert [hint for hint in run.hints if "1,024 names of metrics" in hint] == run.hints
    assert caplog.text.count("1,024 names") == 1


@pytest.mark.parametrize("examples", [1e300, float("inf"), float("nan"), -5.0, 2e9])
def test_an_unusable_number_of_examples_counts_for_nothing_in_an_apps_own_rounds(examples):
    metrics = RunMetrics(Until())
    run = Runtime(WallClock(), MessageRounds(), metrics)
    sent = [Message(RecordDict(), node, "train") for node in (7, 8)]
    run.sending(sent)
    run.reply("a", reply({"num-examples": 10, "loss": 1.0}), "reported")
    run.reply("b", reply({"num-examples": examples, "loss": 1e300}), "reported")
    assert metrics.latest["train loss"] == 1.0


def test_the_first_device_without_a_forecast_says_why_in_a_line():
    metrics = RunMetrics(Until())
    text = "no data\nversion 99 is ready" + "x" * 10**6
    record = ConfigRecord({"error": text})
    Runtime(WallClock(), metrics).reply("m", reply({}, **{"fedstale.forecast": record}), "reported")
    assert metrics.no_forecast == "no data"
