"""The copy of an app that acts a trace, and its settings."""

from importlib import import_module

import pytest
import typer
from small_deployment import write_app
from typer.testing import CliRunner

from fedstale.cli import apps as app_commands
from fedstale.config import SimulationConfig
from fedstale.deployment.paced import PacedApp
from fedstale.deployment.replay import (
    ReplayedServerApp,
    ReplaySettings,
    replay_config,
    write_replayed,
)
from fedstale.errors import ConfigError, ProtocolError, TraceError
from fedstale.simulation.flower_app import BUILT_IN, FlowerApp


def settings(tmp_path, app="digits"):
    config = SimulationConfig(app=app, traces="synthetic:3", devices=3, run_config={"seed": 2})
    nodes = {0: 2**63 + 5, 1: 7, 2: 9}
    return ReplaySettings(config=config, speed_up=30.0, nodes=nodes, out=tmp_path / "run")


def test_settings_come_back_and_nonsense_is_one_error(tmp_path):
    path = tmp_path / "replay.json"
    settings(tmp_path).write(path)
    assert ReplaySettings.read(path) == settings(tmp_path)
    for text in ("", "[]", "{}", path.read_text().replace("synthetic:3", "x").replace('"7"', "[]")):
        path.write_text(text)
        with pytest.raises(ProtocolError, match="no settings of a replay"):
            ReplaySettings.read(path)


def test_the_copy_wraps_both_halves_and_the_app_stays_as_it_is(tmp_path):
    app = write_app(tmp_path / "adder")
    before = {p: p.read_bytes() for p in app.rglob("*") if p.is_file()}
    copy = FlowerApp.find(write_replayed(app, tmp_path / "copy", settings(tmp_path)))
    assert {p: p.read_bytes() for p in app.rglob("*") if p.is_file()} == before
    assert copy.defaults == FlowerApp.find(app).defaults
    with copy.importable():
        assert isinstance(copy.load_client(), PacedApp)
        assert isinstance(import_module("replayed_server").app, ReplayedServerApp)


def test_an_app_that_has_such_a_file_is_rejected(tmp_path):
    app = write_app(tmp_path / "adder")
    (app / "replay.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has a replay\.json"):
        write_replayed(app, tmp_path / "copy", settings(tmp_path))


def test_what_cannot_be_replayed_is_said_before_anything_starts():
    digits = FlowerApp.find(BUILT_IN / "digits")
    config = replay_config(digits, "synthetic:5", nodes=2, run_config="local-epochs=3")
    assert (config.devices, config.run_config["local-epochs"], config.costs["epochs"]) == (2, 3, 3)
    with pytest.raises(ConfigError, match="devices = 9: expected at most 5"):
        replay_config(digits, "synthetic:5", nodes=9)
    with pytest.raises(TraceError, match="no such file"):
        replay_config(digits, "nothing.parquet", nodes=2)
    with pytest.raises(ConfigError, match="run-config key 'epochs' is unknown"):
        replay_config(digits, "synthetic:5", nodes=2, run_config="epochs=3")


def test_a_speed_without_a_trace_or_a_wrong_one_is_rejected(tmp_path):
    app = typer.Typer()
    app.command()(app_commands.up)
    out = ["--out", str(tmp_path / "deployment")]
    for options, said in (
        (["--speed-up", "3"], "speed-up = 3: expected --traces with it"),
        (["--traces", "synthetic:2", "--speed-up", "0"], "speed-up = 0: expected a number > 0"),
        (["--traces", "synthetic:1"], "devices = 2: expected at most 1"),
    ):
        result = CliRunner().invoke(app, ["digits", *options, *out])
        assert result.exit_code == 2
        assert said in result.output
    assert not (tmp_path / "deployment").exists()
