"""A device that is asked twice at one version of the model sends two updates, and always these."""

from contextlib import ExitStack

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from places import BATCHED, FOLDERS

from fedstale.flower import stamp
from fedstale.simulation import TraceGrid
from fedstale.simulation.executors.choice import executor_for
from fedstale.traces import TraceSet


def bytes_of(reply):
    assert not reply.has_error(), reply.error
    return [array.data for array in reply.content["arrays"].values()]


def simulated(opened, folder, executor):
    """Updates of two devices that are each asked twice at once, in the order of asking."""
    app, client, run_config, content = opened(folder)
    with ExitStack() as stack:
        running = executor_for(app, client, executor, workers=1, gpus=None)
        grid = TraceGrid(
            TraceSet.ideal(2),
            stack.enter_context(running),
            costs=app.costs.resolved(run_config),
            run_config=run_config,
        )
        stack.enter_context(grid.running())
        nodes = sorted(grid.get_node_ids())
        messages = [Message(content, node, "train") for node in [*nodes, *nodes]]
        replies = grid.send_and_receive(messages)
        by_message = {reply.metadata.reply_to_message_id: reply for reply in replies}
        return [bytes_of(by_message[message.metadata.message_id]) for message in messages]


@pytest.mark.parametrize(
    ("folder", "executor"),
    [
        *((folder, "inline") for folder in FOLDERS),
        *((folder, "batched") for folder in FOLDERS if folder.name in BATCHED),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_in_a_simulation_every_message_has_an_update_of_its_own_and_every_run_the_same(
    opened, folder, executor
):
    first = simulated(opened, folder, executor)
    assert len({tuple(update) for update in first}) == 4
    assert simulated(opened, folder, executor) == first


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_plain_messages_of_flower_have_updates_of_their_own_with_and_without_an_id(opened, folder):
    _, client, run_config, content = opened(folder)
    node_config = {"partition-id": 1, "num-partitions": 3}

    def answer(message):
        np.random.seed(len(run_config))
        return bytes_of(client(message, Context(7, 5, node_config, RecordDict(), run_config)))

    def asked(message_id=None):
        message = Message(content, 5, "train")
        if message_id is not None:
            stamp(message, message_id, 0.0, 60.0)
        return message

    one, two = asked(), asked()
    assert one.metadata.message_id == ""
    assert answer(one) != answer(two)
    assert answer(one) == answer(one)
    assert answer(asked("a" * 64)) != answer(asked("b" * 64))
    assert answer(asked("a" * 64)) == answer(asked("a" * 64))
