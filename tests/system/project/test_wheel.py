"""What a user installs: the wheel of `make build` in an environment outside of the clone."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from places import ROOT

from fedstale.errors import EXTRAS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

CONSTRAINTS = ROOT / "constraints.txt"
(TORCH,) = (line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
ABSENT = {*EXTRAS["agents"], *EXTRAS["ray"], *EXTRAS["privacy"], "plotly", "tensorboard"}
"""Packages of other extras."""

IMPORTS = """
import importlib, pkgutil
import fedstale

for found in pkgutil.walk_packages(fedstale.__path__, "fedstale.", onerror=lambda name: None):
    if found.name != "fedstale.__main__":
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as problem:
            print(found.name, problem.name.partition(".")[0])
"""


def ran(python, *arguments, cwd):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return subprocess.run(
        [python, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Return the Python of an environment that has nothing yet."""
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    return home / "bin" / "python"


@pytest.fixture(scope="module")
def built(python, tmp_path_factory):
    """Return the folder in which a wheel and a source archive are."""
    out = tmp_path_factory.mktemp("dist")
    for arguments in (
        ("pip", "install", "--quiet", "-c", CONSTRAINTS, "build"),
        ("build", "--outdir", out, ROOT),
    ):
        done = ran(python, "-m", *arguments, cwd=out)
        assert done.returncode == 0, done.stderr[-2000:]
    return out


@pytest.fixture(scope="module")
def wheel(built):
    return next(built.glob("fedstale-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, python):
    """Return the Python of an environment into which the wheel was installed as README says."""
    for what in (TORCH, f"{wheel}[server,torch]"):
        command = ("-m", "pip", "install", "--quiet", "--no-compile", "-c", CONSTRAINTS, what)
        done = ran(python, *command, cwd=wheel.parent)
        assert done.returncode == 0, done.stderr[-2000:]
    return python


def test_the_first_run_of_the_readme_leaves_a_page(installed, tmp_path):
    command = ("-m", "fedstale", "simulate", "digits", "--out", "runs/demo", "--overwrite")
    run = ran(installed, *command, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-2000:]
    assert " finished (40 rounds of the app) after " in run.stdout
    page = (tmp_path / "runs" / "demo" / "report.html").read_text(encoding="utf-8")
    assert "Chart.js v4" in page
    assert '<section id="timeline">' in page


def test_a_new_app_runs(installed, tmp_path):
    made = ran(installed, "-m", "fedstale", "new", "mine", cwd=tmp_path)
    assert made.returncode == 0, made.stderr[-2000:]
    command = ("simulate", "mine", "--traces", "ideal:4", "-c", "num-server-rounds=2")
    run = ran(installed, "-m", "fedstale", *command, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-2000:]
    assert " finished (2 rounds of the app) after " in run.stdout


def test_every_module_is_imported_but_for_what_other_extras_bring(installed, tmp_path):
    found = ran(installed, "-c", IMPORTS, cwd=tmp_path)
    assert found.returncode == 0, found.stderr[-2000:]
    missing = dict(line.split() for line in found.stdout.splitlines())
    assert missing.keys() >= {"fedstale.agents.tasks", "fedstale.contrib.tuning.engine"}
    assert set(missing.values()) <= ABSENT


def test_an_extra_that_is_missing_comes_from_the_wheel(installed, wheel, tmp_path):
    command = ("agent", "train", "--traces", "synthetic:60", "--out", "agent")
    run = ran(installed, "-m", "fedstale", *command, cwd=tmp_path)
    assert run.returncode == 2, run.stderr[-2000:]
    assert run.stderr.splitlines()[-1].endswith(f"pip install '{wheel}[agents]'")


def test_a_shipped_forecaster_and_agent_come_with_it(installed, tmp_path):
    program = (
        "from fedstale.agents import AgentSelector\n"
        "from fedstale.traces.forecast import embedded\n"
        "AgentSelector()\n"
        "print(type(embedded('phones')).__name__)\n"
    )
    made = ran(installed, "-c", program, cwd=tmp_path)
    assert made.returncode == 0, made.stderr[-2000:]


def test_the_wheel_has_every_file_of_the_packages_that_is_no_cache_and_no_other(wheel):
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    expected = set()
    for package in ("fedstale", "traces", "strategies", "agents"):
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and not path.is_symlink():
                inside = path.relative_to(ROOT)
                place = inside if package == "fedstale" else Path("fedstale") / inside
                expected.add(place.as_posix())
    assert names == expected


def test_the_source_archive_has_every_file_of_the_clone(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    command = ["git", "ls-files"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no clone")
    assert {name for name in listed.stdout.splitlines() if not (ROOT / name).is_symlink()} <= names
    assert not [name for name in names if name.startswith((".venv", "node_modules", "runs/"))]
