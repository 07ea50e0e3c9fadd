"""The whole strategy over a grid of functions and a virtual clock."""

from math import nan
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from flwr.app.error import Error
from flwr.serverapp import Grid
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_grid import VirtualGrid, adder, content, identity, record

from fedstale.errors import ConfigError, FedstaleError
from fedstale.strategies import (
    FedAsync,
    FedAvg,
    FedBuff,
    GapAware,
    Stage,
    StaleStrategy,
    Validation,
)
from fedstale.strategies.robust import TrimmedMean
from fedstale.strategies.schedule import (
    Schedule,
    k_async,
    k_batch_async,
    k_batch_sync,
    k_sync,
    semi_synchronous,
)
from fedstale.strategies.selection import Random, Selector
from fedstale.strategies.server_optimizer import Momentum
from fedstale.strategies.types import UNKNOWN
from fedstale.strategies.weighting import (
    ByAge,
    DirectionalGap,
    EuclideanStaleness,
    Gap,
    RelevanceAware,
    constant,
    polynomial,
)


@pytest.fixture(autouse=True)
def _identity():
    with identity():
        yield


def w(result):
    return result.arrays["w"].numpy()


def start(strategy, nodes, rounds=1, initial=None, **options):
    grid = nodes if isinstance(nodes, VirtualGrid) else VirtualGrid(nodes)
    arrays = record(w=np.zeros(2)) if initial is None else initial
    return strategy.start(grid, arrays, num_rounds=rounds, **options), grid


def test_fedavg_averages_by_examples():
    nodes = {10: adder(1.0, examples=1), 11: adder(4.0, examples=3)}
    result, grid = start(FedAvg(), nodes, 2)
    np.testing.assert_allclose(w(result), [6.5, 6.5])
    assert [m.content["config"]["server-round"] for _, m in grid.sent] == [1, 1, 2, 2]
    assert [m.metadata.group_id for _, m in grid.sent] == ["0", "0", "1", "1"]


def test_metrics_are_averaged_by_examples_and_told_to_the_observer():
    nodes = {10: adder(1.0, examples=1, loss=2.0), 11: adder(4.0, examples=3, loss=6.0)}
    result, grid = start(
        FedAvg(min_evaluate_nodes=2), nodes, 2, evaluate_fn=lambda v, _: MetricRecord({"v": v})
    )
    assert dict(result.train_metrics_clientapp[1]) == {"loss": 5.0}
    assert [dict(result.evaluate_metrics_serverapp[v]) for v in range(3)] == [
        {"v": 0},
        {"v": 1},
        {"v": 2},
    ]
    assert dict(result.evaluate_metrics_clientapp[2]) == {"eval": 3.25}
    assert {source for _, _, source, _ in grid.metrics} == {"train", "server", "evaluate"}


def test_k_sync_takes_the_first_and_cancels_the_others():
    nodes = {10: adder(1.0, 1.0), 11: adder(2.0, 2.0), 12: adder(100.0, 3.0)}
    result, grid = start(StaleStrategy(schedule=k_sync(3, 2)), nodes, 2)
    np.testing.assert_allclose(w(result), 3.0)
    assert grid.time == 4.0
    assert [r for _, r in grid.refused] == ["late: the job was cancelled before"]


def test_k_batch_sync_takes_two_updates_of_one_device():
    nodes = {10: adder(1.0, 1.0), 11: adder(100.0, 9.0)}
    result, grid = start(StaleStrategy(schedule=k_batch_sync(2, 3)), nodes, 1)
    np.testing.assert_allclose(w(result), 1.0)
    assert grid.time == 3.0
    assert {f["staleness"] for _, f in grid.merged} == {0}


def test_k_async_keeps_stragglers_and_aggregates_them_as_stale():
    nodes = {10: adder(1.0, 1.0), 11: adder(10.0, 2.5)}
    strategy = StaleStrategy(
        schedule=k_async(2, 1), weighting=ByAge(polynomial(1.0)), normalise="buffer_size"
    )
    result, grid = start(strategy, nodes, 3)
    # The fast one at 1 and 2; the slow one at 2.5, from version 0 and two versions late.
    assert grid.time == 2.5
    assert [f["staleness"] for _, f in grid.merged] == [0, 0, 2]
    np.testing.assert_allclose(w(result), 2.0 + 10.0 / 3.0)


def test_k_batch_async_sends_to_a_device_again_before_the_server_step():
    nodes = {10: adder(1.0, 1.0), 11: adder(1.0, 1.5)}
    strategy = FedBuff(2, 4, weighting=ByAge(constant()))
    _, grid = start(strategy, nodes, 1)
    # Replies at 1, 1.5, 2, 3 and 3.
    assert grid.time == 3.0
    assert len(grid.merged) == 4


def test_a_device_contributes_once_to_a_server_step_if_asked_for():
    nodes = {n: adder(1.0, 1.0 + n) for n in range(3)}
    schedule = Schedule(
        concurrency=1, buffer_size=3, send="after_reply", stragglers="keep", distinct=True
    )
    _, grid = start(StaleStrategy(schedule=schedule), nodes, 2)
    receivers = [m.metadata.dst_node_id for _, m in grid.sent]
    assert sorted(receivers[:3]) == [0, 1, 2]
    assert sorted(receivers[3:6]) == [0, 1, 2]


def test_a_buffer_for_which_too_few_distinct_devices_exist_does_not_hang():
    nodes = {n: adder(1.0) for n in range(2)}
    schedule = Schedule(
        concurrency=2, buffer_size=5, send="after_reply", stragglers="keep", distinct=True
    )
    result, grid = start(StaleStrategy(schedule=schedule), nodes, 1, timeout=50)
    np.testing.assert_allclose(w(result), 1.0)
    assert grid.time < 110


def test_fedasync_mixes_models():
    nodes = {10: adder(1.0, 1.0), 11: adder(10.0, 2.5)}
    result, _ = start(FedAsync(2, mix=0.5, staleness=polynomial(1.0)), nodes, 3)
    theta = 0.5
    theta += 0.5 * ((theta + 1.0) - theta)
    theta += 0.5 / 3 * (10.0 - theta)
    np.testing.assert_allclose(w(result), theta)


def test_a_deadline_aggregates_what_there_is_and_stale_updates_come_next():
    nodes = {10: adder(1.0, 1.0), 11: adder(5.0, 7.0)}
    result, grid = start(StaleStrategy(schedule=semi_synchronous(2, 4.0)), nodes, 2)
    assert [(i, f["version"], f["staleness"]) for i, f in grid.merged] == [
        ("m0", 1, 0),
        ("m2", 2, 0),
        ("m1", 2, 1),
    ]
    assert grid.metrics[0][0] == 4.0
    np.testing.assert_allclose(w(result), 1.0 + 3.0)


def test_a_deadline_with_nothing_there_waits_for_the_first_reply():
    _, grid = start(StaleStrategy(schedule=semi_synchronous(1, 4.0)), {1: adder(1.0, 7.0)}, 1)
    assert grid.time == 7.0


def test_a_silent_device_times_out_on_the_clock():
    nodes = {10: adder(1.0, 1.0), 11: lambda m, g: (0, None)}
    result, grid = start(FedAvg(), nodes, 1, timeout=20)
    assert grid.time == 20.0
    np.testing.assert_allclose(w(result), 1.0)
    assert grid.refused == [("m1", "no reply within 20 s")]


def test_a_reply_at_the_very_deadline_counts():
    result, grid = start(FedAvg(), {10: adder(1.0, 20.0)}, 1, timeout=20)
    np.testing.assert_allclose(w(result), 1.0)
    assert not grid.refused


def test_with_no_node_online_the_server_waits():
    grid = VirtualGrid({10: adder(1.0)}, online=lambda now: [10] if now >= 5000 else [])
    result, _ = start(FedAvg(), grid, 1)
    np.testing.assert_allclose(w(result), 1.0)
    assert grid.time >= 5000


def test_a_device_that_comes_online_is_used_before_the_next_reply():
    nodes = {10: adder(1.0, 1000.0), 11: adder(1.0, 1.0)}
    grid = VirtualGrid(nodes, online=lambda now: [10, 11] if now >= 100 else [10])
    start(FedBuff(2, 2), grid, 1)
    assert grid.time < 200


def bad(**changes):
    def node(message, grid):
        good = {"w": np.ones(2)} | changes.get("arrays", {})
        arrays = record(**{k: v for k, v in good.items() if v is not None})
        return 1.0, content(arrays, changes.get("examples", 1))

    return node


BAD = {
    "NaN": (bad(arrays={"w": np.array([np.nan, 0])}), "NaN"),
    "infinity": (bad(arrays={"w": np.array([np.inf, 0])}), "NaN or infinity"),
    "shape": (bad(arrays={"w": np.ones(3)}), "shape"),
    "complex": (bad(arrays={"w": np.ones(2) * 1j}), "dtype"),
    "missing": (bad(arrays={"w": None}), "missing"),
    "unknown": (bad(arrays={"x": np.ones(1)}), "unknown"),
    "no examples": (bad(examples=0), "num-examples"),
    "negative": (bad(examples=-1), "num-examples"),
    "absurd": (bad(examples=1e300), "num-examples"),
    "not a number": (bad(examples=float("nan")), "num-examples"),
    "no metrics": (
        lambda m, g: (1.0, RecordDict({"arrays": record(w=np.ones(2))})),
        "num-examples",
    ),
    "empty": (lambda m, g: (1.0, RecordDict()), "num-examples"),
    "error": (lambda m, g: (1.0, Error(2, "it broke")), "it broke"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_reply_is_rejected_with_its_reason_and_changes_nothing(kind):
    node, reason = BAD[kind]
    result, grid = start(FedAvg(), {10: adder(1.0, 2.0), 11: node}, 1)
    np.testing.assert_array_equal(w(result), 1.0)
    assert [i for i, _ in grid.refused] == ["m1"]
    assert reason in grid.refused[0][1]


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("schedule", [k_sync(2, 1), k_async(2, 1), k_batch_async(2, 2)])
def test_a_federation_of_bad_replies_ends_with_an_error_and_not_in_a_loop(
    kind, schedule, monkeypatch
):
    monkeypatch.setattr("fedstale.strategies.server.loop._FAILURES_IN_A_ROW", 10)
    node, reason = BAD[kind]
    with pytest.raises(FedstaleError, match=reason):
        start(StaleStrategy(schedule=schedule), {10: node, 11: node}, 1)


def test_a_reply_to_an_unknown_job_is_rejected():
    nodes = {10: adder(1.0, 2.0)}
    grid = VirtualGrid(nodes)
    push = grid.push_messages

    def stray(messages):
        messages = list(messages)
        ids = push(messages)
        time, k, _, reply = grid.heap[0]
        reply.metadata.__dict__["_reply_to_message_id"] = "nobody"
        grid.heap[0] = (time, k, ids[0], reply)
        grid.push_messages = push
        return ids

    grid.push_messages = stray
    result, _ = start(FedAvg(), grid, 1, timeout=10)
    assert ("nobody", "no such job is out") in grid.refused
    np.testing.assert_array_equal(w(result), 1.0)


def test_a_server_step_that_would_leave_the_finite_range_is_dropped():
    rate = [1e308, 1.0]
    optimizer = Momentum(lambda step: rate[min(step, 2) - 1])
    nodes = {10: adder(5.0), 11: adder(5.0)}
    result, grid = start(FedAvg(server_optimizer=optimizer), nodes, 1)
    np.testing.assert_array_equal(w(result), 5.0)
    assert [reason for _, reason in grid.refused] == 2 * ["its server step left the finite range"]


def test_a_weighting_that_always_says_nan_ends_the_run_with_an_error():
    class Broken(ByAge):
        def weigh(self, update):
            update.delta["w"] *= np.nan
            return float("nan")

    with pytest.raises(FedstaleError, match="finite range"):
        start(FedAvg(weighting=Broken(constant())), {1: adder(1.0)}, 1)


@pytest.mark.parametrize("normalise", ["examples", "buffer_size", "weights"])
def test_a_weighting_that_gives_all_updates_nothing_keeps_the_model_finite(normalise):
    curve = lambda tau: 1.0 if tau == 0 else 0.0  # noqa: E731
    nodes = {10: adder(1.0, 1.0), 11: adder(10.0, 1.5)}
    strategy = StaleStrategy(schedule=k_async(2, 1), weighting=ByAge(curve), normalise=normalise)
    result, grid = start(strategy, nodes, 2)
    assert grid.merged[1][1]["weight"] == 0.0
    np.testing.assert_array_equal(w(result), 1.0)


def test_integer_arrays_are_averaged_without_any_penalty_and_rounded():
    initial = record(
        w=np.zeros(2, np.float32), n=np.array(10, np.int64), on=np.array([True, False])
    )

    def node(step, delay):
        def answer(message, grid):
            arrays = message.content["arrays"]
            n = arrays["n"].numpy() + step
            on = np.array([False, True])
            w = arrays["w"].numpy() + np.float32(step)
            return delay, content(record(w=w, n=np.asarray(n), on=on))

        return answer

    nodes = {10: node(4, 1.0), 11: node(9, 1.5)}
    strategy = StaleStrategy(
        schedule=k_async(2, 1), weighting=ByAge(polynomial(1.0)), server_optimizer=Momentum(0.5)
    )
    result, _ = start(strategy, nodes, 2, initial)
    n = result.arrays["n"].numpy()
    assert n == 10 + 4 + 9
    assert n.dtype == np.int64
    np.testing.assert_array_equal(result.arrays["on"].numpy(), [False, True])
    assert w(result).dtype == np.float32
    assert list(result.arrays) == ["w", "n", "on"]


def test_a_delta_is_taken_as_it_is_where_the_client_says_so():
    def node(message, grid):
        reply = content(record(w=np.array([1.0, 2.0])))
        reply["fedstale"] = ConfigRecord({"fedstale.update": "delta"})
        return 1.0, reply

    result, _ = start(FedAvg(), {10: node}, 2, record(w=np.array([5.0, 5.0])))
    np.testing.assert_array_equal(w(result), [7.0, 9.0])


def test_a_forecast_and_what_was_seen_reach_the_candidates():
    seen = []

    def node(message, grid):
        reply = content(record(w=np.ones(2)), 7, train_loss=0.5, square_loss=0.36)
        reply["fedstale.forecast"] = ConfigRecord({"p_finish": 0.25, "quantiles": [1.0, 2.0]})
        return 3.0, reply

    start(FedAvg(selector=_Watching(seen)), {10: node}, 2)
    first, second = seen
    assert first.times_picked == 0
    assert first.p_finish == 0.5
    assert (second.duration_s, second.examples, second.loss) == (3.0, 7.0, 0.5)
    assert second.utility == pytest.approx(7 * 0.6)
    assert second.p_finish == 0.25
    assert second.forecast_at == 3.0


def test_a_selector_sees_the_buffer_and_who_is_in_flight():
    seen = []

    class Watching(Random):
        def __deepcopy__(self, memo):
            return self

        def select(self, candidates, k, now, rng):
            at = candidates.context
            out = candidates.in_flight
            part = candidates.take(slice(0, 1)).in_flight
            assert part.node_ids.tolist() == out.node_ids.tolist()
            assert len(out) == at.n_in_flight
            assert (out.times_picked > out.times_finished).all()
            assert not {*out.node_ids.tolist()} & {*candidates.node_ids.tolist()}
            seen.append((at.buffer_size, at.n_missing, at.n_in_flight))
            return super().select(candidates, k, now, rng)

    nodes = {10 + i: adder(1.0, delay=1.0 + i) for i in range(4)}
    start(FedBuff(3, 3, selector=Watching()), nodes, 2)
    # Three at once; another at the first reply; two at the step; one at the next two replies.
    assert seen == [(3, 3, 0), (3, 2, 2), (3, 3, 1), (3, 1, 1)]


class _Watching(Random):
    def __init__(self, seen):
        self.seen = seen

    def __deepcopy__(self, memo):
        return self

    def select(self, candidates, k, now, rng):
        columns = (*UNKNOWN, "node_ids", "p_finish", "utility")
        known = {name: getattr(candidates, name, None) for name in columns}
        self.seen.append(SimpleNamespace(**known))
        return super().select(candidates, k, now, rng)


def test_a_selector_that_breaks_its_contract_is_named():
    class Wrong(Random):
        def select(self, candidates, k, now, rng):
            return [1, 1]

    with pytest.raises(FedstaleError, match="Wrong"):
        start(FedAvg(selector=Wrong()), {1: adder(1.0), 2: adder(1.0)})


def test_a_selector_may_return_ids_as_numpy_has_them():
    class InOrder(Random):
        def select(self, candidates, k, now, rng):
            return candidates.node_ids[:k]

    def sent(selector):
        _, grid = start(FedBuff(2, 2, selector=selector), {n: adder(1.0) for n in range(2, 5)}, 3)
        return [m.metadata.dst_node_id for _, m in grid.sent]

    found = sent(InOrder())
    assert found == [2, 3] * 3
    assert {type(node) for node in found} == {int}


def test_a_selector_that_picks_no_node_is_asked_again_later():
    tries = []

    class Later(Random):
        def select(self, candidates, k, now, rng):
            tries.append(now)
            return super().select(candidates, k, now, rng) if len(tries) > 3 else []

    start(FedAvg(selector=Later()), {1: adder(1.0)}, 1)
    assert len(tries) == 4


def run_at_once(weighting, schedule, rounds=4, seed=0, **options):
    """Everyone answers after one second, so nothing is ever late."""
    rng = np.random.default_rng(seed)
    initial = record(
        a=rng.normal(size=(4, 3)).astype(np.float32), b=rng.normal(size=3), n=np.array(3)
    )

    def node(k):
        def answer(message, grid):
            version = int(message.metadata.group_id)
            noise = np.random.default_rng((seed, k, version))
            arrays = {name: x.numpy() for name, x in message.content["arrays"].items()}
            moved = {
                name: np.asarray(x + noise.normal(size=x.shape).astype(x.dtype), x.dtype)
                for name, x in arrays.items()
            }
            return 1.0, content(record(**moved), 1 + k, train_loss=float(noise.random()))

        return answer

    strategy = StaleStrategy(schedule=schedule, weighting=weighting, **options)
    return start(strategy, {k: node(k) for k in range(5)}, rounds, initial)[0]


@pytest.mark.parametrize("normalise", ["examples", "buffer_size", "weights"])
@pytest.mark.parametrize(
    "weighting",
    [
        *(ByAge(polynomial(0.5)), ByAge(polynomial(1.0)), Gap(), Gap(of="model")),
        *(DirectionalGap(), EuclideanStaleness(), RelevanceAware()),
    ],
    ids=repr,
)
@pytest.mark.parametrize("schedule", [Schedule(), k_batch_async(5, 5)], ids=["FedAvg", "FedBuff"])
def test_without_staleness_every_weighting_is_fedavg_to_the_last_bit(
    schedule, weighting, normalise
):
    plain = run_at_once(ByAge(constant()), schedule, normalise=normalise)
    weighted = run_at_once(weighting, schedule, normalise=normalise)
    for name in plain.arrays:
        assert plain.arrays[name].data == weighted.arrays[name].data


def test_the_same_seed_gives_the_same_run():
    def run(seed):
        nodes = {k: adder(float(k), 1.0 + k % 3, examples=k + 1) for k in range(8)}
        strategy = GapAware(3, 2, seed=seed)
        result, grid = start(strategy, nodes, 20)
        return w(result).tobytes(), [m.metadata.dst_node_id for _, m in grid.sent], grid.metrics

    assert run(5) == run(5)
    assert run(5)[1] != run(6)[1]


def test_a_second_start_knows_nothing_of_the_first():
    nodes = {k: adder(float(k), 1.0 + k % 3) for k in range(5)}
    strategy = FedBuff(3, 2, weighting=Gap(), server_optimizer=Momentum(0.5))
    first, _ = start(strategy, nodes, 9)
    second, _ = start(strategy, nodes, 9)
    assert w(first).tobytes() == w(second).tobytes()


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(6)), st.integers(1, 4))
def test_the_order_of_arrival_within_one_instant_changes_nothing(order, buffer_size):
    def run(order):
        grid = VirtualGrid({k: adder(0.1 * 3.0**k, 1.0, examples=k + 1) for k in range(6)})
        pull = grid.pull_messages

        def shuffled(ids):
            replies = pull(ids)
            return sorted(replies, key=lambda r: order[r.metadata.src_node_id])

        grid.pull_messages = shuffled
        strategy = FedBuff(6, buffer_size, weighting=Gap(), normalise="examples")
        return w(start(strategy, grid, 7)[0]).tobytes()

    with identity():
        assert run(order) == run(list(range(6)))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_job_has_exactly_one_ending_and_no_version_outlives_its_jobs(data):
    from fedstale.strategies.server.loop import EventLoop

    loops = []
    keep = EventLoop._close

    def close(self):
        keep(self)
        loops.append(self)

    kinds = st.sampled_from(["good", "slow", "silent", "error", "nan"])
    draws = {k: data.draw(st.lists(kinds, min_size=1, max_size=4)) for k in range(4)}
    counts = dict.fromkeys(draws, 0)

    def node(k):
        def answer(message, grid):
            kind = draws[k][counts[k] % len(draws[k])]
            counts[k] += 1
            if kind == "silent":
                return 0.0, None
            if kind == "error":
                return 1.0, Error(2, "no")
            x = message.content["arrays"]["w"].numpy()
            step = np.nan if kind == "nan" else 1.0
            return (9.0 if kind == "slow" else 1.0), content(record(w=x + step))

        return answer

    schedule = data.draw(
        st.sampled_from(
            [Schedule(), k_sync(3, 2), k_batch_sync(3, 2), k_async(3, 2), k_batch_async(3, 2)]
        )
    )
    grid = VirtualGrid({**{k: node(k) for k in range(4)}, 9: adder(1.0, 2.0)})
    with identity(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(EventLoop, "_close", close)
        result, _ = start(StaleStrategy(schedule=schedule), grid, 5, timeout=5)
    (loop,) = loops
    assert sum(loop.jobs.endings.values()) == loop.jobs.n_sent == len(grid.sent)
    assert not loop.jobs.out
    assert len(loop.versions) == 1
    assert np.isfinite(w(result)).all()
    assert max(v for _, v, s, _ in grid.metrics if s == "train") == 5
    assert len({i for i, _ in grid.merged}) == len(grid.merged)


def test_a_run_stops_at_its_goal():
    strategy = FedAvg(until="v 3")
    result, _ = start(
        strategy, {1: adder(1.0)}, 99, evaluate_fn=lambda v, _: MetricRecord({"v": v})
    )
    assert max(result.evaluate_metrics_serverapp) == 3


def test_a_run_stops_when_it_is_told_to_after_a_server_step():
    seen = []

    def should_stop(version, result):
        seen.append((version, sorted(result.evaluate_metrics_serverapp)))
        return version == 2

    result, _ = start(
        FedAvg(),
        {1: adder(1.0)},
        99,
        evaluate_fn=lambda v, _: MetricRecord({"v": v}),
        should_stop=should_stop,
    )
    # Never for version 0, and with what the server has measured of the version.
    assert seen == [(1, [0, 1]), (2, [0, 1, 2])]
    assert max(result.train_metrics_clientapp) == 2
    np.testing.assert_array_equal(w(result), 2.0)


def test_a_run_stops_when_its_time_is_spent():
    result, _ = start(FedAvg(until="10s"), {1: adder(1.0)}, 9999)
    assert 1 < max(result.train_metrics_clientapp) < 20


def test_a_server_whose_jobs_are_all_out_sleeps_until_a_reply_comes():
    class Noting(VirtualGrid):
        def wait(self, until):
            found = super().wait(until)
            woken.append(self.time)
            return found

    woken = []
    grid = Noting({10: adder(1.0, 5.0), 11: adder(1.0, 1000.0)})
    start(StaleStrategy(schedule=k_sync(2, 2)), grid)
    assert woken == [5.0, 1000.0]


def test_evaluation_every_few_versions_also_covers_the_last():
    result, _ = start(
        FedAvg(evaluate_every=3),
        {1: adder(1.0)},
        7,
        evaluate_fn=lambda v, _: MetricRecord({"v": v}),
    )
    assert sorted(result.evaluate_metrics_serverapp) == [0, 3, 6, 7]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"fraction_evaluate": 0.5}, 2),
        ({"min_evaluate_nodes": 3}, 3),
        ({"fraction_evaluate": 0.5, "min_evaluate_nodes": 3}, 3),
        ({"fraction_evaluate": 1.0, "min_evaluate_nodes": 3}, 5),
        ({"min_evaluate_nodes": 9}, 5),
        ({"fraction_evaluate": 0.1}, 0),
        ({}, 0),
    ],
)
def test_a_share_of_the_nodes_evaluates_and_at_least_so_many(options, expected):
    _, grid = start(FedAvg(**options), {n: adder(1.0) for n in range(5)}, 1)
    kinds = [message.metadata.message_type for _, message in grid.sent]
    assert kinds.count("evaluate") == expected


def test_a_share_of_the_nodes_trains_in_each_round():
    _, grid = start(FedAvg(fraction_train=0.5), {n: adder(1.0) for n in range(5)}, 3)
    assert [message.metadata.group_id for _, message in grid.sent] == ["0", "0", "1", "1", "2", "2"]


def test_a_round_waits_for_as_many_nodes_as_it_was_told():
    nodes = {n: adder(1.0) for n in range(3)}
    grid = VirtualGrid(nodes, online=lambda now: range(3) if now >= 100.0 else range(2))
    start(FedAvg(min_available_nodes=3), grid, 1)
    assert [at for at, _ in grid.sent] == [120.0] * 3


def hints(strategy, nodes, rounds):
    _, grid = start(strategy, nodes, rounds)
    return grid.runtime.hints


def test_no_rounds_and_a_buffer_above_the_jobs_in_flight_are_told_and_the_run_goes_on(caplog):
    nodes = {k: adder(1.0, delay=1.0 + k) for k in range(4)}
    assert hints(FedBuff(4, 4), nodes, 1) == []
    assert "num_rounds = 0 trains nothing" in hints(FedBuff(4, 4), nodes, 0)[0]
    (hint,) = hints(FedBuff(2, 5), nodes, 3)
    assert hint.startswith("buffer_size = 5 is above concurrency = 2: ")
    assert "3 jobs or more one after the other" in hint
    assert caplog.text.count("is above concurrency") == 1
    # With as many different nodes as robust rules need, too.
    robust = TrimmedMean(f=1)
    (hint,) = hints(FedBuff(2, 3, robust=robust), nodes, 2)
    assert "2 jobs or more" in hint


@pytest.mark.parametrize(("num_rounds", "timeout"), [("3", 60.0), (-1, 60.0), (3, "x"), (3, nan)])
def test_what_a_run_is_told_is_checked_before_it(num_rounds, timeout):
    with pytest.raises(ConfigError, match=r"strategy\.(num_rounds|timeout) = "):
        start(FedAvg(), {1: adder(1.0)}, num_rounds, timeout=timeout)


def test_a_second_record_of_arrays_that_nothing_reads_is_told_once(caplog):
    def controls(message, grid):
        after, body = adder(1.0)(message, grid)
        body["control variates"] = record(c=np.ones(2))
        return after, body

    (hint,) = hints(FedAvg(), {1: controls, 2: controls}, 3)
    assert "'arrays' is the model" in hint
    assert "['control variates'] is not read" in hint
    assert caplog.text.count("is not read") == 1
    assert hints(FedAvg(), {1: adder(1.0)}, 3) == []

    class Reading(Stage):
        def incoming(self, job, content):
            del content["control variates"]

    assert hints(FedAvg(stages=[Reading()]), {1: controls}, 3) == []


def test_no_rounds_return_the_initial_model():
    result, grid = start(FedAvg(), {1: adder(1.0)}, 0)
    np.testing.assert_array_equal(w(result), 0.0)
    assert not grid.sent


def test_the_settings_of_users_reach_the_clients():
    _, grid = start(FedAvg(), {1: adder(1.0)}, 1, train_config=ConfigRecord({"lr": 0.5}))
    assert dict(grid.sent[0][1].content["config"]) == {"lr": 0.5, "server-round": 1}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Schedule(concurrency=0),
        lambda: Schedule(concurrency=True),
        lambda: Schedule(buffer_size=0),
        lambda: k_sync(2, 3),
        lambda: k_async(2, 3),
        lambda: Schedule(send="after_reply"),
        lambda: Schedule(deadline_s=0.0),
        lambda: Schedule(min_available_nodes=0),
        lambda: Schedule(stragglers="drop"),
        lambda: StaleStrategy(normalise="mean"),
        lambda: StaleStrategy(update="weights"),
        lambda: StaleStrategy(evaluate_every=0),
        lambda: StaleStrategy(min_evaluate_nodes=-1),
        lambda: StaleStrategy(fraction_evaluate=1.5),
        lambda: Schedule(recheck_s=0.0),
        lambda: StaleStrategy(until="soon"),
    ],
)
def test_a_bad_configuration_never_starts_a_run(make):
    with pytest.raises(ConfigError, match="expected"):
        make()


@pytest.mark.parametrize(
    "arrays",
    [record(), record(w=np.array([np.nan])), record(w=np.array([1j]))],
    ids=["empty", "NaN", "complex"],
)
def test_a_model_that_cannot_be_trained_is_rejected_before_the_run(arrays):
    with pytest.raises(ConfigError, match="initial_arrays"):
        start(FedAvg(), {1: adder(1.0)}, 1, arrays)


def test_dividing_by_the_weight_of_a_single_update_warns(caplog):
    StaleStrategy(schedule=k_async(2, 1), normalise="weights")
    assert "undoes every penalty" in caplog.text


def test_records_may_have_other_names():
    def node(message, grid):
        x = message.content["model"]["w"].numpy()
        metrics = MetricRecord({"n": 2})
        return 1.0, RecordDict({"model": record(w=x + 1.0), "m": metrics})

    strategy = FedAvg(arrayrecord_key="model", configrecord_key="c", weighted_by_key="n")
    result, grid = start(strategy, {1: node}, 1)
    np.testing.assert_array_equal(w(result), 1.0)
    assert "c" in grid.sent[0][1].content


def test_a_grid_without_a_clock_is_polled_on_wall_time(monkeypatch):
    monkeypatch.setattr("fedstale.strategies.server.runtime.time.sleep", lambda seconds: None)
    inner = VirtualGrid({k: adder(1.0, 2.0 + k) for k in range(3)})

    class Plain(Grid):
        set_run = create_message = send_and_receive = None
        run = None

        def get_node_ids(self):
            return inner.get_node_ids()

        def push_messages(self, messages):
            return inner.push_messages(messages)

        def pull_messages(self, message_ids):
            inner.move(inner.time + 1.0)
            return inner.pull_messages(message_ids)

    result = FedBuff(2, 2).start(Plain(), record(w=np.zeros(2)), num_rounds=3)
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3]
    assert inner.pulls_in_vain > 0


def test_messages_that_cannot_be_sent_are_not_waited_for_and_count_as_failures():
    grid = VirtualGrid({k: adder(float(k)) for k in (1, 2)})
    push = grid.push_messages

    def half(messages):
        messages = list(messages)
        sent = [m for m in messages if m.metadata.dst_node_id == 2]
        ids = iter(push(sent))
        return [next(ids) if m in sent else None for m in messages]

    grid.push_messages, seen = half, []
    result, _ = start(FedAvg(selector=_Watching(seen)), grid, 2)
    np.testing.assert_array_equal(w(result), 4.0)
    # Such a message counts as a failure of its node.
    known = seen[1].node_ids, seen[1].times_picked, seen[1].times_failed
    assert list(zip(*known, strict=True)) == [(1, 1, 1), (2, 1, 0)]
    grid.push_messages = lambda messages: []
    with pytest.raises(FedstaleError, match="took none"):
        start(FedAvg(), grid, 1)


def test_selectors_see_the_losses_under_the_names_that_validation_has():
    seen = []

    class Seeing(Selector):
        def select(self, candidates, k, now, rng):
            seen.append((candidates.loss.tolist(), candidates.square_loss.tolist()))
            return candidates.node_ids[:k].tolist()

    validation = Validation(loss_key="nll", square_loss_key="nll2")
    strategy = FedBuff(1, 1, selector=Seeing(), validation=validation)
    grid = VirtualGrid({10: adder(1.0, nll=3.0, nll2=9.5, train_loss=7.0)})
    with identity():
        strategy.start(grid, record(w=np.zeros(2)), num_rounds=2)
    assert seen[-1] == ([3.0], [9.5])
