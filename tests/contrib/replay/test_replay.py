"""The copy of an app that acts a trace, and its settings."""

import math
from dataclasses import replace
from importlib import import_module

import pytest
from small_deployment import write_app
from typer.testing import CliRunner

from fedstale.app_folder import BUILT_IN
from fedstale.config import SimulationConfig
from fedstale.contrib.replay import command
from fedstale.contrib.replay.app_copy import (
    ReplayedServerApp,
    replay_config,
    write_replayed,
)
from fedstale.contrib.replay.client import RealtimeApp
from fedstale.errors import ConfigError, TraceError
from fedstale.simulation.flower_app import FlowerApp
from fedstale.traces import TraceSet

NODES = [2**63 + 5, 7, 9]


def copied(app, tmp_path):
    """Write the copy of an app that is replayed, and return its folder and its settings."""
    run_config = {"seed": 2, "rate": math.inf}
    config = SimulationConfig(
        app=str(app), traces="synthetic:3", devices=3, run_config=run_config, costs={"epochs": 2}
    )
    out, run = tmp_path / "copy", tmp_path / "run"
    write_replayed(config, out, speed_up=30.0, nodes=NODES, run=run)
    return out, config


def test_the_copy_wraps_both_halves_and_the_app_stays_as_it_is(tmp_path):
    app = write_app(tmp_path / "adder")
    before = {p: p.read_bytes() for p in app.rglob("*") if p.is_file()}
    folder, config = copied(app, tmp_path)
    copy = FlowerApp.find(folder)
    assert {p: p.read_bytes() for p in app.rglob("*") if p.is_file()} == before
    assert copy.defaults == config.run_config, "with the seed of the run"
    with copy.importable():
        assert isinstance(copy.load_client(), RealtimeApp)
        server = import_module("replayed_server").app
    assert isinstance(server, ReplayedServerApp)
    assert (server._simulation, server._run) == (config, tmp_path / "run")
    assert (server._speed_up, server._nodes) == (30.0, NODES)


@pytest.mark.parametrize("name", ["replayed_server.py", "replayed_client"])
def test_an_app_that_has_such_a_file_is_rejected(tmp_path, name):
    app = write_app(tmp_path / "adder")
    (app / name).write_text("{}")
    with pytest.raises(ConfigError, match=f"has a {name}"):
        copied(app, tmp_path)


def test_what_cannot_be_replayed_is_said_before_anything_starts(tmp_path):
    digits = FlowerApp.find(BUILT_IN / "digits")
    config = replay_config(digits, "synthetic:5", nodes=2, run_config="local-epochs=3")
    assert (config.devices, config.run_config["local-epochs"], config.costs["epochs"]) == (2, 3, 3)
    with pytest.raises(ConfigError, match="devices = 9: expected at most 5"):
        replay_config(digits, "synthetic:5", nodes=9)
    with pytest.raises(TraceError, match="no such file"):
        replay_config(digits, "nothing.parquet", nodes=2)
    replace(TraceSet.ideal(2), uplink=None).write(lacking := tmp_path / "lacking.parquet")
    with pytest.raises(TraceError, match="but not uplink"):
        replay_config(digits, str(lacking), nodes=2)
    with pytest.raises(ConfigError, match="run-config key 'epochs' is unknown"):
        replay_config(digits, "synthetic:5", nodes=2, run_config="epochs=3")


def test_a_wrong_speed_or_too_few_devices_are_rejected(tmp_path):
    out = ["--out", str(tmp_path / "deployment")]
    for options, said in (
        (["--traces", "synthetic:2", "--speed-up", "0"], "speed-up = 0: expected a number > 0"),
        (["--traces", "synthetic:1"], "devices = 2: expected at most 1"),
    ):
        result = CliRunner().invoke(command.app, ["digits", *options, *out])
        assert result.exit_code == 2
        assert said in result.output
    assert not (tmp_path / "deployment").exists()
