"""Jobs that are over go to disk, can still be changed there, and come back in order."""

import errno
import os

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstale.errors import FedstaleError, ResumeError
from fedstale.reports.folder import RunFolder
from fedstale.simulation import jobs as jobs_module
from fedstale.simulation.jobs import COLUMNS, UNCLAIMED, UNKNOWN, JobRow, JobTable, table
from fedstale.strategies.server.checkpoint import packed, unpacked
from fedstale.strategies.server.runtime import REJECTED, REPORTED

DEVICES = pd.Index(["phone-0", "phone-1", "phone-2"])


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(jobs_module, "_WRITTEN_TOGETHER", 4)
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
    (slot,) = jobs.add(1)
    job = JobRow(jobs, int(slot))
    for name, value in values_of(len(jobs) - 1, **changed).items():
        setattr(job, name, value)
    return job


def kept(jobs):
    tables = list(jobs.tables(lambda rows: rows, DEVICES))
    assert [len(table) for table in tables[:-1]] == [7] * (len(tables) - 1)
    return pd.concat([table.to_pandas() for table in tables], ignore_index=True)


@settings(max_examples=100, deadline=None)
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
                job.aggregate(1, len(moves), 2, 0.5)
                facts = {"base_version": 1, "aggregated_version": len(moves)}
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


def test_few_jobs_stay_in_memory():
    jobs = ended(1000)
    assert len(jobs) == 1000
    assert jobs.n_in_memory < 2 * 4
    assert jobs.columns["job_id"].size <= 64


def test_a_job_whose_device_still_works_stays():
    jobs = JobTable()
    for job_id in range(50):
        jobs.end(send(jobs, ended_at=np.inf if job_id == 3 else 1.0), 2.0)
    rows = jobs._file.read(0, 50)
    assert rows["ended_at"][3] == 0.0
    assert rows["ended_at"][2] == 1.0


def test_devices_that_all_still_work_keep_their_jobs_in_memory():
    jobs = JobTable()
    for _ in range(50):
        jobs.end(send(jobs, ended_at=np.inf), 2.0)
    assert jobs.n_in_memory == 50


def test_a_job_that_is_read_back_is_over():
    jobs = ended(50)
    assert jobs.n_in_memory < 20
    job = jobs[3]
    assert (job.visible_at, job.delivered_at, job.is_waiting) == (1.0, 1.0, False)


def test_a_row_that_is_used_again_remembers_nothing_of_the_job_before():
    jobs = JobTable()
    for _ in range(40):
        job = send(jobs)
        job.aggregate(3, 4, 1, 0.5)
        job.status, job.reason, job.error_code = REJECTED, "NaN", 5
        jobs.end(job, 1.0)
    fresh = JobRow(jobs, int(jobs.add(1)[0]))
    assert fresh.job_id == 40
    for name, column in vars(JobRow).items():
        if isinstance(column, jobs_module.Column) and name != "job_id":
            assert getattr(fresh, name) == column.default or np.isnan(column.default), name


def test_events_are_written_in_row_groups(tmp_path):
    with RunFolder.create(tmp_path) as folder:
        folder.write_events(ended(50).tables(lambda rows: rows, DEVICES))
        assert folder.read_events(["job_id"])["job_id"].to_pylist() == list(range(50))
    assert pq.ParquetFile(tmp_path / "events.parquet").num_row_groups == 8


@pytest.mark.parametrize("name", ["message-50", "message--1", "message-x", "3", "other", ""])
def test_a_message_that_was_never_sent_has_no_job(name):
    assert ended(50).of_message(name) is None


def test_a_full_disk_is_one_error_and_no_job_is_lost(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    jobs = ended(7)
    last = send(jobs)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(FedstaleError, match="No space left on device"):
        jobs.end(last, 1.0)
    assert kept(jobs)["job_id"].tolist() == list(range(len(jobs)))


def test_rows_of_another_release_are_refused():
    state = ended(30).state_dict()
    state["columns"] = ["job_id"]
    for other in (state, {}):
        with pytest.raises(ResumeError, match="other columns"):
            JobTable().load_state_dict(other)
