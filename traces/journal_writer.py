"""Writes a journal of readings: synced one by one, bounded in size, continued after any death.

See `journal` for what is on the disk. Deliberately absent: buffering, which would lose more than
the reading being written.
"""

import contextlib
import errno
import json
import math
import os
from dataclasses import asdict, replace
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from fedstale.errors import ResumeError, TraceError
from fedstale.traces.journal import (
    FORMAT,
    FRAME_BYTES,
    RECORD,
    VERSION,
    Run,
    files_of,
    framed,
    header,
)
from fedstale.traces.monitor import Reading

HOUR_S = 3600.0
_HEADER_LIMIT = 4096


class Journal:
    """Appends readings to a journal; a context manager.

    Args:
        folder: the journal; made if there is none, continued if there is one.
        about: the device and this run; its field `run` is set here.
        max_bytes: what the journal may take on disk.

    Raises:
        ResumeError: the journal is of another device, or another recorder is writing to it.
        TraceError: the bound is too small for two hours, or the folder cannot be written.
    """

    def __init__(self, folder: Path, about: Run, *, max_bytes: int) -> None:
        self._per_file = math.ceil(HOUR_S / about.interval_s) + 1
        least = 2 * (self._per_file * FRAME_BYTES + _HEADER_LIMIT)
        if max_bytes < least:
            raise TraceError(
                f"max_bytes = {max_bytes}: expected at least {least}, which is two hours of "
                f"readings every {about.interval_s:g} s"
            )
        self._folder, self._max_bytes = folder, max_bytes
        self._file: FileIO | None = None
        self._hour, self._count = 0.0, 0
        try:
            folder.mkdir(exist_ok=True)
            self._lock = _locked(folder)
        except OSError as problem:
            raise TraceError(f"{folder}: cannot be written ({problem.strerror})") from None
        try:
            self._about = self._continued(about)
        except BaseException:
            self._lock.close()
            raise

    def _continued(self, about: Run) -> Run:
        self._sizes = {path: path.stat().st_size for path in files_of(self._folder)}
        earlier = [run for run in (header(path.read_bytes())[0] for path in self._sizes) if run]
        for run in earlier:
            if run.device_id != about.device_id:
                raise ResumeError(
                    f"{self._folder}: a journal of device {run.device_id!r}, not of "
                    f"{about.device_id!r}: record that device, or to another file"
                )
        return replace(about, run=1 + max((run.run for run in earlier), default=-1))

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def append(self, reading: Reading, steady: float) -> None:
        """Put one reading on the disk; it is there when this returns.

        Args:
            reading: what the device read of itself.
            steady: s of a clock that nobody sets, of the same moment.

        Raises:
            TraceError: the disk is full or gone; what was appended before stays readable.
        """
        frame = framed(_packed(reading, steady))
        try:
            hour = math.floor(reading.instant / HOUR_S)
            if self._file is None or hour != self._hour or self._count >= self._per_file:
                self._open_next(hour)
            assert self._file is not None
            self._make_room(len(frame))
            self._write(frame)
            self._count += 1
        except OSError as problem:
            # What follows half a frame would be unreadable: the next reading opens a new file.
            self._close_file()
            raise TraceError(
                f"{self._folder}: cannot be written ({problem.strerror}); what was recorded so far "
                "is kept"
            ) from None

    def close(self) -> None:
        """Close the files; the journal can be continued later."""
        self._close_file()
        self._lock.close()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open_next(self, hour: float) -> None:
        self._close_file()
        last = max((int(path.stem) for path in self._sizes), default=-1)
        path = self._folder / f"{last + 1:010d}.log"
        about = {"format": FORMAT, "version": VERSION, **asdict(self._about)}
        frame = framed(json.dumps(about).encode())
        self._make_room(len(frame))
        self._file = path.open("xb", buffering=0)
        self._path, self._hour, self._count = path, hour, 0
        self._sizes[path] = 0
        self._write(frame)
        _sync_folder(self._folder)

    def _write(self, frame: bytes) -> None:
        assert self._file is not None
        self._sizes[self._path] += len(frame)
        if self._file.write(frame) != len(frame):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(self._file.fileno())

    def _make_room(self, needed: int) -> None:
        while sum(self._sizes.values()) + needed > self._max_bytes and len(self._sizes) > 1:
            oldest = min(self._sizes)
            oldest.unlink(missing_ok=True)
            del self._sizes[oldest]


def _packed(reading: Reading, steady: float) -> bytes:
    values = tuple(
        steady if name == "steady" else _number(getattr(reading, name))
        for name in RECORD.names or ()
    )
    return np.array(values, dtype=RECORD).tobytes()


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _locked(folder: Path) -> BinaryIO:
    """Return an open file that only one recorder can hold; the system frees it if that one dies."""
    lock = (folder / "lock").open("wb")
    try:
        import fcntl  # noqa: PLC0415 - Windows has none, and then nothing is locked
    except ImportError:
        return lock
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ResumeError(
            f"{folder}: another recorder is writing to it; end that one, or record to another file"
        ) from None
    return lock


def _sync_folder(folder: Path) -> None:
    # A new file is safe only once its name is; Windows cannot open folders, and need not.
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
