"""The data card of the generated devices says what their files and the catalogue say."""

import re
import subprocess
import sys
import tomllib

import numpy as np
import pytest
from places import ROOT

from fedstale.traces import DAY_S, TraceSet
from fedstale.traces.sources import SOURCES
from fedstale.traces.synthetic import population
from populations import fit

PAGE = (ROOT / "docs" / "trace-sources.md").read_text(encoding="utf-8")
FITTED_TO = {
    "phones": ("flash_days", "gnettrack", "mahimahi", "planetlab", "aibenchmark"),
    "desktops": ("library_desktops", "planetlab"),
}


def card(kind):
    """Return the cells of one population by the first cell of their row."""
    part = PAGE.split("## Data card\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")]
    column = 1 + list(FITTED_TO).index(kind)
    return {row[0]: row[column] for row in rows if len(row) == 3}


def stored(kind):
    return tomllib.loads((ROOT / card(kind)["file"].strip("`")).read_text(encoding="utf-8"))


def read_as(source):
    """Return what reading one source found: file, devices, and what was read."""
    (line,) = re.findall(rf"^\| (\S+) \| {source} \| ([\d,]+) \| ([^|]+) \|", PAGE, re.MULTILINE)
    return line


@pytest.mark.parametrize("kind", FITTED_TO)
def test_the_card_names_what_the_file_was_fitted_to(kind):
    said, file = card(kind), stored(kind)
    provenance = file["provenance"]
    assert said["fitted"] == f"{provenance['date']}, by fedstale {provenance['version']}"
    fitted_to = {entry["name"].split("/")[0] for entry in provenance["files"]}
    assert fitted_to == {read_as(source)[0] for source in FITTED_TO[kind]}
    assert said["licences of these recordings"] == "; ".join(
        SOURCES[source].licence for source in FITTED_TO[kind]
    )
    never = file["targets"]["availability"]["never"]
    assert f"{100 * never:.1f} % never are" in said["who is online"]


def test_the_card_counts_what_was_read():
    phones, desktops = card("phones"), card("desktops")
    for said, row in (
        (phones, "coming and going"),
        (desktops, "coming and going"),
        (phones, "links"),
        (phones, "other load"),
        (phones, "speed"),
    ):
        for source in re.findall(r"`(\w+)`", said[row]):
            assert re.search(rf"\b{read_as(source)[1]}\b", said[row]), source
    assert "58,080.0 h" in read_as("flash_days")[2]
    assert "58,080.0 h" in phones["coming and going"]
    assert f"{fit.MOST_PROCESSORS:,} servers" in phones["other load"]
    for date in re.findall(r"\d{4}-\d\d-\d\d", phones["coming and going"]):
        assert date in PAGE
    for date in re.findall(r"\d{4}-\d\d-\d\d", desktops["coming and going"]):
        assert date in PAGE


def test_the_card_says_what_is_stated_of_desktops():
    desktops = population.load("desktops")
    assert card("desktops")["speed"] == f"stated: {desktops.speed[0]:g} work units a second"
    middle = TraceSet.synthetic(3, days=7, seed=0, population="desktops").downlink
    assert middle.value_at(np.arange(3), 0.0) == pytest.approx(100e6, rel=1e-4)
    assert "100 Mbit/s both ways" in card("desktops")["links"]
    assert desktops.availability.cycle_s == 7 * DAY_S
    assert population.load("phones").availability.cycle_s == DAY_S


def test_the_tables_of_channels_are_what_the_command_prints():
    shown = PAGE.split("<!-- channels: begin -->\n")[1].split("\n<!-- channels: end -->")[0]
    command = [sys.executable, str(ROOT / "benchmarks/populations/compared.py"), "--channels"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == shown


def test_channels_go_together_in_no_device():
    n = 4000
    traces = TraceSet.synthetic(n, days=2, seed=0)
    windows = traces.availability
    online = [np.ptp(windows.windows(i)[0], axis=1).sum() for i in range(n)]
    speed, link = traces.compute.scales, np.log(traces.downlink.scales)
    for a, b in ((speed, link), (speed, online), (link, online)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(n)
