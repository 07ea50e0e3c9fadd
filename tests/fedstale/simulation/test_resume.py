"""A simulation that is killed at any moment goes on, and ends as if it had never been."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from fedstale.config import SimulationConfig
from fedstale.errors import ConfigError
from fedstale.reports.folder import RunFolder
from fedstale.simulation import jobs, run
from fedstale.simulation.flower_app import FlowerApp
from fedstale.simulation.run import simulate
from fedstale.traces import TraceSet

CONFIG = SimulationConfig(
    app="digits",
    traces="synthetic:30",
    run_config={
        "strategy": "gap-aware",
        "num-server-rounds": 12,
        "concurrency": 8,
        "buffer-size": 3,
    },
)
SAME = ("events.parquet", "metrics.parquet", "model.safetensors")


@pytest.fixture(scope="module")
def traces():
    return TraceSet.synthetic(30, days=7, seed=0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, traces):
    folder = tmp_path_factory.mktemp("whole") / "run"
    simulate(CONFIG, folder, traces=traces)
    return {name: (folder / name).read_bytes() for name in SAME}


class PowerCutError(BaseException):
    """Nothing of the process runs after this."""


@pytest.mark.parametrize("cut", [(1, 4096), (5, 4096), (11, 4096), (8, 2)])
def test_a_run_that_was_cut_off_ends_byte_for_byte_as_one_that_was_not(
    tmp_path, traces, whole, cut, monkeypatch
):
    version, growth = cut
    # With little growth, the file of the jobs has been mapped many times when the run is cut off.
    monkeypatch.setattr(jobs, "_GROWTH", growth)
    monkeypatch.setattr(run, "_LARGEST_SHARE", np.inf)
    keep = run.SimulationCheckpointer.keep

    def keep_and_die(self, at, state):
        keep(self, at, state)
        if at == version:
            raise PowerCutError

    monkeypatch.setattr(run.SimulationCheckpointer, "keep", keep_and_die)
    with pytest.raises(PowerCutError):
        simulate(CONFIG, tmp_path / "run", traces=traces)
    assert not (tmp_path / "run" / "summary.json").exists()
    monkeypatch.setattr(run.SimulationCheckpointer, "keep", keep)
    # A run that was interrupted in peace has measured the wall time of its first half.
    (tmp_path / "run" / "wall.parquet").touch()
    result = simulate(
        SimulationConfig.read(tmp_path / "run" / "config.toml"),
        tmp_path / "run",
        traces=traces,
        resume=True,
    )
    assert result.status == "finished"
    for name in SAME:
        assert (tmp_path / "run" / name).read_bytes() == whole[name], name
    assert not (tmp_path / "run" / "wall.parquet").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_run_on_ideal_devices_goes_on_too(tmp_path, monkeypatch):
    config = replace(CONFIG, run_config={**CONFIG.run_config, "num-server-rounds": 5})
    ideal = TraceSet.ideal(30)
    simulate(config, tmp_path / "whole", traces=ideal)
    monkeypatch.setattr(run, "_LARGEST_SHARE", np.inf)
    keep = run.SimulationCheckpointer.keep

    def keep_and_die(self, at, state):
        keep(self, at, state)
        # All replies come at one instant, so several versions are made between two checkpoints.
        if at >= 2:
            raise PowerCutError

    monkeypatch.setattr(run.SimulationCheckpointer, "keep", keep_and_die)
    with pytest.raises(PowerCutError):
        simulate(config, tmp_path / "run", traces=ideal)
    monkeypatch.setattr(run.SimulationCheckpointer, "keep", keep)
    simulate(config, tmp_path / "run", traces=ideal, resume=True)
    for name in SAME:
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_run_without_a_checkpoint_begins_anew(tmp_path, traces, whole):
    with RunFolder.create(tmp_path / "run") as folder:
        folder.write_config(FlowerApp.find(CONFIG.app).resolved(CONFIG))
    simulate(CONFIG, tmp_path / "run", traces=traces, resume=True)
    assert (tmp_path / "run" / "events.parquet").read_bytes() == whole["events.parquet"]


def test_what_cannot_be_resumed_is_refused(tmp_path, traces):
    with pytest.raises(ConfigError, match=r"has no config\.toml"):
        simulate(CONFIG, tmp_path / "none", traces=traces, resume=True)
    with RunFolder.create(tmp_path / "run") as folder:
        folder.write_config(CONFIG)
        with pytest.raises(ConfigError, match="in use by a run that goes on"):
            RunFolder.resume(tmp_path / "run", CONFIG)
        with pytest.raises(ConfigError, match="in use by a run that goes on"):
            RunFolder.create(tmp_path / "run", overwrite=True)
        folder.write_summary({"status": "finished"})
    with pytest.raises(ConfigError, match="has come to its end"):
        RunFolder.resume(tmp_path / "run", CONFIG)


def fedstale(*words):
    return [sys.executable, "-m", "fedstale", "simulate", *words]


@pytest.mark.slow
def test_kill_9_at_a_hundred_random_moments_loses_nothing(tmp_path):
    rng, kills = np.random.default_rng(0), 0
    words = [
        *("digits", "--traces", "synthetic:30", "--quiet", "-c"),
        'strategy="gap-aware" num-server-rounds=120 concurrency=8 buffer-size=3',
    ]
    subprocess.run(fedstale(*words, "--out", str(tmp_path / "whole")), check=True)
    for turn in range(1000):
        run = tmp_path / f"run-{turn}"
        command = fedstale(*words, "--out", str(run))
        while not (run / "summary.json").exists():
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            # The first second is imports; what matters is the rest.
            begun = time.monotonic()
            while not (run / "config.toml").exists() and process.poll() is None:
                time.sleep(0.01)
            time.sleep(rng.uniform(0.0, 2.0))
            if process.poll() is None and time.monotonic() - begun < 60:
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
            process.wait()
            command = fedstale("--resume", str(run), "--quiet")
            if kills >= 100:
                subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
        for name in SAME:
            expected = (tmp_path / "whole" / name).read_bytes()
            assert (run / name).read_bytes() == expected, (turn, name)
        if kills >= 100:
            return
    raise AssertionError(f"only {kills} kills")
