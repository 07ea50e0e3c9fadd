"""The native file keeps as many devices as there may be."""

import numpy as np
import pytest
from same_traces import assert_equal

from fedstale.traces import Availability, TraceSet
from fedstale.traces.trace_set import numbered


def test_a_hundred_thousand_devices_come_back(tmp_path):
    n = 100_000
    rng = np.random.default_rng(0)
    starts = np.sort(rng.random((n, 5)) * 1000, axis=1) + np.arange(5)
    availability = Availability.packed(
        starts.ravel(), starts.ravel() + 0.5, np.full(n, 5), np.full(n, 2000.0)
    )
    traces = TraceSet(device_ids=numbered("d", n), availability=availability)
    traces.write(tmp_path / "t.parquet")
    assert_equal(TraceSet.read(tmp_path / "t.parquet"), traces)


@pytest.mark.slow
def test_a_million_devices_come_back(tmp_path):
    traces = TraceSet.synthetic(1_000_000, days=1, seed=0)
    traces.write(tmp_path / "t.parquet")
    assert_equal(TraceSet.read(tmp_path / "t.parquet"), traces)
