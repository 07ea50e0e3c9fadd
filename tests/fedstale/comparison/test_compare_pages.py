import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "benchmarks"))


def test_a_table_replaces_only_what_stands_in_its_place():
    from comparisons import filled

    page = "a\n<!-- compare x: begin -->\nold\n<!-- compare x: end -->\nb\n"
    assert filled(page, "x", "new\n") == page.replace("old", "new")
    assert filled(filled(page, "x", "new\n"), "x", "old\n") == page
    assert filled(page, "y", "new\n") == page


def test_every_place_for_a_table_has_a_plan():
    pages = [ROOT / "benchmarks" / "README.md", *(ROOT / "docs").glob("*.md")]
    places = {
        name
        for page in pages
        for name in re.findall(r"<!-- compare (\S+): begin -->", page.read_text(encoding="utf-8"))
    }
    assert places <= {path.stem for path in (ROOT / "benchmarks" / "compare").glob("*.toml")}
    assert "waiting" in places
