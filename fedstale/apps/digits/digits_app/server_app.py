"""What the server does: run the strategy, and evaluate each model on a test set of its own."""

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from digits_app import task
from fedstale.apps import strategy
from fedstale.deployment.run_folder import recorded

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds."""
    config = context.run_config
    seed = int(config["seed"])
    _, test_set = task.load_data(seed)

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        network = task.Network()
        network.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy = task.evaluate(network, test_set)
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    with recorded(grid, str(config["run-folder"]), context, app="digits") as watched:
        strategy.configured(context).start(
            grid=watched,
            initial_arrays=ArrayRecord(task.Network(seed).state_dict()),
            num_rounds=int(config["num-server-rounds"]),
            timeout=float(config["round-timeout"]),
            evaluate_fn=evaluate,
        )
