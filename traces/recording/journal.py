"""The journal of a recording device: readings in SQLite, each on the disk before the next is made.

`record` appends a reading every few seconds; `to_traces` makes traces of them. Clocks are passed
in, so that a test, or a replay, needs no wall time.

A journal is a folder with one database, in write-ahead logging with a full sync for each reading,
so `kill -9` and power cuts lose at most the reading being written. One table holds the runs, which
are starts of the recorder with a steady clock of their own, the other the readings. Rows are only
added, and dropped from the oldest on when the journal is full. Each row carries a checksum: damage
to a page of readings costs the rows that it hit and never changes another; damage to the pages that
say where the others are (the first four, and those of an index) costs what they lead to. A recorder
that finds its database damaged leaves it as it is, begins another in the folder, and both are read.
"""

import json
import math
import sqlite3
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pandas as pd

from fedstale.errors import ConfigError, ResumeError, TraceError
from fedstale.traces.recording.monitor import Reading, ResourceMonitor

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

VERSION = 1
"""Of the tables; it grows when an old reader would misread new ones."""
HOUR_S = 3600.0
SHORTEST_S, LONGEST_S = 1.0, 60.0
_TABLES = """
CREATE TABLE IF NOT EXISTS runs (id INTEGER PRIMARY KEY, run INT, content BLOB, checksum INT);
CREATE TABLE IF NOT EXISTS readings (id INTEGER PRIMARY KEY, run INT, content BLOB, checksum INT);
"""
_ROW_BYTES = 64
"""Space of one reading, with its share of a page."""
_PAGE_BYTES = 4096
_LOG_PAGES = 32
"""Pages that the write-ahead log grows to before they are copied to the database."""
_SPARE_BYTES = 64 * _PAGE_BYTES
"""Space of the log, of the table of runs and of pages that are half full."""
_DROPPED_AT_ONCE = 64

_Row: TypeAlias = tuple[int, int, bytes]
"""Id, run and content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingRun:
    """What holds for every reading of one start of the recorder."""

    device_id: str
    """Name of the device."""
    interval_s: float
    """Time between readings, in s, > 0."""
    utc_offset_s: float
    """Local time minus UTC when the run started, in s."""
    run: int = 0
    """Which start of the recorder this is; set by the journal."""


def read(folder: Path) -> tuple[pd.DataFrame, dict[str, int]]:
    """Return what a journal holds, whole or damaged, and what was dropped of it.

    Args:
        folder: the journal.

    Returns:
        The readings in the order of writing, with the fields of `RECORD` and of their
        `RecordingRun` as columns, and the number of drops by kind.

    Raises:
        TraceError: there is no journal, nothing in it can be read, or it is being written to.
    """
    if not folder.is_dir():
        raise TraceError(f"{folder}: no such journal; expected the folder that a recording left")
    runs_read: list[pd.DataFrame] = []
    dropped = {"dropped: damaged reading": 0, "dropped: damaged file": 0}
    for path in files_of(folder):
        try:
            with closing(_connected(path)) as database:
                runs = _runs(database)
                rows, lost = _rows(database, "readings")
        except sqlite3.Error as problem:
            if _is_busy(problem):
                raise TraceError(
                    f"{folder}: a recorder is writing to it; end that one first"
                ) from None
            dropped["dropped: damaged file"] += 1
            continue
        for number, group in groupby(rows, key=lambda row: row[1]):
            contents = [content for _, _, content in group if len(content) == RECORD.itemsize]
            if number in runs:
                readings = pd.DataFrame(np.frombuffer(b"".join(contents), dtype=RECORD))
                runs_read.append(readings.assign(**asdict(runs[number])))
            else:
                lost += len(contents)
        dropped["dropped: damaged reading"] += lost
    if not runs_read:
        raise TraceError(f"{folder}: no readable reading in this journal; record again")
    return pd.concat(runs_read, ignore_index=True), {
        kind: count for kind, count in dropped.items() if count
    }


def files_of(folder: Path) -> list[Path]:
    """Return the databases of a journal in the order of writing."""
    return sorted(path for path in folder.glob("*.sqlite") if path.stem.isdecimal())


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

    def __init__(self, folder: Path, about: RecordingRun, *, max_bytes: int) -> None:
        least = _SPARE_BYTES + math.ceil(2 * HOUR_S / about.interval_s) * _ROW_BYTES
        if max_bytes < least:
            raise TraceError(
                f"max_bytes = {max_bytes}: expected at least {least}, which is two hours of "
                f"readings every {about.interval_s:g} s"
            )
        self._folder, self._written = folder, False
        try:
            folder.mkdir(exist_ok=True)
            self._about = replace(about, run=_next_run(folder, about.device_id))
            self._database, older = _opened(folder)
            left = max_bytes - _SPARE_BYTES
            for file in (file for path in older for file in folder.glob(f"{path.name}*")):
                size = file.stat().st_size
                if left - size < least - _SPARE_BYTES:
                    file.unlink()
                else:
                    left -= size
            self._most_pages = left // _PAGE_BYTES
            (self._last,) = self._database.execute(
                "SELECT ifnull(max(id), 0) FROM readings"
            ).fetchone()
        except (OSError, sqlite3.Error) as problem:
            raise self._failed(problem) from None

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def append(self, reading: Reading, steady: float) -> None:
        """Put one reading on the disk; it is there when this returns.

        Args:
            reading: what the device read of itself.
            steady: s of a clock that cannot be set, of the same moment.

        Raises:
            TraceError: the disk is full or gone; what was appended before stays readable.
        """
        values = (
            steady,
            *(getattr(reading, name) for name in RECORD.fields or () if name != "steady"),
        )
        try:
            if not self._written:
                self._insert("runs", self._about.run, json.dumps(asdict(self._about)).encode())
                self._written = True
            self._insert("readings", self._last + 1, np.array(values, dtype=RECORD).tobytes())
            self._last += 1
            while self._database.execute("PRAGMA page_count").fetchone()[0] > self._most_pages:
                self._drop_oldest()
        except sqlite3.Error as problem:
            raise self._failed(problem) from None

    def close(self) -> None:
        """Close the database; the journal can be continued later."""
        self._database.close()

    def _insert(self, table: str, number: int, content: bytes) -> None:
        run = self._about.run
        row = (number, run, content, _checksum((number, run, content)))
        self._database.execute(f"INSERT INTO {table} VALUES (?, ?, ?, ?)", row)

    def _drop_oldest(self) -> None:
        for condition in (
            f"readings WHERE id IN (SELECT id FROM readings ORDER BY id LIMIT {_DROPPED_AT_ONCE})",
            "runs WHERE id < (SELECT run FROM readings ORDER BY id LIMIT 1)",
        ):
            self._database.execute(f"DELETE FROM {condition}")

    def _failed(self, problem: OSError | sqlite3.Error) -> ResumeError | TraceError:
        if _is_busy(problem):
            return ResumeError(
                f"{self._folder}: another recorder is writing to it; end that one, or record to "
                "another file"
            )
        why = problem.strerror if isinstance(problem, OSError) else problem
        return TraceError(
            f"{self._folder}: cannot be written ({why}); what was recorded so far is kept"
        )


def record(
    monitor: ResourceMonitor,
    journal: Journal,
    *,
    interval_s: float,
    duration_s: float,
    wait: Callable[[float], bool],
    steady: Callable[[], float],
) -> int:
    """Append readings to a journal until the time is over or a stop is asked for.

    Readings are due at whole intervals from the start; one that comes too late is left out rather
    than made up for, so a suspended device leaves a gap.

    Args:
        monitor: reads the device.
        journal: where readings go.
        interval_s: time between readings, in s, 1 to 60.
        duration_s: time to record, in s; inf until stopped.
        wait: waits for some s; returns whether to stop.
        steady: returns s of a clock that cannot be set and that goes on while the device sleeps.

    Returns:
        The number of readings appended.

    Raises:
        ConfigError: the interval or the duration is out of range.
        TraceError: the journal cannot be written.
    """
    check(interval_s=interval_s, duration_s=duration_s)
    start = steady()
    due, count = start, 0
    while True:
        journal.append(monitor.read(), steady())
        count += 1
        due += interval_s * max(1.0, math.ceil((steady() - due) / interval_s))
        if due > start + duration_s:
            wait(max(start + duration_s - steady(), 0.0))
            return count
        if wait(max(due - steady(), 0.0)):
            return count


def check(*, interval_s: float, duration_s: float) -> None:
    """Raise a ConfigError if an interval or a duration is out of range."""
    if not SHORTEST_S <= interval_s <= LONGEST_S:
        raise ConfigError(f"interval_s = {interval_s:g}: expected 1 to 60 s between readings")
    if not duration_s > 0:
        raise ConfigError(f"duration_s = {duration_s:g}: expected a time in s > 0")


def _next_run(folder: Path, device_id: str) -> int:
    """Return the number of the next run of a journal, which must be of one device."""
    runs: dict[int, RecordingRun] = {}
    for path in files_of(folder):
        try:
            with closing(_connected(path)) as database:
                runs |= _runs(database)
        except sqlite3.Error as problem:
            if _is_busy(problem):
                raise
    for run in runs.values():
        if run.device_id != device_id:
            raise ResumeError(
                f"{folder}: a journal of device {run.device_id!r}, not of {device_id!r}: "
                "record that device, or to another file"
            )
    return 1 + max(runs, default=-1)


def _opened(folder: Path) -> tuple[sqlite3.Connection, list[Path]]:
    """Return the database to append to, locked for this process, and the damaged ones before it."""
    older = files_of(folder)
    path = older.pop() if older else folder / "0000000000.sqlite"
    database = _connected(path, alone=True)
    if not _is_sound(database):
        database.close()
        older.append(path)
        database = _connected(folder / f"{int(path.stem) + 1:010d}.sqlite", alone=True)
    try:
        for setting in (
            f"page_size = {_PAGE_BYTES}",
            # Dropped readings leave the file at once.
            "auto_vacuum = FULL",
            "journal_mode = WAL",
            # Each commit waits for the disk.
            "synchronous = FULL",
            f"wal_autocheckpoint = {_LOG_PAGES}",
            f"user_version = {VERSION}",
        ):
            database.execute(f"PRAGMA {setting}")
        database.executescript(_TABLES)
    except BaseException:
        database.close()
        raise
    return database, older


def _connected(path: Path, *, alone: bool = False) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=0.0, isolation_level=None)
    # A writable schema, which nothing writes to, lets a file be read that was cut off.
    database.execute(f"PRAGMA {'locking_mode = EXCLUSIVE' if alone else 'writable_schema = ON'}")
    return database


def _is_sound(database: sqlite3.Connection) -> bool:
    try:
        return bool(database.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
    except sqlite3.DatabaseError as problem:
        if _is_busy(problem):
            database.close()
            raise
        return False


def _is_busy(problem: Exception) -> bool:
    return getattr(problem, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY


def _runs(database: sqlite3.Connection) -> dict[int, RecordingRun]:
    return {
        run: RecordingRun(**json.loads(content)) for _, run, content in _rows(database, "runs")[0]
    }


def _rows(database: sqlite3.Connection, table: str) -> tuple[list[_Row], int]:
    """Return the undamaged rows of a table, and how many are damaged, at least.

    What lies between two damaged pages is not found, and counts as damaged.
    """
    if database.execute("PRAGMA user_version").fetchone() != (VERSION,):
        raise sqlite3.DatabaseError(f"expected tables of version {VERSION}")
    found: dict[int, _Row] = {}
    n_damages = 0
    for order in ("ASC", "DESC"):
        try:
            for number, run, content, checksum in database.execute(
                f"SELECT id, run, content, checksum FROM {table} ORDER BY id {order}"
            ):
                if _checksum((number, run, content)) == checksum:
                    found[number] = (number, run, content)
            break
        except sqlite3.DatabaseError as problem:
            if _is_busy(problem):
                raise
            n_damages += 1
    rows = [found[number] for number in sorted(found)]
    # What is gone before the first and after the last row cannot be counted.
    n_missing = rows[-1][0] - rows[0][0] + 1 - len(rows) if rows else 0
    return rows, max(n_missing, n_damages)


def _checksum(row: _Row) -> int:
    return zlib.crc32(repr(row).encode())
