"""What a real deployment leaves is its owner's, and its database one SuperLink's."""

import os

import pytest
from open_files import open_to_others
from small_deployment import write_app

from fedstale.deployment.local import LocalDeployment, run_app


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
