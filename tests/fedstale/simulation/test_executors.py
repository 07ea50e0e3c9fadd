"""Executors run clients: the same answers wherever, and nobody harms anybody else."""

import random
import sys
import threading
import time

import numpy as np
import pytest
import torch
from array_kinds import KINDS
from client_calls import KEEPING, calls, weights
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from local_workers import LocalWorkers
from small_app import CLIENT, write_small_app
from tiny import counting_app, message_to

from fedstale.errors import ConfigError
from fedstale.flower import (
    identity,
    written_array,
)
from fedstale.simulation import InlineExecutor
from fedstale.simulation.executors import ClientCall, choice, workers
from fedstale.simulation.executors import base as contract
from fedstale.simulation.executors.base import quick_manual_seed
from fedstale.simulation.executors.batched import written_each
from fedstale.simulation.executors.choice import AutoExecutor, executor_for
from fedstale.simulation.flower_app import FlowerApp


@pytest.fixture
def load(tmp_path):
    """Return what loads the client of an app that no other test has imported, with its state."""
    app = FlowerApp.find(write_small_app(tmp_path, client=KEEPING))
    with app.importable():
        yield app.load_client


def test_workers_give_the_answers_of_one_process_in_the_order_of_the_calls(load):
    with LocalWorkers(load, 2) as pool:
        theirs = pool.run(calls(5))
        again = pool.run(list(reversed(calls(5))))
    own = InlineExecutor(load()).run(calls(5))
    assert weights(theirs) == weights(own) == list(reversed(weights(again)))
    assert len(set(weights(own))) == 5


def test_state_written_in_a_worker_comes_back(load):
    with LocalWorkers(load, 1) as pool:
        (answer,) = pool.run(calls(1))
    assert answer.context.state["kept"]["x"] == 1


def test_a_client_that_kills_its_worker_gets_an_error_reply_and_the_others_their_answers(load):
    with LocalWorkers(load, 1, kills=lambda call: call.context.node_id == 1001) as pool:
        answers = pool.run(calls(8))
    assert [a.reply.has_error() for a in answers] == [False, True, *[False] * 6]
    assert answers[1].reply.error.code == ErrorCode.CLIENT_APP_CRASHED
    assert answers[1].reply.error.reason == "the worker process died twice"
    del answers[1]
    own = InlineExecutor(load()).run(calls(8))
    del own[1]
    assert weights(answers) == weights(own)


@pytest.mark.parametrize(
    ("code", "took_s", "words"),
    [
        (7, 0.1, ": exit code 7"),
        (1, 0.1, ": exit code 1"),
        (1, 0.6, ": its client did not end within 0.5 s (client-limit-s)"),
        (-9, 0.6, ": killed by SIGKILL"),
    ],
)
def test_how_a_worker_died_is_said_in_words(code, took_s, words):
    assert workers._how(code, took_s, 0.5) == words


def test_draws_depend_on_the_seed_of_the_call_alone():
    executor = InlineExecutor(counting_app())

    def draw(seed):
        with identity(1):
            message = message_to(1000)
        context = Context(1, 1000, {"partition-id": 0}, RecordDict(), {})
        (answer,) = executor.run([ClientCall(message, context, seed)])
        return answer.reply.content["metrics"]["draw"]

    first = draw(3)
    np.random.random()
    assert draw(3) == first
    assert draw(4) != first


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_every_seed_of_32_bits_is_accepted(seed):
    with identity(1):
        message = message_to(1000)
    context = Context(1, 1000, {"partition-id": 0}, RecordDict(), {})
    (answer,) = InlineExecutor(counting_app()).run([ClientCall(message, context, seed)])
    assert answer.reply.has_content()


def replies(app, n=1):
    with identity(1):
        return [a.reply for a in InlineExecutor(app).run(calls(n))]


def app_that(train):
    app = ClientApp()
    app.train()(train)
    return app


def answered(message):
    metrics = MetricRecord({"num-examples": 1})
    return Message(
        RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message
    )


def test_a_worker_that_dies_once_in_the_middle_changes_no_answer(load):
    died = []

    def kills(call):
        if call.context.node_id != 1002 or died:
            return False
        died.append(call)
        return True

    with LocalWorkers(load, 2, kills=kills) as pool:
        theirs = pool.run(calls(5))
    assert died
    assert weights(theirs) == weights(InlineExecutor(load()).run(calls(5)))


def test_arrays_go_to_workers_once_a_version_and_are_given_back(load):
    with LocalWorkers(load, 1) as pool:
        shared = calls(6)
        record = shared[0].message.content["arrays"]
        for call in shared:
            call.message.content["arrays"] = record
        pool.run(shared)
        assert len(pool.put) == 1
        for _ in range(12):
            pool.run(calls(1))
        assert len(pool.put) <= 9
    assert not pool.put


# What a client does that it should not.


def test_sys_exit_is_an_error_reply():
    reply, *_ = replies(app_that(lambda message, context: sys.exit("enough")))
    assert reply.error.code == ErrorCode.CLIENT_APP_CRASHED
    assert "sys.exit('enough')" in reply.error.reason


def test_a_client_that_changes_what_it_was_given_changes_nothing_for_others(make_grid):
    seen = []

    def train(message, context):
        seen.append(message.content["arrays"].to_numpy_ndarrays()[0].tolist())
        array = next(iter(message.content["arrays"].values()))
        array.data = written_array(np.ones(3, np.float32)).data
        message.content["arrays"] = ArrayRecord([np.zeros(1)])
        message.content["config"]["server-round"] = 99
        message.metadata.ttl = 0.5
        context.run_config["mine"] = 1
        return answered(message)

    grid = make_grid([[(0, 1000)], [(0, 1000)]], app=app_that(train))
    content = RecordDict(
        {
            "arrays": ArrayRecord([np.zeros(3, np.float32)]),
            "config": ConfigRecord({"server-round": 1}),
        }
    )
    sent = [Message(content, node, "train") for node in (1000, 1001)]
    assert len(list(grid.send_and_receive(sent))) == 2
    assert seen == [[0, 0, 0], [0, 0, 0]]
    assert content["config"]["server-round"] == 1
    assert content["arrays"].to_numpy_ndarrays()[0].tolist() == [0, 0, 0]
    assert [message.metadata.ttl for message in sent] == [43_200, 43_200]


def test_threads_that_a_client_leaves_are_waited_for():
    ended = []

    def train(message, context):
        threading.Thread(target=lambda: (time.sleep(0.2), ended.append(1))).start()
        return answered(message)

    assert replies(app_that(train))[0].has_content()
    assert ended == [1]


def test_a_thread_that_does_not_end_is_an_error_reply(monkeypatch):
    monkeypatch.setattr(contract, "_THREADS_PATIENCE_S", 0.05)
    stop = threading.Event()

    def train(message, context):
        threading.Thread(target=stop.wait, name="endless").start()
        return answered(message)

    (reply,) = replies(app_that(train))
    stop.set()
    assert "left the thread 'endless' running" in reply.error.reason


def test_a_client_that_seeds_globally_does_not_seed_the_server():
    def train(message, context):
        np.random.seed(0)
        torch.manual_seed(0)
        return answered(message)

    np.random.seed(5)
    torch.manual_seed(5)
    expected = np.random.random(), torch.rand(1).item()
    np.random.seed(5)
    torch.manual_seed(5)
    replies(app_that(train))
    assert (np.random.random(), torch.rand(1).item()) == expected


@pytest.mark.parametrize("n_normals", [0, 1, 2, 625])
def test_pythons_stream_is_the_servers_again_after_clients(n_normals):
    def train(message, context):
        random.gauss()
        random.shuffle([*range(1000)])
        return answered(message)

    random.seed(5)
    for _ in range(n_normals):
        random.gauss()
    state = random.getstate()
    assert all(not reply.has_error() for reply in replies(app_that(train)))
    assert random.getstate() == state
    drawn = random.gauss(), random.random()
    random.setstate(state)
    assert (random.gauss(), random.random()) == drawn


@pytest.mark.parametrize("generator", [np.random.MT19937, np.random.PCG64])
@pytest.mark.parametrize("n_normals", [0, 1, 2, 625])
def test_numpys_stream_is_the_servers_again_after_clients(generator, n_normals):
    def train(message, context):
        np.random.standard_normal(3)
        np.random.set_bit_generator(np.random.SFC64(0))
        return answered(message)

    before = np.random.get_bit_generator()
    np.random.set_bit_generator(generator(5))
    try:
        np.random.standard_normal(n_normals)
        state = np.random.get_state(legacy=False)
        assert all(not reply.has_error() for reply in replies(app_that(train)))
        np.testing.assert_equal(np.random.get_state(legacy=False), state)
    finally:
        np.random.set_bit_generator(before)


# The quick ways are the slow ways.


@pytest.mark.parametrize("seed", [0, 7, -1, 2**64 - 1, -(2**63)])
def test_the_quick_seed_is_torchs_seed(seed):
    torch.manual_seed(seed)
    expected = torch.rand(3)
    with quick_manual_seed():
        assert torch.manual_seed(seed) is torch.default_generator
        assert torch.equal(torch.rand(3), expected)
        with pytest.raises((RuntimeError, ValueError)):
            torch.manual_seed(2**64)


@given(st.data(), KINDS, arrays_of.array_shapes(min_dims=1, min_side=0, max_dims=3), st.booleans())
def test_the_arrays_of_a_stack_hold_the_bytes_of_numpys(data, dtype, shape, is_turned):
    stack = data.draw(arrays_of.arrays(dtype, shape))
    stack = stack.T if is_turned else stack
    theirs = [Array(np.array(stack[i, ...], order="C")) for i in range(len(stack))]
    assert written_each(stack) == theirs


# The choice.


@pytest.mark.usefixtures("local_workers")
def test_the_default_moves_to_processes_when_training_takes_long_and_changes_no_answer(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(choice, "_MEASURED_S", 0.0)
    monkeypatch.setattr(choice, "_SHORT_CALL_S", 0.0)
    load = FlowerApp.find(write_small_app(tmp_path)).load_client
    with AutoExecutor(load(), load, workers=2) as auto:
        first = auto.run(calls(4))
        assert auto.description.startswith("2 processes: ")
        second = auto.run(calls(4))
    assert weights(first) == weights(second) == weights(InlineExecutor(load()).run(calls(4)))


@pytest.mark.parametrize(("spent", "short"), [(1e9, 0.0), (0.0, 1e9)])
def test_the_default_stays_where_it_is_when_training_is_short(tmp_path, monkeypatch, spent, short):
    monkeypatch.setattr(choice, "_MEASURED_S", spent)
    monkeypatch.setattr(choice, "_SHORT_CALL_S", short)
    load = FlowerApp.find(write_small_app(tmp_path)).load_client
    with AutoExecutor(load(), load, workers=2) as auto:
        auto.run(calls(4))
        assert auto.description.startswith("inline, in this process: ")
        assert auto.batch == 1


def test_no_client_runs_twice_unasked(tmp_path):
    lines = tmp_path / "lines"

    def train(message, context):
        with lines.open("a") as file:
            file.write("trained\n")
        return Message(RecordDict({"arrays": ArrayRecord([np.zeros(3)])}), reply_to=message)

    with identity(1):
        AutoExecutor(app_that(train), lambda: None, workers=2).run(calls(3))
    assert lines.read_text().count("trained") == 3


SHARED = {
    "generator": ("rng = np.random.default_rng(1)", "w = w + rng.normal(size=3)"),
    "count": ("times = 0", "global times; times += 1; w = w + times"),
    "heads": ("heads = {}", "k = message.metadata.dst_node_id % 2; heads[k] = w + 1"),
    "cache": ("cache = {}", "cache.setdefault(message.metadata.dst_node_id, w)"),
    "loaded": ("loaded = None", "global loaded; loaded = loaded or [1.0]"),
}


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.usefixtures("local_workers")
def test_the_default_stays_where_clients_share_what_processes_would_not(
    tmp_path, monkeypatch, kind
):
    monkeypatch.setattr(choice, "_SHORT_CALL_S", 0.0)
    made, used = SHARED[kind]
    client = CLIENT.replace("app = ClientApp()", f"app = ClientApp()\n{made}").replace(
        '    metrics = MetricRecord({"train', f'    {used}\n    metrics = MetricRecord({{"train'
    )
    app = FlowerApp.find(write_small_app(tmp_path, client=client))
    with app.importable(), executor_for(app, app.load_client()) as auto:
        auto.run(calls(4))
        monkeypatch.setattr(choice, "_MEASURED_S", 0.0)
        auto.run(calls(4))
        is_shared = kind in ("generator", "count", "heads")
        assert auto.is_remote != is_shared
        assert (
            f"clients share small_app_under_test.client.{made.split()[0]}" in auto.description
        ) is (is_shared)


def test_generators_without_a_seed_repeat_with_the_run_and_differ_between_clients():
    def train(message, context):
        drawn = np.random.default_rng().normal(size=3)
        return Message(RecordDict({"arrays": ArrayRecord([drawn])}), reply_to=message)

    with identity(1):
        first, again = (weights(InlineExecutor(app_that(train)).run(calls(3))) for _ in range(2))
    assert first == again
    assert len({one.tobytes() if hasattr(one, "tobytes") else str(one) for one in first}) == 3
    assert np.random.default_rng().normal() != np.random.default_rng().normal()


@pytest.mark.usefixtures("local_workers")
def test_executors_have_names(tmp_path):
    app = FlowerApp.find(write_small_app(tmp_path))
    assert isinstance(executor_for(app, ClientApp()), AutoExecutor)
    assert isinstance(executor_for(app, ClientApp(), "inline", 4), InlineExecutor)
    assert isinstance(executor_for(app, ClientApp(), "auto", 1), InlineExecutor)
    with executor_for(app, ClientApp(), "auto", 2) as pool:
        assert pool.description == "2 processes"
    with pytest.raises(ConfigError, match="small does not say how"):
        executor_for(app, ClientApp(), "batched")


def test_without_ray_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    app = FlowerApp.find(write_small_app(tmp_path))
    with pytest.raises(ConfigError, match=r"needs ray, .*\[ray\]"):
        executor_for(app, ClientApp(), "ray")
