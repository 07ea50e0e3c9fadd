"""What the server does: run the strategy, and evaluate each model on held-out text of all roles."""

from functools import partial

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedstale.apps import characters, server
from shakespeare_app import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds."""
    test_set = characters.encode(characters.held_out(str(context.run_config["text"])), task.LENGTH)
    evaluate = partial(characters.evaluate, examples=test_set)
    server.serve(grid, context, app="shakespeare", network=task.Network, evaluate=evaluate)
