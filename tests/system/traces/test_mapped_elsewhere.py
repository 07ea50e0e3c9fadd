"""Traces that another process opens."""

import multiprocessing

import numpy as np
import pytest

from fedstale.traces import Job, TraceSet
from fedstale.traces.io.mapped import share


@pytest.fixture(scope="module")
def traces():
    return TraceSet.synthetic(300, days=2, seed=1)


def trips(traces):
    job = Job(work=300.0, download_bytes=1e6, upload_bytes=1e6, ttl_s=7200.0)
    found = traces.trips(np.arange(traces.n_devices), 3600.0, job)
    return found.ended


def trips_of(shared):
    return trips(shared.open())


def test_another_process_gets_the_same(traces, tmp_path):
    shared = share(traces, tmp_path / "shared")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        np.testing.assert_array_equal(pool.apply(trips_of, (shared,)), trips(traces))
