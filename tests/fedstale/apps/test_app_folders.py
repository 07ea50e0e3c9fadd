"""Every app folder is what Flower accepts, and serves a whole run in one process."""

import ast
import io
import zipfile

import pytest
from flwr.app import Context, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate
from places import FOLDERS, NAMES

from fedstale.errors import ConfigError
from fedstale.simulation import TraceGrid
from fedstale.simulation.flower_app import built_in_apps
from fedstale.simulation.stock_strategies import stock_strategies_reporting
from fedstale.strategies import StaleStrategy
from fedstale.strategies.server.runtime import Callback
from fedstale.traces import TraceSet


def accuracies(app, *, n, **run_config):
    """Run an app on n ideal devices; return what its server measured after each round."""
    config = app.run_config({key.replace("_", "-"): value for key, value in run_config.items()})
    seen = []

    class Accuracy(Callback):
        def metrics(self, run, version, source, values):
            if source == "server":
                seen.append(values["accuracy"])

    costs = app.costs.resolved(config)
    grid = TraceGrid(TraceSet.ideal(n), app.load_client(), costs=costs, run_config=config)
    grid.runtime.add(Accuracy())
    server = app.load_server()
    with grid.running(), stock_strategies_reporting():
        server(grid, Context(1, 1, {}, RecordDict(), config))
    return seen


def test_digits_are_learnt_from_devices_with_uneven_labels(load):
    seen = accuracies(load("digits"), n=20, num_server_rounds=6)
    assert len(seen) == 7
    assert seen[0] < 0.3
    assert seen[-1] > 0.75


def test_digits_can_be_evaluated_on_devices_too(load):
    seen = accuracies(
        load("digits"), n=3, num_server_rounds=1, strategy="FedAvg(fraction_evaluate=1.0)"
    )
    assert len(seen) == 2


def test_shakespeare_learns_from_its_roles(load, small_play):
    seen = accuracies(load("shakespeare"), n=3, text=small_play, num_server_rounds=4)
    assert seen[0] < 0.05
    assert seen[-1] > 0.15


def test_the_template_learns(load):
    seen = accuracies(load(FOLDERS[-1]), n=5, num_server_rounds=3)
    assert seen[-1] > 0.9 > seen[0]


def test_the_template_is_no_built_in_app():
    assert built_in_apps() == NAMES


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
def test_an_app_imports_of_fedstale_only_what_its_side_needs(folder):
    needed = {
        "server_app.py": {
            "fedstale.apps",
            "fedstale.strategies",
        },
        "client_app.py": {"fedstale.apps", "fedstale.client"},
        "task.py": {"fedstale.apps", "fedstale.apps.classification"},
        "idx.py": {
            "fedstale.apps.classification",
            "fedstale.errors",
            "fedstale.traces.sources.archives",
        },
    }
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) else []
            ours = {m for m in modules if m.split(".")[0] == "fedstale"}
            assert ours <= needed.get(path.name, set()), path


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_the_declared_work_is_complete_and_about_a_minute(load, folder):
    app = load(folder)
    costs = app.costs.resolved(app.run_config({}))
    job_s = costs.work_per_example * costs.epochs * costs.examples
    assert 10 <= job_s <= 120
    assert 0 < costs.evaluate_work_per_example < costs.work_per_example


@pytest.mark.parametrize("key", ["checkpoints", "resume"])
@pytest.mark.parametrize("name", NAMES)
def test_a_strategy_that_keeps_no_checkpoints_says_so(load, name, key, data_of, tmp_path):
    app = load(name)
    config = app.run_config({key: str(tmp_path), **data_of(app)})
    with pytest.raises(ConfigError, match=r"flower\.FedAvg has no checkpoints"):
        app.load_server()(None, Context(1, 1, {}, RecordDict(), config))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_checkpoints_and_resume_reach_the_strategy(load, folder, data_of, tmp_path, monkeypatch):
    app, made = load(folder), []
    monkeypatch.setattr(StaleStrategy, "start", lambda self, **_: made.append(self))
    settings = data_of(app) | ({} if folder == FOLDERS[-1] else {"strategy": "GapAware(10, 5)"})
    for paths in ({}, {"checkpoints": str(tmp_path), "resume": str(tmp_path)}):
        config = app.run_config(settings | paths)
        app.load_server()(None, Context(1, 1, {}, RecordDict(), config))
    off, on = made
    assert off.checkpoints.folder is off.checkpoints.resume is None
    assert (on.checkpoints.folder, on.checkpoints.resume) == (tmp_path, str(tmp_path))


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_strategy_is_refused_with_the_known_ones(load, name, data_of):
    app = load(name)
    config = app.run_config({"strategy": "FedAvgg()", **data_of(app)})
    with pytest.raises(
        ConfigError, match=r"^strategy = 'FedAvgg\(\)': 'FedAvgg' is unknown: expected 'FedAvg'$"
    ):
        app.load_server()(None, Context(1, 1, {}, RecordDict(), config))


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


def test_an_unknown_selector_is_one_sentence(load):
    with pytest.raises(ConfigError, match="'Best' is unknown: expected"):
        accuracies(load("digits"), n=3, num_server_rounds=1, strategy="FedBuff(9, selector=Best())")
