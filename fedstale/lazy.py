"""A door that imports nothing: the names of a package whose files load when a name is used."""

from collections.abc import Callable, Mapping
from importlib import import_module


def names_of(package: str, files: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package (PEP 562).

    It stands in the `else` of `if TYPE_CHECKING`, whose imports say the same to type checkers and
    editors. A value is not kept in the package: its file stays the one place that holds it.

    Args:
        package: its import name.
        files: the public names of each file of the package, separated by spaces.
    """
    places = {name: f"{package}.{file}" for file, names in files.items() for name in names.split()}

    def imported(name: str) -> object:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(places[name]), name)

    return imported
