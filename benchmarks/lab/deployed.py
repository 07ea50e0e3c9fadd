"""Flower apps that benchmarks write, and what the processes of a deployment here use."""

import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

from fedstale.deployment.local import LocalDeployment

_PYPROJECT = """
[project]
name = "{project}"
version = "1.0.0"
license = "Apache-2.0"
dependencies = ["fedstale", "flwr>=1.41", "numpy>=2.0", "psutil>=6.0"]

[tool.flwr.app]
publisher = "benchmarks"

[tool.flwr.app.components]
serverapp = "{name}.server_app:app"
clientapp = "{name}.client_app:app"

[tool.flwr.app.config]
{config}

{tables}
"""

ADDS_ONE = """
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    w = message.content["arrays"]["w"].numpy() + np.float32(1)
    metrics = MetricRecord({"num-examples": 1})
    content = RecordDict({"arrays": ArrayRecord({"w": Array(w)}), "metrics": metrics})
    return Message(content, reply_to=message)
"""
"""Source of a ClientApp that adds 1 to its one array, w."""


def write_app(
    folder: Path, name: str, *, server: str, client: str, config: str = "", tables: str = ""
) -> Path:
    """Write an app and return its folder.

    Args:
        folder: to be made.
        name: of the app, which is its package's.
        server: source of its ServerApp.
        client: source of its ClientApp.
        config: its run config, as lines of TOML.
        tables: other tables of its pyproject.toml.
    """
    package = folder / name
    package.mkdir(parents=True)
    # Flower takes no underscore in the name of a project.
    pyproject = _PYPROJECT.format(
        project=name.replace("_", "-"), name=name, config=config.strip(), tables=tables.strip()
    )
    (folder / "pyproject.toml").write_text(pyproject, encoding="utf-8")
    (package / "__init__.py").touch()
    (package / "server_app.py").write_text(server, encoding="utf-8")
    (package / "client_app.py").write_text(client, encoding="utf-8")
    return folder


class AsFlower(LocalDeployment):
    """Nodes as Flower starts them, and questions for work answered at once."""

    def _start(self, name: str, command: list[str]) -> None:
        if name.startswith("node-"):
            command = ["flower-supernode", *command[2:]]
        if name == "superlink":
            command = [*command, "--hold", "0s"]
        super()._start(name, command)


def nodes_of(deployment: LocalDeployment) -> list[int]:
    """Return the processes below which the nodes of a deployment run, one each."""
    return [deployment.processes.pid(f"node-{number}") for number in range(deployment.n_nodes)]


def superlink_of(deployment: LocalDeployment) -> psutil.Process:
    """Return the process of a deployment's SuperLink."""
    (superlink,) = psutil.Process(deployment.processes.pid("superlink")).children()
    return superlink


def tree(pid: int) -> list[psutil.Process]:
    """Return what a node consists of, without what only supervises it."""
    return psutil.Process(pid).children(recursive=True)


def memory_mb(pids: Sequence[int]) -> float:
    """Return the mean memory of some nodes in MB, shared pages by their share."""
    found = 0.0
    for pid in pids:
        for process in tree(pid):
            try:
                found += process.memory_full_info().pss / 1e6
            except psutil.Error:
                continue
    return found / len(pids)


def cpu_s(pids: Sequence[int]) -> float:
    """Return the processor time of some nodes, with that of all that has ended below them, in s."""
    found = 0.0
    for pid in pids:
        for process in tree(pid):
            try:
                found += sum(process.cpu_times()[:4])
            except psutil.NoSuchProcess:
                continue
    return found


class Memory:
    """The largest sum of the nodes' memory while something goes on, in MB (Pss)."""

    def __init__(self, pids: Sequence[int]) -> None:
        """Take the processes below which the nodes run."""
        self.most_mb = 0.0
        self._pids, self._done = pids, threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Memory":
        """Begin to look."""
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        """Stop."""
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(0.5):
            self.most_mb = max(self.most_mb, memory_mb(self._pids))
