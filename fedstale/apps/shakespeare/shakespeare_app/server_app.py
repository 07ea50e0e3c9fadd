"""What the server does: run the strategy, and evaluate each model on held-out text of all roles."""

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from fedstale.apps import strategy
from fedstale.deployment.run_folder import recorded
from shakespeare_app import play, task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds."""
    config = context.run_config
    seed = int(config["seed"])
    test_set = task.encode(play.held_out(str(config["text"])))

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        network = task.Network()
        network.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy = task.evaluate(network, test_set)
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    with recorded(grid, str(config["run-folder"]), context, app="shakespeare") as watched:
        strategy.configured(context).start(
            grid=watched,
            initial_arrays=ArrayRecord(task.Network(seed).state_dict()),
            num_rounds=int(config["num-server-rounds"]),
            timeout=float(config["round-timeout"]),
            evaluate_fn=evaluate,
        )
