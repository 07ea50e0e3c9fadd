import pickle

import numpy as np
import pytest

from fedstale.errors import TraceError
from fedstale.traces.sources import fedscale


def client(computation, communication):
    return {"computation": computation, "communication": communication}


def read(tmp_path, data):
    file = tmp_path / "client_device_capacity"
    file.write_bytes(data if isinstance(data, bytes) else pickle.dumps(data))
    return fedscale.read_capacity(file)


def test_the_median_client_has_speed_one_and_links_are_equal_both_ways(tmp_path):
    traces = read(tmp_path, {1: client(40.0, 1000.0), 2: client(20.0, 2000), 3: client(10, 5648.1)})
    at = (np.arange(3), 0.0)
    np.testing.assert_allclose(traces.compute.value_at(*at), [0.5, 1.0, 2.0])
    np.testing.assert_allclose(traces.downlink.value_at(*at), [1e6, 2e6, 5.6481e6])
    np.testing.assert_array_equal(traces.uplink.value_at(*at), traces.downlink.value_at(*at))
    assert traces.compute_unit == fedscale.COMPUTE_UNIT
    assert not traces.repairs


@pytest.mark.parametrize(
    "bad", [0, -1.0, "5", None, True, float("nan"), float("inf"), 1e-320, 10**400, [1]]
)
def test_a_client_with_a_number_that_cannot_be_is_dropped_and_counted(tmp_path, bad):
    some = {1: client(40.0, 10.0), 2: client(bad, 10.0), 3: client(40.0, bad), 4: client(bad, bad)}
    traces = read(tmp_path, some)
    assert traces.device_ids.tolist() == ["1"]
    assert dict(traces.repairs) == {
        "dropped: client whose computation is not a number above 0": 2,
        "dropped: client whose communication is not a number above 0": 1,
    }


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (pickle.dumps({1: client(1.0, 2.0)})[:-9], "truncated"),
        (pickle.dumps(3), "expected a pickled dictionary"),
        (pickle.dumps({1: 2}), "expected a client_device_capacity"),
        (pickle.dumps({1: client(np.float64(1.0), 2.0)}), "rejected"),
    ],
)
def test_what_is_not_this_format_is_one_sentence(tmp_path, data, says):
    with pytest.raises(TraceError, match=says):
        read(tmp_path, data)
