import numpy as np
from made_agent import save

from fedstale.agents import AgentSelector
from fedstale.agents.sanity import faults, share_of_liars
from fedstale.strategies.selection import ExpectedUtility, Selector


def test_the_agent_that_comes_with_fedstale_is_sound():
    assert faults(AgentSelector()) == []


def test_the_heuristic_is_sound_and_so_is_an_agent_that_is_nothing_else(tmp_path):
    assert faults(ExpectedUtility()) == []
    assert faults(AgentSelector(save(tmp_path))) == []


def test_an_agent_that_asks_the_unlikely_is_not(tmp_path):
    turned = AgentSelector(save(tmp_path, beta=np.array([-1.0], np.float32)))
    (sentence,) = (s for s in faults(turned) if "likeliest" in s)
    assert sentence.startswith("of devices alike in all else")


def test_a_selector_that_believes_every_claim_is_told_by_its_picks():
    class Believer(Selector):
        def select(self, candidates, k, now, rng):
            order = np.argsort(-candidates.forecast_p_finish, kind="stable")
            return [int(node) for node in candidates.node_ids[order[:k]]]

    assert share_of_liars(Believer(), 0.7, 1.0) == 1.0
    (sentence,) = faults(Believer())
    assert sentence == "devices that never finish what they claim get 100% of its picks"
