"""Traces that another process opens."""

import multiprocessing

import numpy as np
import pytest
from same_traces import trips

from fedstale.traces import TraceSet
from fedstale.traces.io.mapped import share


@pytest.fixture(scope="module")
def traces():
    return TraceSet.synthetic(300, days=2, seed=1)


def trips_of(shared):
    return trips(shared.open())


def test_another_process_gets_the_same(traces, tmp_path):
    shared = share(traces, tmp_path / "shared")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        np.testing.assert_array_equal(pool.apply(trips_of, (shared,)), trips(traces))
