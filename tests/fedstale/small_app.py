"""Writes a small Flower app directory: linear regression that knows nothing of fedstale."""

from pathlib import Path

PYPROJECT = """
[project]
name = "small"
version = "1.0.0"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "tests"

[tool.flwr.app.components]
serverapp = "small_app_under_test.server:app"
clientapp = "small_app_under_test.client:app"

[tool.flwr.app.config]
rounds = 3
strategy = "FedAvg"
local-epochs = 2
fraction-evaluate = 0.5
min-available = 2

[tool.fedstale]
work-per-example = 1.0
evaluate-work-per-example = 0.3
epochs = "local-epochs"
examples = 20
"""

CLIENT = """
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


def data(partition):
    rng = np.random.default_rng(partition)
    x = rng.normal(size=(10 + partition % 5, 3))
    return x, x @ np.array([1.0, -2.0, 0.5]) + 0.1 * rng.normal(size=len(x))


@app.train()
def train(message, context):
    x, y = data(context.node_config["partition-id"])
    (w,) = message.content["arrays"].to_numpy_ndarrays()
    for _ in range(context.run_config["local-epochs"]):
        i = np.random.randint(len(x))
        w = w - 0.1 * (x[i] @ w - y[i]) * x[i] - 0.05 * x.T @ (x @ w - y) / len(x)
    metrics = MetricRecord({"train_loss": float(np.mean((x @ w - y) ** 2)), "num-examples": len(x)})
    return Message(RecordDict({"arrays": ArrayRecord([w]), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    x, y = data(context.node_config["partition-id"])
    (w,) = message.content["arrays"].to_numpy_ndarrays()
    metrics = MetricRecord({"eval_loss": float(np.mean((x @ w - y) ** 2)), "num-examples": len(x)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
"""

SERVER = """
import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import ServerApp
from flwr.serverapp import strategy as strategies

app = ServerApp()


def evaluate(server_round, arrays):
    (w,) = arrays.to_numpy_ndarrays()
    error = float(np.linalg.norm(w - np.array([1.0, -2.0, 0.5])))
    return MetricRecord({"loss": error, "accuracy": 1.0 / (1.0 + error)})


@app.main()
def main(grid, context):
    config = context.run_config
    options = {"proximal_mu": 0.1} if config["strategy"] == "FedProx" else {}
    strategy = getattr(strategies, config["strategy"])(
        fraction_evaluate=config["fraction-evaluate"],
        min_available_nodes=config["min-available"],
        **options,
    )
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord([np.zeros(3)]),
        num_rounds=config["rounds"],
        evaluate_fn=evaluate,
    )
"""


def write_small_app(
    path: Path, *, client: str = CLIENT, server: str = SERVER, pyproject: str = PYPROJECT
) -> Path:
    """Write the app, with some of its files replaced, and return its directory."""
    package = path / "small_app_under_test"
    package.mkdir(parents=True)
    (path / "pyproject.toml").write_text(pyproject)
    (package / "__init__.py").write_text("")
    (package / "client.py").write_text(client)
    (package / "server.py").write_text(server)
    return path
