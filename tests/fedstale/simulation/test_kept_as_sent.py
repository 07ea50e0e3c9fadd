"""Messages are what they were when they were sent, whoever writes to their records later."""

import threading
import time

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from tiny import COSTS, fleet

from fedstale.simulation import TraceGrid
from fedstale.simulation.executors import ClientCall, InlineExecutor

NODES = [1000, 1001, 1002]
TRACES = fleet([[(0.0, 1e6)]] * len(NODES), length=1e6)


def serve(app, main):
    """Run a ServerApp's main with an app of clients, and return what it returns."""
    grid, found = TraceGrid(TRACES, app, costs=COSTS), []
    with grid.running():
        found.append(main(grid, Context(1, 1, {}, RecordDict(), {})))
    return found[0]


def reading(read):
    """Return an app whose clients reply what a function reads in the content that they get."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        metrics = MetricRecord({"read": float(read(message.content)), "num-examples": 1})
        return Message(RecordDict({"m": metrics}), reply_to=message)

    return app


def in_a_config(content, n):
    content["config"]["n"] = n


def in_a_list(content, n):
    content["config"]["list"][0] = n


def in_an_array_of_another_name(content, n):
    content["arrays"]["w"] = Array(np.array([float(n)]))


def in_the_bytes_of_an_array(content, n):
    content["arrays"]["w"].data = Array(np.array([float(n)])).data


def by_another_record(content, n):
    content["config"] = ConfigRecord({"n": n, "list": [n]})
    content["arrays"] = ArrayRecord({"w": Array(np.array([float(n)]))})


READS = {
    in_a_config: lambda content: content["config"]["n"],
    in_a_list: lambda content: content["config"]["list"][0],
    in_an_array_of_another_name: lambda content: content["arrays"]["w"].numpy()[0],
    in_the_bytes_of_an_array: lambda content: content["arrays"]["w"].numpy()[0],
    by_another_record: lambda content: content["config"]["n"],
}


def content_of(n):
    arrays = ArrayRecord({"w": Array(np.array([float(n)]))})
    return RecordDict({"config": ConfigRecord({"n": n, "list": [n]}), "arrays": arrays})


@pytest.mark.parametrize("write", READS)
@pytest.mark.parametrize("anew", [True, False], ids=["a message each", "one message"])
def test_each_client_reads_what_was_there_when_its_message_was_sent(write, anew):
    def main(grid, _):
        content, sent = content_of(0), {}
        message = Message(content, NODES[0], "train")
        for n, node in enumerate(NODES, 1):
            write(content, n)
            if anew:
                message = Message(content, node, "train")
            message.metadata.dst_node_id = node
            (message_id,) = grid.push_messages([message])
            sent[message_id] = n
        write(content, 99)
        replies = []
        while len(replies) < len(sent):
            replies += grid.pull_messages(list(sent))
        return {sent[r.metadata.reply_to_message_id]: int(r.content["m"]["read"]) for r in replies}

    assert serve(reading(READS[write]), main) == {1: 1, 2: 2, 3: 3}


@pytest.mark.parametrize("write", READS)
def test_what_a_client_writes_to_its_message_reaches_nobody_else(write):
    def read_and_write(content):
        found = READS[write](content)
        write(content, 7)
        return found

    def main(grid, _):
        content = content_of(1)
        messages = [Message(content, node, "train") for node in NODES]
        replies = list(grid.send_and_receive(messages))
        return [int(reply.content["m"]["read"]) for reply in replies], READS[write](content)

    assert serve(reading(read_and_write), main) == ([1, 1, 1], 1)


@pytest.mark.parametrize("kept", ["in the state", "in a global"])
def test_a_reply_is_what_it_was_when_the_client_returned(kept):
    app, shared = ClientApp(), ConfigRecord({"n": 0, "list": [0]})

    @app.train()
    def train(message, context):
        state = context.state
        if kept == "in the state":
            state["c"] = state.config_records.get("c", ConfigRecord({"n": 0, "list": [0]}))
        record = state["c"] if kept == "in the state" else shared
        record["n"] += 1
        record["list"][0] += 1
        return Message(RecordDict({"c": record}), reply_to=message)

    def main(grid, _):
        nodes = NODES[:1] * 3 if kept == "in the state" else NODES
        ids = [*grid.push_messages([Message(content_of(1), node, "train") for node in nodes])]
        grid.sleep(1000.0)
        replies = []
        while len(replies) < 3:
            for reply in grid.pull_messages(ids):
                record = reply.content["c"]
                replies.append((record["n"], record["list"][0]))
                record["n"] = 70
                record["list"][0] = 70
        return sorted(replies)

    assert serve(app, main) == [(1, 1), (2, 2), (3, 3)]


def changed(context):
    context.run_config["lr"] = 9.0


def added(context):
    context.run_config["other"] = 1


def taken_out(context):
    del context.run_config["lr"]


def put_in_its_place(context):
    context.run_config = {"lr": 2.0}


def run_on(app, run_config):
    """Call an app in this process; return its reply and the context that it leaves."""
    grid = TraceGrid(TRACES, app, costs=COSTS)
    with grid.running():
        context = Context(1, 1000, {}, RecordDict(), run_config)
        call = ClientCall(Message(content_of(1), 1000, "train"), context, seed=1)
        (answer,) = InlineExecutor(app).run([call])
    return answer.reply, answer.context


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("write", [changed, added, taken_out, put_in_its_place])
def test_a_client_that_writes_to_its_run_config_fails_in_one_sentence(write, raises):
    app = ClientApp()

    @app.train()
    def train(message, context):
        write(context)
        if raises:
            raise KeyError("mine")
        return Message(RecordDict(), reply_to=message)

    reply, context = run_on(app, {"lr": 0.5})
    assert ("mine" if raises else "context.run_config was written to") in reply.error.reason
    assert "\n" not in reply.error.reason
    assert context.run_config == {"lr": 0.5}


def test_a_thread_that_a_library_leaves_behind_fails_no_client(tmp_path, monkeypatch):
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "pooling_library.py").write_text(
        "import threading\n"
        "done = threading.Event()\n"
        "class Manager(threading.Thread):\n"
        "    def run(self):\n"
        "        done.wait()\n"
        "def start():\n"
        "    Manager().start()\n"
    )
    monkeypatch.syspath_prepend(site)
    app, before = ClientApp(), threading.active_count()
    import pooling_library

    @app.train()
    def train(message, context):
        pooling_library.start()
        return Message(RecordDict(), reply_to=message)

    started = time.perf_counter()
    try:
        reply, _ = run_on(app, {})
        assert not reply.has_error()
        assert time.perf_counter() - started < 5
        assert threading.active_count() == before + 1
    finally:
        pooling_library.done.set()
