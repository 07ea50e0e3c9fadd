"""A purge between two runs of one deployment."""

import re

import pytest
from purging import bytes_of, objects, purge
from small_deployment import CLIENT, PYPROJECT, SERVER, Running, stop, write_app

from fedstale.deployment.local import LocalDeployment, run_app


@pytest.mark.deployment
@pytest.mark.slow
def test_a_purge_after_a_run_leaves_no_byte_of_its_models_and_nodes_go_on(tmp_path):
    random = 'np.random.default_rng(3).standard_normal(config["size"]).astype(np.float32)'
    server = SERVER.replace('np.zeros(config["size"], dtype=np.float32)', random)
    assert server != SERVER
    app = write_app(tmp_path / "adder", PYPROJECT, server, CLIENT)
    config = "strategy='gap-aware' concurrency=1 buffer-size=1"
    with LocalDeployment(tmp_path / "up", nodes=1, limit_s=300.0) as deployment:
        database = deployment.database
        run = Running(deployment, app, f"{config} rounds=1000 size=100000")
        run.until(lambda: any(len(content) > 100_000 for content in objects(database)))
        seen = [content for content in objects(database) if len(content) > 100_000]
        status, said = purge(database)
        assert status == 2
        assert re.search(r"is in use by a SuperLink, process \d+ of", said), said
        deployment.processes.kill("superlink")
        seen += [content for content in objects(database) if len(content) > 100_000]
        found = bytes_of(database)
        assert [content for content in seen if content[5000:5064] in found]
        status, said = purge(database)
        assert status == 2
        assert "has not ended" in said
        status, said = purge(database, "--unfinished")
        assert status == 0, said
        assert re.search(r"kept 1 nodes, 1 runs", said)
        left = bytes_of(database)
        for content in seen:
            assert not [i for i in range(0, len(content) - 64, 64) if content[i : i + 64] in left]
        deployment.start_superlink()
        deployment.wait_online()
        (first,) = deployment.control.runs()
        # Its ServerApp has outlived the SuperLink, and waits for a job that was purged.
        stop(deployment, first)
        run.thread.join(100.0)
        run_app(deployment, app, run_config=f"{config} rounds=2", show=lambda line: None)
        assert len(deployment.control.runs()) == 2
