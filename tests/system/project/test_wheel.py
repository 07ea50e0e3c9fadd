"""What a user installs: the wheel in an environment of its own, and the source archive."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from places import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", out, ROOT], check=True, capture_output=True)
    return next(out.glob("fedstale-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Return the folder of commands of an environment that has the wheel and what it needs."""
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    site = next(home.glob("lib/python*/site-packages"))
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*command, "--target", site, wheel], check=True, capture_output=True)
    # What it depends on is there already; the .pth files of that folder are not read.
    (site / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


def ran(installed, *arguments, cwd):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return subprocess.run(
        [installed / "python", *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_installed_package_is_the_one_of_the_wheel(installed, tmp_path):
    found = ran(
        installed, "-c", "import fedstale.traces; print(fedstale.traces.__file__)", cwd=tmp_path
    )
    assert found.returncode == 0, found.stderr
    assert str(installed.parent) in found.stdout


def test_the_first_run_of_the_readme_leaves_a_page(installed, tmp_path):
    command = ("-m", "fedstale", "simulate", "digits", "--out", "runs/demo", "--overwrite")
    run = ran(installed, *command, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "finished: 40 rounds of the app" in run.stdout
    page = (tmp_path / "runs" / "demo" / "report.html").read_text(encoding="utf-8")
    assert "Chart.js v4" in page
    assert '<section id="timeline">' in page


def test_a_shipped_forecaster_and_agent_come_with_it(installed, tmp_path):
    program = (
        "from fedstale.agents import AgentSelector\n"
        "from fedstale.traces.forecast import embedded\n"
        "AgentSelector()\n"
        "print(type(embedded('phones')).__name__)\n"
    )
    made = ran(installed, "-c", program, cwd=tmp_path)
    assert made.returncode == 0, made.stderr[-2000:]


def test_every_file_of_the_packages_that_is_no_cache_is_in_the_wheel(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in ("fedstale", "traces", "strategies", "agents"):
        for path in (ROOT / package).rglob("*"):
            if not path.is_file() or "__pycache__" in path.parts or path.is_symlink():
                continue
            inside = path.relative_to(ROOT)
            place = inside if package == "fedstale" else Path("fedstale") / inside
            assert place.as_posix() in names


def test_the_source_archive_has_tests_and_docs(tmp_path):
    program = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    built = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr[-2000:]
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    for needed in (
        "README.md",
        "docs/index.md",
        "tests/conftest.py",
        "constraints.txt",
        "Makefile",
    ):
        assert needed in names, needed
    assert not [name for name in names if name.startswith((".venv", "node_modules", "runs/"))]
