"""A small app without torch, written out for Flower's own processes, and what tests ask of runs."""

import subprocess
import threading
import time

from fedstale.deployment import commands
from fedstale.deployment.local import LINK, run_app

PYPROJECT = """
[project]
name = "adder"
version = "1.0.0"
license = "Apache-2.0"
dependencies = ["fedstale", "flwr>=1.41", "numpy>=2.0"]

[tool.flwr.app]
publisher = "tests"

[tool.flwr.app.components]
serverapp = "adder.server_app:app"
clientapp = "adder.client_app:app"

[tool.fedstale]
work-per-example = 1.0
epochs = 1
examples = 10
evaluate-work-per-example = 0.3

[tool.flwr.app.config]
strategy = "fedavg"
rounds = 1
timeout = 200.0
size = 10
train-s = 0.0
concurrency = 3
buffer-size = 2
"""

SERVER = """
import numpy as np
from fedstale.strategies import GapAware
from fedstale.strategies.server.superlink import without_stalls
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config

    def evaluate(version, arrays):
        print(f"version {version} mean {arrays['w'].numpy().mean():.6f}", flush=True)
        return None

    initial = ArrayRecord({"w": Array(np.zeros(config["size"], dtype=np.float32))})
    if config["strategy"] == "fedavg":
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    else:
        strategy = GapAware(
            concurrency=config["concurrency"],
            buffer_size=config["buffer-size"],
            recheck_s=1.0,
            seed=1,
        )
    with without_stalls(grid) as grid:
        strategy.start(
            grid=grid,
            initial_arrays=initial,
            num_rounds=config["rounds"],
            timeout=config["timeout"],
            evaluate_fn=evaluate,
        )
"""

CLIENT = """
import time

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    time.sleep(context.run_config["train-s"])
    w = message.content["arrays"]["w"].numpy() + np.float32(context.node_config["partition-id"] + 1)
    metrics = MetricRecord({"num-examples": 1, "node": context.node_config["partition-id"]})
    content = RecordDict({"arrays": ArrayRecord({"w": Array(w)}), "metrics": metrics})
    return Message(content, reply_to=message)
"""


def write_app(folder, pyproject=PYPROJECT, server=SERVER, client=CLIENT):
    package = folder / "adder"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(pyproject)
    (package / "__init__.py").touch()
    (package / "server_app.py").write_text(server)
    (package / "client_app.py").write_text(client)
    return folder


class Running:
    """A run in a thread of its own, while the test does something to the deployment."""

    def __init__(self, deployment, app, run_config):
        self.lines, self.problem = [], None
        self.thread = threading.Thread(target=self._run, args=(deployment, app, run_config))
        self.thread.start()

    def _run(self, deployment, app, run_config):
        try:
            run_app(deployment, app, run_config=run_config, show=self.lines.append)
        except BaseException as problem:
            self.problem = problem

    def until(self, condition, limit_s=120.0):
        """Wait for something that happens while it runs."""
        wait_for(lambda: condition() or not self.thread.is_alive(), limit_s)
        assert condition(), "\n".join([*self.lines, f"{self.problem}"])

    def end(self, limit_s=240.0):
        self.thread.join(limit_s)
        assert not self.thread.is_alive(), self.lines
        if self.problem is not None:
            raise AssertionError("\n".join(self.lines)) from self.problem
        return self.lines


def stop(deployment, run_id):
    """Stop a run as an operator does."""
    environment = deployment.operator_environment()
    words = commands.found(["fedstale", "flwr", "stop", str(run_id), LINK], environment)
    subprocess.run(words, env=environment, check=True, stdout=subprocess.DEVNULL)


def wait_for(condition, limit_s=120.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def means(lines):
    """Return the mean weight of each version that the server has evaluated."""
    found = [line.split() for line in lines if line.startswith("version ") and " mean " in line]
    return {int(words[1]): float(words[3]) for words in found}
