"""Apps that were written for Flower alone, with the habits of their authors."""

import logging
import re
import sys
import time
from types import MethodType

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.server import LegacyContext, ServerAppComponents, ServerConfig
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg, Result

import fedstale
from fedstale.simulation import Costs, TraceGrid
from fedstale.strategies import FedAvg as OurFedAvg
from fedstale.strategies import FedBuff, OlderClients
from fedstale.traces import TraceSet

COSTS = {"work_per_example": 0.5, "epochs": 1, "examples": 20, "evaluate_work_per_example": 0.1}


def model(w):
    return ArrayRecord({"w": Array(np.full(4, w, np.float32))})


def client(**handlers):
    """Return a ClientApp that adds 1 to the model; handlers take the place of train and others."""
    app = ClientApp()

    def train(message, context):
        w = message.content["arrays"]["w"].numpy()
        metrics = MetricRecord({"num-examples": 20, "train_loss": float(w[0])})
        return Message(RecordDict({"arrays": model(w[0] + 1), "m": metrics}), reply_to=message)

    def evaluate(message, context):
        w = message.content["arrays"]["w"].numpy()
        metrics = MetricRecord({"num-examples": 20, "own": float(w[0])})
        return Message(RecordDict({"m": metrics}), reply_to=message)

    app.train()(handlers.get("train", train))
    app.evaluate()(handlers.get("evaluate", evaluate))
    return app


def server(main):
    app = ServerApp()
    app.main()(main)
    return app


def simulated(main, *, app=None, traces="ideal:3", **options):
    return fedstale.simulate(
        (main if isinstance(main, ServerApp) else server(main), app or client()),
        traces=traces,
        **COSTS,
        **options,
    )


def values(run, source, name):
    rows = run.metrics[(run.metrics.source == source) & (run.metrics.name == name)]
    return dict(zip(rows["version"].tolist(), rows["value"].tolist(), strict=True))


# Loops of their own, without a strategy.


def asked(grid, w, kind="train", **about):
    content = RecordDict({"arrays": model(w)})
    nodes = list(grid.get_node_ids())
    return list(grid.send_and_receive([Message(content, n, kind, **about) for n in nodes]))


def mean(replies):
    return float(np.mean([reply.content["arrays"]["w"].numpy()[0] for reply in replies]))


def alternating(grid, context):
    w = 0.0
    for _ in range(4):
        w = mean(asked(grid, w))
        asked(grid, w, "evaluate")


def evaluated_before(grid, context):
    w = 0.0
    for _ in range(4):
        asked(grid, w, "evaluate")
        w = mean(asked(grid, w))


def with_a_frozen_model(grid, context):
    for _ in range(4):
        asked(grid, 5.0)


def with_a_frozen_first_part(grid, context):
    for number in range(4):
        content = RecordDict({"body": model(7.0), "head": model(number)})
        messages = [Message(content, n, "train") for n in grid.get_node_ids()]
        list(grid.send_and_receive(messages))


def headed(message, context):
    metrics = MetricRecord({"num-examples": 20})
    return Message(RecordDict({"m": metrics}), reply_to=message)


@pytest.mark.parametrize(
    ("loop", "train"),
    [
        (alternating, None),
        (evaluated_before, None),
        (with_a_frozen_model, None),
        (with_a_frozen_first_part, headed),
    ],
)
def test_a_round_of_a_loop_follows_from_what_is_sent_to_be_trained(loop, train):
    app = client(train=train) if train else client()
    run = simulated(loop, app=app)
    assert (run.status, run.summary["rounds"]) == ("finished", 4)
    stopped = simulated(loop, app=app, until="2 rounds")
    assert (stopped.status, stopped.reason) == ("stopped", "reached 2 rounds")


def test_a_query_that_is_sent_a_model_has_a_cost_and_its_model_is_kept(tmp_path):
    app = ClientApp()

    @app.query("score")
    @app.query("local_update")
    def update(message, context):
        w = message.content["arrays"]["w"].numpy()
        return Message(RecordDict({"arrays": model(w[0] + 1)}), reply_to=message)

    def main(grid, context):
        w = 0.0
        for _ in range(3):
            w = mean(asked(grid, w, "query.local_update"))

    run = simulated(main, app=app)
    assert run.status == "failed"
    assert "work.query.local_update missing" in run.reason
    run = simulated(main, app=app, work={"query.local_update": 3.0})
    assert run.status == "finished"
    assert run.jobs["work"].tolist() == [3.0] * 9
    assert run.model["w"][0] == 2.0, "what the last round was sent"


def test_a_query_that_only_reads_costs_nothing_and_a_log_line(caplog):
    app = ClientApp()

    @app.query("size")
    def size(message, context):
        return Message(RecordDict({"m": MetricRecord({"n": 3})}), reply_to=message)

    def main(grid, context):
        for _ in range(2):
            messages = [Message(RecordDict(), n, "query.size") for n in grid.get_node_ids()]
            list(grid.send_and_receive(messages))

    with caplog.at_level(logging.WARNING):
        run = simulated(main, app=app)
    assert (run.status, run.jobs["work"].sum()) == ("finished", 0.0)
    (line,) = [r.getMessage() for r in caplog.records if "query." in r.getMessage()]
    assert "query.size: undeclared, so it costs devices no work" in line
    assert "'costs.work.query.size=2.0'" in line


# Strategies whose loop is not Flower's.


class Loop:
    """Rounds for any strategy, in a class that is none."""

    def start(self, grid, initial_arrays, num_rounds=3, evaluate_fn=None):
        result, arrays = Result(), initial_arrays
        for number in range(1, num_rounds + 1):
            messages = self.configure_train(number, arrays, ConfigRecord(), grid)
            arrays, metrics = self.aggregate_train(number, list(grid.send_and_receive(messages)))
            result.train_metrics_clientapp[number] = metrics
            result.evaluate_metrics_serverapp[number] = evaluate_fn(number, arrays)
        return result


class Mixed(Loop, FedAvg):
    pass


class Deeper(Mixed):
    def start(self, *args, **kwargs):
        return super().start(*args, **kwargs)


class MixedWithOurs(Loop, OurFedAvg):
    pass


class Beside:
    """Rounds of a strategy that it holds."""

    def __init__(self, strategy):
        self.strategy = strategy

    def run(self, *args, **kwargs):
        return Loop.start(self.strategy, *args, **kwargs)


def own_start(kind):
    if kind == "on the object":
        strategy = FedAvg(fraction_evaluate=0.0)
        strategy.start = MethodType(Loop.start, strategy)
        return strategy.start
    if kind == "beside":
        return Beside(FedAvg(fraction_evaluate=0.0)).run
    return {"mixed": Mixed, "deeper": Deeper, "ours": MixedWithOurs}[kind](
        fraction_evaluate=0.0
    ).start


@pytest.mark.parametrize("kind", ["mixed", "deeper", "ours", "on the object", "beside"])
def test_rounds_are_told_wherever_the_loop_stands(kind):
    def main(grid, context):
        own_start(kind)(
            grid=grid,
            initial_arrays=model(0.0),
            num_rounds=3,
            evaluate_fn=lambda number, arrays: MetricRecord(
                {"accuracy": float(arrays["w"].numpy()[0])}
            ),
        )

    run = simulated(main)
    assert (run.status, run.summary["rounds"]) == ("finished", 3), run.reason
    assert run.model["w"][0] == 3.0
    assert values(run, "server", "accuracy") == {1: 1.0, 2: 2.0, 3: 3.0}
    assert values(run, "train", "train_loss") == {1: 0.0, 2: 1.0, 3: 2.0}
    assert len(run.metrics) == len(run.metrics.drop_duplicates(["version", "source", "name"]))
    stopped = simulated(main, until="accuracy 2")
    assert (stopped.status, stopped.summary["rounds"]) == ("stopped", 2)


def test_a_start_of_ones_own_around_that_of_fedstale_tells_each_thing_once():
    class Around(FedBuff):
        def start(self, *args, **kwargs):
            return super().start(*args, **kwargs)

    def main(grid, context):
        Around(2, 1, seed=1).start(
            grid,
            model(0.0),
            4,
            evaluate_fn=lambda version, arrays: MetricRecord({"accuracy": float(version)}),
        )

    run = simulated(main)
    assert values(run, "server", "accuracy") == {i: float(i) for i in range(5)}
    assert (run.metrics["source"] == "server").sum() == 5


# How they end.


@pytest.mark.parametrize(
    ("code", "status"), [(0, "finished"), (None, "finished"), (3, "failed"), ("bad", "failed")]
)
def test_a_server_that_exits_has_ended_as_its_code_says(code, status):
    def main(grid, context):
        FedBuff(2, 1, seed=1).start(grid, model(0.0), 2)
        sys.exit(code)

    run = simulated(main)
    assert run.status == status
    assert run.summary["rounds"] == 2
    assert run.model["w"].size == 4
    if status == "failed":
        assert run.reason == f"the ServerApp called sys.exit({code!r})"


def failing(message, context):
    raise OSError("no such data")


def misshapen(message, context):
    arrays = ArrayRecord({"w": Array(np.zeros(3, np.float32))})
    metrics = MetricRecord({"num-examples": 20})
    return Message(RecordDict({"arrays": arrays, "m": metrics}), reply_to=message)


def own_loop(grid, context):
    for number in range(100):
        asked(grid, float(number))


@pytest.mark.parametrize(
    ("main", "train", "reason"),
    [
        (lambda grid, _: FedBuff(2, 1).start(grid, model(0.0), 9), failing, "no such data"),
        (lambda grid, _: FedAvg().start(grid, model(0.0)), failing, "no such data"),
        (own_loop, failing, "no such data"),
        (lambda grid, _: FedBuff(2, 1).start(grid, model(0.0), 9), misshapen, r"has shape \(3,\)"),
    ],
)
@pytest.mark.parametrize(("traces", "most"), [("ideal:3", 6), ("ideal:200", 200)])
def test_a_run_in_which_nothing_is_good_fails_after_a_few_jobs(main, train, reason, traces, most):
    run = simulated(main, app=client(train=train), traces=traces)
    assert run.status == "failed"
    assert re.search(reason, run.reason)
    assert len(run.jobs) <= most


def test_a_few_bad_devices_end_no_run():
    def train(message, context):
        if context.node_config["partition-id"] < 50:
            raise OSError("no such data")
        metrics = MetricRecord({"num-examples": 20})
        return Message(RecordDict({"arrays": model(1.0), "m": metrics}), reply_to=message)

    def main(grid, context):
        FedBuff(60, 5, seed=1).start(grid, model(0.0), 5)

    run = simulated(main, app=client(train=train), traces="ideal:60")
    assert (run.status, run.summary["rounds"]) == ("finished", 5)


# Clients of the older API.


class Older(NumPyClient):
    def get_parameters(self, config):
        return [np.full(4, 2.0, np.float32)]

    def fit(self, parameters, config):
        return [parameters[0] + 1], 20, {"round": config["server-round"], "text": "ignored"}

    def evaluate(self, parameters, config):
        return float(parameters[0][0]), 20, {"accuracy": 0.5}


def older_client(kind=Older):
    return ClientApp(client_fn=lambda context: kind().to_client())


def test_a_strategy_of_fedstale_trains_clients_of_the_older_api():
    def main(grid, context):
        strategy = FedBuff(3, 3, fraction_evaluate=1.0, seed=1)
        result = strategy.start(grid, model(0.0), 4)
        assert list(result.arrays) == ["w"]

    run = simulated(main, app=older_client())
    assert (run.status, run.summary["rounds"]) == ("finished", 4), run.reason
    assert run.model["w"][0] == 4.0
    assert values(run, "train", "round") == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
    assert values(run, "evaluate", "eval_loss") == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
    assert set(values(run, "evaluate", "accuracy").values()) == {0.5}


def components(strategy):
    def server_fn(context):
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=3))

    return ServerApp(server_fn=server_fn)


def test_server_app_components_take_a_strategy_of_fedstale():
    run = simulated(components(FedBuff(3, 3, seed=1)), app=older_client())
    assert (run.status, run.summary["rounds"]) == ("finished", 3), run.reason
    assert next(iter(run.model.values()))[0] == 2.0 + 3.0


def test_components_without_a_model_to_begin_with_are_one_sentence():
    class Bare(NumPyClient):
        fit, evaluate = Older.fit, Older.evaluate

    run = simulated(components(FedBuff(3, 3)), app=older_client(Bare))
    assert run.status == "failed"
    assert "begins with what a client's get_parameters returns" in run.reason


@pytest.mark.parametrize(
    ("fit", "reason"),
    [
        (lambda self, p, c: ([p[0], p[0]], 20, {}), "2 arrays do not fit the model, which has 1"),
        (lambda self, p, c: ([p[0][:2]], 20, {}), r"has shape \(2,\): expected \(4,\)"),
        (lambda self, p, c: ([p[0]], 0, {}), "examples"),
    ],
)
def test_answers_of_older_clients_are_checked_like_others(fit, reason):
    kind = type("Bad", (Older,), {"fit": fit})
    run = simulated(
        lambda grid, _: FedBuff(3, 3).start(grid, model(0.0), 4), app=older_client(kind)
    )
    assert run.status == "failed"
    assert re.search(reason, run.reason), run.reason


@pytest.mark.parametrize("is_on", [True, False])
def test_on_devices_older_clients_are_known_by_their_first_failure(is_on, caplog):
    grid = TraceGrid(TraceSet.ideal(3), older_client(), costs=Costs(**COSTS), seed=1)
    strategy = FedBuff(3, 3, stages=[OlderClients(is_on=is_on)], seed=1)
    with grid.running(), caplog.at_level(logging.WARNING):
        result = strategy.start(grid, model(0.0), 3)
    assert result.arrays["w"].numpy()[0] == 3.0
    statuses = grid.events()["status"].to_pylist()
    assert statuses.count("client-error") == (0 if is_on else 3)
    told = [r for r in caplog.records if "clients are of Flower's older API" in r.getMessage()]
    assert len(told) == (not is_on)


def test_the_stage_in_a_strategy_and_that_of_a_simulation_are_one():
    strategy = FedBuff(3, 3, stages=[OlderClients()], seed=1)
    run = simulated(lambda grid, _: strategy.start(grid, model(0.0), 3), app=older_client())
    assert (run.status, run.model["w"][0]) == ("finished", 3.0)


POLLING = """
import time


def until_something_has_happened():
    end = time.monotonic() + 20
    for _ in range(5):
        time.sleep(0.05)
        if time.monotonic() > end:
            raise TimeoutError("nothing has happened")
"""


def test_a_library_that_polls_what_it_has_started_waits_on_the_wall(tmp_path, monkeypatch):
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "polling_library.py").write_text(POLLING)
    monkeypatch.syspath_prepend(site)
    started = time.perf_counter()

    def main(grid, context):
        import polling_library

        polling_library.until_something_has_happened()
        FedBuff(2, 1).start(grid, model(0.0), 2)

    run = simulated(main)
    assert (run.status, run.summary["virtual_s"]) == ("finished", 0.0), run.reason
    assert time.perf_counter() - started >= 0.25


def test_a_strategy_of_fedstale_in_a_workflow_is_one_sentence():
    def main(grid, context):
        LegacyContext(context=context, config=ServerConfig(1), strategy=FedBuff(2, 1))

    run = simulated(main)
    assert run.status == "failed"
    assert "FedBuff in a workflow of flwr.server" in run.reason


# Errors in many lines.


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n\n\tfit did not return a tuple.\nIt returned:\n", "fit did not return a tuple."),
        ("\n=====\n  no data\n=====\n", "no data"),
        ("   \r\n\nno data", "no data"),
        ("in loading Net:\n\tsize mismatch for w\n", "in loading Net: size mismatch for w"),
        ("", ""),
    ],
)
def test_an_error_is_told_by_its_first_line_that_has_words(text, said, tmp_path):
    app = ClientApp()

    @app.train()
    def train(message, context):
        raise ValueError(text)

    def main(grid, context):
        asked(grid, 0.0)

    run = simulated(main, app=app, out=tmp_path / "run")
    (error,) = run.summary["client_errors"]
    assert error["error"] == f"ValueError: {said}".strip()
    whole = f"{error['error']} ({error['where']})"
    assert error["where"].startswith("test_other_apps.py:")
    (advice,) = run.advice
    assert advice.do == f"Mend {whole}"
    assert (
        run.reason == f"none of the 3 replies from 3 devices was good; the first: error 2: {whole}"
    )
    assert whole in run.report().read_text(encoding="utf-8")
