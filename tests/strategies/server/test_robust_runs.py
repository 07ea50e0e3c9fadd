"""Robust rules and client checks inside a running strategy."""

from dataclasses import replace

import numpy as np
import pytest
from flwr.app import MetricRecord
from virtual_grid import VirtualGrid, adder, content, record

from fedstale.errors import ConfigError, FedstaleError
from fedstale.strategies import FedAvg, StaleStrategy, Validation
from fedstale.strategies.robust import (
    CTMA,
    Bulyan,
    CentredClipping,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    TrimmedMean,
)
from fedstale.strategies.schedule import Schedule, k_async, k_batch_async, semi_synchronous
from fedstale.strategies.weighting import Gap

pytestmark = pytest.mark.usefixtures("_identity")


def start(strategy, nodes, rounds=1, **options):
    grid = nodes if isinstance(nodes, VirtualGrid) else VirtualGrid(nodes)
    return strategy.start(grid, record(w=np.zeros(2)), num_rounds=rounds, **options), grid


def w(result):
    return result.arrays["w"].numpy()


RULES = [Median, TrimmedMean, GeometricMedian, Krum, MultiKrum, Bulyan, CentredClipping, CTMA]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(),
        k_async(9, 7),
        replace(k_batch_async(9, 7), distinct=True),
        semi_synchronous(9, 20.0),
    ],
    ids=["FedAvg", "K-async", "K-batch-async", "semi-synchronous"],
)
@pytest.mark.parametrize("weighting", [None, Gap()], ids=repr)
def test_every_rule_composes_with_every_schedule_and_weighting(rule, schedule, weighting):
    honest = {k: adder(1.0 + 0.01 * k, delay=1.0 + k, examples=3) for k in range(8)}
    nodes = honest | {8: adder(-1e6, delay=0.5, examples=10**9)}
    strategy = StaleStrategy(schedule=schedule, weighting=weighting, robust=rule(f=1))
    result, grid = start(strategy, nodes, 5)
    assert ((w(result) > 2.0) & (w(result) < 5.6)).all()
    assert len({facts["version"] for _, facts in grid.merged}) == 5


def test_the_mean_is_taken_far_away_by_the_same_adversary():
    nodes = {k: adder(1.0, examples=3) for k in range(8)} | {8: adder(-1e6, examples=3)}
    result, _ = start(FedAvg(validation=Validation(norm_bound=None)), nodes, 1)
    assert (w(result) < -1e5).all()


@pytest.mark.parametrize("delay", [0.5, 9.0])
def test_a_claim_of_a_thousand_million_examples_counts_for_one_and_a_half(delay):
    nodes = {k: adder(0.0, examples=10) for k in range(9)}
    nodes[9] = adder(1.0, delay=delay, examples=10**9)
    strategy = FedAvg(validation=Validation(examples_cap=1.5))
    result, _ = start(strategy, nodes, 1)
    np.testing.assert_allclose(w(result), 15.0 / 105.0)
    plain, _ = start(FedAvg(), nodes, 1)
    np.testing.assert_allclose(w(plain), 1.0, atol=1e-6)


def test_duplicates_and_replays_are_dropped_and_counted():
    grid = VirtualGrid({k: adder(1.0) for k in range(3)})
    pull, seen = grid.pull_messages, []

    def twice(ids):
        found = pull(ids)
        seen.extend(found)
        return [*found, *found, *seen]

    grid.pull_messages = twice
    strategy = FedAvg()
    result, _ = start(strategy, grid, 2)
    np.testing.assert_array_equal(w(result), 2.0)
    assert len(grid.merged) == 6
    assert strategy.rejections["rejected: duplicate or unknown"] > 6


def test_a_node_that_keeps_failing_is_rested_and_the_others_go_on():
    def broken(message, grid):
        return 1.0, content(record(w=np.array([np.nan, 0.0])))

    nodes = {k: adder(1.0) for k in range(3)} | {3: broken}
    strategy = FedAvg(validation=Validation(strikes=2, rest_s=5.0))
    result, grid = start(strategy, nodes, 20)
    np.testing.assert_allclose(w(result), 20.0)
    asked = [t for t, m in grid.sent if m.metadata.dst_node_id == 3]
    # Twice, then after rests of 5, 10 and no further one within 20 s.
    assert len(asked) <= 5
    assert strategy.rejections["rejected: finite"] == len(asked)


def test_a_lone_node_at_rest_is_asked_again():
    tries = []

    def late(message, grid):
        tries.append(grid.time)
        good = len(tries) > 4
        return 1.0, content(record(w=np.full(2, 1.0 if good else np.nan)))

    result, _ = start(FedAvg(validation=Validation(strikes=1, rest_s=100.0)), {1: late}, 1)
    np.testing.assert_array_equal(w(result), 1.0)
    assert np.diff(tries).min() >= 101.0


def test_a_buffer_size_below_what_a_rule_needs_is_an_error_before_the_run():
    with pytest.raises(ConfigError, match=r"buffer_size = 4: expected at least 5"):
        StaleStrategy(schedule=Schedule(concurrency=4, buffer_size=4), robust=Median(f=2))


def test_a_deadline_with_too_few_waits_for_more():
    nodes = {k: adder(1.0, delay=2.0 + 4.0 * k) for k in range(3)}
    result, grid = start(
        StaleStrategy(schedule=semi_synchronous(3, 4.0), robust=Median(f=1)), nodes, 1
    )
    np.testing.assert_array_equal(w(result), 1.0)
    assert grid.time == 10.0


def test_a_fleet_that_is_too_small_for_a_rule_ends_with_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr("fedstale.strategies.server.buffer._DISCARDS_IN_A_ROW", 5)
    with pytest.raises(FedstaleError, match=r"Median\(f=2\) needs at least 5"):
        start(StaleStrategy(robust=Median(f=2)), {k: adder(1.0) for k in range(3)}, 1)


def test_metrics_of_a_robust_step_are_medians():
    nodes = {k: adder(1.0, loss=1.0 + k) for k in range(4)} | {4: adder(1.0, loss=1e30)}
    result, _ = start(
        FedAvg(robust=Median(f=1)), nodes, 1, evaluate_fn=lambda v, _: MetricRecord({"v": v})
    )
    assert dict(result.train_metrics_clientapp[1]) == {"loss": 3.0}
