"""A Flower app of the older API: server_fn, client_fn and a NumPyClient."""

from pathlib import Path

from small_app import PYPROJECT as NEW_API
from small_app import write_small_app

PYPROJECT = NEW_API.replace(
    "min-available = 2",
    """min-available = 2
min-fit = 2
timeout = 0.0
initial = true""",
)

CLIENT = """
import numpy as np
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp


def data(partition):
    rng = np.random.default_rng(partition)
    x = rng.normal(size=(10 + partition % 5, 3))
    return x, x @ np.array([1.0, -2.0, 0.5]) + 0.1 * rng.normal(size=len(x))


class Regression(NumPyClient):
    def __init__(self, partition, epochs):
        self.partition, self.epochs = partition, epochs
        self.x, self.y = data(partition)

    def get_parameters(self, config):
        return [np.full(3, 0.25)]

    def fit(self, parameters, config):
        (w,) = parameters
        for _ in range(self.epochs):
            w = w - 0.1 * self.x.T @ (self.x @ w - self.y) / len(self.x)
        noise = 1e-3 * np.random.normal() if config.get("noisy") else 0.0
        return [w + noise], len(self.x), {"norm": float(np.linalg.norm(w))}

    def evaluate(self, parameters, config):
        (w,) = parameters
        return float(np.mean((self.x @ w - self.y) ** 2)), len(self.x), {"round": config["round"]}


def client_fn(context):
    partition = context.node_config["partition-id"]
    return Regression(partition, context.run_config["local-epochs"]).to_client()


app = ClientApp(client_fn=client_fn)
"""

SERVER = """
import numpy as np
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server import strategy as strategies
from flwr.serverapp import ServerApp


def evaluate(server_round, arrays, config):
    error = float(np.linalg.norm(arrays[0] - np.array([1.0, -2.0, 0.5])))
    return error, {"accuracy": np.float32(1.0 / (1.0 + error)), "words": "ignored"}


def mean(metrics):
    total = sum(n for n, _ in metrics)
    return {k: sum(n * m[k] for n, m in metrics) / total for k in metrics[0][1]}


def server_fn(context):
    config = context.run_config
    initial = ndarrays_to_parameters([np.zeros(3)]) if config["initial"] else None
    strategy = getattr(strategies, config["strategy"])(
        fraction_evaluate=config["fraction-evaluate"],
        min_fit_clients=config["min-fit"],
        min_available_clients=config["min-available"],
        initial_parameters=initial,
        evaluate_fn=evaluate,
        on_fit_config_fn=lambda server_round: {"noisy": config["rounds"] != 3},
        on_evaluate_config_fn=lambda server_round: {"round": server_round},
        fit_metrics_aggregation_fn=mean,
        evaluate_metrics_aggregation_fn=mean,
    )
    settings = ServerConfig(num_rounds=config["rounds"], round_timeout=config["timeout"] or None)
    return ServerAppComponents(strategy=strategy, config=settings)


app = ServerApp(server_fn=server_fn)
"""


def write_server_fn_app(
    path: Path, *, client: str = CLIENT, server: str = SERVER, pyproject: str = PYPROJECT
) -> Path:
    """Write the app, with some of its files replaced, and return its directory."""
    return write_small_app(path, client=client, server=server, pyproject=pyproject)
