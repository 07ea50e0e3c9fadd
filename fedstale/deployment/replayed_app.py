"""A copy of an app whose two halves are wrapped for a replay; the app itself stays as it is.

Flower loads what pyproject.toml names and offers no other way to add something around a ClientApp.
So the copy names two modules of its own, which import the app's.
"""

import shutil
import tomllib
from pathlib import Path

import tomli_w

from fedstale.deployment.replayed_server import ReplaySettings
from fedstale.errors import ConfigError

_CLIENT, _SERVER, _SETTINGS = "replayed_client", "replayed_server", "replay.json"
_OMITTED = shutil.ignore_patterns("__pycache__", ".git", ".venv", ".flwr", "runs")

_CLIENT_CODE = '''"""The app's ClientApp, which takes as long as the trace says."""

from {module} import {name} as real
from fedstale.deployment.paced import PacedApp

app = PacedApp(real{rest})
'''
_SERVER_CODE = '''"""The app's ServerApp, on nodes that act a trace."""

from pathlib import Path

from {module} import {name} as real
from fedstale.deployment.replayed_server import ReplayedServerApp

app = ReplayedServerApp(real{rest}, Path(__file__).with_name("{settings}"))
'''


def write_replayed(app: Path, out: Path, settings: ReplaySettings) -> Path:
    """Write the copy of an app.

    Args:
        app: its folder.
        out: folder to make.
        settings: of the replay.

    Returns:
        The folder, which `flwr run` takes.

    Raises:
        ConfigError: the app has something of the names that the copy adds.
    """
    for name in (f"{_CLIENT}.py", f"{_SERVER}.py", _CLIENT, _SERVER, _SETTINGS):
        if (app / name).exists():
            raise ConfigError(f"app = {str(app)!r} has a {name}: a replay adds one; rename yours")
    shutil.copytree(app, out, ignore=_OMITTED)
    project = tomllib.loads((out / "pyproject.toml").read_text(encoding="utf-8"))
    components = project["tool"]["flwr"]["app"]["components"]
    for key, module, code in (
        ("clientapp", _CLIENT, _CLIENT_CODE),
        ("serverapp", _SERVER, _SERVER_CODE),
    ):
        place, _, attribute = components[key].partition(":")
        name, _, rest = attribute.partition(".")
        text = code.format(
            module=place, name=name, rest=f".{rest}" if rest else "", settings=_SETTINGS
        )
        (out / f"{module}.py").write_text(text, encoding="utf-8")
        components[key] = f"{module}:app"
    (out / "pyproject.toml").write_text(tomli_w.dumps(project), encoding="utf-8")
    settings.write(out / _SETTINGS)
    return out
