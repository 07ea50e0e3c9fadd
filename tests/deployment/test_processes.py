"""Nothing stays behind, however the owner of a family ends."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from fedstale.deployment import processes
from fedstale.deployment.processes import ProcessGroup, clean_up, members, records_folder, sweep

# Like Flower's: it starts a child in a session of its own, and both ignore polite requests.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
if len(sys.argv) == 1:
    subprocess.Popen([sys.executable, __file__, "child"], start_new_session=True)
time.sleep(600)
"""

OWNER = """
import os, sys, time
from pathlib import Path
from fedstale.deployment.processes import ProcessGroup
with ProcessGroup(mark=sys.argv[1]) as family:
    command = [sys.executable, sys.argv[2]]
    family.start("stubborn", command, environment=os.environ, log=Path(sys.argv[3]))
    print(family._watcher.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def own_records(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def stubborn(tmp_path):
    path = tmp_path / "stubborn.py"
    path.write_text(textwrap.dedent(STUBBORN))
    return path


@pytest.fixture
def owner(tmp_path, stubborn):
    """A process that owns a family of two; gives the process, its watcher's id and the mark."""
    mark = f"test-{os.getpid()}-{tmp_path.name}"
    command = [sys.executable, "-c", OWNER, mark, str(stubborn), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            watcher = int(process.stdout.readline())
            wait_until(lambda: len(list(members(mark))) == 2)
            yield process, watcher, mark
        finally:
            process.kill()
            sweep(mark)


def wait_until(condition, limit_s=60.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def start(family, stubborn, tmp_path, name="stubborn"):
    command = [sys.executable, str(stubborn)]
    family.start(name, command, environment=dict(os.environ), log=tmp_path / "log")
    wait_until(lambda: len(list(members(family.mark))) == 2)


def test_the_end_of_a_family_ends_even_children_in_sessions_of_their_own(
    stubborn, tmp_path, monkeypatch
):
    monkeypatch.setattr(processes, "_POLITE_S", 0.2)
    with ProcessGroup() as family:
        start(family, stubborn, tmp_path)
        assert len(list(records_folder().iterdir())) == 1
    assert list(members(family.mark)) == []
    assert list(records_folder().iterdir()) == []


def test_a_failure_ends_the_family_too(stubborn, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_POLITE_S", 0.2)
    family = ProcessGroup()

    def fail():
        with family:
            start(family, stubborn, tmp_path)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(members(family.mark)) == []


def test_kill_9_of_the_owner_ends_everything_at_once(owner):
    process, _, mark = owner
    process.kill()
    wait_until(lambda: not list(members(mark)), limit_s=20.0)


def test_the_next_start_ends_what_is_left_when_the_watcher_was_killed_as_well(owner):
    process, watcher, mark = owner
    os.kill(watcher, signal.SIGKILL)
    process.kill()
    process.wait()
    # On Linux the direct child dies with its parent; its own child does not.
    wait_until(lambda: len(list(members(mark))) == (1 if sys.platform == "linux" else 2))
    assert clean_up() >= 1
    assert list(members(mark)) == []
    assert list(records_folder().iterdir()) == []


def test_a_family_whose_owner_lives_is_left_alone(owner):
    _, _, mark = owner
    assert clean_up() == 0
    assert len(list(members(mark))) == 2


def test_another_process_that_has_got_the_number_of_an_ended_one_is_spared(tmp_path):
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command) as stranger:
        try:
            started_at = psutil.Process(stranger.pid).create_time()
            records_folder().mkdir(parents=True)
            facts = {"pid": stranger.pid, "started_at": started_at - 100.0}
            gone = {"owner": facts, "processes": [facts]}
            (records_folder() / "gone.json").write_text(json.dumps(gone))
            (records_folder() / "broken.json").write_text("{")
            assert clean_up() == 0
            assert stranger.poll() is None
            assert list(records_folder().iterdir()) == []
            gone["processes"] = [{"pid": stranger.pid, "started_at": started_at}]
            (records_folder() / "gone.json").write_text(json.dumps(gone))
            assert clean_up() == 1
            assert not psutil.pid_exists(stranger.pid)
        finally:
            stranger.kill()


def test_kill_ends_one_process_and_not_the_others(stubborn, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_POLITE_S", 0.2)
    with ProcessGroup() as family:
        start(family, stubborn, tmp_path)
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        family.start("other", command, environment=dict(os.environ), log=tmp_path / "log")
        family.kill("other")
        assert family.is_running("stubborn")
