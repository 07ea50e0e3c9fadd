import numpy as np
import pytest
from made_agent import save

from fedstale.agents import export
from fedstale.agents.sanity import faults, share_of_liars


@pytest.fixture
def untrained(tmp_path):
    return save(tmp_path / "untrained")


def test_the_agent_that_comes_with_fedstale_is_sound():
    assert faults(export.embedded()) == []


def test_the_heuristic_is_sound(untrained):
    assert faults(untrained) == []


def test_an_agent_that_asks_the_unlikely_is_not(tmp_path):
    turned = save(tmp_path, beta=np.array([-1.0], np.float32))
    (sentence,) = (s for s in faults(turned) if "likeliest" in s)
    assert sentence.startswith("of devices alike in all else")


def test_an_agent_that_believes_every_claim_is_told_by_its_picks(tmp_path, monkeypatch):
    from fedstale.agents import sanity
    from fedstale.strategies import Selector

    class Believer(Selector):
        def __init__(self, path):
            pass

        def select(self, candidates, k, now, rng):
            order = np.argsort(-candidates.forecast_p_finish, kind="stable")
            return [int(node) for node in candidates.node_ids[order[:k]]]

    monkeypatch.setattr(sanity, "AgentSelector", Believer)
    assert share_of_liars(None, 0.7, 1.0) == 1.0
    (sentence,) = faults(tmp_path)
    assert sentence == "devices that never finish what they claim get 100% of its picks"
