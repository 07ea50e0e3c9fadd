import gc
import time
import weakref
from dataclasses import replace
from time import perf_counter as wall_s

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp.strategy import FedAvg
from tiny import COSTS, counting_app, fleet, message_to

from fedstale.errors import ConfigError, TraceError
from fedstale.simulation import Costs, RunEnded, TraceGrid, clients
from fedstale.strategies import FedBuff
from fedstale.traces import TraceSet

ALWAYS = [(0.0, 1000.0)]
# What a message of the tiny app takes on these links besides its 1 MB of arrays, in s.
ENVELOPE_S = 1e-3


def rows(grid):
    return grid.events().to_pylist()


def test_a_job_downloads_trains_and_uploads_on_the_virtual_clock(make_grid):
    grid = make_grid([ALWAYS])
    (reply,) = grid.send_and_receive([message_to(1000)])
    assert reply.has_content()
    assert grid.now() == pytest.approx(1 + 10 + 1, abs=2 * ENVELOPE_S)
    (job,) = rows(grid)
    assert job["status"] == "reported"
    assert job["downloaded_at"] == pytest.approx(1, abs=ENVELOPE_S)
    assert job["trained_at"] - job["downloaded_at"] == pytest.approx(10)


def test_slow_devices_answer_later_and_replies_come_in_order_of_arrival(make_grid):
    grid = make_grid([ALWAYS, ALWAYS, ALWAYS], compute=[0.5, 2.0, 1.0])
    replies = grid.send_and_receive([message_to(n) for n in (1000, 1001, 1002)])
    assert [r.metadata.src_node_id for r in replies] == [1001, 1002, 1000]


def test_replies_of_one_instant_come_in_the_order_of_sending(make_grid):
    grid = make_grid([ALWAYS] * 4)
    order = [1002, 1000, 1003, 1001]
    replies = grid.send_and_receive([message_to(n) for n in order])
    assert [r.metadata.src_node_id for r in replies] == order


def test_a_device_works_on_one_job_at_a_time(make_grid):
    grid = make_grid([ALWAYS])
    grid.send_and_receive([message_to(1000), message_to(1000)])
    first, second = rows(grid)
    assert second["started_at"] == first["ended_at"]


def test_a_device_that_leaves_loses_the_work_and_the_server_notices_by_heartbeat(make_grid):
    grid = make_grid([[(0.0, 5.0)]])
    (reply,) = grid.send_and_receive([message_to(1000)])
    assert reply.error.code == ErrorCode.NODE_UNAVAILABLE
    assert reply.metadata.reply_to_message_id == "message-0"
    assert reply.metadata.src_node_id == 1
    assert grid.now() == 5.0 + 60.0
    (job,) = rows(grid)
    assert job["status"] == "interrupted"
    assert job["compute_s"] == pytest.approx(4.0, abs=ENVELOPE_S)


def test_with_pause_the_same_device_goes_on_in_its_next_window(make_grid):
    grid = make_grid([[(0.0, 5.0), (100.0, 200.0)]], on_interrupt="pause")
    (reply,) = grid.send_and_receive([message_to(1000)])
    assert reply.has_content()
    assert grid.now() == pytest.approx(95 + 12, abs=2 * ENVELOPE_S)


def test_a_message_that_expires_is_an_error_of_the_superlink_at_that_instant(make_grid):
    grid = make_grid([[(500.0, 900.0)]])
    (reply,) = grid.send_and_receive([message_to(1000, ttl=300.0)])
    assert reply.error.code == ErrorCode.MESSAGE_UNAVAILABLE
    assert grid.now() == 300.0
    (job,) = rows(grid)
    assert (job["status"], job["started_at"]) == ("expired", np.inf)
    assert job["download_s"] == job["compute_s"] == job["upload_s"] == 0.0


def test_a_reply_after_the_message_has_expired_is_late_and_computed_only_for_its_bytes(make_grid):
    calls = []
    app = ClientApp()

    @app.train()
    def train(message, context):
        calls.append(context.node_id)
        return Message(message.content, reply_to=message)

    promised = replace(COSTS, constant_replies=True)
    grid = make_grid([ALWAYS] * 2, app=app, costs=promised)
    grid.send_and_receive([message_to(1001)])
    grid.send_and_receive([message_to(1000, ttl=6.0)])
    grid.sleep(100.0)
    assert (rows(grid)[1]["status"], calls) == ("late", [1001])
    calls.clear()
    grid = make_grid([ALWAYS], app=app)
    (reply,) = grid.send_and_receive([message_to(1000, ttl=6.0)])
    assert reply.error.code == ErrorCode.MESSAGE_UNAVAILABLE
    grid.sleep(100.0)
    (job,) = rows(grid)
    assert (job["status"], calls) == ("late", [1000])
    assert job["reported_at"] == pytest.approx(12, abs=2 * ENVELOPE_S)


def test_a_timeout_leaves_the_missing_in_flight(make_grid):
    grid = make_grid([ALWAYS, ALWAYS], compute=[1.0, 0.01])
    replies = grid.send_and_receive([message_to(1000), message_to(1001)], timeout=50.0)
    assert [r.metadata.src_node_id for r in replies] == [1000]
    assert grid.now() == 50.0
    assert grid.runtime.n_in_flight() == 1
    assert [job["status"] for job in rows(grid)] == ["reported", "in-flight"]


def test_a_reply_exactly_at_the_timeout_counts(make_grid):
    grid, twin = make_grid([ALWAYS]), make_grid([ALWAYS])
    grid.send_and_receive([message_to(1000)])
    assert len(list(twin.send_and_receive([message_to(1000)], timeout=grid.now()))) == 1


def test_of_one_instant_a_reply_comes_before_a_failure_that_was_sent_earlier(make_grid):
    windows = [[(500.0, 900.0)], ALWAYS]
    grid, twin = make_grid(windows), make_grid(windows)
    grid.send_and_receive([message_to(1001)])
    expiring = message_to(1000, ttl=grid.now())
    found = twin.send_and_receive([expiring, message_to(1001)])
    assert twin.now() == grid.now()
    assert [reply.has_error() for reply in found] == [False, True]


def test_pulling_moves_to_the_next_event_only(make_grid):
    grid = make_grid([ALWAYS, ALWAYS], compute=[1.0, 0.5])
    ids = list(grid.push_messages([message_to(1000), message_to(1001)]))
    assert [m.metadata.src_node_id for m in grid.pull_messages(ids)] == [1000]
    assert grid.now() == pytest.approx(12, abs=2 * ENVELOPE_S)
    assert [m.metadata.src_node_id for m in grid.pull_messages(ids[1:])] == [1001]
    assert grid.now() == pytest.approx(22, abs=2 * ENVELOPE_S)


def test_without_a_filter_every_reply_is_pulled_and_with_an_empty_one_none(make_grid):
    grid = make_grid([ALWAYS] * 3, compute=[1.0, 1.0, 0.5])
    ids = list(grid.push_messages([message_to(node) for node in (1000, 1001, 1002)]))
    assert list(grid.pull_messages([])) == []
    assert grid.now() == 0.0
    assert [m.metadata.src_node_id for m in grid.pull_messages()] == [1000, 1001]
    assert [m.metadata.src_node_id for m in grid.pull_messages(message_ids=ids)] == [1002]
    with pytest.raises(TypeError, match="not both"):
        grid.pull_messages(ids, message_ids=ids)


def test_waiting_stops_at_a_deadline_or_at_the_first_reply(make_grid):
    grid = make_grid([ALWAYS])
    grid.push_messages([message_to(1000)])
    assert not grid.wait(5.0)
    assert grid.now() == 5.0
    assert grid.wait(np.inf)
    assert grid.now() == pytest.approx(12, abs=2 * ENVELOPE_S)


def test_sleep_takes_as_long_as_it_is_told_and_never_turns_the_clock_back(make_grid):
    grid, instants = make_grid([ALWAYS]), []
    for seconds in (0.25, 0.0, -5.0, 3.0):
        grid.sleep(seconds)
        instants.append(grid.now())
    assert instants == [0.25, 0.25, 0.25, 3.25]


def test_waiting_for_nobody_moves_to_the_next_change_of_availability(make_grid):
    grid = make_grid([[(300.0, 400.0)]])
    assert not grid.wait(np.inf)
    assert grid.now() == 300.0


def test_only_who_is_online_now_is_listed(make_grid):
    grid = make_grid([ALWAYS, [(0.0, 10.0)], [(10.0, 20.0)]])
    assert list(grid.get_node_ids()) == [1000, 1001]
    grid.sleep(10.0)
    assert list(grid.get_node_ids()) == [1000, 1002]


def test_state_lasts_between_the_messages_of_a_node_and_belongs_to_it_alone(make_grid):
    grid = make_grid([ALWAYS, ALWAYS])
    for expected in (1, 2):
        replies = grid.send_and_receive([message_to(1000), message_to(1001)])
        assert [r.content["metrics"]["times"] for r in replies] == [expected, expected]
    (reply,) = grid.send_and_receive([message_to(1000)])
    assert reply.content["metrics"]["times"] == 3


def test_clients_see_their_partition_and_the_run_config(make_grid):
    seen = []
    app = ClientApp()

    @app.train()
    def train(message, context):
        seen.append((dict(context.node_config), dict(context.run_config)))
        return Message(message.content, reply_to=message)

    grid = make_grid([ALWAYS, ALWAYS], app=app, run_config={"lr": 0.5})
    grid.send_and_receive([message_to(1001)])
    own = {"partition-id": 1, "num-partitions": 2, "device-id": "device-1"}
    assert seen == [(own, {"lr": 0.5})]


def test_an_exception_in_a_client_is_an_error_reply_that_says_what_and_where(make_grid):
    app = ClientApp()

    @app.train()
    def train(message, context):
        raise ValueError("no data here")

    grid = make_grid([ALWAYS], app=app)
    (reply,) = grid.send_and_receive([message_to(1000)])
    assert reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    assert "no data here" in reply.error.reason
    assert "test_trace_grid.py" in reply.error.reason
    assert rows(grid)[0]["status"] == "client-error"


@pytest.mark.parametrize("wrong", [None, "text"])
def test_a_client_that_returns_no_message_is_an_error_reply(make_grid, wrong):
    app = ClientApp()

    @app.train()
    def train(message, context):
        return wrong

    grid = make_grid([ALWAYS], app=app)
    (reply,) = grid.send_and_receive([message_to(1000)])
    assert reply.has_error()


def test_an_unknown_message_type_is_an_error_reply(make_grid):
    grid = make_grid([ALWAYS])
    (reply,) = grid.send_and_receive([message_to(1000, kind="train.other")])
    assert "other" in reply.error.reason


def test_an_unknown_node_is_refused(make_grid):
    grid = make_grid([ALWAYS])
    with pytest.raises(ConfigError, match="dst_node_id = 7"):
        grid.push_messages([message_to(7)])


def test_incomplete_traces_are_refused():
    only_compute = TraceSet(
        device_ids=TraceSet.ideal(1).device_ids, compute=TraceSet.ideal(1).compute
    )
    with pytest.raises(TraceError, match="uplink"):
        TraceGrid(only_compute, counting_app(), costs=COSTS)


def test_when_nothing_can_ever_happen_the_run_ends_with_the_reason(make_grid):
    grid = make_grid([[(0.0, 10.0)]], repeat=False)
    grid.sleep(20.0)
    assert list(grid.get_node_ids()) == []
    grid.sleep(1.0)
    with pytest.raises(RunEnded, match="nothing can ever happen again"):
        grid.get_node_ids()


def test_a_stock_strategy_that_waits_for_nodes_neither_hangs_nor_sleeps(make_grid):
    grid = make_grid([[(0.0, 10.0)], [(700.0, 900.0)], [(700.0, 900.0)]])
    started = wall_s()
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2)
    arrays = message_to(1000).content["arrays"]
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=1)
    assert wall_s() - started < 5
    assert grid.now() >= 700.0
    assert np.array_equal(result.arrays.to_numpy_ndarrays()[0], np.ones(3))


def test_a_strategy_that_waits_for_more_nodes_than_there_are_ends(make_grid):
    grid = make_grid([[(0.0, 400.0)], [(500.0, 900.0)]])
    strategy = FedAvg(min_available_nodes=2)
    with pytest.raises(RunEnded, match="at most 1 of 2 devices"):
        strategy.start(grid=grid, initial_arrays=message_to(1000).content["arrays"])


def test_a_strategy_that_waits_in_vain_ends_after_few_looks_however_often_devices_change(make_grid):
    grid = make_grid([[(0.0, 0.5)]], length=1.0)

    def look(times):
        for _ in range(times):
            grid.get_node_ids()
            grid.sleep(0.1)

    with pytest.raises(RunEnded, match="nothing happened for 7 days"):
        look(2500)
    assert 7 * 86_400.0 < grid.now() < 8 * 86_400.0


def test_the_virtual_end_of_the_run_stops_it(make_grid):
    grid = make_grid([ALWAYS], until_s=5.0)
    with pytest.raises(RunEnded, match="5 s"):
        grid.send_and_receive([message_to(1000)])
    assert grid.now() == 5.0
    (job,) = rows(grid)
    assert job["status"] == "in-flight"
    assert job["compute_s"] == pytest.approx(4.0, abs=ENVELOPE_S)


def test_sleep_and_time_of_the_server_are_virtual_and_cost_no_wall_time(make_grid):
    grid = make_grid([ALWAYS])
    wall, before = wall_s(), time.time()
    time.sleep(3600.0)
    assert time.time() - before == pytest.approx(3600.0)
    assert grid.now() == 3600.0
    assert wall_s() - wall < 1.0


def test_clients_keep_the_wall_clock(make_grid):
    times = []
    app = ClientApp()

    @app.train()
    def train(message, context):
        times.append(time.time())
        return Message(message.content, reply_to=message)

    grid = make_grid([ALWAYS], app=app)
    grid.send_and_receive([message_to(1000)])
    assert abs(times[0] - time.time()) > 86_400.0


def test_after_the_run_the_clock_is_real_again(make_grid):
    real = time.time
    traces = fleet([ALWAYS])
    grid = TraceGrid(traces, counting_app(), costs=COSTS)
    with grid.running():
        assert time.time is not real
    assert time.time is real


class Noting(TraceGrid):
    """A grid of a user's class, which notes what is received from it."""

    def receive(self, until, message_ids):
        replies = super().receive(until, message_ids)
        self.noted = [*getattr(self, "noted", []), *replies]
        return replies


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_grid_of_a_users_class_stays_one_while_an_app_runs(is_ours):
    grid = Noting(fleet([ALWAYS]), counting_app(), costs=COSTS)
    with grid.running(is_ours=is_ours):
        assert isinstance(grid, Noting)
        (reply,) = grid.pull_messages(grid.push_messages([message_to(1000)]))
        arrays = ArrayRecord([np.zeros(3, np.float32)])
        FedBuff(1, 1).start(grid, arrays, num_rounds=2)
    assert type(grid) is Noting
    assert grid.noted[0] is reply
    assert len(grid.noted) == 3


def test_work_follows_the_examples_that_replies_tell(make_grid):
    costs = Costs(work_per_example=1.0, epochs=2, examples=50, model_bytes=0)
    grid = make_grid([ALWAYS, ALWAYS], costs=costs)
    grid.send_and_receive([message_to(1000)])
    grid.send_and_receive([message_to(1000)])
    grid.send_and_receive([message_to(1001)])
    # 50 declared; then 10 by the node's own reply; then 10 by the mean of the others.
    assert [job["work"] for job in rows(grid)] == [100.0, 20.0, 20.0]


@pytest.mark.parametrize(
    ("costs", "missing"),
    [
        (Costs(epochs=1, examples=1), "work-per-example"),
        (Costs(work_per_example=1.0, examples=1), "epochs"),
        (Costs(work_per_example=1.0, epochs=1), "examples"),
    ],
)
def test_unknown_physics_is_an_error_that_names_it(make_grid, costs, missing):
    grid = make_grid([ALWAYS], costs=costs)
    with pytest.raises(ConfigError, match=missing):
        grid.push_messages([message_to(1000)])


def test_the_same_seed_gives_the_same_events_and_draws(make_grid):
    def draws(seed):
        grid = make_grid([ALWAYS] * 3, seed=seed)
        replies = grid.send_and_receive([message_to(n) for n in (1002, 1000, 1001)])
        return {r.content["metrics"]["partition"]: r.content["metrics"]["draw"] for r in replies}

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
    assert len(set(draws(1).values())) == 3


def test_the_calls_of_clients_of_this_process_are_made_a_few_at_a_time(make_grid, monkeypatch):
    alive, most = weakref.WeakSet(), []

    def played(at_once):
        app = ClientApp()

        @app.train()
        def train(message, context):
            alive.add(message)
            most.append(len(alive))
            return Message(
                RecordDict({"c": ConfigRecord({"n": [0] * context.node_id})}), reply_to=message
            )

        monkeypatch.setattr(clients, "_AT_ONCE", at_once)
        most.clear()
        grid = make_grid([ALWAYS] * 150, app=app)
        replies = grid.send_and_receive([message_to(1000 + i) for i in range(150)])
        return [reply.metadata.src_node_id for reply in replies], str(rows(grid)), max(most)

    together, few = played(1000), played(7)
    assert few[:2] == together[:2]
    assert together[2] == 150
    assert few[2] <= 8


def test_grid_goes_with_its_last_user_and_needs_no_collector():
    app = ClientApp()

    @app.train()
    def train(message, context):
        metrics = MetricRecord({"num-examples": 3})
        content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
        return Message(content, reply_to=message)

    grid = TraceGrid(TraceSet.ideal(4), app, costs=Costs(work_per_example=1, epochs=1, examples=3))
    watched = weakref.ref(grid)
    gc.disable()
    try:
        with grid.running():
            FedBuff(2, 2).start(grid, ArrayRecord([np.zeros(3)]), num_rounds=2)
        del grid
        assert watched() is None
    finally:
        gc.enable()
