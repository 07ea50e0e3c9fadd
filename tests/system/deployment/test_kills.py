"""Parts of a deployment that are killed again and again, in training and during uploads.

The measurement is `benchmarks/robustness/kills.py`.
"""

import pytest

from fedstale.deployment.local import has_nginx
from robustness.kills import DISKS, MOMENTS, NODES, PARTS, killed, obstacle

KILLS, WAITS = 10, 2
"""How often a part is killed, and how often there is a minute and a half of something."""


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
    assert (row["exit"], row["versions"]) == (0, row["versions_asked"])
    # Each version is one update.
    assert row["updates_in_the_model"] == row["versions"]
    assert (row["updates_twice"], row["versions_back"]) == (0, 0)
    # The last version ends the run, while the other devices train for the next.
    assert row["trainings"] - row["versions"] <= NODES * (kills + 1)
