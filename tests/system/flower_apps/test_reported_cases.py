"""Small apps that others have reported, beside the project: each has a right value."""

import json
import os
import re
import shutil
import subprocess
import sys

import pandas as pd
import pytest
from places import ROOT

CASES = ROOT.parent / "shared" / "cases"
pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason=f"no {CASES}")
EXECUTORS = ([], ["--executor", "inline"], ["--executor", "processes", "--workers", "2"])


@pytest.fixture
def case(tmp_path):
    """Return a function that runs a command in a copy of a case."""

    def run(name, *command, **variables):
        if not (CASES / name).is_dir():
            pytest.skip(f"no case {name}")
        folder = tmp_path / name
        shutil.copytree(CASES / name, folder, dirs_exist_ok=True)
        return subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return run


@pytest.fixture
def simulated(case, tmp_path):
    """Return a function that simulates a case, and returns the process and the run's folder."""

    def run(name, *options, **variables):
        out = tmp_path / "run"
        command = ("-m", "fedstale", "simulate", ".", "--out", out, "--overwrite", *options)
        return case(name, *map(str, command), **variables), out

    return run


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize("executor", EXECUTORS)
def test_workers_of_a_data_loader_start_at_once(simulated, executor):
    done, _ = simulated(
        "dataloader_workers", "--traces", "ideal:4", "-c", "num-server-rounds=2", *executor
    )
    assert done.returncode == 0, done.stderr
    passes = [float(s) for s in re.findall(r"workers ([0-9.]+) s", done.stderr)]
    assert len(passes) >= 8
    assert max(passes) < 2, "spawned, they take ten and more"


@pytest.mark.parametrize("executor", EXECUTORS)
def test_older_clients_run_under_a_strategy_of_fedstale(simulated, executor):
    options = ("--traces", "synthetic:20", "--until", "3 rounds", *executor)
    done, folder = simulated("old_api_strategy", *options, WAY="main")
    assert done.returncode == 0, done.stderr
    assert summary(folder)["rounds"] == 3
    done, _ = simulated("old_api_strategy", *options, WAY="server_fn")
    assert done.returncode == 1
    assert "get_parameters returns, and that is nothing" in done.stderr


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_start_in_a_mixin_is_heard(simulated, executor):
    options = ("--traces", "ideal:4", "-c", "num-server-rounds=2", *executor)
    done, folder = simulated("start_in_mixin", *options)
    assert done.returncode == 0, done.stderr
    assert summary(folder)["rounds"] == 2
    metrics = pd.read_parquet(folder / "metrics.parquet").query("source == 'server'")
    assert sorted(zip(metrics["version"], metrics["name"], strict=True)) == [
        (1, "accuracy"),
        (1, "loss"),
        (2, "accuracy"),
        (2, "loss"),
    ]
    said = float(re.search(r"accuracy of the last round ([0-9.]+)", done.stdout)[1])
    last = metrics[(metrics["version"] == 2) & (metrics["name"] == "accuracy")]
    assert said == pytest.approx(last["value"].item())


@pytest.mark.parametrize("executor", EXECUTORS)
def test_an_unseeded_generator_ends_no_run_and_repeats(simulated, executor):
    options = ("--traces", "synthetic:30", "--until", "3 rounds", *executor)
    models = set()
    for _ in range(2):
        done, folder = simulated("unseeded_generator", *options)
        assert done.returncode == 0, done.stderr
        models.add((folder / "model.safetensors").read_bytes())
    assert len(models) == 1
