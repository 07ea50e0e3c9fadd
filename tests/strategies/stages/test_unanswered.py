"""A stage that no device answers says so after the first round, with what the app lacks."""

import logging

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from virtual_grid import VirtualGrid, content, identity, record

from fedstale.client import CompressionMod, ForecastMod, PackMod, local_steps
from fedstale.strategies import Compression, FedAvg, ForecastRequest, LocalWork
from fedstale.strategies.stages import QUERY

MODEL = {"w": np.zeros((20, 30), np.float32)}
ANSWERED = {
    "Compression": (Compression("int8"), CompressionMod(), "add CompressionMod() to the mods"),
    "ForecastRequest": (
        ForecastRequest(job={"work": 1.0}, wait_s=1.0),
        ForecastMod(),
        "by ForecastMod().client_app()",
    ),
    "LocalWork": (LocalWork(0.5), PackMod(), "call fedstale.client.local_steps"),
}


@pytest.fixture(autouse=True)
def _identity():
    with identity():
        yield


def node(number, mods, *, reads=True):
    """A device with an app of a user's own, of some mods."""
    app, context = ClientApp(mods=mods), Context(1, number, {}, RecordDict(), {})

    @app.train()
    def train(message, context):
        if reads:
            local_steps(message, 2, 8)
        arrays = {k: a.numpy() + 1 for k, a in message.content["arrays"].items()}
        return Message(content(record(**arrays), 5), reply_to=message)

    def answer(message, grid):
        if message.metadata.message_type == QUERY and not mods:
            return 0.5, None
        own = Message(RecordDict(dict(message.content)), number, message.metadata.message_type)
        own.metadata.__dict__.update(message.metadata.__dict__)
        reply = app(own, context)
        return 0.5, reply.error if reply.has_error() else reply.content

    return answer


def hints(stage, nodes, caplog, rounds=3):
    grid = VirtualGrid(nodes)
    with caplog.at_level(logging.WARNING):
        FedAvg(stages=[stage]).start(grid, record(**MODEL), num_rounds=rounds, timeout=100.0)
    assert len(grid.models) == rounds
    said = [text for text in grid.runtime.hints if text.startswith(type(stage).__name__)]
    assert [line for line in caplog.messages if line in said] == said
    return said


@pytest.mark.parametrize("name", ANSWERED)
def test_a_stage_that_no_device_answers_is_named_once_with_what_to_add(name, caplog):
    stage, _, cure = ANSWERED[name]
    (hint,) = hints(stage, {n: node(n, [], reads=False) for n in (1, 2, 3)}, caplog)
    assert cure in hint


@pytest.mark.parametrize("name", ["Compression", "LocalWork"])
def test_a_stage_that_is_answered_says_nothing(name, caplog):
    stage, mod, _ = ANSWERED[name]
    assert not hints(stage, {n: node(n, [mod]) for n in (1, 2)}, caplog)


def test_one_device_that_answers_is_enough_for_what_each_answers_for_itself(caplog):
    nodes = {1: node(1, []), 2: node(2, [CompressionMod()])}
    assert not hints(Compression("int8"), nodes, caplog)
