"""Who simulates, compares or reports a NumPy app needs neither torch nor scikit-learn."""

import json
import os
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from places import ROOT
from small_app import PYPROJECT, write_small_app

from fedstale.errors import installing

PACKAGES = ("torch", "sklearn")
# Python runs it at its start, also in the processes that commands start.
ABSENT = f"""
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec


def without(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in {PACKAGES!r} else find_spec(name, path, target)


PathFinder.find_spec = classmethod(without)
"""
PLAN = """
app = "app"
traces = "synthetic:20"
seeds = [1, 2]
target = "accuracy 0.5"

[variants.avg]
run-config = { strategy = "FedAvg" }

[variants.adam]
run-config = { strategy = "FedAdam" }
"""
BATCHED = (
    PYPROJECT
    + """
[tool.fedstale.batched]
job = "small_app_under_test.client:train"
network = "small_app_under_test.client:train"
losses = "small_app_under_test.client:evaluate"
"""
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs fedstale where there is neither package, beside a NumPy app."""
    folder = tmp_path_factory.mktemp("without")
    (folder / "start").mkdir()
    (folder / "start" / "sitecustomize.py").write_text(ABSENT)
    write_small_app(folder / "app")
    write_small_app(folder / "batched", pyproject=BATCHED)
    (folder / "plan.toml").write_text(PLAN)

    def run(*words):
        return subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder / "start"), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )

    return run


@pytest.fixture(scope="module")
def simulated(run):
    """Return where a NumPy app was simulated in processes of its own."""
    options = ("--traces", "synthetic:20", "--executor", "processes", "--workers", "2")
    ran = run("-m", "fedstale", "simulate", "app", *options, "--out", "runs/one", "--json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["status"] == "finished"
    return "runs/one"


def test_neither_package_can_be_imported(run):
    for package in PACKAGES:
        ran = run("-c", f"import {package}")
        assert f"ModuleNotFoundError: No module named '{package}'" in ran.stderr


@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "doctor",
        "check app",
        "report {run}",
        "runs",
        "compare plan.toml --out compared",
        "simulate app --traces synthetic:20 --dry-run",
        "simulate app --traces synthetic:20 -c strategy='FedAvg' --live 0 --out runs/live",
        "traces convert synthetic:20 --out made.parquet",
        "traces describe synthetic:20",
        "forecaster train --traces synthetic:60 --kind last-value --examples 500 --out forecaster",
        "forecaster backtest last-value --traces synthetic:60 --examples 500 --out tables",
    ],
)
def test_a_command_needs_neither_package(run, simulated, command):
    ran = run("-m", "fedstale", *command.format(run=simulated).split())
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("command", "needs"),
    [
        ("simulate digits --traces synthetic:20 --out runs/digits", "torch"),
        ("simulate batched --traces synthetic:20 --executor batched --out runs/b", "torch"),
        # Before anything is read or drawn.
        ("forecaster train --traces nowhere.parquet --out lstm", "torch"),
        ("agent train --traces synthetic:60 --out agent", "torch"),
    ],
)
def test_a_command_that_needs_one_says_in_a_sentence_how_to_get_it(run, command, needs):
    ran = run("-m", "fedstale", *command.split())
    assert ran.returncode == 2, ran.stderr
    assert "Traceback" not in ran.stderr
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("fedstale: ")
    assert last.endswith(f"needs {needs}, which is not installed: {installing('torch')}")


def named(extra):
    """Return the packages that an extra names, with those of the extras that it names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = set()
    for line in project["optional-dependencies"][extra]:
        requirement = Requirement(line)
        if requirement.name == "fedstale":
            found |= {name for other in requirement.extras for name in named(other)}
        else:
            found.add(requirement.name.lower())
    return found


def test_the_extra_of_servers_names_neither_package_and_those_that_need_torch_do():
    assert named("server") & {"torch", "scikit-learn"} == set()
    for extra in ("torch", "agents", "dev"):
        assert "torch" in named(extra), extra
