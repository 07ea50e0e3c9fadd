"""Writes a journal of readings: synced one by one, bounded in size, continued after any death.

See `journal` for what is on the disk. Deliberately absent: buffering, which would lose more than
the reading being written.

A crash-safe, bounded journal of readings: what is on the disk of a device that may die any time.

The journal is a folder with one file for each hour. A file starts with a framed JSON header and
goes on with frames of one size, each a length, a CRC-32 and one reading, synced to the disk one by
one. So `kill -9` loses at most the reading being written, damage costs the frames it hit, and a
full journal drops its oldest file. Every start opens a new file, which makes a file belong to one
run of the recorder and to one steady clock.
"""

import contextlib
import errno
import json
import math
import os
import struct
import zlib
from dataclasses import asdict, dataclass, replace
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from fedstale.errors import ResumeError, TraceError
from fedstale.traces.recording.monitor import Reading

FORMAT, VERSION = "fedstale-journal", 1

RECORD = np.dtype(
    [
        ("steady", "<f8"),
        ("instant", "<f8"),
        ("processor_left", "<f4"),
        ("received_bit_per_s", "<f4"),
        ("sent_bit_per_s", "<f4"),
        ("battery", "<f4"),
        ("charging", "<f4"),
        ("online", "<f4"),
    ]
)
"""One reading on disk; charging and online are 1, 0 or NaN."""

_FRAME = struct.Struct("<II")
FRAME_BYTES = _FRAME.size + RECORD.itemsize
_LENGTH_OF_RECORD = RECORD.itemsize.to_bytes(4, "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What holds for every reading of one journal file."""

    device_id: str
    """Name of the device."""
    interval_s: float
    """Time between readings, in s, > 0."""
    utc_offset_s: float
    """Local time minus UTC when the run started, in s."""
    run: int = 0
    """Which start of the recorder this is; set by the journal."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class JournalPart:
    """The readings of one file, in the order of reading."""

    about: Run
    """The header of the file."""
    readings: npt.NDArray[np.void]
    """Of dtype `RECORD`; shape (n,)."""


def read(folder: Path) -> tuple[list[JournalPart], dict[str, int]]:
    """Return what a journal holds, whole or damaged, and what was dropped of it.

    Args:
        folder: the journal.

    Returns:
        The readable files in the order of writing, and the number of drops by kind.

    Raises:
        TraceError: there is no journal, or nothing in it can be read.
    """
    if not folder.is_dir():
        raise TraceError(f"{folder}: no such journal; expected the folder that a recording left")
    parts, dropped = [], {"dropped: damaged reading": 0, "dropped: file without a header": 0}
    for path in files_of(folder):
        content = path.read_bytes()
        about, start = header(content)
        if about is None:
            dropped["dropped: file without a header"] += 1
            continue
        readings, damaged = _readings(content[start:])
        dropped["dropped: damaged reading"] += damaged
        if readings.size:
            parts.append(JournalPart(about=about, readings=readings))
    if not parts:
        raise TraceError(f"{folder}: no readable reading in this journal; record again")
    return parts, {kind: count for kind, count in dropped.items() if count}


def _readings(content: bytes) -> tuple[npt.NDArray[np.void], int]:
    """Return the readings of frames, and how many were damaged; the next whole frame is found."""
    good, at, skipped = [], 0, 0
    while at < len(content):
        payload, _ = _unframed(content[at : at + FRAME_BYTES])
        if payload is not None and len(payload) == RECORD.itemsize:
            good.append(payload)
            at += FRAME_BYTES
        else:
            found = content.find(_LENGTH_OF_RECORD, at + 1)
            after = found if found >= 0 else len(content)
            skipped += after - at
            at = after
    return np.frombuffer(b"".join(good), dtype=RECORD), -(-skipped // FRAME_BYTES)


def header(content: bytes) -> tuple[Run | None, int]:
    """Return the header that a file starts with, None if unreadable, and where its frame ends."""
    payload, end = _unframed(content)
    try:
        about: dict[str, Any] = json.loads(payload or b"")
        if about.pop("format") != FORMAT or about.pop("version") != VERSION:
            return None, 0
        return Run(**about), end
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None, 0


def framed(payload: bytes) -> bytes:
    """Return a payload with its length and its CRC-32 before it."""
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def _unframed(content: bytes) -> tuple[bytes | None, int]:
    if len(content) < _FRAME.size:
        return None, 0
    length, checksum = _FRAME.unpack_from(content)
    end = _FRAME.size + length
    payload = content[_FRAME.size : end]
    whole = len(payload) == length and zlib.crc32(payload) == checksum
    return (payload if whole else None), end


def files_of(folder: Path) -> list[Path]:
    """Return the files of a journal in the order of writing."""
    return sorted(path for path in folder.glob("*.log") if path.stem.isdecimal())


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
