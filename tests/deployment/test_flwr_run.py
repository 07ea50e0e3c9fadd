"""The built-in apps and a new one, deployed by Flower's own commands on loopback."""

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "fedstale" / "apps"))

from clothes import write_clothes

from fedstale.cli.apps import create
from fedstale.deployment.local import run_app
from fedstale.simulation.flower_app import BUILT_IN

pytestmark = pytest.mark.deployment


def accuracies(lines):
    """Return the accuracies that the server logged round by round."""
    found = [re.search(r"MetricRecord: \{.*?'accuracy': ([\d.]+)", line) for line in lines]
    return [float(match[1]) for match in found if match]


def test_digits_runs_on_real_supernodes_as_it_is(deployment):
    lines = []
    config = "num-server-rounds=2 fraction-train=0.67"
    run_app(deployment, BUILT_IN / "digits", run_config=config, show=lines.append)
    found = accuracies(lines)
    assert len(found) == 2, lines
    assert found[-1] > 0.7


def test_fashion_reads_its_folder_on_real_supernodes(deployment, tmp_path):
    write_clothes(tmp_path / "clothes", packed=True)
    lines = []
    config = f"data='{tmp_path}/clothes' alpha=10 batch-size=5 fraction-train=1 num-server-rounds=3"
    run_app(deployment, BUILT_IN / "fashion", run_config=config, show=lines.append)
    found = accuracies(lines)
    assert len(found) == 3, lines
    assert found[-1] > 0.5


def test_a_new_app_runs_on_real_supernodes_as_it_is(deployment, tmp_path):
    create(tmp_path / "my-app")
    lines = []
    config = "num-server-rounds=1 concurrency=2 buffer-size=2"
    run_app(deployment, tmp_path / "my-app", run_config=config, show=lines.append)
    assert any("ended at version 1" in line for line in lines), lines
