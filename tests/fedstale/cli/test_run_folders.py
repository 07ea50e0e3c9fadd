"""`fedstale runs`: the runs that are listed."""

import json

import pytest
from typer.testing import CliRunner

from fedstale.cli.compare import listed_runs
from fedstale.cli.main import app
from fedstale.config import SimulationConfig
from fedstale.runs import RunFolder

SUMMARY = {
    "status": "finished",
    "seed": 0,
    "rounds": 3,
    "virtual_s": 3600.0,
    "wall_s": 1.0,
    "jobs": {"sent": 10},
    "device_s": {"total": 50.0, "wasted": 5.0},
    "strategy": "FedBuff(10, 5, seed=1)",
    "selector": "Oort()",
}


def called(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def made(folder, accuracy=None, **settings):
    """Make the folder of a run; without an accuracy, of one that has not ended."""
    with RunFolder.create(folder) as run:
        run.write_config(SimulationConfig(app="digits", traces="synthetic:5", **settings))
        if accuracy is not None:
            run.write_summary(SUMMARY | {"metrics": {"server accuracy": accuracy}})
    return folder


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made(tmp_path / "runs" / "a", 0.5)
    made(tmp_path / "runs" / "b", 0.9, seed=3, run_config={"concurrency": 5})
    made(tmp_path / "runs" / "deeper" / "c", 0.7)
    made(tmp_path / "runs" / "d")
    # A config that is no run's.
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "runs" / "other" / "config.toml").write_text("app = 'digits'")
    return tmp_path / "runs"


def test_runs_are_listed_by_name_or_by_a_figure(place):
    by_name = json.loads(called("runs", "--json").stdout)
    names = [row["run"].replace("\\", "/").removeprefix("runs/") for row in by_name]
    assert names == ["a", "b", "d", "deeper/c"]
    assert [row["status"] for row in by_name] == ["finished", "finished", "lost", "finished"]
    by_figure = json.loads(called("runs", "--sort", "server accuracy", "--json").stdout)
    assert [row["run"][-1] for row in by_figure] == ["b", "c", "a", "d"]
    by_accuracy = called("runs", "--sort", "server accuracy").stdout
    order = [by_accuracy.index(f"runs/{name} ") for name in ("b", "deeper/c", "a", "d")]
    assert order == sorted(order)
    assert "0.9000" in by_accuracy
    assert "60 min" in by_accuracy
    assert [(row.get("strategy"), row.get("selector")) for row in by_name] == [
        ("FedBuff", "Oort") if row["status"] == "finished" else (None, None) for row in by_name
    ]
    assert by_accuracy.count("FedBuff") == by_accuracy.count("Oort") == 3


def test_a_figure_that_no_run_has_is_refused_with_those_there_are(place):
    refused = called("runs", "--sort", "accuracy")
    assert refused.exit_code == 2
    assert "expected one of device_s, jobs, rounds, seed, server accuracy" in refused.stderr
    assert called("runs", "nowhere").exit_code == 2


def test_a_run_that_goes_on_says_so(place):
    with RunFolder(place / "d"):
        (row,) = [run for run in listed_runs(place) if run["run"].endswith("d")]
        assert row["status"] == "running"


@pytest.mark.parametrize(
    ("text", "error"), [("[" * 100_000, "RecursionError"), ("{", "JSONDecodeError"), ("3", "Type")]
)
def test_a_run_whose_summary_cannot_be_read_is_listed(text, error, place):
    (place / "a" / "summary.json").write_text(text)
    (row,) = [run for run in listed_runs(place) if run["run"].endswith("a")]
    assert row["status"].startswith(f"unreadable: {error}")
