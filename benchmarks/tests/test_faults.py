import numpy as np
from made_agent import save

from agent.faults import faults, over_reporting_share
from fedstale.agents import AgentSelector
from fedstale.strategies.selection import ExpectedUtility, Selector


def test_the_agent_that_comes_with_fedstale_is_sound():
    assert faults(AgentSelector()) == []


def test_the_heuristic_is_sound_and_so_is_an_agent_that_is_nothing_else(tmp_path):
    assert faults(ExpectedUtility()) == []
    assert faults(AgentSelector(save(tmp_path))) == []


def test_an_agent_that_picks_the_least_reliable_is_not(tmp_path):
    turned = AgentSelector(save(tmp_path, beta=np.array([-1.0], np.float32)))
    (sentence,) = (s for s in faults(turned) if "most likely" in s)
    assert sentence.startswith("of clients alike in all else")


def test_a_selector_that_believes_every_report_is_found_by_its_picks():
    class Believer(Selector):
        def select(self, candidates, k, now, rng):
            order = np.argsort(-candidates.forecast_p_finish, kind="stable")
            return [int(node) for node in candidates.node_ids[order[:k]]]

    assert over_reporting_share(Believer(), 0.7, 1.0) == 1.0
    (sentence,) = faults(Believer())
    assert sentence == "over-reporting clients, which never finish, get 100% of its picks"
