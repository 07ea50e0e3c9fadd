"""The server of the built-in apps: a strategy by their run config, and an evaluated model."""

from collections.abc import Callable
from typing import Any

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid
from torch import nn

from fedstale.apps.strategy import strategy
from fedstale.deployment import recorded
from fedstale.live import watched


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
        ConfigError: a value of the run config is not one of those offered.
    """
    config = context.run_config
    seed, made = int(config["seed"]), strategy(config)
    initial = ArrayRecord(network(seed).state_dict())
    stages = getattr(made, "stages", ())
    # A stage that keeps products on the server, and their factors on devices.
    adapters: Any = next((stage for stage in stages if hasattr(stage, "products")), None)
    if adapters is not None:
        initial = adapters.products(initial)

    def measured(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model = network(seed)
        if adapters is not None:
            arrays = adapters.factors(arrays)
        model.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy = evaluate(model)
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    with (
        recorded(grid, str(config["run-folder"]), context, app=app) as noted,
        watched(noted, context, app=app) as shown,
    ):
        made.start(
            grid=shown,
            initial_arrays=initial,
            num_rounds=int(config["num-server-rounds"]),
            timeout=float(config["round-timeout"]),
            evaluate_fn=measured,
        )
