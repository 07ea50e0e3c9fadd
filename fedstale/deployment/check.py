"""Faults of an app on devices, found before it is deployed.

Flower sends a bundle of some of the app's files and unpacks it in front of everything that is
installed on a device. What the bundle lacks, hides or leaves out only shows on the device.
"""

import ast
import datetime
import io
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import flwr
from cryptography import x509
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from fedstale.app_folder import unanswered, unstated
from fedstale.deployment.commands import Address
from fedstale.deployment.control import superlink
from fedstale.deployment.diagnosis import check_health
from fedstale.errors import ConfigError, FedstaleError, nearest
from fedstale.flower import command_line, features
from fedstale.simulation import FlowerApp, missing_costs, missing_text

# What no bundle is expected to hold.
_OF_TOOLS = {".git", "__pycache__", ".venv", ".flwr", "node_modules", "runs"}
_HARMLESS = {".gitignore", ".python-version", "uv.lock", "requirements.txt", "Makefile"}
_NODE_KEYS = {"partition-id", "num-partitions"}
_SHOWN = 5
_KINDS = ("train", "evaluate", "query")

SOON_DAYS = 14
"""Days before the end of a certificate from which on a check says so."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check has found."""

    text: str
    is_fault: bool = True
    """Whether the app will fail; else it may, or something is worth knowing."""


_FINDINGS = tomllib.loads(Path(__file__).with_name("findings.toml").read_text(encoding="utf-8"))


def finding(key: str, /, **about: object) -> Finding:
    """Return a finding, by its name in findings.toml."""
    row = _FINDINGS[key]
    return Finding(row["text"].format(**about), is_fault=not row.get("note", False))


class SourceFile:
    r"""What one Python file of an app needs, read without running it.

    Imports that may fail (in `try: ... except ImportError`) or that only type checkers see do not
    count, nor do settings that are read with a default.

    Raises:
        SyntaxError: it is no Python.

    Example:
        >>> SourceFile("import numpy as np\nx = context.run_config['rate']").run_config
        {'rate': 2}
    """

    def __init__(self, text: str) -> None:
        self.imports: list[tuple[str, Sequence[str], int]] = []
        """What must be importable: dotted name of a module, names taken from it, and the line."""
        self.run_config: dict[str, int] = {}
        """Keys without which it fails, with a line."""
        self.node_config: dict[str, int] = {}
        """The same of the node config."""
        self.strings: set[str] = set()
        """All texts in it, such as names of files."""
        self.handled: set[str] = set()
        """Types of messages, with their action if they have one, that functions in it answer."""
        self._keys = {"run_config": self.run_config, "node_config": self.node_config}
        tree = ast.parse(text)
        self.code = ast.unparse(tree)
        """Its text without comments."""
        self._read(tree, {}, is_needed=True)

    def _read(self, node: ast.AST, tables: Mapping[str, str], *, is_needed: bool) -> None:
        """Note what a node of the syntax tree needs.

        Args:
            node: with all below it.
            tables: variables that stand for a config, with its name.
            is_needed: whether imports must succeed here.
        """
        optional: list[ast.AST] = []
        match node:
            case ast.Constant(value=str(text)):
                self.strings.add(text)
            case ast.Import() if is_needed:
                self.imports += [(alias.name, (), node.lineno) for alias in node.names]
            case ast.ImportFrom(module=str(name), level=0) if is_needed:
                # An imported name may be a module too; whether it is, only its place tells.
                self.imports.append((name, [alias.name for alias in node.names], node.lineno))
            case ast.Try() if any(_catches_imports(handler) for handler in node.handlers):
                optional = [*node.body, *node.handlers]
            case ast.If() if "TYPE_CHECKING" in ast.dump(node.test):
                optional = [*node.body]
            case ast.FunctionDef():
                tables = {**tables, **self._variables(node)}
                self.handled |= {kind for d in node.decorator_list for kind in _handled_by(d)}
            case ast.Call(func=ast.Name(id="ClientApp")) if node.args or "client_fn" in {
                keyword.arg for keyword in node.keywords
            }:
                self.handled |= {"train", "evaluate"}
            case ast.Subscript(slice=ast.Constant(value=str(key)), ctx=ast.Load()):
                table = (
                    node.value.attr
                    if isinstance(node.value, ast.Attribute)
                    else tables.get(getattr(node.value, "id", ""))
                )
                if table in self._keys:
                    self._keys[table].setdefault(key, node.lineno)
        for child in ast.iter_child_nodes(node):
            self._read(child, tables, is_needed=is_needed and child not in optional)

    def _variables(self, function: ast.FunctionDef) -> dict[str, str]:
        """Return the variables that a function gives a config, with the config's name."""
        return {
            target.id: node.value.attr
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Attribute)
            and node.value.attr in self._keys
            for target in node.targets
            if isinstance(target, ast.Name)
        }


def _handled_by(decorator: ast.expr) -> list[str]:
    """Return the kind of messages that a function under a decorator of a ClientApp answers."""
    match decorator:
        case ast.Call(func=ast.Attribute(attr=kind), args=args) if kind in _KINDS:
            match args:
                case [ast.Constant(value=str(action)), *_] if action != "default":
                    return [f"{kind}.{action}"]
            return [kind]
    return []


def _catches_imports(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    names = {n.id for n in ast.walk(handler.type) if isinstance(n, ast.Name)}
    return bool(names & {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


def check_app(app: FlowerApp, run_config: str = "") -> list[Finding]:
    """Check an app.

    Args:
        app: in a directory.
        run_config: overrides of the run, as `flwr run` takes them.

    Returns:
        What was found, faults first.
    """
    try:
        archived = io.BytesIO(command_line.bundle(app.directory))
    except ConfigError:
        raise
    except (ValueError, OSError) as problem:
        return [finding("no_bundle", problem=" ".join(str(problem).split()))]
    files = command_line.app_files(app.directory)
    with zipfile.ZipFile(archived) as archive:
        bundled = {name for name in archive.namelist() if not name.startswith(".info/")}
    sources: dict[str, SourceFile] = {}
    findings: list[Finding] = []
    for name in sorted(name for name in bundled if name.endswith(".py")):
        try:
            sources[name] = SourceFile(files[name].read_text(encoding="utf-8"))
        except (SyntaxError, ValueError) as problem:
            findings.append(finding("no_python", name=name, problem=problem))
    findings += _left_out(set(files) - bundled, sources)
    findings += _hidden(bundled, app)
    findings += _packages(files, bundled, sources, app)
    findings += _settings(sources, app, run_config)
    missing = missing_costs(sorted({k for s in sources.values() for k in s.handled}), app.costs)
    if missing and app.work is None:
        findings.append(finding("no_costs", missing=missing_text(missing)))
    return sorted(findings, key=lambda finding: not finding.is_fault)


def check_superlink(name: str) -> list[Finding]:
    """Check that a SuperLink of Flower's config.toml can be reached from here.

    Raises:
        ConfigError: config.toml cannot be read, has none of this name, or names unusable files.
    """
    link = superlink(name)
    if str(link.get("address", "")).startswith(":"):
        return []
    ca, shown = link.get("root-certificates"), link.get("client-certificate")
    try:
        at = Address.parse(str(link.get("address")))
        check_health(
            at,
            Path(ca).expanduser() if ca else None,
            insecure=bool(link.get("insecure")),
            certificate=Path(shown).expanduser() if shown else None,
        )
    except ConfigError:
        raise
    except FedstaleError as problem:
        return [*expiries(ca, shown), Finding(str(problem))]
    return expiries(ca, shown)


def expiries(*files: str | Path | None) -> list[Finding]:
    """Return which certificates end soon, or have ended.

    Args:
        files: of one certificate or several; None for one that is not used.

    Raises:
        ConfigError: a file holds no certificate.
    """
    found, now = [], datetime.datetime.now(datetime.UTC)
    for file in files:
        if file is None:
            continue
        path = Path(file).expanduser()
        try:
            certificates = x509.load_pem_x509_certificates(path.read_bytes())
        except (OSError, ValueError) as problem:
            raise ConfigError(f"{path} is no certificate: {problem}") from None
        # While an authority is changed its file holds both, and the newer one decides.
        left = max(certificate.not_valid_after_utc for certificate in certificates) - now
        if left.total_seconds() < 0:
            found.append(finding("certificate_ended", path=path))
        elif left.days < SOON_DAYS:
            found.append(finding("certificate_ends", path=path, days=left.days))
    return found


def _left_out(names: set[str], sources: Mapping[str, SourceFile]) -> Iterator[Finding]:
    """Report files that the bundle leaves out; a file that the app names is a fault."""
    unnamed = []
    for name in sorted(names):
        path = Path(name)
        if set(path.parts) & _OF_TOOLS or path.name in _HARMLESS or path.suffix in {".py", ".pyc"}:
            continue
        users = [
            user
            for user, source in sources.items()
            if any(f"/{text}".endswith(f"/{path.name}") for text in source.strings)
        ]
        if users:
            yield finding("named_file", name=name, user=users[0], allowed=_allowed())
        else:
            unnamed.append(name)
    if unnamed:
        more = f" and {len(unnamed) - _SHOWN} more" if len(unnamed) > _SHOWN else ""
        yield finding(
            "other_files", names=f"{', '.join(unnamed[:_SHOWN])}{more}", allowed=_allowed()
        )


def _allowed() -> str:
    return ", ".join(pattern.rpartition("/")[2] for pattern in command_line.bundled_patterns())


def _hidden(bundled: set[str], app: FlowerApp) -> Iterator[Finding]:
    """Report folders and modules of the app that hide something installed."""
    own = canonicalize_name(app.name)
    for name in sorted(_modules(bundled)):
        owners = _owners().get(name, set()) - {own}
        hidden = "Python's own" if name in sys.stdlib_module_names else ", ".join(sorted(owners))
        if hidden:
            yield finding("hidden", name=name, owner=hidden)


def _packages(
    files: Mapping[str, Path],
    bundled: set[str],
    sources: Mapping[str, SourceFile],
    app: FlowerApp,
) -> Iterator[Finding]:
    """Report imports that a device may not satisfy."""
    declared = _declared(app.dependencies)
    on_disk = _modules(set(files))
    seen = set()
    for user, source in sources.items():
        for dotted, names, line in source.imports:
            if missing := features.missing_in(dotted, names):
                yield finding(
                    "dropped", user=user, line=line, names=missing, flower=flwr.__version__
                )
            name = dotted.split(".")[0]
            where = f"{user}, line {line}, imports {dotted}"
            if name in on_disk:
                path = dotted.replace(".", "/")
                places = {f"{path}.py", f"{path}/__init__.py"}
                if dotted not in seen and places & set(files) and not places & bundled:
                    yield finding("not_bundled", where=where)
                seen.add(dotted)
                continue
            if name in sys.stdlib_module_names or name in seen:
                continue
            seen.add(name)
            owners = _owners().get(name, {_distribution(name)})
            is_declared = bool(owners & declared)
            package = sorted(owners)[0]
            if not _is_installed(name):
                key = "not_installed" if is_declared else "not_installed_nor_declared"
                yield finding(key, where=where, package=package)
            elif not is_declared:
                found = finding("not_declared", where=where, package=package)
                yield replace(found, is_fault=name == "fedstale")


def _settings(
    sources: Mapping[str, SourceFile], app: FlowerApp, run_config: str
) -> Iterator[Finding]:
    """Report settings that are read but not defined, given but unknown, or without effect."""
    for user, source in sources.items():
        for key, line in source.run_config.items():
            if key not in app.defaults:
                near = nearest(key, sorted(app.defaults))
                yield finding("unknown_setting", user=user, line=line, key=key, near=near)
        for key, line in source.node_config.items():
            if key not in _NODE_KEYS:
                yield finding("node_setting", user=user, line=line, key=key)
    try:
        given = app.run_config(run_config)
    except ConfigError as problem:
        yield Finding(str(problem))
        return
    code = "\n".join([*(source.code for source in sources.values()), *map(str, given.values())])
    for stage, answer in unanswered(code):
        yield finding("unanswered", stage=stage, answer=answer)
    lacking, stated = unstated(code)
    for name in sorted(lacking):
        yield finding("unstated", name=name, stated=", ".join(sorted(stated)) or "nothing")


def _modules(names: set[str]) -> set[str]:
    """Return the modules that can be imported from the top of an app's folder."""
    return {
        name.split("/")[0].removesuffix(".py")
        for name in names
        if name.endswith(".py") and not set(Path(name).parts) & _OF_TOOLS
    }


def _declared(dependencies: Iterable[str]) -> set[str]:
    found = set()
    for text in dependencies:
        with suppress(InvalidRequirement):
            found.add(_distribution(Requirement(text).name))
    return found


@cache
def _owners() -> dict[str, set[str]]:
    """Return the distributions that bring each importable name."""
    found = packages_distributions()
    return {name: {_distribution(owner) for owner in found[name]} for name in found}


def _distribution(name: str) -> str:
    """Return the name that pip knows a package by; a nightly stands for its release."""
    return canonicalize_name(name).removesuffix("-nightly")


def _is_installed(name: str) -> bool:
    try:
        return name in sys.modules or find_spec(name) is not None
    except (ImportError, ValueError):
        return False
