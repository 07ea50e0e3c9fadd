"""A run whose process ends before it does: what is said, what is kept, and that it goes on."""

import re
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
from small_app import CLIENT, write_small_app

from fedstale import read_run
from fedstale.config import SimulationConfig
from fedstale.errors import ConfigError
from fedstale.runs import RunFolder, lost
from fedstale.simulation.run import simulate
from fedstale.traces import TraceSet

FEDSTALE = [sys.executable, "-m", "fedstale"]
TRACES = ["--traces", "synthetic:12"]
SAME = ("events.parquet", "metrics.parquet")


def fedstale(*words, **options):
    command = [*FEDSTALE, *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, **options
    )


def app_that(path, way):
    """Write the small app, whose client does something at its fifth call of all time."""
    calls = path.parent / f"{path.name}-calls"
    begin = "    x, y = data(context"
    dies = f"""    import ctypes, os
    with open({str(calls)!r}, "ab") as file:
        file.write(b".")
        number = file.tell()
    if number == 5:
        {way}
"""
    # Training alone: what evaluates is the second of the two functions.
    return write_small_app(path, client=CLIENT.replace(begin, dies + begin, 1))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folder of a run in which nothing happens."""
    folder = tmp_path_factory.mktemp("whole")
    app = app_that(folder / "app", "pass")
    config = SimulationConfig(app=str(app), traces="synthetic:12", run_config={"rounds": 4})
    return simulate(config, folder / "run", traces=TraceSet.load("synthetic:12", seed=0)).folder


def test_a_lost_run_says_where_its_client_was_and_goes_on_to_the_same_end(tmp_path, whole):
    app, run = app_that(tmp_path / "app", "ctypes.string_at(0)"), tmp_path / "run"
    result = fedstale("simulate", app, *TRACES, "-c", "rounds=4", "--out", run)
    assert result.returncode == -signal.SIGSEGV
    assert re.search(r"client\.py\", line \d+ in train", result.stderr)
    with pytest.raises(ConfigError, match=r"--resume .*/run goes on; the process of the run ended"):
        read_run(run)
    again = fedstale("simulate", "--resume", run)
    assert again.returncode == 0, again.stderr
    for name in SAME:
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name
    assert lost(run) == ""


def test_with_worker_processes_the_run_goes_on_with_an_error_reply(tmp_path):
    app, run = app_that(tmp_path / "app", "os._exit(3)"), tmp_path / "run"
    client = app / "small_app_under_test" / "client.py"
    text = client.read_text()
    client.write_text(text.replace("if number == 5:", "if context.node_id == 1011:"))
    words = ["--executor", "processes", "--workers", "2"]
    result = fedstale("simulate", app, *TRACES, "--out", run, "-c", "rounds=1", *words)
    assert result.returncode == 0, result.stderr
    events = pd.read_parquet(run / "events.parquet")
    failed = events[events.status == "client-error"]
    assert set(failed["device_id"]) == {"device-11"}
    assert set(failed["reason"]) == {"the worker process died twice: exit code 3"}
    assert "reported" in set(events["status"])


def test_a_run_is_lost_when_it_is_killed_and_not_before(tmp_path):
    app, run, calls = app_that(tmp_path / "app", "pass"), tmp_path / "run", tmp_path / "app-calls"
    words = [*FEDSTALE, "simulate", str(app), *TRACES, "--out", str(run), "-c", "rounds=100000"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not (calls.exists() and calls.stat().st_size > 50) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert lost(run) == ""
        process.kill()
    assert "the process of the run ended" in lost(run)
    RunFolder.resume(run, SimulationConfig.read(run / "config.toml")).__exit__()
