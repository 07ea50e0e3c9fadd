"""A run whose process ends before it does: what is said, what is kept, and that it goes on."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import termios
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


def in_a_long_run(tmp_path, **options):
    """Start a run in a process group of its own, and return it once it trains."""
    app = app_that(tmp_path / "app", "pass")
    words = ["simulate", app, *TRACES, "--out", tmp_path / "run", "-c", "rounds=100000"]
    process = subprocess.Popen(
        [*FEDSTALE, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **{"start_new_session": True, **options},
    )
    deadline = time.monotonic() + 60
    calls = tmp_path / "app-calls"
    while not (calls.exists() and calls.stat().st_size > 50) and time.monotonic() < deadline:
        time.sleep(0.05)
    return process


def test_a_run_that_goes_on_is_not_taken_for_a_lost_one(tmp_path):
    process = in_a_long_run(tmp_path)
    try:
        assert lost(tmp_path / "run") == ""
    finally:
        process.kill()
        process.communicate()


def test_ctrl_c_in_a_terminal_ends_the_run_cleanly(tmp_path):
    ours, theirs = os.openpty()

    def own_terminal():
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = in_a_long_run(
        tmp_path, stdin=theirs, preexec_fn=own_terminal, start_new_session=False
    )
    os.write(ours, b"\x03")
    _, error = process.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    assert process.returncode == 1
    assert b"the run was interrupted: Ctrl-C" in error
    assert b"Traceback" not in error
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_ends_the_run_cleanly(tmp_path, number):
    process = in_a_long_run(tmp_path)
    os.killpg(process.pid, number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"the run was interrupted" in error
    assert b"Traceback" not in error
    assert len(pd.read_parquet(tmp_path / "run" / "events.parquet")) > 0


def test_killing_the_command_kills_its_run_and_leaves_the_folder_to_the_next(tmp_path):
    process = in_a_long_run(tmp_path)
    process.kill()
    process.communicate()
    config = SimulationConfig.read(tmp_path / "run" / "config.toml")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            RunFolder.resume(tmp_path / "run", config).__exit__()
            break
        except ConfigError as problem:
            assert "in use" in str(problem)  # noqa: PT017 - it is while the run dies
            time.sleep(0.05)
    else:
        pytest.fail("the run goes on")
    assert "the process of the run ended" in lost(tmp_path / "run")


def test_a_limit_where_nothing_could_end_the_process_is_refused(tmp_path):
    app = write_small_app(tmp_path / "app")
    config = SimulationConfig(app=str(app), traces="synthetic:12", client_limit_s=1.0)
    with pytest.raises(ConfigError, match="client_limit_s = 1: a client of this process can be"):
        simulate(config, tmp_path / "run", traces=TraceSet.load("synthetic:12", seed=0))
    assert not (tmp_path / "run").exists()
