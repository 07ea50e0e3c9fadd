"""Say which published results still hold: run the quick form of each again, and compare.

A result says what was measured at its commit, and no measurement of hours is made again for each
change. Its quick form (`--quick`, minutes) is: results/quick/NAME.json has the rows that it gave at
the result's commit, and what it gives now is

    same        to the last digit;
    close       within a hundredth, as on another processor; where a clock gave all figures, within
                a factor of three, which finds what has become slow, and nothing finer;
    moved       elsewhere: the pages say so below the table, until it is measured again;
    failed      nothing, since it ends with an error;
    unknown     with nothing to compare: its commit is lost, or has no quick form.

What a result's commit gave is measured in a work tree of that commit, where it is not known yet, by
today's `benchmarks` on the fedstale of then: it finds what has moved in fedstale, and not what
changed in the script. Where they do not run there, the quick form of then is taken, if it wrote its
rows (`scripts`: its own). Whoever changes a quick form deletes results/quick/NAME.json.
Verdicts go to results/alive.json; those of results that are not named stay as they are.

Run it with:
python benchmarks/alive.py [NAME ...] [--costs] [--recordings F] [--plays F] [--clothes F]
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from math import isclose, isnan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lab.results import QUICK, RESULTS, UNPUBLISHED, as_text, commit, git, lack, read_result

ROOT, STORE, NAME = RESULTS.parents[1], RESULTS / "quick", "alive"
LIMIT_S = 900.0
CLOSE, CLOCK = 0.01, 3.0
"""How far a figure may be off as a share, and the factor of one that a clock gave."""
BY_CLOCK = re.compile(r"cpu|processor|wall|took|load|mib|^seconds|^(minutes|each|commits?)$", re.I)
"""Columns that a clock, a process's memory or the commit gave, and that other results are not
judged by; seconds of virtual time are none."""
TIMED = {
    *("batched", "batched_gpu", "clients", "client_mod", "compact_codec", "forecasting_speed"),
    *("large_models", "loaders", "merging", "messages", "peers", "resident", "rounds"),
    *("selection_env", "selection_scale", "soak", "trips"),
}
"""Results all of whose numbers are a clock's."""
BY_MOMENT = {
    **dict.fromkeys(("kills", "history"), frozenset({"trainings", "runs"})),
    "fidelity": frozenset(
        f"{which}_{of}"
        for which in ("median", "p90")
        for of in ("there_s", "back_s", "late_s", "s", "rounds")
    ),
    "many_nodes": frozenset(
        ("replies", "version", "replies_sent", "replies_merged", "versions", "nodes_heard")
    ),
}
"""Columns of results that they are not judged by, as moments of real processes decide them. A kill
costs trainings, and sometimes another run; what it must not cost is an update. On a busy machine a
deployment is later than its simulation by other parts of a second, and has the same jobs; many
nodes send fewer replies in a minute, and lose none."""
NUMBER = re.compile(r"[\d.,]+")
Rows = Sequence[Mapping[str, Any]]


def published() -> list[str]:
    """Return the names of results that a command gives, in order."""
    names = [path.stem for path in sorted(RESULTS.glob("*.json")) if path.stem != NAME]
    return [
        name
        for name in names
        if not name.endswith((QUICK, UNPUBLISHED)) and script(read_result(name)) is not None
    ]


def script(result: Mapping[str, Any]) -> Path | None:
    """Return the script of a result, from the root; None if there is none any more."""
    found = re.search(r"benchmarks/\S+\.py", result.get("command", ""))
    return Path(found[0]) if found and (ROOT / found[0]).exists() else None


def quick(command: str, places: Mapping[str, str], folder: Path) -> list[str]:
    """Return the words of a command's quick form.

    Args:
        command: of a result.
        places: by the words that stand for folders and files in it.
        folder: of what it keeps and writes besides.

    Raises:
        ValueError: a place is not known.
    """
    words = shlex.split(command)
    words = words[words.index("python") + 1 :]
    # Runs that are kept would say what they said before.
    while "--keep" in words:
        at = words.index("--keep")
        words[at : at + 2] = []
    of = {"RUNS": str(folder / "runs"), "FILE": str(folder / "runs")}
    if "--out" in words:
        words[words.index("--out") + 1] = str(folder / "out")
    made = [places.get(word) or of.get(word, word) for word in words]
    unknown = [word for word in made if word.isupper() or word.endswith("=PATH")]
    if unknown:
        raise ValueError(f"expected a place for {unknown[0]}")
    return [*made, "--quick"]


def rows_of(name: str, words: Sequence[str], root: Path) -> Rows | None:
    """Run a quick form in a checkout, and return its rows; None if it writes none.

    Raises:
        RuntimeError: it ends with an error; with the last line that it said.
    """
    path = root / "benchmarks" / "results" / f"{name}{QUICK}.json"
    path.unlink(missing_ok=True)
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, *words],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if run.returncode:
        said = run.stdout.strip().splitlines() or ["nothing was said"]
        raise RuntimeError(said[-1])
    if not path.exists():
        return None
    rows: Rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


@contextmanager
def checkout(made_at: str) -> Iterator[Path]:
    """Give a work tree of a commit, for as long as it is used."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", path, made_at], check=True)
        try:
            yield path
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", path], check=True)


def then(name: str, words: Sequence[str]) -> dict[str, Any]:
    """Return the `rows` of a result's quick form at its commit, and whose `scripts` gave them.

    Raises:
        LookupError: they are not known; with the reason.
    """
    path, made_at = STORE / f"{name}.json", read_result(name).get("commit")
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if stored.get("commit") != made_at:
        if lacks := lack(made_at):
            raise LookupError(lacks)
        # A script says whether its quick form writes, too: by a name, or after its call.
        text = git("show", f"{made_at}:{words[0]}")
        own = f"{name}{QUICK}" in text or "quick" in text.partition("write_result(")[2]
        rows: Rows | None = None
        for scripts in ["today's", "its own"] if own else ["today's"]:
            with checkout(str(made_at)) as root, suppress(RuntimeError, subprocess.TimeoutExpired):
                if scripts == "today's":
                    shutil.copytree(ROOT / "benchmarks", root / "benchmarks", dirs_exist_ok=True)
                rows = rows_of(name, words, root)
            if rows:
                break
        stored = {"commit": made_at, "scripts": scripts}
        STORE.mkdir(exist_ok=True)
        path.write_text(as_text(stored, rows or []), encoding="utf-8")
        stored["rows"] = rows
    if not stored["rows"]:
        raise LookupError("its commit has no quick form that gives rows")
    return stored


def compared(
    was: Rows, now: Rows, *, by_clock: bool = False, but: Set[str] = frozenset()
) -> tuple[str, str]:
    """Return the verdict on rows, and what moved first.

    Args:
        was: rows at the result's commit.
        now: those of today.
        by_clock: whether a clock gave all their numbers.
        but: columns that say nothing.
    """
    if len(was) != len(now):
        return "moved", f"{len(was)} rows, now {len(now)}"
    verdict = "same"
    for i, (old, new) in enumerate(zip(was, now, strict=True), 1):
        for key, a, b in leaves(old, new):
            if key in but or equal(a, b) or (BY_CLOCK.search(key) and not by_clock):
                continue
            if not near(a, b, by_clock=by_clock):
                return "moved", f"{key} of row {i}: was {shown(a)}, is {shown(b)}"
            verdict = "close"
    return verdict, ""


def leaves(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the values of two rows side by side, with the names of their columns."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from leaves(old.get(name), new.get(name), str(name))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for a, b in zip(old, new, strict=True):
            yield from leaves(a, b, key)
    else:
        yield key, old, new


def equal(a: Any, b: Any) -> bool:
    """Return whether two values are the same; NaN is."""
    return a == b or (isinstance(a, float) and isinstance(b, float) and isnan(a) and isnan(b))


def near(a: Any, b: Any, *, by_clock: bool) -> bool:
    """Return whether numbers are as close as they should be; a clock's text is one but for them."""
    if by_clock and isinstance(a, str) and isinstance(b, str):
        return NUMBER.sub("", a) == NUMBER.sub("", b)
    if isinstance(a, bool) or isinstance(b, bool):
        return False
    if not isinstance(a, int | float) or not isinstance(b, int | float):
        return False
    if by_clock:
        return a * b >= 0 and abs(a) <= CLOCK * abs(b) and abs(b) <= CLOCK * abs(a)
    return isclose(a, b, rel_tol=CLOSE, abs_tol=1e-9)


def shown(value: Any) -> str:
    """Return a value in a few characters."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:40]


def judged(name: str, places: Mapping[str, str]) -> dict[str, object]:
    """Run a result's quick form, and return its verdict."""
    result = read_result(name)
    found: dict[str, object] = {"result": name, "commit": result.get("commit")}
    began = time.monotonic()
    with TemporaryDirectory() as folder:
        try:
            words = quick(result["command"], places, Path(folder))
            now = rows_of(name, words, ROOT)
        except ValueError as problem:
            return {**found, "verdict": "unknown", "what": str(problem), "at": commit()}
        except (RuntimeError, subprocess.TimeoutExpired) as problem:
            return {**found, "verdict": "failed", "what": str(problem)[:200], "at": commit()}
        found |= {"at": commit(), "took_s": round(time.monotonic() - began)}
        if now is None:
            return {**found, "verdict": "failed", "what": "it writes no rows"}
        try:
            was = then(name, words)
        except LookupError as problem:
            return {**found, "verdict": "unknown", "what": str(problem)}
    but = BY_MOMENT.get(name, frozenset())
    verdict, what = compared(was["rows"], now, by_clock=name in TIMED, but=but)
    return {**found, "scripts": was["scripts"], "verdict": verdict, "what": what}


def costs(names: Sequence[str]) -> Iterator[str]:
    """Yield in a line what it took to measure each result, and what all of them took."""
    took = {name: read_result(name).get("wall_s") for name in names}
    for name, wall_s in took.items():
        yield f"{name:22s} " + ("not noted" if wall_s is None else f"{wall_s / 60:8.1f} min")
    known = [wall_s for wall_s in took.values() if wall_s is not None]
    hours = sum(known) / 3600
    yield f"{len(known)} of {len(took)} results took {hours:.1f} h, where none was kept"


def main() -> None:
    """Judge results, print, and write the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of results; all if none is named")
    parser.add_argument("--recordings", default="../shared/traces", help="folder of recordings")
    parser.add_argument("--plays", default="../shared/data/tinyshakespeare.txt.gz", help="a text")
    parser.add_argument(
        "--clothes", default="/usr/share/datasets/fashion-mnist", help="files of Fashion-MNIST"
    )
    parser.add_argument("--costs", action="store_true", help="only say what results took, as noted")
    asked = parser.parse_args()
    if asked.costs:
        print(*costs(asked.names or published()), sep="\n")
        return
    places = {"RECORDINGS": asked.recordings, "PLAYS": asked.plays, "FOLDER": asked.clothes}
    places = {word: str(Path(place).resolve()) for word, place in places.items()}
    os.environ["PLAYS"] = places["PLAYS"]
    path = RESULTS / f"{NAME}.json"
    before = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    rows = {row["result"]: row for row in before}
    known = published()
    for name in asked.names or known:
        rows[name] = judged(name, places)
        print(f"{name:22s} {rows[name]['verdict']:8s} {rows[name]['what']}", flush=True)
        kept = [row for _, row in sorted(rows.items()) if row["result"] in known]
        path.write_text(as_text({}, kept), encoding="utf-8")


if __name__ == "__main__":
    main()
