"""On ideal devices the result is that of Flower's own simulation engine, bit for bit."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAdam, FedAvg

from fedstale.simulation import Costs, TraceGrid
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
    from flwr.simulation import run_simulation

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
