"""Jobs that bring nothing: updates too stale, failures that are replaced, evaluators in silence."""

import numpy as np
import pytest
from flwr.app import MetricRecord, RecordDict
from flwr.app.error import Error
from flwr.serverapp import Grid
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_grid import VirtualGrid, adder, identity, record

from fedstale.errors import ConfigError, FedstaleError
from fedstale.strategies import (
    REFL,
    FedAsync,
    FedAvg,
    FedBuff,
    StaleStrategy,
    Validation,
)
from fedstale.strategies.robust import TrimmedMean
from fedstale.strategies.schedule import (
    Schedule,
    k_async,
    k_batch_async,
    k_sync,
    over_selection,
    semi_synchronous,
)
from fedstale.strategies.server.loop import EventLoop
from fedstale.strategies.weighting import ByAge, constant

pytestmark = pytest.mark.usefixtures("_identity")


def start(strategy, nodes, rounds=1, **options):
    grid = nodes if isinstance(nodes, VirtualGrid) else VirtualGrid(nodes)
    return strategy.start(grid, record(w=np.zeros(2)), num_rounds=rounds, **options), grid


def receivers(grid, kind="train"):
    return [
        (at, message.metadata.dst_node_id)
        for at, message in grid.sent
        if message.metadata.message_type == kind
    ]


# Too stale.


def test_an_update_that_is_too_stale_is_rejected_and_one_at_the_limit_is_not():
    # The slow one comes at 2.5, from version 0, when there are two versions.
    for most, merged, value in ((1, 3, 3.0), (2, 3, 12.0)):
        nodes = {10: adder(1.0, 1.0), 11: adder(10.0, 2.5)}
        schedule = k_batch_async(2, 1)
        strategy = StaleStrategy(
            schedule=schedule, validation=Validation(max_staleness=most), normalise="buffer_size"
        )
        result, grid = start(strategy, nodes, 3)
        assert len(grid.merged) == merged
        np.testing.assert_array_equal(result.arrays["w"].numpy(), value)
        too_old = [("m1", "too stale: more than max_staleness = 1 versions behind")]
        assert grid.refused[: 2 - most] == too_old[: 2 - most]
        assert strategy.rejections["rejected: too stale"] == 2 - most


def test_a_device_whose_update_was_too_stale_starts_again_at_once_and_has_no_strike():
    nodes = {10: adder(1.0, 1.0), 11: adder(10.0, 2.5)}
    strategy = FedAsync(2, validation=Validation(max_staleness=0))
    _, grid = start(strategy, nodes, 12)
    sent = [at for at, node in receivers(grid) if node == 11]
    assert sent == [0.0, 2.5, 5.0, 7.5, 10.0][: len(sent)]
    assert len(sent) >= 4
    assert strategy.rejections["rejected: too stale"] >= 3


def test_an_update_that_is_too_stale_fills_no_buffer():
    nodes = {10: adder(1.0, 1.0), 11: adder(1.0, 1.1), 12: adder(100.0, 3.5)}
    strategy = FedBuff(3, 2, validation=Validation(max_staleness=0), staleness=constant())
    result, grid = start(strategy, nodes, 4)
    by_version = {}
    for _, facts in grid.merged:
        by_version.setdefault(facts["version"], []).append(facts["staleness"])
    assert {tuple(found) for found in by_version.values()} == {(0, 0)}
    assert result.arrays["w"].numpy()[0] < 100.0


def test_no_update_is_too_stale_without_a_limit():
    nodes = {10: adder(1.0, 1.0), 11: adder(1.0, 50.5)}
    _, grid = start(FedAsync(2), nodes, 52)
    assert max(facts["staleness"] for _, facts in grid.merged) == 50


SCHEDULES = [
    Schedule(),
    k_sync(3, 2),
    k_async(3, 2),
    k_batch_async(3, 2),
    semi_synchronous(3, 2.0),
    Schedule(concurrency=3, buffer_size=2, send="after_reply", stragglers="keep", distinct=True),
]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(SCHEDULES),
    st.integers(0, 3),
    st.lists(st.floats(0.5, 20.0), min_size=3, max_size=6),
)
def test_with_any_schedule_nothing_older_is_merged_and_the_run_comes_to_its_end(
    schedule, most, delays
):
    nodes = {10 + i: adder(1.0, delay) for i, delay in enumerate(delays)}
    strategy = StaleStrategy(schedule=schedule, validation=Validation(max_staleness=most))
    with identity():
        result, grid = start(strategy, nodes, 8, timeout=100)
    assert max(result.train_metrics_clientapp) == 8
    assert all(facts["staleness"] <= most for _, facts in grid.merged)
    reasons = [reason for _, reason in grid.refused if reason.startswith("too stale")]
    assert len(reasons) == strategy.rejections["rejected: too stale"]


def test_the_limit_must_be_a_count():
    for value in (-1, 1.5, True):
        with pytest.raises(ConfigError, match="max_staleness"):
            FedBuff(2, 2, validation=Validation(max_staleness=value))


class Plain(Grid):
    """A grid as Flower has it: without clock and runtime."""

    set_run = create_message = send_and_receive = None
    run = None

    def __init__(self, nodes, step_s=1.0):
        self.inner, self.step_s = VirtualGrid(nodes), step_s

    def get_node_ids(self):
        return self.inner.get_node_ids()

    def push_messages(self, messages):
        return self.inner.push_messages(messages)

    def pull_messages(self, message_ids):
        self.inner.move(self.inner.time + self.step_s)
        return self.inner.pull_messages(message_ids)


@pytest.fixture
def _quick(monkeypatch):
    """Let wall time pass without waiting: each look at the clock is a second later."""
    now = iter(range(10**9))
    monkeypatch.setattr("fedstale.strategies.server.runtime.time.sleep", lambda seconds: None)
    monkeypatch.setattr(
        "fedstale.strategies.server.runtime.time.monotonic", lambda: float(next(now))
    )


@pytest.mark.usefixtures("_quick")
def test_a_limit_holds_on_flowers_own_grid():
    grid = Plain({10: adder(1.0, 1.0), 11: adder(100.0, 9.0)})
    strategy = FedAsync(2, validation=Validation(max_staleness=2))
    result = strategy.start(grid, record(w=np.zeros(2)), num_rounds=30, timeout=10_000)
    assert strategy.rejections["rejected: too stale"] >= 2
    assert result.arrays["w"].numpy()[0] < 31.0
    assert [node for _, node in receivers(grid.inner)].count(11) >= 3


# Failures in a row.


def scripted(answers):
    """A node that fails or adds 1, as it is told; from the end of that on, it fails."""
    left = iter(answers)

    def node(message, grid):
        is_good = next(left, False)
        return adder(1.0)(message, grid) if is_good else failing()(message, grid)

    return node


def test_a_run_ends_at_the_last_failure_in_a_row_that_is_allowed_and_a_good_reply_begins_anew(
    monkeypatch,
):
    monkeypatch.setattr("fedstale.strategies.server.loop._FAILURES_IN_A_ROW", 4)
    three_and_one = [False, False, False, True]
    grid = VirtualGrid({10: scripted(3 * three_and_one)})
    with pytest.raises(FedstaleError, match=r"^4 jobs failed one after the other, .*battery"):
        start(FedAsync(1), grid, 4)
    assert [facts["version"] for _, facts in grid.merged] == [1, 2, 3]
    assert len(grid.sent) == 3 * 4 + 4


@pytest.mark.parametrize(
    ("strategy", "n"),
    [
        (FedAvg(), 3),
        (FedBuff(10, 5, seed=1), 3),
        (FedBuff(3, 3, seed=1), 3),
        # Of more nodes than jobs at a time, all that were asked.
        (FedBuff(2, 2, seed=1), 6),
        (StaleStrategy(schedule=k_sync(3, 3), seed=1), 4),
    ],
    ids=["rounds", "asynchronous", "few", "drawn", "k-sync"],
)
def test_a_run_in_which_every_client_fails_ends_after_five_failures_of_each(strategy, n):
    grid = VirtualGrid({10 + i: failing(1.0 + i) for i in range(n)})
    with pytest.raises(FedstaleError, match=r"^every client fails: .* out of battery; mend"):
        start(strategy, grid, 10_000)
    ends = sorted((at + 1.0 + node - 10, node) for at, node in receivers(grid))
    failed = [sum(node == each for end, node in ends if end <= grid.time) for each in grid.nodes]
    asked = [n for n in failed if n]
    assert min(asked) == 5
    assert len(asked) >= min(n, strategy.schedule.concurrency or n)
    assert sum(failed) < 100


@pytest.mark.parametrize(
    "other",
    [
        lambda message, grid: (0.0, None),
        lambda message, grid: (1.0, Error(5, "the node is away")),
        lambda message, grid: (1.0, Error(3, "the message has expired")),
    ],
    ids=["silent", "away", "expired"],
)
def test_a_node_that_may_come_back_keeps_a_run_from_ending_early(other, monkeypatch):
    monkeypatch.setattr("fedstale.strategies.server.loop._FAILURES_IN_A_ROW", 60)
    grid = VirtualGrid({10: failing(), 11: failing(), 12: other})
    with pytest.raises(FedstaleError, match=r"^60 jobs failed one after the other"):
        start(FedBuff(3, 3, seed=1), grid, 10_000, timeout=5.0)


def test_one_good_reply_keeps_a_run_from_ending_early(monkeypatch):
    monkeypatch.setattr("fedstale.strategies.server.loop._FAILURES_IN_A_ROW", 60)
    grid = VirtualGrid({10: scripted([False] * 4 + [True]), 11: failing()})
    with pytest.raises(FedstaleError, match=r"^60 jobs failed one after the other"):
        start(FedBuff(2, 2, seed=1), grid, 10_000)


# Replacements.


def failing(delay=1.0):
    """A node whose jobs fail."""
    return lambda message, grid: (delay, Error(2, "out of battery"))


@pytest.mark.parametrize(
    "strategy",
    [
        StaleStrategy(schedule=k_sync(3, 3), seed=1),
        StaleStrategy(schedule=k_async(3, 3), seed=1),
        REFL(3, 3, seed=1),
    ],
    ids=["k-sync", "k-async", "REFL"],
)
def test_a_job_that_failed_is_replaced_before_its_buffer_closes(strategy):
    # Whichever three are picked first, jobs of 0 and 1 fail at once and the others take 10 s.
    nodes = {0: failing(), 1: failing(), **{n: adder(1.0, 10.0) for n in range(2, 9)}}
    tried = set()
    for seed in range(8):
        strategy.seed = seed
        _, grid = start(strategy, nodes, 1)
        assert len(grid.merged) == 3
        first = {node for at, node in receivers(grid) if at == 0.0}
        n_failed = len(first & {0, 1})
        tried.add(n_failed)
        # One that fails after another one failed makes the step a second later each time.
        assert grid.time <= 12.0
        assert grid.time >= (11.0 if n_failed else 10.0)
    assert max(tried) > 0


def test_a_straggler_is_not_waited_for_because_another_job_failed():
    nodes = {
        0: failing(5.0),
        1: adder(1.0, 1000.0),
        2: adder(1.0, 10.0),
        **{n: adder(1.0, 10.0) for n in range(3, 9)},
    }
    online = lambda now: [0, 1, 2] if now < 1.0 else sorted(nodes)  # noqa: E731
    for schedule in (k_sync(3, 2), k_async(3, 2), over_selection(2, 1.5)):
        _, grid = start(StaleStrategy(schedule=schedule), VirtualGrid(nodes, online), 1)
        # The replacement is sent at 5; the straggler would come at 1,000.
        assert grid.time == 15.0


def test_as_many_are_replaced_as_failed_and_no_node_twice_in_a_buffer():
    nodes = {0: failing(1.0), 1: failing(2.0), **{n: adder(1.0, 10.0 + n) for n in range(2, 12)}}
    schedule = k_sync(4, 4)
    for seed in range(10):
        _, grid = start(StaleStrategy(schedule=schedule, seed=seed), nodes, 1)
        sent = [node for _, node in receivers(grid)]
        assert len(sent) == len(set(sent)) == 4 + len({0, 1} & set(sent))


def test_a_replacement_comes_when_a_node_does():
    nodes = {0: failing(1.0), 1: adder(1.0, 500.0), 2: adder(1.0, 10.0)}
    grid = VirtualGrid(nodes, online=lambda now: [0, 1] if now < 50.0 else [0, 1, 2])
    start(StaleStrategy(schedule=k_sync(2, 1)), grid, 1)
    # Looked for again every 30 s: sent at 61, and back before the straggler.
    assert grid.time == 71.0


@pytest.mark.parametrize("schedule", [k_async(3, 2), k_sync(3, 2)], ids=["k-async", "k-sync"])
def test_a_job_that_fails_as_its_buffer_closes_is_not_replaced_in_the_next(schedule):
    failed = []

    def once(message, grid):
        if not failed:
            failed.append(grid.now())
            return failing(1.0)(message, grid)
        return adder(1.0, 7.0)(message, grid)

    for seed in range(12):
        failed.clear()
        nodes = {0: adder(1.0, 1.0), 1: adder(1.0, 1.0), 2: once}
        nodes |= {n: adder(1.0, 3.0 + n) for n in range(3, 9)}
        online = lambda now: [0, 1, 2] if now < 0.5 else range(9)  # noqa: E731
        strategy = StaleStrategy(schedule=schedule, seed=seed)
        _, grid = start(strategy, VirtualGrid(nodes, online), 5)
        steps = {at for at, _, source, _ in grid.metrics if source == "train"}
        assert {at for at, _ in receivers(grid)} <= {0.0} | steps


def test_where_nobody_is_free_the_step_is_made_of_what_there_is():
    nodes = {0: failing(2.0), 1: adder(1.0, 1.0)}
    result, grid = start(StaleStrategy(schedule=k_sync(2, 2)), nodes, 1)
    assert (grid.time, len(grid.merged)) == (2.0, 1)
    np.testing.assert_array_equal(result.arrays["w"].numpy(), 1.0)


def test_a_round_that_waits_for_every_reply_replaces_nobody():
    nodes = {0: failing(1.0), 1: adder(1.0, 5.0), 2: adder(1.0, 5.0)}
    online = lambda now: [0, 1] if now < 0.5 else [0, 1, 2]  # noqa: E731
    _, grid = start(FedAvg(), VirtualGrid(nodes, online), 1)
    assert [node for _, node in receivers(grid)] == [0, 1]


def test_an_update_that_is_too_stale_is_replaced_too():
    # The straggler of version 0 comes back at 12, when versions 1 and 2 have been made.
    nodes = {0: adder(1.0, 12.0), 1: adder(1.0, 5.0), 2: adder(1.0, 5.0), 3: adder(1.0, 100.0)}
    online = lambda now: [0, 1, 2] if now < 11.0 else [0, 1, 2, 3]  # noqa: E731
    strategy = StaleStrategy(schedule=k_async(3, 2), validation=Validation(max_staleness=0))
    _, grid = start(strategy, VirtualGrid(nodes, online), 3)
    at_12 = [node for at, node in receivers(grid) if at == 12.0]
    assert len(at_12) == 1
    assert [reason for _, reason in grid.refused] == [
        "too stale: more than max_staleness = 0 versions behind"
    ]


def test_a_robust_rule_still_counts_nodes():
    nodes = {0: failing(1.0), 1: failing(2.0), **{n: adder(1.0, 3.0 + n) for n in range(2, 9)}}
    strategy = StaleStrategy(schedule=k_sync(5, 5), robust=TrimmedMean(f=2), seed=3)
    _, grid = start(strategy, nodes, 4)
    owners = {f"m{i}": m.metadata.dst_node_id for i, (_, m) in enumerate(grid.sent)}
    by_version = {}
    for message_id, facts in grid.merged:
        by_version.setdefault(facts["version"], []).append(owners[message_id])
    assert all(len(set(found)) == len(found) == 5 for found in by_version.values())


# The last evaluation.


def deaf(*silent):
    """Nodes that train in 10 s and evaluate in 2 s; some never answer an evaluation."""

    def node(n):
        def answer(message, grid):
            if message.metadata.message_type != "evaluate":
                return adder(1.0, 10.0)(message, grid)
            if n in silent:
                return 0.0, None
            metrics = MetricRecord({"num-examples": 1, "eval": float(n)})
            return 2.0, RecordDict({"metrics": metrics})

        return answer

    return {n: node(n) for n in range(5)}


def test_the_last_evaluation_does_not_wait_an_hour_for_one_silent_node():
    result, grid = start(FedAvg(fraction_evaluate=1.0, evaluate_every=2), deaf(4), 2)
    # Both trainings took 10 s each; evaluators get twice that.
    assert grid.time == 20.0 + 20.0
    assert dict(result.evaluate_metrics_clientapp[2]) == {"eval": 1.5}
    ((message_id, reason),) = grid.refused
    assert reason == "no reply within 20 s of the last version"
    assert grid.sent[int(message_id[1:])][1].metadata.dst_node_id == 4


def test_the_last_evaluation_waits_for_all_who_answer_and_no_longer():
    result, grid = start(FedAvg(fraction_evaluate=1.0), deaf(), 1)
    assert grid.time == 12.0
    assert dict(result.evaluate_metrics_clientapp[1]) == {"eval": 2.0}
    assert not grid.refused


def test_it_ends_also_if_no_evaluator_answers_and_never_later_than_a_job_may_take():
    for timeout, end in ((3600.0, 30.0), (12.0, 22.0)):
        result, grid = start(FedAvg(fraction_evaluate=1.0), deaf(0, 1, 2, 3, 4), 1, timeout=timeout)
        assert grid.time == end
        assert not result.evaluate_metrics_clientapp


def test_a_deadline_of_rounds_also_bounds_the_last_evaluation():
    strategy = StaleStrategy(
        schedule=semi_synchronous(None, 11.0), weighting=ByAge(constant()), fraction_evaluate=1.0
    )
    _, grid = start(strategy, deaf(4), 1)
    assert grid.time == 10.0 + 11.0


def test_a_reply_at_the_very_end_of_the_wait_counts():
    late = {0: deaf()[0]}

    def answer(message, grid):
        is_evaluation = message.metadata.message_type == "evaluate"
        delay, reply = late[0](message, grid)
        return (20.0 if is_evaluation else delay), reply

    result, grid = start(FedAvg(fraction_evaluate=1.0), {0: answer}, 1)
    assert grid.time == 30.0
    assert dict(result.evaluate_metrics_clientapp[1]) == {"eval": 0.0}


@pytest.mark.usefixtures("_quick")
def test_a_silent_evaluator_does_not_hold_flowers_own_grid(monkeypatch):
    closed = []
    close = EventLoop._close

    def watched(self):
        began = self.clock.now()
        close(self)
        closed.append((self.clock.now() - began, len(self.jobs.out)))

    monkeypatch.setattr(EventLoop, "_close", watched)
    grid = Plain(deaf(4))
    strategy = FedAvg(fraction_evaluate=1.0)
    result = strategy.start(grid, record(w=np.zeros(2)), num_rounds=2)
    assert dict(result.evaluate_metrics_clientapp[2]) == {"eval": 1.5}
    ((waited_s, n_open),) = closed
    assert waited_s < 600.0
    assert n_open == 0
