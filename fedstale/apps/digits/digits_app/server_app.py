"""What the server does: run the strategy, and evaluate each model on a test set of its own."""

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy

from digits_app import task

app = ServerApp()

# One line for each strategy. All of them are made in `_strategy`.
STRATEGIES = {"fedavg": FedAvg}


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

    _strategy(str(config["strategy"]), context).start(
        grid=grid,
        initial_arrays=ArrayRecord(task.Network(seed).state_dict()),
        num_rounds=int(config["num-server-rounds"]),
        timeout=float(config["round-timeout"]),
        evaluate_fn=evaluate,
    )


def _strategy(name: str, context: Context) -> Strategy:
    if name not in STRATEGIES:
        raise ValueError(f"strategy = {name!r}: expected one of {sorted(STRATEGIES)}")
    return STRATEGIES[name](
        fraction_train=float(context.run_config["fraction-train"]),
        fraction_evaluate=float(context.run_config["fraction-evaluate"]),
        min_train_nodes=1,
        min_evaluate_nodes=1,
        min_available_nodes=1,
    )
