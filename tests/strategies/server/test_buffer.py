"""The buffer: what waits in it, and how a running mean and a robust rule reduce its updates."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packed_updates import packed
from replies import BASE, good, job, open_buffer, reply

from fedstale.errors import ProtocolError
from fedstale.strategies import StaleStrategy, Validation
from fedstale.strategies.robust import Median, TrimmedMean, heaviest
from fedstale.strategies.server.buffer import Buffer, RobustMean, RunningMean, capped
from fedstale.strategies.server.checkpoint import unpacked
from fedstale.strategies.server.checks import Checks
from fedstale.strategies.server.versions import Snapshot, Versions
from fedstale.strategies.types import norm_of
from fedstale.strategies.weighting import ByAge, ClientUpdate, polynomial

LIKE = Snapshot({"w": np.zeros(3, np.float32)}, {"n": np.array(4)}, ("w", "n"))


def update(row, k=0, *, weight=np.nan, staleness=0, **about):
    """The k-th update of a buffer; as limited as it would be without caps."""
    about = {"node_id": k, "counts": {"n": np.array(2.0 + k)}, "limited": True} | about
    return ClientUpdate(
        delta={"w": np.asarray(row, np.float32) * np.ones(3, np.float32)},
        base=LIKE.floats,
        current=LIKE.floats,
        staleness=staleness,
        message_id=f"m{k}",
        weight=weight,
        **about,
    )


def put(reducer, rows, weights=None, examples=None, nodes=None, **metrics):
    """Add weighed updates."""
    for k, row in enumerate(rows):
        weight = 1.0 if weights is None else weights[k]
        reducer.add(
            update(
                np.float32(weight) * np.asarray(row, np.float32),
                k,
                weight=weight,
                node_id=nodes[k] if nodes else k,
                examples=1.0 if examples is None else examples[k],
                metrics={key: values[k] for key, values in metrics.items()},
            )
        )
    return reducer


def admitted(buffer, node, examples, **arrays):
    """Add the update in a reply, limited as in a run; return it."""
    message = reply(good(examples, **arrays), node)
    one = buffer.checks.open(message, job(node, job_id=node), buffer.versions)
    buffer.add(one)
    return one


def n_held(buffer):
    """Number of updates whose arrays are still in memory."""
    return sum(bool(one.delta) for one in buffer.updates)


# The mean, and the caps.


def test_a_mean_keeps_no_update_and_divides_as_it_is_told():
    rows, weights, examples = [[1.0] * 3, [4.0] * 3], [1.0, 0.5], [10.0, 30.0]
    for normalise, expected in (
        ("examples", (10.0 * 1.0 + 30.0 * 2.0) / 40.0),
        ("buffer_size", (1.0 + 2.0) / 2.0),
        ("weights", (1.0 + 2.0) / 1.5),
    ):
        reducer = RunningMean(normalise)
        for k, row in enumerate(rows):
            one = update(weights[k] * np.array(row), k, weight=weights[k], examples=examples[k])
            reducer.add(one)
            assert not one.delta
            assert not one.counts
        np.testing.assert_allclose(reducer.result()[0]["w"], expected, rtol=1e-6)


def test_integer_arrays_are_averaged_where_a_model_has_no_others():
    reducer = RunningMean("buffer_size")
    for k in range(3):
        one = update(0.0, k, weight=1.0)
        one.delta = {}
        reducer.add(one)
    assert reducer.result() == ({}, {"n": 3.0})


@pytest.mark.parametrize("normalise", ["examples", "buffer_size", "weights"])
@pytest.mark.parametrize("n", [1, 2, 4, 9, 40])
@pytest.mark.usefixtures("_identity")
def test_where_nothing_is_capped_a_step_is_the_uncapped_one_to_the_last_bit(n, normalise):
    found = []
    for cap in (None, 1.5):
        buffer = open_buffer(BASE, normalise=normalise, validation=Validation(examples_cap=cap))
        for k in range(n):
            w, b = np.full((2, 3), 0.1 * k, np.float32), np.full(2, -0.3 * k)
            admitted(buffer, k, 10 + k % 3, w=w, b=b)
        found.append((buffer.step(), buffer.metrics(), [one.message_id for one in buffer.updates]))
    (plain, *others), (limited, *same) = found
    for name in plain.names:
        one, two = plain.floats | plain.counts, limited.floats | limited.counts
        assert one[name].tobytes() == two[name].tobytes()
    assert others == same


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("n", [3, 4, 5, 8])
@pytest.mark.usefixtures("_identity")
def test_an_over_reporting_client_in_the_first_buffer_is_capped_whenever_it_comes(n, first):
    numbers = [10] * (n - 1)
    numbers.insert(0 if first else n - 1, 10**9)
    buffer = open_buffer(BASE, validation=Validation(examples_cap=1.5))
    for node, examples in enumerate(numbers):
        moved = np.full((2, 3), float(examples > 10), np.float32)
        admitted(buffer, node, examples, w=moved)
    expected = 15.0 / (10.0 * (n - 1) + 15.0)
    np.testing.assert_allclose(buffer.step().floats["w"], expected, rtol=1e-6)


@pytest.mark.parametrize("huge", [0, 2, 4])
@pytest.mark.parametrize("n", [3, 5, 8])
@pytest.mark.usefixtures("_identity")
def test_a_huge_update_in_the_first_buffer_of_a_run_is_clipped_whenever_it_comes(n, huge):
    buffer = open_buffer(BASE, normalise="buffer_size", validation=Validation(norm_cap=2.0))
    for node in range(n):
        admitted(
            buffer, node, 10, **({"w": np.full((2, 3), 1e6, np.float32)} if node == huge else {})
        )
    floats = buffer.step().floats
    moved = {name: floats[name] - BASE.floats[name] for name in floats}
    typical = np.sqrt(6.0)
    assert norm_of(moved) <= typical * (n - 1 + 2.0) / n * (1 + 1e-6)


@pytest.mark.usefixtures("_identity")
def test_few_nodes_that_answer_often_do_not_fill_the_memory():
    buffer = open_buffer(BASE, normalise="buffer_size", validation=Validation(examples_cap=1.5))
    for _ in range(100):
        for node in range(2):
            admitted(buffer, node, 1 + node)
            assert n_held(buffer) < 20


@pytest.mark.usefixtures("_identity")
def test_no_update_is_kept_once_the_caps_hold():
    buffer = open_buffer(BASE, validation=Validation(examples_cap=1.5))
    for node in range(30):
        one = admitted(buffer, node, 10)
        assert n_held(buffer) == (node + 1 if node < 4 else 0)
    assert not one.base
    assert len(buffer.updates) == 30


# Robust rules.


@pytest.mark.parametrize("normalise", ["examples", "buffer_size", "weights"])
def test_a_rule_without_adversaries_is_the_running_mean(normalise):
    rows = np.random.default_rng(0).normal(size=(5, 3))
    weights, examples = [1.0, 0.5, 0.7, 1.0, 0.6], [10.0, 12.0, 11.0, 9.0, 10.0]
    plain, _ = put(RunningMean(normalise), rows, weights, examples).result()
    robust = put(RobustMean(LIKE, normalise, rule=TrimmedMean(f=0)), rows, weights, examples)
    found, _ = robust.result()
    np.testing.assert_allclose(found["w"], plain["w"], rtol=1e-6)
    assert found["w"].dtype == np.float32


def test_one_node_counts_once_however_often_it_answers():
    rows = [[0.0] * 3, [1.0] * 3, [2.0] * 3, [90.0] * 3, [100.0] * 3, [110.0] * 3]
    reducer = RobustMean(LIKE, "buffer_size", rule=Median(f=1))
    found, counts = put(reducer, rows, nodes=[1, 2, 3, 4, 4, 4]).result()
    np.testing.assert_allclose(found["w"], 1.5)
    # 2, 3, 4, and the mean of 5, 6 and 7.
    assert counts["n"] == 3.5


def test_several_updates_of_one_node_are_averaged_by_their_weights():
    reducer = RobustMean(LIKE, "examples", rule=Median(f=0))
    rows, examples = [[1.0] * 3, [4.0] * 3, [7.0] * 3], [1.0, 2.0, 3.0]
    found, counts = put(reducer, rows, examples=examples, nodes=[4, 4, 4]).result()
    np.testing.assert_allclose(found["w"], (1.0 + 8.0 + 21.0) / 6.0)
    np.testing.assert_allclose(counts["n"], (2.0 + 6.0 + 12.0) / 6.0)


def test_a_claim_of_a_thousand_million_examples_is_capped():
    rows, examples = [[0.0] * 3] * 4 + [[1.0] * 3], [10.0, 10.0, 10.0, 10.0, 1e9]
    reducer = RobustMean(LIKE, "examples", rule=TrimmedMean(f=0))
    found, _ = put(reducer, rows, examples=examples).result()
    np.testing.assert_allclose(found["w"], 1.5 / 5.5, rtol=1e-6)


def test_metrics_are_medians_so_a_lie_about_a_loss_goes_nowhere():
    reducer = RobustMean(LIKE, "examples", rule=Median(f=1))
    put(reducer, [[0.0] * 3] * 3, train_loss=[0.5, 0.7, 1e30], other=[1.0, np.nan, np.inf])
    assert reducer.metrics() == {"train_loss": 0.7, "other": 1.0}


def test_a_buffer_that_is_too_small_says_what_it_needs():
    reducer = put(RobustMean(LIKE, "buffer_size", rule=TrimmedMean(f=2)), [[1.0] * 3] * 4)
    with pytest.raises(
        ProtocolError, match=r"4 finite updates: TrimmedMean\(f=2\) needs at least 5"
    ):
        reducer.result()


@pytest.mark.parametrize("n", [0, 3])
def test_a_buffer_in_which_every_weight_is_nothing_does_not_move(n):
    reducer = RobustMean(LIKE, "weights", rule=Median(f=1))
    found, counts = put(reducer, [[1.0] * 3] * n, weights=[0.0] * n).result()
    np.testing.assert_array_equal(found["w"], 0.0)
    assert counts["n"] == 0.0


def test_weights_of_staleness_weigh_but_do_not_shrink_where_they_normalise():
    rows, weights = [[1.0] * 3, [2.0] * 3, [3.0] * 3], [1.0, 0.5, 0.25]
    reducer = put(RobustMean(LIKE, "weights", rule=Median(f=1)), rows, weights=weights)
    np.testing.assert_allclose(reducer.result()[0]["w"], 2.0, rtol=1e-6)


# Weightings of whole buffers.


class Together(ByAge):
    """Weighs stale updates when the buffer closes, and keeps what it compared them with."""

    needs_whole_buffer = True

    def weigh_stale(self, stale, current_mean):
        self.current_mean = current_mean
        return [self.weigh(one) for one in stale]


def test_a_weighting_of_whole_buffers_compares_with_a_median_under_a_rule():
    weighting = Together(polynomial(1.0))
    buffer = open_buffer(LIKE, normalise="buffer_size", robust=Median(f=1), weighting=weighting)
    for k, (row, age) in enumerate([(8.0, 1), (1.0, 0), (2.0, 0), (99.0, 0)]):
        buffer.add(update(row, k, staleness=age))
    assert n_held(buffer) == 4
    found = buffer.step()
    np.testing.assert_array_equal(weighting.current_mean["w"], 2.0)
    # The stale one was summed last.
    assert [one.weight for one in buffer.updates] == [1.0, 1.0, 1.0, 0.5]
    assert [one.node_id for one in buffer.updates] == [1, 2, 3, 0]
    np.testing.assert_allclose(found.floats["w"], 3.0)


@pytest.mark.parametrize("rule", [None, Median(f=0)])
def test_a_weighting_of_whole_buffers_sees_an_empty_mean_without_current_updates(rule):
    weighting = Together(polynomial(1.0))
    buffer = open_buffer(LIKE, normalise="buffer_size", robust=rule, weighting=weighting)
    buffer.add(update(8.0, staleness=1))
    np.testing.assert_allclose(buffer.step().floats["w"], 4.0)
    assert weighting.current_mean == {}


# Whole models, failures, and checkpoints.


def test_a_whole_model_is_taken_against_the_current_version():
    versions = Versions(LIKE)
    buffer = open_buffer(versions, update="model", normalise="buffer_size")
    one = update(5.0, staleness=2)
    one.current = {"w": np.full(3, 3.0, np.float32)}
    buffer.add(one)
    # The client's model is 0 + 5, which is 2 from the current one.
    np.testing.assert_array_equal(buffer.step().floats["w"], 2.0)


def test_a_step_out_of_the_finite_range_is_discarded_and_the_optimizer_starts_anew():
    buffer = open_buffer(LIKE, normalise="buffer_size")
    buffer.add(update(np.inf))
    with pytest.raises(ProtocolError, match="its server step left the finite range"):
        buffer.step()
    buffer.open()
    buffer.add(update(1.0))
    np.testing.assert_array_equal(buffer.step().floats["w"], 1.0)


def reopened(buffer, strategy):
    """A buffer that goes on from the bytes of a checkpoint."""
    checks = Checks(strategy.validation)
    checks.load_state_dict(buffer.checks.state_dict())
    parts = strategy.weighting, strategy.server_optimizer
    again = Buffer(strategy, *parts, versions=buffer.versions, checks=checks)
    again.load_state_dict(unpacked(packed(buffer.state_dict())))
    return again


def same(one, other):
    found = [buffer.step() for buffer in (one, other)]
    np.testing.assert_equal(found[0].floats, found[1].floats)
    np.testing.assert_equal(found[0].counts, found[1].counts)
    assert one.metrics() == other.metrics()
    facts = [
        [(u.message_id, u.node_id, u.staleness, u.weight, u.examples) for u in buffer.updates]
        for buffer in (one, other)
    ]
    np.testing.assert_equal(*facts)


@pytest.mark.parametrize("n", [0, 1, 3, 6])
@pytest.mark.parametrize("robust", [None, TrimmedMean(f=0)], ids=["mean", "robust"])
@pytest.mark.usefixtures("_identity")
def test_a_buffer_goes_on_from_its_state_with_early_updates_in_it(n, robust):
    strategy = StaleStrategy(robust=robust, validation=Validation(norm_cap=2.0))
    buffer = Buffer(
        strategy,
        strategy.weighting,
        strategy.server_optimizer,
        versions=Versions(BASE),
        checks=Checks(strategy.validation),
    )
    for node, examples in enumerate([10, 10**9, 10, 12, 11, 10][:n]):
        admitted(buffer, node, examples, w=np.full((2, 3), float(node), np.float32))
    again = reopened(buffer, strategy)
    assert len(again.updates) == n
    assert n_held(again) == n_held(buffer)
    for each in (buffer, again):
        admitted(each, 9, 10)
    same(buffer, again)


@pytest.mark.parametrize("normalise", ["buffer_size", "weights"])
@pytest.mark.parametrize("robust", [None, TrimmedMean(f=1)], ids=["mean", "robust"])
@pytest.mark.parametrize("make", [ByAge, Together])
def test_a_buffer_goes_on_from_its_state_with_stale_updates_in_it(robust, make, normalise):
    strategy = StaleStrategy(robust=robust, weighting=make(polynomial(1.0)), normalise=normalise)
    buffer = Buffer(
        strategy,
        strategy.weighting,
        strategy.server_optimizer,
        versions=Versions(LIKE),
        checks=Checks(strategy.validation),
    )
    rows = np.random.default_rng(4).normal(size=(6, 3))
    for k in range(4):
        buffer.add(update(rows[k], k, staleness=k % 3, metrics={"loss": 1.0}))
    again = reopened(buffer, strategy)
    assert again.metrics() == buffer.metrics()
    for each in (buffer, again):
        for k in (4, 5):
            each.add(update(rows[k], k, staleness=k % 3))
    same(buffer, again)


def test_an_update_that_weighs_nothing_counts_for_nothing_after_a_checkpoint_too():
    only_fresh = ByAge(lambda age: float(age < 2))
    rule = TrimmedMean(f=1)
    buffer = open_buffer(LIKE, robust=rule, weighting=only_fresh, normalise="weights")
    for k, row in enumerate([1.0, 2.0, 4.0, 9.0]):
        buffer.add(update(row, k, staleness=k, metrics={"loss": row}))
    again = reopened(buffer, buffer.strategy)
    assert again.metrics() == buffer.metrics() == {"loss": 1.5}
    for each in (buffer, again):
        each.add(update(3.0, 5))
    same(buffer, again)


@given(
    st.lists(st.floats(1e-3, 1e9), min_size=3, max_size=15),
    st.floats(1.0, 3.0),
    st.data(),
)
def test_capped_weights_leave_adversaries_less_than_half(weights, cap, data):
    given_weights = np.array(weights)
    f = data.draw(st.integers(0, (len(weights) - 1) // 2))
    found = capped(given_weights, f, cap)
    assert (found > 0).all()
    assert (found <= given_weights).all()
    assert found.max() <= cap * np.median(given_weights)
    assert 2 * heaviest(found, f) < found.sum()
    # Honest weights that are near one another are left as they are.
    if f == 0 and given_weights.max() <= cap * np.median(given_weights):
        np.testing.assert_array_equal(found, given_weights)
