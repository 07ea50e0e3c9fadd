"""Measures the tests: how many small faults in the heart of the product they find.

    python tests/strength.py                     # all mutants, against the everyday tests
    python tests/strength.py traces/trip.py      # those of some files
    python tests/strength.py --suite tests/traces tests/agents/test_agents.py
    python tests/strength.py --root CHECKOUT     # sources and tests of another checkout

A mutant is a file with one change, such as < to <=, and is killed where a test fails. It is written
into a private copy of the checkout, and the tests nearest to it are tried first. A survivor is a
line that no test holds to what it does, unless its change changes nothing: `EQUIVALENT` says for
which that was shown. The same sources give the same mutants.
"""

import argparse
import ast
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
HEART = (
    *("traces/trip.py", "traces/availability.py", "traces/forecast/dataset.py"),
    *("strategies/schedule.py", "strategies/weighting/gap.py"),
    *(f"strategies/server/{name}.py" for name in ("loop", "jobs", "checks", "buffer")),
    *(f"fedstale/simulation/{name}.py" for name in ("trace_grid", "jobs", "costs")),
    *("agents/env/simulator.py", "agents/policy/features.py"),
)
N_MUTANTS, AT_LEAST = 120, 5
"""Of all files, shared out by their lines; of each."""

PYTEST = """
import sys
import pytest

class Quick:
    def pytest_sessionstart(self):
        from hypothesis import Phase, settings
        phases = Phase.explicit, Phase.generate
        settings.register_profile("quick", settings.default, phases=phases)
        settings.load_profile("quick")

sys.exit(pytest.main(sys.argv[1:], plugins=[Quick()]))
"""
"""Runs tests, and makes no example smaller that fails: that may take minutes."""

EQUIVALENT: dict[tuple[str, str, str, str], str] = {
    (
        "traces/trip.py",
        "trips",
        "for i in range(0, max(devices.size, 1), _CHUNK):",
        "for i in range(0, max(devices.size, 2), _CHUNK):",
    ): "One chunk either way.",
    (
        "strategies/server/buffer.py",
        "capped",
        "fits = 2.0 * n * heaviest(now, min(f, n)) <= (n - 1) * float(now.sum()) * (1.0 + 1e-12)",
        "fits = 2.0 * n * heaviest(now, min(f, n)) <= (n - 1) * float(now.sum()) * (1.0 + 2e-12)",
    ): "A margin for rounding.",
    (
        "fedstale/simulation/trace_grid.py",
        "TraceGrid._run_clients",
        "while heap and room > 0 and (heap[0][0] <= end):",
        "while heap and room > 0 and (heap[0][0] < end):",
    ): "Whose client runs along changes no reply.",
    (
        "traces/forecast/dataset.py",
        "draw",
        "short = rng.random(n) < short_history",
        "short = rng.random(n) <= short_history",
    ): "No draw is equal to it.",
    (
        "agents/env/simulator.py",
        "Simulator._wait",
        "self._find_windows(rows, np.where(able, earliest, -np.inf))",
        "pass",
    ): "The clock stops on its way, finds nobody, and goes on to the same instant.",
    (
        "strategies/weighting/gap.py",
        "",
        "_LARGEST = 1e+16",
        "_LARGEST = 2e+16",
    ): "A bound whose square float32 holds.",
}
"""Why a mutant changes nothing, by its file, its function, a line of it as `ast` writes it, and
what becomes of the line."""

OPERATORS: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult},
    **{ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
}
NAMES = {"min": "max", "minimum": "maximum", "any": "all"}
NAMES |= {other: name for name, other in NAMES.items()}
WORD = re.compile(r"is not|not in|\d[\d.]*(?:e-?\d+)?|\w+|[^\w\s]+|\s+")


@dataclass(slots=True)
class Mutant:
    """A file with one change, and what the tests say of it."""

    name: str
    """File, line, and change."""
    file: str
    function: str
    line: str
    """As `ast` writes it."""
    becomes: str
    text: str
    """Of the whole file."""
    ended: str = "survived"
    by: str = ""
    """The test that killed it, or why it is equivalent."""
    ring: int = 0
    """The last that was tried."""
    seconds: float = 0.0


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in place of a node."""
    match node:
        case ast.Compare(left, ops, values):
            for i, op in enumerate(ops):
                yield ast.Compare(left, [*ops[:i], OPERATORS[type(op)](), *ops[i + 1 :]], values)
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            yield ast.BinOp(left, OPERATORS[type(op)](), right)
        case ast.BoolOp(op, values):
            for i in range(1, len(values)):
                sides = ast.BoolOp(op, values[:i]), ast.BoolOp(op, values[i:])
                yield ast.BoolOp(OPERATORS[type(op)](), [*sides])
        case ast.UnaryOp(ast.Not() | ast.Invert(), operand):
            yield operand
        case ast.Constant(bool() | int() | float() as k):
            more = k + 1 if isinstance(k, int) or not k else 2 * k
            yield ast.Constant(not k if isinstance(k, bool) else more)
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.Name(name) if name in NAMES:
            yield ast.Name(NAMES[name], node.ctx)
        case ast.Attribute(value, name) if name in NAMES:
            yield ast.Attribute(value, NAMES[name], node.ctx)
        case ast.Expr(ast.Call()) | ast.AugAssign():
            yield ast.Pass()
        case ast.Continue():
            yield ast.Break()


def candidates(node: ast.AST, within: str = "") -> Iterator[tuple[str, Any, ast.AST]]:
    """Yield a function, a node of it, and what may stand in its place, in the order of the file."""
    match node:
        # Messages, what is for type checkers, and checks of what the code does itself.
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.keyword("strict"):
            return
        case ast.If(ast.Name("TYPE_CHECKING")) | ast.Assign([ast.Name("__all__")]):
            return
        case ast.Expr(ast.Call(ast.Attribute(ast.Name("logger" | "warnings")))):
            return
        case ast.FunctionDef(name) | ast.ClassDef(name):
            within = f"{within}.{name}".lstrip(".")
    for new in changes(node):
        yield within, node, new
    for name, value in ast.iter_fields(node):
        if name not in {"annotation", "returns", "decorator_list"}:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from candidates(child, within)


class Change(ast.NodeTransformer):
    """Puts one node in the place of another."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


def made(file: str, source: str, i: int) -> Mutant:
    """Return the mutant that candidate i of a file makes."""
    tree = ast.parse(source)
    plain, (function, old, new) = ast.unparse(tree), list(candidates(tree))[i]
    text = ast.unparse(Change(old, new).visit(tree))
    lines = zip(plain.splitlines(), text.splitlines(), strict=True)
    line, becomes = next((a.strip(), b.strip()) for a, b in lines if a != b)
    was, became = WORD.findall(line), WORD.findall(becomes)
    for end in (0, -1):
        while was and became and was[end] == became[end]:
            del was[end], became[end]
    words = f"{''.join(was).strip()!r} to {''.join(became).strip()!r}"
    return Mutant(f"{file}:{old.lineno} {words}", file, function, line, becomes, text)


def drawn(root: Path, file: str) -> list[Mutant]:
    """Return the mutants of a file: one of each of as many stretches, of any kind alike often."""
    sources = {name: (root / name).read_text(encoding="utf-8") for name in HEART}
    lines = {name: source.count("\n") for name, source in sources.items()}
    n = max(AT_LEAST, round(N_MUTANTS * lines[file] / sum(lines.values())))
    kinds = [type(old).__name__ for _, old, _ in candidates(ast.parse(sources[file]))]
    rng = np.random.default_rng(zlib.crc32(file.encode()))
    found = []
    for stretch in np.array_split(np.arange(len(kinds)), n):
        kind = rng.choice(sorted({kinds[i] for i in stretch}))
        alike = [int(i) for i in stretch if kinds[i] == kind]
        found.append(made(file, sources[file], rng.choice(alike)))
    return found


def write(path: Path, text: str) -> None:
    """Write a module; nothing that was compiled of another text can stand for it."""
    path.write_text(text, encoding="utf-8")
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()


def copied(root: Path, place: Path) -> Path:
    """Return a copy of a checkout, with the heart as `ast` writes it without a change."""
    copy = place / "checkout"
    listed = ["git", "-C", str(root), "ls-files", "-z", "-co", "--exclude-standard"]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    for name in set(names.split("\0")) - {""}:
        if os.path.lexists(root / name):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name, follow_symlinks=False)
    # Some tests read recordings beside the checkout.
    (place / "shared").symlink_to(root.parent / "shared")
    for file in HEART:
        write(copy / file, ast.unparse(ast.parse((copy / file).read_text(encoding="utf-8"))))
    command = [sys.executable, "-P", "-c", "import fedstale; print(fedstale.__file__)"]
    said = subprocess.run(command, env=imports_of(copy), capture_output=True, text=True, check=True)
    assert said.stdout.strip() == f"{copy}/fedstale/__init__.py"
    return copy


def imports_of(copy: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}


def files_of(root: Path, suite: Sequence[str]) -> list[str]:
    """Return the files of a suite, by default of the everyday one."""
    if not suite:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
        suite = project["tool"]["pytest"]["ini_options"]["testpaths"]
    found = [p for name in suite for p in [root / name, *sorted((root / name).rglob("test_*.py"))]]
    return list(dict.fromkeys(str(p.relative_to(root)) for p in found if p.is_file()))


def rings(file: str, suite: Sequence[str]) -> list[list[str]]:
    """Return a suite in the order of trying: of the same name, same folder, same layer, others."""
    folder, word = Path("tests", file).parent, re.compile(rf"_{Path(file).stem}(_|$)")
    layer = [test for test in suite if Path(test).parts[:2] == folder.parts[:2]]
    beside = [test for test in layer if Path(test).parent == folder]
    named = [test for test in layer if word.search(Path(test).stem)]
    found: list[list[str]] = []
    for tests in (named, beside, layer, suite):
        found.append([test for test in tests if not any(test in ring for ring in found)])
    return found


def first_failure(copy: Path, tests: Sequence[str], limit_s: float) -> tuple[str, float]:
    """Return the first of some tests that fails, "" if none does, and how long they took in s."""
    if not tests:
        return "", 0.0
    command = [sys.executable, "-c", PYTEST, "-x", "-q", "-rfE", "-p", "no:cacheprovider"]
    command += ["-m", "not slow and not gpu", "--timeout=100", f"--basetemp={copy.parent}/tmp"]
    command, env = [*command, *tests], imports_of(copy)
    began, said = time.monotonic(), copy.parent / "said"
    with said.open("w") as out:
        run = subprocess.Popen(
            command, cwd=copy, env=env, stdout=out, stderr=out, start_new_session=True
        )
        try:
            code = run.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
    took_s = round(time.monotonic() - began, 1)
    if code in (0, 5):  # 5: none of them is to be run every day.
        return "", took_s
    named = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said.read_text(), re.MULTILINE)
    return named[1] if named else f"pytest: {'no end' if code is None else code}", took_s


class Bench:
    """Tries mutants, each in a copy that no other is in."""

    def __init__(self, copies: Sequence[Path], suite: Sequence[str], n_rings: int) -> None:
        self.suite, self.n_rings = suite, n_rings
        self.copies: SimpleQueue[Path] = SimpleQueue()
        for copy in copies:
            self.copies.put(copy)
        self.clean_s: dict[str, float] = {}
        self.lock = Lock()

    def tried(self, mutant: Mutant) -> Mutant:
        """Return a mutant with what the tests say of it."""
        key = mutant.file, mutant.function, mutant.line, mutant.becomes
        if key in EQUIVALENT:
            mutant.ended, mutant.by = "equivalent", EQUIVALENT[key]
            return mutant
        copy = self.copies.get()
        path = copy / mutant.file
        plain = path.read_text(encoding="utf-8")
        try:
            for tests in rings(mutant.file, self.suite)[: self.n_rings]:
                limit_s = max(120.0, 5 * self._clean(copy, tests))
                write(path, mutant.text)
                mutant.by, took_s = first_failure(copy, tests, limit_s)
                write(path, plain)
                mutant.ring, mutant.seconds = mutant.ring + 1, mutant.seconds + took_s
                if mutant.by:
                    mutant.ended = "killed"
                    break
        finally:
            self.copies.put(copy)
        return mutant

    def _clean(self, copy: Path, tests: Sequence[str]) -> float:
        """Return how long tests take without a mutant, in s; they must pass."""
        with self.lock:
            if new := [test for test in tests if test not in self.clean_s]:
                by, took_s = first_failure(copy, new, 3600.0)
                if by:
                    said = (copy.parent / "said").read_text()[-3000:]
                    raise SystemExit(f"{said}\nThis fails without a mutant: {by}")
                self.clean_s |= dict.fromkeys(new, took_s / len(new))
        return sum(self.clean_s[test] for test in tests)


def report(mutants: Sequence[Mutant]) -> str:
    """Return how many mutants of each file were killed, and which survived."""
    lines = [f"{'':34}{'mutants':>8}{'killed':>8}{'survived':>10}{'equivalent':>12}{'share':>7}"]
    for name in [*dict.fromkeys(m.file for m in mutants), "all"]:
        n = Counter(m.ended for m in mutants if name in (m.file, "all"))
        row = f"{name:34}{n.total():8}{n['killed']:8}{n['survived']:10}{n['equivalent']:12}"
        lines.append(f"{row}{1 - n['survived'] / max(1, n['killed'] + n['survived']):7.0%}")
    for m in mutants:
        if m.ended == "survived":
            lines += ["", f"{m.name} in {m.function}", f"  - {m.line}", f"  + {m.becomes}"]
    return "\n".join(lines)


def main() -> int:
    """Try mutants and print what survives; return whether something does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", metavar="FILE", help="whose mutants; else all")
    parser.add_argument("--suite", nargs="+", default=[], help="test folders or files")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    parser.add_argument("--only", nargs="+", default=[""], metavar="ID", help="or how it begins")
    parser.add_argument("--rings", type=int, default=4, help="how far from a file tests may be")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--out", type=Path, help="JSON file, written after each mutant")
    parser.add_argument("--list", action="store_true", help="only print ids")
    given = parser.parse_args()
    if unknown := set(given.files) - set(HEART):
        parser.error(f"no mutants of {', '.join(sorted(unknown))}: expected {', '.join(HEART)}")
    root = given.root.resolve()
    mutants = [m for file in given.files or HEART for m in drawn(root, file)]
    mutants = [m for m in mutants if m.name.startswith(tuple(given.only))]
    if not mutants:
        parser.error("no mutant has such an id: see --list")
    if given.list:
        print(*(m.name for m in mutants), sep="\n")
        return 0
    # A mutant may never stop growing.
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, resource.getrlimit(resource.RLIMIT_AS)[1]))
    with tempfile.TemporaryDirectory(prefix="strength-") as place:
        copies = [copied(root, Path(place, str(i))) for i in range(given.jobs)]
        bench = Bench(copies, files_of(root, given.suite), given.rings)
        pool, done = ThreadPoolExecutor(given.jobs), []
        try:
            for ended in as_completed([pool.submit(bench.tried, m) for m in mutants]):
                done.append(ended.result())
                print(f"{done[-1].ended}: {done[-1].name}  {done[-1].by}", flush=True)
                if given.out:
                    rows = [{k: v for k, v in asdict(m).items() if k != "text"} for m in done]
                    given.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        finally:
            pool.shutdown(cancel_futures=True)
    print("", report(mutants), sep="\n")
    return int(any(m.ended == "survived" for m in mutants))


if __name__ == "__main__":
    sys.exit(main())
