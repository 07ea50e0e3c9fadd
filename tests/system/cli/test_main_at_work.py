"""Commands in processes of their own: how soon they answer, how they end, and by which signals."""

import os
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
from small_app import SERVER, write_small_app

FEDSTALE = [sys.executable, "-m", "fedstale"]


def fedstale(*arguments, cwd=None, timeout=120):
    return subprocess.run(
        [*FEDSTALE, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=timeout,
        check=False,
    )


def test_help_answers_at_once():
    used = []
    for _ in range(3):
        before = os.times()
        assert fedstale("--help").returncode == 0
        after = os.times()
        used.append(sum(after[2:4]) - sum(before[2:4]))
    # Half a second is promised. Processor time is the same on a loaded machine.
    assert min(used) < 0.75


def hear_signals():
    # A background job of a shell ignores SIGINT, and so would every process below it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupted(path, number):
    """Simulate in a folder, send a signal once a line was run, and return what stderr got.

    Args:
        path: the folder.
        number: the signal.
    """
    mark = path / "first round"
    begin = "def evaluate(server_round, arrays):\n"
    called = f"{begin}    if server_round:\n        mark()\n"
    marks = f"def mark():\n    open({str(mark)!r}, 'w').close()\n\n\n"
    server = SERVER.replace(begin, marks + called)
    app = str(write_small_app(path / "app", server=server))
    command = [*FEDSTALE, "simulate", app, "--traces", "synthetic:50", "--out", "run"]
    command += ["-c", "rounds=100000"]
    process = subprocess.Popen(
        command,
        cwd=path,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=hear_signals,  # noqa: PLW1509 - nothing but a signal is set
    )
    try:
        deadline = time.monotonic() + 60
        while not mark.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1, error[-2000:]
    return error.decode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_cleanly_and_keep_what_was_done(tmp_path, number):
    error = interrupted(tmp_path, number)
    assert "interrupted" in error
    assert "Traceback" not in error
    assert len(pd.read_parquet(tmp_path / "run" / "events.parquet")) > 0
