"""Every block of Python and of commands in the README and in docs/ runs as it stands.

A block of text right below commands is what they print, as an excerpt where it has a line "...".
"""

import json
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
from fedstale.reports.page import cards
from fedstale.reports.run import Run

MAKEFILE = (ROOT / "Makefile").read_text()

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^```(\w+)\n(.*?)^```$(?=(?:\n+^```text\n(.*?)^```$)?)", re.MULTILINE | re.DOTALL
)


def blocks(language):
    for page in PAGES:
        for number, found in enumerate(BLOCK.finditer(page.read_text(encoding="utf-8"))):
            if found[1] == language:
                values = (found[2], found[3] or "") if language == "sh" else (found[2],)
                yield pytest.param(*values, id=f"{page.name}-{number}")


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


def pieces(shown):
    """Return what stands between the lines "..." of an excerpt, however its lines are broken."""
    return [" ".join(piece.split()) for piece in re.split(r"^\.\.\.$", shown, flags=re.MULTILINE)]


@pytest.mark.parametrize(("script", "shown"), list(blocks("sh")))
def test_the_commands_of_the_pages_run_and_print_what_is_shown(
    script, shown, request, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    printed = ""
    for line in script.replace("\\\n", " ").splitlines():
        command = shlex.split(line, comments=True)
        if command[:1] == ["make"]:
            assert re.search(rf"^{command[1]}:", MAKEFILE, re.MULTILINE)
        elif command == shlex.split(DEMO):
            run = request.getfixturevalue("demo")
            assert run.returncode == 0, f"{line}\n{run.stderr}"
            printed += run.stdout
        elif command[:1] == ["fedstale"]:
            if "runs/demo" in command:
                monkeypatch.chdir(request.getfixturevalue("demo").folder)
            result = CliRunner().invoke(app, command[1:])
            assert result.exit_code == 0, f"{line}\n{result.output}"
            printed += result.output
    for piece in pieces(shown):
        assert piece in " ".join(printed.split()), printed


def test_an_excerpt_may_leave_out_lines_and_break_them():
    assert pieces("one\n...\ntwo\n  three\n") == ["one", "two three"]


def test_the_table_in_the_readme_is_that_of_the_demo_before_and_after_its_advice(demo):
    assert DEMO in MAKEFILE
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert DEMO in readme
    assert demo.returncode == 0
    assert "[ROUND" not in demo.stderr, "Flower's log is in log.txt"
    after = fedstale_called("advise", demo.folder / "runs" / "demo", "--apply", "--json")["out"]
    figures = dict(cards(Run(after)))
    table = readme[readme.index("| before | after |") :].partition("\n\n")[0]
    rows = re.findall(r"^\| ([\w -]+?)(?: of 40 rounds)? \| (.+) \| (.+) \|$", table, re.MULTILINE)
    assert {name: f"{before} → {now}" for name, before, now in rows} == {
        name: figures[name] for name in ("device-hours wasted", "accuracy", "virtual time")
    }


def fedstale_called(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
