"""A client that ends the process of its run: what the command says, keeps and can go on with."""

import faulthandler
import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time

import pandas as pd
import pytest
from small_app import CLIENT, SERVER, write_small_app

from fedstale.config import SimulationConfig
from fedstale.errors import ConfigError
from fedstale.last_call import LAST_CALL, LastCall, LastCallFile, told
from fedstale.runs import RunFolder
from fedstale.simulation.run import simulate
from fedstale.traces import TraceSet

FEDSTALE = [sys.executable, "-m", "fedstale"]
TRACES = ["--traces", "synthetic:12"]
SAME = ("events.parquet", "metrics.parquet")

WAYS = {
    "os._exit(3)": "ended the process with exit code 3",
    "os._exit(0)": "ended the process with exit code 0",
    "ctypes.string_at(0)": "ended the process by SIGSEGV (Segmentation fault)",
    "os.kill(os.getpid(), 9)": "was killed (SIGKILL), as the system does when memory runs out; the "
    "process had used at most 0.",
    "spin()": "did not end within 1 s (client-limit-s)",
}


def fedstale(*words, **options):
    command = [*FEDSTALE, *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, **options
    )


def app_that(path, way, *, at=5, server=SERVER, sleep_s=0.0):
    """Write the small app, whose client does something at its call number `at` of all time."""
    calls = path.parent / f"{path.name}-calls"
    begin = "    x, y = data(context"
    dies = f"""    import ctypes, os, sys, time
    time.sleep({sleep_s})
    with open({str(calls)!r}, "ab") as file:
        file.write(b".")
        number = file.tell()
    def spin():
        while True:
            pass
    if number == {at}:
        print("about to go", number)
        print("a word of warning", file=sys.stderr)
        {way}
"""
    # Training alone: what evaluates is the second of the two functions.
    return write_small_app(path, client=CLIENT.replace(begin, dies + begin, 1), server=server)


def events_of(run):
    return pd.read_parquet(run / "events.parquet").drop(columns="reason")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folder of a run in which nothing happens."""
    folder = tmp_path_factory.mktemp("whole")
    app = app_that(folder / "app", "pass")
    config = SimulationConfig(app=str(app), traces="synthetic:12", run_config={"rounds": 4})
    return simulate(config, folder / "run", traces=TraceSet.load("synthetic:12", seed=0)).folder


@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_ends_the_process_fails_the_run_and_is_named(tmp_path, whole, way):
    app, run = app_that(tmp_path / "app", way), tmp_path / "run"
    limit = ["--client-limit-s", "1"] if way == "spin()" else []
    # The first client answers twice, so the fifth call is the fourth job of training.
    result = fedstale("simulate", app, *TRACES, "--out", run, "-c", "rounds=4", *limit)
    assert result.returncode == 2
    summary = json.loads((run / "summary.json").read_text())
    crash = summary["crash"]
    events = events_of(run)
    job = events[events.job_id == crash["job"]].iloc[0]
    assert (summary["status"], crash["kind"]) == ("failed", "train")
    assert (job["status"], job["device_id"]) == ("client-error", crash["device"])
    sentence = f"the client of job {crash['job']} (train) on {crash['device']} {WAYS[way]}"
    assert summary["reason"].startswith(sentence)
    assert f"fedstale: the run failed: {sentence}" in result.stderr
    assert crash["lines"][:2] == ["about to go 5", "a word of warning"]
    assert all(f"    {line}\n" in result.stderr for line in crash["lines"])
    in_the_app = any("client.py" in line and line.endswith("in train") for line in crash["lines"])
    assert in_the_app == (way in {"ctypes.string_at(0)", "spin()"})
    # All that was over by then is as in the run in which nothing happens.
    over = events[events.delivered_at <= events.sent_at.max()]
    assert len(over) >= 4
    pd.testing.assert_frame_equal(over, events_of(whole).loc[over.index])
    metrics = pd.read_parquet(run / "metrics.parquet")
    assert len(metrics) >= 4
    theirs = pd.read_parquet(whole / "metrics.parquet").loc[metrics.index]
    pd.testing.assert_frame_equal(metrics, theirs)
    assert (run / "report.html").is_file()
    assert not (run / LAST_CALL).exists()


def test_a_lost_run_is_one_json_object_and_goes_on_to_the_same_end(tmp_path, whole):
    app, run = app_that(tmp_path / "app", "os._exit(3)"), tmp_path / "run"
    words = [*TRACES, "-c", "rounds=4", "--out", run]
    lost = fedstale("simulate", app, *words, "--json")
    assert lost.returncode == 2
    last = json.loads(lost.stdout.splitlines()[-1])
    assert (last["status"], last["crash"]["how"]) == (
        "failed",
        "ended the process with exit code 3",
    )
    shown = fedstale("report", run)
    assert shown.returncode == 0
    again = fedstale("simulate", "--resume", run)
    assert again.returncode == 0, again.stderr
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    for name in SAME:
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_lost_run_of_a_stale_strategy_goes_on_from_its_checkpoint(tmp_path):
    server = SERVER.replace(
        "from flwr.serverapp import strategy as strategies", "from fedstale import strategies"
    ).replace(
        """        fraction_evaluate=config["fraction-evaluate"],
        min_available_nodes=config["min-available"],
        **options,
""",
        "        4, 2, seed=1, **options\n",
    )
    words = ["simulate", *TRACES, "-c", "rounds=30 strategy='FedBuff'", "--out"]
    # Checkpoints take a twentieth of the wall time at most, so there must be some.
    options = {"server": server, "sleep_s": 0.05}
    calm = app_that(tmp_path / "calm", "pass", **options)
    assert fedstale(*words, tmp_path / "calm-run", calm).returncode == 0
    app, run = app_that(tmp_path / "app", "os._exit(3)", at=40, **options), tmp_path / "run"
    assert fedstale(*words, run, app).returncode == 2
    lost = json.loads((run / "summary.json").read_text())
    assert lost["rounds"] > 10
    assert (run / "model.safetensors").is_file(), "that of the last checkpoint"
    calls = (tmp_path / "app-calls").stat().st_size
    again = fedstale("simulate", "--resume", run)
    assert again.returncode == 0, again.stderr
    for name in (*SAME, "model.safetensors"):
        assert (run / name).read_bytes() == (tmp_path / "calm-run" / name).read_bytes(), name
    both, alone = (tmp_path / f"{name}-calls" for name in ("app", "calm"))
    assert both.stat().st_size - calls < alone.stat().st_size - 10, "it did not begin anew"


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


def test_a_process_lost_before_the_run_begins_is_one_sentence(tmp_path):
    client = f"import os\nos.kill(os.getpid(), {int(signal.SIGSEGV)})\n{CLIENT}"
    app = write_small_app(tmp_path / "app", client=client)
    result = fedstale("simulate", app, *TRACES, "--out", tmp_path / "run")
    assert result.returncode == 2
    assert "was ended by SIGSEGV before the run began" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_in_python_leaves_a_note_that_the_next_command_reads(tmp_path, whole):
    app, run = app_that(tmp_path / "app", "os._exit(3)"), tmp_path / "run"
    script = (
        "import fedstale\n"
        f"fedstale.simulate({str(app)!r}, traces='synthetic:12', out={str(run)!r}, "
        "run_config={'rounds': 4})\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 3
    note = r"the process of the run ended while the client of job \d+ \(train\) on node 10\d\d ran"
    with pytest.raises(ConfigError, match=rf"--resume .*/run goes on; {note}"):
        __import__("fedstale").read_run(run)
    assert LastCall.read(run).kind == "train"
    again = fedstale("simulate", "--resume", run)
    assert again.returncode == 0
    assert again.stderr.startswith("fedstale: the process of the run ended while the client of job")
    assert (run / "events.parquet").read_bytes() == (whole / "events.parquet").read_bytes()
    assert told(run) == ""


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
        assert (tmp_path / "run" / LAST_CALL).exists()
        assert told(tmp_path / "run") == ""
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
    assert "the process of the run ended" in told(tmp_path / "run")


def test_a_limit_where_nothing_could_end_the_process_is_refused(tmp_path):
    app = write_small_app(tmp_path / "app")
    config = SimulationConfig(app=str(app), traces="synthetic:12", client_limit_s=1.0)
    with pytest.raises(ConfigError, match="client_limit_s = 1: a client of this process can be"):
        simulate(config, tmp_path / "run", traces=TraceSet.load("synthetic:12", seed=0))
    assert not (tmp_path / "run").exists()


def test_the_last_lines_are_the_last_and_streams_come_back(tmp_path, capsys):
    before = sys.stdout, sys.stderr, faulthandler.is_enabled()
    file = LastCallFile(tmp_path)
    with file.listening():
        print("before any client")
        file.entered("message-7", 1003, "train.fit", 12.5, 1)
        for i in range(10_000):
            print(f"line {i} \x1b[31mred\x1b[0m")
    assert (sys.stdout, sys.stderr, faulthandler.is_enabled()) == before
    call = LastCall.read(tmp_path)
    assert (call.job_id, call.node_id, call.kind, call.now) == (7, 1003, "train.fit", 12.5)
    assert call.lines == tuple(f"line {i} red" for i in range(9_980, 10_000))
    assert "before any client" in capsys.readouterr().out
    file.left()
    assert LastCall.read(tmp_path).job_id is None
    file.close()
    assert LastCall.read(tmp_path) is None
    (tmp_path / LAST_CALL).write_bytes(b"half of it")
    assert LastCall.read(tmp_path) is None
