import pytest
import typer
from typer.testing import CliRunner

from fedstale.cli.compare import report


@pytest.fixture
def run_command():
    """Return a function that calls the command with arguments."""
    app = typer.Typer()
    app.command()(report)
    return lambda *arguments: CliRunner().invoke(app, [str(text) for text in arguments])


@pytest.fixture
def write_run():
    from made_run import write_run

    return write_run


def test_one_run_gets_its_report_in_its_folder(run_command, write_run, tmp_path):
    folder = write_run(tmp_path / "run")
    result = run_command(folder)
    assert (result.exit_code, result.output) == (0, f"report: {folder / 'report.html'}\n")
    assert (folder / "report.html").stat().st_size > 2e5


def test_what_is_not_a_run_is_one_sentence_and_exit_code_2(run_command, tmp_path):
    result = run_command(tmp_path)
    assert result.exit_code == 2
    assert result.output.startswith("fedstale: run = ")
    assert result.output.count("\n") == 1
