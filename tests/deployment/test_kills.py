"""Parts of a deployment that are killed again and again, in training and during uploads.

The measurement is `benchmarks/kills.py`.
"""

import sys
from pathlib import Path

import pytest

from fedstale.deployment.local import has_nginx

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from kills import MOMENTS, NODES, PARTS, killed

pytestmark = [
    pytest.mark.deployment,
    pytest.mark.slow,
    pytest.mark.skipif(not has_nginx(), reason="nginx is not installed: apt-get install nginx"),
]
KILLS = 10


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("part", PARTS)
def test_the_run_ends_with_its_versions_and_loses_what_was_in_flight_alone(part, moment, tmp_path):
    row = killed(part, moment, KILLS, tmp_path)
    assert row["kills"] == KILLS
    assert (row["exit"], row["versions"]) == (0, row["versions_asked"])
    # Each version is one update.
    assert row["updates_in_the_model"] == row["versions"]
    assert (row["updates_twice"], row["versions_back"]) == (0, 0)
    # The last version ends the run, while the other devices train for the next.
    assert row["trainings"] - row["versions"] <= NODES * (KILLS + 1)
