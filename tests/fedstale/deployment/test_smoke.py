"""One real deployment, small and short; the other tests of this folder start no process."""

import re

import pytest
from small_deployment import means, write_app

from fedstale.deployment.local import LocalDeployment, run_app


@pytest.mark.smoke
@pytest.mark.deployment
def test_two_nodes_train_as_they_come_and_what_is_late_counts_less(tmp_path):
    app, lines = write_app(tmp_path / "adder"), []
    config = "strategy='gap-aware' rounds=2 concurrency=2 buffer-size=1"
    with LocalDeployment(tmp_path / "up", nodes=2, has_proxy=False) as deployment:
        run_id = run_app(deployment, app, run_config=config, show=lines.append)
        status, _ = deployment.control.runs()[run_id]
    assert status == "finished:completed"
    # Node 0 adds 1 and node 1 adds 2, each to the version that it was sent.
    found = re.findall(r"version (\d), train: \{'node': (\d)", "\n".join(lines))
    assert [version for version, _ in found] == ["1", "2"], lines
    first, second = (int(node) + 1 for _, node in found)
    mean = means(lines)
    assert mean[0] == 0.0
    assert mean[1] == pytest.approx(first)
    if second != first:
        # It was sent version 0 as well.
        assert 0.0 < mean[2] - mean[1] < second
    else:
        assert mean[2] - mean[1] == pytest.approx(second)
