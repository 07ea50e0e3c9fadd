"""What a node runs, and which of the two is started again; `test_node_processes.py` starts them."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from fedstale.deployment import node
from fedstale.errors import ConfigError
from fedstale.files import PRIVATE_UMASK

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a SuperNode alone elsewhere")


@pytest.mark.parametrize(
    "options", [["--isolation", "process"], ["--superexec-auth-secret-file=x"]]
)
def test_who_starts_client_apps_is_not_to_be_said(options):
    with pytest.raises(ConfigError, match="run flower-supernode"):
        node.run(options)


def test_elsewhere_than_on_linux_it_is_flowers_supernode(monkeypatch):
    ran = []
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda command, check: ran.append(command) or subprocess.CompletedProcess(command, 4),
    )
    assert node.run(["--insecure"]) == 4
    assert [os.path.basename(ran[0][0]), *ran[0][1:]] == ["flower-supernode", "--insecure"]


class Process:
    """A process that ends when a test says so."""

    def __init__(self, command, **options):
        self.command, self.pid, self.returncode = command, id(self), None
        assert options["umask"] == PRIVATE_UMASK

    def poll(self):
        return self.returncode

    def terminate(self):
        if self.returncode is None:
            self.returncode = -signal.SIGTERM

    def wait(self, timeout=None):
        assert self.returncode is not None
        return self.returncode


@pytest.fixture
def play(monkeypatch):
    """Return a function that runs a node through some events; it returns status and processes."""
    # The node handles signals itself.
    monkeypatch.setattr(
        signal, "signal", lambda number, handler: handlers.update({number: handler})
    )
    handlers, started, pauses = {}, [], []

    def start(command, **options):
        started.append(Process(command, **options))
        return started[-1]

    def play(*events):
        waiting = iter(events)

        def next_event(*given):
            which, status = next(waiting)
            if which == "signal":
                handlers[status](status, None)
                raise ChildProcessError
            process = [one for one in started if one.command == [which]][-1]
            process.returncode = status
            return SimpleNamespace(si_pid=process.pid)

        monkeypatch.setattr(os, "waitid", next_event)
        monkeypatch.setattr(subprocess, "Popen", start)
        monkeypatch.setattr(
            node, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=pauses.append)
        )
        status = node.NodeProcesses(["supernode"], ["superexec"]).run()
        assert all(process.returncode is not None for process in started)
        return status, [process.command[0] for process in started][2:], pauses

    return play


@pytest.mark.parametrize(("status", "found"), [(3, 3), (0, 0), (-signal.SIGKILL, 137)])
def test_a_node_ends_as_its_supernode_does(play, status, found):
    assert play(("supernode", status)) == (found, [], [])


def test_a_superexec_that_ends_is_started_again_with_pauses(play):
    events = [("superexec", 1), ("superexec", -9), ("signal", signal.SIGTERM)]
    status, again, pauses = play(*events)
    assert (status, again) == (0, ["superexec"] * 2)
    assert pauses == [5.0, 5.0]


def test_a_supernode_that_waits_for_ever_is_started_again_too(play):
    events = [("superexec", node.STUCK), ("supernode", 0)]
    assert play(*events)[:2] == (0, ["supernode", "superexec"])


def test_a_superexec_that_cannot_do_its_part_ends_both(play):
    assert play(("superexec", node.FLOWERS_WAY)) == (node.FLOWERS_WAY, [], [])


def test_a_node_whose_flower_has_other_parts_becomes_flowers_supernode(monkeypatch):
    became = []
    monkeypatch.setattr(node.NodeProcesses, "run", lambda processes: node.FLOWERS_WAY)
    monkeypatch.setattr(os, "umask", became.append)
    monkeypatch.setattr(os, "execv", lambda program, command: became.append([program, *command]))
    monkeypatch.setenv("PATH", os.environ["PATH"])
    node.run(["--insecure"])
    umask, (program, *command) = became
    assert umask == PRIVATE_UMASK
    assert os.path.basename(program) == "flower-supernode"
    assert command == [program, "--insecure"]


def test_nothing_is_started_again_as_a_node_ends(play):
    status, again, _ = play(("signal", signal.SIGINT))
    assert (status, again) == (0, [])
