"""What a run on real devices shows while it goes on, as the run config of its app says."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import tomli_w
from flwr.app import Context
from flwr.serverapp import Grid

from fedstale.strategies.server import SuperLinkGrid, connected
from fedstale.until import Until

logger = logging.getLogger(__name__)


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
    from fedstale.live.prometheus import exported  # noqa: PLC0415
    from fedstale.live.server import Board, observed, serving  # noqa: PLC0415

    with ExitStack() as stack:
        stack.enter_context(own)
        if live:
            until = Until(rounds=int(config["num-server-rounds"]))
            settings = tomli_w.dumps(dict(config))
            board = Board(app, until=until, settings=settings)
            logger.info("live page: %s", stack.enter_context(serving(board, port=live)))
            observed(own, board)
        exporting = exported(own, metrics, app=app, run_id=context.run_id)
        yield stack.enter_context(exporting)
