"""Every app folder is what Flower accepts, and serves a whole run in one process."""

import io
import zipfile
from importlib import import_module

import pytest
from flwr.app import Context, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate
from places import FOLDERS
from safetensors.torch import save_file

from fedstale.app_folder import built_in_apps
from fedstale.compat import stock_strategies_reporting
from fedstale.simulation import TraceGrid
from fedstale.strategies import StaleStrategy
from fedstale.strategies.server.runtime import Callback
from fedstale.traces import TraceSet


def accuracies(app, *, n, metric="accuracy", **run_config):
    """Run an app on n ideal devices; return what its server measured after each round."""
    config = app.run_config({key.replace("_", "-"): value for key, value in run_config.items()})
    seen = []

    class Accuracy(Callback):
        def metrics(self, run, version, source, values):
            if source == "server":
                seen.append(values[metric])

    costs = app.costs.resolved(config)
    grid = TraceGrid(TraceSet.ideal(n), app.load_client(), costs=costs, run_config=config)
    grid.runtime.add(Accuracy())
    server = app.load_server()
    with grid.running(), stock_strategies_reporting(grid.runtime):
        server(grid, Context(1, 1, {}, RecordDict(), config))
    return seen


def test_shakespeare_learns_from_its_roles(load, small_play):
    seen = accuracies(load("shakespeare"), n=3, text=small_play, num_server_rounds=4)
    assert seen[0] < 0.05
    assert seen[-1] > 0.15


def test_letters_learns_whole_and_then_by_adapters_of_mixed_ranks(load, small_play, tmp_path):
    small = {"text": small_play, "width": 32, "layers": 1, "local_steps": 10}
    seen = accuracies(load("letters"), n=3, **small, num_server_rounds=4)
    assert seen[0] < 0.05
    assert seen[-1] > 0.15
    network = import_module("letters_app.task").Network(1, width=32, layers=1)
    save_file(network.state_dict(), tmp_path / "base.safetensors")
    adapted = accuracies(
        load("letters"),
        n=3,
        metric="loss",
        **small,
        num_server_rounds=3,
        base=str(tmp_path / "base.safetensors"),
        ranks="2,4,8",
        strategy="FedBuff(3, 2, stages=[Adapters(8)])",
    )
    assert adapted == sorted(adapted, reverse=True)
    assert adapted[-1] < adapted[0] - 0.1


def test_the_template_learns(load):
    seen = accuracies(load(FOLDERS[-1]), n=5, num_server_rounds=3)
    assert seen[-1] > 0.9 > seen[0]


def test_the_template_is_no_built_in_app():
    assert built_in_apps() == ["digits"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_flower_accepts_the_folder_without_a_warning(load, folder):
    load(folder)  # checking imports the package, which is forgotten after the test
    _, warnings = load_and_validate(folder / "pyproject.toml", check_module=True)
    assert warnings == []


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_flowers_bundle_holds_every_file_of_the_app(folder):
    names = set(zipfile.ZipFile(io.BytesIO(build_fab_from_disk(folder))).namelist())
    ours = {
        p.relative_to(folder).as_posix()
        for p in folder.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    assert ours <= names


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_checkpoints_and_resume_reach_the_strategy(load, folder, data_of, tmp_path, monkeypatch):
    app, made = load(folder), []
    monkeypatch.setattr(StaleStrategy, "start", lambda self, **_: made.append(self))
    settings = data_of(app) | ({} if folder == FOLDERS[-1] else {"strategy": "GapAware(10, 5)"})
    for paths in ({}, {"checkpoints": str(tmp_path), "resume": str(tmp_path)}):
        config = app.run_config(settings | paths)
        app.load_server()(None, Context(1, 1, {}, RecordDict(), config))
    off, on = made
    assert off.checkpoints.folder is off.resume is None
    assert (on.checkpoints.folder, on.resume) == (tmp_path, tmp_path)


@pytest.mark.parametrize("selector", ["Random", "Oort", "LeastAvailable", "AgentSelector"])
def test_each_selector_picks_with_the_forecasts_that_devices_are_asked_for(load, selector):
    seen = accuracies(
        load("digits"),
        n=20,
        num_server_rounds=3,
        strategy=f"FedBuff(10, 5, selector={selector}(), stages=[ForecastRequest()])",
        forecasts=True,
    )
    assert len(seen) == 4
    assert seen[-1] > seen[0]
