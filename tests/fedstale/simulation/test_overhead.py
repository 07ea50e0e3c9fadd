"""What a platform needs for each message besides its bytes."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from shared_fleets import synthetic

from fedstale.config import Costs
from fedstale.errors import ConfigError, FedstaleError
from fedstale.simulation import TraceGrid
from fedstale.strategies import GapAware
from fedstale.traces import TraceSet

DECLARED = {"work-per-example": 2.0, "epochs": 1, "examples": 50, "model-bytes": 1_000_000}


def run(traces, versions=3, timeout=1000.0, **overhead):
    app = ClientApp()

    @app.train()
    def train(message, context):
        content = {"arrays": message.content["arrays"], "m": MetricRecord({"num-examples": 50})}
        return Message(RecordDict(content), reply_to=message)

    costs = Costs.from_table({**DECLARED, **overhead})
    grid = TraceGrid(traces, app, costs=costs)
    initial = ArrayRecord({"w": Array(np.zeros(2, np.float32))})
    with grid.running():
        GapAware(concurrency=4, buffer_size=2, seed=1).start(grid, initial, versions, timeout)
    return grid.events()


def test_a_message_starts_later_and_its_reply_is_seen_later():
    traces = TraceSet.constant(4, compute=1.0, downlink_bit_per_s=8e6, uplink_bit_per_s=8e6)
    overhead = {"download-overhead-s": 7.0, "upload-overhead-s": 3.0}
    plain, slowed = (run(traces, **table).to_pandas() for table in ({}, overhead))
    first = slowed.iloc[0]
    assert first.started_at == 7.0
    assert first.reported_at == pytest.approx(plain.reported_at.iloc[0] + 10.0)
    assert first.delivered_at == first.reported_at
    for spent in ("download_s", "compute_s", "upload_s"):
        assert first[spent] == pytest.approx(plain[spent].iloc[0])


def test_a_reply_whose_overhead_ends_too_late_is_late():
    traces = TraceSet.constant(4, compute=1.0, downlink_bit_per_s=8e6, uplink_bit_per_s=8e6)
    slow = {"download-overhead-s": 11.0, "upload-overhead-s": 2.0}
    # A job takes 100 s of work and 2 s of transfers.
    assert "late" not in run(traces, timeout=115.5, **slow)["status"].to_pylist()
    with pytest.raises(FedstaleError, match="reported after the message had expired"):
        run(traces, timeout=114.5, **slow)


def test_none_is_nothing_to_the_last_byte():
    traces = synthetic(20, days=1, seed=2)
    zero = {"download-overhead-s": 0.0, "upload-overhead-s": 0.0}
    plain, same = (run(traces, 10, **table).to_pandas() for table in ({}, zero))
    assert plain.equals(same)


def test_an_overhead_is_seconds():
    with pytest.raises(ConfigError, match="download_overhead_s = -1"):
        Costs(download_overhead_s=-1.0)
