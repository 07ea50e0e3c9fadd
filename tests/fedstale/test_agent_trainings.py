"""Trainings of agents with several seeds, in this process."""

import numpy as np
import pytest
from short_trainings import trained, two_parts

from fedstale.agents.policy import scorer
from fedstale.errors import FedstaleError


@pytest.fixture(scope="module")
def parts():
    return two_parts(40)


@pytest.mark.slow
def test_each_seed_gives_an_agent_of_its_own_and_tells_of_every_update(parts, tmp_path):
    told = []
    first, second = trained(
        parts,
        tmp_path,
        workers=1,
        watch=lambda progress: told.append((progress.seed, progress.update)),
    )
    assert told == [(4, 1), (4, 2), (5, 1), (5, 2)]
    assert any((first.weights[name] != second.weights[name]).any() for name in first.weights)
    for seed, agent in ((4, first), (5, second)):
        kept = scorer.load(tmp_path / f"seed-{seed}")
        assert kept.provenance == agent.provenance
        for name, values in agent.weights.items():
            np.testing.assert_array_equal(kept.weights[name], values)


def test_a_training_that_is_rejected_is_told_in_one_sentence(parts, tmp_path):
    out = tmp_path / "agents"
    (out / "seed-5").mkdir(parents=True)
    (out / "seed-5" / "agent.toml").touch()
    with pytest.raises(FedstaleError, match="seed-5: holds an agent; expected a new folder"):
        trained(parts, out, workers=1, watch=lambda *_: None)
