import re

import pytest
from places import ROOT


def test_a_table_replaces_only_what_stands_in_its_place():
    from pages import filled, has_place

    page = "a\n<!-- x y: begin -->\nold\n<!-- x y: end -->\nb\n<!-- z: end -->"
    assert filled(page, "x y", "new") == page.replace("old", "new")
    assert filled(filled(page, "x y", "new\nlines\n"), "x y", "old") == page
    assert [has_place(page, name) for name in ("x y", "y", "z")] == [True, False, False]
    with pytest.raises(ValueError, match="lacks <!-- z: begin"):
        filled(page, "z", "new")


def test_every_place_for_a_table_has_a_plan():
    pages = [ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")]
    places = {
        name
        for page in pages
        for name in re.findall(r"<!-- compare (\S+): begin -->", page.read_text(encoding="utf-8"))
    }
    assert places <= {path.stem for path in (ROOT / "benchmarks" / "compare").glob("*.toml")}
    assert "waiting" in places
