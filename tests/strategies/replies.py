"""Replies to jobs, and buffers that take them, without a run around them."""

import numpy as np
from flwr.app import Message, RecordDict
from virtual_grid import content, record

from fedstale.strategies import StaleStrategy
from fedstale.strategies.server.buffer import Buffer
from fedstale.strategies.server.jobs import SentJob
from fedstale.strategies.server.reputation import Reputation
from fedstale.strategies.server.versions import Snapshot, Versions

BASE = Snapshot.of(
    record(w=np.zeros((2, 3), np.float32), b=np.ones(2), n=np.array(4), on=np.array([True, False]))
)
"""The model that is sent."""
GOOD = {
    "w": np.ones((2, 3), np.float32),
    "b": np.ones(2),
    "n": np.array(6),
    "on": np.array([False, True]),
}
"""What a good reply makes of it."""


def good(examples=3, **arrays):
    """The content of a good reply; some arrays may be others."""
    return content(record(**(GOOD | arrays)), examples, train_loss=0.5)


def reply(body, node_id=7):
    """A node's answer to a training job."""
    sent = Message(RecordDict(), dst_node_id=node_id, message_type="train")
    return Message(body, reply_to=sent)


def job(node_id=7, *, job_id=0, base_version=0):
    """A training job that this node was sent."""
    return SentJob(
        job_id=job_id,
        message_id=f"m{job_id}",
        node_id=node_id,
        purpose="train",
        base_version=base_version,
        sent_at=0.0,
    )


def open_buffer(versions, reputation=None, **settings):
    """The buffer of a strategy with some settings, on a version of a model."""
    strategy = StaleStrategy(**settings)
    return Buffer(
        strategy,
        strategy.weighting,
        strategy.server_optimizer,
        versions=versions if isinstance(versions, Versions) else Versions(versions),
        reputation=reputation or Reputation(strategy.validation),
    )
