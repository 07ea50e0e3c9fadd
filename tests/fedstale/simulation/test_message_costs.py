"""What each message and each reply costs: its own bytes, and the work of its type and action."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg as OldFedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from tiny import COSTS, fleet, message_to
from virtual_grid import identity

from fedstale.compat import server_fn_on
from fedstale.errors import ConfigError
from fedstale.flower import Size, content_bytes
from fedstale.simulation import Costs, InlineExecutor, TraceGrid
from fedstale.simulation.costs import CostModel
from fedstale.traces import Series, TraceSet

ALWAYS = [(0, 1000)]
WIRE_S = 2e-3
"""What envelope, names and numbers of a message take, at most."""
N = 1000
"""Numbers in the model: 4,000 bytes."""


def model(n=N):
    return ArrayRecord([np.zeros(n, np.float32)])


def ask(node_id, kind="train", n=N, **config):
    records = {"arrays": model(n)} | ({"config": ConfigRecord(config)} if config else {})
    return Message(RecordDict(records), node_id, kind)


def app_replying(n_of, mods=None, examples=10):
    """Return an app whose reply has `n_of(node_id)` numbers."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message, context):
        arrays = ArrayRecord([np.zeros(n_of(context.node_id), np.float32)])
        metrics = MetricRecord({"num-examples": examples})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @app.train("keys")
    def keys(message, context):
        return Message(RecordDict({"c": ConfigRecord({"key": b"x" * 100})}), reply_to=message)

    @app.query("sums")
    def sums(message, context):
        return Message(RecordDict({"m": MetricRecord({"sum": 1.0})}), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        metrics = MetricRecord({"num-examples": context.node_id - 997, "loss": 1.0})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def rows(grid):
    return grid.events().to_pandas().to_dict("records")


# Bytes.


def test_a_reply_of_a_tenth_of_the_model_takes_a_tenth_of_the_uplinks_time(make_grid):
    # 1 MB at 8 Mbit/s is 1 s each way; 10 examples of 1 unit are 10 s.
    grid = make_grid([ALWAYS] * 2, app=app_replying(lambda node: N if node == 1000 else N // 10))
    replies = grid.send_and_receive([ask(1000), ask(1001)])
    assert [reply.metadata.src_node_id for reply in replies] == [1001, 1000]
    whole, tenth = rows(grid)
    assert whole["upload_s"] == pytest.approx(1.0, abs=WIRE_S)
    assert tenth["upload_s"] == pytest.approx(0.1, abs=WIRE_S)
    assert (whole["reported_at"], tenth["reported_at"]) == pytest.approx((12, 11.1), abs=2 * WIRE_S)
    assert tenth["uploaded_bytes"] == pytest.approx(1e5, abs=1e3)


def test_without_a_stand_in_a_reply_takes_the_bytes_that_flower_would_send(make_grid):
    costs = replace(COSTS, model_bytes=None)
    grid = make_grid([ALWAYS], app=app_replying(lambda node: 250_000), costs=costs)
    (reply,) = grid.send_and_receive([ask(1000, n=10)])
    on_the_wire = sum(len(o.deflate()) for o in get_all_nested_objects(reply).values())
    (job,) = rows(grid)
    assert job["uploaded_bytes"] == content_bytes(reply.content)
    assert job["uploaded_bytes"] > 1e6
    assert job["upload_s"] == pytest.approx(8 * job["uploaded_bytes"] / 8e6)
    assert job["uploaded_bytes"] == pytest.approx(on_the_wire, rel=0.001)


def test_bytes_in_a_config_record_stand_for_as_much_as_those_of_arrays(make_grid):
    app = ClientApp()

    @app.train()
    def train(message, context):
        packed = ConfigRecord({"packed": [b"x" * N, b"y" * N], "note": "z" * 100})
        return Message(RecordDict({"c": packed}), reply_to=message)

    grid = make_grid([ALWAYS], app=app)
    grid.send_and_receive([ask(1000)])
    assert rows(grid)[0]["uploaded_bytes"] == pytest.approx(5e5, abs=1e3)


def test_metrics_alone_do_not_stand_for_more_than_they_are(make_grid):
    grid = make_grid([ALWAYS], app=app_replying(lambda node: N))
    grid.send_and_receive([ask(1000, "evaluate")])
    (job,) = rows(grid)
    assert job["downloaded_bytes"] == pytest.approx(1e6, abs=1e3)
    assert 300 < job["uploaded_bytes"] < 600


@pytest.mark.parametrize("longer", [{"lr": "x" * 1100}, {"lr" + "x" * 1000: "x" * 100}])
@pytest.mark.parametrize("value", [str, lambda text: [text[:50], text[50:]], str.encode])
def test_text_bytes_and_names_in_a_config_are_counted_to_the_letter(longer, value):
    def size(**texts):
        config = ConfigRecord({name: value(text) for name, text in texts.items()})
        return content_bytes(RecordDict({"config": config}))

    assert size(**longer) == size(lr="x" * 100) + 1000


def test_the_size_of_the_first_reply_is_not_that_of_the_next(make_grid):
    sizes = iter([N, N // 2, N // 10, N])
    grid = make_grid([ALWAYS], app=app_replying(lambda node: next(sizes)))
    for _ in range(4):
        grid.send_and_receive([ask(1000)])
    uploads = [job["upload_s"] for job in rows(grid)]
    assert uploads == pytest.approx([1.0, 0.5, 0.1, 1.0], abs=WIRE_S)


def test_a_device_starts_its_second_job_when_its_true_reply_is_gone(make_grid):
    grid = make_grid([ALWAYS], app=app_replying(lambda node: N // 10))
    grid.send_and_receive([ask(1000), ask(1000)])
    first, second = rows(grid)
    assert second["started_at"] == first["reported_at"] == pytest.approx(11.1, abs=2 * WIRE_S)
    assert second["reported_at"] == pytest.approx(22.2, abs=4 * WIRE_S)


@pytest.mark.parametrize("window", [11.5, 12.5])
def test_a_device_that_leaves_while_it_uploads_has_sent_a_part_of_its_own_reply(make_grid, window):
    # The reply is twice as long as the message: 2 s.
    grid = make_grid([[(0, window)]], app=app_replying(lambda node: 2 * N))
    (reply,) = grid.send_and_receive([ask(1000)])
    assert reply.has_error()
    (job,) = rows(grid)
    assert (job["status"], job["reason"]) == ("interrupted", "went offline while uploading")
    assert job["uploaded_bytes"] == pytest.approx((window - 11) * 1e6, abs=1e4)
    assert job["work"] == 10.0


def test_a_failing_client_uploads_what_it_says_and_no_model(make_grid):
    app = ClientApp()

    @app.train()
    def train(message, context):
        raise ValueError("no data")

    grid = make_grid([ALWAYS], app=app)
    grid.send_and_receive([ask(1000)])
    (job,) = rows(grid)
    assert job["status"] == "client-error"
    assert job["uploaded_bytes"] < 500
    assert job["reported_at"] == pytest.approx(11, abs=WIRE_S)


# Work.


def test_an_action_that_trains_nothing_costs_its_bytes_alone(make_grid):
    costs = replace(COSTS, work={"train.keys": 0, "query.sums": 3.0})
    grid = make_grid([ALWAYS], app=app_replying(lambda node: N), costs=costs)
    for kind in ("train", "train.keys", "query.sums"):
        grid.send_and_receive([ask(1000, kind)])
    assert [job["work"] for job in rows(grid)] == [10.0, 0.0, 3.0]
    assert rows(grid)[1]["compute_s"] == 0.0
    assert rows(grid)[1]["download_s"] > 0.9


def test_a_function_says_the_work_of_a_message_or_leaves_it_to_the_table(make_grid):
    def work(message):
        config = message.content.config_records.get("config", {})
        return float(config["steps"]) if "steps" in config else None

    grid = make_grid([ALWAYS], app=app_replying(lambda node: N), work=work)
    grid.send_and_receive([ask(1000, steps=25)])
    grid.send_and_receive([ask(1000)])
    assert [job["work"] for job in rows(grid)] == [25.0, 10.0]


@pytest.mark.parametrize("units", [-1.0, float("nan"), "5", True])
def test_a_function_that_returns_no_work_units_is_an_error(make_grid, units):
    grid = make_grid([ALWAYS], app=app_replying(lambda node: N), work=lambda message: units)
    with pytest.raises(ConfigError, match=r"work\('train' message\) returned"):
        grid.push_messages([ask(1000)])


def test_evaluation_costs_the_examples_that_each_node_evaluates(make_grid):
    # Nodes evaluate 3, 4 and 5 examples at 0.5 units, and train on 10.
    grid = make_grid([ALWAYS] * 3, app=app_replying(lambda node: N))
    nodes = (1000, 1001, 1002)
    for kind in ("evaluate", "train", "evaluate"):
        grid.send_and_receive([ask(node, kind) for node in nodes])
    assert [job["work"] for job in rows(grid)] == [1.5, 2.0, 2.5, 10.0, 10.0, 10.0, 1.5, 2.0, 2.5]
    assert [job["compute_s"] for job in rows(grid)[:3]] == pytest.approx([1.5, 2.0, 2.5])


def test_an_evaluation_of_unknown_examples_is_an_error_unless_they_are_declared(make_grid):
    app = ClientApp()

    @app.evaluate()
    def evaluate(message, context):
        return Message(RecordDict({"m": MetricRecord({"loss": 1.0})}), reply_to=message)

    for examples in (None, 6):
        costs = Costs(evaluate_work_per_example=0.5, examples=examples)
        grid = make_grid([ALWAYS], app=app, costs=costs)
        if examples is None:
            with pytest.raises(ConfigError, match="states no num-examples"):
                grid.send_and_receive([ask(1000, "evaluate")])
        else:
            grid.send_and_receive([ask(1000, "evaluate")])
            assert rows(grid)[0]["work"] == 3.0


@pytest.mark.parametrize("kind", ["train", "evaluate"])
@pytest.mark.parametrize("stated", [1e300, float("inf"), float("nan"), -7, [10, 10], 2e9])
def test_an_unusable_number_of_examples_is_not_learnt_and_moves_no_expectation(kind, stated):
    costs = Costs(work_per_example=1.0, evaluate_work_per_example=1.0, epochs=1, examples=10)
    book = CostModel(costs)

    def learn(node_id, examples):
        content = RecordDict({"m": MetricRecord({"num-examples": examples})})
        with identity():
            answer = Message(content, reply_to=ask(node_id, kind))
            book.learn(kind, node_id, answer, Size(9, 9), 18, 1.0)
            return book.work(ask(99, kind), kind, 99).work

    assert [learn(node, n) for node, n in enumerate((20, 20, 20))] == [20.0] * 3
    assert 10.0 <= learn(3, stated) <= 20.0
    assert [learn(3, n) for n in (20, 1e9, stated, 20)][-1] == 20.0
    # What is so small that it is lost beside a large number takes no sum below 0.
    book = CostModel(costs)
    assert all(learn(0, n) >= 0.0 for n in (0.1, 1e9 - 0.3, 1e-300, 0.7, 1e-9, 0.0))


def test_an_unusable_number_of_examples_of_an_evaluation_does_not_end_the_run(make_grid):
    app = ClientApp()

    @app.evaluate()
    def evaluate(message, context):
        metrics = MetricRecord({"num-examples": 1e300})
        return Message(RecordDict({"m": metrics}), reply_to=message)

    grid = make_grid([ALWAYS], app=app, costs=Costs(evaluate_work_per_example=0.5))
    grid.send_and_receive([ask(1000, "evaluate")])
    assert rows(grid)[0]["work"] == 0.0


# SecAgg+, by Flower's own workflow and mod.


class Line(NumPyClient):
    def fit(self, parameters, config):
        return [array + 1.0 for array in parameters], 10, {}

    def evaluate(self, parameters, config):
        return 1.0, 4, {}


def secure_run(n_nodes=5, n=4000, **costs):
    """Run one round of SecAgg+ and return its events."""
    app = ClientApp(client_fn=lambda context: Line().to_client(), mods=[secaggplus_mod])
    traces = TraceSet.constant(n_nodes, compute=1.0, downlink_bit_per_s=8e6, uplink_bit_per_s=8e6)
    declared = {"work_per_example": 1.0, "epochs": 1, "examples": 10} | costs
    grid = TraceGrid(traces, app, costs=Costs(**declared))
    strategy = OldFedAvg(
        fraction_evaluate=0.0,
        min_fit_clients=n_nodes,
        min_available_clients=n_nodes,
        initial_parameters=ndarrays_to_parameters([np.zeros(n, np.float32)]),
    )
    with grid.running(), server_fn_on(grid):
        context = Context(1, 1, {}, RecordDict(), {})
        legacy = LegacyContext(context, config=ServerConfig(num_rounds=1), strategy=strategy)
        secure = SecAggPlusWorkflow(num_shares=n_nodes, reconstruction_threshold=n_nodes - 1)
        DefaultWorkflow(fit_workflow=secure)(grid, legacy)
    return grid.events().to_pandas()


@pytest.mark.filterwarnings("ignore")
def test_secagg_pays_one_training_a_round_and_each_stage_its_bytes():
    events = secure_run()
    assert (events["status"] == "reported").all()
    stages = [events.iloc[i : i + 5] for i in range(0, 20, 5)]
    assert len(events) == 20
    assert [set(stage["work"]) for stage in stages] == [{0.0}, {0.0}, {10.0}, {0.0}]
    up = [stage["uploaded_bytes"] for stage in stages]
    down = [stage["downloaded_bytes"] for stage in stages]
    # The model of 16 kB goes down and, masked, as 64-bit numbers up, both in the third stage.
    assert all(max(part) < 6_000 for stage, part in enumerate(up) if stage != 2)
    assert all(max(part) < 6_000 for stage, part in enumerate(down) if stage != 2)
    assert min(down[2]) > 16_000
    assert min(up[2]) > 32_000
    # Nothing is waited for but one training and the transfers.
    assert events["reported_at"].max() == pytest.approx(10.0, abs=0.3)


@pytest.mark.filterwarnings("ignore")
def test_keys_of_secagg_do_not_grow_with_the_model_that_a_stand_in_stands_for():
    plain, scaled = secure_run(), secure_run(model_bytes=16_000_000)
    for stage in (0, 1, 3):
        part = slice(5 * stage, 5 * stage + 5)
        ratio = scaled["uploaded_bytes"][part].mean() / plain["uploaded_bytes"][part].mean()
        assert ratio == pytest.approx(1.0, abs=0.05)
    assert scaled["uploaded_bytes"][10:15].min() == pytest.approx(32e6, rel=0.02)


# Laziness, and the same bytes in all ways.


class Counting(InlineExecutor):
    """Notes the nodes whose clients run."""

    def __init__(self, app, batch=1):
        super().__init__(app)
        self.batch, self.nodes = batch, []

    def run(self, calls):
        self.nodes += [call.context.node_id for call in calls]
        return super().run(calls)


def test_a_client_runs_for_its_size_only_if_its_device_gets_so_far(make_grid):
    # They leave while downloading, training and uploading.
    executor = Counting(app_replying(lambda node: N))
    grid = make_grid([[(0, 0.5)], [(0, 5)], [(0, 11.5)], ALWAYS], app=executor)
    grid.send_and_receive([ask(1000 + i) for i in range(4)])
    assert sorted(executor.nodes) == [1002, 1003]
    assert [job["status"] for job in rows(grid)] == ["interrupted"] * 3 + ["reported"]


def test_an_app_that_promises_the_size_of_replies_runs_what_is_delivered_alone(make_grid):
    executor = Counting(app_replying(lambda node: N))
    costs = replace(COSTS, constant_replies=True)
    grid = make_grid([ALWAYS, [(0, 23.5)], ALWAYS], app=executor, costs=costs)
    grid.send_and_receive([ask(1000)])
    executor.nodes.clear()
    ids = grid.push_messages([ask(1001), ask(1002)])
    grid.sleep(200.0)
    assert executor.nodes == []
    replies = grid.pull_messages(ids)
    assert sorted(reply.has_error() for reply in replies) == [False, True]
    assert executor.nodes == [1002]
    first, _, third = rows(grid)
    assert first["uploaded_bytes"] == third["uploaded_bytes"]


def test_a_broken_promise_ends_the_run_and_names_what_promised(make_grid):
    costs = replace(COSTS, constant_replies=True)
    app = app_replying(lambda node: N if node == 1000 else N // 2)
    grid = make_grid([ALWAYS] * 2, app=app, costs=costs)
    grid.send_and_receive([ask(1000)])
    with pytest.raises(ConfigError, match=r"node 1001 replied to 'train' .* constant-replies"):
        grid.send_and_receive([ask(1001)])


def times_asked(context):
    """Count a message in the state of its node; return how many there were."""
    seen = context.state.config_records.get("seen", ConfigRecord({"times": 0}))
    context.state["seen"] = ConfigRecord({"times": seen["times"] + 1})
    return seen["times"] + 1


def stateful_app():
    """Return an app whose replies have sizes and states of their own, drawn and counted."""
    app = ClientApp()

    @app.train("other")
    @app.train()
    def train(message, context):
        times = times_asked(context)
        size = int(np.random.randint(1, 2000)) + 50 * (times - 1)
        metrics = MetricRecord({"num-examples": 10 + size % 7, "times": times})
        arrays = message.content["arrays"].to_numpy_ndarrays()
        padding = ConfigRecord({"padding": bytes(size)})
        content = {"arrays": ArrayRecord([arrays[0] + size]), "m": metrics, "padding": padding}
        return Message(RecordDict(content), reply_to=message)

    return app


def constant_app():
    """Return an app whose replies have one size, and states."""
    app = ClientApp()

    @app.train("other")
    @app.train()
    def train(message, context):
        metrics = MetricRecord({"num-examples": 10, "times": times_asked(context)})
        metrics["draw"] = float(np.random.random())
        content = {"arrays": message.content["arrays"], "m": metrics}
        return Message(RecordDict(content), reply_to=message)

    return app


def uneven(n=12):
    """Return devices that come and go, of all speeds."""
    windows = [
        [(s + 7.0 * i % 30, s + 36.0 + 11.0 * i % 41) for s in range(0, 9000, 90)] for i in range(n)
    ]
    traces = fleet(windows, length=9000.0, compute=[0.3 + 0.2 * (i % 6) for i in range(n)])
    return replace(traces, uplink=Series.constant([2e5 * (1 + i % 5) for i in range(n)]))


def buffered(batch=1, *, cut=None, constant=False):
    """Return what the server saw, and the events; `cut` takes the run up again in another grid."""
    costs = Costs(
        work_per_example=1.0, epochs=1, examples=10, model_bytes=200_000, constant_replies=constant
    )

    def grid():
        executor = Counting(constant_app() if constant else stateful_app(), batch)
        return TraceGrid(uneven(), executor, costs=costs, seed=3)

    first = grid()
    with first.running():
        ids = list(first.push_messages([ask(1000 + i) for i in range(12)]))
        ids += list(first.push_messages([ask(1000 + i) for i in range(0, 12, 3)]))
        seen = take(first, ids, 5)
        for kind in ("train", "train.other", "train"):
            ids += list(first.push_messages([ask(1000 + i, kind) for i in range(0, 12, 2)]))
        seen += take(first, ids, 12)
        if not cut:
            return seen + take(first, ids, len(ids)), first.events().to_pandas()
        state = first.state_dict()
    second = grid()
    second.load_state_dict(state)
    with second.running():
        return seen + take(second, ids, len(ids)), second.events().to_pandas()


def take(grid, ids, n):
    """Pull until n of the messages are answered by now; return what the server saw."""
    seen = []
    left = {i for i in ids if grid._jobs.of_message(i).row in grid._jobs.open}
    while len(ids) - len(left) < n:
        for reply in grid.pull_messages(left):
            left.discard(reply.metadata.reply_to_message_id)
            what = None if reply.has_error() else dict(reply.content["m"])
            seen.append((grid.now(), reply.metadata.reply_to_message_id, what))
    return seen


@pytest.mark.parametrize("batch", [3, 100])
@pytest.mark.parametrize("constant", [False, True])
def test_what_is_run_together_changes_neither_events_nor_states(batch, constant):
    alone, events = buffered(1, constant=constant)
    together, others = buffered(batch, constant=constant)
    assert alone == together
    pd.testing.assert_frame_equal(events, others, check_exact=True)
    assert len({row[1] for row in alone}) == len(events) == 34
    assert len(set(events["uploaded_bytes"].round(3))) > (2 if constant else 16)
    assert {"reported", "interrupted"} <= set(events["status"])


@pytest.mark.parametrize("batch", [1, 100])
@pytest.mark.parametrize("constant", [False, True])
def test_a_run_that_is_taken_up_again_in_the_middle_is_the_same(batch, constant):
    whole, events = buffered(batch, constant=constant)
    resumed, others = buffered(batch, cut=True, constant=constant)
    assert whole == resumed
    pd.testing.assert_frame_equal(events, others, check_exact=True)


def test_a_reply_that_is_pulled_after_it_expired_is_made_again_and_the_same(make_grid, monkeypatch):
    monkeypatch.setattr("fedstale.simulation.clients._SWEEP_AT", 1)
    app, seen = constant_app(), []
    for waits in (False, True):
        grid = make_grid([ALWAYS] * 2, app=Counting(app))
        (first,) = grid.push_messages([message_to(1000, ttl=50.0)])
        grid.sleep(30.0)
        if waits:
            # Its message has expired when others run, and its reply is no longer kept.
            grid.sleep(500.0)
            for _ in range(3):
                grid.send_and_receive([message_to(1001)])
            assert grid._jobs.open[0].run.reply is None
        (reply,) = grid.pull_messages([first])
        seen.append(dict(reply.content["m"]))
    assert seen[0] == seen[1]
