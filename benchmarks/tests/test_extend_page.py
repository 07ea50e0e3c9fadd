"""The walk-throughs of docs/extend.md: short enough to be one small file, and of use in a run."""

import re

import numpy as np
import pytest
from places import ROOT
from virtual_grid import VirtualGrid, adder, identity, record

PAGE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
SECTIONS = {
    "A weighting": "Bounded(weighting.Weighting)",
    "A selector": "Rested(selection.Selector)",
    "A robust rule": "WinsorisedMean(robust.Rule)",
}


def block(section):
    """Return the block of a section that defines its class."""
    text = re.search(rf"^## {section}$(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)[1]
    found = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return next(code for code in found if f"class {SECTIONS[section]}" in code)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_walk_through_has_at_most_thirty_lines(section):
    assert len(block(section).splitlines()) <= 30


@pytest.mark.parametrize("section", SECTIONS)
def test_the_strategy_of_a_walk_through_trains(section):
    names = {"__name__": "page"}
    exec(compile(block(section), section, "exec"), names)
    grid = VirtualGrid({n: adder(1.0, 1.0 + n) for n in range(40)})
    with identity():
        result = names["strategy"].start(grid, record(w=np.zeros(2)), num_rounds=6)
    np.testing.assert_allclose(result.arrays["w"].numpy(), 6.0, atol=5.0)
    assert (result.arrays["w"].numpy() > 1.0).all()
    assert not names["strategy"].rejections
