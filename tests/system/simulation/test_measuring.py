"""How an app's costs are measured: apps of known costs, busy machines, clients that fail."""

import json
import random
import re
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
from small_app import CLIENT, PYPROJECT, write_small_app
from typer.testing import CliRunner

from fedstale.cli.main import app as command
from fedstale.config import SimulationConfig
from fedstale.errors import ConfigError
from fedstale.simulation import measuring
from fedstale.simulation.measuring import CLIENTS, RUNS, Timing, measure, pasted
from fedstale.simulation.run import simulate
from fedstale.traces import TraceSet

UNDECLARED = PYPROJECT[: PYPROJECT.index("[tool.fedstale]")]
KEYS = {"work-per-example", "epochs", "examples", "evaluate-work-per-example"}
PAGE = (Path(__file__).parents[3] / "docs" / "costs.md").read_text(encoding="utf-8")
TRAIN, EVALUATE = "work-per-example", "evaluate-work-per-example"


def app_that(
    tmp_path, *, burns="0.0", examples="10 + partition % 5", first="", pyproject=UNDECLARED
):
    """Return the small app, whose clients take processor time and have examples as given.

    Args:
        burns: seconds of a message, by n = examples and `trains`.
        examples: of a client by `partition`.
        first: a line with which a message begins.
    """
    begin = f"""    {first or "pass"}
    import time
    end = time.process_time()
    x, y = data(context.node_config["partition-id"])
    n, trains, calls = len(x), "train" in message.metadata.message_type, CALLS.__next__()
    end += {burns}
    while time.process_time() < end:
        pass
"""
    client = CLIENT.replace("10 + partition % 5", examples)
    client = client.replace('    x, y = data(context.node_config["partition-id"])\n', begin)
    client = client.replace(
        "app = ClientApp()", "import itertools\nCALLS = itertools.count()\napp = ClientApp()"
    )
    return write_small_app(tmp_path / "app", client=client, pyproject=pyproject)


def measured(app, nodes=6, **settings):
    return measure(SimulationConfig(app=str(app), traces="a TraceSet", **settings), nodes)


def run_command(app, *options, nodes=6):
    arguments = ["simulate", str(app), "--traces", f"synthetic:{nodes}", "--measure-costs"]
    return CliRunner().invoke(command, [*arguments, *options])


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Run each client five times and no more; what is burnt here is known to the millisecond."""
    monkeypatch.setattr(measuring, "LEAST_S", 0.0)


# Known costs.


def test_work_by_example_is_that_of_an_example_and_epoch_without_what_each_message_takes(tmp_path):
    # Two epochs.
    burns = "0.01 + 0.0004 * n * 2 if trains else 0.0003 * n"
    found = measured(app_that(tmp_path, burns=burns, examples="10 + 10 * (partition % 5)"))
    train, evaluate = found.timings[TRAIN], found.timings[EVALUATE]
    assert train.middle == pytest.approx(0.0004, rel=0.15)
    assert train.fixed == pytest.approx(0.01, rel=0.15)
    assert evaluate.middle == pytest.approx(0.0003, rel=0.15)
    assert found.costs.work_per_example == pytest.approx(train.middle * found.phones.middle, 0.01)
    assert found.warnings() == []
    assert f"besides {train.fixed:.3g}" in pasted(found)


def test_clients_of_one_size_take_all_for_work_and_the_table_says_so(tmp_path):
    found = measured(app_that(tmp_path, burns="0.012 if trains else 0.006", examples="12"))
    assert found.timings[TRAIN].middle * 2 * 12 == pytest.approx(0.012, rel=0.15)
    assert found.timings[EVALUATE].middle * 12 == pytest.approx(0.006, rel=0.15)
    assert found.costs.examples == 12
    assert "equal in size" in pasted(found)


def test_a_fixed_time_is_what_is_left_of_sizes_far_apart():
    sizes = [10, 20, 40, 80, 100]
    timing = Timing.of(sizes, [[3 + 0.5 * n, 9.0 * n] for n in sizes])
    assert (timing.middle, timing.low, timing.high) == pytest.approx((0.5, 0.5, 0.5))
    assert timing.fixed == pytest.approx(3.0)
    near = Timing.of([10, 12, 14], [[3 + 0.5 * n] for n in (10, 12, 14)])
    assert (near.fixed, near.is_apart) == (0.0, False)
    small = Timing.of(sizes, [[1 + 0.5 * n] for n in sizes])
    assert (small.fixed, small.is_apart) == (0.0, True)
    # Less time for more examples is no fixed time.
    assert Timing.of([10, 100], [[2.0], [1.0]]).fixed == 0.0


def test_one_delayed_client_changes_little():
    sizes = [10, 20, 40, 80, 100]
    runs = [[0.5 * n] for n in sizes]
    runs[1] = [50.0]
    timing = Timing.of(sizes, runs)
    assert timing.middle == pytest.approx(0.5, rel=0.05)
    assert timing.high > 2.0


# What is not to be trusted.


def test_a_busy_machine_is_warned_of_in_the_table_and_beside_json(tmp_path):
    # Each fourth run is undisturbed.
    app = app_that(tmp_path, burns="0.001 * (1 + calls % 4)", examples="12")
    result = run_command(app)
    assert f"# Warning: {TRAIN}" in result.stdout
    assert "does nothing else" in result.stdout
    assert set(tomllib.loads(result.stdout)["tool"]["fedstale"]) == KEYS
    result = run_command(app, "--json")
    assert set(json.loads(result.stdout)) >= KEYS
    assert "does nothing else" in result.stderr


def test_clients_whose_examples_take_different_times_are_warned_of(tmp_path):
    found = measured(app_that(tmp_path, burns="0.01 if context.node_id % 2 else 0.03"))
    assert all("more examples" in text for text in found.warnings())
    assert len(found.warnings()) == 2


# What runs, and for how long.


@pytest.fixture
def ran(tmp_path):
    """Return a function that measures an app of 30 nodes and returns the nodes that have trained.

    They are those of all its calls so far, in their order.
    """
    first = """if "train" in message.metadata.message_type:
        with open(__file__ + ".ran", "a") as file:
            print(context.node_id, file=file)
"""
    app = app_that(tmp_path, first=first)

    def measure():
        assert run_command(app, nodes=30).exit_code == 0
        return (app / "small_app_under_test" / "client.py.ran").read_text().split()

    return measure


def test_the_seed_says_who_is_measured_and_not_what_was_drawn_before(ran):
    for drawn_before in range(3):
        random.seed(drawn_before)
        nodes = ran()
    assert len(set(nodes)) == CLIENTS


def test_a_few_clients_run_in_turn_after_each_has_loaded_what_it_needs(ran):
    nodes = ran()
    who = nodes[:10:2]
    assert len(set(who)) == CLIENTS == 5
    assert nodes == [node for node in who for _ in range(2)] + who * (RUNS - 1)


def test_a_client_that_takes_long_runs_twice_and_no_other_does(monkeypatch, ran):
    monkeypatch.setattr(measuring, "_BUDGET_S", 0.0)
    assert len(ran()) == 2


def test_runs_go_on_for_some_seconds(monkeypatch, ran):
    monkeypatch.setattr(measuring, "LEAST_S", 1.0)
    started = time.perf_counter()
    assert len(ran()) > CLIENTS * (RUNS + 1)
    assert time.perf_counter() - started > 1.0


@pytest.mark.timeout(60)
def test_a_server_that_asks_the_same_nodes_for_ever_is_ended(tmp_path):
    endless = UNDECLARED.replace("rounds = 3", "rounds = 1_000_000_000")
    found = measured(app_that(tmp_path, pyproject=endless), nodes=2)
    assert {timing.clients for timing in found.timings.values()} == {2}


def test_clients_compute_on_one_thread(tmp_path):
    first = (
        "import threadpoolctl, numpy; "
        "assert {lib['num_threads'] for lib in threadpoolctl.threadpool_info()} == {1}"
    )
    assert measured(app_that(tmp_path, first=first)).timings


# The table.


def test_the_measured_table_can_be_pasted_and_runs(tmp_path):
    result = run_command(write_small_app(tmp_path / "app", pyproject=UNDECLARED))
    assert result.exit_code == 0, result.output
    table = tomllib.loads(result.stdout)["tool"]["fedstale"]
    assert set(table) == KEYS
    assert table["epochs"] == "local-epochs"
    assert 10 <= table["examples"] <= 14
    assert 0 < table[TRAIN] < 1
    assert 0 < table[EVALUATE] < 1
    assert "Not measured" not in result.output
    again = write_small_app(tmp_path / "again", pyproject=f"{UNDECLARED}\n{result.stdout}\n")
    config = SimulationConfig(app=str(again), traces="a TraceSet")
    traces = TraceSet.constant(4, compute=1.0, downlink_bit_per_s=1e6, uplink_bit_per_s=1e6)
    assert simulate(config, tmp_path / "run", traces=traces).status == "finished"


def test_the_table_is_of_median_phones_and_says_how_to_undo_it(tmp_path):
    result = run_command(app_that(tmp_path, burns="0.01"))
    table = tomllib.loads(result.stdout)["tool"]["fedstale"]
    (given,) = re.findall("--set '(.*)'", result.stdout)
    seconds = dict(word.removeprefix("costs.").split("=") for word in given.split())
    (phones,) = re.findall(r"times ([0-9.]+)\.\n", result.stdout)
    for key in (TRAIN, EVALUATE):
        assert table[key] == pytest.approx(float(seconds[key]) * float(phones), rel=0.02)


def test_what_no_client_is_asked_for_is_said_to_be_as_declared(tmp_path):
    """The server of the template evaluates on a set of its own, and never asks a client to."""
    new = CliRunner().invoke(command, ["new", str(tmp_path / "starter")])
    assert new.exit_code == 0, new.output
    result = run_command(tmp_path / "starter")
    assert result.exit_code == 0, result.output
    said, table = result.output.split("[tool.fedstale]")
    assert f"# Not measured, since no client was asked for it: {EVALUATE}. " in said
    declared = (tmp_path / "starter" / "pyproject.toml").read_text()
    (line,) = [x for x in declared.splitlines() if x.startswith(EVALUATE)]
    assert line.split("#")[0].strip() in table
    assert f"{TRAIN} = 1.0\n" not in table.replace("evaluate-", "")


# The median phone.


def test_the_page_has_the_published_times_and_the_rates_that_follow():
    rates = iter(measuring.phone_rates())
    for network, (work, times) in measuring.TIMES.items():
        told = (f"{times[phone]:.1f} ms" if phone in times else "-" for phone in measuring.SCORES)
        columns = [network, f"{work:g}", *told]
        columns.append(", ".join(f"{next(rates):.1f}" for _ in times))
        assert f"| {' | '.join(columns)} |" in PAGE
    rates = measuring.phone_rates()
    assert f"median of these is {np.median(rates):.1f}" in PAGE
    assert f"range {min(rates):.1f} to {max(rates):.1f}" in PAGE
    scores = [*measuring.SCORES.values(), measuring.MEDIAN_SCORE]
    assert all(str(score) in PAGE for score in scores)


def test_the_products_are_nearly_all_of_mobilenets_multiply_adds():
    """Its first, its depthwise and its last layers are the rest."""
    products = sum(np.prod(shape) for shape in measuring._PRODUCTS) / 1e9
    assert 0.9 < products / measuring.TIMES["MobileNet 1.0 224"][0] < 1.0


def test_a_core_that_takes_twice_as_long_is_worth_half_the_phones(monkeypatch):
    now = 0.0

    def clock():
        nonlocal now
        now += step
        return now

    monkeypatch.setattr(measuring.time, "process_time", clock)
    step = 0.01
    fast = measuring.phones_of_core()
    step = 0.02
    slow = measuring.phones_of_core()
    assert np.array(slow) * 2 == pytest.approx(np.array(fast))
    # 0.54 of 10^9 in 10 ms are 54 a second.
    assert fast.middle == pytest.approx(54 / 16.9, rel=0.01)
    assert fast.low < fast.middle < fast.high


# Clients that remember.

REMEMBERING = """
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.client import NumPyClient

ARRAYS = ArrayRecord([np.zeros(3, np.float32)])


def answer(message):
    content = {"arrays": ARRAYS, "metrics": MetricRecord({"num-examples": 10, "loss": 1.0})}
    return Message(RecordDict(content), reply_to=message)
"""

LOOP = """
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    def ask(kind, nodes):
        arrays = ArrayRecord([np.zeros(3, np.float32)])
        content = RecordDict({"arrays": arrays, "config": ConfigRecord()})
        list(grid.send_and_receive([Message(content, node, kind) for node in nodes]))

    nodes = list(grid.get_node_ids())
"""

QUERIED = """
app = ClientApp()


@app.query("prepare")
def prepare(message, context):
    context.state["setup"] = ConfigRecord({"step": 0.5})
    return answer(message)


@app.train()
@app.query("finish")
def train(message, context):
    assert context.state["setup"]["step"] == 0.5
    return answer(message)
"""

EVALUATED = """
app = ClientApp()


@app.evaluate()
def evaluate(message, context):
    times = context.state["seen"]["times"] if "seen" in context.state else 0
    context.state["seen"] = ConfigRecord({"times": times + 1})
    return answer(message)


@app.train()
def train(message, context):
    assert context.state["seen"]["times"] == 2
    return answer(message)
"""

COUNTED = """
def counting(message, context, call_next):
    if "seen" not in context.state:
        context.state["seen"] = ConfigRecord({"kinds": []})
    context.state["seen"]["kinds"] += [message.metadata.message_type]
    return call_next(message, context)


app = ClientApp(mods=[counting])


@app.train()
@app.evaluate()
def both(message, context):
    kinds = context.state["seen"]["kinds"]
    assert kinds == (["train"] * 2 + ["evaluate"] * 2)[:len(kinds)]
    return answer(message)
"""

OLDER = """
class Client(NumPyClient):
    def __init__(self, context):
        self.state = context.state

    def get_parameters(self, config):
        return [np.zeros(3)]

    def fit(self, parameters, config):
        self.state["own"] = ArrayRecord(parameters)
        return parameters, 10, {}

    def evaluate(self, parameters, config):
        return float(self.state["own"].to_numpy_ndarrays()[0][0]), 10, {}


app = ClientApp(client_fn=lambda context: Client(context).to_client())
"""

OLDER_LOOP = """
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.serverapp import ServerApp


def parts(context):
    strategy = FedAvg(fraction_fit=1.0, fraction_evaluate=1.0, min_available_clients=2)
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=2))


app = ServerApp(server_fn=parts)
"""


@pytest.mark.parametrize(
    ("client", "asked", "keys"),
    [
        # The last query comes after more messages than are waited for where nothing is missing.
        (QUERIED, ["query.prepare", *["train"] * 9, "query.finish"], {"work.query.finish"}),
        (EVALUATED, ["evaluate", "evaluate", "train"], {TRAIN, EVALUATE}),
        (COUNTED, ["train", "train", "evaluate", "evaluate"], {TRAIN, EVALUATE}),
        (OLDER, None, {TRAIN, EVALUATE}),
    ],
    ids=["query", "evaluation", "mod", "client_fn"],
)
def test_clients_read_what_they_were_asked_to_remember_whoever_is_measured(
    tmp_path, client, asked, keys
):
    lines = "".join(
        f"    ask({kind!r}, {'nodes[::-1]' if i % 2 else 'nodes'})\n"
        for i, kind in enumerate(asked or ())
    )
    app = write_small_app(
        tmp_path / "app",
        client=REMEMBERING + client,
        server=OLDER_LOOP if asked is None else LOOP + lines,
        pyproject=UNDECLARED,
    )
    # More nodes than are measured, so that some answer first without running.
    found = measured(app, nodes=CLIENTS + 4)
    assert set(found.timings) >= keys
    assert not found.missing


def test_what_is_neither_measured_nor_declared_is_named(tmp_path):
    client = REMEMBERING + QUERIED
    server = LOOP + "    ask('query.prepare', nodes)\n    ask('train', nodes)\n"
    app = write_small_app(tmp_path / "app", client=client, server=server, pyproject=UNDECLARED)
    result = run_command(app)
    assert result.exit_code == 0, result.output
    assert "Neither measured nor declared" in result.stdout
    assert "work.query.finish. Put in" in result.stdout


# Clients that cannot be measured.


@pytest.mark.parametrize("partitions", ["True", "context.node_config['partition-id'] == 3"])
def test_a_client_that_fails_cannot_be_measured(tmp_path, partitions):
    app = app_that(tmp_path, first=f"if {partitions}: raise OSError('no data')")
    with pytest.raises(ConfigError, match="no data"):
        measured(app, run_config={"fraction-evaluate": 1.0})


def test_replies_without_num_examples_are_told_what_to_state(tmp_path):
    client = CLIENT.replace('"num-examples"', '"n"')
    app = write_small_app(tmp_path / "app", client=client, pyproject=UNDECLARED)
    result = run_command(app)
    assert result.exit_code != 0
    assert "num-examples" in result.output


def test_clients_without_examples_are_left_aside(tmp_path):
    burns, examples = "0.0004 * n * 2", "max(1, 20 * (partition % 3))"
    app = app_that(tmp_path, burns=burns, examples=examples)
    client = app / "small_app_under_test" / "client.py"
    text = client.read_text().replace('"num-examples": len(x)', '"num-examples": len(x) // 20 * 20')
    client.write_text(text)
    found = measured(app, run_config={"fraction-evaluate": 1.0})
    assert 1 <= found.timings[TRAIN].clients < CLIENTS
    assert found.timings[TRAIN].middle == pytest.approx(0.0004, rel=0.15)


def test_costs_measured_of_a_share_are_those_of_a_whole_job(monkeypatch):
    for name, least in {"CLIENTS": 1, "RUNS": 3, "LEAST_S": 0.0}.items():
        monkeypatch.setattr(measuring, name, least)
    work = {}
    for share in (0.125, 1):
        strategy = f"FedAvg(10, stages=[LocalWork({share})])"
        told = {"strategy": strategy, "local-epochs": 40, "batch-size": 32}
        config = SimulationConfig(app="digits", traces="synthetic:20", run_config=told)
        work[share] = measure(config, 5).costs.work_per_example
    # Not an eighth of it.
    assert 0.4 < work[0.125] / work[1] < 2.5
