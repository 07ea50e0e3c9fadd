"""`fedstale traces record` as a process: killed, ended, and read while it goes on."""

import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import typer
from typer.testing import CliRunner

from fedstale.cli.record import merge, record
from fedstale.traces import TraceSet
from fedstale.traces.recording import journal as journals

pytest.importorskip("psutil", reason="needs fedstale[client]")

PROGRAM = """
import typer
from fedstale.cli.record import merge, record
app = typer.Typer()
app.command()(record)
app.command()(merge)
app()
"""
app = typer.Typer()
app.command()(record)
app.command()(merge)


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def started(*words):
    command = [sys.executable, "-c", PROGRAM, "record", *(str(word) for word in words)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def wait_for_readings(folder, n):
    """Wait until the write-ahead log has grown as often as n readings and a run make it grow."""
    sizes = set()
    for _ in range(600):
        # The log may be merged into its database, and removed, between the two.
        with suppress(FileNotFoundError):
            sizes.add(sum(path.stat().st_size for path in folder.glob("*-wal")))
        if len(sizes) > n + 3:
            return
        time.sleep(0.05)
    pytest.fail(f"no {n} readings in {folder} after 30 s")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_a_recording_that_was_killed_goes_on_and_ends_on_sigterm(tmp_path):
    out, journal = tmp_path / "phone.parquet", tmp_path / "phone.parquet.journal"
    words = ("--out", out, "--every", "1s", "--compute", "1 unit", "--available", "recording")
    killed = started(*words)
    wait_for_readings(journal, 2)
    killed.kill()
    killed.communicate()
    assert not out.exists()
    ended = started(*words)
    wait_for_readings(journal, 2)
    ended.send_signal(signal.SIGTERM)
    _, said = ended.communicate(timeout=30)
    assert ended.returncode == 0, said
    assert "downlink and uplink are unknown" in said
    readings, dropped = journals.read(journal)
    assert readings["run"].unique().tolist() == [0, 1]
    assert dropped == {}
    assert TraceSet.read(out).known == ("availability", "compute")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_the_trace_so_far_is_written_while_the_recorder_goes_on(tmp_path):
    out, journal = tmp_path / "phone.parquet", tmp_path / "phone.parquet.journal"
    words = ("--out", out, "--every", "1s", "--compute", "1 unit", "--available", "recording")
    recorder = started(*words)
    wait_for_readings(journal, 2)
    done = run("record", *words, "--finish")
    assert done.exit_code == 0, done.output
    so_far = TraceSet.read(out).availability.lengths[0]
    assert so_far >= 1.0
    assert recorder.poll() is None
    assert run("record", *words).exit_code == 2, "one recorder at a time"
    wait_for_readings(journal, 2)
    recorder.send_signal(signal.SIGTERM)
    _, said = recorder.communicate(timeout=30)
    assert recorder.returncode == 0, said
    assert TraceSet.read(out).availability.lengths[0] > so_far
