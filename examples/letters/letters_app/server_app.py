"""What the server does: run the strategy, and evaluate each model on held-out text of all sites."""

from functools import partial

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedstale.apps import characters, server
from letters_app import task

TEST_EVERY = 8
"""Every so many of the held-out examples is evaluated: all take longer than a job."""

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds."""
    config = context.run_config
    test_set = characters.encode(characters.held_out(str(config["text"])), task.LENGTH)
    server.serve(
        grid,
        context,
        app="letters",
        network=partial(task.model, config),
        evaluate=partial(characters.evaluate, examples=test_set[::TEST_EVERY]),
    )
