"""Devices are followed as late as can be, many jobs at a time, and nobody can tell."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from flwr.app import ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_fleets import synthetic
from tiny import COSTS, counting_app, fleet, message_to

from fedstale.errors import ConfigError
from fedstale.flower import identity
from fedstale.simulation.costs import CostModel
from fedstale.simulation.devices import Devices
from fedstale.simulation.jobs import JobTable
from fedstale.simulation.trace_grid import TraceGrid
from fedstale.strategies import FedAvgOverSelected, FedBuff, GapAware
from fedstale.traces import Series

N = 4
RATES = st.lists(st.sampled_from([0.0, 1e5, 1e6, 8e6]), min_size=1, max_size=5)


@st.composite
def fleets(draw):
    windows = [sorted(draw(st.sets(st.integers(0, 99), min_size=2, max_size=2))) for _ in range(N)]
    traces = fleet([[pair] for pair in windows], length=100.0)
    rows = [draw(RATES) for _ in range(N)]
    speeds = [[1e-5 * rate for rate in draw(RATES)] for _ in range(N)]
    step_s, repeat = draw(st.sampled_from([0.5, 7.0])), draw(st.booleans())
    return replace(
        traces,
        downlink=Series.regular(rows, step_s=step_s, repeat=repeat),
        uplink=Series.regular(rows[::-1], step_s=step_s, repeat=repeat),
        compute=Series.regular(speeds, step_s=step_s, repeat=repeat),
    )


@settings(max_examples=60, deadline=None)
@given(
    fleets(),
    st.lists(st.tuples(st.integers(0, N - 1), st.sampled_from([0.5, 30.0, 400.0])), min_size=1),
    st.sampled_from(["abort", "pause"]),
    st.sampled_from([0.0, 31.0]),
)
def test_the_server_sees_nothing_before_a_job_is_followed(traces, asked, on_interrupt, now):
    ours = Devices(traces, CostModel(COSTS), on_interrupt)
    with identity(1):
        messages = [message_to(1000 + device, ttl=ttl) for device, ttl in asked]
    jobs = JobTable()
    rows, unseen_until = ours.send(messages, now, jobs)
    with pytest.MonkeyPatch.context() as patch:
        # Windows and rates repeat after 21 windows: in 30 in vain as in 1,000.
        patch.setattr("fedstale.traces.trip._GIVE_UP_WINDOWS", 30)
        ours.follow(jobs, range(len(asked)))
    assert jobs.columns["job_id"][rows].tolist() == list(range(len(asked)))
    assert now < unseen_until <= jobs.columns["visible_at"][rows].min()


class AtOnce(Devices):
    """Sees to it that every job is followed before anything else happens."""

    def send(self, messages, now, jobs):
        return super().send(messages, now, jobs)[0], now


class Counting(Devices):
    """Notes how many jobs are followed together."""

    def follow(self, jobs, rows):
        counts.append(len(rows))
        return super().follow(jobs, rows)


counts = []

STRATEGIES = {
    "fedbuff": lambda: FedBuff(concurrency=20, buffer_size=4, seed=2),
    "gap-aware": lambda: GapAware(concurrency=9, buffer_size=3, seed=3),
    "over-selected": lambda: FedAvgOverSelected(buffer_size=8, seed=2),
}


@pytest.mark.parametrize("on_interrupt", ["abort", "pause"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_is_the_same_whenever_devices_are_followed(name, on_interrupt, monkeypatch):
    phones = synthetic(200, days=2, seed=1)
    counts.clear()

    def events(kind):
        monkeypatch.setattr("fedstale.simulation.trace_grid.Devices", kind)
        grid = TraceGrid(phones, counting_app(), costs=COSTS, on_interrupt=on_interrupt)
        initial = ArrayRecord([np.zeros(3, np.float32)])
        with grid.running():
            result = STRATEGIES[name]().start(grid, initial, num_rounds=10, timeout=300.0)
        return grid.events().to_pandas(), result.arrays.to_numpy_ndarrays()[0]

    (at_once, one), (later, other) = events(AtOnce), events(Counting)
    pd.testing.assert_frame_equal(at_once, later, check_exact=True)
    np.testing.assert_array_equal(one, other)
    # Jobs are often sent one at a time, and followed several at a time.
    assert np.mean(counts) > 1.5


@pytest.mark.parametrize("ttl", [0.0, -1.0, float("nan")])
def test_a_time_to_live_that_means_nothing_is_refused_when_it_is_sent(make_grid, ttl):
    grid = make_grid([[(0, 1000)]])
    message = message_to(1000)
    message.metadata.ttl = ttl
    with pytest.raises(ConfigError, match=r"ttl = .*: expected seconds > 0"):
        grid.push_messages([message])
    assert len(grid._jobs) == 0


def test_events_and_checkpoints_hold_what_was_sent_a_moment_ago(make_grid):
    windows = [[(0, 5)], [(0, 1000)]]
    grid, other = make_grid(windows), make_grid(windows)
    grid.push_messages([message_to(1000)])
    # When the first job is lost is known before the second is sent, which ends earlier.
    assert grid._next_event == 65.0
    grid.push_messages([message_to(1001)])
    assert (len(grid._jobs), grid.runtime.n_in_flight()) == (2, 2)
    other.load_state_dict(grid.state_dict())
    assert grid.events()["status"].to_pylist() == ["in-flight"] * 2
    for name in ("message-1", "message-0"):
        (reply,) = other.pull_messages()
        assert reply.metadata.reply_to_message_id == name
    assert (len(other._jobs), other.runtime.n_in_flight()) == (2, 0)
