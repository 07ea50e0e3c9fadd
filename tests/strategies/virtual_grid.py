"""A Flower Grid of a few lines for tests: every node is a function, and the clock is virtual."""

import heapq
from contextlib import contextmanager
from math import inf

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.error import Error
from flwr.supercore.task_identity import TaskIdentity

from fedstale.strategies.server.runtime import Callback, Runtime, RuntimeGrid
from fedstale.strategies.weighting import ClientUpdate


class Notes(Callback):
    """What a strategy told its runtime."""

    def __init__(self):
        self.merged, self.refused, self.metered, self.models = [], [], [], []

    def aggregated(self, run, update, version):
        names = ("base_version", "staleness", "weight")
        facts = {name: getattr(update, name) for name in names}
        self.merged.append((update.message_id, {**facts, "version": version}))

    def rejected(self, run, message_id, *, reason):
        self.refused.append((message_id, reason))

    def new_version(self, run, version, arrays):
        self.models.append((version, arrays))

    def metrics(self, run, version, source, values):
        self.metered.append((run.now(), version, source, dict(values)))


def weighed(message_id, *, weight=0.5, **facts):
    """Return an update that went into a server step, without its arrays."""
    arrays = {"delta": {}, "base": {}, "current": {}}
    return ClientUpdate(message_id=message_id, weight=weight, **arrays, **facts)


class VirtualGrid(RuntimeGrid):
    """Nodes are functions from (message, grid) to (delay in s, content | Error | None)."""

    def __init__(self, nodes, online=None):
        self.nodes = nodes
        self.online = online or (lambda now: sorted(nodes))
        self.time = 0.0
        self.sent = []
        self.replies = {}
        self.heap = []
        notes = Notes()
        self.merged, self.refused = notes.merged, notes.refused
        self.metrics, self.models = notes.metered, notes.models
        self.pulls_in_vain = 0
        self.runtime = Runtime(self, notes)

    def now(self):
        return self.time

    def wait(self, until):
        if not self.replies:
            target = min(until, self.heap[0][0] if self.heap else inf)
            if target == inf:
                target = self.time + 60.0
                assert self.time < 1e7, "waits for ever"
            self.move(target)
        return bool(self.replies)

    def move(self, target):
        assert target >= self.time
        self.time = target
        while self.heap and self.heap[0][0] <= target:
            _, _, message_id, reply = heapq.heappop(self.heap)
            self.replies[message_id] = reply

    def set_run(self, run):
        pass

    @property
    def run(self):
        return None

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def get_node_ids(self):
        return list(self.online(self.time))

    def push_messages(self, messages):
        ids = []
        for message in messages:
            message_id = f"m{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = message_id
            self.sent.append((self.time, message))
            delay, answer = self.nodes[message.metadata.dst_node_id](message, self)
            if answer is not None:
                reply = Message(answer, reply_to=message)
                if isinstance(answer, Error):
                    # As the SuperLink does: it is the source of error replies.
                    reply.metadata.__dict__["_src_node_id"] = 1
                heapq.heappush(self.heap, (self.time + delay, len(self.sent), message_id, reply))
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids):
        found = [self.replies.pop(i) for i in list(message_ids) if i in self.replies]
        self.pulls_in_vain += not found
        return found

    def send_and_receive(self, messages, *, timeout=None):
        ids = self.push_messages(messages)
        end = self.time + (inf if timeout is None else timeout)
        last = max((t for t, _, i, _ in self.heap if i in ids and t <= end), default=self.time)
        self.move(last)
        return self.pull_messages(ids)


@contextmanager
def identity():
    """Let this process create messages."""
    before = TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    try:
        yield
    finally:
        TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id = before


def record(**arrays):
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def content(arrays, examples=1, **metrics):
    return RecordDict(
        {"arrays": arrays, "metrics": MetricRecord({"num-examples": examples, **metrics})}
    )


def adder(step, delay=1.0, examples=1, **metrics):
    """A node that adds a constant to every array."""

    def node(message, grid):
        if message.metadata.message_type.startswith("evaluate"):
            return delay, RecordDict(
                {"metrics": MetricRecord({"num-examples": examples, "eval": float(step)})}
            )
        arrays = {k: a.numpy() for k, a in message.content["arrays"].items()}
        moved = {k: (a + np.asarray(step)).astype(a.dtype) for k, a in arrays.items()}
        seconds = delay(grid) if callable(delay) else delay
        return seconds, content(record(**moved), examples, **metrics)

    return node


def changed(arrays, name="w"):
    return arrays[name].numpy()


__all__ = [
    "ConfigRecord",
    "Error",
    "VirtualGrid",
    "adder",
    "changed",
    "content",
    "identity",
    "record",
]
