"""The core runs as if there were no shelf: nothing but entry points leads there."""

import sys
from importlib.metadata import entry_points

import pytest
import typer
from small_app import write_small_app
from typer.testing import CliRunner

import fedstale
from fedstale.cli import main
from fedstale.errors import ConfigError
from fedstale.strategies import parse


@pytest.fixture
def bare(monkeypatch):
    """Leave nothing of the shelf to import."""
    for name in [name for name in sys.modules if name.startswith("fedstale.contrib.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fedstale.contrib", None)


@pytest.mark.usefixtures("bare")
def test_an_app_runs_and_has_its_page(tmp_path):
    found = fedstale.simulate(
        write_small_app(tmp_path / "app"),
        traces="synthetic:8",
        strategy="FedBuff(4, 2, selector=Oort(), stages=[ForecastRequest()])",
        until="3 rounds",
        out=tmp_path / "run",
    )
    assert found.status in ("finished", "stopped")
    assert found.report().is_file()


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("point", entry_points(group="fedstale.strategies"), ids=lambda p: p.name)
def test_a_part_that_is_not_there_is_said_by_its_name(point):
    if point.module.startswith("fedstale.contrib."):
        with pytest.raises(ConfigError, match=f"{point.name} cannot be used: ModuleNotFoundError"):
            parse(f"FedBuff(4, 2, stages=[{point.name}()])")


@pytest.mark.usefixtures("bare")
def test_commands_say_that_they_are_not_there():
    root = typer.Typer()
    root.command()(main.doctor)
    points = [
        *entry_points(group="fedstale.commands"),
        *entry_points(group="fedstale.commands.traces"),
    ]
    main.add_commands(root, points)
    for point in points:
        result = CliRunner().invoke(root, [point.name])
        assert result.exit_code == 2
        assert result.stderr.startswith(f"fedstale: {point.name} ")
    assert CliRunner().invoke(root, ["doctor"]).exit_code == 0
