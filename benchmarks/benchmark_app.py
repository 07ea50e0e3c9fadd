"""The Flower apps that benchmarks run: each is a ServerApp, a ClientApp and a few settings."""

from pathlib import Path

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
