"""The walk-throughs of docs/extend.md: short enough to be one small file, and of use in a run."""

import re

import numpy as np
import pytest
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from places import ROOT
from stage_contract import check_stage
from virtual_grid import VirtualGrid, adder, identity, record

from fedstale.strategies import FedAvg

PAGE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
SECTIONS = {
    "A weighting": "Bounded(weighting.Weighting)",
    "A selector": "Rested(selection.Selector)",
    "A robust rule": "WinsorisedMean(robust.Rule)",
    "A stage": "FallingRate(Stage)",
    "A strategy of your own": "Patient(FedBuff)",
    "A source of traces": "",
}
TRAIN = ("A weighting", "A selector", "A robust rule")


def block(section):
    """Return the block of a section that defines its class."""
    text = re.search(rf"^## {section}$(.*?)(?:^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]
    found = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return next(code for code in found if SECTIONS[section] in code)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_walk_through_has_at_most_forty_lines(section):
    assert len(block(section).splitlines()) <= 40


@pytest.mark.parametrize("section", TRAIN)
def test_the_strategy_of_a_walk_through_trains(section):
    names = {"__name__": "page"}
    exec(compile(block(section), section, "exec"), names)
    grid = VirtualGrid({n: adder(1.0, 1.0 + n) for n in range(40)})
    with identity():
        result = names["strategy"].start(grid, record(w=np.zeros(2)), num_rounds=6)
    np.testing.assert_allclose(result.arrays["w"].numpy(), 6.0, atol=5.0)
    assert (result.arrays["w"].numpy() > 1.0).all()
    assert not names["strategy"].rejections


def test_the_stage_of_a_walk_through_sends_its_rate_and_wants_it_back():
    names = {"__name__": "page"}
    exec(compile(block("A stage"), "A stage", "exec"), names)

    def node(honest):
        def answer(message, grid):
            rate = message.content["config"]["lr"]
            return adder(1.0, 1.0, lr=rate if honest else 1.0)(message, grid)

        return answer

    grid = VirtualGrid({n: node(honest=n > 1) for n in range(6)})
    with identity():
        names["strategy"].start(grid, record(w=np.zeros(2)), num_rounds=6)
    rates = {message.content["config"]["lr"] for _, message in grid.sent}
    assert min(rates) < max(rates) == 0.1
    assert names["strategy"].rejections["rejected: lr"] >= 2


def test_the_stage_of_a_walk_through_keeps_the_contract_of_a_stage():
    names, app = {"__name__": "page"}, ClientApp()
    exec(compile(block("A stage"), "A stage", "exec"), names)

    @app.train()
    def train(message, context):
        metrics = MetricRecord({"num-examples": 1, "lr": message.content["config"]["lr"]})
        content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
        return Message(content, reply_to=message)

    initial_arrays, stage = record(w=np.zeros(3)), names["FallingRate"]
    check_stage(lambda **options: FedAvg(stages=[stage()], **options), app, initial_arrays)
