"""On ideal devices the result is that of Flower's own simulation engine, bit for bit."""

import json
import subprocess
import sys
import types

import numpy as np
import pandas as pd
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAdam, FedAvg
from flwr.simulation import run_simulation
from safetensors.numpy import load_file
from typer.testing import CliRunner

from fedstale.cli import main as cli
from fedstale.simulation import Costs, TraceGrid
from fedstale.simulation.flower_app import FlowerApp
from fedstale.traces import TraceSet

N = 4


def client_app():
    app = ClientApp()

    @app.train()
    def train(message, context):
        partition = context.node_config["partition-id"]
        rng = np.random.default_rng((partition, message.content["config"]["server-round"]))
        arrays = message.content["arrays"].to_numpy_ndarrays()
        arrays = [(a + 0.1 * rng.normal(size=a.shape)).astype(np.float32) for a in arrays]
        metrics = MetricRecord({"num-examples": 3 + partition, "partition": partition})
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def server_app(kind, result):
    class InPartitionOrder(kind):
        """Sums in one order: in Flower's engine replies arrive in the order of scheduling."""

        def aggregate_train(self, server_round, replies):
            ordered = sorted(replies, key=lambda r: r.content["metrics"]["partition"])
            return super().aggregate_train(server_round, ordered)

    app = ServerApp()

    @app.main()
    def main(grid, context):
        start = [np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), np.zeros(5, np.float32)]
        # All of them: Flower's engine may ask who is there while nodes are still registering.
        strategy = InPartitionOrder(fraction_evaluate=0.0, min_train_nodes=N, min_available_nodes=N)
        outcome = strategy.start(grid=grid, initial_arrays=ArrayRecord(start), num_rounds=3)
        result.extend(outcome.arrays.to_numpy_ndarrays())

    return app


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FedAvg, FedAdam])
@pytest.mark.filterwarnings("ignore")
def test_the_final_model_equals_that_of_flowers_own_engine_bit_for_bit(kind):
    from flwr.app import Context

    ray = pytest.importorskip("ray", reason="needs the extra fedstale[simulation]")
    theirs, ours = [], []
    run_simulation(
        server_app(kind, theirs),
        client_app(),
        num_supernodes=N,
        backend_config={"client_resources": {"num_cpus": 1}},
    )
    ray.shutdown()
    costs = Costs(work_per_example=1.0, epochs=1, examples=10)
    grid = TraceGrid(TraceSet.ideal(N), client_app(), costs=costs)
    with grid.running():
        server_app(kind, ours)(grid, Context(1, 1, {}, RecordDict(), {}))
    assert len(ours) == len(theirs) == 2
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        assert mine.tobytes() == other.tobytes()


# The same from the command line, with apps that know nothing of fedstale but its costs.

PYPROJECT = """
[project]
name = "stock"
version = "1.0.0"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "tests"

[tool.flwr.app.components]
serverapp = "stock_app_under_test:server"
clientapp = "stock_app_under_test:client"

[tool.fedstale]
work-per-example = 1.0
evaluate-work-per-example = 0.3
epochs = 1
examples = 20
"""

APP = """
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
{model}
client, server = ClientApp(), ServerApp()


@client.train()
def train(message, context):
    partition = context.node_config["partition-id"]
    arrays, loss = fit(message.content, partition, message.content["config"]["server-round"])
    metrics = MetricRecord({{"loss": loss, "num-examples": 11 + 7 * partition}})
    return Message(RecordDict({{"arrays": arrays, "metrics": metrics}}), reply_to=message)


@client.evaluate()
def evaluate(message, context):
    _, loss = fit(message.content, context.node_config["partition-id"], 0)
    metrics = MetricRecord({{"loss": loss, "num-examples": 5}})
    return Message(RecordDict({{"metrics": metrics}}), reply_to=message)

{strategy}
@server.main()
def main(grid, context):
    strategy = Strategy(min_train_nodes={n}, min_evaluate_nodes={n}, min_available_nodes={n})
    first = ArrayRecord(initial())
    result = strategy.start(grid=grid, initial_arrays=first, num_rounds={rounds})
    finished(result)
"""

NUMPY = """
import numpy as np


def initial():
    return [np.linspace(-1, 1, 30, dtype=np.float32).reshape(3, 10), np.zeros(10, np.float32)]


def fit(content, partition, number):
    rng = np.random.default_rng((partition, number))
    w, b = content["arrays"].to_numpy_ndarrays()
    x = rng.normal(size=(11 + 7 * partition, 3)).astype(np.float32)
    error = x @ w + b - np.sin(x.sum(axis=1, keepdims=True))
    w = w - np.float32(0.1) * (x.T @ error) / np.float32(len(x))
    b = b - np.float32(0.1) * error.mean(axis=0)
    return ArrayRecord([w, b]), float((error**2).mean())
"""

TORCH = """
import torch


def network():
    return torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))


def initial():
    torch.manual_seed(7)
    return network().state_dict()


def fit(content, partition, number):
    torch.manual_seed(1000 * number + partition)
    model = network()
    model.load_state_dict(content["arrays"].to_torch_state_dict())
    x = torch.randn(11 + 7 * partition, 3)
    y = (x.sum(dim=1) > 0).long()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for at in torch.randperm(len(x)).split(4):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x[at]), y[at])
        loss.backward()
        optimizer.step()
    return ArrayRecord(model.state_dict()), float(loss.detach())
"""

STOCK = """
Strategy = FedAvg

"""

IN_ONE_ORDER = """
class Strategy(FedAvg):
    # Flower's engine gives replies in no order, and a sum of three floats has one.
    def aggregate_train(self, server_round, replies):
        replies = sorted(replies, key=lambda r: r.content["metrics"]["num-examples"])
        return super().aggregate_train(server_round, replies)

"""


class OneAfterAnother:
    """In the place of Flower's Ray backend: its engine runs clients in this process."""

    num_workers = 1

    def __init__(self, backend_config):
        pass

    def build(self, app_fn):
        self._app = app_fn()

    def process_message(self, message, context):
        return self._app(message, context), context

    def terminate(self):
        pass


@pytest.fixture
def flowers_engine(monkeypatch):
    """Return a function that runs an app on Flower's engine, and returns what it ended with."""
    place = "flwr.server.superlink.fleet.vce.backend.raybackend"
    backend = types.ModuleType(place)
    backend.RayBackend = OneAfterAnother
    monkeypatch.setitem(sys.modules, place, backend)
    module = sys.modules[run_simulation.__module__]
    monkeypatch.setattr(module, "_check_ray_support", lambda name: None)

    def run(directory, n):
        app, results = FlowerApp.find(directory), []
        with app.importable():
            server, client = app.load_server(), app.load_client()
            sys.modules["stock_app_under_test"].finished = results.append
            run_simulation(server, client, num_supernodes=n)
        return results[0].arrays

    return run


def write_stock_app(path, model, strategy, n, rounds=3):
    path.mkdir()
    (path / "pyproject.toml").write_text(PYPROJECT)
    text = APP.format(model=model, strategy=strategy, n=n, rounds=rounds)
    (path / "stock_app_under_test.py").write_text(text + "\n\ndef finished(result):\n    pass\n")
    return path


def fedstale(*words):
    command = [sys.executable, "-m", "fedstale", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    ("model", "strategy", "n"),
    [(NUMPY, STOCK, 2), (NUMPY, IN_ONE_ORDER, 5), (TORCH, IN_ONE_ORDER, 4)],
    ids=["numpy, stock", "numpy, in one order", "torch, in one order"],
)
@pytest.mark.filterwarnings("ignore")
def test_the_command_line_on_ideal_devices_ends_with_the_model_of_flowers_engine(
    tmp_path, flowers_engine, model, strategy, n
):
    app = write_stock_app(tmp_path / "app", model, strategy, n)
    theirs = flowers_engine(app, n)
    ours = fedstale("simulate", app, "--traces", f"ideal:{n}", "--out", tmp_path / "run")
    assert ours.returncode == 0, ours.stderr
    made = load_file(tmp_path / "run" / "model.safetensors")
    assert set(made) == set(theirs) != set()
    for name, array in theirs.items():
        assert made[name].dtype == array.numpy().dtype
        assert made[name].tobytes() == array.numpy().tobytes(), name
    first = np.concatenate([a.ravel() for a in made.values()])
    assert np.isfinite(first).all()
    assert len(set(first.tolist())) > 20, "the model has been trained"


def test_nothing_takes_time_on_ideal_devices(tmp_path):
    app = write_stock_app(tmp_path / "app", NUMPY, STOCK, 3)
    run = fedstale("simulate", app, "--traces", "ideal:3", "--out", tmp_path / "run", "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["virtual_s"] == 0.0
    events = pd.read_parquet(tmp_path / "run" / "events.parquet")
    assert set(events["status"]) == {"reported"}
    instants = ["sent_at", "started_at", "trained_at", "reported_at", "ended_at", "delivered_at"]
    assert (events[[*instants, "download_s", "compute_s", "upload_s"]] == 0.0).all(axis=None)
    assert (events["uploaded_bytes"] > 0).all()
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--traces", "ideal:0"], "expected ideal:N, such as ideal:100, with N >= 1"),
        (["--traces", "ideal:"], "expected ideal:N"),
        (["--traces", "ideal:3", "--until", "2h"], "no time passes on devices"),
        (["--traces", "idle:3"], "or ideal:N for N that take no time"),
    ],
)
def test_what_ideal_devices_cannot_be_is_one_sentence(tmp_path, words, sentence):
    run = CliRunner().invoke(cli.app, ["simulate", "digits", *words, "--out", str(tmp_path / "r")])
    assert run.exit_code == 2
    assert sentence in run.stderr
    assert run.stderr.count("\n") == 1
    assert not (tmp_path / "r").exists()
