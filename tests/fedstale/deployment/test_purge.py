"""What passes through a SuperLink stays in its database until docs/deploy/purge.sql has run."""

import hashlib
import re
import sqlite3
from contextlib import closing

import numpy as np
import pytest
from databases import known_schema, write_fresh
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from places import ROOT

LASTING = {
    *("node", "run", "task", "task_usage", "run_series", "series_runs"),
    *("automation", "federation_app", "connector", "connector_oauth_session", "run_connector"),
    *("alembic_version", "objectstore_locks", "sqlite_sequence"),
}
"""Tables of nodes, of runs and how they ended, and of what operators have set up."""
SCRIPT = (ROOT / "docs/deploy/purge.sql").read_text(encoding="utf-8").replace(".bail on", "")
EMPTIED = set(re.findall(r"DELETE FROM (\w+);", SCRIPT))


def purge(path):
    with closing(sqlite3.connect(path, timeout=0.1, isolation_level=None)) as connection:
        connection.executescript(SCRIPT)


@pytest.fixture
def database(tmp_path):
    """Make a database as Flower does, with an object in it and another that was deleted."""
    path = write_fresh(tmp_path / "superlink.db")
    store = SqlObjectStore(str(path), verify=False)
    with known_schema():
        store.initialize()
    rng = np.random.default_rng(0)
    for content in (there := [rng.bytes(100_000) for _ in range(2)]):
        name = hashlib.sha256(content).hexdigest()
        store.preregister(1, ObjectTree(object_id=name))
        store.put(name, content)
    store.delete(name)
    store._engine.dispose()
    return path, there


def test_no_byte_of_what_passed_through_stays_in_the_file(database):
    path, there = database

    def left():
        return b"".join(file.read_bytes() for file in path.parent.iterdir())

    assert there[0][1000:1064] in left()
    purge(path)
    for content in there:
        assert not [i for i in range(0, len(content) - 64, 64) if content[i : i + 64] in left()]
    assert list(path.parent.iterdir()) == [path]


def test_every_table_is_emptied_or_known_to_stay(tmp_path):
    with closing(sqlite3.connect(write_fresh(tmp_path / "fresh.db"))) as connection:
        found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        assert {name for (name,) in found} == EMPTIED | LASTING
    assert not EMPTIED & LASTING


def test_a_database_that_is_in_use_is_left_as_it_is(database):
    path, _ = database
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA journal_mode = WAL")
        count = "SELECT count(*) FROM objects"
        assert other.execute(count).fetchone() == (1,)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            purge(path)
        assert other.execute(count).fetchone() == (1,)
