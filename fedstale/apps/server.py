"""The server of the built-in apps: a strategy by their run config, and an evaluated model."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import tomli_w
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid
from torch import nn

from fedstale.apps.strategy import strategy
from fedstale.config import Until
from fedstale.deployment import recorded
from fedstale.strategies import Adapters
from fedstale.strategies.server import SuperLinkGrid, connected

logger = logging.getLogger(__name__)


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
    adapters = next((stage for stage in stages if isinstance(stage, Adapters)), None)
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


@contextmanager
def watched(grid: Grid, context: Context, *, app: str) -> Iterator[Grid]:
    """Show a run on real devices while it goes on, as its run config says.

    A simulation has `--live`, and many of one run config may go on at once: it is left as it is.

    Args:
        grid: the devices.
        context: with live-port and metrics-port in its run config; 0 shows nothing there.
        app: its name.

    Raises:
        ConfigError: a port is not free, or a package is not installed.
    """
    config = context.run_config
    live, metrics = int(config["live-port"]), int(config["metrics-port"])
    if not (live or metrics) or not isinstance(own := connected(grid), SuperLinkGrid):
        yield grid
        return
    # Nothing of it is imported unless it is wanted.
    from fedstale.live import Board, exported, observed, serving  # noqa: PLC0415

    with ExitStack() as stack:
        stack.enter_context(own)
        if live:
            until = Until(rounds=int(config["num-server-rounds"]))
            settings = tomli_w.dumps(dict(config))
            board = Board(app, until=until, settings=settings, run_config=config)
            logger.info("live page: %s", stack.enter_context(serving(board, port=live)))
            observed(own, board)
        exporting = exported(own, metrics, app=app, run_id=context.run_id)
        yield stack.enter_context(exporting)
