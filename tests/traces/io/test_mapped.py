import numpy as np
import pytest
from same_traces import trips

from fedstale.traces import TraceSet
from fedstale.traces.io.files import share


@pytest.fixture(scope="module")
def traces():
    return TraceSet.synthetic(300, days=2, seed=1)


def test_shared_traces_answer_as_the_original(traces, tmp_path):
    shared = share(traces, tmp_path / "shared")
    np.testing.assert_array_equal(trips(shared.open()), trips(traces))
    assert list(shared.open().device_ids) == list(traces.device_ids)
    assert shared.open().epoch == traces.epoch


def test_arrays_stay_in_the_file_and_cannot_be_written_to(tmp_path):
    many = TraceSet.synthetic(1000, days=2, seed=1)
    shared = share(many, tmp_path / "shared")
    in_file = sum(end - begin for begin, end in shared.places)
    assert in_file > 5 * len(shared.rest)
    availability = shared.open().availability
    arrays = [a for a in vars_of(availability) if isinstance(a, np.ndarray) and a.size]
    assert arrays
    assert not any(a.flags.writeable for a in arrays)


def vars_of(part):
    names = getattr(part, "__dict__", None) or {
        name: getattr(part, name)
        for cls in type(part).__mro__
        for name in vars(cls).get("__slots__", ())
    }
    return list(names.values())


def test_traces_without_arrays_can_be_shared(tmp_path):
    assert share(TraceSet.ideal(2), tmp_path / "shared").open().n_devices == 2
