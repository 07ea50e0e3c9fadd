"""Runs that are kept in a file, so that a measurement that was killed goes on with them.

A file has one run a line, as JSON: what identifies it, the commit that made it, and what came of
it.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from lab.results import commit, lack


class Kept:
    """What came of runs, by what identifies them; `of` is anything that JSON can hold."""

    def __init__(self, path: Path | None = None) -> None:
        """Read the runs that are kept; a line that was cut off is left out.

        Where nothing can be published, this is said now, and not after hours.

        Args:
            path: of the file, which need not be there yet; None keeps runs in memory alone.
        """
        self._path, self._commit = path, commit()
        if path is not None and (lacks := lack(self._commit)):
            print(f"what is measured now is no result: {lacks}", file=sys.stderr, flush=True)
        self._used: set[str | None] = set()
        self._rows: dict[str, tuple[Any, str | None]] = {}
        text = path.read_text(encoding="utf-8") if path and path.exists() else ""
        self._is_cut = bool(text) and not text.endswith("\n")
        for line in text.splitlines():
            try:
                run = json.loads(line)
            except json.JSONDecodeError:
                continue
            self._rows[_key(run["of"])] = run["found"], run["commit"]

    def __contains__(self, of: object) -> bool:
        return _key(of) in self._rows

    def __getitem__(self, of: object) -> Any:
        found, made_at = self._rows[_key(of)]
        self._used.add(made_at)
        return found

    def __iter__(self) -> Iterator[Any]:
        """Iterate over what came of all runs."""
        return (found for found, _ in self._rows.values())

    @property
    def commit(self) -> str:
        """The commit that made the runs that were asked for; joined, if there are several."""
        return " and ".join(sorted(map(str, self._used)))

    def add(self, of: object, found: object) -> None:
        """Keep what came of a run."""
        line = json.dumps({"of": of, "commit": self._commit, "found": found})
        self._rows[_key(of)] = json.loads(line)["found"], self._commit
        if self._path is not None:
            # A line that was cut off stays alone.
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n" * self._is_cut + line + "\n")
            self._is_cut = False

    def get(self, of: object, run: Callable[[], object]) -> Any:
        """Return what came of a run, made only if it is not kept."""
        if of not in self:
            self.add(of, run())
        return self[of]


def played(
    tasks: Iterable[tuple[Any, Callable[[], Any]]],
    jobs: int,
    before: Callable[[], object] | None = None,
) -> Iterator[tuple[Any, Any]]:
    """Yield each task's key and what came of it, in the order in which they end.

    Args:
        tasks: keys, and calls that another process can make.
        jobs: processes; 1 calls in this one.
        before: is called once in each process.
    """
    if jobs == 1:
        if before is not None:
            before()
        for key, call in tasks:
            yield key, call()
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=before) as pool:
        futures = {pool.submit(call): key for key, call in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()


def play_missing(
    kept: Kept,
    tasks: Iterable[tuple[Any, Callable[[], Any]]],
    jobs: int,
    *,
    before: Callable[[], object] | None = None,
    each: Callable[[Any, Any], object] | None = None,
) -> None:
    """Play those tasks that are not kept, as `played` does, and keep what came of them.

    `each` is then called with the key and what came of it.
    """
    missing = (task for task in tasks if task[0] not in kept)
    for key, found in played(missing, jobs, before):
        kept.add(key, found)
        if each is not None:
            each(key, found)


def _key(of: object) -> str:
    return json.dumps(dict(sorted(of.items())) if isinstance(of, Mapping) else of)
