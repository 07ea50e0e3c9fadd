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

It is its owner's alone: what a device does says when its user is there. Another process of the
owner may read while a recorder writes: neither waits for the other. One recorder at a time holds
the lock of a file of its own, until its process ends. A reader that is stopped in the midst of
reading keeps the write-ahead log from being copied to the database; before that log breaks the
bound on disk, the recorder begins another database, as after damage.
"""

import json
import math
import os
import sqlite3
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedstale.errors import ConfigError, ResumeError, TraceError
from fedstale.files import PRIVATE_FILE, PRIVATE_FOLDER, make_private, open_private
from fedstale.traces.recording.monitor import Reading, ResourceMonitor

if TYPE_CHECKING:
    import pandas as pd

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

_ROW = np.dtype([("id", "<i8"), ("run", "<i8"), *((n, RECORD[n]) for n in RECORD.names or ())])

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
_LONG_LOG_BYTES = 40 * _PAGE_BYTES
_LOG_SHARE = 1 / 16
"""Share of the space for readings by which the log may grow beyond that while it is being read."""
_SPARE_BYTES = 64 * _PAGE_BYTES
"""Space of the log and its index, of the table of runs and of pages that are half full."""
_DROPPED_AT_ONCE = 64
_READ_AT_ONCE = 2048
"""Rows that are held as Python objects while they are read."""
_LOCK = "recorder.lock"
_PATIENCE_S, _SHORT_PATIENCE_S = 5.0, 1.0
"""For how long a recorder, and a reader, waits for another process that repairs what a killed
recorder left, or that is closing the database, which takes milliseconds."""
MOST_READ = 28 * 24 * 720
"""Readings that are read at most where only a span is: four weeks at 5 s."""

_Row: TypeAlias = tuple[int, int, bytes]
"""Id, run and content."""
_Readings: TypeAlias = npt.NDArray[np.void]
"""Rows of the readings, by id; of type _ROW."""


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


def read(folder: Path, span_s: float = math.inf) -> tuple["pd.DataFrame", dict[str, int]]:
    """Read a journal, whole or damaged, and count the rows that were dropped.

    Args:
        folder: the journal; a recorder may be writing to it.
        span_s: how much to read, in s: as many of the newest readings as the recorder makes in
            this time at its shortest interval, and at most `MOST_READ`; inf reads all.

    Returns:
        The readings in the order of writing, with the fields of `RECORD` and of their
        `RecordingRun` as columns, and the number of drops by kind.

    Raises:
        TraceError: there is no journal, nothing in it can be read, or another process keeps it
            closed.
    """
    import pandas as pd  # noqa: PLC0415 - to write a journal takes none

    if not folder.is_dir():
        raise TraceError(f"{folder}: no such journal; expected the folder that a recording left")
    dropped = Counter[str]()
    parts: list[pd.DataFrame] = []
    for path in files_of(folder):
        try:
            with closing(_connected(path)) as database:
                runs = _runs(database)
                shortest_s = min((run.interval_s for run in runs.values()), default=SHORTEST_S)
                is_all = math.isinf(span_s)
                most = None if is_all else min(math.ceil(span_s / shortest_s), MOST_READ)
                readings, lost = _found(database, most)
        except sqlite3.Error as problem:
            if _is_busy(problem):
                raise TraceError(
                    f"{folder}: another process keeps it closed; end that one first"
                ) from None
            dropped["dropped: damaged file"] += 1
            continue
        part = _with_runs(readings, runs)
        dropped["dropped: damaged reading"] += lost + len(readings) - len(part)
        parts.append(part)
    if not sum(map(len, parts)):
        raise TraceError(f"{folder}: no readable reading in this journal; record again")
    return pd.concat([part for part in parts if len(part)], ignore_index=True), dict(+dropped)


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
        self._folder, self._about, self._written = folder, about, False
        waiting_bytes = int(_LOG_SHARE * (max_bytes - least))
        self._longest_log_bytes = _LONG_LOG_BYTES + waiting_bytes
        self._space_bytes = max_bytes - _SPARE_BYTES - waiting_bytes
        self._least_bytes = least - _SPARE_BYTES
        with ExitStack() as opened:
            try:
                make_private(folder)
                folder.chmod(PRIVATE_FOLDER)
                opened.enter_context(closing(_locked(folder)))
                self._about = replace(about, run=_next_run(folder, about.device_id))
                self._begin(*_opened(folder))
            except (OSError, sqlite3.Error) as problem:
                raise self._failed(problem) from None
            self._lock = opened.pop_all()

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
            if self._is_log_stuck():
                self._database.close()
                self._begin(*_opened(self._folder, after=self._path))
        except (OSError, sqlite3.Error) as problem:
            raise self._failed(problem) from None

    def close(self) -> None:
        """Close the database; the journal can be continued later."""
        self._database.close()
        self._lock.close()

    def _begin(self, database: sqlite3.Connection, path: Path, older: list[Path]) -> None:
        """Append to a database from now on; delete older ones that take too much space."""
        self._database, self._path, self._written = database, path, False
        left = self._space_bytes
        for each in older:
            files = list(self._folder.glob(f"{each.name}*"))
            size = sum(file.stat().st_size for file in files)
            if left - size < self._least_bytes:
                for file in files:
                    file.unlink()
            else:
                left -= size
        self._most_pages = left // _PAGE_BYTES
        (self._last,) = database.execute("SELECT ifnull(max(id), 0) FROM readings").fetchone()

    def _is_log_stuck(self) -> bool:
        """Return whether the log is long because a reader keeps it from being copied."""
        log = self._path.with_name(f"{self._path.name}-wal")
        if log.stat().st_size <= self._longest_log_bytes:
            return False
        _, n_pages, n_copied = self._database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        return bool(n_copied < n_pages)

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


def _locked(folder: Path) -> sqlite3.Connection:
    """Lock a journal for one recorder; closing the connection, or the end of the process, ends it.

    The lock is that of an SQLite file that stays empty: it holds on every system that SQLite knows.
    """
    _make(folder / _LOCK)
    lock = sqlite3.connect(folder / _LOCK, timeout=0.0, isolation_level=None)
    try:
        lock.execute("PRAGMA journal_mode = MEMORY")
        lock.execute("BEGIN EXCLUSIVE")
    except BaseException:
        lock.close()
        raise
    return lock


def _opened(
    folder: Path, *, after: Path | None = None
) -> tuple[sqlite3.Connection, Path, list[Path]]:
    """Return the database to append to, its path, and those before it.

    Args:
        folder: the journal.
        after: database to leave as it is; None leaves only damaged ones.
    """
    older = files_of(folder)
    path = older.pop() if older else folder / "0000000000.sqlite"
    if path != after:
        database = _connected(path, to_write=True)
        if _is_sound(database):
            return _prepared(database), path, older
        database.close()
    following = folder / f"{int(path.stem) + 1:010d}.sqlite"
    return _prepared(_connected(following, to_write=True)), following, [*older, path]


def _prepared(database: sqlite3.Connection) -> sqlite3.Connection:
    try:
        for setting in (
            f"page_size = {_PAGE_BYTES}",
            # Dropped readings leave the file at once.
            "auto_vacuum = FULL",
            "journal_mode = WAL",
            # Each commit waits for the disk.
            "synchronous = FULL",
            f"wal_autocheckpoint = {_LOG_PAGES}",
            f"journal_size_limit = {_LOG_PAGES * _PAGE_BYTES}",
            f"user_version = {VERSION}",
        ):
            database.execute(f"PRAGMA {setting}")
        database.executescript(_TABLES)
    except BaseException:
        database.close()
        raise
    return database


def _connected(path: Path, *, to_write: bool = False) -> sqlite3.Connection:
    if to_write:
        _make(path)
    name = f"{path.absolute().as_uri()}?mode=rw"
    patience_s = _PATIENCE_S if to_write else _SHORT_PATIENCE_S
    database = sqlite3.connect(name, uri=True, timeout=patience_s, isolation_level=None)
    if not to_write:
        # A writable schema, which nothing writes to, lets a file be read that was cut off.
        database.execute("PRAGMA writable_schema = ON")
    return database


def _make(path: Path) -> None:
    """Make a database that only its owner may read, unless it exists; so are SQLite's files of it.

    Closing a file of its own would end SQLite's locks on it in this process, so one that is there
    is not opened.
    """
    if path.exists():
        path.chmod(PRIVATE_FILE)
    else:
        os.close(open_private(str(path), os.O_WRONLY | os.O_CREAT))


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
        run: RecordingRun(**json.loads(content))
        for rows in _rows(database, "runs")
        for _, run, content in rows or ()
    }


def _with_runs(readings: _Readings, runs: dict[int, RecordingRun]) -> "pd.DataFrame":
    """Return readings with the columns of their runs, without those whose run is lost."""
    import pandas as pd  # noqa: PLC0415 - see above

    is_known = np.isin(readings["run"], list(runs))
    readings = readings if is_known.all() else readings[is_known]
    numbers, of_rows = np.unique(readings["run"], return_inverse=True)
    columns: dict[str, Any] = {name: readings[name] for name in RECORD.names or ()}
    for field in fields(RecordingRun):
        of_runs = pd.Series([getattr(runs[number], field.name) for number in numbers.tolist()])
        # Names are stored once, since there may be half a million readings.
        is_name = field.name == "device_id"
        columns[field.name] = (of_runs.astype("category") if is_name else of_runs).array[of_rows]
    return pd.DataFrame(columns)


def _found(database: sqlite3.Connection, most: int | None) -> tuple[_Readings, int]:
    """Return the newest undamaged readings by id, and how many are damaged, at least.

    What lies between two damaged pages is not found, and counts as damaged.
    """
    parts, n_damages = list[_Readings](), 0
    for rows in _rows(database, "readings", most):
        if rows is None:
            n_damages += 1
            continue
        of_size = [row for row in rows if len(row[2]) == RECORD.itemsize]
        part = np.empty(len(of_size), dtype=_ROW)
        contents = np.frombuffer(b"".join(map(itemgetter(2), of_size)), dtype=RECORD)
        for name in RECORD.names or ():
            part[name] = contents[name]
        part["id"], part["run"] = ([row[i] for row in of_size] for i in (0, 1))
        # The newest come first; without damage nothing else has to be put in order.
        parts.append(part[::-1])
    readings = np.concatenate([*reversed(parts), np.empty(0, dtype=_ROW)])
    del parts
    ids = readings["id"]
    if np.any(ids[1:] <= ids[:-1]):
        ids, first = np.unique(ids, return_index=True)
        readings = readings[first]
    # What is gone before the first and after the last row cannot be counted.
    n_missing = int(ids[-1] - ids[0]) + 1 - ids.size if ids.size else 0
    return readings[0 if most is None else -most :], max(n_missing, n_damages)


def _rows(
    database: sqlite3.Connection, table: str, most: int | None = None
) -> Iterator[list[_Row] | None]:
    """Yield the undamaged rows of a table in parts, and None where the database is damaged.

    They come from the newest to the oldest, and after a damage from the oldest to the newest.
    """
    if database.execute("PRAGMA user_version").fetchone() != (VERSION,):
        raise sqlite3.DatabaseError(f"expected tables of version {VERSION}")
    for order, limit in (("DESC", -1 if most is None else most), ("ASC", -1)):
        found = _until_damage(
            database,
            f"SELECT id, run, content, checksum FROM {table} ORDER BY id {order} LIMIT {limit}",
        )
        is_damaged = False
        while part := list(islice(found, _READ_AT_ONCE)):
            if part[-1] is None:
                is_damaged = True
            rows = [row for row in part if row is not None]
            whole = [row[:3] for row in rows]
            sums = map(zlib.crc32, map(str.encode, map(repr, whole)))
            yield [row for row, had, (*_, has) in zip(whole, sums, rows, strict=True) if had == has]
        if not is_damaged:
            return
        yield None


def _until_damage(
    database: sqlite3.Connection, select: str
) -> Iterator[tuple[int, int, bytes, int] | None]:
    """Yield rows, and None at the end if it is damaged."""
    try:
        yield from database.execute(select)
    except sqlite3.DatabaseError as problem:
        if _is_busy(problem):
            raise
        yield None


def _checksum(row: _Row) -> int:
    return zlib.crc32(repr(row).encode())
