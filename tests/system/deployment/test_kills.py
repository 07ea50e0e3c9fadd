"""Parts of a deployment that are killed again and again, and faults of all kinds in one run.

The measurements are `benchmarks/robustness/kills.py` and `history.py`.
"""

import json
import subprocess
import sys

import pytest

from fedstale.deployment.local import has_nginx
from robustness import history
from robustness.kills import DISKS, MOMENTS, NODES, PARTS, killed, obstacle

KILLS, WAITS, FAULTS = 10, 2, 12
"""How often a part is killed, and how often there is a minute and a half of something; how many
faults there are in one run."""


@pytest.mark.deployment
@pytest.mark.slow
@pytest.mark.skipif(not has_nginx(), reason="nginx is not installed: apt-get install nginx")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("part", PARTS)
def test_the_run_ends_with_its_versions_and_loses_what_was_in_flight_alone(part, moment, tmp_path):
    if why := obstacle(part):
        pytest.skip(why)
    kills = WAITS if part in {"network", *DISKS} else KILLS
    row = killed(part, moment, kills, tmp_path)
    assert row["kills"] == kills
    check(row, kills)


def check(row, n_faults):
    """Check that every version is one update, and that no more was lost than was in flight."""
    assert (row["exit"], row["versions"]) == (0, row["versions_asked"])
    # Each version is one update.
    assert row["updates_in_the_model"] == row["versions"]
    assert (row["updates_twice"], row["versions_back"]) == (0, 0)
    # The last version ends the run, while the other devices train for the next.
    assert row["trainings"] - row["versions"] <= NODES * (n_faults + 1)


@pytest.mark.deployment
@pytest.mark.slow
@pytest.mark.skipif(not has_nginx(), reason="nginx is not installed: apt-get install nginx")
@pytest.mark.timeout(3600)
def test_a_run_that_many_kinds_of_fault_happen_to_loses_and_doubles_nothing():
    # In a process, since it takes a network of its own.
    command = [sys.executable, history.__file__, "--faults", str(FAULTS)]
    kinds = [word for kind in history.KINDS for word in ("--kind", kind)]
    done = subprocess.run([*command, *kinds], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    check(json.loads(done.stdout.splitlines()[-1]), FAULTS)
