"""What counts in a mean, and which numbers an app's metrics hold."""

import logging
from fractions import Fraction

import numpy as np
import pytest
import torch

from fedstale.strategies.server import add_metrics, means_of, numbers

NAN, INF = float("nan"), float("inf")


def mean(*replies):
    sums = {}
    for examples, value in replies:
        add_metrics(sums, examples, {"loss": value})
    return means_of(sums)["loss"]


@pytest.mark.parametrize(
    "odd", [(2, NAN), (2, INF), (2, -INF), (0, 5.0), (-3, 5.0), (NAN, 5.0), (INF, 5.0)]
)
def test_what_is_no_number_or_of_no_examples_has_no_weight(odd):
    assert mean((1, 1.0), odd, (3, 3.0)) == 2.5
    assert np.isnan(mean(odd))


@pytest.mark.parametrize(
    ("metrics", "found"),
    [
        ({"a": 1, "b": True, "c": Fraction(1, 2)}, {"a": 1.0, "b": 1.0, "c": 0.5}),
        ({"a": np.float32(0.5), "b": np.bool_(1), "c": np.array(2)}, dict(a=0.5, b=1.0, c=2.0)),
        ({"a": torch.tensor([1.0, 2.0])}, {"a.0": 1.0, "a.1": 2.0}),
        (
            {"a": {"b": {0: 1}}, "c": [[1, 2], {"d": 3}]},
            {"a.b.0": 1, "c.0.0": 1, "c.0.1": 2, "c.1.d": 3},
        ),
        ({"a": "text", "b": b"bytes", "c": None, "d": {}, "e": []}, {}),
        ({"a": 10**400}, {"a": INF}),
        (None, {}),
        ([0.5], {}),
    ],
)
def test_numbers_are_found_wherever_they_are(metrics, found):
    assert numbers(metrics) == found


def test_of_a_long_list_the_rest_is_left_out_and_said_once(caplog):
    with caplog.at_level(logging.WARNING, "fedstale"):
        for _ in range(2):
            assert len(numbers({"a_long_histogram": list(range(1000))})) == 100
    assert len(caplog.messages) == 1
