"""`fedstale doctor`: what a report of a fault needs to say of a machine."""

import json
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import typer

from fedstale import __version__
from fedstale.cli.output import AsJson
from fedstale.machine import release, system

_PACKAGES = (
    *("flwr", "numpy", "psutil", "pandas", "pyarrow", "scipy", "torch", "plotly"),
    *("gymnasium", "stable-baselines3", "ray", "numba", "dp-accounting", "tensorboard"),
    *("click", "typer", "rich"),
)
_PROGRAMS = ("flwr", "flower-superlink", "flower-supernode", "nginx")


def doctor(as_json: AsJson = False) -> None:
    """Say which versions and which machine these are, for a report of a fault."""
    facts = described()
    if as_json:
        typer.echo(json.dumps(facts))
        return
    for name, value in facts.items():
        typer.echo(f"{name}: {value}")


def described() -> dict[str, str]:
    """Return facts about this machine by name; nothing in them says whose it is."""
    # Slow to import, and no other command needs them to start.
    from fedstale.flower import features
    from fedstale.strategies.types import n_cores

    facts = {
        "fedstale": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": system(),
        "libc": " ".join(platform.libc_ver()),
        "cores": str(n_cores()),
        "memory": _memory(),
        "terminal": f"{shutil.get_terminal_size().columns} columns, "
        f"{'yes' if sys.stderr.isatty() else 'no'} tty, {sys.stdout.encoding}",
    }
    for package in _PACKAGES:
        try:
            facts[package] = release(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    # Programs of an environment are found beside its Python, too.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    for program in _PROGRAMS:
        facts[f"program {program}"] = "found" if shutil.which(program, path=path) else "not found"
    for feature in features.FEATURES:
        gone = feature.missing()
        off = f"off, since Flower has no {', no '.join(gone)}: {feature.without}"
        facts[f"with this Flower: {feature.name}"] = off if gone else "on"
    return facts


def _memory() -> str:
    try:
        import psutil
    except ModuleNotFoundError:
        return "unknown: psutil is not installed"
    memory = psutil.virtual_memory()
    return f"{memory.total / 1e9:.1f} GB, {memory.available / 1e9:.1f} GB free"
