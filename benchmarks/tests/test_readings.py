import os
import subprocess
import sys

import pytest
from places import RECORDINGS, ROOT

from fedstale.traces.sources import SOURCES, fedscale, speeds

PAGE = (ROOT / "docs" / "trace-sources.md").read_text()
needs_real = pytest.mark.skipif(
    not RECORDINGS.exists(), reason=f"{RECORDINGS} is not on this machine"
)


@needs_real
def test_the_page_shows_what_reading_the_published_files_finds():
    from populations.readings import table

    shown = PAGE.split("<!-- readings: begin -->\n")[1].split("\n<!-- readings: end -->")[0]
    named = [line.split("|")[1].strip() for line in shown.splitlines()[2:]]
    assert shown == table(RECORDINGS / name for name in named)


UNITS = {
    "planetlab": speeds.HOSTS_UNIT,
    "aibenchmark": speeds.PHONES_UNIT,
    "fedscale_capacity": fedscale.COMPUTE_UNIT,
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_page_shows_every_source_as_the_catalogue_has_it(name):
    source = SOURCES[name]
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
    cells = (source.about, ", ".join(source.channels), source.origin, source.licence)
    for cell in (*cells, UNITS.get(name, "-")):
        assert f"| {cell} |" in row


def make_folder(folder):
    (folder / "a.json").write_text('{"x": [[1, 3601], [9, 9]]}')
    (folder / "links").mkdir()
    (folder / "links" / "a.up").write_text("3600000")
    return folder


def test_a_table_has_a_row_for_every_recording(tmp_path):
    from populations.readings import table

    assert table(make_folder(tmp_path).iterdir()).splitlines()[2:] == [
        "| a.json | flash | 1 | 1 windows of availability, 1.0 h of 1.0 h logged "
        "| 1 merged: overlapping |",
        "| links | mahimahi | 1 | 1.0 h of uplink | nothing |",
    ]


@pytest.mark.parametrize("arguments", [[], ["nothing"]])
def test_the_command_says_what_is_wrong_in_one_line(tmp_path, arguments):
    command = [sys.executable, str(ROOT / "benchmarks/populations/readings.py"), *arguments]
    run = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    assert run.returncode == 1
    assert run.stdout == ""
    assert len(run.stderr.strip().splitlines()) == 1
