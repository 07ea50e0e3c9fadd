"""`fedstale flwr` with a built-in app, and models out of checkpoints."""

import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from fedstale.app_folder import BUILT_IN
from fedstale.cli.main import app
from fedstale.flower import command_line
from fedstale.strategies.server import write_checkpoint


def asked_of_flwr(monkeypatch, *words):
    """Return the arguments that flwr gets."""
    asked = []
    monkeypatch.setattr(command_line, "program", lambda name: lambda: asked.extend(sys.argv))
    result = CliRunner().invoke(app, ["flwr", *words])
    assert result.exit_code == 0, result.output
    return asked


def test_flwr_runs_a_built_in_app_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = ["run", "digits", "mine", "--stream"]
    digits = str((BUILT_IN / "digits").resolve())
    assert asked_of_flwr(monkeypatch, *run) == ["flwr", "run", digits, "mine", "--stream"]
    # Anything else is flwr's.
    for words in (["run", "my_app", "mine"], ["list", "digits"], ["run"]):
        assert asked_of_flwr(monkeypatch, *words) == ["flwr", *words]


def test_a_folder_with_the_name_of_a_built_in_app_is_the_reader_s(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["new", "digits"]).exit_code == 0
    asked = asked_of_flwr(monkeypatch, "run", "digits", "mine")
    assert asked == ["flwr", "run", str(tmp_path / "digits"), "mine"]


@pytest.mark.parametrize("state", [None, {"w": np.zeros(3)}], ids=["nothing", "another"])
def test_a_folder_without_a_model_is_named(tmp_path, state):
    if state:
        write_checkpoint(tmp_path / "000000001.checkpoint", state)
    result = CliRunner().invoke(app, ["deploy", "model", str(tmp_path), str(tmp_path / "out")])
    assert result.exit_code == 2
    assert str(tmp_path) in result.stderr
    assert "expected" in result.stderr
    assert not (tmp_path / "out").exists()
