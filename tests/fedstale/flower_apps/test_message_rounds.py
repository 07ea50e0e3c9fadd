"""What is read off the messages of an app, and what goes on after a crash in its second start."""

from itertools import count

import numpy as np
import pytest
from interruptions import files, power_cut
from written_apps import APPS, PYPROJECT, four_devices, write_app

import fedstale
from fedstale.config import SimulationConfig
from fedstale.simulation.run import simulate
from fedstale.traces import Availability, Series, TraceSet

HEAD = """
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client, server = ClientApp(), ServerApp()


@client.train()
def train(message, context):
    (w,) = message.content["arrays"].to_numpy_ndarrays()
    metrics = MetricRecord({"loss": float(w[0]), "num-examples": 4})
    content = {"arrays": ArrayRecord([w + 1]), "metrics": metrics}
    return Message(RecordDict(content), reply_to=message)


@client.query()
def query(message, context):
    metrics = MetricRecord({"own": context.node_config["partition-id"]})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


@server.main()
def main(grid, context):
"""


@pytest.fixture
def ran(tmp_path):
    """Return a function that simulates an app with a main function of some lines."""

    def go(main, *, traces=None, **options):
        app = tmp_path / "app"
        app.mkdir()
        (app / "pyproject.toml").write_text(PYPROJECT.format(name="written"))
        lines = (f"    {line}\n" for line in main.strip().splitlines())
        (app / "written.py").write_text(HEAD + "".join(lines))
        traces = traces or four_devices()
        return fedstale.simulate(app, traces=traces, out=tmp_path / "run", **options)

    return go


ASYNCHRONOUS = """
w, n = np.zeros(2), 0
nodes = sorted(grid.get_node_ids())
first = RecordDict({"arrays": ArrayRecord([w])})
out = set(grid.push_messages([Message(first, node, "train") for node in nodes]))
while n < 8:
    for reply in grid.pull_messages(out):
        out.remove(reply.metadata.reply_to_message_id)
        n += 1
        w = w + EACH
        content = RecordDict({"arrays": ArrayRecord([w])})
        out.update(grid.push_messages([Message(content, reply.metadata.src_node_id, "train")]))
"""


def test_an_asynchronous_loop_has_as_many_rounds_as_it_sends_models(ran):
    run = ran(ASYNCHRONOUS.replace("EACH", "1.0"))
    assert run.summary["rounds"] == 8
    np.testing.assert_array_equal(next(iter(run.model.values())), [8.0, 8.0])


def test_the_same_model_sent_again_is_no_new_round(ran):
    run = ran(ASYNCHRONOUS.replace("EACH", "(1.0 if n % 4 == 0 else 0.0)"))
    assert run.summary["rounds"] == 2
    assert len(run.jobs) == 12


def test_rounds_of_an_app_that_waits_for_some_replies_only(ran):
    # The last device takes 400 s for what the others do in four.
    slow = TraceSet(
        device_ids=TraceSet.ideal(4).device_ids,
        availability=Availability.always(4),
        compute=Series.constant(np.array([1.0, 1.0, 1.0, 0.01])),
        downlink=Series.constant(np.full(4, 8e6)),
        uplink=Series.constant(np.full(4, 8e6)),
    )
    main = """
w = np.zeros(2)
for _ in range(5):
    content = RecordDict({"arrays": ArrayRecord([w])})
    messages = [Message(content, node, "train") for node in sorted(grid.get_node_ids())]
    replies = list(grid.send_and_receive(messages, timeout=20))
    w = np.mean([reply.content["arrays"].to_numpy_ndarrays()[0] for reply in replies], axis=0)
"""
    run = ran(main, traces=slow)
    assert run.summary["rounds"] == 5
    losses = run.metrics[run.metrics["name"] == "loss"]
    assert dict(zip(losses["version"], losses["value"], strict=True)) == {
        i + 1: float(i) for i in range(5)
    }


def test_a_strategy_that_is_made_when_the_app_runs_is_heard(ran):
    main = """
from flwr.serverapp.strategy import FedAvg, Result

class Late(FedAvg):
    def start(self, grid, initial_arrays, **options):
        messages = self.configure_train(1, initial_arrays, ConfigRecord(), grid)
        replies = grid.send_and_receive(messages)
        arrays, metrics = self.aggregate_train(1, replies)
        options["evaluate_fn"](1, arrays)
        return Result(arrays=arrays)

measure = lambda number, arrays: MetricRecord({"accuracy": 0.5})
Late(fraction_evaluate=0.0).start(grid, ArrayRecord([np.zeros(2)]), evaluate_fn=measure)
"""
    run = ran(main)
    assert run.summary["metrics"] == {"train loss": 0.0, "server accuracy": 0.5}
    assert run.summary["rounds"] == 1
    np.testing.assert_array_equal(next(iter(run.model.values())), [1.0, 1.0])


def test_queries_before_training_do_not_count_among_its_rounds(ran):
    main = """
from flwr.serverapp.strategy import FedAvg

for _ in range(3):
    grid.send_and_receive([Message(RecordDict(), n, "query") for n in sorted(grid.get_node_ids())])
FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord([np.zeros(2)]), num_rounds=2)
for _ in range(2):
    grid.send_and_receive([Message(RecordDict(), n, "query") for n in sorted(grid.get_node_ids())])
"""
    run = ran(main)
    assert run.summary["rounds"] == 2
    of_queries = run.metrics[run.metrics.source == "query"]
    assert of_queries["version"].tolist() == [1, 2, 3, 4, 5]
    assert of_queries["value"].tolist() == [1.5] * 5
    assert run.metrics[run.metrics.source == "train"]["version"].tolist() == [1, 2]


def test_an_app_that_never_sends_anything_says_how_it_ended(ran):
    run = ran("pass")
    assert (run.status, run.reason) == ("finished", "the app came to its end")


@pytest.mark.usefixtures("every_version_kept", "no_pages")
def test_a_run_with_several_starts_goes_on_after_a_crash(tmp_path):
    assert (APPS / "two_starts.py").is_file()
    app = write_app(tmp_path / "app", "two_starts", OURS=True)
    config = SimulationConfig(app=str(app), traces="given")
    simulate(config, tmp_path / "whole", traces=four_devices())
    for step in (1, 3):
        folder, calls = tmp_path / f"{step}", count(1)
        with power_cut(lambda version, now: next(calls) == step):  # noqa: B023 - in the block
            simulate(config, folder, traces=four_devices())
        simulate(config, folder, traces=four_devices(), resume=True)
        assert files(folder) == files(tmp_path / "whole")


def test_replies_that_are_pulled_after_their_strategy_are_no_rounds(ran):
    main = """
from flwr.serverapp.strategy import FedAvg

FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord([np.zeros(2)]), num_rounds=1, timeout=1)
early = grid.push_messages([Message(RecordDict(), sorted(grid.get_node_ids())[0], "query")])
FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord([np.zeros(2)]), num_rounds=2)
list(grid.pull_messages(early))
"""
    run = ran(main)
    assert run.status == "finished", run.reason
    assert run.summary["rounds"] == 3


def test_a_start_that_calls_that_of_its_base_for_each_round_counts_on(ran):
    main = """
from flwr.serverapp.strategy import FedAvg

class Again(FedAvg):
    def start(self, grid, initial_arrays, num_rounds=3, **options):
        arrays = initial_arrays
        for _ in range(num_rounds):
            result = super().start(grid, arrays, num_rounds=1, **options)
            arrays = result.arrays
        return result

measure = lambda number, arrays: MetricRecord({"w": float(arrays.to_numpy_ndarrays()[0][0])})
Again(fraction_evaluate=0.0).start(grid, ArrayRecord([np.zeros(2)]), evaluate_fn=measure)
"""
    run = ran(main)
    assert run.summary["rounds"] == 3
    server = run.metrics[run.metrics.source == "server"]
    assert dict(zip(server["version"], server["value"], strict=True)) == {i: i for i in range(4)}
    assert run.metrics[run.metrics.source == "train"]["version"].tolist() == [1, 2, 3]
