"""Checkpoints: whole files or none, and runs that go on as if they had never stopped."""

import errno
import fcntl
import os
import re
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import MetricRecord
from flwr.app.error import Error
from hypothesis import given, settings
from hypothesis import strategies as st
from keeping_grid import KeepingGrid, KilledError
from packed_updates import packed
from places import ROOT
from safetensors import SafetensorError
from safetensors.numpy import load
from virtual_grid import VirtualGrid, adder, identity, record

from fedstale.errors import ConfigError, ResumeError
from fedstale.strategies import Checkpoints, FedBuff, StaleStrategy, read_checkpoint
from fedstale.strategies.pace import AdaSync, Pace, Ramp
from fedstale.strategies.schedule import Schedule, k_async, k_batch_async, semi_synchronous
from fedstale.strategies.selection import Oort, Random
from fedstale.strategies.server import checkpoint
from fedstale.strategies.server.checkpoint import unpacked
from fedstale.strategies.server_optimizer import Adam, AMSGrad, DelayAdaptive, Momentum
from fedstale.strategies.weighting import CachedUpdates, DirectionalGap, Gap, RelevanceAware


@pytest.fixture(autouse=True)
def _identity():
    with identity():
        yield


def test_the_page_of_formats_names_the_one_that_is_written():
    page = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    (written,) = re.findall(rb'"format\\": (\d+)', packed({}))
    assert f"JSON with `format` ({int(written)})" in page


def fleet(n=7):
    """Nodes with delays of their own that now and then fail or never answer."""
    calls = dict.fromkeys(range(10, 10 + n), 0)

    def node(key):
        slow = adder(0.1 * key, 1.0 + key % 4, examples=key, train_loss=1.0 / key)

        def answer(message, grid):
            calls[key] += 1
            if calls[key] % 5 == 3:
                return 1.5, Error(0, "crashed")
            if calls[key] % 7 == 6:
                return 0.0, None
            return slow(message, grid)

        return answer

    return {key: node(key) for key in calls}


class Counting(Pace):
    """Goes by how often it was asked, and so notices if it is asked again for the same step."""

    saved = ("n_asked",)

    def __init__(self):
        self.n_asked = 0

    def numbers(self, at):
        self.n_asked += 1
        return 2 + self.n_asked % 4, 1 + self.n_asked % 2


STRATEGIES = {
    "deviation": lambda: StaleStrategy(
        schedule=k_batch_async(concurrency=6, buffer_size=4), weighting=RelevanceAware()
    ),
    "deviation, deadline": lambda: StaleStrategy(
        schedule=semi_synchronous(4, 2.5), weighting=RelevanceAware(), normalise="weights"
    ),
    "memory, delay-adaptive": lambda: StaleStrategy(
        schedule=k_batch_async(concurrency=5, buffer_size=3),
        weighting=CachedUpdates(0.5, then=RelevanceAware(), most_clients=4),
        server_optimizer=DelayAdaptive(AMSGrad(0.1)),
    ),
    "gap, momentum": lambda: StaleStrategy(
        schedule=k_batch_async(concurrency=5, buffer_size=2),
        weighting=Gap(),
        server_optimizer=Momentum(0.5, beta=0.9),
        min_evaluate_nodes=2,
    ),
    "directional, Adam, Oort": lambda: StaleStrategy(
        selector=Oort(),
        schedule=k_batch_async(concurrency=4, buffer_size=3),
        weighting=DirectionalGap(),
        server_optimizer=Adam(0.1),
    ),
    "deadline": lambda: StaleStrategy(schedule=semi_synchronous(4, 2.5), selector=Random()),
    "sync, cancelled": lambda: StaleStrategy(schedule=Schedule(concurrency=6, buffer_size=4)),
    "adasync": lambda: StaleStrategy(schedule=k_batch_async(6, 1), pace=AdaSync(4)),
    "a pace with a state": lambda: StaleStrategy(schedule=k_async(5, 2), pace=Counting()),
    "ramp": lambda: StaleStrategy(schedule=k_batch_async(6, 3), pace=Ramp(3, 2)),
}
MODEL = {"w": np.zeros(3, np.float32), "b": np.zeros((2, 2)), "n": np.zeros(1, np.int64)}


def outcome(grid, result):
    """Everything that a run shows."""
    return (
        [(v, {k: a.numpy().tolist() for k, a in arrays.items()}) for v, arrays in grid.models],
        grid.merged,
        grid.refused,
        grid.metrics,
        [(at, m.metadata.dst_node_id, m.metadata.group_id) for at, m in grid.sent],
        {v: dict(m) for v, m in result.train_metrics_clientapp.items()},
        {v: dict(m) for v, m in result.evaluate_metrics_clientapp.items()},
        {v: dict(m) for v, m in result.evaluate_metrics_serverapp.items()},
    )


def run(name, grid):
    return STRATEGIES[name]().start(
        grid,
        record(**MODEL),
        num_rounds=12,
        timeout=20.0,
        evaluate_fn=lambda v, arrays: MetricRecord({"sum": float(arrays["w"].numpy().sum())}),
    )


@pytest.mark.parametrize("die_at", [1, 4, 11])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_goes_on_as_if_it_had_never_stopped(name, die_at):
    whole = KeepingGrid(fleet())
    expected = outcome(whole, run(name, whole))
    grid = KeepingGrid(fleet(), die_at=die_at)
    with pytest.raises(KilledError):
        run(name, grid)
    grid.die_at = None
    assert outcome(grid, run(name, grid)) == expected


def test_on_real_devices_a_new_run_goes_on_and_lost_jobs_count_for_nothing(tmp_path):
    def strategy(**options):
        return StaleStrategy(schedule=k_batch_async(4, 2), weighting=Gap(), **options)

    first = VirtualGrid(fleet())
    strategy(checkpoints=tmp_path).start(first, record(**MODEL), num_rounds=5, timeout=20.0)
    received = len(read_checkpoint(tmp_path)["buffer"]["updates"])
    later = VirtualGrid(fleet())
    later.time = 1e6
    result = strategy(checkpoints=Checkpoints(tmp_path, every=3), resume=tmp_path).start(
        later, record(**MODEL), num_rounds=9, timeout=20.0
    )
    assert [version for version, _ in later.models] == [6, 7, 8, 9]
    assert sorted(result.train_metrics_clientapp) == list(range(1, 10))
    # What the earlier run had received for its next merge goes into it; all else is of this run.
    assert sum(facts["base_version"] < 5 for _, facts in later.merged) == received == 1
    assert len(later.merged) == 2 * 4
    assert later.sent[0][0] == 1e6
    at_5, at_6 = (m["w"].numpy().sum() for m in (first.models[-1][1], later.models[0][1]))
    assert at_6 > at_5 > 0


def test_a_grid_that_keeps_itself_can_go_on_from_a_run_elsewhere(tmp_path):
    def strategy(**options):
        return StaleStrategy(schedule=k_batch_async(4, 2), **options)

    strategy(checkpoints=tmp_path).start(VirtualGrid(fleet()), record(**MODEL), 5, timeout=20.0)
    assert read_checkpoint(tmp_path)["jobs"]["open"]
    later = KeepingGrid(fleet())
    strategy(resume=tmp_path).start(later, record(**MODEL), 6, timeout=20.0)
    assert [version for version, _ in later.models] == [6]
    # Nobody waits for the jobs of the run before, which this grid does not know.
    assert later.time < 20.0


def test_a_checkpoint_of_another_model_or_of_other_parts_is_refused(tmp_path):
    StaleStrategy(checkpoints=tmp_path).start(VirtualGrid(fleet()), record(**MODEL), 2, 20.0)
    other = record(**{**MODEL, "b": np.zeros((2, 3))})
    with pytest.raises(ResumeError, match="another model: 'b' float64"):
        StaleStrategy(resume=tmp_path).start(VirtualGrid(fleet()), other, 4, 20.0)
    paced = StaleStrategy(resume=tmp_path, schedule=k_async(5, 2), pace=Ramp(5))
    with pytest.raises(ResumeError, match="with pace None, and this run has Ramp"):
        paced.start(VirtualGrid(fleet()), record(**MODEL), 4, 20.0)
    with pytest.raises(ResumeError, match="weighting ByAge, and this run has Gap"):
        StaleStrategy(resume=tmp_path, weighting=Gap()).start(
            VirtualGrid(fleet()), record(**MODEL), 4, 20.0
        )
    with pytest.raises(ResumeError, match="cannot be read: No such file"):
        StaleStrategy(resume=tmp_path / "x").start(VirtualGrid({}), record(**MODEL), 4)


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(
        [np.arange(3), np.float32(2.5), np.zeros((0, 2)), np.array(7, np.uint64), np.ones(2, bool)]
    ),
)
states = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=4,
)


@settings(max_examples=100, deadline=None)
@given(states)
def test_a_state_comes_back_as_it_was(state):
    np.testing.assert_equal(unpacked(packed(state)), state)


WHOLE = packed({"w": np.arange(50.0), "text": "x", "n": 2**70})


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
def test_a_damaged_checkpoint_is_one_error(where, flip):
    damaged = bytearray(WHOLE)
    damaged[where] ^= flip
    try:
        state = unpacked(bytes(damaged))
    except ResumeError:
        return
    # The header is padded with spaces, and any other white space is as good.
    assert chr(WHOLE[where]) == " "
    np.testing.assert_equal(state, unpacked(WHOLE))


@given(st.integers(0, len(WHOLE) - 1))
def test_a_checkpoint_cut_short_is_one_error(length):
    with pytest.raises(ResumeError):
        unpacked(WHOLE[:length])


def test_the_last_two_are_kept_and_the_one_before_serves_if_the_last_is_damaged(tmp_path):
    checkpoints = Checkpoints(tmp_path / "new" / "folder", every=2)
    for version in range(1, 9):
        if checkpoints.is_due(version):
            checkpoints.keep(version, lambda version=version: {"version": version})
    files = sorted(checkpoints.folder.iterdir())
    assert [file.name for file in files] == ["000000006.checkpoint", "000000008.checkpoint"]
    files[-1].write_bytes(files[-1].read_bytes()[:-1] + b"x")
    assert read_checkpoint(checkpoints.folder) == {"version": 6}
    with pytest.raises(ResumeError, match=r"000000008.checkpoint"):
        read_checkpoint(files[-1])


def test_a_folder_that_another_holds_is_neither_written_into_nor_gone_on_from(tmp_path):
    folder = tmp_path / "kept"
    FedBuff(2, 1, checkpoints=folder).start(VirtualGrid(fleet()), record(w=MODEL["w"]), 2)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    other = os.open(copy, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match=r"checkpoints = .* is in use by a run that goes on in"):
        Checkpoints(copy)
    for place in (copy, max(copy.iterdir())):
        with pytest.raises(ConfigError, match=rf"resume = '{copy}' is in use by a run") as refused:
            FedBuff(2, 1, resume=place).start(VirtualGrid(fleet()), record(w=MODEL["w"]), 4)
    if sys.platform == "linux":
        assert f"in process {os.getpid()} of {os.uname().nodename}: wait" in str(refused.value)
    os.close(other)
    Checkpoints(copy)
    # Whoever holds it may do so again.
    assert repr(Checkpoints(copy, every=2)) == f"Checkpoints({str(copy)!r}, every=2)"
    grid = VirtualGrid(fleet())
    FedBuff(2, 1, resume=copy).start(grid, record(w=MODEL["w"]), 4)
    assert [version for version, _ in grid.models] == [3, 4]


def test_the_same_settings_start_a_run_and_take_it_up(tmp_path):
    def versions(n, **places):
        grid = VirtualGrid(fleet())
        FedBuff(2, 1, **places).start(grid, record(**MODEL), n, timeout=20.0)
        return [version for version, _ in grid.models]

    both = {"checkpoints": tmp_path / "own", "resume": tmp_path / "own"}
    assert [versions(2, **both), versions(5, **both)] == [[1, 2], [3, 4, 5]]
    (tmp_path / "empty").mkdir(mode=0o700)
    with pytest.raises(ResumeError, match="holds no whole checkpoint"):
        versions(2, resume=tmp_path / "empty")
    with pytest.raises(ResumeError, match="holds no whole checkpoint"):
        versions(2, checkpoints=tmp_path / "own", resume=tmp_path / "empty")
    for file in (tmp_path / "own").iterdir():
        file.write_bytes(b"torn")
    with pytest.raises(ResumeError, match="holds no whole checkpoint"):
        versions(2, **both)


def test_a_run_that_goes_on_by_another_name_is_refused_and_other_settings_are_said(
    tmp_path, caplog
):
    def start(strategy, versions):
        strategy.start(VirtualGrid(fleet()), record(**MODEL), versions, timeout=20.0)

    start(FedBuff(4, 2, seed=1, checkpoints=tmp_path), 2)
    with pytest.raises(ResumeError, match="with seed 1, and this run has 2"):
        start(FedBuff(4, 2, seed=2, resume=tmp_path), 4)
    with pytest.raises(ResumeError, match="strategy FedBuff, and this run has StaleStrategy"):
        start(
            StaleStrategy(schedule=k_batch_async(4, 2), seed=1, resume=tmp_path),
            4,
        )
    caplog.clear()
    start(
        FedBuff(
            4,
            2,
            seed=1,
            checkpoints=tmp_path,
            resume=tmp_path,
            schedule=replace(k_batch_async(4, 2), recheck_s=3.0),
        ),
        4,
    )
    assert not caplog.text
    start(FedBuff(4, 3, seed=1, resume=tmp_path), 5)
    assert "written with buffer_size = 2, and this run goes on with 3" in caplog.text


def test_a_run_that_begins_anew_replaces_the_checkpoints_of_an_earlier_one(tmp_path):
    for version in (50, 51):
        Checkpoints(tmp_path).keep(version, lambda: {"run": "earlier"})
    for version in (1, 2):
        Checkpoints(tmp_path).keep(version, lambda: {"run": "new"})
        assert read_checkpoint(tmp_path) == {"run": "new"}
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["000000001.checkpoint", "000000002.checkpoint"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("by_safetensors", [False, True])
def test_a_full_disk_is_waited_for_and_leaves_the_last_good_checkpoint(
    tmp_path, monkeypatch, caplog, number, by_safetensors
):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.keep(1, lambda: {"version": 1})
    (tmp_path / ".000000002.checkpoint.0.part").write_bytes(b"torn")
    waits = []

    def full(*_):
        if by_safetensors:
            raise SafetensorError(f"I/O error: {os.strerror(number)} (os error {number})")
        raise OSError(number, os.strerror(number))

    def waited(seconds):
        waits.append(seconds)
        # Meanwhile nothing else is there to be read.
        assert read_checkpoint(tmp_path) == {"version": 1}
        assert [file.name for file in tmp_path.iterdir()] == ["000000001.checkpoint"]
        if len(waits) == 3:
            patch.undo()

    monkeypatch.setattr(checkpoint.time, "sleep", waited)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*((checkpoint, "save_file") if by_safetensors else (os, "fsync")), full)
        checkpoints.keep(2, lambda: {"version": 2})
    assert read_checkpoint(tmp_path) == {"version": 2}
    full_line, again = [record.getMessage() for record in caplog.records]
    assert full_line.startswith(
        f"no space for checkpoint 000000002.checkpoint in {tmp_path}, where"
    )
    assert os.strerror(number) in full_line
    assert again == "checkpoint 000000002.checkpoint is written, and the run goes on"


def test_a_disk_that_fails_leaves_the_last_good_checkpoint_and_the_run(
    tmp_path, monkeypatch, caplog
):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.keep(1, lambda: {"version": 1})

    def failing(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    checkpoints.keep(2, lambda: {"version": 2})
    assert "Input/output error" in caplog.text
    assert read_checkpoint(tmp_path) == {"version": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["000000001.checkpoint"]


def test_settings_out_of_range_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"Checkpoints\.every"):
        Checkpoints(tmp_path, every=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        Checkpoints(tmp_path / "file" / "folder")


def test_on_real_devices_the_versions_of_lost_jobs_are_left_out(tmp_path):
    strategy = StaleStrategy(schedule=k_batch_async(6, 2), checkpoints=tmp_path)
    strategy.start(VirtualGrid(fleet()), record(**MODEL), num_rounds=6, timeout=20.0)
    state = read_checkpoint(tmp_path)["versions"]
    held = state["held"]
    assert len(held) > 1
    assert [version for version, kept in held.items() if kept["floats"]] == [str(state["version"])]


def test_other_readers_of_safetensors_read_the_arrays():
    state = {"b": np.ones((2, 2), bool), "x": np.arange(3, dtype=np.float16), "n": np.uint64(7)}
    there = load(packed({**state, "empty": np.zeros((0, 2))}))
    kinds = {(array.dtype.name, array.shape) for array in there.values()}
    assert kinds == {("bool", (2, 2)), ("float16", (3,)), ("float64", (0, 2))}
