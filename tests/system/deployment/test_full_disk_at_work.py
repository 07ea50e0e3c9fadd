"""A SuperLink whose disk, a small one of its own, is full."""

import logging
import os
import sqlite3
import subprocess
from contextlib import closing

import pytest
from superlink_app import SuperLink, statuses

from fedstale.deployment.superlink import guarded

# Flower's own migrations of its database warn.
pytestmark = pytest.mark.filterwarnings("ignore:No path_separator found:DeprecationWarning")


@pytest.fixture
def small_disk(tmp_path):
    """Return a folder of a disk of its own with 32 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=32m,mode=700", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here: it takes root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder):
    """Write until nothing more can be written; return the file."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return path


def use_up_the_log(database):
    """Empty SQLite's write-ahead log, in which some changes would still have room."""
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0


def test_a_full_disk_is_waited_for_and_told_of(small_disk, caplog):
    before = SuperLink(lambda app: app, str(small_disk / "before.db"))
    now = SuperLink(lambda app: guarded(app, folder=small_disk), str(small_disk / "now.db"))
    for database in small_disk.glob("*.db"):
        use_up_the_log(database)
    filler = fill(small_disk)
    # A SuperNode that reads this ends.
    assert statuses(before) == [500, 500]
    with caplog.at_level(logging.WARNING, "fedstale"):
        assert statuses(now, 3) == [503] * 3
        filler.unlink()
        assert statuses(now) == [200, 200]
    full, again = [one.getMessage() for one in caplog.records if one.name.startswith("fedstale")]
    assert full.startswith(f"the database in {small_disk} cannot be written: ")
    assert "MB are free" in full
    assert again == f"the database in {small_disk} is written again"
    assert statuses(before) == [200, 200]
