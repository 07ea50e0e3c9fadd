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
from fedstale.simulation import flight as fl
from fedstale.simulation import flights as flights_module
from fedstale.simulation.flight import Flight
from fedstale.simulation.flights import Flights
from fedstale.strategies.server.checkpoint import packed, unpacked
from fedstale.traces import Status

DEVICES = pd.Index(["phone-0", "phone-1", "phone-2"])


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(flights_module, "_WRITTEN_TOGETHER", 4)
    monkeypatch.setattr(flights_module, "BLOCK", 7)


def flight(job_id, **changed):
    values = {
        **{"message": None, "asked": (1.0,) * 5, "outcome": Status.REPORTED, "visible_at": 1.0},
        **{"failure": None, "job_id": job_id, "node_id": 1000 + job_id % 3, "device": job_id % 3},
        **{"kind": "train", "round": job_id // 2, "status": fl.UNCLAIMED, "sent_at": job_id * 0.1},
        **dict.fromkeys(("started_at", "downloaded_at", "trained_at"), 0.5),
        **dict.fromkeys(("reported_at", "ended_at"), 1.0),
        **dict.fromkeys(("download_s", "compute_s", "upload_s", "work"), 0.1 + job_id),
        **{"downloaded_bytes": 10.0, "uploaded_bytes": fl.UNKNOWN},
    }
    return Flight(**{**values, **changed})


def kept(flights):
    tables = list(flights.tables(lambda some: some, DEVICES))
    assert [len(table) for table in tables[:-1]] == [7] * (len(tables) - 1)
    return pd.concat([table.to_pandas() for table in tables], ignore_index=True)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["send", "end", "merge", "refuse"]), max_size=120), st.randoms())
def test_events_are_those_of_jobs_that_all_stay_in_memory(moves, chance):
    flights, twins, out = Flights(), [], []
    for move in moves:
        if move == "send":
            late = chance.choice([1.0, 9e9])
            twins.append(flight(len(twins), ended_at=late))
            flights.add(flight(len(flights), ended_at=late))
            out.append(len(twins) - 1)
        elif move == "end" and out:
            job_id = out.pop(chance.randrange(len(out)))
            for job in (twins[job_id], flights[job_id]):
                job.status, job.delivered_at = fl.REPORTED, 5.0
            flights.end(flights[job_id], 5.0)
        elif twins:
            job_id = chance.randrange(len(twins))
            for job in (twins[job_id], flights.of_message(f"message-{job_id}")):
                if move == "merge":
                    job.base_version, job.aggregated_version, job.weight = 1, len(moves), 0.5
                else:
                    job.status, job.reason = fl.REJECTED, f"reason {job_id}"
    expected = fl.table_of(twins, DEVICES).to_pandas()
    pd.testing.assert_frame_equal(kept(flights), expected)
    again = Flights()
    again.load_state_dict(unpacked(packed(flights.state_dict())))
    pd.testing.assert_frame_equal(kept(again), expected)
    assert len(again) == len(twins)


def ended(n):
    flights = Flights()
    for job_id in range(n):
        flights.add(flight(job_id, delivered_at=1.0))
        flights.end(flights[job_id], 1.0)
    return flights


def test_few_jobs_stay_in_memory():
    flights = ended(1000)
    assert len(flights) == 1000
    assert len(flights._in_memory()) < 2 * 4


def test_a_job_whose_device_still_works_stays():
    flights = Flights()
    for job_id in range(50):
        flights.add(flight(job_id, ended_at=np.inf if job_id == 3 else 1.0))
        flights.end(flights[job_id], 2.0)
    assert any(job.job_id == 3 for job in flights._in_memory())


def test_devices_that_all_still_work_keep_their_jobs_in_memory():
    flights = Flights()
    for job_id in range(50):
        flights.add(flight(job_id, ended_at=np.inf))
        flights.end(flights[job_id], 2.0)
    assert len(flights._in_memory()) == 50


def test_events_are_written_in_row_groups(tmp_path):
    with RunFolder.create(tmp_path) as folder:
        folder.write_events(ended(50).tables(lambda some: some, DEVICES))
        assert folder.read_events(["job_id"])["job_id"].to_pylist() == list(range(50))
    assert pq.ParquetFile(tmp_path / "events.parquet").num_row_groups == 8


@pytest.mark.parametrize("name", ["message-50", "message--1", "message-x", "3", "other", ""])
def test_a_message_that_was_never_sent_has_no_job(name):
    assert ended(50).of_message(name) is None


def test_a_full_disk_is_one_error_and_no_job_is_lost(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    flights = ended(7)
    flights.add(flight(7))
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(FedstaleError, match="No space left on device"):
        flights.end(flights[7], 1.0)
    assert kept(flights)["job_id"].tolist() == list(range(len(flights)))


def test_rows_of_another_release_are_refused():
    state = ended(30).state_dict()
    state["on_disk"]["columns"] = ["job_id"]
    for other in (state, {"columns": {}}):
        with pytest.raises(ResumeError, match="other columns"):
            Flights().load_state_dict(other)
