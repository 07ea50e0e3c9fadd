"""What a run knows of its clients: caps by running medians, rejections by kind, and rests."""

import logging
from math import inf

import numpy as np
import pytest
from replies import BASE, good, job, reply

from fedstale.errors import ProtocolError
from fedstale.strategies.arrays import norm_of
from fedstale.strategies.server.reputation import Cap, Reputation
from fedstale.strategies.server.validation import RejectionError, Validation
from fedstale.strategies.server.versions import Versions

pytestmark = pytest.mark.usefixtures("_identity")


def admit(reputation, examples=10, node_id=7, **arrays):
    message = reply(good(examples, **arrays), node_id)
    return reputation.open(message, job(node_id), Versions(BASE))


def test_a_cap_is_a_multiple_of_the_median_over_nodes_with_one_voice_each():
    cap = Cap(1.5, window=4, enough=3)
    for node, value in enumerate([10.0, 20.0]):
        cap.hear(node, value)
    assert not cap.holds
    assert cap.limit(1e9) == 1e9
    for _ in range(50):
        cap.hear(2, 1e9)
    assert cap.holds
    assert cap.limit(1e9) == 30.0
    assert cap.limit(5.0) == 5.0
    for node in range(3, 6):
        cap.hear(node, 40.0)
    # The window holds nodes 2 to 5.
    assert cap.limit(1e9) == 60.0


def test_no_cap_trusts_every_client():
    cap = Cap(None, window=4, enough=3)
    assert cap.holds
    assert cap.limit(1e9) == 1e9


def test_a_claim_counts_for_at_most_one_and_a_half_times_the_median(caplog):
    reputation = Reputation(Validation(examples_cap=1.5))
    for node in range(5):
        admit(reputation, 10 + node, node)
    with caplog.at_level(logging.WARNING):
        assert admit(reputation, 10**9, 9).examples == 1.5 * 12.5
        assert admit(reputation, 10**9, 10).examples == 1.5 * 13.0
    assert reputation.counts["capped"] == 2
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "examples_cap" in caplog.text
    assert admit(Reputation(Validation()), 10**9).examples == 1e9


def test_an_update_is_clipped_to_the_running_median_of_norms():
    reputation = Reputation(Validation(norm_cap=2.0))
    for node in range(5):
        admit(reputation, node_id=node)
    typical = np.sqrt(6.0)
    found = admit(reputation, node_id=9, w=np.full((2, 3), 1e6, np.float32))
    assert norm_of(found.delta) == pytest.approx(2 * typical, rel=1e-6)
    assert reputation.counts["clipped"] == 1
    with pytest.raises(RejectionError, match="norm"):
        admit(reputation, node_id=10, b=np.full(2, 1e300))


def test_an_early_update_is_limited_later_and_every_update_once():
    reputation = Reputation(Validation(examples_cap=1.5, norm_cap=2.0))
    huge = {"w": np.full((2, 3), 1e6, np.float32)}
    first = admit(reputation, 10**9, 0, **huge)
    assert (first.limited, first.examples) == (False, 1e9)
    for node in range(1, 4):
        assert not admit(reputation, 10, node).limited
    assert admit(reputation, 10, 4).limited
    for _ in range(2):
        reputation.limit_early(first)
        assert (first.limited, first.examples) == (True, 15.0)
        assert norm_of(first.delta) == pytest.approx(2 * np.sqrt(6.0), rel=1e-6)
        # The median is lower now, but a cap is applied once.
        for node in range(5, 20):
            admit(reputation, 1, node, w=np.full((2, 3), 0.1, np.float32))
    assert (reputation.counts["capped"], reputation.counts["clipped"]) == (1, 1)


def test_early_updates_of_one_or_two_nodes_are_not_limited():
    reputation = Reputation(Validation(examples_cap=1.5))
    updates = [admit(reputation, examples, node) for node, examples in enumerate((10, 10**9))]
    for update in updates:
        reputation.limit_early(update)
    assert [update.examples for update in updates] == [10.0, 1e9]


def test_an_answer_to_another_nodes_job_is_rejected():
    reputation = Reputation(Validation())
    with pytest.raises(RejectionError, match="node 8 answers a job that node 7 received"):
        reputation.open(reply(good(), 8), job(7), Versions(BASE))
    with pytest.raises(RejectionError, match="node 8"):
        reputation.measurements(reply(good(), 8), node_id=7)


def test_evaluations_are_capped_by_themselves():
    reputation = Reputation(Validation(examples_cap=1.5))
    for node in range(5):
        reputation.measurements(reply(good(2), node), node_id=node)
    assert reputation.measurements(reply(good(10**9), 9), node_id=9)[0] == 3.0


def test_a_node_that_keeps_failing_is_rested_for_longer_and_longer_until_it_answers_well(caplog):
    reputation = Reputation(Validation(strikes=2, rest_s=10.0, most_rest_s=25.0))
    problem = RejectionError("shape", "wrong shape")
    with caplog.at_level(logging.INFO):
        reputation.reject(7, problem, 0.0)
        assert 7 not in reputation.resting(0.0)
        reputation.reject(7, problem, 1.0)
    assert "node 7" in caplog.text
    assert "wrong shape" in caplog.text
    assert 7 in reputation.resting(10.9)
    assert 7 not in reputation.resting(11.0)
    assert 8 not in reputation.resting(5.0)
    assert reputation.next_return(5.0) == 11.0
    assert reputation.next_return(11.0) == inf
    for now, end in ((20.0, 40.0), (50.0, 75.0), (80.0, 105.0)):
        reputation.reject(7, problem, now)
        assert reputation.next_return(now) == end
    admit(reputation, node_id=7)
    reputation.reject(7, problem, 200.0)
    assert 7 not in reputation.resting(200.0)
    assert reputation.counts["rejected: shape"] == 6
    reputation.reject(7, ProtocolError("?"), 200.0)
    reputation.ignore("duplicate")
    assert reputation.counts["rejected: other"] == reputation.counts["rejected: duplicate"] == 1


def test_a_reputation_goes_on_from_its_state():
    reputation = Reputation(Validation(examples_cap=1.5, norm_cap=2.0, strikes=1))
    for node in range(6):
        admit(reputation, node_id=node)
    reputation.reject(9, RejectionError("shape", "?"), 5.0)
    again = Reputation(reputation.validation)
    counts = again.counts
    again.load_state_dict(reputation.state_dict())
    assert again.state_dict() == reputation.state_dict()
    # `StaleStrategy.rejections` is this object.
    assert counts is again.counts
    assert counts["rejected: shape"] == 1
    assert 9 in again.resting(6.0)
    assert admit(again, 10**9, 8).examples == 15.0
