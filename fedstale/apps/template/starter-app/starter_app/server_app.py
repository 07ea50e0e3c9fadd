"""What the server does: run a strategy, and evaluate each model on data of its own."""

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from fedstale.deployment import recorded
from fedstale.live import watched
from fedstale.strategies import parse
from starter_app import task

app = ServerApp()

# No device has this number, so no device has the data of the server.
SERVER_PARTITION = 2**32


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Make some versions of the model out of replies, also stale ones."""
    config = context.run_config
    test_set = task.load_data(SERVER_PARTITION, int(config["seed"]), n=1000)

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        network = task.Network()
        network.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy = task.evaluate(network, test_set)
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    strategy = parse(
        str(config["strategy"]),
        checkpoints=str(config["checkpoints"]) or None,
        resume=str(config["resume"]) or None,
        seed=int(config["seed"]),
    )
    # On real devices: a run folder, a live page and metrics, as the run config asks for them.
    with (
        recorded(grid, str(config["run-folder"]), context, app="starter-app") as kept,
        watched(kept, context, app="starter-app") as shown,
    ):
        strategy.start(
            grid=shown,
            initial_arrays=ArrayRecord(task.Network().state_dict()),
            num_rounds=int(config["num-server-rounds"]),
            timeout=float(config["round-timeout"]),
            evaluate_fn=evaluate,
        )
