"""The quick rows of the table of shapes in docs/apps-that-run.md are still what is found."""

import sys

import numpy as np
import pytest
from places import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from lab.results import read_result
from shapes.apps import SHAPES, with_fedstale
from shapes.run import ended, ideal_cell, is_as_recorded, nearness, run

QUICK = ["message_api", "older_api"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "shape", [s for s in SHAPES if s.app in QUICK], ids=lambda shape: shape.app
)
def test_a_quick_shape_runs_as_the_table_says(shape, tmp_path, monkeypatch):
    (recorded,) = [one for one in read_result("shapes")["rows"] if one["app"] == shape.key]
    found = {}
    for column in ("flower", "ideal", "phones", "ours"):
        folder = tmp_path / column
        folder.mkdir()
        monkeypatch.chdir(folder)
        found[column] = run(shape, column, folder)
    # Of one run on Flower's engine it is not known whether its next would be the same.
    cell = ideal_cell(found["ideal"], [found["flower"][1]])
    assert is_as_recorded("ideal", recorded | {"ideal": cell}, recorded)
    assert ended(found["phones"][0]) == recorded["phones"]
    assert ended(found["ours"][0]) == recorded["ours"]


MADE = """from flwr.serverapp.strategy import FedAvg

strategy = wrapped(
    FedAvg(
        fraction_train=0.5,
    ),
    1,
)
"""
INHERITED = """from flwr.serverapp.strategy import FedAvg


class Mine(FedAvg):
    pass
"""


@pytest.mark.parametrize(
    ("source", "name", "line"),
    [
        (MADE, "FedBuff", "    FedBuff(concurrency=10, buffer_size=5, seed=1),"),
        (INHERITED, "FedAvg", "class Mine(FedAvg):"),
    ],
)
def test_the_strategy_of_an_app_is_replaced_by_ours(source, name, line):
    text, found = with_fedstale(source)
    assert found == name
    assert text.splitlines()[:2] == [
        source.splitlines()[0],
        f"from fedstale.strategies import {name}",
    ]
    assert line in text.splitlines()
    compile(text, "app.py", "exec")


def test_an_app_without_fedavg_stays_as_it_is():
    source = "from flwr.serverapp.strategy import FedXgbBagging\n"
    assert with_fedstale(source) == (source, "")


ONE = np.ones(3, np.float32)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ([ONE], "same model"),
        ([ONE + np.float32(5e-6)], "within 1e-05"),
        ([ONE + 0.1], ""),
        ([np.ones(2, np.float32)], ""),
        ([ONE, ONE], ""),
        ([np.full(3, np.nan, np.float32)], ""),
    ],
)
def test_models_are_as_near_as_their_farthest_number(other, words):
    assert nearness([ONE], other) == words


def test_bytes_in_another_order_are_named():
    a, b = np.frombuffer(b"abc", np.uint8), np.frombuffer(b"cab", np.uint8)
    assert nearness([a], [b]) == "same bytes in another order"


@pytest.mark.parametrize(
    ("flower", "then", "now", "is_so"),
    [
        ("same model each time", "same model", "same model", True),
        ("same model each time", "same model", "within 1e-07", False),
        ("same model each time", "within 1e-07", "same model", True),
        ("within 1e-07 each time", "within 1e-07", "within 1e-06", True),
        ("within 1e-07 each time", "within 1e-07", "within 1e-05", False),
        ("within 1e-07 each time", "same model", "within 1e-07", True),
        ("another model each time", "ran: 3 rounds", "within 0.001", True),
        ("another model each time", "failed: why", "ran: 3 rounds", False),
        ("same model each time", "same model", "ran: 3 rounds", False),
    ],
)
def test_models_may_not_be_farther_than_they_were(flower, then, now, is_so):
    found, recorded = {"flower": flower, "ideal": now}, {"flower": flower, "ideal": then}
    assert is_as_recorded("ideal", found, recorded) is is_so
