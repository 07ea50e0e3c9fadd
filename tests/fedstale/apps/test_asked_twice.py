"""A device that is asked twice at one version of the model sends two updates, and always these."""

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from places import FOLDERS

from fedstale.flower import stamp


def bytes_of(reply):
    assert not reply.has_error(), reply.error
    return [array.data for array in reply.content["arrays"].values()]


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
