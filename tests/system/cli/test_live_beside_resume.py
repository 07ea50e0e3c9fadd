"""A run that goes on can be watched, at any port."""

from small_app import write_small_app
from typer.testing import CliRunner

from fedstale.cli.main import app


def called(*words):
    result = CliRunner().invoke(app, [*map(str, words)])
    assert result.exit_code == 0, result.output
    return result


def test_beside_resume_a_live_page_is_served(tmp_path):
    small, run = write_small_app(tmp_path / "app"), tmp_path / "run"
    called("simulate", small, "--traces", "ideal:6", "-c", "rounds=1", "--out", run)
    (run / "summary.json").unlink()
    assert "live page: http" in called("simulate", "--resume", run, "--live", "0").stderr
