"""A device on a bench, and messages, for tests of the mod."""

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.app.message.message import make_message
from flwr.app.metadata import Metadata

from fedstale.client.device import Machine
from fedstale.traces.recording.monitor import Reading


class Bench:
    """A device whose clocks are turned by hand, and an app that trains for as long as is said."""

    def __init__(self, mod, *, monitor=None, state=None):
        self.mod, self.monitor = mod, monitor or Fixed()
        self.wall, self.steady = 1_700_000_000.0, 100.0
        self.state = RecordDict() if state is None else state
        self.n = 0

    def go(self, seconds, *, wall=None):
        self.steady += seconds
        self.wall += seconds if wall is None else wall

    def answer(self, request, *, takes=0.0):
        """Return the reply to a message, whose training takes some s."""
        here = context(self.state)
        if isinstance(self.monitor, Fixed):
            self.monitor.instant = self.wall
        here.device = Machine(
            request, self.state, self.monitor, wall=lambda: self.wall, steady=lambda: self.steady
        )

        def work(request, _):
            self.go(takes)
            return trained(request)

        return self.mod(request, here, work)

    def train(self, takes, *, travel=2.0, **options):
        """Return what the mod says after a training that takes some s."""
        self.n += 1
        options = {"created_at": self.wall - travel, "key": f"message-{self.n}"} | options
        return dict(self.answer(message(**options), takes=takes).content["fedstale.forecast"])

    def ask(self, **options):
        """Return what the mod answers to a query."""
        reply = self.answer(message("query.forecast", n=0, created_at=self.wall - 1.0, **options))
        return dict(reply.content["fedstale.forecast"])


class Fixed:
    """A monitor that always reads the same, at the instant when the message came."""

    def __init__(self, **values):
        self.values, self.instant = values, 0.0

    def read(self):
        return Reading(instant=self.instant, **self.values)


def context(state=None, **run_config):
    state = RecordDict() if state is None else state
    return Context(1, 7, {"partition-id": 0, "num-partitions": 1}, state, run_config)


def message(kind="train", *, n=1000, created_at=0.0, ttl=3600.0, key="message-0", job=None):
    content = RecordDict()
    if n:
        content["arrays"] = ArrayRecord([np.zeros(n, dtype=np.float32)])
    if job is not None:
        content["fedstale.job"] = ConfigRecord(job)
    metadata = Metadata(1, key, 1, 7, "", "", created_at, ttl, kind)
    return make_message(metadata, content)


def trained(request, *, examples=10):
    content = RecordDict({"metrics": MetricRecord({"num-examples": examples})})
    if "arrays" in request.content:
        content["arrays"] = request.content["arrays"]
    return Message(content, reply_to=request)
