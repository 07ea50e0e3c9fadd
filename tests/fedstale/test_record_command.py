"""`fedstale traces record` and `merge`, as a person types them; a real machine records itself."""

import signal
import subprocess
import sys
import time

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
        logs = list(folder.glob("*-wal"))
        sizes.add(sum(path.stat().st_size for path in logs))
        if len(sizes) > n + 3:
            return
        time.sleep(0.05)
    pytest.fail(f"no {n} readings in {folder} after 30 s")


def test_a_machine_records_itself_and_the_file_is_a_trace(tmp_path):
    out = tmp_path / "phone.parquet"
    words = ("--out", out, "--every", "1s", "--for", "2s", "--available", "recording")
    done = run("record", *words, "--speed", "3", "--link-capacity", "50M,10M")
    assert done.exit_code == 0, done.output
    traces = TraceSet.read(out)
    assert list(traces.device_ids) == ["phone"]
    assert traces.known == ("availability", "compute", "downlink", "uplink")
    windows = traces.availability.windows(0)[0]
    assert windows.shape == (1, 2)
    assert windows[0, 1] == pytest.approx(2.0, abs=0.3)
    assert traces.downlink.value_at([0], 0.5) == 50e6
    assert 0 <= traces.compute.value_at([0], 0.5)[0] <= 3


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_a_recording_that_was_killed_goes_on_and_ends_on_sigterm(tmp_path):
    out, journal = tmp_path / "phone.parquet", tmp_path / "phone.parquet.journal"
    words = ("--out", out, "--every", "1s", "--speed", "1", "--available", "recording")
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


def test_a_journal_can_be_finished_without_recording_more(tmp_path):
    out = tmp_path / "phone.parquet"
    words = ("--out", out, "--every", "1s", "--speed", "1", "--available", "recording")
    assert run("record", *words, "--for", "1s").exit_code == 0
    out.unlink()
    done = run("record", *words, "--finish", "--link-capacity", "8k,4k")
    assert done.exit_code == 0, done.output
    assert TraceSet.read(out).uplink.value_at([0], 0.5) == 4000
    second = tmp_path / "tablet.parquet"
    assert run("record", "--out", second, *words[2:], "--for", "1s").exit_code == 0
    fleet = tmp_path / "fleet.parquet"
    assert run("merge", out, second, "--out", fleet).exit_code == 2
    done = run("merge", out, second, "--out", fleet, "--only", "availability,compute")
    assert done.exit_code == 0, done.output
    assert list(TraceSet.read(fleet).device_ids) == ["phone", "tablet"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_the_trace_so_far_is_written_while_the_recorder_goes_on(tmp_path):
    out, journal = tmp_path / "phone.parquet", tmp_path / "phone.parquet.journal"
    words = ("--out", out, "--every", "1s", "--speed", "1", "--available", "recording")
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "expected one of them, --speed N"),
        (("--speed", "1", "--calibrate"), "expected one of them, --speed N"),
        (("--speed", "0"), "speed = 0.0: expected a finite number > 0"),
        (("--speed", "1", "--every", "100ms"), "every = '100ms'"),
        (("--speed", "1", "--every", "2m"), "expected 1 to 60 s"),
        (("--speed", "1", "--for", "forever"), "for = 'forever'"),
        (("--speed", "1", "--for", "0s"), "duration_s = 0"),
        (("--speed", "1", "--max-bytes", "1k"), "max_bytes = 1000"),
        (("--speed", "1", "--link-capacity", "50M"), "expected DOWN,UP"),
        (("--speed", "1", "--finish"), "no such journal"),
    ],
)
def test_what_cannot_be_recorded_is_one_sentence_and_nothing_is_written(tmp_path, words, said):
    done = run("record", "--out", tmp_path / "phone.parquet", *words)
    assert done.exit_code == 2
    assert said in done.output
    assert done.output.count("\n") == 1
    assert not (tmp_path / "phone.parquet").exists()
    assert not list(tmp_path.glob("*.journal/*.sqlite*"))


def test_a_machine_without_battery_refuses_the_rule_of_charging_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("psutil.sensors_battery", lambda: None, raising=False)
    out = tmp_path / "desktop.parquet"
    done = run("record", "--out", out, "--speed", "1", "--available", "charging")
    assert done.exit_code == 2
    assert "cannot read whether it is" in done.output


def test_a_file_of_something_else_is_not_replaced(tmp_path):
    out = tmp_path / "phone.parquet"
    out.write_text("mine")
    done = run("record", "--out", out, "--speed", "1")
    assert done.exit_code == 2
    assert "exists already" in done.output
    assert out.read_text() == "mine"
    assert run("merge", out, "--out", out).exit_code == 2
