"""Processes that are gone when their owner is gone, however it went.

Flower's processes start others, some in sessions of their own, and some of these outlive their
parents. All of them inherit a mark in their environment, by which they are found. Three things
end them: the owner; a watcher that notices when the owner disappears, even by kill -9; and the
next owner, which reads the records that earlier ones left.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

MARK = "FEDSTALE_FAMILY"
"""Variable in the environment of every process of a family."""

# -P: a folder of the user's must not hide a module of Python's.
_LEASH = (sys.executable, "-P", "-m", "fedstale.deployment.leash")
_WATCHER = (sys.executable, "-P", "-m", "fedstale.deployment.watcher")
_POLITE_S, _LIMIT_S = 3.0, 15.0
# The time of a start is computed from the clock, which may have been set in between.
_SAME_START_S = 2.0


def records_folder() -> Path:
    """Return the folder in which owners note what they have started."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "fedstale" / "families"


@dataclass(slots=True)
class ProcessGroup:
    """The processes that one owner has started, and all that they have started."""

    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    _started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _watcher: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "ProcessGroup":
        """Start the watcher."""
        self._watcher = subprocess.Popen(
            [*_WATCHER, self.mark],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self._note()
        return self

    def __exit__(self, *problem: object) -> None:
        """End everything, and leave no record."""
        self.stop()
        if self._watcher is not None and self._watcher.stdin is not None:
            self._watcher.stdin.close()
            self._watcher.wait()
        self._record.unlink(missing_ok=True)

    def start(
        self, name: str, command: Sequence[str], *, environment: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Start a process.

        Call it from a thread that lives as long as the family: on Linux the process dies with it.

        Args:
            name: under which it can be stopped alone.
            command: program and arguments.
            environment: of the process; the mark is added.
            log: file for its output, which is appended to.
        """
        with log.open("ab") as out:
            process = subprocess.Popen(
                [*_LEASH, str(os.getpid()), *command],
                env={**environment, MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started[name] = process
        self._note()
        return process

    def is_running(self, name: str) -> bool:
        """Return whether a process has not ended by itself."""
        return self._started[name].poll() is None

    def kill(self, name: str) -> None:
        """Kill one process and its group at once, as a power failure would."""
        process = self._started.pop(name)
        _kill_group(process.pid)
        process.wait()
        self._note()

    def stop(self) -> None:
        """End all processes: first politely, then for good."""
        for process in reversed(self._started.values()):
            process.terminate()
        deadline = time.monotonic() + _POLITE_S
        for process in self._started.values():
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                _kill_group(process.pid)
                process.wait()
        sweep(self.mark)
        self._started.clear()

    @property
    def _record(self) -> Path:
        return records_folder() / f"{self.mark}.json"

    def _note(self) -> None:
        """Write what runs, so that a later owner can end it."""
        self._record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        facts = {
            "owner": _identity(os.getpid()),
            "processes": [_identity(p.pid) for p in self._started.values() if p.poll() is None],
        }
        part = self._record.with_suffix(".part")
        part.write_text(json.dumps(facts), encoding="utf-8")
        os.replace(part, self._record)


def clean_up() -> int:
    """End what is left of families whose owner is gone.

    Returns:
        How many processes were ended.
    """
    ended = 0
    for record in sorted(records_folder().glob("*.json")):
        try:
            facts = json.loads(record.read_text(encoding="utf-8"))
            owner, processes = facts["owner"], facts["processes"]
            if owner is not None and _same(owner) is not None:
                continue
        except (OSError, ValueError, KeyError, TypeError):
            # Half a record, or one that another owner has just removed: the mark still tells.
            processes = []
        known = [process for facts in processes if (process := _same(facts)) is not None]
        ended += sweep(record.stem, known)
        record.unlink(missing_ok=True)
    return ended


def sweep(mark: str, known: Sequence[psutil.Process] = ()) -> int:
    """Kill all processes of a family until there are none.

    Args:
        mark: of the family.
        known: processes that belong to it although their environment may not be readable.

    Returns:
        How many were killed.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + _LIMIT_S
    left = {*known, *members(mark)}
    while left and time.monotonic() < deadline:
        for process in left:
            killed.add(process.pid)
            try:
                process.kill()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        psutil.wait_procs(left, timeout=1.0)
        left = set(members(mark))
    return len(killed)


def members(mark: str) -> Iterator[psutil.Process]:
    """Find the living processes of a family."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.pid != os.getpid():
                yield process
        except (psutil.Error, OSError):
            # Someone else's, or it has just ended.
            continue


def _identity(pid: int) -> dict[str, float] | None:
    try:
        return {"pid": pid, "started_at": psutil.Process(pid).create_time()}
    except psutil.NoSuchProcess:
        return None


def _same(facts: Mapping[str, float] | None) -> psutil.Process | None:
    """Return the process of an identity; None if it has ended, even if another has its number."""
    if facts is None:
        return None
    try:
        process = psutil.Process(int(facts["pid"]))
        started_at = process.create_time()
    except psutil.NoSuchProcess:
        return None
    return process if abs(started_at - facts["started_at"]) < _SAME_START_S else None


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
