"""What is said of a run before it, against what then happens."""

import json
from dataclasses import replace

import numpy as np
import pytest
from shared_fleets import synthetic
from small_app import PYPROJECT, SERVER, write_small_app
from typer.testing import CliRunner

from fedstale.cli.main import app as command
from fedstale.config import SimulationConfig
from fedstale.errors import ConfigError
from fedstale.simulation.dry_runs import dry_run
from fedstale.simulation.run import simulate
from fedstale.traces import TraceSet
from fedstale.traces.availability import Availability


def called(*words):
    return CliRunner().invoke(command, [str(word) for word in words])


def constant(*, compute):
    rates = {"downlink_bit_per_s": 1e8, "uplink_bit_per_s": 1e8}
    return TraceSet.constant(8, compute=compute, **rates)


@pytest.fixture
def small(tmp_path):
    return str(write_small_app(tmp_path / "app"))


@pytest.mark.usefixtures("no_pages")
def test_on_devices_that_are_always_there_it_is_what_happens(small, tmp_path):
    # Every job and every round is alike.
    traces = constant(compute=1.0)
    config = SimulationConfig(app=small, traces="constant")
    found = dry_run(config, traces)
    run = simulate(config, tmp_path / "run", traces=traces)
    # Later rounds know how many examples a device has.
    jobs = run.jobs[(run.jobs["status"] == "reported") & (run.jobs["sent_at"] == 0.0)]
    took = (jobs["reported_at"] - jobs["sent_at"]).to_numpy()
    assert found.finished == 1.0
    assert found.reasons == {}
    np.testing.assert_allclose(found.job_s, np.median(took), rtol=0.02)
    np.testing.assert_allclose(found.round_s, np.median(took), rtol=0.02)
    assert found.phases_s["training"] == pytest.approx(jobs["compute_s"].median())
    np.testing.assert_allclose(found.online, 1.0)


@pytest.mark.parametrize(
    ("strategy", "round_"),
    [
        (None, "a round of 8 that waits for all, at most 3,600 s"),
        ("FedBuff(8, 4)", "a server step, with buffer size 4 and 8 jobs in flight"),
        ("FedBuff(8, 4, pace=Ramp(10))", "a server step by Ramp(10, start=1), with up to 8 jobs"),
        ("FedAvg(8, pace=Ramp(10))", "a server step by Ramp(10, start=1), with up to 8 jobs"),
        ("FedAvg(schedule=k_sync(6, 3))", "a round of 6 that waits for the first 3, at most"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("no_pages")
def test_rounds_take_as_long_as_those_of_the_run(tmp_path, strategy, round_):
    server = SERVER.replace('config["rounds"]', 'config["num-server-rounds"]')
    table = PYPROJECT.replace("rounds = 3", "num-server-rounds = 120")
    config = SimulationConfig(
        app=str(write_small_app(tmp_path / "app", server=server, pyproject=table)),
        traces="fleet",
        strategy=strategy,
        run_config={"fraction-evaluate": 0.0},
        costs={"examples": 12},
    )
    found = dry_run(config, synthetic(60))
    run = simulate(config, tmp_path / "run", traces=synthetic(60))
    assert found.round.startswith(round_)
    assert found.planned_rounds == run.summary["rounds"] == 120
    assert found.round_s == pytest.approx(run.end_s / 120, rel=0.25)


@pytest.mark.parametrize("pace", ["AgentPace(10)", "AdaSync()", "Ramp(10)"])
@pytest.mark.usefixtures("no_pages")
def test_a_pace_that_goes_by_replies_is_followed_without_any(small, pace):
    config = SimulationConfig(app=small, traces="constant", strategy=f"FedBuff(4, 2, pace={pace})")
    found = dry_run(config, constant(compute=1.0))
    assert found.round_s > 0.0
    assert found.round.endswith("as long as replies tell it nothing") == (pace != "Ramp(10)")


def test_devices_that_leave_lose_the_share_that_the_traces_say(small):
    config = SimulationConfig(app=small, traces="constant")
    units = dry_run(config, constant(compute=1.0)).phases_s["training"]
    # Training takes 600 s, and everybody is there for the first half of each hour.
    half = Availability.of([[(0.0, 1800.0)]] * 8, 3600.0)
    found = dry_run(config, replace(constant(compute=units / 600.0), availability=half))
    # Who is asked in the last 600 of the 1,800 s is gone before the end.
    assert found.finished == pytest.approx(2 / 3, abs=0.1)
    assert found.reasons["went offline while training"] == pytest.approx(1 / 3, abs=0.1)
    np.testing.assert_allclose(found.online, 0.5, atol=0.2)
    np.testing.assert_allclose(found.job_s, 600.0, rtol=0.02)


def test_it_is_the_same_each_time_and_writes_nothing(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    synthetic(20).write(tmp_path / "fleet.parquet")
    words = ("simulate", small, "--traces", "fleet.parquet", "--until", "2h", "--dry-run", "--json")
    one, other = (json.loads(called(*words).stdout) for _ in range(2))
    assert one == other
    assert one["n_devices"] == 20
    assert len(one["online"]) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"app", "fleet.parquet"}


def test_an_app_that_asks_nobody_is_told_so(tmp_path):
    server = SERVER.replace("def main(grid, context):\n", "def main(grid, context):\n    return\n")
    config = SimulationConfig(app=str(write_small_app(tmp_path / "app", server=server)), traces="x")
    with pytest.raises(ConfigError, match="asked nobody to train"):
        dry_run(config, constant(compute=1.0))
