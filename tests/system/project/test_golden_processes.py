"""Runs whose clients work in processes compute what they did when they were recorded."""

import pytest
from golden_runs import RUNS, assert_as_recorded

IN_PROCESSES = [name for name in RUNS if RUNS[name].get("executor") == "processes"]


@pytest.mark.parametrize("name", IN_PROCESSES)
def test_a_run_in_processes_computes_what_it_did_when_it_was_recorded(name, tmp_path):
    assert_as_recorded(RUNS[name], tmp_path)
