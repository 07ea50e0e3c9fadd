"""A node's two processes: who is started again, and how it ends."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a SuperNode alone elsewhere")

RUN = """
import ctypes, sys
if sys.argv[3:]:
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
from fedstale.deployment.node import NodeProcesses
part = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()} '); "
supernode, superexec = (
    [sys.executable, "-c", part + what, name]
    for name, what in (("supernode", sys.argv[1]), ("superexec", sys.argv[2]))
)
sys.exit(NodeProcesses(supernode, superexec).run())
"""
STAY = "time.sleep(600)"


@pytest.fixture
def started(tmp_path):
    """Return a function that starts a node of two parts, and one that returns their pids so far."""
    nodes = []

    def start(supernode=STAY, superexec=STAY, *, is_first=False):
        words = [supernode, superexec, *["first"] * is_first]
        nodes.append(subprocess.Popen([sys.executable, "-c", RUN, *words], cwd=tmp_path))
        return nodes[-1]

    def pids(name, n=1):
        deadline = time.monotonic() + 30.0
        while True:
            path = tmp_path / name
            found = [int(pid) for pid in path.read_text().split()] if path.exists() else []
            if len(found) >= n:
                return found
            assert time.monotonic() < deadline
            time.sleep(0.05)

    yield start, pids
    for one in nodes:
        one.kill()
        one.wait()


def is_gone(pid):
    deadline = time.monotonic() + 15.0
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_what_a_node_and_its_clients_write_is_their_users_alone(started, tmp_path):
    start, pids = started
    before = os.umask(0o022)
    try:
        start()
    finally:
        os.umask(before)
    pids("supernode")
    pids("superexec")
    modes = {(tmp_path / name).stat().st_mode & 0o777 for name in ("supernode", "superexec")}
    assert modes == {0o600}


def test_a_node_that_is_killed_leaves_nothing(started):
    start, pids = started
    found = start()
    both = [*pids("supernode"), *pids("superexec")]
    found.kill()
    assert all(map(is_gone, both))


def test_the_first_process_of_a_container_waits_for_what_others_leave(started):
    start, pids = started
    leave = "import subprocess; subprocess.Popen(['sleep', '1']); " + STAY
    found = start(superexec=leave, is_first=True)
    (superexec,) = pids("superexec")
    time.sleep(0.5)
    os.kill(superexec, signal.SIGKILL)
    pids("superexec", 2)
    states = [process.status() for process in psutil.Process(found.pid).children()]
    assert psutil.STATUS_ZOMBIE not in states
    # And does nothing else meanwhile.
    assert sum(psutil.Process(found.pid).cpu_times()[:2]) < 2.0
    found.terminate()
    assert found.wait(30) == 0
