"""Deleting what passed through a SuperLink: its database keeps it, in rows and in free pages.

Orders and replies, with the models in them, are rows of the database until they are fetched or, of
a run that has ended, until an operator lists runs or reads its log. SQLite then marks their pages
as free, and the bytes stay in the file, or in its write-ahead log, until something is written over.
"""

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from fedstale.deployment.superlink import hold_database
from fedstale.errors import ConfigError, FedstaleError
from fedstale.flower import superlink

logger = logging.getLogger(__name__)

_COUNTED = {"nodes": "node", "runs": "run"}
"""Tables that are kept whose rows are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Purged:
    """What a purge has deleted and kept."""

    deleted: dict[str, int]
    """Numbers of rows, by what they were."""
    kept: dict[str, int]
    """Numbers of rows."""
    before_bytes: int
    """Of the database and its write-ahead log."""
    after_bytes: int


def purge(database: Path, *, unfinished: bool = False) -> Purged:
    """Delete from a database what passed through a SuperLink, so that no byte of it stays there.

    Nodes stay registered, and the list of runs stays with their settings and how they ended.

    Args:
        database: file of a SuperLink that is not running.
        unfinished: whether runs that have not ended lose their jobs on the way.

    Raises:
        ConfigError: a SuperLink is running on it, or it is no such file.
        FedstaleError: a run has not ended.
    """
    if not database.is_file():
        raise ConfigError(f"database = {str(database)!r}: there is no such file")
    files = [database, Path(f"{database}-wal")]
    before = sum(file.stat().st_size for file in files if file.exists())
    with _alone(database) as connection:
        found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        tables = {name for (name,) in found}
        if missing := {"objects", "message", "run", "node", "task"} - tables:
            raise ConfigError(
                f"database = {str(database)!r} has no table {min(missing)!r}: expected the "
                "database of a SuperLink of Flower 1.41 or later"
            )
        passing = set(chain(*superlink.PASSING_TABLES.values()))
        for table in sorted(tables - superlink.LASTING_TABLES - passing):
            logger.warning("table %s is left as it is: this fedstale does not know it", table)
        going_on = [run_id % 2**64 for (run_id,) in connection.execute(superlink.UNFINISHED_RUNS)]
        if going_on and not unfinished:
            raise FedstaleError(
                f"run {going_on[0]} has not ended: start the SuperLink and stop the run (fedstale "
                "flwr stop), or pass --unfinished: its jobs on the way are lost"
            )

        def count(table: str) -> int:
            return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])

        deleted = {}
        connection.execute("BEGIN EXCLUSIVE")
        for what, emptied in superlink.PASSING_TABLES.items():
            deleted[what] = sum(count(table) for table in emptied if table in tables)
            for table in emptied:
                if table in tables:
                    connection.execute(f"DELETE FROM {table}")
        connection.execute("COMMIT")
        # Free pages go, and with them what was deleted before.
        connection.execute("VACUUM")
        kept = {what: count(table) for what, table in _COUNTED.items()}
    return Purged(
        deleted=deleted, kept=kept, before_bytes=before, after_bytes=database.stat().st_size
    )


@contextmanager
def _alone(database: Path) -> Iterator[sqlite3.Connection]:
    """Connect to a database that no other process uses, without a write-ahead log.

    Raises:
        ConfigError: another process uses it, or it is no database.
    """
    descriptor = hold_database(database)
    try:
        # At the end, since closing the file ends SQLite's own locks on it, too.
        with closing(sqlite3.connect(database, timeout=1.0, isolation_level=None)) as connection:
            connection.execute("PRAGMA secure_delete = ON")
            # It takes a lock that a SuperLink started without fedstale has, too.
            connection.execute("PRAGMA journal_mode = DELETE")
            yield connection
    except sqlite3.OperationalError as problem:
        raise ConfigError(
            f"database = {str(database)!r} is in use ({problem}): stop the SuperLink first"
        ) from None
    except sqlite3.DatabaseError as problem:
        raise ConfigError(f"database = {str(database)!r}: {problem}") from None
    finally:
        os.close(descriptor)
