"""Nothing stays behind, however the owner of a process group ends."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import psutil
import pytest

from fedstale.deployment.processes import ProcessGroup

# Like Flower's: it starts a child in a session of its own, and both ignore polite requests. It also
# starts a process whose own child outlives it.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
kind = sys.argv[1]
if kind == "parent":
    subprocess.Popen([sys.executable, __file__, "child"], start_new_session=True)
    subprocess.run([sys.executable, __file__, "short"], start_new_session=True)
if kind == "short":
    subprocess.Popen([sys.executable, __file__, "orphan"], start_new_session=True)
    sys.exit()
time.sleep(600)
"""

OWNER = """
import os, sys, time
from pathlib import Path
from fedstale.deployment.processes import ProcessGroup
with ProcessGroup() as group:
    group.start("stubborn", sys.argv[2:], environment=os.environ, log=Path(sys.argv[1]))
    time.sleep(600)
"""

LINUX = sys.platform.startswith("linux")
needs_linux = pytest.mark.skipif(not LINUX, reason="other systems have no death signal")


@pytest.fixture
def stubborn(tmp_path):
    path = tmp_path / "stubborn.py"
    path.write_text(STUBBORN)
    return [sys.executable, str(path), "parent"]


@contextmanager
def owned(stubborn, tmp_path):
    """Yield a process that owns a group, its supervisor, and what runs below the supervisor."""
    command = [sys.executable, "-c", OWNER, str(tmp_path / "log"), *stubborn]
    with subprocess.Popen(command) as owner:
        try:
            wait_until(lambda: psutil.Process(owner.pid).children())
            (supervisor,) = psutil.Process(owner.pid).children()
            yield owner, supervisor, started_by(supervisor)
        finally:
            # The owner sleeps, and would wait for none that is killed before it.
            left = (
                psutil.Process(owner.pid).children(recursive=True) if owner.poll() is None else []
            )
            owner.kill()
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=5.0)


def wait_until(condition, limit_s=60.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def running_below(process):
    """Return the processes below one that run, by the last word of their command."""
    found = {}
    for child in process.children(recursive=True):
        # One that has ended, and is not waited for yet, has no command any more.
        with suppress(psutil.Error):
            found.update((word, child) for word in child.cmdline()[-1:])
    return found


def started_by(supervisor):
    # Elsewhere an orphan cannot be found, nor ended.
    expected = {"child", "orphan", "parent"} if LINUX else {"child", "parent"}
    wait_until(lambda: running_below(supervisor).keys() == expected)
    return list(running_below(supervisor).values())


def start(group, command, tmp_path, name="stubborn"):
    """Start a command and return its supervisor."""
    before = set(psutil.Process().children())
    group.start(name, command, environment=dict(os.environ), log=tmp_path / "log")
    (supervisor,) = set(psutil.Process().children()) - before
    return supervisor


def all_end(processes, limit_s=0.0):
    _, alive = psutil.wait_procs(processes, timeout=limit_s)
    return not alive


def test_the_end_of_a_group_ends_even_children_in_sessions_of_their_own(stubborn, tmp_path):
    with ProcessGroup() as group:
        started = started_by(start(group, stubborn, tmp_path))
    assert all_end(started)


def test_kill_9_of_the_owner_ends_everything(stubborn, tmp_path):
    with owned(stubborn, tmp_path) as (owner, supervisor, started):
        owner.kill()
        assert all_end([supervisor, *started], limit_s=20.0)


def test_ctrl_c_at_the_owner_ends_everything(stubborn, tmp_path):
    with owned(stubborn, tmp_path) as (owner, supervisor, started):
        owner.send_signal(signal.SIGINT)
        assert owner.wait(60.0) != 0
        assert all_end([supervisor, *started])


@needs_linux
def test_kill_9_of_the_supervisor_ends_its_command(stubborn, tmp_path):
    with owned(stubborn, tmp_path) as (_, supervisor, started):
        (command,) = (process for process in started if process.cmdline()[-1:] == ["parent"])
        try:
            supervisor.kill()
            assert all_end([command], limit_s=20.0)
        finally:
            for process in set(started) - {command}:
                process.kill()


@needs_linux
def test_a_supervisor_cannot_be_ended_politely(stubborn, tmp_path):
    with owned(stubborn, tmp_path) as (_, supervisor, started):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            supervisor.send_signal(number)
        assert not all_end([supervisor, *started], limit_s=0.5)
        assert all(process.is_running() for process in [supervisor, *started])


@needs_linux
def test_what_a_command_leaves_behind_ends_with_it(tmp_path):
    code = (
        "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
    )
    with ProcessGroup() as group:
        supervisor = start(group, [sys.executable, "-c", code], tmp_path)
        assert all_end([supervisor], limit_s=60.0)
        assert not group.is_running("stubborn")
    left = int((tmp_path / "log").read_text())
    assert not psutil.pid_exists(left) or psutil.Process(left).name() != "sleep"


def test_kill_ends_one_process_and_not_the_others(stubborn, tmp_path):
    with ProcessGroup() as group:
        started = started_by(start(group, stubborn, tmp_path))
        other = [sys.executable, "-c", "import time; time.sleep(600)"]
        start(group, other, tmp_path, name="other")
        group.kill("other")
        assert group.is_running("stubborn")
        group.kill("stubborn")
        assert all_end(started)


@needs_linux
def test_a_process_in_the_place_of_one_of_its_name_leaves_nothing_of_that(stubborn, tmp_path):
    at_once = [sys.executable, "-c", ""]
    with ProcessGroup() as group:
        first = started_by(start(group, stubborn, tmp_path))
        n_files = psutil.Process().num_fds()
        start(group, at_once, tmp_path)
        assert all_end(first)
        wait_until(lambda: not group.is_running("stubborn"))
        # As one that has ended is started again, and again.
        for _ in range(3):
            start(group, at_once, tmp_path)
        assert psutil.Process().num_fds() == n_files


def test_the_output_of_a_process_comes_line_by_line(tmp_path):
    command = [sys.executable, "-c", "print('a'); print('b'); print('\\xe4')"]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    with (
        ProcessGroup() as group,
        group.output_of("talk", command, environment=environment) as lines,
    ):
        assert list(lines) == ["a", "b", "\N{REPLACEMENT CHARACTER}"]


def test_a_process_whose_output_is_not_read_to_the_end_is_ended(tmp_path):
    command = [sys.executable, "-uc", "print('a'); import time; time.sleep(600)"]
    before = set(psutil.Process().children(recursive=True))
    with ProcessGroup() as group:
        with group.output_of("talk", command, environment=dict(os.environ)) as lines:
            assert next(lines) == "a"
            started = set(psutil.Process().children(recursive=True)) - before
        assert started
        assert all_end(started)
