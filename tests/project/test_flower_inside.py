"""What Flower keeps to itself is imported in one room, and stands in its table name by name."""

import ast
import importlib
import inspect
import re
from functools import cache

import flwr
import pytest
from places import ROOT

from fedstale.flower.features import FEATURES, release

ROOM = ROOT / "fedstale" / "flower"
MOST_FILES, MOST_NAMES = 6, 90

DOORS = ("flwr", "flwr.app", "flwr.serverapp", "flwr.serverapp.strategy", "flwr.clientapp")
PUBLIC = {name: set(importlib.import_module(name).__all__) for name in DOORS[1:]} | {"flwr": set()}
LISTED = {name for feature in FEATURES for name in feature.names}


def product():
    """Every file of the product; a built-in app is one of Flower's, by its public interface too."""
    for folder in ("fedstale", "traces", "strategies", "agents"):
        yield from sorted((ROOT / folder).rglob("*.py"))


@cache
def is_module(name):
    try:
        return inspect.ismodule(importlib.import_module(name))
    except ImportError:
        return False


@cache
def private_names(path):
    """What a file takes of Flower's inside, as module:attribute.

    Of a module that is imported whole, these are the attributes that the file names.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names, modules = set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "flwr":
                    modules[alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "flwr":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if is_module(whole):
                    modules[alias.asname or alias.name] = whole
                elif alias.name not in PUBLIC.get(node.module, ()):
                    names.add(f"{node.module}:{alias.name}")
    used = {ast.unparse(n.value): set() for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            used[ast.unparse(node.value)].add(node.attr)
    for bound, module in modules.items():
        if module not in PUBLIC:
            # Handed on whole, it is named by itself.
            names |= {f"{module}:{each}" for each in used.get(bound, ())} or {module}
    return names


def taken():
    found = {path: private_names(path) for path in product()}
    return {path: names for path, names in found.items() if names}


def test_only_six_files_of_one_room_import_what_flower_keeps_to_itself():
    outside = {str(p.relative_to(ROOT)): n for p, n in taken().items() if p.parent != ROOM}
    assert outside == {}
    assert len(taken()) <= MOST_FILES
    assert len(set().union(*taken().values())) <= MOST_NAMES


def test_no_file_imports_what_flower_keeps_to_itself_before_that_part_runs():
    found = {}
    for path in taken():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = [n.module for n in tree.body if isinstance(n, ast.ImportFrom)]
        modules += [a.name for n in tree.body if isinstance(n, ast.Import) for a in n.names]
        private = [m for m in modules if m.split(".")[0] == "flwr" and m not in PUBLIC]
        found |= {path.name: private} if private else {}
    assert found == {}


def test_every_private_name_that_is_imported_stands_in_the_table():
    imported = set().union(*taken().values())
    # A module that is handed on whole is one in which something is replaced.
    listed = LISTED | {name.partition(":")[0] for name in LISTED}
    assert sorted(imported - listed) == []


def last_word(name):
    """The word by which code names a listed thing; of a protobuf field, its own name."""
    word = re.split(r"[.:]", name)[-1]
    field = word.removesuffix("_FIELD_NUMBER")
    return word if field == word else field.lower()


def test_every_name_of_the_table_is_used():
    words = {
        word
        for path in product()
        if path != ROOM / "features.py"
        for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))
    }
    others = LISTED - set().union(*taken().values())
    assert sorted(name for name in others if last_word(name) not in words) == []


def test_no_command_names_a_module_of_flowers_inside_out_of_the_room():
    found = {
        f"{path.relative_to(ROOT)}: {node.value}"
        for path in product()
        if path.parent != ROOM
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"flwr(\.\w+)+(:\w+)?", node.value) and node.value not in PUBLIC
    }
    assert found == set()


def test_names_of_features_differ():
    names = [feature.name for feature in FEATURES]
    assert len(set(names)) == len(names)
    assert all(feature.without and feature.names for feature in FEATURES)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_every_name_of_the_table_is_there_in_the_flower_that_is_installed(feature):
    if release() < feature.since:
        pytest.skip(f"it is for Flower {feature.since} and later")
    gone = [
        f"Flower {flwr.__version__} has no {name}, on which "
        f"{feature.name!r} stands: without it {feature.without}"
        for name in feature.missing()
    ]
    assert not gone, "\n".join(gone)
