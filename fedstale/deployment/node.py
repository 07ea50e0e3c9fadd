"""A device's node: Flower's SuperNode (`supernode`), with ClientApps that start in a fork (`warm`).

Both run until the SuperNode ends or this process is told to end. The SuperExec is started again
when it ends, however it does, and the SuperNode if it waits for the answer of a ClientApp that was
killed. With a Flower that lacks what warm ClientApps stand on, this is flower-supernode alone. What
they write is their user's alone. This file imports little, since its process stays in memory.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fedstale.deployment.processes import end_with_parent
from fedstale.errors import ConfigError
from fedstale.files import PRIVATE_UMASK

STUCK = 76
"""Status of a SuperExec whose SuperNode waits for an answer that will not come."""
FLOWERS_WAY = 77
"""Status of a SuperExec that cannot start ClientApps in forks, with the Flower that is here."""
_KILLED = 128
"""A shell's status of a program that a signal ended is this and the signal's number."""
_POLITE_S = 10.0
_PAUSE_S = 5.0
_HOST, _PORT = "127.0.0.1", 9094
"""Where a SuperNode's Runtime API is if nobody says (Flower, supercore/constant.py)."""


def run(arguments: Sequence[str]) -> int:
    """Run flower-supernode, and start its ClientApps in forks, until it ends.

    Elsewhere than on Linux, where a fork cannot always do what its parent can, this is
    flower-supernode alone.

    Args:
        arguments: of flower-supernode.

    Returns:
        Its exit status; 0 if this process was told to end.

    Raises:
        ConfigError: its options say who starts ClientApps; or flower-supernode is not installed
            here.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    program = shutil.which("flower-supernode", path=path)
    if program is None:
        raise ConfigError(f"flower-supernode: not installed beside {sys.executable}")
    if not sys.platform.startswith("linux"):
        return subprocess.run([program, *arguments], check=False).returncode
    module = [sys.executable, "-P", "-m"]
    superexec = [*module, "fedstale.deployment.warm", *_runtime(arguments)]
    supernode = [*module, "fedstale.deployment.supernode", *arguments, "--isolation", "process"]
    # It starts Flower's programs by their names.
    os.environ["PATH"] = path
    status = NodeProcesses(supernode, superexec).run()
    if status == FLOWERS_WAY:
        os.umask(PRIVATE_UMASK)
        os.execv(program, [program, *arguments])
    return status


def _runtime(arguments: Sequence[str]) -> list[str]:
    """Return where a SuperNode's Runtime API is, as the arguments of `warm`."""
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("--host", default=_HOST)
    options.add_argument("--port", default=str(_PORT))
    options.add_argument("--ssl-ca-certfile", "--appio-ssl-ca-certfile")
    options.add_argument("--isolation")
    options.add_argument("--superexec-auth-secret-file")
    given = options.parse_known_args(arguments)[0]
    if given.isolation is not None or given.superexec_auth_secret_file is not None:
        raise ConfigError(
            "--isolation, --superexec-auth-secret-file: not expected, since fedstale node starts "
            "the ClientApps; with a SuperExec of your own, run flower-supernode"
        )
    host = f"[{given.host}]" if ":" in given.host else given.host
    ca = given.ssl_ca_certfile
    return [f"{host}:{given.port}", *(("--root-certificates", ca) if ca else ())]


class NodeProcesses:
    """A SuperNode and its SuperExec, which are this process's only children."""

    def __init__(self, supernode: Sequence[str], superexec: Sequence[str]) -> None:
        """Keep the commands of both."""
        self._commands = supernode, superexec
        self._is_terminated = False

    def run(self) -> int:
        """Run both until the SuperNode ends; return its exit status, or 0 if this was told to.

        Where the SuperExec cannot do its part, both end, and its status is returned.
        """
        self._supernode, self._superexec = map(_started, self._commands)
        began = time.monotonic()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._end)
        while (status := self._supernode.poll()) is None:
            with suppress(ChildProcessError):
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
                # The first process of a container is given what others leave.
                if ended and ended.si_pid not in (self._supernode.pid, self._superexec.pid):
                    os.waitpid(ended.si_pid, 0)
            if self._superexec.poll() is not None and self._supernode.poll() is None:
                if self._is_terminated:
                    self._supernode.wait()
                    continue
                if self._superexec.returncode == FLOWERS_WAY:
                    self._stop(self._supernode)
                    return FLOWERS_WAY
                if self._superexec.returncode == STUCK:
                    self._stop(self._supernode)
                    self._supernode = _started(self._commands[0])
                # One that fails at once must not take the device's processor.
                time.sleep(max(began + _PAUSE_S - time.monotonic(), 0.0))
                self._superexec, began = _started(self._commands[1]), time.monotonic()
        self._stop(self._superexec)
        return 0 if self._is_terminated else status if status >= 0 else _KILLED - status

    def _end(self, *_: object) -> None:
        self._is_terminated = True
        for process in (self._supernode, self._superexec):
            process.terminate()

    def _stop(self, process: "subprocess.Popen[bytes]") -> None:
        process.terminate()
        try:
            process.wait(_POLITE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _started(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    # There are no threads here that could hold a lock.
    return subprocess.Popen(command, preexec_fn=end_with_parent, umask=PRIVATE_UMASK)  # noqa: PLW1509
