"""`fedstale new`: write a starting app, which runs under `fedstale simulate` and under `flwr run`.

The template is itself a Flower app that runs, so it is linted, type-checked and tested like any
other code; making a new one is giving it another name. A folder appears whole or not at all.
"""

import shutil
import sys
import tempfile
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from typing import Annotated

import typer

from fedstale.cli.output import AsJson, one_sentence, say_json
from fedstale.errors import ConfigError

TEMPLATE = Path(__file__).parent.parent / "apps" / "template" / "starter-app"
MAX_NAME_LENGTH = 32
"""Longest name that Flower accepts for an app."""

_PACKAGE = "starter_app"
_PROJECT = "starter-app"
# Flower leaves folders of these names out of the bundle that it sends to the devices.
_DROPPED = ("build", "eggs", "env", "ENV", "lib", "lib64", "parts", "venv")


def new(
    path: Annotated[Path, typer.Argument(help="Folder to make; its name becomes the app's.")],
    as_json: AsJson = False,
) -> None:
    """Write a starting app that runs under fedstale simulate and under flwr run."""
    with one_sentence():
        create(path, name=path.name)
    if as_json:
        say_json(path)
    else:
        typer.echo(f"wrote {path}; try: fedstale simulate {path}")


def create(path: Path, *, name: str | None = None) -> None:
    """Write a new app into a folder.

    Args:
        path: the folder to make; it may exist if it is empty.
        name: the app's name, a Python identifier in which hyphens may stand for underscores. The
            package is named with underscores, the project with hyphens, as Flower wants it. None
            or empty takes the name of the folder.

    Raises:
        ConfigError: the name cannot be used, or the folder has something in it.
    """
    path = Path(path).resolve()
    package = package_name(name or path.name)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(
            f"path = {str(path)!r}: expected a new or an empty folder; choose another"
        )
    for parent in path.parents:
        if parent.exists() and not parent.is_dir():
            raise ConfigError(f"path = {str(path)!r}: expected a folder, but {parent} is a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{package}-", dir=path.parent))
        try:
            app = scratch / path.name
            _write(app, package)
            app.replace(path)
        finally:
            shutil.rmtree(scratch)
    except OSError as problem:
        raise ConfigError(
            f"path = {str(path)!r}: cannot be written, {problem.strerror}; choose a folder of yours"
        ) from problem


def package_name(name: str) -> str:
    """Return the name of the Python package of a new app.

    Example:
        >>> package_name("my-app")
        'my_app'

    Raises:
        ConfigError: it is no identifier, too long, or taken.
    """
    package = name.replace("-", "_")
    accepted = (
        f"expected a letter and then letters, digits, - or _, at most {MAX_NAME_LENGTH} in all, "
        "such as my_app"
    )
    if not (package.isidentifier() and package.isascii() and package[0].isalpha()):
        raise ConfigError(f"name = {name!r}: {accepted}")
    if len(package) > MAX_NAME_LENGTH:
        raise ConfigError(f"name = {name!r} has {len(package)} characters: {accepted}")
    if iskeyword(package) or package in _DROPPED:
        raise ConfigError(
            f"name = {name!r} has a meaning of its own in Python or in Flower: {accepted}"
        )
    if package in sys.stdlib_module_names or _is_installed(package):
        raise ConfigError(
            f"name = {name!r}: there is a Python package of that name, which the app would hide; "
            "choose another"
        )
    return package


def _is_installed(package: str) -> bool:
    """Return whether a package can be imported; an empty folder, though importable, is none."""
    spec = find_spec(package)
    if spec is None:
        return False
    folders = spec.submodule_search_locations or []
    return spec.origin is not None or any(any(Path(folder).iterdir()) for folder in folders)


def _write(app: Path, package: str) -> None:
    """Write the template under another name."""
    for source in sorted(TEMPLATE.rglob("*")):
        if source.is_dir() or "__pycache__" in source.parts:
            continue
        target = app / _renamed(source.relative_to(TEMPLATE).as_posix(), package)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_renamed(source.read_text(encoding="utf-8"), package), encoding="utf-8")


def _renamed(text: str, package: str) -> str:
    return text.replace(_PACKAGE, package).replace(_PROJECT, package.replace("_", "-"))
