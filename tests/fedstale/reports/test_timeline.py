import base64
import json
import zlib

import numpy as np
import pandas as pd
import pytest
from made_run import write_run

from fedstale.reports import timeline as module
from fedstale.reports.run import Run
from fedstale.reports.timeline import COLUMNS, STATES, raster, timeline


@pytest.fixture
def record(tmp_path):
    """Return a function that makes a run and reads it back."""
    return lambda **options: Run(write_run(tmp_path / "run", **options))


def columns_of(drawn):
    """Return what is drawn of each job: id, device, three phases in s, and its state."""
    numbers = np.frombuffer(zlib.decompress(base64.b64decode(drawn.data["packed"][0])), "<u4")
    job, row, start, *phases, state = numbers.reshape(7, drawn.data["n_jobs"])
    scale = drawn.data["end"] / drawn.data["ticks"]
    return job, row, start * scale, [phase * scale for phase in phases], state


def test_each_started_job_is_drawn_with_its_phases_or_as_lost(record):
    run = record()
    drawn = timeline(run)
    job, row, start, phases, state = columns_of(drawn)
    jobs = run.jobs.set_index("job_id").loc[job]
    assert set(job) == set(run.jobs["job_id"][np.isfinite(run.jobs["started_at"])])
    assert [drawn.data["devices"][i] for i in row] == jobs["device_id"].tolist()
    assert start == pytest.approx(jobs["started_at"].to_numpy(), abs=1e-3)
    assert (state == 0).tolist() == (jobs["status"] == "reported").tolist()
    assert (state == 2).tolist() == (jobs["status"] == "in-flight").tolist()
    used = state == 0
    training = (jobs["trained_at"] - jobs["downloaded_at"]).to_numpy()
    assert phases[1][used] == pytest.approx(training[used], abs=1e-2)
    lost = state == 1
    spans = (jobs["ended_at"] - jobs["started_at"]).to_numpy()
    assert phases[0][lost] == pytest.approx(spans[lost], abs=1e-2)
    assert not phases[1][lost].any()


def test_used_and_lost_jobs_are_counted_by_device(record):
    run = record()
    data = timeline(run).data
    for name, used, lost in zip(data["devices"], data["used"], data["lost"], strict=True):
        own = run.jobs[run.jobs["device_id"] == name]
        assert used == (own["outcome"] == "used").sum()
        assert lost == ((own["outcome"] == "wasted") & np.isfinite(own["started_at"])).sum()


def test_a_crowd_is_drawn_as_shares_that_sum_to_what_it_worked(record, monkeypatch):
    monkeypatch.setattr(module, "DEVICES", 20)
    run = record(n_jobs=700, n_devices=50)
    drawn = timeline(run)
    assert drawn.is_raster
    assert set(drawn.orders) == {"used", "lost"}
    jobs = run.started
    order = jobs["device_id"].drop_duplicates()
    shares = raster(run, jobs, pd.Index(order))
    assert shares.shape == (50, COLUMNS, len(STATES))
    cell_s = run.end_s / COLUMNS
    spent = dict(zip(STATES, shares.sum(axis=(0, 1)) * cell_s, strict=True))
    used = jobs[jobs["state"] == 0]
    training = (used["trained_at"] - used["downloaded_at"]).sum()
    lost = jobs[jobs["state"] == 1]
    assert spent["training"] == pytest.approx(training)
    assert spent["lost"] == pytest.approx((lost["reported_at"] - lost["started_at"]).sum())


def test_perfetto_gets_a_thread_a_device_and_a_slice_a_phase(record):
    run = record()
    events = json.loads(run.trace().read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(names.values()) == set(run.jobs["device_id"])
    slices = [e for e in events if e["ph"] == "X"]
    trained = [e for e in slices if e["name"] == "training"]
    assert len(trained) == (run.jobs["status"] == "reported").sum()
    jobs = run.jobs.set_index("job_id")
    for event in trained:
        job = jobs.loc[event["args"]["job"]]
        assert names[event["tid"]] == job["device_id"]
        assert event["ts"] == pytest.approx(1e6 * job["downloaded_at"])
        assert event["dur"] == pytest.approx(1e6 * (job["trained_at"] - job["downloaded_at"]))
    assert all(e["args"]["reason"] for e in slices if e["name"] == "lost")
