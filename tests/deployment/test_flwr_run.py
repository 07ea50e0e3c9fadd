"""The built-in apps and a new one, deployed by Flower's own commands on loopback."""

import re

import pytest

from fedstale.cli.new import create
from fedstale.deployment.local import LocalDeployment, run_app
from fedstale.simulation.flower_app import BUILT_IN

pytestmark = pytest.mark.deployment


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flower")
    with LocalDeployment(folder / "deployment", nodes=2) as deployment:
        yield deployment


def accuracies(lines):
    """Return the accuracies that the server logged round by round."""
    found = [re.search(r"MetricRecord: \{.*?'accuracy': ([\d.]+)", line) for line in lines]
    return [float(match[1]) for match in found if match]


def test_digits_runs_on_real_supernodes_as_it_is(deployment):
    lines = []
    config = "num-server-rounds=2 fraction-train=1.0"
    run_app(deployment, BUILT_IN / "digits", run_config=config, show=lines.append)
    found = accuracies(lines)
    assert len(found) == 2, lines
    assert found[-1] > 0.7


def test_a_new_app_runs_on_real_supernodes_as_it_is(deployment, tmp_path):
    create(tmp_path / "my-app")
    lines = []
    config = "num-server-rounds=1 concurrency=2 buffer-size=2"
    run_app(deployment, tmp_path / "my-app", run_config=config, show=lines.append)
    assert any("ended at version 1" in line for line in lines), lines
