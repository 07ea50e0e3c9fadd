"""Names of Python's clocks are exchanged for other people's server code, and for no other."""

import datetime
import time
from typing import ClassVar

import numpy as np
import pytest
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from shared_fleets import named

import fedstale
from fedstale.strategies import Callback, FedBuff
from fedstale.strategies.selection import Random

NOW = vars(datetime.datetime)["now"]


class Asking(Random):
    """A selector of a user, who asks for the time."""

    asked: ClassVar = []

    def select(self, candidates, k, now, rng):
        self.asked.append(time.time())
        return super().select(candidates, k, now, rng)


@pytest.mark.parametrize(
    ("strategy", "more", "is_ours"),
    [
        (FedBuff(4, 2), {}, True),
        (FedBuff(4, 2, selector=Asking()), {}, False),
        (FedBuff(4, 2), {"callbacks": [type("Own", (Callback,), {"__module__": "own"})()]}, False),
        (FedBuff(4, 2), {"evaluate": lambda version, arrays: MetricRecord({"loss": 1.0})}, False),
    ],
    ids=["ours", "selector", "callback", "evaluation"],
)
def test_names_are_exchanged_where_a_part_is_somebody_elses(strategy, more, is_ours):
    client, seen = ClientApp(), set()

    @client.train()
    def train(message, context):
        seen.add(vars(datetime.datetime)["now"] is NOW)
        metrics = MetricRecord({"num-examples": 10})
        content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
        return Message(content, reply_to=message)

    fedstale.simulate(
        client,
        strategy=strategy,
        initial_arrays={"w": np.zeros(2)},
        traces=named("synthetic:20"),
        until="10m",
        work_per_example=1.0,
        epochs=1,
        examples=10,
        **more,
    )
    assert seen == {is_ours}
    if isinstance(strategy.selector, Asking):
        assert min(abs(at - time.time()) for at in Asking.asked) > 86_400.0
