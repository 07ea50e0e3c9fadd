"""A crash-safe, bounded journal of readings: what is on the disk of a device that may die any time.

The journal is a folder with one file for each hour. A file starts with a framed JSON header and
goes on with frames of one size, each a length, a CRC-32 and one reading, synced to the disk one by
one. So `kill -9` loses at most the reading being written, damage costs the frames it hit, and a
full journal drops its oldest file. Every start opens a new file, which makes a file belong to one
run of the recorder and to one steady clock.
"""

import json
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedstale.errors import TraceError

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
