"""What the project publishes: rows of the results of benchmarks, and the words of its pages."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def rows(name):
    """Return the rows of a result."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["rows"]


def page(name):
    """Return the text of a page below docs/, its lines joined."""
    return " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())
