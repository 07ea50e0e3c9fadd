"""Trainings of agents in processes of their own: the same agents, and what of one that dies."""

import numpy as np
import pytest
from short_trainings import trained, two_parts

from fedstale.cli.agent import LOG
from fedstale.errors import FedstaleError


@pytest.fixture(scope="module")
def parts():
    return two_parts(60)


def test_trainings_in_processes_give_the_same_agents_as_one_by_one(parts, tmp_path):
    told = {1: [], 2: []}
    ones, others = (
        trained(
            parts,
            tmp_path / str(workers),
            workers=workers,
            watch=lambda progress, to=told[workers]: to.append((progress.seed, progress.update)),
        )
        for workers in told
    )
    assert sorted(told[1]) == sorted(told[2]) == [(4, 1), (4, 2), (5, 1), (5, 2)]
    for here, there in zip(ones, others, strict=True):
        assert here.provenance == there.provenance
        for name, values in here.weights.items():
            np.testing.assert_array_equal(there.weights[name], values)
    first, second = ones
    assert any((first.weights[name] != second.weights[name]).any() for name in first.weights)
    assert (tmp_path / "2" / LOG).read_text() == ""
    assert not (tmp_path / "2" / ".scenarios").exists()


def test_a_process_that_dies_is_told_with_its_seed(parts, tmp_path, monkeypatch):
    monkeypatch.setattr("fedstale.cli.agent._train_shared", dies)
    with pytest.raises(
        FedstaleError, match=r"seed [45]: its process ended with code 3; .*log\.txt"
    ):
        trained(parts, tmp_path, workers=2, watch=lambda *_: None)


def dies(given, say):
    import os

    os._exit(3)
