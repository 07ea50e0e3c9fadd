"""What the server does: run the strategy, and evaluate each model on held-out text of all roles."""

from functools import partial

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedstale.apps import server
from shakespeare_app import play, task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds."""
    test_set = task.encode(play.held_out(str(context.run_config["text"])))
    evaluate = partial(task.evaluate, examples=test_set)
    server.serve(grid, context, app="shakespeare", network=task.Network, evaluate=evaluate)
