"""The layers traces and flower <- strategies <- agents <- fedstale, rooms, what is declared."""

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from places import ROOT

import fedstale

FOLDERS = ("fedstale", "traces", "strategies", "agents")

# What a layer may import of the others.
BELOW = {
    "traces": {"traces", "errors", "files", "lazy"},
    "fedstale/flower": {"flower", "errors", "files", "lazy"},
    "strategies": {"traces", "flower", "strategies", "errors", "files", "lazy", "until"},
    "agents": {"traces", "flower", "strategies", "agents", "errors", "files", "lazy", "until"},
}


@cache
def statements(path):
    """Names of the modules that a file imports, and the names that it takes out of them."""
    modules, inside = [], []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append(node.module)
            inside += [f"{node.module}.{alias.name}" for alias in node.names]
    return modules, inside


def imported(path):
    return statements(path)[0]


@pytest.mark.parametrize("layer", BELOW)
def test_a_layer_imports_only_the_layers_below_it(layer):
    print(f"{layer} -> {', '.join(sorted(BELOW[layer] - {layer}))}")
    for path in (ROOT / layer).rglob("*.py"):
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "fedstale" and len(parts) > 1:
                assert parts[1] in BELOW[layer], f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize(
    "part",
    [
        "messages",
        "pace",
        "robust",
        "schedule",
        "selection",
        "server_optimizer",
        "types",
        "weighting",
    ],
)
def test_a_part_of_a_strategy_speaks_of_types_alone(part):
    paths = [*(ROOT / "strategies").glob(f"{part}.py"), *(ROOT / "strategies" / part).rglob("*.py")]
    assert paths
    for path in paths:
        for name in imported(path):
            if name.startswith("fedstale.strategies"):
                others = set(name.split(".")[2:3]) - {part, "types"}
                assert not others, f"{path.relative_to(ROOT)} imports {name}"


def name_of(path):
    """Return the import name of a file of the four folders."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "fedstale" else ("fedstale", *parts)
    return ".".join(parts).removesuffix(".__init__")


DOORS = {name_of(path): path for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py")}
"""The `__init__.py` of each package, by its import name."""


ONE_FILE = {
    f"fedstale.strategies.{name}" for name in ("pace", "robust", "schedule", "server_optimizer")
}
"""Parts of a strategy that are a file each, and so their own doors."""


def room_of(name):
    """Return the room that a module is in: a package of fedstale, of a layer or of the shelf."""
    parts = name.split(".")
    if name in ONE_FILE:
        return name
    deep = 3 if parts[1:2] and parts[1] in (*FOLDERS, "contrib") else 2
    while ".".join(parts[:deep]) not in DOORS:
        deep -= 1
    return ".".join(parts[:deep])


def entries():
    """Yield each import out of another room: the file, its room, the room and what is imported.

    The root of fedstale is no room: all stand on its errors and files, and its API on all.
    """
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            own = room_of(name_of(path))
            for name in imported(path):
                if name.startswith("fedstale.") and room_of(name) not in (own, "fedstale"):
                    yield path.relative_to(ROOT).as_posix(), own, room_of(name), name


_OF_AGENTS = "names of the tables that it writes, for the page of them"
_OF_FORECASTS = "the door of a room in this room, which is for servers and loads pandas"
WINDOWS = {
    ("fedstale/__main__.py", "fedstale.cli.main"): "what pyproject.toml starts too",
    ("fedstale/cli/agent.py", "fedstale.agents.evaluation"): _OF_AGENTS,
    ("fedstale/cli/forecaster.py", "fedstale.traces.forecast.backtest"): _OF_FORECASTS,
    ("fedstale/cli/forecaster.py", "fedstale.traces.forecast.lstm_training"): "it loads torch",
    ("fedstale/cli/record.py", "fedstale.traces.merge"): "its function has the file's name",
    ("fedstale/comparison/plan.py", "fedstale.apps.strategy"): "apps are folders, without a door",
    **{
        (f"fedstale/contrib/{name}/command.py", "fedstale.cli.output"): "what all commands do alike"
        for name in ("audit", "emulator", "energy", "formats", "replay", "tuning")
    },
    (
        "fedstale/contrib/audit/forecasts.py",
        "fedstale.traces.forecast.backtest",
    ): _OF_FORECASTS,
    (
        "fedstale/contrib/selectors/deep_sets.py",
        "fedstale.agents.policy_gradient",
    ): "it loads torch",
    ("fedstale/reports/devices.py", "fedstale.traces.forecast.backtest"): _OF_FORECASTS,
    ("strategies/server/superlink.py", "fedstale.flower.superlink_grid"): "a type, one file a part",
}
"""Imports out of a file inside another room, and why they do not come by the room's door.

A file as a whole does: `from fedstale.flower import features`.
"""


def test_a_room_is_entered_by_its_door():
    found = {(file, name) for file, _, room, name in entries() if name != room}
    assert found == WINDOWS.keys()


_OF_TRACE_SETS = "a method of TraceSet imports it when it is called: every user's way in"
UPWARD = {
    (
        "fedstale.strategies.stages",
        "fedstale.strategies.server",
    ): "the type that a check takes, and the reader of a reply's arrays",
    ("fedstale.traces", "fedstale.traces.io"): _OF_TRACE_SETS,
    ("fedstale.traces", "fedstale.traces.sources"): _OF_TRACE_SETS,
    ("fedstale.traces", "fedstale.traces.synthetic"): _OF_TRACE_SETS,
    ("fedstale.traces", "fedstale.traces.tables"): _OF_TRACE_SETS,
}
"""What closes a circle of rooms, and why it stays; nothing of it is imported with its file."""


def test_rooms_stand_in_no_circle():
    below = {}
    for _, own, room, _ in entries():
        below.setdefault(own, set()).add(room)
    # pytest shows this where the test fails, and where it is asked to by -s.
    for own, rooms in sorted(below.items()):
        print(f"{own} -> {', '.join(sorted(rooms))}".replace("fedstale.", ""))
    for own, room in UPWARD:
        below[own].remove(room)
    TopologicalSorter(below).prepare()


def declared(requirements):
    return {Requirement(line).name.lower().replace("_", "-") for line in requirements}


def test_every_import_of_the_product_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = declared(project["dependencies"])
    extra = declared(line for lines in project["optional-dependencies"].values() for line in lines)
    distributions = packages_distributions()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            # Built-in apps are directories of Flower: each declares its own dependencies.
            if "apps" in path.relative_to(ROOT).parts:
                continue
            for name in {name.split(".")[0] for name in imported(path)} - {"fedstale"}:
                if name not in sys.stdlib_module_names:
                    known = {d.lower().replace("_", "-") for d in distributions.get(name, [name])}
                    assert known & (needed | extra), f"{path.relative_to(ROOT)} imports {name}"


LIGHT = [
    [
        ("import fedstale", {"numpy", "pandas", "torch", "flwr", "ray", "plotly"}),
        ("fedstale.errors.ConfigError", {"numpy"}),
        ("import fedstale.cli.main", {"numpy", "pandas", "torch", "flwr", "ray"}),
        ("import fedstale; fedstale.traces.TraceSet", {"flwr", "ray"}),
        ("import fedstale.traces.sources", {"flwr", "ray", "torch"}),
        ("import fedstale.traces.forecast", {"flwr", "ray", "sklearn", "torch"}),
        ("import fedstale.strategies", {"ray", "torch"}),
        ("import fedstale.agents; fedstale.agents.AgentSelector()", {"ray", "scipy", "torch"}),
        ("import fedstale.simulation", {"ray", "torch"}),
    ],
    [
        ("import fedstale.flower", {"fastapi", "pandas", "ray", "sqlalchemy", "torch"}),
        ("import fedstale.client", {"numpy.testing", "torch", "pandas", "ray"}),
    ],
    [("import fedstale.apps.client", {"fedstale.agents", "fedstale.strategies", "pandas", "ray"})],
]
"""What loads which libraries not, in rows: in a row, earlier statements load nothing of these."""

LIGHT_ALWAYS = {"gymnasium", "stable_baselines3"}

IN_CHILDREN = """
import os, sys

for row in {rows}:
    if child := os.fork():
        if os.waitpid(child, 0)[1]:
            sys.exit("a child failed")
    else:
        for statement, heavy in row:
            exec(statement)
            for name in sorted(set(sys.modules) & (heavy | {always})):
                print(f"{{statement}} loads {{name}}")
        sys.stdout.flush()
        os._exit(0)
"""


@pytest.mark.smoke
def test_importing_a_layer_leaves_heavy_libraries_out():
    code = IN_CHILDREN.format(rows=LIGHT, always=LIGHT_ALWAYS)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == []


def modules():
    """Names of all modules of the package, as importers, type checkers and setuptools walk it."""
    yield "fedstale"
    for found in pkgutil.walk_packages(fedstale.__path__, "fedstale."):
        yield found.name


def test_every_python_file_of_the_four_folders_is_a_module_of_the_package():
    found = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            # Built-in apps are data: Flower loads them from their own directories.
            name = name_of(path)
            if not name.startswith("fedstale.apps.") or name.count(".") == 2:
                found.add(name)
    assert found == set(modules())


def imported_on_use(name):
    """Return the names that a door imports when it is asked for one."""
    for node in ast.parse(DOORS[name].read_text()).body if name in DOORS else ():
        if isinstance(node, ast.If):
            return {a.name for line in node.body for a in line.names}
    return set()


def test_a_door_lists_its_public_names_alone():
    doors = [name for name in DOORS if imported_on_use(name)]
    assert "fedstale" in doors
    for name in doors:
        door = importlib.import_module(name)
        assert dir(door) == sorted(door.__all__), name


def test_every_public_name_exists_and_is_listed_once():
    for name in modules():
        if "__all__ = [" not in Path(find_spec(name).origin).read_text(encoding="utf-8"):
            continue
        module = importlib.import_module(name)
        names = module.__all__
        assert len(set(names)) == len(names)
        # Where the others are, type checkers look: Ray, which starts a process, is among them.
        for public in set(names) - imported_on_use(name):
            assert hasattr(module, public), f"{name}.{public}"


ONE_OF_A_KIND = {
    "strategies/weighting": "one file a published method",
    "fedstale/cli": "what pyproject.toml starts",
}


def test_no_small_file_is_a_fragment_of_its_only_user():
    product = [
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if "apps" not in path.relative_to(ROOT).parts
        and path.name not in ("__init__.py", "__main__.py")
    ]
    own = {path: path.relative_to(ROOT).with_suffix("").parts for path in product}
    names = {path: ".".join(("fedstale", *parts)) for path, parts in own.items()}
    names |= {path: ".".join(own[path]) for path in product if own[path][0] == "fedstale"}
    users = {path: set() for path in product}
    for user in product:
        found = {name for names_of_a_kind in statements(user) for name in names_of_a_kind}
        for path in product:
            users[path] |= {user} if names[path] in found else set()
    fragments = [
        str(path.relative_to(ROOT))
        for path in product
        if len(users[path]) == 1 and len(path.read_text().splitlines()) < 100
        # What the door of its room lets out is for whoever comes to it.
        if names[path] not in imported(path.with_name("__init__.py"))
    ]
    assert [f for f in fragments if str(Path(f).parent) not in ONE_OF_A_KIND] == []


@pytest.mark.parametrize(
    "path",
    [
        # Ray looks for accelerators in a shell when it is imported.
        pytest.param(path, id=path.stem, marks=[pytest.mark.smoke] * (path.parent.name == "tuning"))
        for path in sorted((ROOT / "benchmarks").glob("*/*.py"))
    ],
)
def test_a_benchmark_imports_names_that_exist(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedstale"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                known = {
                    found.name for found in pkgutil.iter_modules(getattr(module, "__path__", []))
                }
                assert hasattr(module, alias.name) or alias.name in known, inside


CELLS = re.compile(r"^\|[^|]+\|([^|]*`[^|]*)\|([^|]+)\|$", re.MULTILINE)
"""The last two cells of a row of a table whose second has code."""


def defined(path):
    """Return the names that a file defines, those in classes as Class.name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    own = [node for node in tree.body if isinstance(node, kinds)]
    inner = [(a.name, b.name) for a in own for b in a.body if isinstance(b, kinds)]
    return {node.name for node in own} | {".".join(names) for names in inner}


def test_the_page_of_concepts_says_where_each_is():
    page = (ROOT / "docs/concepts.md").read_text(encoding="utf-8")
    table = page.split("\n## Where it is\n")[1].split("\n## ")[0]
    rows = [[re.findall("`([^`]+)`", cell) for cell in row] for row in CELLS.findall(table)]
    assert len(rows) > 20
    for files, names in rows:
        assert all((files, names))
        found = set().union(*(defined(ROOT / file) for file in files))
        assert not set(names) - found, f"{files} do not define {set(names) - found}"
