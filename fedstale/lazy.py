"""Doors that import nothing: a file of a package loads as one of its names is used."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def names_of(
    package: str, files: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package (PEP 562).

    They stand in the `else` of `if TYPE_CHECKING`, whose imports say the same to type checkers and
    editors. A value is not kept in the package: its file stays the one place that holds it.

    Args:
        package: its import name; its `__all__` is what `__dir__` lists.
        files: the public names of each file of the package, separated by spaces; those of "" are
            files and packages themselves.
    """
    places = {name: file for file, names in files.items() for name in names.split()}

    def imported(name: str) -> object:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{places[name] or name}")
        return getattr(module, name) if places[name] else module

    return imported, lambda: list(sys.modules[package].__all__)
