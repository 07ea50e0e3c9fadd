"""Devices that keep exactly what they state, from the statement to the audit of the run's log.

Each draws a chance for its next job, and by that chance whether the job will end in time. So a
statement that is held against another job than its own would look like a lie.
"""

from math import inf

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from tiny import fleet

import fedstale
from fedstale.contrib.audit import audited
from fedstale.strategies import FedBuff
from fedstale.strategies.stages import ForecastRequest

N = 24
CHANCES = (0.05, 0.5, 0.95)


class Fates:
    """What was stated last of each node's next job, and what will come of it."""

    def __init__(self, claims):
        self.claims, self.rng, self.will_end = claims, np.random.default_rng(3), {}

    def record(self, node):
        p = float(self.rng.choice(CHANCES))
        self.will_end[node] = self.rng.random() < p
        return ConfigRecord({"p_finish": self.claims(p), "duration_s": 2000.0})

    def work(self, message):
        is_train = message.metadata.message_type == "train"
        ends = self.will_end.get(message.metadata.dst_node_id, True)
        return (1000.0 if ends else 3700.0) if is_train else 0.0


def run(claims, *, asks):
    fates, app = Fates(claims), ClientApp()

    @app.train()
    def train(message, context):
        arrays = ArrayRecord({"weights": Array(message.content["arrays"]["weights"].numpy())})
        metrics = MetricRecord({"train_loss": 1.0, "num-examples": 10})
        said = fates.record(context.node_id)
        content = {"arrays": arrays, "metrics": metrics, "fedstale.forecast": said}
        return Message(RecordDict(content), reply_to=message)

    @app.query("forecast")
    def query(message, context):
        return Message(
            RecordDict({"fedstale.forecast": fates.record(context.node_id)}), reply_to=message
        )

    return fedstale.simulate(
        app,
        strategy=FedBuff(20, 4, stages=[ForecastRequest(older_than_s=600.0)] if asks else []),
        initial_arrays={"weights": np.zeros(2)},
        traces=fleet([[(0.0, 1e9)]] * N, length=1e9),
        until="1d",
        work=fates.work,
        model_bytes=10**6,
        examples=10,
        epochs=1,
        work_per_example=1.0,
    )


@pytest.fixture(scope="module")
def honest():
    return {asks: audited(run(lambda p: p, asks=asks)) for asks in (True, False)}


@pytest.mark.parametrize("asks", [True, False])
def test_devices_that_keep_their_chances_raise_no_alarm(honest, asks):
    devices = honest[asks].devices
    assert devices["tested"].sum() > 300
    assert honest[asks].alarms.empty
    share = (devices["kept"] * devices["tested"]).sum() / devices["tested"].sum()
    stated = (devices["stated"] * devices["tested"]).sum() / devices["tested"].sum()
    assert share == pytest.approx(stated, abs=0.06)
    # A chance that is drawn for each job tells more than any share so far.
    assert np.nanmedian(devices["skill_own"]) > 0.2


def test_a_lost_job_that_is_sent_again_is_not_held_against_the_old_statement(honest):
    """Without a new statement it is lost again, for ever: nothing of that was stated."""
    assert honest[False].devices["repeated"].sum() > 20


def test_devices_that_claim_more_than_they_draw_are_found():
    found = audited(run(lambda p: 1.0, asks=True))
    assert len(found.alarms) > N / 2
    assert set(found.alarms["direction"]) == {"over"}
    assert found.devices["jobs_to_alarm"].min() < inf
