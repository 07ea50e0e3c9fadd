"""What would go wrong when an app goes out to devices, found before it does.

Flower sends a bundle of some of the app's files and unpacks it in front of everything that is
installed on a device. What the bundle lacks, hides or leaves out only shows on the device.
"""

import ast
import io
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from flwr.cli.build import build_fab_from_disk
from flwr.cli.utils import AppPathDepthError, collect_files
from flwr.common.config import flatten_dict, get_project_config, parse_config_args
from flwr.common.constant import FAB_INCLUDE_PATTERNS
from flwr.supercore.utils import get_flwr_home
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from fedstale.config import nearest
from fedstale.deployment.commands import Address
from fedstale.deployment.diagnosis import check_health
from fedstale.errors import ConfigError, FedstaleError

# What no bundle is expected to hold.
_OF_TOOLS = {".git", "__pycache__", ".venv", ".flwr", "node_modules", "runs"}
_HARMLESS = {".gitignore", ".python-version", "uv.lock", "requirements.txt", "Makefile"}
_NODE_KEYS = {"partition-id", "num-partitions"}
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check has found."""

    text: str
    is_fault: bool
    """Whether the app will fail; else it may, or something is worth knowing."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """What one Python file of an app needs, read without running it."""

    imports: dict[str, int] = field(default_factory=dict)
    """Dotted names that must be importable, with the line of the first import."""
    run_config: dict[str, int] = field(default_factory=dict)
    """Keys without which it fails, with a line."""
    node_config: dict[str, int] = field(default_factory=dict)
    """The same of the node config."""
    strings: frozenset[str] = frozenset()
    """All texts in it, such as names of files."""


def check_app(directory: Path, run_config: str = "") -> list[Finding]:
    """Check an app.

    Args:
        directory: of the app.
        run_config: overrides of the run, as `flwr run` takes them.

    Returns:
        What was found, faults first.

    Raises:
        ConfigError: it is no Flower app.
    """
    try:
        project = get_project_config(directory)
    except (FileNotFoundError, ValueError) as problem:
        raise ConfigError(f"app = {str(directory)!r} is no Flower app: {problem}") from None
    files = collect_files(directory)
    try:
        bundled = _names(build_fab_from_disk(directory))
    except (AppPathDepthError, ValueError, OSError) as problem:
        text = " ".join(str(problem).split())
        return [Finding(f"Flower cannot make a bundle of the app: {text}", is_fault=True)]
    sources, findings = _sources(files, bundled)
    findings += _left_out(set(files) - bundled, sources)
    findings += _hidden(bundled, project)
    findings += _packages(files, bundled, sources, project)
    findings += _settings(sources, project, run_config)
    return sorted(findings, key=lambda finding: not finding.is_fault)


def check_superlink(name: str) -> list[Finding]:
    """Check that a SuperLink of Flower's config.toml can be reached from here.

    Raises:
        ConfigError: config.toml has none of this name, or names files that cannot be used.
    """
    path = get_flwr_home() / "config.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))["superlink"]
    except (OSError, KeyError):
        table = {}
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(f"{path} is no TOML: {problem}") from None
    links = {key: value for key, value in table.items() if isinstance(value, dict)}
    if name not in links:
        known = f"expected one of {sorted(links)}" if links else "it names none"
        raise ConfigError(
            f"superlink = {name!r} is not in {path}: {known}; add a table [superlink.{name}] with "
            "address and root-certificates"
        )
    link = links[name]
    if str(link.get("address", "")).startswith(":"):
        return []
    ca = link.get("root-certificates")
    try:
        at = Address.parse(str(link.get("address")))
        check_health(at, Path(ca).expanduser() if ca else None, insecure=bool(link.get("insecure")))
    except ConfigError:
        raise
    except FedstaleError as problem:
        return [Finding(str(problem), is_fault=True)]
    return []


def _names(bundle: bytes) -> set[str]:
    with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
        return {name for name in archive.namelist() if not name.startswith(".info/")}


def _sources(
    files: Mapping[str, Path], bundled: set[str]
) -> tuple[dict[str, SourceFile], list[Finding]]:
    sources, findings = {}, []
    for name in sorted(bundled):
        if name.endswith(".py"):
            try:
                sources[name] = read_source(files[name].read_text(encoding="utf-8"))
            except (SyntaxError, ValueError) as problem:
                findings.append(Finding(f"{name} is no Python: {problem}", is_fault=True))
    return sources, findings


def _left_out(names: set[str], sources: Mapping[str, SourceFile]) -> Iterator[Finding]:
    """Report files that the bundle leaves out; a file that the app names is a fault."""
    unnamed = []
    for name in sorted(names):
        path = Path(name)
        if set(path.parts) & _OF_TOOLS or path.name in _HARMLESS or path.suffix in {".py", ".pyc"}:
            continue
        users = [user for user, source in sources.items() if _names_it(source, path.name)]
        if users:
            yield Finding(
                f"{name} is not sent to devices, but {users[0]} names it: Flower bundles only "
                f"{_allowed()} that .gitignore does not name; let devices download it, or turn it "
                "into one of these",
                is_fault=True,
            )
        else:
            unnamed.append(name)
    if unnamed:
        more = f" and {len(unnamed) - _SHOWN} more" if len(unnamed) > _SHOWN else ""
        yield Finding(
            f"not sent to devices: {', '.join(unnamed[:_SHOWN])}{more}; Flower bundles only "
            f"{_allowed()} that .gitignore does not name",
            is_fault=False,
        )


def _names_it(source: SourceFile, file: str) -> bool:
    return any(text == file or text.endswith("/" + file) for text in source.strings)


def _allowed() -> str:
    return ", ".join(pattern.rpartition("/")[2] for pattern in FAB_INCLUDE_PATTERNS)


def _hidden(bundled: set[str], project: Mapping[str, Any]) -> Iterator[Finding]:
    """Report folders and modules of the app that hide something installed."""
    own = canonicalize_name(project["project"]["name"])
    for name in sorted(_modules(bundled)):
        owners = {canonicalize_name(owner) for owner in _owners().get(name, ())} - {own}
        hidden = "Python's own" if name in sys.stdlib_module_names else ", ".join(sorted(owners))
        if hidden:
            yield Finding(
                f"the app's {name} hides the package {name} ({hidden}) on every device, because "
                "an app comes first on the path: rename it",
                is_fault=True,
            )


def _packages(
    files: Mapping[str, Path],
    bundled: set[str],
    sources: Mapping[str, SourceFile],
    project: Mapping[str, Any],
) -> Iterator[Finding]:
    """Report imports that a device may not satisfy."""
    declared = _declared(project)
    own, on_disk = _modules(bundled), _modules(set(files))
    seen = set()
    for user, source in sources.items():
        for dotted, line in source.imports.items():
            name = dotted.split(".")[0]
            where = f"{user}, line {line}, imports {dotted}"
            if name in on_disk:
                if dotted not in seen and _is_lost(dotted, set(files), bundled):
                    yield Finding(
                        f"{where}, which Flower leaves out of the bundle (test_*.py, *_test.py, "
                        "folders named build, lib, env and the like, and what .gitignore names)",
                        is_fault=True,
                    )
                seen.add(dotted)
                continue
            if name in sys.stdlib_module_names or name in seen or name in own:
                continue
            seen.add(name)
            owners = {canonicalize_name(owner) for owner in _owners().get(name, ())} or {
                canonicalize_name(name)
            }
            is_declared = bool(owners & declared)
            package = sorted(owners)[0]
            if not _is_installed(name):
                yield Finding(
                    f"{where}, which is not installed here"
                    + ("" if is_declared else " and not declared")
                    + f": install {package} on every device"
                    + ("" if is_declared else ", and add it to [project] dependencies"),
                    is_fault=True,
                )
            elif not is_declared:
                yield Finding(
                    f"{where}, which is not declared: add {package!r} to [project] dependencies",
                    is_fault=name == "fedstale",
                )


def _is_lost(dotted: str, files: set[str], bundled: set[str]) -> bool:
    path = dotted.replace(".", "/")
    ways = (f"{path}.py", f"{path}/__init__.py")
    return any(way in files for way in ways) and not any(way in bundled for way in ways)


def _settings(
    sources: Mapping[str, SourceFile], project: Mapping[str, Any], run_config: str
) -> Iterator[Finding]:
    """Report settings that are read but not defined, or given but unknown."""
    known = flatten_dict(project["tool"]["flwr"]["app"].get("config", {}))
    for user, source in sources.items():
        for key, line in source.run_config.items():
            if key not in known:
                yield Finding(
                    f"{user}, line {line}, reads the run-config key {key!r}, which "
                    f"[tool.flwr.app.config] does not have: expected {nearest(key, sorted(known))}",
                    is_fault=True,
                )
        for key, line in source.node_config.items():
            if key not in _NODE_KEYS:
                yield Finding(
                    f"{user}, line {line}, reads {key!r} of the node config: start each SuperNode "
                    f"with --node-config '{key}=...'",
                    is_fault=False,
                )
    try:
        overrides = parse_config_args([run_config] if run_config.strip() else None)
        problem = "" if overrides or not run_config.strip() else "expected 'key=value' pairs"
    except (click.ClickException, ValueError, OSError) as raised:
        overrides, problem = {}, str(raised)
    if problem:
        yield Finding(f"run-config = {run_config!r}: {problem}", is_fault=True)
    for key in overrides:
        if key not in known:
            accepted = nearest(key, sorted(known))
            yield Finding(f"run-config key {key!r} is unknown: expected {accepted}", is_fault=True)


def _modules(names: set[str]) -> set[str]:
    """Return what can be imported from the top of an app's folder."""
    return {
        name.split("/")[0].removesuffix(".py")
        for name in names
        if name.endswith(".py") and not set(Path(name).parts) & _OF_TOOLS
    }


def _declared(project: Mapping[str, Any]) -> set[str]:
    found = set()
    for text in project["project"].get("dependencies", []):
        try:
            found.add(str(canonicalize_name(Requirement(text).name)))
        except InvalidRequirement:
            continue
    return found


@cache
def _owners() -> Mapping[str, list[str]]:
    """Return the distributions that bring each importable name."""
    return packages_distributions()


def _is_installed(name: str) -> bool:
    try:
        return name in sys.modules or find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def read_source(text: str) -> SourceFile:
    r"""Read a Python file.

    Imports that may fail (in `try: ... except ImportError`) or that only type checkers see do not
    count, nor do settings that are read with a default.

    Raises:
        SyntaxError: it is no Python.

    Example:
        >>> read_source("import numpy as np\nx = context.run_config['rate']").run_config
        {'rate': 2}
    """
    tree = ast.parse(text)
    source = SourceFile(
        strings=frozenset(
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )
    )
    for name, line in _imports(tree):
        source.imports.setdefault(name, line)
    for table, found in (("run_config", source.run_config), ("node_config", source.node_config)):
        for key, line in _keys(tree, table):
            found.setdefault(key, line)
    return source


def _imports(node: ast.AST) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.Import):
        yield from ((alias.name, node.lineno) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
        # A name may be a module of its own; whether it is, only the place of its parent tells.
        yield node.module, node.lineno
    for child in _required_children(node):
        yield from _imports(child)


def _required_children(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Try) and any(_catches_imports(h) for h in node.handlers):
        yield from (*node.orelse, *node.finalbody)
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        yield from node.orelse
    else:
        yield from ast.iter_child_nodes(node)


def _catches_imports(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    names = {n.id for n in ast.walk(handler.type) if isinstance(n, ast.Name)}
    return bool(names & {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


def _keys(tree: ast.Module, table: str) -> Iterator[tuple[str, int]]:
    """Find `....run_config["key"]`, also through a variable that a function gives it."""
    for scope in (tree, *(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))):
        names = {
            target.id
            for node in ast.walk(scope)
            if isinstance(node, ast.Assign) and _is_table(node.value, table, set())
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        # At the top level, a variable of the same name in some function is another one.
        names = set() if isinstance(scope, ast.Module) else names
        for node in ast.walk(scope):
            if (
                isinstance(node, ast.Subscript)
                and isinstance(node.slice, ast.Constant)
                and isinstance(node.slice.value, str)
                and isinstance(node.ctx, ast.Load)
                and _is_table(node.value, table, names)
            ):
                yield node.slice.value, node.lineno


def _is_table(node: ast.AST, table: str, names: set[str]) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == table) or (
        isinstance(node, ast.Name) and node.id in names
    )
