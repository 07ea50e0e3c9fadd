"""A run that is told by hand, for callbacks that show runs."""

import sys
from pathlib import Path

from flwr.app import Error, Message, RecordDict

sys.path += [str(Path(__file__).parents[2] / "strategies")]

from virtual_grid import identity, weighed

from fedstale.strategies.server.runtime import Clock, Runtime


class ToldRun(Clock):
    def __init__(self, *callbacks):
        self.time, self.online, self.in_flight, self.n_failed = 0.0, 3, 2, 0
        self.name = ""
        self.runtime = Runtime(
            self,
            *callbacks,
            n_online=lambda: self.online,
            n_in_flight=lambda: self.in_flight,
            name_of=lambda node_id: self.name,
        )

    def now(self):
        return self.time

    def wait(self, until):
        raise NotImplementedError

    def moved(self, now, online=3, in_flight=2):
        self.time, self.online, self.in_flight = now, online, in_flight
        self.runtime.time_moved()

    def measured(self, now, version, source, name, value):
        self.time = now
        self.runtime.metrics(version, source, {name: value})

    def merged(self, now, staleness):
        self.time = now
        self.runtime.aggregated(weighed("m", staleness=staleness), staleness + 1)

    def failed(self, now, name, ending, reason):
        self.time, self.name, self.n_failed = now, name, self.n_failed + 1
        message_id = f"failed-{self.n_failed}"
        with identity():
            message = Message(RecordDict(), 7, "train")
            self.runtime.job_sent(message_id, message)
            self.runtime.reply(message_id, Message(Error(5, reason), reply_to=message), ending)
