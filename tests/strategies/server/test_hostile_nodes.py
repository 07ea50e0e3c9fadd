"""One hostile node among honest ones: it is rejected alone, by name, and every step is made."""

import logging

import numpy as np
import pytest
from virtual_grid import ConfigRecord, Error, VirtualGrid, adder, content, record

from fedstale.strategies import (
    CA2FL,
    REFL,
    AsyncFedED,
    FedAdam,
    FedAsync,
    FedAvg,
    FedAvgM,
    FedBuff,
    FedYogi,
    GapAware,
    StaleStrategy,
    Validation,
    robust,
)
from fedstale.strategies.schedule import k_async
from fedstale.strategies.server_optimizer import Adam, Momentum

pytestmark = pytest.mark.usefixtures("_identity")

N_HONEST, HOSTILE = 6, 66
STRATEGIES = {
    "FedAvg": FedAvg,
    "FedAvgM": lambda **o: FedAvgM(server_momentum=0.9, **o),
    "FedAdam": FedAdam,
    "FedYogi": FedYogi,
    "FedBuff": lambda **o: FedBuff(7, 3, **o),
    "FedBuff, momentum": lambda **o: FedBuff(7, 3, server_optimizer=Momentum(0.3), **o),
    "FedBuff, Adam": lambda **o: FedBuff(7, 3, server_optimizer=Adam(), **o),
    "FedBuff, whole models": lambda **o: FedBuff(7, 3, update="model", **o),
    "FedAsync": lambda **o: FedAsync(7, **o),
    "Gap-Aware": lambda **o: GapAware(7, 3, **o),
    "REFL": lambda **o: REFL(7, 3, **o),
    "AsyncFedED": lambda **o: AsyncFedED(7, **o),
    "CA2FL": lambda **o: CA2FL(7, 3, **o),
    "by examples": lambda **o: StaleStrategy(schedule=k_async(7, 3), normalise="examples", **o),
}
RULES = {
    "trimmed mean": lambda **o: StaleStrategy(
        schedule=k_async(7, 5), robust=robust.TrimmedMean(f=1), **o
    ),
    "Krum": lambda **o: StaleStrategy(schedule=k_async(7, 5), robust=robust.Krum(f=1), **o),
}


def hostile(value, *, after, examples=10, as_change=False):
    """A node whose arrays hold one value."""

    def node(message, grid):
        arrays = {name: x.numpy() for name, x in message.content["arrays"].items()}
        sent = {name: np.full_like(x, value) for name, x in arrays.items()}
        body = content(record(**sent), examples, train_loss=0.1)
        if as_change:
            body["fedstale"] = ConfigRecord({"fedstale.update": "delta"})
        return after, body

    return node


def honest_nodes():
    return {
        k: adder(0.1 + 0.01 * k, delay=1.0 + 0.3 * k, examples=10 + k, train_loss=0.5)
        for k in range(N_HONEST)
    }


def n_versions(strategy):
    """Long enough for three replies of the hostile node."""
    return 40 if strategy.schedule.buffer_size == 1 else 12


def trained(strategy, nodes, dtype=np.float32):
    grid = VirtualGrid(nodes)
    initial = record(w=np.zeros((3, 4), dtype), b=np.ones(2, dtype))
    result = strategy.start(grid, initial, num_rounds=n_versions(strategy))
    node_of = {f"m{i}": m.metadata.dst_node_id for i, (_, m) in enumerate(grid.sent)}
    return result.arrays["w"].numpy(), grid, node_of


def assert_rejected_alone(strategy, nodes, caplog, dtype=np.float32):
    with caplog.at_level(logging.INFO):
        w, grid, node_of = trained(strategy, nodes, dtype)
    tried = [i for i, node in node_of.items() if node == HOSTILE]
    assert tried
    reasons = [reason for i, reason in grid.refused if "the run ended" not in reason]
    assert {node_of[i] for i, reason in grid.refused if reason in reasons} == {HOSTILE}
    assert all("norm" in reason or "float16" in reason for reason in reasons), reasons
    assert HOSTILE not in {node_of[i] for i, _ in grid.merged}
    assert f"node {HOSTILE}: reply rejected" in caplog.text
    assert f"node {HOSTILE}: 3 replies rejected in a row; it rests" in caplog.text
    # Every version has as many updates as the schedule waits for, all of them honest.
    size = strategy.schedule.buffer_size or N_HONEST
    made = [facts["version"] for _, facts in grid.merged]
    assert {made.count(version) for version in range(1, n_versions(strategy) + 1)} == {size}
    assert np.isfinite(w).all()
    assert ((w > 0.05) & (w < 20.0)).all(), w
    return w


@pytest.mark.parametrize(("value", "after"), [(3.4e38, 0.1), (-1e18, 1.45)])
@pytest.mark.parametrize("name", STRATEGIES | RULES)
def test_a_value_that_could_leave_the_finite_range_is_rejected_from_the_first_reply_on(
    name, value, after, caplog
):
    nodes = honest_nodes() | {HOSTILE: hostile(value, after=after)}
    assert_rejected_alone((STRATEGIES | RULES)[name](), nodes, caplog)


@pytest.mark.parametrize("rule", [robust.Median, robust.TrimmedMean, robust.GeometricMedian])
def test_a_rule_takes_a_large_update_since_it_makes_no_step_without_it(rule):
    nodes = {k: honest_nodes()[k] for k in (0, 1)} | {HOSTILE: hostile(1e14, after=0.1)}
    w, grid, _ = trained(FedAvg(robust=rule(f=1)), nodes)
    assert not grid.refused
    assert len(grid.merged) == 3 * 12
    assert ((w > 0.05) & (w < 20.0)).all()


@pytest.mark.parametrize("value", [1e14, 1e4])
@pytest.mark.parametrize("name", STRATEGIES)
def test_an_update_far_beyond_those_of_the_others_is_rejected_alone(name, value, caplog):
    # The fifth to answer, so that a buffer of one knows whom to compare it with.
    nodes = honest_nodes() | {HOSTILE: hostile(value, after=2.25)}
    assert_rejected_alone(STRATEGIES[name](), nodes, caplog)


@pytest.mark.parametrize("as_change", [False, True])
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_largest_number_of_half_precision_is_rejected_alone(name, as_change, caplog):
    node = hostile(65504.0, after=2.25, as_change=as_change)
    nodes = honest_nodes() | {HOSTILE: node}
    assert_rejected_alone(STRATEGIES[name](), nodes, caplog, np.float16)


def test_a_run_with_a_hostile_node_goes_on_from_its_checkpoint_to_the_same_bytes(tmp_path):
    def run(n, **options):
        nodes = honest_nodes() | {HOSTILE: hostile(1e4, after=2.25)}
        strategy = FedAvg(seed=1, validation=Validation(rest_s=1e4, most_rest_s=1e4), **options)
        result = strategy.start(
            VirtualGrid(nodes), record(w=np.zeros((3, 4), np.float32)), num_rounds=n
        )
        return result.arrays["w"].data, strategy.rejections

    whole, counts = run(6)
    run(2, checkpoints=tmp_path)
    rest, same = run(6, resume=tmp_path)
    assert rest == whole
    assert counts == same == {"rejected: norm": 3}


@pytest.mark.parametrize("action", ["train", "evaluate", "error"])
def test_a_reply_that_is_too_large_is_refused_unread_and_the_run_goes_on(action, caplog):
    honest = honest_nodes()

    def bulky(message, grid):
        if not message.metadata.message_type.startswith(action) and action != "error":
            return honest[0](message, grid)
        if action == "error":
            return 1.0, Error(2, "x" * 10**7)
        body = content(message.content["arrays"], 10)
        body["fedstale.forecast"] = ConfigRecord({"p_finish": 0.5, "curve": [0.5] * 10**6})
        return 1.0, body

    strategy = FedAvg(fraction_evaluate=1.0)
    grid = VirtualGrid(honest | {HOSTILE: bulky})
    with caplog.at_level(logging.INFO):
        strategy.start(grid, record(w=np.zeros((3, 4), np.float32)), num_rounds=4)
    assert len(grid.merged) == 4 * (N_HONEST + (action == "evaluate"))
    assert max(len(reason) for _, reason in grid.refused) < 3000
    if action != "error":
        said = "the reply has 1,000,000 elements of lists: at most 10,000"
        assert (
            f"node {HOSTILE}: reply rejected: {said}, by Validation(most_elements)" in caplog.text
        )
        assert strategy.rejections["rejected: size"] >= 3


@pytest.mark.parametrize("rule", [None, robust.Median(f=1)])
def test_fresh_names_of_metrics_in_every_reply_grow_no_table_of_a_run(rule, caplog):
    def naming(message, grid):
        names = {f"m{grid.now()}.{i}": 0.5 for i in range(200)}
        return 1.0, content(message.content["arrays"], 10, **names, train_loss=1.0)

    options = {} if rule is None else {"robust": rule}
    strategy = FedAvg(fraction_evaluate=1.0, **options)
    grid = VirtualGrid(honest_nodes() | {HOSTILE: naming})
    result = strategy.start(grid, record(w=np.zeros((3, 4), np.float32)), num_rounds=12)
    for book in (result.train_metrics_clientapp, result.evaluate_metrics_clientapp):
        # A quarter of 256, and what the others state.
        assert len({name for metrics in book.values() for name in metrics}) < 70
        assert "train_loss" in book[12]
    assert strategy.rejections["dropped"] == 24
    assert f"node {HOSTILE}: number of its metrics counts as " in caplog.text
