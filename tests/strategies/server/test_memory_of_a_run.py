"""How many models a server holds while it merges; measured at the scale of megabytes."""

import tracemalloc

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from virtual_grid import VirtualGrid, content, record

from fedstale.strategies import Checkpoints, FedBuff, Validation
from fedstale.strategies.server.runtime import Callback, Runtime

ARRAYS, SIZE = 16, 1 << 16
MODEL_BYTES = ARRAYS * SIZE * 4


def model(value):
    return record(**{f"w{k}": np.full(SIZE, value, np.float32) for k in range(ARRAYS)})


class FarGrid(VirtualGrid):
    """Keeps neither messages nor replies, as a grid whose nodes are elsewhere."""

    def __init__(self, n):
        super().__init__({node: self.answer for node in range(n)})

    @staticmethod
    def answer(message, grid):
        return 1.0 + 0.37 * message.metadata.dst_node_id, RecordDict()

    def push_messages(self, messages):
        ids = super().push_messages(
            [Message(RecordDict(), message.metadata.dst_node_id, "train") for message in messages]
        )
        self.sent = [None] * len(self.sent)
        return ids

    def pull_messages(self, message_ids):
        replies = super().pull_messages(message_ids)
        for reply in replies:
            reply.content = content(model(0.01))
        return replies


class Models(Callback):
    """Counts the models in memory: at each new version, and at the peak since the one before."""

    def __init__(self):
        self.held, self.peaks = [], []

    def new_version(self, run, version, arrays, updates):
        held, peak = (n / MODEL_BYTES for n in tracemalloc.get_traced_memory())
        self.held.append(held)
        self.peaks.append(peak)
        tracemalloc.reset_peak()


@pytest.mark.usefixtures("_identity")
def test_a_merge_holds_five_models_at_most_and_three_between():
    """Initial, current, sum, reply and update; those of jobs in flight are on disk."""
    grid, models = FarGrid(12), Models()
    grid.runtime = Runtime(grid, models)
    tracemalloc.start()
    try:
        FedBuff(
            12,
            4,
            validation=Validation(norm_bound=None),
            checkpoints=Checkpoints(version_memory_bytes=MODEL_BYTES),
        ).start(grid, model(0.0), 6)
    finally:
        tracemalloc.stop()
    # Half a model for all that is no model.
    assert max(models.peaks) < 5.5
    # The initial model, the new one, and the reply whose update closed the buffer.
    assert max(models.held) < 3.5
