"""The server of the built-in apps: a strategy by their run config, and an evaluated model.

Flower's strategies work in rounds; fedstale's aggregate replies as they come, also stale ones.
"""

from collections.abc import Callable

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy
from torch import nn

from fedstale.agents import AgentSelector
from fedstale.deployment.run_folder import recorded
from fedstale.strategies import DirectionAware, FedBuff, GapAware, selection

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


def serve(
    grid: Grid,
    context: Context,
    *,
    app: str,
    network: Callable[[int], nn.Module],
    evaluate: Callable[[nn.Module], tuple[float, float]],
) -> None:
    """Train for some rounds, and evaluate each model.

    Args:
        grid: the devices.
        context: with the run config of a built-in app.
        app: its name, for the run folder.
        network: makes the model, with its first weights drawn by a seed.
        evaluate: returns loss and accuracy of a model on examples that no device has.

    Raises:
        ValueError: a value of the run config is not one of those offered.
    """
    config = context.run_config
    seed = int(config["seed"])

    def measured(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model = network(seed)
        model.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy = evaluate(model)
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    with recorded(grid, str(config["run-folder"]), context, app=app) as watched:
        configured(context).start(
            grid=watched,
            initial_arrays=ArrayRecord(network(seed).state_dict()),
            num_rounds=int(config["num-server-rounds"]),
            timeout=float(config["round-timeout"]),
            evaluate_fn=measured,
        )


def configured(context: Context) -> Strategy:
    """Return the strategy that a run config names, with its options.

    Raises:
        ValueError: there is no such strategy or selector, or the strategy keeps no checkpoints.
    """
    config = context.run_config
    name, selector = str(config["strategy"]), str(config["selector"])
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
    if name not in IN_ROUNDS:
        raise ValueError(f"strategy = {name!r}: expected one of {[*IN_ROUNDS, *AS_THEY_COME]}")
    for key in ("checkpoints", "resume"):
        if config[key]:
            raise ValueError(f"{key} = {config[key]!r}: {name} keeps none, only {[*AS_THEY_COME]}")
    return IN_ROUNDS[name](
        fraction_train=float(config["fraction-train"]),
        fraction_evaluate=float(config["fraction-evaluate"]),
        min_train_nodes=1,
        min_evaluate_nodes=1,
        min_available_nodes=1,
    )
