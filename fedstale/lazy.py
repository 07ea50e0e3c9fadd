"""Doors that import nothing: a file of a package loads as one of its names is used."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path


def names_of(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package (PEP 562).

    They stand in the `else` of `if TYPE_CHECKING`, whose imports say to type checkers, to editors
    and to this where each name is. A value is not kept in the package: its file stays the one place
    that holds it.
    """
    text = Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8")
    (block,) = (node for node in ast.parse(text).body if isinstance(node, ast.If))
    places = {
        alias.name: str(node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def imported(name: str) -> object:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if places[name] == package:
            return import_module(f"{package}.{name}")
        return getattr(import_module(places[name]), name)

    return imported, lambda: list(sys.modules[package].__all__)
