"""A trace acted by real processes, against the simulation of it."""

import runpy
from pathlib import Path

import pytest

from fedstale.reports.run import Run

pytestmark = [pytest.mark.deployment, pytest.mark.slow]

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "fidelity.py"


@pytest.mark.timeout(1500)
def test_real_processes_follow_the_simulation(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    measure = runpy.run_path(str(BENCHMARK))["measure"]
    found = measure(tmp_path, nodes=3, speed_up=12.0, versions=3, traces="synthetic:3", seed=4)
    # What Flower needs depends on the machine; that jobs take the trace's time does not.
    assert found["jobs"]["matched"] >= 6
    assert found["duration"]["median_rounds"] < 0.25, found
    assert found["merge_order"] > 0.8, found
    assert found["same_status"] > 0.7, found
    record = Run(tmp_path / "fleet" / "run")
    assert record.summary["status"] == "finished"
    assert record.summary["speed_up"] == 12.0
    assert (tmp_path / "fleet" / "run" / "report.html").is_file()
