import os
import pickle
import time

import numpy as np
import pytest

from fedstale.errors import TraceError
from fedstale.traces.sources import fedscale


def client(active, inactive, finish_time=1000, **more):
    record = {"duration": 0, "inactive": inactive, "finish_time": finish_time, "active": active}
    return record | {"model": "CPH1801"} | more


def read(tmp_path, data):
    file = tmp_path / "client_behave_trace"
    file.write_bytes(data if isinstance(data, bytes) else pickle.dumps(data))
    return fedscale.read_behaviour(file)


def windows(traces, name):
    return traces.availability.windows(traces.device_ids.get_loc(name))[0].tolist()


def test_a_client_is_there_from_active_to_inactive_and_repeats_after_its_finish_time(tmp_path):
    traces = read(tmp_path, {3834: client([10, 300], [20, 400]), 7: client([5], [6], 50)})
    assert traces.device_ids.tolist() == ["3834", "7"]
    assert windows(traces, "3834") == [[10, 20], [300, 400]]
    start, _ = traces.availability.window_at_or_after([0, 1], [401.0, 6.0])
    assert start.tolist() == [1010, 55]
    assert not traces.repairs


def test_every_kind_of_mess_is_repaired_or_dropped_and_counted(tmp_path):
    traces = read(
        tmp_path,
        {
            1: client([10, 20, 50, 40, 990, "x", True], [20, 30, 45, 45, 2000, 7, 8, 9]),
            2: client([], []),
            3: client(None, [1]),
            4: client([1], [2], finish_time=0),
            5: client([1], [2], finish_time="soon"),
            6: 12,
            7: client([10**400], [2.5]),
        },
    )
    assert traces.device_ids.tolist() == ["1", "2", "3", "7"]
    assert windows(traces, "1") == [[10, 30], [40, 45], [990, 1000]]
    assert dict(traces.repairs) == {
        "cut: went on after the end of the record": 1,
        "dropped: client without a finish_time above 0": 3,
        "dropped: client's windows that are not lists": 1,
        "dropped: end before start": 1,
        "dropped: not a number": 3,
        "dropped: start without an end, or end without a start": 1,
        "kept: client that is never online": 3,
        "merged: touching": 1,
        "sorted: out of order": 1,
    }


class Evil:
    def __reduce__(self):
        return os.mkdir, ("made",)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (pickle.dumps({1: client([1], [2])})[:-20], "truncated"),
        (pickle.dumps([1]), "expected a pickled dictionary"),
        (pickle.dumps({}), "expected a pickled dictionary"),
        (pickle.dumps({1: {"computation": 1.0}}), "expected a client_behave_trace"),
        (pickle.dumps({1: Evil()}), "rejected"),
        (pickle.dumps({1: client(np.arange(2), np.arange(2))}), "rejected"),
        (b"hello", "rejected|truncated"),
    ],
)
def test_what_is_not_this_format_is_one_sentence_and_runs_nothing(
    tmp_path, data, says, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TraceError, match=says):
        read(tmp_path, data)
    assert not (tmp_path / "made").exists()


def test_ten_thousand_clients_load_in_seconds(tmp_path):
    rng = np.random.default_rng(0)
    data = {}
    for name in range(10_000):
        edges = np.unique(rng.integers(0, 518_400, 40))
        edges = edges[: edges.size // 2 * 2].tolist()
        data[name] = client(edges[::2], edges[1::2], 518_400)
    blob = pickle.dumps(data)
    began = time.perf_counter()
    traces = read(tmp_path, blob)
    assert time.perf_counter() - began < 10.0
    assert windows(traces, "17") == [
        list(w) for w in zip(data[17]["active"], data[17]["inactive"], strict=True)
    ]
