"""What passes through a SuperLink stays in its database until it is purged."""

import hashlib
import json
import re
import sqlite3
from contextlib import closing

import numpy as np
import pytest
from databases import known_schema, write_fresh
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from purging import bytes_of, objects, purge

from fedstale.deployment.purge import _COUNTED
from fedstale.flower.superlink import LASTING_TABLES, PASSING_TABLES


@pytest.fixture
def database(tmp_path):
    """Make a database as Flower does, with an object in it and another that was deleted."""
    path = tmp_path / "state" / "superlink.db"
    path.parent.mkdir(mode=0o700)
    store = SqlObjectStore(str(path), verify=False)
    write_fresh(path)
    with known_schema():
        store.initialize()
    rng = np.random.default_rng(0)
    for content in (there := [rng.bytes(100_000) for _ in range(2)]):
        name = hashlib.sha256(content).hexdigest()
        store.preregister(1, ObjectTree(object_id=name))
        store.put(name, content)
    store.delete(name)
    store._engine.dispose()
    path.chmod(0o600)
    return path, there


def test_no_byte_of_what_passed_through_stays_in_the_file(database):
    path, there = database
    assert there[0][1000:1064] in bytes_of(path)
    status, said = purge(path)
    assert status == 0, said
    assert re.search(
        r"deleted 1 objects .* kept 0 nodes, 0 runs; \d.\d MB before, 0.\d MB now", said
    )
    left = bytes_of(path)
    for content in there:
        assert not [i for i in range(0, len(content) - 64, 64) if content[i : i + 64] in left]
    assert list(path.parent.iterdir()) == [path]
    facts = json.loads(purge(path, "--json")[1])
    assert set(facts["deleted"].values()) == {0}


def test_every_table_is_emptied_or_known_to_stay(database):
    with closing(sqlite3.connect(database[0])) as connection:
        there = {
            n for (n,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")
        }
    emptied = {table for tables in PASSING_TABLES.values() for table in tables}
    assert emptied <= there
    assert there - emptied <= LASTING_TABLES
    assert not emptied & LASTING_TABLES
    assert set(_COUNTED.values()) <= LASTING_TABLES


def test_a_database_that_is_in_use_or_none_is_left_as_it_is(database, tmp_path):
    path, _ = database
    # A SuperLink that was started without fedstale.
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA journal_mode = WAL")
        other.execute("SELECT count(*) FROM objects").fetchone()
        status, said = purge(path)
        assert (status, len(objects(path))) == (2, 1)
        assert "is in use (database is locked): stop the SuperLink first" in said
    (other := tmp_path / "state" / "other").write_bytes(b"no database" * 1000)
    assert "file is not a database" in purge(other)[1]
    assert "there is no such file" in purge(tmp_path / "none")[1]
    sqlite3.connect(empty := tmp_path / "state" / "empty").close()
    empty.touch()
    assert "has no table 'message'" in purge(empty)[1]
