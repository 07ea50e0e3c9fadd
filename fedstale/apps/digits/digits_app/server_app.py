"""What the server does: run the strategy, and evaluate each model on a test set of its own."""

from functools import partial

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from digits_app import task
from fedstale.apps import classification, server

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds."""
    _, test_set = task.load_data(int(context.run_config["seed"]))
    evaluate = partial(classification.evaluate, data=test_set)
    server.serve(grid, context, app="digits", network=task.Network, evaluate=evaluate)
