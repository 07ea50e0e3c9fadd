import hashlib

import numpy as np
import pytest
import safetensors.numpy

from fedstale.agents.policy import scorer
from fedstale.agents.policy.scorer import initial
from fedstale.errors import ProtocolError


@pytest.fixture
def saved(tmp_path):
    weights = initial(np.random.default_rng(0))
    scorer.save(scorer.Agent(weights=weights, provenance={"seed": 3}), tmp_path)
    return tmp_path


def test_an_agent_comes_back_as_it_was_saved(saved):
    weights = initial(np.random.default_rng(0))
    agent = scorer.load(saved)
    assert agent.provenance == {"seed": 3}
    assert agent.weights.keys() == weights.keys()
    for name, value in weights.items():
        np.testing.assert_array_equal(agent.weights[name], value)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("version = ", "version = 9", r"schema\.version = "),
        ('"heuristic_rank"', '"rank"', "schema.features differ in heuristic_rank, rank"),
    ],
)
def test_a_description_of_another_version_is_rejected(saved, before, after, said):
    path = saved / "agent.toml"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))
    with pytest.raises(ProtocolError, match=said):
        scorer.load(saved)


def rewritten(folder, weights):
    data = safetensors.numpy.save(weights)
    old = hashlib.sha256((folder / "agent.safetensors").read_bytes()).hexdigest()
    (folder / "agent.safetensors").write_bytes(data)
    toml = (folder / "agent.toml").read_text()
    (folder / "agent.toml").write_text(toml.replace(old, hashlib.sha256(data).hexdigest()))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("beta", np.array([np.nan], dtype=np.float32), "beta holds a number that is not finite"),
        ("beta", np.array([1.0]), "beta holds no 32-bit numbers"),
        ("beta", np.ones(2, dtype=np.float32), "expected"),
        ("more", np.ones(2, dtype=np.float32), "expected"),
    ],
)
def test_weights_that_do_not_fit_are_rejected(saved, name, value, said):
    rewritten(saved, {**scorer.load(saved).weights, name: value})
    with pytest.raises(ProtocolError, match=said):
        scorer.load(saved)
