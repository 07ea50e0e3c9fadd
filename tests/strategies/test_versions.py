"""Model versions are kept once, for exactly as long as a job needs them, and within a limit."""

import errno
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_grid import VirtualGrid, adder, identity, record

from fedstale.errors import ConfigError, FedstaleError
from fedstale.strategies import Checkpoints, StaleStrategy, read_checkpoint
from fedstale.strategies.schedule import k_batch_async
from fedstale.strategies.server import versions as versions_module
from fedstale.strategies.server.versions import Snapshot, Versions
from fedstale.strategies.weighting import CachedUpdates, DirectionalGap, Gap, RelevanceAware


def n_on_disk(versions):
    return sum(held.on_disk for held in versions._held.values())


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
    snapshot = Snapshot.of(before)
    assert all(array.flags.c_contiguous for array in snapshot.floats.values())
    after = snapshot.record()
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


def mixed(value):
    return Snapshot.of(
        record(
            w=np.full((3, 5), float(value)), half=np.float16([value]), n=np.array(value, np.int64)
        )
    )


@settings(deadline=None)
@given(st.integers(0, 6), st.lists(st.sampled_from(["hold", "end", "advance"]), max_size=40))
def test_past_a_limit_the_oldest_versions_are_on_disk_and_read_the_same(kept, moves):
    each = mixed(0).n_bytes
    versions, held = Versions(mixed(0), memory_bytes=kept * each), []
    for move in moves:
        if move == "hold":
            versions.hold(versions.version)
            held.append(versions.version)
        elif move == "end" and held:
            versions.release(held.pop(0))
        elif move == "advance":
            versions.advance(mixed(versions.version + 1))
        assert len(versions) - n_on_disk(versions) <= max(kept, 1)
        for version in {*held, versions.version}:
            expected, there = mixed(version), versions[version]
            for name in ("w", "half"):
                np.testing.assert_array_equal(there.floats[name], expected.floats[name])
                assert there.floats[name].dtype == expected.floats[name].dtype
            np.testing.assert_array_equal(there.counts["n"], version)
            assert there.floats["w"].flags.owndata or not there.floats["w"].flags.writeable


def unnamed_files():
    """Return how many files without a name this process has open."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += str(link.readlink()).endswith("(deleted)")
    return found


def test_files_of_versions_are_without_a_name_and_go_with_their_version(tmp_path):
    before = unnamed_files()
    versions = Versions(mixed(0), memory_bytes=0, folder=tmp_path)
    for number in range(1, 4):
        versions.hold(versions.version)
        versions.advance(mixed(number))
    assert n_on_disk(versions) == 3
    assert not list(tmp_path.iterdir())
    assert unnamed_files() == before + 3
    for number in range(3):
        versions.release(number)
    assert unnamed_files() == before


def test_a_version_goes_to_disk_once(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(
        versions_module, "stored", lambda model, folder: written.append(model) or model
    )
    versions = Versions(mixed(0), memory_bytes=0, folder=tmp_path)
    for number in range(1, 6):
        versions.hold(versions.version)
        versions.advance(mixed(number))
    assert len(written) == 5


def test_a_full_disk_is_one_error_and_every_version_stays(tmp_path, monkeypatch):
    versions = Versions(mixed(0), memory_bytes=0, folder=tmp_path)
    versions.hold(0)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(versions_module, "stored", full)
    with pytest.raises(FedstaleError, match=r"version 0 of the model .* No space left on device"):
        versions.advance(mixed(1))
    assert versions.current.counts["n"] == 1
    assert versions[0].counts["n"] == 0
    assert not n_on_disk(versions)


def test_a_folder_that_cannot_be_written_to_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match="version_memory_bytes = 1: versions cannot be written"):
        Versions(mixed(0), memory_bytes=1, folder=tmp_path / "none")


def trained(weighting, **options):
    """Return models and weights of a run in which some nodes are always late."""
    nodes = {key: adder(0.1 * key, 1.0 + key**2) for key in range(1, 9)}
    grid = VirtualGrid(nodes)
    strategy = StaleStrategy(
        schedule=k_batch_async(concurrency=8, buffer_size=2), weighting=weighting, **options
    )
    with identity():
        strategy.start(grid, record(w=np.zeros((4, 7), np.float32), n=np.array(0)), 30)
    assert max(facts["staleness"] for _, facts in grid.merged) >= 3
    models = [(v, {k: a.data for k, a in arrays.items()}) for v, arrays in grid.models]
    return models, grid.merged


@pytest.mark.parametrize(
    "weighting", [Gap, DirectionalGap, RelevanceAware, lambda: CachedUpdates(0.5)]
)
@pytest.mark.parametrize("update", ["delta", "model"])
def test_a_limit_changes_no_bit_of_a_run(weighting, update, tmp_path):
    expected = trained(weighting(), update=update)
    kept = Checkpoints(tmp_path, every=7, version_memory_bytes=0)
    assert trained(weighting(), update=update, checkpoints=kept) == expected
    kept = read_checkpoint(tmp_path)["versions"]["held"]
    assert len(kept) > 2


def test_a_run_with_a_limit_goes_on_from_a_checkpoint(tmp_path):
    def strategy(folder=None, resume=None):
        return StaleStrategy(
            schedule=k_batch_async(4, 2),
            weighting=Gap(),
            checkpoints=Checkpoints(folder, version_memory_bytes=0),
            resume=resume,
        )

    nodes = {key: adder(0.1 * key, 1.0 + key**2) for key in range(1, 9)}
    arrays = record(w=np.zeros(3))
    with identity():
        strategy(tmp_path).start(VirtualGrid(nodes), arrays, 5)
        later = VirtualGrid(nodes)
        strategy(resume=tmp_path).start(later, arrays, 8)
    assert [version for version, _ in later.models] == [6, 7, 8]


@pytest.mark.parametrize("limit", [-1, 0.5, True, "1 GB"])
def test_a_limit_is_a_number_of_bytes(limit):
    with pytest.raises(ConfigError, match=r"version_memory_bytes = .*a whole number of bytes"):
        StaleStrategy(checkpoints=Checkpoints(version_memory_bytes=limit))


def test_a_version_lies_in_the_record_that_was_made_of_it():
    arrays = {
        "none": np.zeros((0, 3)),
        "one": np.array(3.0, np.float32),
        "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "swapped": np.arange(3, dtype=">f4"),
        "counts": np.array([True, False]),
    }
    version = Snapshot.of(record(**arrays))
    before = {name: x.copy() for name, x in (version.floats | version.counts).items()}
    sent = version.record(shares=True)
    for name, x in (version.floats | version.counts).items():
        assert (x.dtype, x.shape) == (before[name].dtype, before[name].shape)
        np.testing.assert_array_equal(x, before[name])
    assert not version.counts["counts"].flags.owndata
    assert version.record() == sent


def test_a_version_whose_arrays_are_halves_on_devices_keeps_its_own():
    version = Snapshot.of(record(half=np.ones(3, np.float16), one=np.ones(2)))
    sent = version.record(shares=True)
    assert version.floats["half"].dtype == np.float32
    assert version.record() == sent
