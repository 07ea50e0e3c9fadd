"""What is on the disk of a recorder, whatever happens to it."""

import math
import shutil
import sqlite3
from contextlib import closing
from dataclasses import asdict, fields

import numpy as np
import pytest

from fedstale.errors import ResumeError, TraceError
from fedstale.traces.recording import journal as journals
from fedstale.traces.recording.journal import RECORD, Journal, RecordingRun
from fedstale.traces.recording.monitor import Reading

ABOUT = RecordingRun(device_id="phone", interval_s=60.0, utc_offset_s=3600.0)
ROOM = 10**6


def append(folder, instants, *, about=ABOUT, max_bytes=ROOM):
    with Journal(folder, about, max_bytes=max_bytes) as journal:
        for instant in instants:
            journal.append(Reading(instant=float(instant)), float(instant) - 1000.0)


def instants_of(folder):
    readings, dropped = journals.read(folder)
    return readings["instant"].tolist(), dropped


def size_of(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


def unsynced(journal):
    """Write without waiting for the disk, where thousands of readings are written."""
    journal._database.execute("PRAGMA synchronous = OFF")
    return journal


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
    readings, dropped = journals.read(tmp_path / "j")
    about = readings[[field.name for field in fields(RecordingRun)]]
    assert about.to_dict("records") == [asdict(ABOUT)] * 2
    assert dropped == {}
    first, second = readings[list(RECORD.names)].itertuples(index=False)
    assert first == (12.5, 1.7e9 + 0.25, 0.5, 1e6, 2e5, 0.75, 1.0, 0.0)
    assert second[:2] == (72.5, 1.7e9 + 60)
    assert all(math.isnan(x) for x in second[2:])


def test_every_reading_waits_for_the_disk_and_is_there_when_append_returns(tmp_path):
    with Journal(tmp_path / "j", ABOUT, max_bytes=ROOM) as journal:
        settings = ("journal_mode", "synchronous", "locking_mode")
        found = [journal._database.execute(f"PRAGMA {name}").fetchone()[0] for name in settings]
        # 2 is FULL: each commit syncs the write-ahead log.
        assert found == ["wal", 2, "normal"]
        for k in range(30):
            journal.append(Reading(instant=float(k)), float(k))
            # What a power cut leaves: the files as they are, without the process.
            copy = shutil.copytree(tmp_path / "j", tmp_path / f"copy-{k}")
            assert instants_of(copy) == ([float(i) for i in range(k + 1)], {})


def test_a_full_journal_drops_its_oldest_readings_and_stays_within_the_bound(tmp_path):
    bound = 300_000
    with unsynced(Journal(tmp_path / "j", ABOUT, max_bytes=bound)) as journal:
        for k in range(3000):
            journal.append(Reading(instant=60.0 * k), 60.0 * k)
            if k % 50 == 0:
                assert size_of(tmp_path / "j") <= bound
    kept, dropped = instants_of(tmp_path / "j")
    assert dropped == {}
    assert kept == [60.0 * k for k in range(3000 - len(kept), 3000)]
    assert 120 <= len(kept) < 3000, "two hours are kept"


def test_a_bound_that_was_lowered_holds_from_the_next_reading_on(tmp_path):
    with unsynced(Journal(tmp_path / "j", ABOUT, max_bytes=10**7)) as journal:
        for k in range(20_000):
            journal.append(Reading(instant=60.0 * k), 60.0 * k)
    assert size_of(tmp_path / "j") > 10**6
    append(tmp_path / "j", [60.0 * 20_000], max_bytes=300_000)
    assert size_of(tmp_path / "j") <= 300_000
    assert instants_of(tmp_path / "j")[0][-1] == 60.0 * 20_000


def test_a_bound_below_two_hours_is_rejected(tmp_path):
    with pytest.raises(TraceError, match=r"max_bytes = 1000: expected at least \d+"):
        Journal(tmp_path / "j", ABOUT, max_bytes=1000)


def test_the_journal_of_another_device_is_rejected(tmp_path):
    append(tmp_path / "j", [100])
    other = RecordingRun(device_id="tablet", interval_s=60.0, utc_offset_s=0.0)
    with pytest.raises(ResumeError, match="a journal of device 'phone', not of 'tablet'"):
        Journal(tmp_path / "j", other, max_bytes=ROOM)
    # The lock has ended with the recorder that could not begin.
    append(tmp_path / "j", [200])


def test_two_recorders_cannot_write_one_journal(tmp_path):
    with (
        Journal(tmp_path / "j", ABOUT, max_bytes=ROOM),
        pytest.raises(ResumeError, match="another recorder"),
    ):
        Journal(tmp_path / "j", ABOUT, max_bytes=ROOM)
    append(tmp_path / "j", [100])


def test_a_reader_that_is_stopped_while_it_reads_breaks_neither_recorder_nor_bound(tmp_path):
    append(tmp_path / "j", range(50))
    (first,) = journals.files_of(tmp_path / "j")
    with closing(sqlite3.connect(first, isolation_level=None)) as stopped:
        stopped.execute("BEGIN")
        assert stopped.execute("SELECT count(*) FROM readings").fetchone() == (50,)
        with unsynced(Journal(tmp_path / "j", ABOUT, max_bytes=10**6)) as journal:
            for k in range(50, 1000):
                journal.append(Reading(instant=float(k)), float(k))
                assert size_of(tmp_path / "j") <= 10**6
        assert len(journals.files_of(tmp_path / "j")) == 2
        assert instants_of(tmp_path / "j") == ([float(k) for k in range(1000)], {})
    readings, _ = journals.read(tmp_path / "j")
    assert readings["run"].tolist() == [0] * 50 + [1] * 950


def test_what_is_read_is_bounded_at_the_shortest_interval(tmp_path, monkeypatch):
    monkeypatch.setattr(journals, "MOST_READ", 30)
    append(tmp_path / "j", range(100))
    readings, _ = journals.read(tmp_path / "j", span_s=50 * 60.0)
    assert readings["instant"].tolist() == [float(k) for k in range(70, 100)]


@pytest.mark.parametrize("cut", [1, 7, 24, 25, 100, 2000, 4095, 4096, 4119])
def test_a_torn_last_reading_costs_only_itself(tmp_path, cut):
    with Journal(tmp_path / "j", ABOUT, max_bytes=ROOM) as journal:
        for instant in (100, 160, 220):
            journal.append(Reading(instant=float(instant)), 0.0)
        copy = shutil.copytree(tmp_path / "j", tmp_path / "copy")
    (log,) = copy.glob("*-wal")
    log.write_bytes(log.read_bytes()[:-cut])
    assert instants_of(copy) == ([100, 160], {})
    append(copy, [500])
    assert instants_of(copy) == ([100, 160, 500], {})


@pytest.fixture(scope="module")
def month(tmp_path_factory):
    """Return a journal of 3000 readings, with three runs."""
    folder = tmp_path_factory.mktemp("month") / "j"
    for run in range(3):
        with unsynced(Journal(folder, ABOUT, max_bytes=10**7)) as journal:
            for k in range(1000 * run, 1000 * (run + 1)):
                journal.append(Reading(instant=60.0 * k), 60.0 * k)
    return folder


def damaged(month, folder, damage):
    copy = shutil.copytree(month, folder, dirs_exist_ok=True)
    (path,) = journals.files_of(copy)
    path.write_bytes(damage(path.read_bytes()))
    return copy


MONTH = [60.0 * k for k in range(3000)]
PAGE = 4096


def test_damage_anywhere_costs_what_it_hit_and_never_changes_the_rest(tmp_path, month):
    rng = np.random.default_rng(0)
    lost = []
    for _ in range(60):

        def damage(whole):
            # The first page says what the others are; see the next test.
            at = int(rng.integers(PAGE, len(whole)))
            bit = 1 << int(rng.integers(8))
            return whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :]

        kept, dropped = instants_of(damaged(month, tmp_path / "j", damage))
        assert set(kept) <= set(MONTH)
        assert kept == sorted(kept)
        assert (dropped != {}) == (len(kept) < 3000)
        lost.append(3000 - len(kept))
    assert np.median(lost) <= 1
    assert np.percentile(lost, 95) <= 100, "no more than a page"


@pytest.mark.parametrize("content", [bytes(PAGE), b"\xff" * PAGE])
def test_a_page_that_is_gone_costs_its_readings_and_the_others_are_found(tmp_path, month, content):
    n_pages = journals.files_of(month)[0].stat().st_size // PAGE
    lost = []
    # The first four pages lead to all others.
    for page in range(4, n_pages, 3):

        def damage(whole, start=page * PAGE):
            return whole[:start] + content + whole[start + PAGE :]

        kept, dropped = instants_of(damaged(month, tmp_path / "j", damage))
        assert set(kept) <= set(MONTH)
        assert dropped["dropped: damaged reading"] >= 1
        lost.append(3000 - len(kept))
    assert max(lost) <= 100


@pytest.mark.parametrize("content", [b"", b"\0" * 300, b"SQLite format 3\0" + b"x" * 500])
def test_a_damaged_database_is_left_out_and_counted_and_recording_goes_on(tmp_path, content):
    append(tmp_path / "j", [100, 4000])
    (first,) = journals.files_of(tmp_path / "j")
    first.write_bytes(content)
    with pytest.raises(TraceError, match="no readable reading"):
        journals.read(tmp_path / "j")
    append(tmp_path / "j", [9000])
    append(tmp_path / "j", [9900])
    kept, dropped = instants_of(tmp_path / "j")
    assert kept == [9000, 9900]
    assert dropped == ({"dropped: damaged file": 1} if content else {})
    assert first.read_bytes() == content or not content


def test_what_a_damaged_database_still_holds_is_read_beside_the_next(tmp_path, month):
    def damage(whole):
        return whole[: 10 * PAGE] + bytes(PAGE) + whole[11 * PAGE :]

    copy = damaged(month, tmp_path / "j", damage)
    before, _ = instants_of(copy)
    append(copy, [10**6], max_bytes=10**7)
    readings, dropped = journals.read(copy)
    assert instants_of(copy)[0] == [*before, 10**6]
    assert readings["run"].unique().tolist() == [0, 1, 2, 3]
    assert dropped["dropped: damaged reading"] == 3000 - len(before)
    assert len(journals.files_of(copy)) == 2


def test_a_damaged_database_makes_room_for_new_readings(tmp_path, month):
    copy = damaged(month, tmp_path / "j", lambda whole: bytes(2 * len(whole)))
    assert size_of(copy) > 300_000
    append(copy, [10**6], max_bytes=300_000)
    assert size_of(copy) <= 300_000
    assert instants_of(copy) == ([10**6], {})


def test_a_journal_with_nothing_readable_is_one_clear_error(tmp_path):
    with pytest.raises(TraceError, match="no such journal"):
        journals.read(tmp_path / "j")
    append(tmp_path / "j", [])
    with pytest.raises(TraceError, match="no readable reading"):
        journals.read(tmp_path / "j")
