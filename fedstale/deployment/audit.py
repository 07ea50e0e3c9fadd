"""The log of who let which node in, changed its key or sent it away, and when.

Operators' commands, commands on the server and the SuperLink itself write lines of one shape, each
to the log of its machine.
"""

import datetime
import fcntl
import getpass
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path

from fedstale.errors import ConfigError
from fedstale.files import exposure

LOG = "enrolment.jsonl"
"""Its name: in Flower's home of an operator, and beside a SuperLink's database."""


class AuditLog:
    """Lines of JSON that are only ever added to: who did what to which node, and when.

    The file is its owner's alone (0600), and each line is on the disk before the call returns.
    """

    path: Path
    """The file."""

    def __init__(self, path: Path, **who: str) -> None:
        """Write to a file.

        Args:
            path: is made if it is not there.
            who: what each line says beside the user and the machine.

        Raises:
            ConfigError: it cannot be written, or others may read it.
        """
        self.path = path
        self._who = {"user": _user(), "host": socket.gethostname(), **who}
        with self._open():
            if found := exposure(path):
                raise ConfigError(f"audit: {found}")

    def also(self, **who: str) -> "AuditLog":
        """Return the same log whose lines say more of who it is."""
        made = copy(self)
        made._who = {**self._who, **who}
        return made

    def add(self, what: str, outcome: str, **about: object) -> None:
        """Add a line."""
        at = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = {"at": at, **self._who, "what": what, "outcome": outcome, **about}
        with self._open() as descriptor:
            os.write(descriptor, json.dumps(line).encode() + b"\n")
            os.fsync(descriptor)

    @contextmanager
    def noted(self, what: str, **about: object) -> Iterator[dict[str, object]]:
        """Note that something is tried, and then what came of it.

        Yields:
            What the second line says besides.
        """
        self.add(what, "tried", **about)
        found: dict[str, object] = {}
        try:
            yield found
        except BaseException as problem:
            self.add(what, "failed", **about, reason=str(problem) or type(problem).__name__)
            raise
        self.add(what, "done", **about, **found)

    @contextmanager
    def _open(self) -> Iterator[int]:
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
            descriptor = os.open(self.path, flags, 0o600)
        except OSError as problem:
            raise ConfigError(
                f"audit = {str(self.path)!r} cannot be written to: {problem.strerror}"
            ) from None
        try:
            # Lines of two commands at once stay whole.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container's user may have no name.
        return str(os.getuid())
