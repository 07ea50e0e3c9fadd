"""Processes that end with their owner, with all that they have started.

Each command runs under a supervisor: a small process that adopts whatever the command starts, in
sessions of its own too, and kills it all when the command or the owner ends, even by kill -9.
Linux alone has adoption (PR_SET_CHILD_SUBREAPER) and a death signal (PR_SET_PDEATHSIG), by which
the command ends if its supervisor is killed. Elsewhere this is best effort: a process whose parent
has ended before it is not found.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from fedstale.files import PRIVATE_UMASK, open_private

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
# -P: a folder of the user's must not hide a module of Python's.
_SUPERVISOR = (sys.executable, "-P", "-m", "fedstale.deployment.processes")
_POLITE_S = 3.0
"""How long a command may take to end after SIGTERM."""
_LIMIT_S = 15.0


class ProcessGroup:
    """The processes that one owner has started, and all that they have started."""

    def __init__(self) -> None:
        self._supervisors: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "ProcessGroup":
        return self

    def __exit__(self, *problem: object) -> None:
        """End everything: first by SIGTERM, after some seconds by SIGKILL."""
        supervisors = [*reversed(self._supervisors.values())]
        for supervisor in supervisors:
            if supervisor.stdin is not None:
                # Its end is what ends the supervisor's command.
                supervisor.stdin.close()
        for supervisor in supervisors:
            supervisor.wait()
        self._supervisors.clear()

    def start(
        self, name: str, command: Sequence[str], *, environment: Mapping[str, str], log: Path
    ) -> None:
        """Start a process, in the place of one of its name.

        Args:
            name: under which it can be asked for and killed alone.
            command: program and arguments.
            environment: of the process.
            log: file for its output, which is appended to.
        """
        if name in self._supervisors:
            self.kill(name)
        # Private: a log may show what an app prints.
        out = open_private(str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            self._supervisors[name] = _supervised(command, environment, out)
        finally:
            os.close(out)

    @contextmanager
    def output_of(
        self, name: str, command: Sequence[str], *, environment: Mapping[str, str]
    ) -> Iterator[Iterator[str]]:
        """Start a process and yield the lines of its output; it ends with the context."""
        process = _supervised(command, environment, subprocess.PIPE)
        self._supervisors[name] = process
        try:
            yield (line.decode(errors="replace").rstrip("\r\n") for line in process.stdout or ())
        finally:
            self.kill(name)

    def is_running(self, name: str) -> bool:
        """Return whether a process was started and has not ended."""
        return name in self._supervisors and self._supervisors[name].poll() is None

    def pid(self, name: str) -> int:
        """Return the process below which a command runs."""
        return self._supervisors[name].pid

    def kill(self, name: str) -> None:
        """Kill one process and all that it has started at once, as a power failure would."""
        with self._supervisors.pop(name) as supervisor:
            kill_descendants(supervisor.pid)


def kill_descendants(pid: int) -> None:
    """Kill all descendants of a process."""
    deadline = time.monotonic() + _LIMIT_S
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while (left := process.children(recursive=True)) and time.monotonic() < deadline:
            for descendant in left:
                with suppress(psutil.NoSuchProcess):
                    descendant.kill()
            psutil.wait_procs(left, timeout=1.0)


def supervise(command: list[str]) -> None:
    """Run a command until it ends or standard input does, then kill all that it has started.

    The owner holds the other end of standard input. The system closes it when the owner ends,
    however it ends.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if not child:
        end_with_parent()
        # Databases, logs, and what apps leave: all of it is its owner's alone.
        os.umask(PRIVATE_UMASK)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execvp(command[0], command)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_owner, args=(child,), daemon=True).start()
    # Adopted processes are waited for as well, so that none stays a zombie.
    with suppress(ChildProcessError):
        while os.wait()[0] != child:
            pass
    kill_descendants(os.getpid())


def _end_with_owner(child: int) -> None:
    while os.read(0, 1):
        pass
    os.kill(child, signal.SIGTERM)
    time.sleep(_POLITE_S)
    kill_descendants(os.getpid())


def _supervised(
    command: Sequence[str], environment: Mapping[str, str], output: int
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*_SUPERVISOR, *command],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def end_with_parent() -> None:
    """Have this process killed when its parent ends, however that ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def name_process(name: str) -> None:
    """Show a name for this process in lists of processes, which cut it after 15 bytes."""
    _prctl(_PR_SET_NAME, name.encode())


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    supervise(sys.argv[1:])
