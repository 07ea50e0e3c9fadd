"""What `fedstale tune` prints, and how it ends."""

import json
import subprocess
import sys

import pytest
import tomli_w
from spaces import table

COMMAND = [sys.executable, "-c", "import fedstale.cli.main; fedstale.cli.main.app()", "tune"]


@pytest.fixture
def called(tmp_path):
    """Return a function that calls the command on a space, in a folder of its own."""

    def call(*words, **changes):
        (tmp_path / "space.toml").write_text(tomli_w.dumps(table(**changes)), encoding="utf-8")
        command = [*COMMAND, "space.toml", *words]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False
        )

    return call


def test_a_search_says_what_was_held_out_and_nothing_of_ray(called, tmp_path):
    search = {"strategy.concurrency": [5, 10]}
    changes = {"search": search, "until": "4m", "rungs": ["2m"], "seeds": [1], "trials": 2}
    changes["held-out"] = {"seeds": [11, 12, 13]}
    result = called("--workers", "1", "--search", "random", **changes)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Configuration ")
    assert "held-out seeds" in lines[0]
    assert lines[1].startswith("Use ")
    assert "device-hours: " in lines[1]
    assert lines[2:] == [
        "settings: tunings/space/best.toml",
        "report: tunings/space/held-out/comparison.html",
    ]
    (said,) = result.stderr.splitlines()
    assert "one seed alone" in said
    # What is over is judged again from its files, without a word on the way.
    again = called("--workers", "1", "--search", "random", "--json", **changes)
    told = json.loads(again.stdout)
    assert [told["verdict"], told["answer"]] == lines[:2]
    assert told["best"]["parameters"]["strategy.concurrency"] in (5, 10)
    # Nothing of Ray is left behind.
    assert not (tmp_path / "tunings" / "space" / ".ray").exists()
