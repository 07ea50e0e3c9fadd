"""What is on the disk of recorders that were killed, and of one whose disk fails."""

import subprocess
import sys

import pytest

from fedstale.traces.recording import journal as journals


def instants_of(folder):
    readings, dropped = journals.read(folder)
    return readings["instant"].tolist(), dropped


FULL_DISK = """
import resource, sys
from pathlib import Path
from fedstale.errors import TraceError
from fedstale.traces.recording.journal import Journal, RecordingRun
from fedstale.traces.recording.monitor import Reading

about = RecordingRun(device_id="phone", interval_s=60.0, utc_offset_s=0.0)
with Journal(Path(sys.argv[1]), about, max_bytes=10**6) as journal:
    for k in range(5):
        journal.append(Reading(instant=float(k)), 0.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    for k in range(5, 100):
        try:
            journal.append(Reading(instant=float(k)), 0.0)
        except TraceError as problem:
            print(k, problem)
            break
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    journal.append(Reading(instant=1000.0), 0.0)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_a_disk_that_fails_is_an_error_and_keeps_what_was_there(tmp_path):
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FULL_DISK, str(tmp_path / "j")],
        capture_output=True,
        text=True,
        check=True,
    )
    failed, says = run.stdout.split(maxsplit=1)
    assert "cannot be written (disk I/O error); what was recorded so far is kept" in says
    kept = [float(k) for k in range(int(failed))]
    assert instants_of(tmp_path / "j") == ([*kept, 1000.0], {})


# Children of one process: a recorder that is killed while others read, and readers that are killed.
READERS = """
import os, random, signal, sys, time
from pathlib import Path
from fedstale.traces.recording import journal as journals
from fedstale.traces.recording.journal import Journal, RecordingRun
from fedstale.traces.recording.monitor import Reading

folder, rng = Path(sys.argv[1]), random.Random(5)
about = RecordingRun(device_id="phone", interval_s=1.0, utc_offset_s=0.0)

def forked(work):
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return child

def write(turn, tell):
    with Journal(folder, about, max_bytes=10**8) as journal:
        for k in range(10**7):
            journal.append(Reading(instant=turn * 1e6 + k), float(k))
            os.write(tell, k.to_bytes(4, "little"))

def read_for_ever():
    while True:
        journals.read(folder)

n_reads = 0
for turn in range(10):
    told, tell = os.pipe()
    recorder = forked(lambda: write(turn, tell))
    os.close(tell)
    reported = os.read(told, 4)
    others = [forked(read_for_ever) for _ in range(2)]
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        before = len(reported) // 4
        for readings in (journals.read(folder, 1e9)[0], journals.read(folder)[0]):
            mine = readings.loc[readings["run"] == turn, "instant"].tolist()
            assert mine == [turn * 1e6 + k for k in range(len(mine))]
            assert len(mine) >= before, "what was written before is read"
        n_reads += 1
        reported += os.read(told, 65536)
        if rng.random() < 0.3:
            killed = others.pop()
            os.kill(killed, signal.SIGKILL)
            os.waitpid(killed, 0)
            others.append(forked(read_for_ever))
    for child in (recorder, *others):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    while more := os.read(told, 65536):
        reported += more
    print(len(reported) // 4)
print(n_reads)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has neither fork nor SIGKILL")
def test_readers_and_a_recorder_that_are_killed_cost_nothing_that_was_written(tmp_path):
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READERS, str(tmp_path / "j")],
        capture_output=True,
        text=True,
        check=False,
        env={"OPENBLAS_NUM_THREADS": "1", "PATH": ""},
    )
    assert run.returncode == 0, run.stderr
    *reported, n_reads = [int(line) for line in run.stdout.split()]
    assert len(reported) == 10
    assert n_reads >= 10
    readings, dropped = journals.read(tmp_path / "j")
    assert dropped == {}
    for turn in range(10):
        kept = readings.loc[readings["run"] == turn, "instant"]
        assert kept.tolist() == [turn * 1e6 + k for k in range(kept.size)]
        assert reported[turn] <= kept.size <= reported[turn] + 1
