"""A SuperLink whose disk is full or whose database is in use, on Flower's own app."""

import hashlib
import logging
import sqlite3
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from databases import on_disk
from flwr.app import ConfigRecord
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore import sql_mixin
from flwr.supercore.corestate.sql_corestate import SqlCoreState
from flwr.supercore.sql_mixin import SqlMixin
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from superlink_app import statuses

from fedstale.deployment.superlink import guarded
from fedstale.flower.superlink import take_turns


def test_a_full_disk_is_waited_for_and_told_of(tmp_path, monkeypatch, caplog):
    # Files that may not grow are full as a disk is, to SQLite.
    bounded = (*sql_mixin.SQLITE_PRAGMAS, ("max_page_count", "1"))
    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", bounded)
    before = on_disk(lambda app: app, tmp_path / "before.db")
    now = on_disk(lambda app: guarded(app, folder=tmp_path), tmp_path / "now.db")

    def run(script):
        for database in tmp_path.glob("*.db"):
            with closing(sqlite3.connect(database)) as connection:
                connection.executescript(script)

    run(
        "CREATE TABLE filler (x); CREATE TRIGGER more BEFORE UPDATE ON node "
        "BEGIN INSERT INTO filler VALUES (zeroblob(100000)); END;"
    )
    # A SuperNode that reads this ends.
    assert statuses(before) == [500, 500]
    with caplog.at_level(logging.WARNING, "fedstale"):
        assert statuses(now, 3) == [503] * 3
        run("DROP TRIGGER more")
        assert statuses(now) == [200, 200]
    full, again = [one.getMessage() for one in caplog.records if one.name.startswith("fedstale")]
    assert full.startswith(f"the database in {tmp_path} cannot be written: ")
    assert "MB are free" in full
    assert again == f"the database in {tmp_path} is written again"
    assert statuses(before) == [200, 200]


@pytest.fixture
def impatient(monkeypatch):
    """Wait for SQLite's lock for a moment, where Flower waits 5 s."""
    others = [(name, value) for name, value in sql_mixin.SQLITE_PRAGMAS if name != "busy_timeout"]
    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", (("busy_timeout", "20"), *others))


@pytest.mark.usefixtures("impatient")
def test_a_database_that_others_write_to_is_waited_for(tmp_path, caplog):
    now = on_disk(lambda app: guarded(app, folder=tmp_path), tmp_path / "now.db")
    with closing(sqlite3.connect(tmp_path / "now.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert statuses(now, 1) == [503]
        other.execute("ROLLBACK")
    assert statuses(now, 1) == [200]
    assert "database is locked" in caplog.text
    assert "is written again" in caplog.text


@pytest.fixture(params=[False, True])
def in_turn(request, monkeypatch):
    """Let a SuperLink's threads take turns, or not; return which."""
    for owner, name in ((SqlMixin, "session"), (SqlCoreState, "store_object")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    if request.param:
        take_turns()
    return request.param


@pytest.mark.usefixtures("impatient")
def test_what_threads_write_at_once_is_all_written_where_they_take_turns(in_turn, tmp_path):
    link = on_disk(guarded, tmp_path / "link.db")

    def write(number):
        try:
            with link.state.session() as session:
                session.execute(text("UPDATE node SET heartbeat_interval = heartbeat_interval + 1"))
                time.sleep(0.005)
        except OperationalError as problem:
            return problem.orig.sqlite_errorname
        return "written"

    with ThreadPoolExecutor(16) as threads:
        found = Counter(threads.map(write, range(160)))
    # A reader sees the last of them, and a session within a session is the same one.
    with link.state.session() as session, link.state.session() as inner:
        assert inner is session
        (times,) = session.scalars(text("SELECT max(heartbeat_interval) - 30 FROM node")).all()
    assert times == found["written"]
    if in_turn:
        assert found == {"written": 160}
    else:
        assert set(found) == {"written", "SQLITE_BUSY"}


@pytest.mark.usefixtures("impatient")
def test_an_object_that_cannot_be_stored_now_is_no_upload_that_has_lapsed(in_turn, tmp_path):
    link = on_disk(guarded, tmp_path / "link.db")
    state, run = link.state, link.run_id
    content = ConfigRecord({"a": 1}).deflate()
    name = hashlib.sha256(content).hexdigest()
    upload = state.start_session(run)
    assert state.preregister_object_tree(ObjectTree(object_id=name), upload) == [name]
    with closing(sqlite3.connect(tmp_path / "link.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        if in_turn:
            with pytest.raises(OperationalError, match="database is locked"):
                state.store_object(run, upload, name, content)
        else:
            # As Flower answers what has lapsed, on which a ServerApp ends.
            assert not state.store_object(run, upload, name, content)
        other.execute("ROLLBACK")
    assert not state.store_object(run, "another upload", name, content)
    assert state.store_object(run, upload, name, content)
