"""A record goes on with its run: paused, killed, with other settings, in another folder."""

import errno
import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flwr.app import ArrayRecord
from made_record import chained, changed, lines_of, run, written
from virtual_grid import VirtualGrid, adder, identity

from fedstale.contrib.audit import AuditRecord, Probing, verify
from fedstale.contrib.audit import record as writing
from fedstale.contrib.audit.record import RECORD
from fedstale.errors import ConfigError, FedstaleError, ResumeError
from fedstale.runs import DEPLOYED
from fedstale.strategies import Callback, FedBuff
from fedstale.strategies.selection import ExpectedUtility, Oort

pytestmark = pytest.mark.usefixtures("every_version_kept", "no_pages")


def kinds(path):
    return [json.loads(line)["kind"] for line in lines_of(path)]


class Crash(Callback):
    """Loses the run some jobs after it has gone on."""

    def __init__(self, after):
        self.left = after

    def job_sent(self, run, message_id, message):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", [3, 77])
def test_a_simulation_that_goes_on_writes_what_it_would_have(after, recorded, tmp_path):
    selector = Probing(ExpectedUtility(), 0.2)
    run(tmp_path / "run", selector, callbacks=[Crash(after)])
    # Lines that were written after the checkpoint, and the end of a run that goes on.
    assert kinds(tmp_path / "run" / RECORD)[-1] == "end"
    again = run(tmp_path / "run", selector, resume=True)
    expected = (recorded.folder / RECORD).read_bytes()
    assert (again.folder / RECORD).read_bytes() == expected
    assert verify(again).holds


def test_two_ways_on_from_one_checkpoint_are_two_chains_with_one_beginning(tmp_path):
    run(tmp_path / "one", Oort(), until="90s", pause_at="45s")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    one = run(tmp_path / "one", Oort(), until="90s", resume=True)
    two = run(tmp_path / "two", Oort(), until="2m", resume=True)
    first, second = verify(one), verify(two)
    assert first.holds
    assert second.holds
    assert first.head != second.head
    assert not verify(two, head=first.head).holds
    n = len(lines_of(one.folder / RECORD)) - 1
    assert lines_of(two.folder / RECORD)[:n] == lines_of(one.folder / RECORD)[:n]


# On real devices what followed the checkpoint has happened: the lines stay.


class KilledError(Exception):
    """The process dies here."""


def strategy(folder, record, **more):
    stages = [AuditRecord(record)] if record else []
    kept = {"checkpoints": folder, "resume": folder}
    return FedBuff(4, 2, selector=Oort(), **kept, stages=stages, seed=2, **more)


def start(made, *, n=8, rounds=12, die_after=None, order=sorted):
    """Run a strategy on nodes that answer; `die_after` so many jobs."""
    nodes = {
        key: adder(0.1 * (key % 7), 1.0 + key % 4, examples=float(key), train_loss=1.0 / key)
        for key in range(10, 10 + n)
    }
    grid = VirtualGrid(nodes, online=lambda now: order(nodes))
    if die_after is not None:
        push, sent = grid.push_messages, []

        def dying(messages):
            sent.extend(messages := list(messages))
            if len(sent) >= die_after:
                raise KilledError
            return push(messages)

        grid.push_messages = dying
    with identity():
        made.start(grid, ArrayRecord([np.zeros(3)]), rounds, timeout=50.0)
    return grid


def killed(made, after):
    """Start a strategy and kill it: nothing that it would do at its end is done."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(AuditRecord, "_close", lambda self, problem, version: self._file.close())
        with pytest.raises(KilledError):
            start(made, die_after=after)


@pytest.mark.parametrize("after", [9, 14, 20])
def test_a_killed_run_goes_on_in_the_same_file(after, tmp_path):
    path = tmp_path / "r"
    killed(strategy(tmp_path / "kept", path), after)
    before = path.read_bytes()
    (fault,) = verify(path).faults
    assert "is the last one and not the end of a run" in fault
    start(strategy(tmp_path / "kept", path))
    assert path.read_bytes().startswith(before)
    assert kinds(path).count("resumed") == 1
    checked = verify(path)
    assert checked.holds, checked.faults
    assert checked.repeated == checked.picks > 10


def test_other_settings_of_a_run_that_goes_on_are_noted(tmp_path):
    path, kept = tmp_path / "r", {"checkpoints": tmp_path / "kept", "resume": tmp_path / "kept"}
    killed(strategy(tmp_path / "kept", path), 14)
    start(FedBuff(3, 2, selector=Oort(), **kept, stages=[AuditRecord(path)], seed=2))
    checked = verify(path)
    assert checked.holds, checked.faults
    assert any("other settings" in note for note in checked.notes)


def test_a_line_that_the_crash_tore_off_is_removed(tmp_path):
    path = tmp_path / "r"
    killed(strategy(tmp_path / "kept", path), 14)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"n":99,"before":"ab')
    start(strategy(tmp_path / "kept", path))
    assert path.read_bytes().startswith(whole + b'{"n":')
    assert verify(path).holds


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew_in_the_chain(tmp_path):
    path = tmp_path / "r"
    killed(strategy(tmp_path / "kept", path), 2)
    start(strategy(tmp_path / "kept", path))
    assert kinds(path).count("start") == 2
    checked = verify(path)
    assert checked.holds
    assert "a strategy begins anew" in checked.notes[0]


def test_a_run_that_was_killed_before_its_first_line_begins_with_it(tmp_path):
    path = tmp_path / "r"
    path.write_bytes(b'{"n":1,"before"')
    start(strategy(tmp_path / "kept", path))
    assert verify(path).holds


def test_jobs_that_a_killed_server_had_not_logged_are_not_asked_for(tmp_path):
    run = tmp_path / "run"
    killed(strategy(tmp_path / "kept", run / RECORD), 14)
    sent = start(strategy(tmp_path / "kept", run / RECORD)).sent
    (run / "summary.json").write_text(json.dumps({"executor": DEPLOYED}))
    for logged, holds in ((sent, True), (sent[:-1], False)):
        nodes = [message.metadata.dst_node_id for _, message in logged]
        columns = {"node_id": nodes, "kind": ["train"] * len(nodes), "sent_at": [0.0] * len(nodes)}
        pq.write_table(pa.table(columns), run / "events.parquet")
        assert verify(run).holds == holds


def test_a_run_in_another_folder_goes_on_with_the_chain(tmp_path):
    first, second = tmp_path / "r1", tmp_path / "r2"
    killed(strategy(tmp_path / "kept", first), 14)
    start(strategy(tmp_path / "kept", second))
    assert kinds(second)[0] == "resumed"
    checked = verify([first, second])
    assert checked.holds, checked.faults
    assert checked.repeated == checked.picks
    (fault,) = verify(second).faults
    assert "of another record" in fault
    assert "expected the folder of that before this one" in fault


def test_parts_in_the_wrong_order_and_two_runs_are_no_chain(tmp_path):
    first, second, other = tmp_path / "r1", tmp_path / "r2", tmp_path / "r3"
    killed(strategy(tmp_path / "kept", first), 14)
    start(strategy(tmp_path / "kept", second))
    start(FedBuff(4, 2, stages=[AuditRecord(other)]))
    assert "expected the folder of that before" in verify([second, first]).faults[0]
    (fault,) = verify([first, other]).faults
    assert fault == f"{other}: it begins a chain of its own: verify it alone"


def test_a_line_that_goes_back_to_no_line_is_named(tmp_path):
    path = tmp_path / "r"
    killed(strategy(tmp_path / "kept", path), 14)
    start(strategy(tmp_path / "kept", path))
    lines = lines_of(path)
    i = kinds(path).index("resumed")
    for facts in ({"to": 3}, {"head": "ab" * 32}, {"to": None}, {"head": 5}):
        other = [*lines[:i], changed(lines[i], **facts), *lines[i + 1 :]]
        checked = verify(written(tmp_path / "other", chained(other)))
        assert checked.faults[0].startswith(f"line {i + 1}: it goes back to line ")


def test_a_run_does_not_go_on_with_a_record_that_was_changed(tmp_path):
    path = tmp_path / "r"
    killed(strategy(tmp_path / "kept", path), 14)
    lines = lines_of(path)
    written(path, lines[:3])
    with pytest.raises(ResumeError, match=r"has 3 lines, and the run has written \d+: it was cut"):
        start(strategy(tmp_path / "kept", path))
    path.write_bytes(b"nonsense\n")
    with pytest.raises(ResumeError, match="its last line cannot be read"):
        start(strategy(tmp_path / "kept", path))


def test_a_simulation_does_not_go_on_with_a_record_that_was_changed(tmp_path):
    found = run(tmp_path / "run", Oort(), until="2m", pause_at="1m")
    path = found.folder / RECORD
    written(path, lines_of(path)[1:])
    again = run(tmp_path / "run", Oort(), until="2m", resume=True)
    assert again.status == "failed"
    assert "is not the record beside which the checkpoint was written" in again.reason


def test_a_run_goes_on_without_the_record_that_it_had_and_says_so(tmp_path, caplog):
    killed(strategy(tmp_path / "kept", tmp_path / "r"), 14)
    start(strategy(tmp_path / "kept", False))
    assert "the run goes on without the stage AuditRecord that it had" in caplog.text


def test_a_record_begins_with_its_run(tmp_path):
    with pytest.raises(KilledError):
        start(strategy(tmp_path / "kept", False), die_after=14)
    with pytest.raises(ResumeError, match="checkpoint is of a run without one"):
        start(strategy(tmp_path / "kept", tmp_path / "r"))


def test_a_file_that_exists_is_not_overwritten(tmp_path):
    path = tmp_path / "r"
    start(FedBuff(4, 2, stages=[AuditRecord(path)]), rounds=2)
    with pytest.raises(ConfigError, match=r"exists: expected a new file, or resume=\.\.\."):
        start(FedBuff(4, 2, stages=[AuditRecord(path)]), rounds=2)


def test_a_record_in_the_folder_of_the_run_needs_one():
    with pytest.raises(ConfigError, match="path = None: this run has no folder"):
        start(FedBuff(4, 2, stages=[AuditRecord()]))


@pytest.mark.parametrize("path", ["", 1, True])
def test_what_is_no_file_is_refused(path):
    with pytest.raises(ConfigError, match=r"AuditRecord.path = .*expected a .*, or None"):
        AuditRecord(path)


def test_a_strategy_that_is_started_twice_writes_both_runs(tmp_path):
    made = FedBuff(4, 2, selector=Oort(), stages=[AuditRecord(tmp_path / "r")])
    nodes = {key: adder(0.1, 1.0 + key % 4, examples=1.0) for key in range(10, 18)}
    grid = VirtualGrid(nodes)
    with identity():
        for _ in range(2):
            made.start(grid, ArrayRecord([np.zeros(3)]), 5)
            grid.replies.clear()
            grid.heap.clear()
    assert kinds(tmp_path / "r").count("start") == 2
    checked = verify(tmp_path / "r")
    assert checked.holds, checked.faults


def test_nodes_that_a_grid_gives_in_any_order_are_picked_from_in_ascending_order(tmp_path):
    orders = np.random.default_rng(0)
    for name, order in (("a", sorted), ("b", lambda nodes: orders.permutation(list(nodes)))):
        start(FedBuff(4, 2, selector=Oort(), stages=[AuditRecord(tmp_path / name)]), order=order)
        assert verify(tmp_path / name).holds
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_jobs_that_could_not_be_sent_are_in_the_record(tmp_path):
    made = FedBuff(4, 2, selector=Oort(), stages=[AuditRecord(tmp_path / "r")])
    nodes = {key: adder(0.1, 1.0 + key % 4, examples=1.0) for key in range(10, 18)}
    grid = VirtualGrid(nodes)
    push = grid.push_messages
    grid.push_messages = lambda messages: [
        None if i == 1 else next(iter(push([message]))) for i, message in enumerate(messages)
    ]
    with identity():
        made.start(grid, ArrayRecord([np.zeros(3)]), 8)
    assert any("unsent" in json.loads(line) for line in lines_of(tmp_path / "r"))
    checked = verify(tmp_path / "r")
    assert checked.holds, checked.faults


def test_a_run_whose_record_cannot_be_written_ends(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writing.os, "fsync", full)
    made = strategy(tmp_path / "kept", tmp_path / "r")
    with pytest.raises(FedstaleError, match="cannot be written: No space left on device; the run"):
        start(made)
