"""The file in a run's folder that says which client the run is in, and what it has printed last.

Clients run in the process of the run unless others are asked for, and may end it: by `os._exit`, a
segmentation fault, or by taking all memory. No exception then reaches anybody. The file is mapped
into memory, and a mapping outlives the process that wrote to it: noting a call costs a microsecond,
and no system call. The file goes when the run ends by itself; one that is left tells of a death.
"""

import faulthandler
import json
import mmap
import os
import re
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from fedstale.files import is_held

LAST_CALL, LOCK = ".last-call", ".lock"
"""Names of the file in a run's folder, and of the one that is locked while a run goes on."""

_CALL = struct.Struct("<24sqqdd24s")
_HEAD = struct.Struct("<8sqq")
_MAGIC = b"fscall 1"
_CALL_AT, _RING_AT, _RING = _HEAD.size, 128, 1 << 15
_LINES = 20
_GROWTH = 1 << 18
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True, slots=True, kw_only=True)
class LastCall:
    """What a process was doing when it last wrote to its file."""

    pid: int
    """Of the process."""
    job_id: int | None
    """The job whose client ran, the first if several ran as one program; None if none did."""
    node_id: int
    """Flower's id of the client's node."""
    together: int
    """Number of clients that ran as one program."""
    kind: str
    """Message type of the job."""
    started: float
    """When the call began, on the clock of `time.perf_counter`, in s."""
    now: float
    """Virtual instant of the call in s."""
    lines: tuple[str, ...]
    """What the client printed last; then, after a fatal signal, where it was."""

    @classmethod
    def read(cls, folder: Path) -> "LastCall | None":
        """Return what a folder holds; None if its run ended by itself, or never began."""
        try:
            data = (folder / LAST_CALL).read_bytes()
            magic, pid, written = _HEAD.unpack_from(data)
            message_id, node_id, together, started, now, kind = _CALL.unpack_from(data, _CALL_AT)
            job_id = int(message_id.partition(b"\0")[0].rpartition(b"-")[2] or -1)
        except (OSError, ValueError, struct.error):
            return None
        if magic != _MAGIC:
            return None
        at = _RING_AT + written % _RING
        ring = data[at : _RING_AT + _RING] + data[_RING_AT:at]
        printed = _lines(ring[-min(written, _RING) :] if written else b"")
        return cls(
            pid=pid,
            job_id=None if job_id < 0 else job_id,
            node_id=node_id,
            together=together,
            kind=kind.rstrip(b"\0").decode(errors="replace"),
            started=started,
            now=now,
            lines=(*printed[-_LINES:], *_of_app(_lines(data[_RING_AT + _RING :]))[:_LINES]),
        )

    def words(self, device: str = "") -> str:
        """Return who ran, in words.

        Args:
            device: name of the device; the node's id if it is not known.
        """
        if self.job_id is None:
            return "the run, in no client of its own process,"
        one_of = f"one of {self.together} clients, the first" if self.together > 1 else "the client"
        return f"{one_of} of job {self.job_id} ({self.kind}) on {device or f'node {self.node_id}'}"


def told(folder: Path) -> str:
    """Return in a sentence how the process of a run was lost; empty if it was not.

    Its last lines come after the sentence, a line each.
    """
    call = LastCall.read(folder)
    if call is None or is_held(folder / LOCK):
        return ""
    where = "" if call.job_id is None else f" while {call.words()} ran"
    return "\n    ".join([f"the process of the run ended{where}", *call.lines])


def _temporary() -> BinaryIO:
    return tempfile.TemporaryFile(buffering=0)


@dataclass(slots=True, kw_only=True)
class Kept:
    """Files without a name, opened by a supervisor before the process of the run exists."""

    jobs: BinaryIO = field(default_factory=_temporary)
    """The rows of the table of jobs."""
    log: BinaryIO = field(default_factory=_temporary)
    """One JSON list a line: what happened, and its values."""
    _map: mmap.mmap | None = None
    _end: int = 0

    def write(self, *what: object) -> None:
        """Log what happened; mapped, since a system call would cost ten times as much.

        Raises:
            OSError: the disk is full.
        """
        line = json.dumps(what).encode() + b"\n"
        end = self._end + len(line)
        if self._map is None or end > len(self._map):
            size = -(-end // _GROWTH) * _GROWTH
            room = size - (len(self._map) if self._map is not None else 0)
            os.pwrite(self.log.fileno(), bytes(room), size - room)
            self._map = mmap.mmap(self.log.fileno(), size)
        self._map[self._end : end] = line
        self._end = end

    def has_lost_run(self) -> bool:
        """Return whether a run has begun that did not end by itself."""
        runs = [Path(line[1]) for line in self.lines() if line[0] == "run"]
        return any(LastCall.read(folder) is not None for folder in runs)

    def lines(self) -> Iterator[list[Any]]:
        """Yield what was logged."""
        self.log.seek(0)
        for line in self.log.read().rstrip(b"\0").splitlines():
            # The process may have been lost within the last one.
            with suppress(ValueError):
                yield json.loads(line)


class LastCallFile:
    """The file while the run goes on."""

    def __init__(self, folder: Path) -> None:
        """Make the file.

        Raises:
            OSError: the folder is not writable.
        """
        self._path = folder / LAST_CALL
        self._path.unlink(missing_ok=True)
        # What is appended comes after the ring: tracebacks of fatal signals, by file number.
        self.file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        # Room on the disk: a mapping of a file without any ends the process when it is written to.
        os.write(self.file, bytes(_RING_AT + _RING))
        self._map = mmap.mmap(self.file, _RING_AT + _RING)
        self._written, self._in_call = 0, False
        _HEAD.pack_into(self._map, 0, _MAGIC, os.getpid(), 0)
        self.left()

    def entered(self, message_id: str, node_id: int, kind: str, now: float, together: int) -> None:
        """Note that a client begins, or several as one program; see `LastCall`.

        The id of the message ends in the job's number, after a hyphen.
        """
        self._in_call, started = True, time.perf_counter()
        call = message_id.encode(), node_id, together, started, now, kind.encode()
        _CALL.pack_into(self._map, _CALL_AT, *call)

    def left(self) -> None:
        """Note that no client runs."""
        self._in_call = False
        # A message without an id is none.
        self._map[_CALL_AT] = 0

    def printed(self, text: str) -> None:
        """Keep what a client prints, the oldest going first."""
        if not self._in_call:
            return
        data = text.encode(errors="replace")[-_RING:]
        at = self._written % _RING
        first = data[: _RING - at]
        self._map[_RING_AT + at : _RING_AT + at + len(first)] = first
        self._map[_RING_AT : _RING_AT + len(data) - len(first)] = data[len(first) :]
        self._written += len(data)
        _HEAD.pack_into(self._map, 0, _MAGIC, os.getpid(), self._written)

    def close(self) -> None:
        """Remove the file: the run has ended by itself."""
        self._path.unlink(missing_ok=True)
        self._map.close()
        os.close(self.file)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Keep what clients print, and where Python is when a fatal signal comes.

        Both belong to the whole process, so this is for one that does nothing but the run.
        """
        before = sys.stdout, sys.stderr
        ours: tuple[Any, Any] = _Copied(sys.stdout, self), _Copied(sys.stderr, self)
        was_enabled = faulthandler.is_enabled()
        faulthandler.enable(self.file)
        sys.stdout, sys.stderr = ours
        try:
            yield
        finally:
            for name, own, stream in zip(("stdout", "stderr"), ours, before, strict=True):
                if getattr(sys, name) is own:
                    setattr(sys, name, stream)
            faulthandler.disable()
            if was_enabled:
                faulthandler.enable(sys.__stderr__ or 2)


class _Copied:
    """A stream that keeps a copy of what is written to it."""

    def __init__(self, stream: TextIO, kept: LastCallFile) -> None:
        self._stream, self._kept = stream, kept

    def write(self, text: str) -> int:
        written = self._stream.write(text)
        # A thread that outlives the run prints on.
        with suppress(ValueError):
            self._kept.printed(text)
        return written

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as the stream's
        return getattr(self._stream, name)


def _of_app(traceback: list[str]) -> list[str]:
    """Return a traceback as far as the app called; what called the app is the same each time."""
    ours = (i for i, line in enumerate(traceback) if line.endswith("in run_client"))
    return traceback[: next(ours, None)]


def _lines(data: bytes) -> list[str]:
    """Return the lines that are not empty, as a terminal would show them."""
    text = data.decode(errors="replace").replace("\r", "\n")
    lines = (_CONTROLS.sub("", line).rstrip() for line in text.split("\n"))
    return [line for line in lines if line]
