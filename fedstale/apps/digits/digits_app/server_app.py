"""What the server does: run the strategy, and evaluate each model on a test set of its own."""

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy

from digits_app import task
from fedstale.agents import AgentSelector
from fedstale.deployment.run_folder import recorded
from fedstale.strategies import DirectionAware, FedBuff, GapAware, selection

app = ServerApp()

# Flower's strategies work in rounds; fedstale's aggregate replies as they come, also stale ones.
IN_ROUNDS = {"fedavg": FedAvg}
AS_THEY_COME = {"fedbuff": FedBuff, "gap-aware": GapAware, "direction-aware": DirectionAware}
SELECTORS = {
    "random": selection.Random,
    "fedcs": selection.Fastest,
    "oort": selection.Oort,
    "refl": selection.LeastAvailable,
    "most-reliable": selection.MostReliable,
    "expected-utility": selection.ExpectedUtility,
    "agent": AgentSelector,
}


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
        _strategy(str(config["strategy"]), context).start(
            grid=watched,
            initial_arrays=ArrayRecord(task.Network(seed).state_dict()),
            num_rounds=int(config["num-server-rounds"]),
            timeout=float(config["round-timeout"]),
            evaluate_fn=evaluate,
        )


def _strategy(name: str, context: Context) -> Strategy:
    config = context.run_config
    selector = str(config["selector"])
    if selector not in SELECTORS:
        raise ValueError(f"selector = {selector!r}: expected one of {[*SELECTORS]}")
    if name in AS_THEY_COME:
        return AS_THEY_COME[name](
            concurrency=int(config["concurrency"]),
            buffer_size=int(config["buffer-size"]),
            selector=SELECTORS[selector](),
            forecast_request=selection.ForecastRequest() if config["forecasts"] else None,
            checkpoints=str(config["checkpoints"]) or None,
            resume=str(config["resume"]) or None,
            seed=int(config["seed"]),
        )
    for key in ("checkpoints", "resume"):
        if name in IN_ROUNDS and config[key]:
            raise ValueError(f"{key} = {config[key]!r}: {name} keeps none, only {[*AS_THEY_COME]}")
    if name in IN_ROUNDS:
        return IN_ROUNDS[name](
            fraction_train=float(config["fraction-train"]),
            fraction_evaluate=float(config["fraction-evaluate"]),
            min_train_nodes=1,
            min_evaluate_nodes=1,
            min_available_nodes=1,
        )
    raise ValueError(f"strategy = {name!r}: expected one of {[*IN_ROUNDS, *AS_THEY_COME]}")
