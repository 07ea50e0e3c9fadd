"""What a run knows of its clients: caps by running medians, rejections by kind, and rests."""

import logging
from math import inf

import numpy as np
import pytest
from replies import BASE, good, job, reply
from virtual_grid import content, record

from fedstale.errors import ConfigError, ProtocolError
from fedstale.strategies.server.checks import FEW, Checks, NodeMedian, Validation
from fedstale.strategies.server.versions import Versions
from fedstale.strategies.types import RejectionError, norm_of

pytestmark = pytest.mark.usefixtures("_identity")


def admit(checks, examples=10, node_id=7, **arrays):
    message = reply(good(examples, **arrays), node_id)
    return checks.open(message, job(node_id), Versions(BASE))


def test_a_limit_is_a_multiple_of_the_median_over_nodes_with_one_voice_each():
    heard = NodeMedian(window=4, enough=3)
    for node, value in enumerate([10.0, 20.0]):
        heard.hear(node, value)
    assert not heard.holds
    assert heard.times(1.5) == inf
    assert heard.times(2.0, few=2) == 30.0
    for _ in range(50):
        heard.hear(2, 1e9)
    assert heard.holds
    assert heard.times(1.5) == 30.0
    assert heard.times(None) == inf
    for node in range(3, 6):
        heard.hear(node, 40.0)
    # The window holds nodes 2 to 5.
    assert heard.times(1.5) == 60.0


def test_where_most_updates_are_nothing_no_other_is_beyond_a_limit():
    heard = NodeMedian(window=4, enough=3)
    for node in range(3):
        heard.hear(node, 0.0)
    assert heard.times(1.5) == inf


def test_a_claim_counts_for_at_most_one_and_a_half_times_the_median(caplog):
    checks = Checks(Validation(examples_cap=1.5))
    for node in range(5):
        admit(checks, 10 + node, node)
    with caplog.at_level(logging.WARNING):
        assert admit(checks, 10**9, 9).examples == 1.5 * 12.5
        assert admit(checks, 10**9, 10).examples == 1.5 * 13.0
    assert checks.counts["capped"] == 2
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "examples_cap" in caplog.text
    assert admit(Checks(Validation()), 10**9).examples == 1e9


def test_an_update_is_clipped_to_the_running_median_of_norms():
    checks = Checks(Validation(norm_cap=2.0))
    for node in range(5):
        admit(checks, node_id=node)
    typical = np.sqrt(6.0)
    found = admit(checks, node_id=9, w=np.full((2, 3), 1e6, np.float32))
    assert norm_of(found.delta) == pytest.approx(2 * typical, rel=1e-6)
    assert checks.counts["clipped"] == 1
    with pytest.raises(RejectionError, match="norm"):
        admit(checks, node_id=10, b=np.full(2, 1e300))


def test_an_early_update_is_limited_later_and_every_update_once():
    checks = Checks(Validation(examples_cap=1.5, norm_cap=2.0))
    huge = {"w": np.full((2, 3), 1e6, np.float32)}
    first = admit(checks, 10**9, 0, **huge)
    assert (first.limited, first.examples) == (False, 1e9)
    for node in range(1, 4):
        assert not admit(checks, 10, node).limited
    assert admit(checks, 10, 4).limited
    for _ in range(2):
        checks.limit(first, few=FEW)
        assert (first.limited, first.examples) == (True, 15.0)
        assert norm_of(first.delta) == pytest.approx(2 * np.sqrt(6.0), rel=1e-6)
        # The median is lower now, but a cap is applied once.
        for node in range(5, 20):
            admit(checks, 1, node, w=np.full((2, 3), 0.1, np.float32))
    assert (checks.counts["capped"], checks.counts["clipped"]) == (1, 1)


def test_a_loss_is_what_a_client_states_or_the_norm_of_its_update_as_far_as_it_counts():
    def answer(checks, **arrays):
        update = admit(checks, node_id=9, **arrays)
        update.metrics = {"train_loss": 7.0, "square_loss": 50.0}
        return update

    believing = Checks(Validation())
    assert believing.losses(answer(believing)) == (7.0, 50.0)
    assert np.isnan(believing.losses(admit(believing))).tolist() == [False, True]
    named = Checks(Validation(loss_key="square_loss", square_loss_key="train_loss"))
    assert named.losses(answer(named)) == (50.0, 7.0)
    checks = Checks(Validation(loss_from="norm", norm_cap=2.0))
    large = {"w": np.full((2, 3), 30.0, np.float32)}
    loss, square = checks.losses(answer(checks, **large))
    assert loss == pytest.approx(30.0 * np.sqrt(6.0))
    assert np.isnan(square)
    for node in range(5):
        admit(checks, node_id=node)
    # An update that is scaled down counts for what is left of it.
    again = answer(checks, **large)
    assert checks.losses(again)[0] == pytest.approx(2.0 * np.sqrt(6.0))
    assert checks.losses(again)[0] == pytest.approx(norm_of(again.delta), rel=1e-6)


@pytest.mark.parametrize("value", ["", "Norm", None, "claimed"])
def test_where_losses_come_from_is_one_of_two_words(value):
    with pytest.raises(ConfigError, match=r"Validation.loss_from = .*: expected stated\|norm"):
        Validation(loss_from=value)


def test_early_updates_of_one_or_two_nodes_are_not_limited():
    checks = Checks(Validation(examples_cap=1.5))
    updates = [admit(checks, examples, node) for node, examples in enumerate((10, 10**9))]
    for update in updates:
        checks.limit(update, few=FEW)
    assert [update.examples for update in updates] == [10.0, 1e9]


@pytest.mark.parametrize("value", [np.finfo(np.float32).max, 1e30, 1e16])
def test_an_update_that_could_leave_the_finite_range_is_rejected_from_the_first_reply_on(value):
    with pytest.raises(RejectionError, match="norm"):
        admit(Checks(Validation(norm_bound=None)), w=np.full((2, 3), value, np.float32))


def test_an_update_far_beyond_the_others_is_rejected_and_its_node_named(caplog):
    checks = Checks(Validation())
    for node in range(5):
        admit(checks, node_id=node)
    far = {"w": np.full((2, 3), 101.0, np.float32)}
    with pytest.raises(
        RejectionError, match=r"update is 247: at most 245, 100 times the largest median"
    ):
        admit(checks, node_id=9, **far)
    assert admit(checks, node_id=9, w=np.full((2, 3), 99.0, np.float32)).limited
    assert admit(Checks(Validation(norm_bound=None)), node_id=9, **far).limited


def test_late_in_training_a_large_update_among_small_ones_is_no_larger_than_early_ones_were():
    checks = Checks(Validation())
    for step in range(60):
        small = np.full((2, 3), 0.8**step, np.float32)
        for node in range(10):
            admit(checks, node_id=node, w=small)
    # A millionfold of what the others send by now.
    assert admit(checks, node_id=999, w=np.full((2, 3), 1.5, np.float32)).limited
    with pytest.raises(RejectionError, match="norm"):
        admit(checks, node_id=999, w=np.full((2, 3), 101.0, np.float32))


def test_updates_of_all_nodes_may_grow_and_less_than_half_of_them_cannot_raise_the_bound():
    for n_growing, is_raised in ((10, True), (4, False)):
        checks = Checks(Validation())
        rejected = 0
        for step in range(28):
            for node in range(10):
                grown = 2.0**step if node < n_growing else 1.0
                # Those that grow answer four times as often.
                for _ in range(4 if node < n_growing else 1):
                    try:
                        admit(checks, node_id=node, w=np.full((2, 3), grown, np.float32))
                    except RejectionError:
                        rejected += 1
        assert (checks.norms.times(100.0, ever=True) > 1e6) == is_raised
        assert bool(rejected) != is_raised


def test_an_early_update_far_beyond_the_others_is_rejected_later():
    checks = Checks(Validation())
    far = admit(checks, node_id=0, w=np.full((2, 3), 1e6, np.float32))
    assert not far.limited
    for node in range(1, 5):
        near = admit(checks, node_id=node)
    with pytest.raises(RejectionError, match="norm"):
        checks.limit(far, few=FEW)
    checks.limit(near, few=FEW)
    assert near.limited


def test_an_answer_to_another_nodes_job_is_rejected():
    checks = Checks(Validation())
    with pytest.raises(RejectionError, match="node 8 answers a job that node 7 received"):
        checks.open(reply(good(), 8), job(7), Versions(BASE))
    with pytest.raises(RejectionError, match="node 8"):
        checks.measurements(reply(good(), 8), node_id=7)


def test_evaluations_are_capped_by_themselves():
    checks = Checks(Validation(examples_cap=1.5))
    for node in range(5):
        checks.measurements(reply(good(2), node), node_id=node)
    assert checks.measurements(reply(good(10**9), 9), node_id=9)[0] == 3.0


def test_a_node_that_keeps_failing_is_rested_for_longer_and_longer_until_it_answers_well(caplog):
    checks = Checks(Validation(strikes=2, rest_s=10.0, most_rest_s=25.0))
    problem = RejectionError("shape", "wrong shape")
    with caplog.at_level(logging.INFO):
        checks.reject(7, problem, 0.0)
        assert 7 not in checks.resting(0.0)
        checks.reject(7, problem, 1.0)
    assert "node 7" in caplog.text
    assert "wrong shape" in caplog.text
    assert 7 in checks.resting(10.9)
    assert 7 not in checks.resting(11.0)
    assert 8 not in checks.resting(5.0)
    assert checks.next_return(5.0) == 11.0
    assert checks.next_return(11.0) == inf
    for now, end in ((20.0, 40.0), (50.0, 75.0), (80.0, 105.0)):
        checks.reject(7, problem, now)
        assert checks.next_return(now) == end
    admit(checks, node_id=7)
    checks.reject(7, problem, 200.0)
    assert 7 not in checks.resting(200.0)
    assert checks.counts["rejected: shape"] == 6
    checks.reject(7, ProtocolError("?"), 200.0)
    checks.ignore("duplicate")
    assert checks.counts["rejected: other"] == checks.counts["rejected: duplicate"] == 1


def stating(checks, node_id, names):
    """The metrics that are kept of an evaluation."""
    body = content(record(w=np.zeros(1)), 3, **dict.fromkeys(names, 0.5))
    return checks.measurements(reply(body, node_id), node_id=node_id)[1]


def test_a_run_keeps_so_many_names_of_metrics_and_one_node_a_quarter_of_what_is_left(caplog):
    checks = Checks(Validation(most_names=100))
    with caplog.at_level(logging.WARNING):
        for k in range(50):
            kept = stating(checks, 2**63 + 5, [f"a{k}.{i}" for i in range(200)] + ["train_loss"])
            assert kept == dict.fromkeys([*kept, "train_loss"], 0.5)
            assert len(kept) == (25 if k == 0 else 0) + 1
    (warning,) = caplog.messages
    assert warning.startswith(
        "node 9223372036854775813: number of its metrics counts as 26, not 201, by "
        "Validation(most_names=100); "
    )
    # Of what is left there is something for each that comes later, until all are taken.
    for node, n in ((1, 19), (1, 0), (2, 14)):
        assert len(stating(checks, node, [f"b{node}{n}.{i}" for i in range(200)])) == n
    assert stating(checks, 3, ["accuracy"]) == {"accuracy": 0.5}
    for node in range(4, 40):
        stating(checks, node, [f"c{node}.{i}" for i in range(200)])
    assert len(checks.names) == 100
    # The names of losses have places of their own, and known names are everybody's.
    for node in (4, 77):
        known = ["accuracy", "train_loss", "square_loss"]
        assert list(stating(checks, node, [*known, f"d{node}"])) == known
    assert checks.counts["dropped"] == sum(checks.limits["dropped"].values())
    assert checks.limits["dropped"][2**63 + 5] == 50


def test_checks_go_on_from_its_state():
    checks = Checks(Validation(examples_cap=1.5, norm_cap=2.0, strikes=1))
    for node in range(6):
        admit(checks, node_id=node)
    stating(checks, 2**64 - 1, ["accuracy"])
    checks.reject(9, RejectionError("shape", "?"), 5.0)
    again = Checks(checks.validation)
    counts = again.counts
    again.load_state_dict(checks.state_dict())
    assert again.state_dict() == checks.state_dict()
    # `StaleStrategy.rejections` is this object.
    assert counts is again.counts
    assert counts["rejected: shape"] == 1
    assert 9 in again.resting(6.0)
    assert admit(again, 10**9, 8).examples == 15.0
