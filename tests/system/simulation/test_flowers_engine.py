"""On ideal devices the result is that of Flower's own engine, bit for bit."""

import subprocess
import sys

import numpy as np
import pytest
from flower_engine import final_parts
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg as OlderFedAvg
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAdam, FedAvg
from flwr.simulation import run_simulation
from same_model import assert_same_model
from stock_app import IN_ONE_ORDER, TORCH, write_stock_app

from fedstale.simulation import Costs, TraceGrid
from fedstale.simulation.stock_strategies import server_fn_on
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


# The older API.


def older_api_apps(n, final):
    class InPartitionOrder(OlderFedAvg):
        """Sums in one order: in Flower's engine replies arrive in the order of scheduling."""

        def aggregate_fit(self, server_round, results, failures):
            results = sorted(results, key=lambda result: result[1].metrics["partition"])
            return super().aggregate_fit(server_round, results, failures)

        def evaluate(self, server_round, parameters):
            final[:] = parameters.tensors

    class Walk(NumPyClient):
        def __init__(self, partition):
            self.partition = partition

        def fit(self, parameters, config):
            rng = np.random.default_rng((self.partition, config["round"]))
            moved = [(a + 0.1 * rng.normal(size=a.shape)).astype(a.dtype) for a in parameters]
            return moved, 3 + self.partition, {"partition": self.partition}

    def server_fn(context):
        start = [np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), np.zeros(5, np.float32)]
        strategy = InPartitionOrder(
            min_fit_clients=n,
            min_available_clients=n,
            fraction_evaluate=0.0,
            initial_parameters=ndarrays_to_parameters(start),
            on_fit_config_fn=lambda server_round: {"round": server_round},
        )
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=3))

    def client_fn(context):
        return Walk(context.node_config["partition-id"]).to_client()

    return ServerApp(server_fn=server_fn), ClientApp(client_fn=client_fn)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_final_model_of_the_older_api_equals_that_of_flowers_own_engine():
    ray = pytest.importorskip("ray", reason="needs the extra fedstale[simulation]")
    theirs, ours = [], []
    server, client = older_api_apps(4, theirs)
    resources = {"client_resources": {"num_cpus": 1}}
    run_simulation(server, client, num_supernodes=4, backend_config=resources)
    ray.shutdown()
    server, client = older_api_apps(4, ours)
    costs = Costs(work_per_example=1.0, epochs=1, examples=10)
    grid = TraceGrid(TraceSet.ideal(4), client, costs=costs)
    with grid.running(), server_fn_on(grid):
        server(grid, Context(1, 1, {}, RecordDict(), {}))
    assert len(ours) == 2
    assert ours == theirs


# From the command line.


@pytest.mark.filterwarnings("ignore")
def test_a_network_of_torch_ends_as_on_flowers_engine(tmp_path):
    n = 4
    app = write_stock_app(tmp_path / "app", TORCH, IN_ONE_ORDER, n)
    theirs = final_parts(app / "stock_app_under_test.py", n).arrays
    command = [sys.executable, "-m", "fedstale", "simulate", str(app), "--traces", f"ideal:{n}"]
    command += ["--out", str(tmp_path / "run")]
    ours = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ours.returncode == 0, ours.stderr
    assert_same_model(tmp_path / "run", theirs)
