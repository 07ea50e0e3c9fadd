"""The command line: the app that holds all commands, its own options, and `fedstale doctor`."""

import faulthandler
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points
from pathlib import Path
from typing import Annotated

import typer
from typer.main import get_group

from fedstale import __version__
from fedstale.cli import agent, apps, compare, deploy, forecaster, simulate, traces
from fedstale.cli.output import AsJson, note
from fedstale.errors import not_loaded
from fedstale.machine import release, system

app = typer.Typer(
    name="fedstale",
    help="Federated learning on devices that go offline, slow down and report late.",
    no_args_is_help=True,
    # click suggests one already.
    suggest_commands=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_PACKAGES = (
    *("flwr", "numpy", "psutil", "pandas", "pyarrow", "scipy", "torch", "plotly"),
    *("gymnasium", "stable-baselines3", "ray", "dp-accounting", "tensorboard"),
    *("click", "typer", "rich"),
)
_PROGRAMS = ("flwr", "flower-superlink", "flower-supernode", "nginx")

_RUN, _ANALYSE, _LEARN, _DEPLOY = "Run", "Analyse", "Learn", "Deploy"

app.command(
    rich_help_panel=_RUN,
    epilog="Examples: fedstale simulate digits  |  "
    "fedstale simulate my_app --traces phones.parquet --until 2d --out runs/phones",
)(simulate.simulate)
app.command(
    rich_help_panel=_RUN, epilog="Example: fedstale new my_app && fedstale simulate my_app"
)(apps.new)
app.add_typer(traces.app, name="traces", rich_help_panel=_RUN)
app.command(rich_help_panel=_ANALYSE, epilog="Example: fedstale report runs/digits")(compare.report)
app.command(
    rich_help_panel=_ANALYSE,
    epilog="Examples: fedstale advise runs/digits  |  fedstale advise runs/digits --apply",
)(compare.advise)
app.command(
    rich_help_panel=_ANALYSE,
    epilog="Examples: fedstale compare waiting.toml  |  "
    "fedstale compare runs/a runs/b --target 'accuracy 0.9'",
)(compare.compare)
app.command(
    rich_help_panel=_ANALYSE,
    epilog="Example: fedstale runs --sort 'server accuracy'",
)(compare.runs)
app.add_typer(forecaster.app, name="forecaster", rich_help_panel=_LEARN)
app.add_typer(agent.app, name="agent", rich_help_panel=_LEARN)
app.command(
    rich_help_panel=_DEPLOY,
    epilog="Examples: fedstale check my_app  |  "
    "fedstale check --server fl.example.org:8000 --ca ca.crt",
)(apps.check)
app.command(rich_help_panel=_DEPLOY, epilog="Example: fedstale up digits --nodes 3")(apps.up)
app.add_typer(deploy.app, name="deploy", rich_help_panel=_DEPLOY)
app.command(
    rich_help_panel=_DEPLOY,
    context_settings=deploy.PASSED_ON,
    epilog="Example: fedstale node --superlink fl.example.org:8000 --root-certificates ca.crt "
    "--auth-supernode-private-key node.key",
)(deploy.node)
app.command(
    rich_help_panel=_DEPLOY,
    context_settings=deploy.PASSED_ON,
    epilog="Example: fedstale flwr run my_app mine --stream",
)(deploy.flwr)


def add_commands(root: typer.Typer, points: Iterable[EntryPoint]) -> None:
    """Add commands of other packages; one that fails becomes a command that says why.

    Args:
        root: the app to add them to.
        points: each of a `typer.Typer`: a group, or commands of the top level if it has no name.
    """
    for point in points:
        try:
            added = point.load()
            get_group(added)
        except Exception as problem:
            added = _refusing(point.name, not_loaded(problem))
        root.add_typer(added, rich_help_panel=added.rich_help_panel)


def _refusing(name: str, why: str) -> typer.Typer:
    """Return a command that takes any words, and only says why there is nothing more."""
    any_words = {"allow_extra_args": True, "ignore_unknown_options": True}
    refusing = typer.Typer()

    @refusing.command(name, help=f"It {why}.", context_settings=any_words)
    def refuse() -> None:
        note(f"fedstale: {name} {why}")
        raise typer.Exit(2)

    return refusing


add_commands(app, sorted(entry_points(group="fedstale.commands")))
add_commands(traces.app, sorted(entry_points(group="fedstale.commands.traces")))


def main() -> None:
    """Run the command line; each command turns what its user can mend into one sentence."""
    # A client that ends the process by a fatal signal leaves on the terminal where it was.
    faulthandler.enable(sys.__stderr__ or 2)
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedstale {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_show_version, is_eager=True, help="Show version."
        ),
    ] = False,
) -> None:
    pass


@app.command(rich_help_panel=_RUN, epilog="Example: fedstale doctor")
def doctor(as_json: AsJson = False) -> None:
    """Print versions and machine, for a report of a fault."""
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
        fault = feature.fault()
        off = f"off, since Flower {fault}: {feature.without}"
        facts[f"with this Flower: {feature.name}"] = off if fault else "on"
    return facts


def _memory() -> str:
    try:
        import psutil
    except ModuleNotFoundError:
        return "unknown: psutil is not installed"
    memory = psutil.virtual_memory()
    return f"{memory.total / 1e9:.1f} GB, {memory.available / 1e9:.1f} GB free"
