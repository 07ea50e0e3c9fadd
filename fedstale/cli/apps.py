"""`fedstale new`, `check` and `up`: start an app, say what fails on devices, and deploy it here.

The template is itself a Flower app that runs, so it is linted, type-checked and tested like any
other code; making a new one is giving it, or another app, a new name. A folder appears whole or not
at all.
"""

import json
import shutil
import sys
import tempfile
import tomllib
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from typing import Annotated

import typer

from fedstale.app_folder import app_folder
from fedstale.cli.output import App, AsJson, deployed, note, one_sentence, say, say_json
from fedstale.errors import ConfigError

TEMPLATE = Path(__file__).parent.parent / "apps" / "template" / "starter-app"
MAX_NAME_LENGTH = 32
"""Longest name that Flower accepts for an app."""

# Files that may have the name of an app in them; all others are copied as they are.
_NAMED = {".py", ".toml", ".md"}
# Flower leaves folders of these names out of the bundle that it sends to the devices.
_DROPPED = ("build", "eggs", "env", "ENV", "lib", "lib64", "parts", "venv")


@one_sentence()
def new(
    path: Annotated[Path, typer.Argument(help="Folder to make; its name becomes the app's.")],
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="APP",
            help="Directory of an app to copy, such as examples/fashion of the repository, or "
            "digits; default a small template.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a starting app that runs under fedstale simulate and under flwr run."""
    create(path, source=source)
    say(f"wrote {path}; try: fedstale simulate {path}", path, as_json=as_json)


@one_sentence()
def check(
    app: Annotated[
        str | None,
        typer.Argument(metavar="APP", help="Directory of a Flower app, or a built-in one."),
    ] = None,
    superlink: Annotated[
        str | None,
        typer.Argument(help="Name of a SuperLink in Flower's config.toml, to be reached too."),
    ] = None,
    run_config: Annotated[
        str, typer.Option("--run-config", "-c", help="Overrides that the run will have.")
    ] = "",
    server: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Where devices connect: say what a stranger can do there."
        ),
    ] = None,
    ca: Annotated[Path, typer.Option(help="The authority's certificate, for --server.")] = Path(
        "ca.crt"
    ),
    as_json: AsJson = False,
) -> None:
    """Check an app for faults on devices, or a server for doors that are open to strangers.

    Packages are looked for here: run it in an environment like that of the devices. A server is
    asked from outside, and nothing is changed there: run it from where devices are.
    """
    from fedstale.deployment import check_app, check_superlink

    findings, name = [], server
    if server is not None:
        from fedstale.deployment import Address, probe

        findings += probe(Address.parse(server), ca)
    elif app is None:
        raise ConfigError("app: expected an app, or --server HOST:PORT")
    if app is not None:
        from fedstale.simulation import FlowerApp

        checked = FlowerApp.find(app)
        name = checked.name
        findings += check_app(checked, run_config)
    if superlink is not None:
        findings += check_superlink(superlink)
    if as_json:
        typer.echo(json.dumps([{"fault": f.is_fault, "text": f.text} for f in findings]))
    else:
        for finding in findings:
            typer.echo(f"{'fault' if finding.is_fault else 'note'}: {finding.text}")
        if not findings:
            typer.echo(f"{name}: no fault found")
    if any(finding.is_fault for finding in findings):
        raise typer.Exit(1)


@one_sentence()
def up(
    app: App,
    nodes: Annotated[int, typer.Option("--nodes", "-n", help="Number of SuperNodes.")] = 2,
    run_config: Annotated[
        str, typer.Option("--run-config", "-c", help="Overrides as in flwr run.")
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="New folder for certificates, keys, state and logs; default runs/up-APP.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier deployment's folder.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run an app on a SuperLink and SuperNodes that live on this machine for the time of the run.

    All are Flower's own processes, with TLS and node keys; for trying and small deployments.
    """
    from fedstale.deployment import run_app
    from fedstale.simulation import FlowerApp

    found = FlowerApp.find(app)
    folder = out or Path("runs") / f"up-{found.directory.name}"
    with deployed(found, folder, nodes, run_config, overwrite=overwrite) as deployment:
        show = (lambda line: None) if as_json else typer.echo
        run_id = run_app(deployment, found.directory, run_config=run_config, show=show)
        note(f"fedstale: run {run_id} completed; logs are in {folder}")
    if as_json:
        say_json(folder, run_id=run_id)


def create(path: Path, *, source: str | Path | None = None) -> None:
    """Write a new app into a folder.

    Args:
        path: the folder to make; it may exist if it is empty. Its name is the app's: the package
            is named with underscores, the project with hyphens, as Flower wants it.
        source: the app that is copied; the template if None.

    Raises:
        ConfigError: the name cannot be used, the folder has something in it, or the source is no
            app of one package.
    """
    path, source = Path(path).resolve(), TEMPLATE if source is None else app_folder(source)
    package = package_name(path.name)
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
            _write(source, app, package)
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


def _write(source: Path, app: Path, package: str) -> None:
    """Copy an app under another name."""
    try:
        (own,) = (path.parent.name for path in source.glob("*/__init__.py"))
        about = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))
        old, new = about["project"]["name"], package.replace("_", "-")
    except (OSError, KeyError, ValueError) as problem:
        raise ConfigError(
            f"from = {str(source)!r}: expected the folder of an app, with a pyproject.toml and one "
            f"Python package ({problem})"
        ) from None

    def named(text: str) -> str:
        text = text.replace(own, package)
        return text.replace(f'"{old}"', f'"{new}"').replace(f"# {old}\n", f"# {new}\n")

    for path in source.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            target = app / named(path.relative_to(source).as_posix())
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix in _NAMED:
                target.write_text(named(path.read_text("utf-8")), encoding="utf-8")
            else:
                shutil.copyfile(path, target)
