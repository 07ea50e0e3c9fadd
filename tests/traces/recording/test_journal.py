"""What is on the disk of a recorder, whatever happens to it."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest

from fedstale.errors import ResumeError, TraceError
from fedstale.traces.recording import journal as journals
from fedstale.traces.recording.journal import FRAME_BYTES, Journal, Run
from fedstale.traces.recording.monitor import Reading

ABOUT = Run(device_id="phone", interval_s=60.0, utc_offset_s=3600.0)
ROOM = 10**6


def append(folder, instants, *, about=ABOUT, max_bytes=ROOM):
    with Journal(folder, about, max_bytes=max_bytes) as journal:
        for instant in instants:
            journal.append(Reading(instant=float(instant)), float(instant) - 1000.0)


def instants_of(folder):
    parts, dropped = journals.read(folder)
    return [float(x) for part in parts for x in part.readings["instant"]], dropped


def size_of(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


def files_of(folder):
    return sorted(folder.glob("*.log"))


@pytest.fixture
def unsynced(monkeypatch):
    """Write without waiting for the disk, where thousands of readings are written."""
    monkeypatch.setattr("os.fsync", lambda handle: None)


def test_a_reading_comes_back_as_it_was(tmp_path):
    full = Reading(
        instant=1.7e9 + 0.25,
        processor_left=0.5,
        received_bit_per_s=1e6,
        sent_bit_per_s=2e5,
        battery=0.75,
        charging=True,
        online=False,
    )
    with Journal(tmp_path / "j", ABOUT, max_bytes=ROOM) as journal:
        journal.append(full, 12.5)
        journal.append(Reading(instant=1.7e9 + 60), 72.5)
    ((part,), dropped) = journals.read(tmp_path / "j")
    assert part.about == ABOUT
    assert dropped == {}
    assert part.readings[0].item() == (12.5, 1.7e9 + 0.25, 0.5, 1e6, 2e5, 0.75, 1.0, 0.0)
    assert part.readings[1].item()[:2] == (72.5, 1.7e9 + 60)
    assert all(math.isnan(x) for x in part.readings[1].item()[2:])


def test_every_reading_is_synced_to_the_disk_before_append_returns(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("os.fsync", lambda handle: synced.append(os.fstat(handle).st_size))
    with Journal(tmp_path / "j", ABOUT, max_bytes=ROOM) as journal:
        for k in range(3):
            journal.append(Reading(instant=float(k)), float(k))
            (path,) = files_of(tmp_path / "j")
            assert synced[-1] == path.stat().st_size
    assert len(synced) >= 4


def test_a_new_start_goes_on_as_another_run(tmp_path):
    append(tmp_path / "j", [100, 160])
    append(tmp_path / "j", [500])
    parts, _ = journals.read(tmp_path / "j")
    assert [part.about.run for part in parts] == [0, 1]
    assert instants_of(tmp_path / "j") == ([100, 160, 500], {})


def test_every_hour_has_a_file_of_its_own(tmp_path):
    append(tmp_path / "j", [3500, 3590, 3600, 7199, 7200])
    parts, _ = journals.read(tmp_path / "j")
    assert [part.readings.size for part in parts] == [2, 2, 1]
    assert {part.about.run for part in parts} == {0}


def test_order_is_that_of_reading_when_the_clock_goes_back(tmp_path):
    append(tmp_path / "j", [7300, 7400, 100, 200, 7500])
    assert instants_of(tmp_path / "j") == ([7300, 7400, 100, 200, 7500], {})


def test_a_full_journal_drops_its_oldest_hours_and_stays_within_the_bound(tmp_path, unsynced):
    bound = 20_000
    with Journal(tmp_path / "j", ABOUT, max_bytes=bound) as journal:
        for k in range(60 * 24):
            journal.append(Reading(instant=60.0 * k), 60.0 * k)
            if k % 50 == 0:
                assert size_of(tmp_path / "j") <= bound
    kept, dropped = instants_of(tmp_path / "j")
    assert dropped == {}
    assert kept == [60.0 * k for k in range(60 * 24 - len(kept), 60 * 24)]
    assert kept[0] % 3600 == 0, "whole hours are dropped"
    assert size_of(tmp_path / "j") > bound / 2


def test_a_clock_that_stands_still_does_not_break_the_bound(tmp_path, unsynced):
    bound = 20_000
    append(tmp_path / "j", [0.0] * 1000, max_bytes=bound)
    assert size_of(tmp_path / "j") <= bound


def test_a_bound_below_two_hours_is_refused(tmp_path):
    with pytest.raises(TraceError, match=r"max_bytes = 1000: expected at least \d+"):
        Journal(tmp_path / "j", ABOUT, max_bytes=1000)


def test_the_journal_of_another_device_is_refused(tmp_path):
    append(tmp_path / "j", [100])
    other = Run(device_id="tablet", interval_s=60.0, utc_offset_s=0.0)
    with pytest.raises(ResumeError, match="a journal of device 'phone', not of 'tablet'"):
        Journal(tmp_path / "j", other, max_bytes=ROOM)
    append(tmp_path / "j", [200])


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no flock")
def test_two_recorders_cannot_write_one_journal(tmp_path):
    with (
        Journal(tmp_path / "j", ABOUT, max_bytes=ROOM),
        pytest.raises(ResumeError, match="another recorder"),
    ):
        Journal(tmp_path / "j", ABOUT, max_bytes=ROOM)


@pytest.mark.parametrize("cut", range(1, FRAME_BYTES))
def test_a_torn_last_reading_costs_only_itself(tmp_path, cut):
    append(tmp_path / "j", [100, 160, 220])
    (path,) = files_of(tmp_path / "j")
    path.write_bytes(path.read_bytes()[:-cut])
    assert instants_of(tmp_path / "j") == ([100, 160], {"dropped: damaged reading": 1})


def test_damage_anywhere_costs_what_it_hit_and_never_changes_the_rest(tmp_path):
    whole = [60.0 * k for k in range(20)]
    append(tmp_path / "j", whole)
    (path,) = files_of(tmp_path / "j")
    content = path.read_bytes()
    body = len(content) - 20 * FRAME_BYTES
    rng = np.random.default_rng(0)
    for _ in range(200):
        at = int(rng.integers(body, len(content)))
        damaged = bytearray(content)
        damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        hit = (at - body) // FRAME_BYTES
        expected = [x for k, x in enumerate(whole) if k != hit]
        assert instants_of(tmp_path / "j") == (expected, {"dropped: damaged reading": 1})


def test_bytes_that_went_missing_do_not_hide_what_follows(tmp_path):
    append(tmp_path / "j", range(0, 600, 60))
    (path,) = files_of(tmp_path / "j")
    content = path.read_bytes()
    middle = len(content) - 5 * FRAME_BYTES + 7
    path.write_bytes(content[:middle] + content[middle + 13 :])
    kept, dropped = instants_of(tmp_path / "j")
    assert kept == [0, 60, 120, 180, 240, 360, 420, 480, 540]
    assert dropped == {"dropped: damaged reading": 1}


def test_a_file_without_a_header_is_left_out_and_counted(tmp_path):
    append(tmp_path / "j", [100, 4000])
    first, _ = files_of(tmp_path / "j")
    first.write_bytes(b"\0" * 300)
    assert instants_of(tmp_path / "j") == ([4000], {"dropped: file without a header": 1})
    append(tmp_path / "j", [9000])
    assert instants_of(tmp_path / "j")[0] == [4000, 9000]


def test_a_journal_with_nothing_readable_is_one_clear_error(tmp_path):
    with pytest.raises(TraceError, match="no such journal"):
        journals.read(tmp_path / "j")
    append(tmp_path / "j", [])
    with pytest.raises(TraceError, match="no readable reading"):
        journals.read(tmp_path / "j")


def test_a_disk_that_fails_is_an_error_and_keeps_what_was_there(tmp_path):
    with Journal(tmp_path / "j", ABOUT, max_bytes=ROOM) as journal:
        journal.append(Reading(instant=100.0), 0.0)
        opened = journal._file
        opened.write(b"half a frame")

        class Full:
            def write(self, frame):
                raise OSError(28, "No space left on device")

            def close(self):
                opened.close()

        journal._file = Full()
        with pytest.raises(TraceError, match=r"No space left on device.*is kept"):
            journal.append(Reading(instant=160.0), 60.0)
        journal.append(Reading(instant=220.0), 120.0)
    assert instants_of(tmp_path / "j") == ([100, 220], {"dropped: damaged reading": 1})


# One process imports once and then kills children: a start of Python for each would take seconds.
KILLER = """
import os, random, signal, sys, time
from pathlib import Path
from fedstale.traces.recording.journal import Run
from fedstale.traces.recording.journal import Journal
from fedstale.traces.recording.monitor import Reading

folder, rng = Path(sys.argv[1]), random.Random(7)
about = Run(device_id="phone", interval_s=1.0, utc_offset_s=0.0)
for turn in range(20):
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        with Journal(folder, about, max_bytes=10**8) as journal:
            for k in range(10**7):
                journal.append(Reading(instant=turn * 1e6 + k), float(k))
                os.write(tell, k.to_bytes(4, "little"))
    os.close(tell)
    first = os.read(told, 4)
    time.sleep(rng.random() * 0.03)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    said = first
    while more := os.read(told, 65536):
        said += more
    print(len(said) // 4)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has neither fork nor SIGKILL")
def test_a_recorder_killed_twenty_times_loses_nothing_that_it_had_said_was_on_the_disk(tmp_path):
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLER, str(tmp_path / "j")],
        capture_output=True,
        text=True,
        check=True,
        env={"OPENBLAS_NUM_THREADS": "1", "PATH": ""},
    )
    said = [int(line) for line in run.stdout.split()]
    assert len(said) == 20
    parts, dropped = journals.read(tmp_path / "j")
    assert dropped.get("dropped: damaged reading", 0) <= 20
    for turn in range(20):
        kept = np.concatenate([p.readings["instant"] for p in parts if p.about.run == turn])
        assert kept.tolist() == [turn * 1e6 + k for k in range(kept.size)]
        # One more than was said may be there: killed after the disk and before the word.
        assert said[turn] <= kept.size <= said[turn] + 1
