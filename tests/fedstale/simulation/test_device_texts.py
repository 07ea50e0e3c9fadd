"""Texts that a device chooses: they are cut before they are kept, and nothing that prints obeys."""

import json
import logging
import signal
import sys
import tracemalloc
from contextlib import nullcontext

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower
from written_apps import four_devices

import fedstale
from fedstale.flower import identity, received
from fedstale.interrupts import end_on_signals
from fedstale.simulation.executors import ClientCall, InlineExecutor
from fedstale.strategies import FedBuff

FORGED = "INFO :      version 99, server: {'accuracy': 1.0}"
TEXT = f"bad \x1b[31m\n{FORGED}\r\u2028\x9b2J\u202e\x00"


class UntoldError(Exception):
    def __str__(self):
        raise RuntimeError(TEXT)


def raising(problem):
    def answer(message, reply):
        raise problem

    return answer


def naming(record, name):
    def answer(message, reply):
        own = reply.content[record]
        own[name] = next(iter(own.values()))
        return reply

    return answer


WAYS = {
    "raised": raising(ValueError(TEXT)),
    "the name of a class": raising(type(TEXT.replace("\x00", ""), (Exception,), {})("x")),
    "no text": raising(UntoldError()),
    "half a letter": raising(ValueError("\ud800")),
    "an exit": lambda message, reply: sys.exit(TEXT),
    "an interrupt": raising(KeyboardInterrupt(TEXT)),
    "an error": lambda message, reply: Message(Error(2, TEXT), reply_to=message),
    "an array": naming("arrays", TEXT),
    "a metric": naming("metrics", TEXT),
    "a long metric": naming("metrics", "m" * 10**5),
}


def client(answer, of=1):
    """Return an app of which so many of four devices answer in some way."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        arrays = {"w": Array(message.content["arrays"]["w"].numpy() + 1.0)}
        content = {
            "arrays": ArrayRecord(arrays),
            "metrics": MetricRecord({"num-examples": 10, "train_loss": 1.0}),
        }
        reply = Message(RecordDict(content), reply_to=message)
        return answer(message, reply) if context.node_config["partition-id"] < of else reply

    return app


def client_call():
    content = RecordDict({"arrays": ArrayRecord({"w": Array(np.zeros(8))})})
    with identity(1):
        message = Message(content, 1000, "train")
    return ClientCall(message, Context(1, 1000, {"partition-id": 0}, RecordDict(), {}), 1)


def simulated(app, out, strategy=None, **options):
    return fedstale.simulate(
        app,
        traces=four_devices(),
        strategy=strategy or FedBuff(4, 2, seed=1),
        initial_arrays={"w": np.zeros(8)},
        until="6 rounds",
        work={"train": 1.0},
        out=out,
        **options,
    )


def texts(found):
    """Yield all texts in what a JSON file holds."""
    if isinstance(found, str):
        yield found
    elif isinstance(found, dict):
        for key, value in found.items():
            yield from (key, *texts(value))
    elif isinstance(found, list):
        for value in found:
            yield from texts(value)


@pytest.mark.parametrize("way", WAYS)
def test_what_one_device_writes_is_one_short_line_wherever_it_is_shown(
    way, tmp_path, caplog, capfd
):
    assert_shown_in_lines(client(WAYS[way]), FedBuff(4, 2, seed=1), tmp_path, caplog, capfd)


@pytest.mark.parametrize("way", ["raised", "a metric", "a long metric"])
def test_so_it_is_by_a_strategy_of_flowers(way, tmp_path, caplog, capfd):
    # It averages metrics that all replies have.
    app = client(WAYS[way], of=4 if "metric" in way else 1)
    strategy = flower.FedAvg(fraction_evaluate=0.0)
    run = assert_shown_in_lines(app, strategy, tmp_path, caplog, capfd)
    assert any(name.startswith(("bad", "mmm")) for name in run.metrics.name) == ("metric" in way)


def assert_shown_in_lines(app, strategy, tmp_path, caplog, capfd):
    with caplog.at_level(logging.DEBUG):
        run = simulated(app, tmp_path, strategy, progress=True)
    assert run.status == "stopped"
    said = [record.getMessage() for record in caplog.records if "flwr" not in record.name]
    shown = capfd.readouterr()
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    kept = [*run.jobs.reason, *run.metrics.name, *texts(summary), *said]
    assert not [text for text in kept if not text.isprintable() or len(text) > 600]
    assert all(text.startswith("node ") for text in said if "99" in text)
    pages = [(tmp_path / "report.html").read_text(encoding="utf-8"), shown.out, shown.err]
    assert not any(mark in page for page in pages for mark in "\x9b\u202e\u2028\x00")
    assert not any(line.startswith(FORGED) for page in pages for line in page.splitlines())
    return run


@pytest.mark.parametrize("way", ["raised", "an exit", "an error"])
def test_of_a_huge_text_no_more_is_kept_than_is_shown(way):
    huge = TEXT + "x" * 10_000_000
    ways = {
        "raised": raising(ValueError(huge)),
        "an exit": lambda message, reply: sys.exit(huge),
        "an error": lambda message, reply: Message(Error(2, huge), reply_to=message),
    }
    app, replies = client(ways[way]), []
    tracemalloc.start()
    for _ in range(6):
        (answer,) = InlineExecutor(app).run([call := client_call()])
        replies.append(received(answer.reply, call.message))
        del answer
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 200_000
    assert all(len(reply.error.reason) <= 500 for reply in replies)
    assert all(" more characters)" in reply.error.reason for reply in replies)


@pytest.mark.parametrize("handled", [False, True])
def test_an_interrupt_of_the_operator_ends_the_run_while_a_client_works(handled):
    def interrupted(message, reply):
        signal.raise_signal(signal.SIGINT)
        return reply

    def held_up(message, reply):
        try:
            return interrupted(message, reply)
        except KeyboardInterrupt:
            raise

    for answer in (interrupted, held_up):
        with (
            pytest.raises(KeyboardInterrupt),
            end_on_signals() if handled else nullcontext(),
        ):
            InlineExecutor(client(answer)).run([client_call()])


@pytest.mark.parametrize("handled", [False, True])
def test_an_interrupt_that_a_client_raises_is_an_error_of_its_own(handled):
    def clumsy(message, reply):
        try:
            raise KeyboardInterrupt(TEXT)
        except KeyboardInterrupt:
            raise

    for answer in (raising(KeyboardInterrupt), clumsy):
        with end_on_signals() if handled else nullcontext():
            (found,) = InlineExecutor(client(answer)).run([client_call()])
        assert found.reply.error.reason.startswith("KeyboardInterrupt: ")
