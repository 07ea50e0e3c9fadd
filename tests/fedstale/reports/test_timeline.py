import base64
import zlib
from pathlib import Path

import numpy as np
import pytest
from made_run import write_run

from fedstale.reports import costs, devices
from fedstale.reports.devices import STATES, timeline
from fedstale.reports.run import Run


@pytest.fixture
def record(tmp_path):
    """Return a function that makes a run and reads it back."""
    return lambda name="run", **options: Run(write_run(tmp_path / name, **options))


def columns_of(drawn):
    """Return what is drawn of each job: id, device, three phases in s, its state and its end."""
    numbers = np.frombuffer(zlib.decompress(base64.b64decode(drawn.data["packed"][0])), "<u4")
    job, row, start, *phases, state, ending = numbers.reshape(8, drawn.data["n_jobs"])
    scale = drawn.data["end"] / drawn.data["ticks"]
    states, endings = (np.array(drawn.data[name]) for name in ("states", "endings"))
    at = start * scale, [phase * scale for phase in phases]
    return job, row, *at, states[state], endings[ending]


def test_each_started_job_is_drawn_with_its_phases_or_as_lost(record):
    run = record()
    drawn = timeline(run)
    job, row, start, phases, state, ending = columns_of(drawn)
    jobs = run.jobs.set_index("job_id").loc[job]
    assert set(job) == set(run.jobs["job_id"][np.isfinite(run.jobs["started_at"])])
    assert [drawn.data["devices"][i] for i in row] == jobs["device_id"].tolist()
    assert start == pytest.approx(jobs["started_at"].to_numpy(), abs=1e-3)
    used = state == "training"
    assert used.tolist() == (jobs["status"] == "reported").tolist()
    assert (state == "in-flight").tolist() == (jobs["status"] == "in-flight").tolist()
    training = (jobs["trained_at"] - jobs["downloaded_at"]).to_numpy()
    assert phases[1][used] == pytest.approx(training[used], abs=1e-2)
    lost = state == "wasted"
    reasons = {f"train, wasted ({name}, it ended as {name})" for name in ("interrupted", "late")}
    assert set(ending[lost]) == reasons
    spans = (jobs["ended_at"] - jobs["started_at"]).to_numpy()
    assert phases[0][lost] == pytest.approx(spans[lost], abs=1e-2)
    assert not phases[1][lost].any()


def test_used_and_lost_jobs_are_counted_by_device(record):
    run = record()
    data = timeline(run).data
    for name, used, lost in zip(data["devices"], data["used"], data["wasted"], strict=True):
        own = run.jobs[run.jobs["device_id"] == name]
        assert used == (own["outcome"] == "used").sum()
        assert lost == ((own["outcome"] == "wasted") & np.isfinite(own["started_at"])).sum()


def test_evaluations_have_a_colour_of_their_own_in_every_figure(record):
    run = record()
    assert "evaluation" not in dict(timeline(run).key)
    run = record(name="other")
    jobs = run.jobs
    is_evaluation = (jobs["status"] == "reported") & (jobs["job_id"] % 7 == 0)
    jobs.loc[is_evaluation, "kind"] = "evaluate"
    drawn = timeline(run)
    assert dict(drawn.key) == {
        **{name: name for name in ("download", "training", "evaluation", "upload", "wasted")},
        "in-flight": "in flight at the end",
    }
    *_, state, ending = columns_of(drawn)
    assert (state == "evaluation").sum() == (ending == "evaluate, used").sum() == 10
    by_phase = {row[0]: row for row in costs.figures(run)[0].rows}
    hours = jobs.loc[is_evaluation, "compute_s"].sum() / 3600
    assert by_phase["evaluation"][1] == f"{hours:,.4g}"
    assert "evaluation" in {trace["meta"] for trace in devices.states(run).traces}


def test_every_colour_of_the_timeline_is_one_of_the_page():
    style = (Path(devices.__file__).parent / "page.css").read_text(encoding="utf-8")
    for state in STATES:
        assert style.count(f"--{state}: #") == 2  # light and dark


def test_too_many_reasons_leave_the_endings_alone(record, monkeypatch):
    monkeypatch.setattr(devices, "_ENDINGS", 1)
    *_, ending = columns_of(timeline(record()))
    assert "train, wasted (late)" in ending


def test_of_a_crowd_some_devices_are_drawn_with_all_of_their_jobs(record, monkeypatch):
    monkeypatch.setattr(devices, "DRAWN", 20)
    run = record(n_jobs=700, n_devices=50)
    drawn = timeline(run)
    assert "Of 50 devices with jobs 20 are drawn" in drawn.about
    assert len(drawn.data["devices"]) == len(drawn.data["used"]) == 20
    job, row, *_ = columns_of(drawn)
    started = run.started[run.started["device_id"].isin(drawn.data["devices"])]
    assert set(job) == set(started["job_id"])
    assert set(row) == set(range(20))
    monkeypatch.setattr(devices, "JOBS", 100)
    assert len(timeline(run).data["devices"]) == 100 * 50 // len(run.started)
