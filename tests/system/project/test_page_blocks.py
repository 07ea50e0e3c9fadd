"""Every block of Python and of commands in the README and in docs/ runs as it stands.

What the README shows of its demo is what the demo prints.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from typer.testing import CliRunner

from fedstale.cli.main import app

MAKEFILE = (ROOT / "Makefile").read_text()

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language):
    for page in PAGES:
        for number, found in enumerate(BLOCK.finditer(page.read_text(encoding="utf-8"))):
            if found[1] == language:
                yield pytest.param(found[2], id=f"{page.name}-{number}")


@pytest.mark.parametrize("code", list(blocks("python")))
def test_the_python_of_the_pages_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "page", "exec"), {"__name__": "page"})


DEMO = "fedstale simulate digits --out runs/demo --overwrite"


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Return what the demo says, run once, as a shell runs it."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    folder = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        shlex.split(DEMO),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    done.folder = folder
    return done


@pytest.mark.parametrize("script", list(blocks("sh")))
def test_the_commands_of_the_pages_run(script, request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for line in script.replace("\\\n", " ").splitlines():
        command = shlex.split(line, comments=True)
        if command[:1] == ["make"]:
            assert re.search(rf"^{command[1]}:", MAKEFILE, re.MULTILINE)
        elif command == shlex.split(DEMO):
            run = request.getfixturevalue("demo")
            assert run.returncode == 0, f"{line}\n{run.stderr}"
        elif command[:1] == ["fedstale"]:
            if "runs/demo" in command:
                monkeypatch.chdir(request.getfixturevalue("demo").folder)
            result = CliRunner().invoke(app, command[1:])
            assert result.exit_code == 0, f"{line}\n{result.output}"


def test_the_table_in_the_readme_is_what_the_demo_prints(demo):
    assert DEMO in MAKEFILE
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert DEMO in readme
    assert demo.returncode == 0
    assert "[ROUND" not in demo.stderr, "Flower's log is in log.txt"

    def rows(text):
        # Wall time is the machine's, and the last digits of a loss are its instruction set's.
        own = ("wall time", "speed", "server", "train")
        cells = (line.strip("│ ").split("│") for line in text.splitlines() if line.startswith("│"))
        return [(a.strip(), b.strip()) for a, b in cells if not a.startswith(own)]

    table = readme[readme.index("```text") :]
    assert rows(demo.stdout) == rows(table[: table.index("report: ")])
