"""A merge that keeps its updates: what it agrees with, and what it makes of nodes and weights."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstale.errors import ConfigError, ProtocolError
from fedstale.strategies.robust.base import Median, TrimmedMean, heaviest
from fedstale.strategies.server.merge import Merge, Merged
from fedstale.strategies.server.robust_merge import RobustMerge, capped
from fedstale.strategies.server.versions import Snapshot
from fedstale.strategies.weighting.base import ByAge, Update, inverse

LIKE = Snapshot({"w": np.zeros(3, np.float32)}, {"n": np.array(4)}, ("w", "n"))


def put(merge, rows, weights=None, examples=None, nodes=None, **metrics):
    for k, row in enumerate(rows):
        weight = 1.0 if weights is None else weights[k]
        job = Merged(f"m{k}", nodes[k] if nodes else k, 0, weight)
        merge.add(
            job,
            {"w": np.float32(weight) * np.asarray(row, np.float32)},
            {"n": np.array(2.0 + k)},
            examples=1.0 if examples is None else examples[k],
            metrics={key: values[k] for key, values in metrics.items()},
        )
    return merge


@pytest.mark.parametrize("normalise", ["examples", "buffer_size", "weights"])
def test_a_mean_without_adversaries_is_the_mean_of_a_plain_merge(normalise):
    rows = np.random.default_rng(0).normal(size=(5, 3))
    weights, examples = [1.0, 0.5, 0.7, 1.0, 0.6], [10.0, 12.0, 11.0, 9.0, 10.0]
    plain, _ = put(Merge(LIKE, normalise), rows, weights, examples).finish()
    robust = put(RobustMerge(LIKE, normalise, rule=TrimmedMean(f=0)), rows, weights, examples)
    found, _ = robust.finish()
    np.testing.assert_allclose(found["w"], plain["w"], rtol=1e-6)
    assert found["w"].dtype == np.float32


def test_one_node_counts_once_however_often_it_answers():
    rows = [[0.0] * 3, [1.0] * 3, [2.0] * 3, [90.0] * 3, [100.0] * 3, [110.0] * 3]
    merge = put(RobustMerge(LIKE, "buffer_size", rule=Median(f=1)), rows, nodes=[1, 2, 3, 4, 4, 4])
    assert (merge.n_nodes, len(merge.jobs)) == (4, 6)
    found, counts = merge.finish()
    np.testing.assert_allclose(found["w"], 1.5)
    # 2, 3, 4, and the mean of 5, 6 and 7.
    assert counts["n"] == 3.5


def test_a_claim_of_a_thousand_million_examples_is_capped():
    rows, examples = [[0.0] * 3] * 4 + [[1.0] * 3], [10.0, 10.0, 10.0, 10.0, 1e9]
    merge = RobustMerge(LIKE, "examples", rule=TrimmedMean(f=0))
    found, _ = put(merge, rows, examples=examples).finish()
    np.testing.assert_allclose(found["w"], 1.5 / 5.5, rtol=1e-6)


def test_metrics_are_medians_so_a_lie_about_a_loss_goes_nowhere():
    merge = RobustMerge(LIKE, "examples", rule=Median(f=1))
    put(merge, [[0.0] * 3] * 3, train_loss=[0.5, 0.7, 1e30], other=[1.0, np.nan, np.inf])
    assert merge.metrics() == {"train_loss": 0.7, "other": 1.0}


def test_a_merge_that_is_too_small_says_what_it_needs():
    merge = put(RobustMerge(LIKE, "buffer_size", rule=TrimmedMean(f=2)), [[1.0] * 3] * 4)
    with pytest.raises(
        ProtocolError, match=r"4 finite updates: TrimmedMean\(f=2\) needs at least 5"
    ):
        merge.finish()


@pytest.mark.parametrize("jobs", [0, 3])
def test_a_merge_in_which_every_weight_is_nothing_does_not_move(jobs):
    merge = RobustMerge(LIKE, "weights", rule=Median(f=1))
    found, counts = put(merge, [[1.0] * 3] * jobs, weights=[0.0] * jobs).finish()
    np.testing.assert_array_equal(found["w"], 0.0)
    assert counts["n"] == 0.0


def test_weights_of_staleness_weigh_but_do_not_shrink_where_they_normalise():
    rows, weights = [[1.0] * 3, [2.0] * 3, [3.0] * 3], [1.0, 0.5, 0.25]
    merge = put(RobustMerge(LIKE, "weights", rule=Median(f=1)), rows, weights=weights)
    np.testing.assert_allclose(merge.finish()[0]["w"], 2.0, rtol=1e-6)


class Together(ByAge):
    """Weighs late updates when the merge closes, and remembers what it compared them with."""

    together = True

    def weigh_stale(self, updates, fresh):
        self.fresh = fresh
        return [self.weigh(update) for update in updates]


def test_a_weighting_of_whole_merges_compares_with_a_median():
    merge, weighting = RobustMerge(LIKE, "buffer_size", rule=Median(f=1)), Together(inverse())
    for k, (row, age) in enumerate([(1.0, 0), (2.0, 0), (99.0, 0), (8.0, 1)]):
        delta = {"w": np.full(3, row, np.float32)}
        base = LIKE.floats
        update = Update(delta=delta, base=base, current=base, staleness=age, node_id=k)
        merge.take(
            Merged(f"m{k}", k, 0),
            update,
            {"n": np.array(0.0)},
            weighting=weighting,
            examples=1.0,
            metrics={},
        )
    merge.settle(weighting)
    np.testing.assert_array_equal(weighting.fresh["w"], 2.0)
    assert [job.weight for job in merge.jobs] == [1.0, 1.0, 1.0, 0.5]
    np.testing.assert_allclose(merge.finish()[0]["w"], 3.0)


def test_a_merge_goes_on_from_its_state():
    rows = np.random.default_rng(4).normal(size=(6, 3))
    whole = put(RobustMerge(LIKE, "buffer_size", rule=TrimmedMean(f=1)), rows)
    half = put(RobustMerge(LIKE, "buffer_size", rule=TrimmedMean(f=1)), rows[:4], loss=[1.0] * 4)
    again = RobustMerge(LIKE, "buffer_size", rule=TrimmedMean(f=1))
    again.load_state_dict(half.state_dict())
    assert again.jobs == half.jobs
    assert again.metrics() == {"loss": 1.0}
    put(again, rows[4:], nodes=[4, 5])
    np.testing.assert_array_equal(again.finish()[0]["w"], whole.finish()[0]["w"])


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


def test_a_cap_below_one_is_named():
    with pytest.raises(ConfigError, match=r"robust\.weight_cap"):
        RobustMerge(LIKE, "examples", rule=Median(f=1), weight_cap=0.5)
