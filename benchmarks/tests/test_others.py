"""The README says of other projects what was read in a version of their code, on a day."""

import datetime
import re
import tomllib

import pytest
from places import ROOT

import pages

OTHERS = pages.others()
CELLS = ("devices", "late", "flower", "deploys")


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other["name"])
def test_what_is_said_of_another_project_has_a_version_a_day_and_a_source_for_each_cell(other):
    assert re.fullmatch(r"\d+(\.\d+)+|[0-9a-f]{7}", other["version"])
    assert isinstance(other["read"], datetime.date)
    assert other["link"].startswith("https://")
    assert set(other) == {"name", "module", "link", "version", "read", "sources", *CELLS}
    assert set(other["sources"]) == set(CELLS)
    for cell in CELLS:
        assert other[cell]
        source = other["sources"][cell]
        # A file, a folder, or what was looked through.
        assert re.search(r"[\w}]/[\w{*]|\*\.py", source), source
        # A release is a wheel unless the source names a commit.
        is_release = "." in other["version"]
        assert (
            source.startswith("wheel: ") or not is_release or re.search("at [0-9a-f]{10}:", source)
        )


def test_the_table_of_others_in_the_readme_is_that_of_the_file():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("\n## Others\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| [")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert rows == [
        [f"[{o['name']}]({o['link']}){o['module']}", *(o[cell] for cell in CELLS)] for o in OTHERS
    ]
    said = re.search(r"by (\d+ \w+ \d{4}): (.*)\.\n", section)
    days = {datetime.datetime.strptime(said[1], "%d %B %Y").date()}
    assert days == {max(other["read"] for other in OTHERS)}
    assert [words.rsplit(" ", 1)[1] for words in said[2].split(", ")] == [
        other["version"] for other in OTHERS
    ]


def test_flowers_engine_was_read_in_the_version_that_is_tested():
    fixed = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (flower,) = (other for other in OTHERS if other["name"].startswith("Flower"))
    assert f"\nflwr=={flower['version']}\n" in fixed


def test_a_place_in_the_readme_is_written(monkeypatch):
    text = (ROOT / "benchmarks/others/others.toml").read_text(encoding="utf-8")
    changed = [{"module": ""} | row for row in tomllib.loads(text)["other"]]
    changed[0]["devices"] = "as slow as the machine"
    monkeypatch.setattr(pages, "others", lambda: changed)
    assert "| as slow as the machine |" in pages.written()[ROOT / "README.md"]
