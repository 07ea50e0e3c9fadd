"""The benchmark of random tickets: who is weak, what is assumed, and what a short form finds."""

import json

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from virtual_grid import identity

from fedstale.contrib.tickets.tickets import TICKETS
from fedstale.traces import TraceSet


@pytest.fixture(scope="module")
def bench():
    from papers import tickets

    return tickets


@pytest.fixture(scope="module")
def windows():
    """Return windows of synthetic phones, with what came before them."""
    from lab.training import windows
    from messages import runs

    fleet = TraceSet.synthetic(90, days=4, seed=3)
    return [runs.looking_back(w, fleet) for w in windows(fleet, "phones", (1, 2, 3))]


def test_weak_are_those_with_the_slower_half_of_the_links(bench, windows):
    slow, window = bench.weak(windows[0]), windows[0]
    channel = window.traces.channel("uplink")
    carried = channel.integral(np.arange(window.n_devices), 0.0, window.hours_s)
    fast = sorted(set(range(window.n_devices)) - set(slow))
    assert abs(len(slow) - len(fast)) <= 1
    assert carried[slow].max() <= carried[fast].min()


def test_with_less_work_a_part_of_a_model_is_that_part_of_the_work(bench, windows):
    work = bench._less("digits", windows[0])
    with identity():
        whole = Message(RecordDict({}), 1003, "train")
        part = Message(RecordDict({TICKETS: ConfigRecord({"ratio": 0.25})}), 1003, "train")
    assert work(part) == 0.25 * work(whole) > 0.0


def test_arms_are_trained_and_compared_in_pairs(bench, windows, tmp_path):
    arms = [bench.FULL, "int8, int8 down", "weak left out", "tickets, smart, less work"]
    options = {"kept": bench.Kept(tmp_path / "runs.jsonl"), "until_s": 5000.0}
    parts = (windows[:1], windows[1:])
    rows = bench.rows_of("digits", arms, parts, (2.4,), **options)
    assert json.dumps(rows) == json.dumps(bench.rows_of("digits", arms, parts, (2.4,), **options))
    found = {row["arm"]: row for row in rows}
    full, part = found[bench.FULL], found["tickets, smart, less work"]
    assert full["hours_ratio"][0] == 1.0
    assert part["up_gb"] / part["jobs"] < 0.8 * full["up_gb"] / full["jobs"]
    assert found["weak left out"]["final_by_seed"] != full["final_by_seed"]


def test_the_wide_network_is_that_of_the_page(bench):
    from lab.apps import opened

    app = opened("wide digits")
    arrays = app.initial(0)
    assert sum(x.numpy().size for x in arrays.values()) == 42_634
    assert 0.0 < app.evaluate(arrays, 0)[0] < 0.4
