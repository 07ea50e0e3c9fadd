"""Parts of a deployment that are killed again and again, in training and during uploads.

The measurement is `benchmarks/kills.py`.
"""

import json

import pytest
from kills import CLOCKS, DISKS, MOMENTS, NODES, PARTS, kept_rows, killed, obstacle
from kills_page import table
from pages import filled, markers

from fedstale.deployment.local import has_nginx

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
    kills = WAITS if part in {"network", *CLOCKS, *DISKS} else KILLS
    row = killed(part, moment, kills, tmp_path)
    assert row["kills"] == kills
    assert (row["exit"], row["versions"]) == (0, row["versions_asked"])
    # Each version is one update.
    assert row["updates_in_the_model"] == row["versions"]
    assert (row["updates_twice"], row["versions_back"]) == (0, 0)
    # The last version ends the run, while the other devices train for the next.
    assert row["trainings"] - row["versions"] <= NODES * (kills + 1)


ROW = {
    **{"part": "superlink", "moment": "upload", "kills": 10, "versions_asked": 34, "versions": 34},
    **{"runs": 1, "trainings": 36, "updates_twice": 0, "versions_back": 0},
}


def test_what_was_measured_is_kept_and_not_measured_again(tmp_path):
    kept = tmp_path / "rows"
    assert kept_rows(None) == kept_rows(kept) == {}
    kept.write_text("".join(json.dumps(ROW | {"moment": moment}) + "\n" for moment in MOMENTS))
    assert [*kept_rows(kept)] == [("superlink", moment) for moment in MOMENTS]


def test_the_page_says_how_many_jobs_were_lost_and_keeps_its_words():
    start, end = markers("kills")
    lines = "\n".join(table({"command": "x", "rows": [ROW]}))
    found = filled(f"Before.\n{start}old\n{end}\nAfter.", "kills", lines)
    assert found.startswith("Before.\n")
    assert found.endswith("\nAfter.")
    assert "old" not in found
    assert "| SuperLink | upload | 10 | 34 | 34 | 1 | 36 | 2 | 0 | 0 |" in found
