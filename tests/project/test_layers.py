"""The layers traces <- strategies <- agents <- fedstale, and what the package declares."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PLACES = PROJECT["tool"]["setuptools"]["package-dir"]

# What a layer may import of the others.
BELOW = {
    "traces": {"traces", "errors"},
    "strategies": {"traces", "strategies", "errors"},
    "agents": {"traces", "strategies", "agents", "errors"},
}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


@pytest.mark.parametrize("layer", BELOW)
def test_a_layer_imports_only_the_layers_below_it(layer):
    for path in (ROOT / layer).rglob("*.py"):
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "fedstale" and len(parts) > 1:
                assert parts[1] in BELOW[layer], f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("fedstale", {"numpy", "torch", "flwr", "ray"}),
        ("fedstale.traces", {"flwr", "ray", "stable_baselines3", "sb3_contrib", "gymnasium"}),
        ("fedstale.traces.sources", {"flwr", "ray", "stable_baselines3", "torch"}),
        ("fedstale.strategies", {"ray", "stable_baselines3", "sb3_contrib", "gymnasium"}),
        ("fedstale.client", {"numpy.testing", "torch", "pandas", "ray", "stable_baselines3"}),
        ("fedstale.agents", {"torch", "ray", "stable_baselines3", "sb3_contrib", "gymnasium"}),
        ("fedstale.cli", {"numpy", "pandas", "torch", "flwr", "ray", "stable_baselines3"}),
        ("fedstale.simulation", {"ray", "stable_baselines3", "sb3_contrib", "gymnasium"}),
    ],
)
def test_importing_a_layer_leaves_heavy_libraries_out(module, heavy):
    code = f"import {module}, sys; print(*sorted(set(sys.modules) & {heavy!r}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def test_every_folder_with_python_files_is_a_declared_package():
    found = set()
    for package, folder in PLACES.items():
        if package.count(".") > 1:
            continue
        for init in (ROOT / folder).rglob("__init__.py"):
            inside = init.parent.relative_to(ROOT / folder).parts
            # Built-in apps are data: Flower loads them from their own directories.
            if (package, *inside)[:2] != ("fedstale", "apps") or len(inside) == 1:
                found.add(".".join((package, *inside)))
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


def test_every_public_name_exists_and_is_listed_once():
    import importlib

    for package in PROJECT["tool"]["setuptools"]["packages"]:
        module = importlib.import_module(package)
        names = getattr(module, "__all__", [])
        assert len(set(names)) == len(names)
        for name in names:
            assert hasattr(module, name), f"{package}.{name}"


def test_no_test_lies_where_its_folder_would_hide_the_package():
    # pytest puts a test's folder on sys.path, and tests/fedstale would be found before fedstale.
    beside = {path.name for path in (ROOT / "tests").glob("*.py")}
    assert beside == {"typecheck.py"}
