"""What the server does: run the strategy, and evaluate each model on the 10,000 test images."""

from functools import partial

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fashion_app import task
from fedstale.apps import classification, server

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds."""
    _, test_set = task.load_data(str(context.run_config["data"]))
    evaluate = partial(classification.evaluate, data=test_set)
    server.serve(grid, context, app="fashion", network=task.Network, evaluate=evaluate)
