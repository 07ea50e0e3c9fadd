"""Jobs lie in a file, can be changed there at any time, and come back in order."""

import errno
import os
import tempfile

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_updates import packed

from fedstale.errors import FedstaleError, ResumeError
from fedstale.runs import IN_FLIGHT, UNCLAIMED, UNKNOWN, RunFolder
from fedstale.simulation import jobs as jobs_module
from fedstale.simulation.jobs import COLUMNS, JobRow, JobTable, table
from fedstale.strategies.server.checkpoint import unpacked
from fedstale.strategies.server.runtime import REJECTED, REPORTED
from fedstale.strategies.weighting import ClientUpdate

DEVICES = pd.Index(["phone-0", "phone-1", "phone-2"])


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(jobs_module, "_GROWTH", 4)
    monkeypatch.setattr(jobs_module, "BLOCK", 7)


def values_of(job_id, **changed):
    defaults = {name: getattr(JobRow, name).default for name in COLUMNS}
    values = {
        **{"job_id": job_id, "node_id": 1000 + job_id % 3, "device": job_id % 3},
        **{"kind": "train", "round": job_id // 2, "status": UNCLAIMED, "sent_at": job_id * 0.1},
        **dict.fromkeys(("started_at", "downloaded_at", "trained_at"), 0.5),
        **dict.fromkeys(("reported_at", "ended_at"), 1.0),
        **dict.fromkeys(("download_s", "compute_s", "upload_s", "work"), 0.1 + job_id),
        **{"downloaded_bytes": 10.0, "uploaded_bytes": UNKNOWN},
    }
    return {**defaults, **values, **changed}


def send(jobs, **changed):
    job = jobs[jobs.add(1).start]
    for name, value in values_of(len(jobs) - 1, **changed).items():
        setattr(job, name, value)
    return job


def note_aggregated(jobs, job_id, version):
    facts = {"base_version": 1, "staleness": 2, "weight": 0.5}
    arrays = {"delta": {}, "base": {}, "current": {}}
    update = ClientUpdate(message_id=f"message-{job_id}", **arrays, **facts)
    jobs.new_version(None, version, None, [update])


def kept(jobs):
    tables = list(jobs.tables(lambda rows: rows, DEVICES))
    assert [len(table) for table in tables[:-1]] == [7] * (len(tables) - 1)
    return pd.concat([table.to_pandas() for table in tables], ignore_index=True)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["send", "end", "step", "reject"]), max_size=120), st.randoms())
def test_events_are_those_of_jobs_that_all_stay_in_memory(moves, chance):
    jobs, twins, out = JobTable(), [], []
    for move in moves:
        if move == "send":
            late = chance.choice([1.0, 9e9])
            twins.append(values_of(len(twins), ended_at=late))
            send(jobs, ended_at=late)
            out.append(len(twins) - 1)
        elif move == "end" and out:
            job_id = out.pop(chance.randrange(len(out)))
            twins[job_id] |= {"status": REPORTED, "delivered_at": 5.0}
            jobs[job_id].status = REPORTED
            jobs.end(jobs[job_id], 5.0)
        elif twins:
            job_id = chance.randrange(len(twins))
            job = jobs.of_message(f"message-{job_id}")
            if move == "step":
                note_aggregated(jobs, job_id, len(moves))
                facts = {"base_version": 1, "aggregated_version": len(moves)}
                # What went into a version was used, whatever was said of it before.
                facts |= {"status": REPORTED, "reason": ""}
                twins[job_id] |= {**facts, "staleness": 2.0, "weight": 0.5}
            else:
                job.status, job.reason = REJECTED, f"reason {job_id}"
                twins[job_id] |= {"status": REJECTED, "reason": f"reason {job_id}"}
    columns = {name: [twin[name] for twin in twins] for name in COLUMNS}
    expected = table(columns, DEVICES).to_pandas()
    pd.testing.assert_frame_equal(kept(jobs), expected)
    again = JobTable()
    send(again)  # what was there before is replaced
    again.load_state_dict(unpacked(packed(jobs.state_dict())))
    pd.testing.assert_frame_equal(kept(again), expected)
    assert len(again) == len(twins)


def ended(n):
    jobs = JobTable()
    for _ in range(n):
        jobs.end(send(jobs), 1.0)
    return jobs


def test_of_a_job_that_was_only_sent_events_say_nothing_spent_and_no_version():
    jobs = JobTable()
    jobs.add(1)
    (event,) = kept(jobs).to_dict("records")
    spent = ("download_s", "compute_s", "upload_s", "work", "downloaded_bytes", "uploaded_bytes")
    assert {event[name] for name in spent} == {0.0}
    assert {event[name] for name in ("round", "base_version", "aggregated_version")} == {-1}
    assert event["status"] == IN_FLIGHT
    assert np.isinf([value for name, value in event.items() if name.endswith("_at")]).all()


def test_events_are_written_in_row_groups(tmp_path):
    with RunFolder.create(tmp_path) as folder:
        folder.write_events(ended(50).tables(lambda rows: rows, DEVICES))
        assert folder.read_events(["job_id"])["job_id"].to_pylist() == list(range(50))
    assert pq.ParquetFile(tmp_path / "events.parquet").num_row_groups == 8


def test_a_full_disk_is_one_error_and_no_job_is_lost(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    jobs = ended(8)
    monkeypatch.setattr(os, "pwrite", full)
    for _ in range(2):
        with pytest.raises(FedstaleError, match="No space left on device"):
            send(jobs)
    assert kept(jobs)["job_id"].tolist() == list(range(8))
    monkeypatch.undo()
    assert send(jobs).job_id == 8


def test_no_folder_for_the_file_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(FedstaleError, match="set TMPDIR to another folder"):
        JobTable()


def test_rows_of_another_release_are_refused():
    state = ended(30).state_dict()
    state["columns"] = ["job_id"]
    for other in (state, {}):
        with pytest.raises(ResumeError, match="jobs in another form"):
            JobTable().load_state_dict(other)
