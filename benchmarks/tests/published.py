"""What the project publishes: rows of the results of benchmarks, and the words of its pages."""

import json
import re

from places import ROOT


def rows(name):
    """Return the rows of a result."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["rows"]


def page(name):
    """Return the text of a page below docs/, its lines joined."""
    return " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())


def figures(text, sentence):
    """Return the numbers of a sentence, in which `#` stands for each."""
    pattern = re.escape(sentence).replace(r"\#", r"([\d.,]*\d)")
    found = re.search(pattern, text)
    assert found, sentence
    return [float(each.replace(",", "")) for each in found.groups()]
