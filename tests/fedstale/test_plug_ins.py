"""Commands and figures of other packages, which have entry points and no line in the core."""

import logging
from importlib.metadata import EntryPoint

import pytest
import typer
from made_run import write_run
from typer.testing import CliRunner

from fedstale.cli.main import add_commands
from fedstale.reports import Run, page

MADE_UP = """
import typer
from fedstale.reports import Figure

app = typer.Typer()
group = typer.Typer(name="crew", help="Whom to call.", rich_help_panel="Learn")


@app.command(rich_help_panel="Analyse")
def colours(n: int = 2) -> None:
    "Name colours."
    typer.echo("red blue green"[: n * 4])


@group.command()
def call() -> None:
    "Call them."
    typer.echo("called")


def jobs(run):
    return Figure(id="made-up", title="Jobs of a package", about="All.", traces=[], x_title="x")


def nothing(run):
    return None
"""


@pytest.fixture
def points(tmp_path, monkeypatch):
    """Return a function that makes entry points of a package that is on the path."""
    (tmp_path / "made_up_commands.py").write_text(MADE_UP)
    (tmp_path / "needs_more.py").write_text("import colour_of_the_sea\n")
    (tmp_path / "half_written.py").write_text("def app(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    return lambda **found: [EntryPoint(name, value, "") for name, value in found.items()]


@pytest.fixture
def called(points):
    def called(*words, **found):
        root = typer.Typer()
        root.command(rich_help_panel="Run")(lambda: typer.echo("own"))
        add_commands(root, points(**found))
        return CliRunner().invoke(root, words)

    return called


def test_commands_of_another_package_stand_in_the_panel_that_they_name(called):
    found = {"a": "made_up_commands:app", "b": "made_up_commands:group"}
    assert called("colours", "--n", "1", **found).stdout == "red \n"
    assert called("crew", "call", **found).stdout == "called\n"
    said = called("--help", **found).stdout
    places = [said.index(word) for word in ("Analyse", "colours", "Learn", "crew")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("needs_more:app", "needs colour_of_the_sea, which is not installed: pip install col"),
        ("half_written:app", "cannot be used: SyntaxError: invalid syntax"),
        ("made_up_commands:none", "cannot be used: AttributeError: module 'made_up_commands' has"),
        ("made_up_commands:jobs", "cannot be used: AttributeError: 'function' object has no"),
    ],
)
def test_what_is_missing_or_broken_is_one_sentence_of_its_own_command(called, place, why):
    result = called("gone", "--n", "3", gone=place)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"fedstale: gone {why}")
    assert result.stderr.count("\n") == 1
    assert why[:30] in called("--help", gone=place).stdout


def test_a_figure_of_another_package_is_on_the_page_of_a_run(points, tmp_path, monkeypatch, caplog):
    found = {
        "none": "made_up_commands:nothing",
        "jobs": "made_up_commands:jobs",
        "sea": "needs_more:figure",
        "typer": "made_up_commands:app",
    }
    monkeypatch.setattr(page, "entry_points", lambda group: points(**found))
    with caplog.at_level(logging.WARNING):
        written = Run(write_run(tmp_path / "run")).report().read_text()
    assert "Jobs of a package" in written
    assert [record.getMessage()[:60] for record in caplog.records] == [
        "the page lacks the section sea: it needs colour_of_the_sea, ",
        "the page lacks the section typer: it cannot be used: TypeErr",
    ]
