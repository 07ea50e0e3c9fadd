"""What a real deployment leaves is its owner's, and its database one SuperLink's."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest
from open_files import open_to_others
from small_deployment import write_app

from fedstale.deployment.local import LocalDeployment, run_app
from fedstale.deployment.superlink import hold_database

ANSWER = "deploy superlink --insecure --host 127.0.0.1 --port 0"


@pytest.fixture(params=[0o000, 0o022], ids=["umask-000", "umask-022"])
def _umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_umask")
@pytest.mark.deployment
@pytest.mark.slow
def test_nothing_that_a_run_leaves_is_open_to_others(tmp_path):
    app = write_app(tmp_path / "adder")
    with LocalDeployment(tmp_path / "up", nodes=1, limit_s=300.0) as deployment:
        run_app(deployment, app, run_config="rounds=2", show=lambda line: None)
        assert (deployment.folder / "superlink.db").stat().st_size > 0
        assert open_to_others(deployment.folder) == set()


def test_a_second_superlink_is_kept_from_the_database(tmp_path):
    (folder := tmp_path / "state").mkdir(mode=0o700)
    database = folder / "superlink.db"
    descriptor = hold_database(database)
    with closing(sqlite3.connect(database)) as made:
        made.execute("CREATE TABLE t (x)")
    words = [sys.executable, "-m", "fedstale", *ANSWER.split(), "--database", str(database)]
    refused = subprocess.run(words, text=True, capture_output=True, timeout=120, check=False)
    said = refused.stderr.strip().splitlines()
    assert (refused.returncode, len(said)) == (2, 1), said
    assert f"is in use by a SuperLink, process {os.getpid()} of" in said[0]
    os.close(descriptor)
    os.close(hold_database(database))
    assert open_to_others(folder) == set()
