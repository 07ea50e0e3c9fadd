"""Model versions are kept once, and for exactly as long as a job needs them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_grid import record

from fedstale.errors import ConfigError
from fedstale.strategies.versions import Snapshot, Versions


def snapshot(value=0.0):
    return Snapshot.of(record(w=np.full(2, value)))


@given(st.lists(st.sampled_from(["send", "end", "advance"]), max_size=60), st.randoms())
def test_a_version_is_there_while_current_or_held_and_gone_after(moves, chance):
    versions, held = Versions(snapshot()), []
    for move in moves:
        if move == "send":
            versions.hold(versions.version)
            held.append(versions.version)
        elif move == "end" and held:
            versions.release(held.pop(chance.randrange(len(held))))
        elif move == "advance":
            versions.advance(snapshot(versions.version + 1.0))
        needed = {*held, versions.version}
        assert len(versions) == len(needed)
        for version in needed:
            assert versions[version].floats["w"][0] == version


def test_a_model_survives_the_way_through_records():
    before = record(b=np.arange(3, dtype=np.float32), a=np.asfortranarray(np.eye(2)), n=np.array(7))
    after = Snapshot.of(before).record()
    assert list(after) == ["b", "a", "n"]
    for name in before:
        np.testing.assert_array_equal(after[name].numpy(), before[name].numpy())
        assert after[name].dtype == before[name].dtype


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64, np.uint64])
def test_integers_are_rounded_and_stay_in_their_range(dtype):
    top = np.iinfo(dtype).max
    old = Snapshot.of(record(n=np.array([0, 10, top - 5], dtype)))
    new = old.stepped({}, {"n": np.array([-1e30, 2.6, 1e30])}).counts["n"]
    assert new.dtype == dtype
    assert new[0] == np.iinfo(dtype).min
    assert new[1] == 13
    assert new[2] >= top - 2048


def test_a_model_of_text_is_refused():
    with pytest.raises(ConfigError, match="dtype"):
        Snapshot.of(record(w=np.array(["a"])))
