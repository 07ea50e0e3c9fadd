"""The features that stand on Flower's inside, with the names that each of them needs.

Flower's public interface is `flwr.app`, `flwr.serverapp` and `flwr.clientapp`. Whatever else this
room takes of Flower is in features.toml: a test finds the names in the code and compares, and
another resolves each in the Flower that is installed. So the day a new Flower comes, the list of
what is gone is the list of what to do, and until then each feature whose names are there stays on.
What Flower has dropped that apps import is in dropped.toml, with its name of today.
"""

import dis
import importlib
import logging
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import flwr

from fedstale.errors import ConfigError

logger = logging.getLogger(__name__)

OLDEST, NEWEST = (1, 34), (1, 42)
"""Oldest and newest release that the tests have run with; a nightly of 1.43 is not 1.43.0."""
REAL_DEVICES = (1, 41)
"""The oldest one whose SuperLink and SuperNodes do what a deployment stands on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Something of fedstale's that stands on names which Flower keeps to itself."""

    name: str
    without: str
    """What is done where a name is gone; ends the sentence "NAME is off: ..."."""
    inside: Mapping[str, str]
    """The names that it takes of each module; their users say what each stands for."""
    since: tuple[int, int]
    """The oldest release with which it works: the names of earlier ones do not suffice."""

    @property
    def names(self) -> list[str]:
        """What it stands on: `module:attribute` or `module:Class.attribute`."""
        return [f"{module}:{name}" for module, all_ in self.inside.items() for name in all_.split()]

    def missing(self) -> list[str]:
        """Return the names that the Flower of this environment does not have."""
        return [name for name in self.names if not resolves(name)]

    def fault(self) -> str:
        """Return the reason that it is off with the installed Flower; "" if it is on.

        Ends the sentence "it is off, since Flower ...".
        """
        if release() < self.since:
            return f"is older than {_text(self.since)}"
        missing = self.missing()
        return f"has no {', no '.join(missing)}" if missing else ""

    def expected(self) -> str:
        """Return with which releases of Flower it was tested."""
        return f"expected flwr {_text(self.since)} to {_text(NEWEST)}, with which it was tested"


def _read(name: str) -> dict[str, Any]:
    """Return a file of this room."""
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


FEATURES = tuple(
    Feature(name=name, since=REAL_DEVICES if about.pop("real-devices", False) else OLDEST, **about)
    for name, about in _read("features.toml").items()
)
"""Those of features.toml."""


def resolves(name: str) -> bool:
    """Return whether a name is there; the last one may be of a class, or of its objects alone.

    Example:
        >>> resolves("flwr.app:Message.metadata"), resolves("flwr.app:Nothing"), resolves("flwr.no")
        (True, False, False)
    """
    module, _, path = name.partition(":")
    try:
        found: object = importlib.import_module(module)
        for part in filter(None, path.split(".")):
            if isinstance(found, type) and part in _own_names(found):
                return True
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return False
    return True


@cache
def _own_names(kind: type) -> set[object]:
    """Collect the names that methods of a class store, or look up by a text."""
    methods = (value for base in kind.__mro__ for value in vars(base).values())
    codes = (getattr(getattr(each, "fget", each), "__code__", None) for each in methods)
    return {
        step.argval
        for code in filter(None, codes)
        for step in dis.get_instructions(code)
        if step.opname in ("STORE_ATTR", "LOAD_CONST")
    }


def release() -> tuple[int, ...]:
    """Return major and minor number of the Flower of this environment."""
    return tuple(int(part) for part in flwr.__version__.split(".")[:2] if part.isdecimal())


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def _feature(name: str) -> Feature:
    (found,) = (each for each in FEATURES if each.name == name)
    return found


@cache
def has(name: str) -> bool:
    """Test if a feature is on; the log says once the reason if it is off.

    Args:
        name: of one of `FEATURES`.
    """
    feature = _feature(name)
    fault = feature.fault()
    if fault:
        logger.warning(
            "%s: off with Flower %s, which %s: %s",
            *(name, flwr.__version__, fault, feature.without),
        )
    return not fault


@cache
def _warn_if_newer() -> None:
    """Say once, in the log, that this Flower is newer than any that the tests have run with."""
    if release() > NEWEST:
        logger.warning(
            "Flower %s is newer than %s, the newest that this fedstale was tested with: "
            "fedstale doctor lists what is on and off with it",
            *(flwr.__version__, _text(NEWEST)),
        )


def require(name: str) -> None:
    """Raise if a feature is off; the log says once where Flower is newer than tests.

    Args:
        name: of one of `FEATURES`.

    Raises:
        ConfigError: a name that it stands on is gone.
    """
    _warn_if_newer()
    feature = _feature(name)
    if fault := feature.fault():
        raise ConfigError(
            f"{name}: Flower {flwr.__version__} {fault}: {feature.without}; {feature.expected()}"
        )


_DOORS = "flwr.app", "flwr.serverapp", "flwr.clientapp", "flwr.client", "flwr.server", "flwr.common"
"""Where a name is looked for that a module had only imported itself."""


@cache
def moved() -> Mapping[str, Mapping[str, str]]:
    """Read, of each old module, the modules that hold its names now: "NAME" or "OLD>NEW"."""
    return _read("dropped.toml")


def missing_in(module: str, names: Sequence[str]) -> str:
    """List what an import asks of Flower that the installed one has not, with the names of today.

    Example:
        >>> missing_in("flwr.server.driver", ["Driver"])
        'flwr.server.driver.Driver (now Grid of flwr.serverapp)'
    """
    if module.partition(".")[0] != "flwr":
        return ""
    lost = [name for name in names if name != "*"]
    if resolves(module):
        lost = [n for n in lost if not any(resolves(f"{module}{c}{n}") for c in ":.")]
    elif not lost:
        return _with_its_place(module)
    return ", ".join(_with_its_place(f"{module}.{name}") for name in lost)


def _with_its_place(lost: str) -> str:
    """Return a name that Flower has dropped, and where its like is now, if anywhere."""
    module, _, name = lost.rpartition(".")
    if lost in moved():
        return f"{lost} (see {' and '.join(moved()[lost])})"
    for place, entries in moved().get(module, {}).items():
        for old, _, new in (entry.partition(">") for entry in entries.split()):
            if old == name:
                return f"{lost} (now {new or old} of {place})"
    place = next((door for door in _DOORS if resolves(f"{door}:{name}")), "")
    return f"{lost} (now of {place})" if place else lost
