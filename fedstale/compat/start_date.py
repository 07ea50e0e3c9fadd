"""When virtual time begins: at the hour and on the weekday of the traces, where no old results lie.

Apps name folders by the clock, and a run that began on the date of an earlier one would meet that
one's. So virtual time begins on the first date, in whole weeks after that of the traces, of whose
week no file or folder says that it is from then. A run then differs from another in the date alone:
floats near its Unix times are as far apart as those near the traces' for hundreds of weeks.
"""

import os
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

_WEEK_S = 7 * 86_400
_DEEP, _MOST = 4, 20_000
"""Folders below one another, and names in all, that are looked at."""
_DATE = re.compile(r"(?<!\d)(\d{4})([-_.]?)(\d\d)\2(\d\d)(?!\d{5})")
_SECONDS = re.compile(r"(?<!\d)(\d{9,10})(?!\d)")


def free_start(first: float, folders: Iterable[Path]) -> float:
    """Return the Unix time at which virtual time begins, in s.

    Args:
        first: that of the traces.
        folders: in which an app may keep results of earlier runs.

    Example:
        >>> free_start(946684800.0, [])
        946684800.0
    """
    taken = set[int]()
    for name in _names(folders):
        taken.update(int((at - first) // _WEEK_S) for at in _instants(name))
    week = 0
    while week in taken:
        week += 1
    return first + week * _WEEK_S


def _instants(name: str) -> Iterator[float]:
    """Yield the Unix times in s that a name may tell."""
    for year, _, month, day in _DATE.findall(name):
        try:
            yield datetime(int(year), int(month), int(day), tzinfo=UTC).timestamp() + 43_200
        except ValueError:
            continue  # It is another number.
    yield from map(float, _SECONDS.findall(name))


def _names(folders: Iterable[Path]) -> Iterator[str]:
    """Yield names of what lies in folders, the nearest first, up to a number."""
    todo, n = [(str(folder), 0) for folder in dict.fromkeys(folders)], 0
    for folder, depth in todo:
        try:
            with os.scandir(folder) as entries:
                found = [(entry.name, entry.path, entry.is_dir()) for entry in entries]
        except OSError:
            continue
        for name, path, is_folder in found:
            n += 1
            if n > _MOST:
                return
            yield name
            if is_folder and depth + 1 < _DEEP and not name.startswith("."):
                todo.append((path, depth + 1))
