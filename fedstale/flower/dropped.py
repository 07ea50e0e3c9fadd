"""Names that Flower has dropped, with those of today: for apps of an older Flower.

The table, dropped.toml, has modules that apps were taught to import, and names that left a module
which is still there. Where a new name has the place of an old one, the new one is named, also where
the old one is still an alias somewhere.
"""

import ast
import linecache
import tomllib
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import flwr

from fedstale.flower.features import resolves

_DOORS = "flwr.app", "flwr.serverapp", "flwr.clientapp", "flwr.client", "flwr.server", "flwr.common"
"""Where a name is looked for that a module had only imported itself."""

MOVED: Mapping[str, Mapping[str, str]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
"""Of each old module, the modules that hold its names now, and the names."""


def advice(module: str, names: Sequence[str] = ()) -> str:
    """Name the parts of an import that the installed Flower lacks, with their names of today.

    Args:
        module: that is imported, or imported from.
        names: imported from it; none where the module itself is imported.

    Returns:
        Half a sentence; nothing where all is there, or the module is none of Flower's.

    Example:
        >>> advice("flwr.common.record", ["RecordSet"])  # doctest: +ELLIPSIS
        'flwr.common.record is gone in Flower 1...: take RecordDict (once RecordSet) from flwr.app'
    """
    if module.partition(".")[0] != "flwr":
        return ""
    if resolves(module):
        gone = [n for n in names if not (resolves(f"{module}:{n}") or resolves(f"{module}.{n}"))]
        inner = [n for n in gone if f"{module}.{n}" in MOVED]
        if inner:
            return advice(f"{module}.{inner[0]}")
        what = " and ".join(f"{module}.{name}" for name in gone)
    else:
        gone, what = [name for name in names if name != "*"], module
    if not what:
        return ""
    table = MOVED.get(module, {})
    now = {
        old: (door, new or old)
        for door, entries in table.items()
        for old, _, new in (entry.partition(">") for entry in entries.split())
    }
    # Whoever imports a module gets to know where its names went, each once.
    wanted = gone or [name for name, (_, new) in now.items() if name == new or new not in now]
    taken: dict[str, list[str]] = {}
    for name in wanted:
        door, new = now.setdefault(name, (_door_of(name), name))
        if door:
            taken.setdefault(door, []).append(new if new == name else f"{new} (once {name})")
    told = "; ".join(f"take {_and(new)} from {door}" for door, new in taken.items())
    lost = [name for name in gone if not now[name][0]]
    if lost or not told:
        nothing = f"nothing public has the place of {_and(lost) or what}"
        told = f"{told}; {nothing}" if told else nothing
    verb = "are" if len(gone) > 1 and what != module else "is"
    return f"{what} {verb} gone in Flower {flwr.__version__}: {told}"


def _door_of(name: str) -> str:
    """Return the public module that has a name, or nothing."""
    return next((door for door in _DOORS if resolves(f"{door}:{name}")), "")


def advice_on(problem: BaseException) -> str:
    """Name the import of an older Flower that an app has failed on, with file and line.

    Args:
        problem: raised while the app was imported.

    Returns:
        Half a sentence, after the file and line; nothing if it failed on something else.
    """
    own = Path(flwr.__file__).parent
    frames = [
        frame
        for frame in traceback.extract_tb(problem.__traceback__)
        if not Path(frame.filename).is_relative_to(own)
    ]
    where = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}: " if frames else ""
    if isinstance(problem, AttributeError):
        owner = problem.obj
        if not isinstance(owner, ModuleType):
            return ""
        found = advice(owner.__name__, [problem.name or ""])
    elif isinstance(problem, ImportError) and (problem.name or "").startswith("flwr"):
        found = advice(*(_statement(frames) or (problem.name or "", ())))
    else:
        return ""
    return where + found if found else ""


def _statement(frames: Sequence[traceback.FrameSummary]) -> tuple[str, Sequence[str]] | None:
    """Return the module and the names of the import of Flower that the last frame is at."""
    if not frames or frames[-1].lineno is None:
        return None
    at = frames[-1].lineno
    try:
        tree = ast.parse("".join(linecache.getlines(frames[-1].filename)))
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import) and (
            node.lineno <= at <= (node.end_lineno or at)
        ):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                return node.module or "", names
            return next(((name, ()) for name in names if advice(name)), None)
    return None


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
