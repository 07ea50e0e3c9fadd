"""A strategy by name in the place of the one that an app starts, whatever the app is."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAdam, FedAvg
from interruptions import files, power_cut
from local_workers import LocalWorkers
from made_agent import save
from server_fn_app import write_server_fn_app
from small_app import PYPROJECT, SERVER, write_small_app
from test_run import patchy
from tiny import fleet
from typer.testing import CliRunner

import fedstale
from fedstale.agents import AgentSelector
from fedstale.cli.main import app as command
from fedstale.comparison.plan import Plan
from fedstale.compat import report_stock_strategies
from fedstale.config import SimulationConfig
from fedstale.errors import ConfigError
from fedstale.simulation import FlowerApp, dry_run
from fedstale.simulation.executors import choice
from fedstale.simulation.run import simulate
from fedstale.strategies import FedBuff

pytestmark = pytest.mark.usefixtures("no_pages")

NAMED = "FedBuff(4, 2)"


def simulated(app, out, strategy=NAMED, **options):
    config = SimulationConfig(app=str(app), traces="given", strategy=strategy, **options)
    return simulate(config, out, traces=patchy(12))


@pytest.fixture
def small(tmp_path):
    return write_small_app(tmp_path / "small")


def test_an_app_that_never_heard_of_it_runs_the_strategy_that_is_named(small, tmp_path):
    found = simulated(small, tmp_path / "run", run_config={"rounds": 5})
    assert found.status == "finished", found.reason
    assert found.summary["rounds"] == 5
    assert (found.summary["strategy"], found.summary["in_place_of"]) == (NAMED, "FedAvg")
    # The app's own evaluation, of each version and of the first model.
    assert found.metrics.query("source == 'server' and name == 'loss'")["version"].tolist() == [
        *range(6)
    ]
    merged = found.jobs.query("aggregated_version > 0")
    assert merged.groupby("aggregated_version").size().tolist() == [2] * 5
    assert not found.summary["hint"]


def test_without_a_name_the_summary_says_what_the_app_has_started(small, tmp_path):
    found = simulated(small, tmp_path / "run", strategy=None)
    assert (found.summary["strategy"], found.summary["in_place_of"]) == ("FedAvg", "")
    ours = fedstale.simulate("digits", traces="ideal:8", strategy=NAMED, until="1 rounds")
    assert ours.summary["strategy"].startswith("FedBuff(concurrency=4, buffer_size=2")
    assert not ours.summary["in_place_of"]


def test_the_report_says_which_strategy_ran(small, tmp_path, monkeypatch):
    monkeypatch.undo()
    found = simulated(small, tmp_path / "run")
    page = (found.folder / "report.html").read_text()
    assert "FedBuff in the place of FedAvg" in page


def test_a_named_strategy_of_flowers_takes_the_place_of_one_of_fedstale(tmp_path):
    server = SERVER.replace(
        'getattr(strategies, config["strategy"])(', "FedBuff(concurrency=6, buffer_size=3,"
    ).replace('min_available_nodes=config["min-available"],', "")
    app = write_small_app(
        tmp_path / "small", server="from fedstale.strategies import FedBuff\n" + server
    )
    own = simulated(app, tmp_path / "own", strategy=None)
    assert own.summary["strategy"].startswith("FedBuff(concurrency=6")
    named = "flower.FedAvg(fraction_evaluate=0.0, min_available_nodes=2)"
    found = simulated(app, tmp_path / "run", strategy=named)
    assert found.status == "finished", found.reason
    assert (found.summary["strategy"], found.summary["in_place_of"]) == (named, "FedBuff")


def client(key="count"):
    app = ClientApp()

    @app.train()
    def train(message, context):
        metrics = {key: 3 + context.node_config["partition-id"], "own": 1.0}
        content = {"mine": message.content["mine"], "metrics": MetricRecord(metrics)}
        return Message(RecordDict(content), reply_to=message)

    return app


class Mine(FedAvg):
    """Counts by a key of its own, and decays nothing although it could."""

    def configure_train(self, server_round, arrays, config, grid):
        raise AssertionError("another strategy is in its place")


def server(*starts):
    app = ServerApp()

    @app.main()
    def main(grid, context):
        for strategy in starts:
            strategy.start(grid, ArrayRecord([np.zeros(2)]), 2)

    return app


KEYS = {"arrayrecord_key": "mine", "weighted_by_key": "count"}
IDEAL = {"traces": "ideal:5", "work_per_example": 1.0, "epochs": 1, "examples": 10}
FLOWERS = "flower.FedAdam(fraction_evaluate=0.0)"


@pytest.mark.parametrize("named", [NAMED, FLOWERS])
def test_what_belongs_to_the_app_goes_with_the_strategy_that_is_named(named):
    def averaged(records, weighted_by_key):
        return MetricRecord({"averaged": float(len(records))})

    own = FedAvg(**KEYS, train_metrics_aggr_fn=averaged)
    found = fedstale.simulate((server(own), client()), strategy=named, **IDEAL)
    assert found.status == "finished", found.reason
    assert (found.jobs["status"] == "reported").sum() >= 4
    assert ("train averaged" in found.summary["metrics"]) == (named == FLOWERS)


def test_what_the_text_says_comes_before_what_the_app_has():
    own = FedAvg(arrayrecord_key="mine", weighted_by_key="nothing")
    text = "FedBuff(4, 2, weighted_by_key='count')"
    found = fedstale.simulate((server(own), client()), strategy=text, **IDEAL)
    assert found.status == "finished", found.reason


def test_the_seed_of_the_run_is_that_of_a_text_without_one(small, tmp_path):
    def picks(out, text, seed):
        found = simulated(small, tmp_path / out, text, seed=seed)
        return found.jobs["device_id"].tolist()

    assert picks("a", NAMED, 1) != picks("b", NAMED, 2)
    assert picks("c", "FedBuff(4, 2, seed=1)", 2)[:4] == picks("d", NAMED, 1)[:4]


def test_what_a_class_of_the_app_does_besides_is_said_not_to_be_done():
    found = fedstale.simulate((server(Mine(**KEYS)), client()), strategy=NAMED, **IDEAL)
    assert found.status == "finished", found.reason
    assert "in the place of Mine, whose own configure_train" in found.summary["hint"]


def test_every_start_of_an_app_starts_it_also_of_several_strategies():
    one = FedAvg(**KEYS)
    found = fedstale.simulate(
        (server(one, one, FedAdam(**KEYS)), client()), strategy=NAMED, **IDEAL
    )
    assert found.summary["rounds"] == 6
    assert (found.summary["strategy"], found.summary["in_place_of"]) == (NAMED, "FedAvg, FedAdam")


class Wrapped(FedAvg):
    def start(self, *args, **kwargs):
        return super().start(*args, **kwargs)


class Options(FedAvg):
    def start(self, grid, arrays, rounds, *, patience=3):
        raise AssertionError("another strategy is in its place")


def test_a_start_of_ones_own_is_replaced_as_a_whole_with_the_arguments_that_both_have():
    passed = fedstale.simulate((server(Wrapped(**KEYS)), client()), strategy=NAMED, **IDEAL)
    assert passed.summary["rounds"] == 2
    renamed = fedstale.simulate((server(Options(**KEYS)), client()), strategy=NAMED, **IDEAL)
    assert renamed.status == "failed"
    assert "initial_arrays" in renamed.reason


def test_it_takes_the_place_of_a_strategy_that_reports_already(small, tmp_path):
    undo = report_stock_strategies()
    try:
        assert simulated(small, tmp_path / "run").summary["in_place_of"] == "FedAvg"
    finally:
        undo()


def test_the_same_strategy_by_run_config_and_by_name_gives_the_same_bytes(tmp_path):
    options = {"traces": "synthetic:8", "until": "2 rounds", "executor": "inline"}
    by_name = fedstale.simulate("digits", strategy=NAMED, out=tmp_path / "a", **options)
    by_key = fedstale.simulate(
        "digits", run_config={"strategy": NAMED}, out=tmp_path / "b", **options
    )
    assert files(by_name.folder) == files(by_key.folder)
    assert (by_name.folder / "config.toml").read_text() == (
        by_key.folder / "config.toml"
    ).read_text()


def test_an_app_that_does_not_read_its_key_is_told(tmp_path):
    pyproject = PYPROJECT.replace('strategy = "FedAvg"', 'strategy = "FedBuff(3, 2)"')
    fixed = SERVER.replace('config["strategy"]', '"FedAvg"')
    app = write_small_app(tmp_path / "fixed", pyproject=pyproject, server=fixed)
    hint = simulated(app, tmp_path / "run").summary["hint"]
    assert f"strategy = {NAMED!r}, but the app has started FedAvg" in hint
    parsed = "from fedstale.strategies import parse\n" + SERVER.replace(
        'getattr(strategies, config["strategy"])(', '(lambda **own: parse(config["strategy"]))('
    )
    reads = write_small_app(tmp_path / "reads", pyproject=pyproject, server=parsed)
    assert not simulated(reads, tmp_path / "other").summary["hint"]


def test_a_run_that_was_killed_goes_on_under_the_strategy_that_was_named(small, tmp_path):
    options = {"run_config": {"rounds": 6}}
    whole = simulated(small, tmp_path / "whole", **options)
    with power_cut(lambda version, at: version == 3):
        simulated(small, tmp_path / "cut", **options)
    config = SimulationConfig.read(tmp_path / "cut" / "config.toml")
    assert config.strategy == NAMED
    resumed = simulate(config, tmp_path / "cut", traces=patchy(12), resume=True)
    assert resumed.summary["strategy"] == NAMED
    assert files(resumed.folder) == files(whole.folder)


def test_a_run_under_another_strategy_is_not_gone_on_with(small, tmp_path):
    with power_cut(lambda version, at: version == 1):
        simulated(small, tmp_path / "cut")
    config = SimulationConfig(app=str(small), traces="given", strategy="FedBuff(5, 2)")
    with pytest.raises(ConfigError, match="strategy = 'FedBuff"):
        simulate(config, tmp_path / "cut", traces=patchy(12), resume=True)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("FedBof(4, 2)", "'FedBof' is unknown: expected 'FedBuff'"),
        ("FedBuff(4, 2, sede=1)", "expected 'seed'"),
        ("Oort()", "Oort is no strategy"),
        ("FedBuff", "expected a strategy such as"),
    ],
)
def test_a_name_that_means_nothing_is_refused_before_anything_is_written(
    small, tmp_path, text, sentence
):
    with pytest.raises(ConfigError, match=sentence):
        simulated(small, tmp_path / "run", text)
    assert not (tmp_path / "run").exists()


def test_an_app_of_the_older_api_is_refused_in_one_sentence(tmp_path):
    app = write_server_fn_app(tmp_path / "older")
    with pytest.raises(ConfigError, match=r"strategy = .*older API \(server_fn\)"):
        simulated(app, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_app_that_trains_without_a_strategy_is_refused_before_its_first_job():
    app = ServerApp()

    @app.main()
    def main(grid, context):
        content = RecordDict({"mine": ArrayRecord([np.zeros(2)])})
        nodes = list(grid.get_node_ids())
        grid.send_and_receive([Message(content, node, "train") for node in nodes])

    found = fedstale.simulate((app, client()), strategy=NAMED, **IDEAL)
    assert found.status == "failed"
    assert "starts no strategy" in found.reason
    assert not len(found.jobs)


def test_an_app_that_starts_nothing_at_all_has_failed():
    app = ServerApp()

    @app.main()
    def main(grid, context):
        grid.get_node_ids()

    found = fedstale.simulate((app, client()), strategy=NAMED, **IDEAL)
    assert found.status == "failed"
    assert "starts no strategy" in found.reason
    assert fedstale.simulate((app, client()), **IDEAL).status == "finished"


def test_a_strategy_that_is_an_object_takes_the_place_as_it_is(small, tmp_path):
    made = FedBuff(4, 2, seed=3)
    found = fedstale.simulate(
        small, traces="ideal:12", strategy=made, until="3 rounds", out=tmp_path / "run"
    )
    assert found.summary["strategy"].startswith("FedBuff(concurrency=4, buffer_size=2")
    assert found.summary["in_place_of"] == "FedAvg"
    again = SimulationConfig.read(tmp_path / "run" / "config.toml")
    with pytest.raises(ConfigError, match="'a FedBuff': expected a strategy such as"):
        FlowerApp.find(again.app).resolved(again)


def test_a_strategy_in_its_own_place_is_in_no_others():
    own = FedAvg(**KEYS, fraction_evaluate=0.0)
    found = fedstale.simulate((server(own), client()), strategy=own, **IDEAL)
    assert found.status == "finished", found.reason
    assert (found.summary["strategy"], found.summary["in_place_of"]) == ("FedAvg", "")


def test_clients_in_processes_get_no_strategy_that_is_an_object(small, monkeypatch):
    def sent(load, *args, **options):
        return LocalWorkers(pickle.loads(pickle.dumps(load)), *args, **options)

    monkeypatch.setattr(choice, "ProcessExecutor", sent)
    made = FedBuff(4, 2, selector=AgentSelector(lambda seen: seen["heuristic"]))
    found = fedstale.simulate(
        small, traces="ideal:6", strategy=made, until="2 rounds", executor="processes"
    )
    assert found.summary["rounds"] == 2


def test_a_text_runs_a_client_app_too():
    keys = "arrayrecord_key='mine', weighted_by_key='count'"
    found = fedstale.simulate(
        client(),
        strategy=f"FedBuff(4, 2, {keys})",
        initial_arrays={"w": np.zeros(2)},
        until="2 rounds",
        **IDEAL,
    )
    assert found.summary["rounds"] == 2


@pytest.mark.parametrize("app", ["digits", "small"])
def test_paths_in_a_text_are_kept_whole(app, small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(Path("mine"))
    text = "FedBuff(4, 2, selector=AgentSelector('mine'))"
    found = FlowerApp.find(app).resolved(SimulationConfig(app=app, traces="ideal:2", strategy=text))
    said = found.strategy if app == "small" else found.run_config["strategy"]
    assert repr(str(tmp_path / "mine")) in said
    by_key = FlowerApp.find("digits").resolved(
        SimulationConfig(app="digits", traces="ideal:2", run_config={"strategy": text})
    )
    assert repr(str(tmp_path / "mine")) in by_key.run_config["strategy"]


def test_a_dry_run_sends_what_the_named_strategy_would(small):
    config = SimulationConfig(app=str(small), traces="given", strategy="FedBuff(7, 2)")
    assert dry_run(config, fleet([[(0.0, 4000.0)]] * 12, length=4000.0)).n_asked == 7


def test_variants_of_a_plan_name_their_strategies(small):
    table = {
        "app": str(small),
        "traces": "ideal:8",
        "seeds": [1],
        "variants": {"own": {}, "a": {"strategy": NAMED}, "b": {"strategy": "FedAvg()"}},
    }
    plan = Plan.from_table(table, where="plan")
    assert [plan.config(v, 1).strategy for v in plan.variants] == [None, NAMED, "FedAvg()"]
    bad = Plan.from_table({**table, "variants": {"a": {"strategy": "FedBof()"}}}, where="plan")
    with pytest.raises(ConfigError, match="variant 'a': strategy = 'FedBof"):
        bad.config("a", 1)
    built_in = Plan.from_table({**table, "app": "digits"}, where="plan")
    assert built_in.config("a", 1).run_config["strategy"] == NAMED
    assert built_in.config("a", 1).strategy is None


def test_the_command_says_which_strategy_ran_and_what_may_be_amiss(small, tmp_path):
    words = ["simulate", small, "--traces", "ideal:6", "--until", "2 rounds"]
    lacking = "FedBuff(4, 2, selector=AgentSelector('nowhere', fallback=True))"
    asked = "FedBuff(4, 2, stages=[ForecastRequest()])"
    for text, hint in ((lacking, "no agent.toml there"), (asked, "query.forecast was answered")):
        given = [*words, "--strategy", text, "--out", tmp_path / "run", "--overwrite"]
        result = CliRunner().invoke(command, [*map(str, given)])
        assert result.exit_code == 0, result.output
        assert "Strategy: FedBuff in the place of FedAvg; " in result.stdout
        assert hint in result.stdout
