"""What an app says of its costs in pyproject.toml, and what it must say."""

import re
import tomllib
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from flwr.app import ArrayRecord
from interruptions import files, power_cut
from shared_fleets import synthetic
from small_app import CLIENT, PYPROJECT, write_small_app
from typer.testing import CliRunner
from uneven_app import BUFFERED, UNEVEN

import fedstale
from fedstale.cli.main import app as command
from fedstale.config import Costs, SimulationConfig
from fedstale.deployment.check import check_app
from fedstale.errors import ConfigError
from fedstale.simulation.costs import missing_costs, undeclared_queries
from fedstale.simulation.flower_app import FlowerApp
from fedstale.simulation.run import simulate
from fedstale.strategies import FedBuff
from fedstale.traces import TraceSet

UNDECLARED = PYPROJECT[: PYPROJECT.index("[tool.fedstale]")]
KEYS = ("work-per-example", "epochs", "examples", "evaluate-work-per-example")


def with_table(path, table, *, client=CLIENT):
    return write_small_app(path, client=client, pyproject=f"{UNDECLARED}\n{table}\n")


def run(app, out, *, devices=4, **settings):
    config = SimulationConfig(app=str(app), traces="a TraceSet", **settings)
    traces = TraceSet.constant(devices, compute=1.0, downlink_bit_per_s=1e6, uplink_bit_per_s=1e6)
    return simulate(config, out, traces=traces)


def works(result):
    events = pq.read_table(result.folder / "events.parquet").to_pandas()
    return {kind: set(own["work"]) for kind, own in events.groupby("kind")}


# What must be said.


def test_all_that_is_missing_is_named_at_once_before_anything_runs(tmp_path):
    app = write_small_app(tmp_path / "app", pyproject=UNDECLARED)
    with pytest.raises(ConfigError) as caught:
        run(app, tmp_path / "run")
    sentence, table = str(caught.value).split("\n\n")
    assert ", ".join(KEYS) + " missing in [tool.fedstale]" in sentence
    assert not (tmp_path / "run").exists()
    assert tuple(tomllib.loads(table)["tool"]["fedstale"]) == KEYS


def test_the_table_that_the_error_shows_can_be_pasted(tmp_path):
    app = write_small_app(tmp_path / "app", pyproject=UNDECLARED)
    with pytest.raises(ConfigError) as caught:
        run(app, tmp_path / "run")
    table = str(caught.value).split("\n\n")[1]
    again = with_table(tmp_path / "again", table)
    assert run(again, tmp_path / "run").status == "finished"


def test_fedstale_check_names_the_same_keys(tmp_path):
    app = write_small_app(tmp_path / "app", pyproject=UNDECLARED)
    (found,) = [f.text for f in check_app(FlowerApp.find(app)) if "[tool.fedstale]" in f.text]
    assert ", ".join(KEYS) + " missing" in found
    whole = write_small_app(tmp_path / "whole")
    assert not [f for f in check_app(FlowerApp.find(whole)) if "[tool.fedstale]" in f.text]
    result = CliRunner().invoke(command, ["check", str(app)])
    assert result.exit_code == 0
    assert "note: for fedstale simulate: " in result.output


def test_queries_of_the_app_are_named_with_what_is_missing(tmp_path):
    """Who has to paste a table anyway says all of it, before a query is sent arrays."""
    client = CLIENT.replace(
        "@app.train()", '@app.query("prepare")\n@app.query("tidy")\n@app.train()'
    )
    app = write_small_app(tmp_path / "app", client=client, pyproject=UNDECLARED)
    with pytest.raises(ConfigError, match=r"query\.tidy, work\.query\.prepare missing") as caught:
        run(app, tmp_path / "run")
    table = tomllib.loads(str(caught.value).split("\n\n")[1])["tool"]["fedstale"]
    assert table["work"] == {"query": {"tidy": 2.0, "prepare": 2.0}}
    again = with_table(tmp_path / "again", str(caught.value).split("\n\n")[1], client=client)
    assert run(again, tmp_path / "run").status == "finished"
    (found,) = [f.text for f in check_app(FlowerApp.find(app)) if "[tool.fedstale]" in f.text]
    assert "work.query.prepare, work.query.tidy missing" in found


def test_one_key_may_say_the_work_of_all_queries():
    costs = Costs(work={"query": 1.0})
    assert undeclared_queries(["query.a", "train", "query.b", "query"], costs) == []
    assert undeclared_queries(["query.a", "train", "query.b", "query"], Costs()) == [
        "work.query.a",
        "work.query.b",
    ]


def test_an_app_that_never_evaluates_needs_no_costs_of_it(tmp_path):
    client = CLIENT[: CLIENT.index("@app.evaluate()")]
    app = write_small_app(tmp_path / "app", client=client, pyproject=UNDECLARED)
    with pytest.raises(ConfigError, match=r"work-per-example, epochs, examples missing"):
        run(app, tmp_path / "run")
    (found,) = [f.text for f in check_app(FlowerApp.find(app)) if "[tool.fedstale]" in f.text]
    assert "evaluate-work-per-example" not in found


def test_work_by_type_leaves_nothing_to_be_missed():
    assert missing_costs(["train.fit", "evaluate"], Costs(work={"train": 3})) == [
        "evaluate-work-per-example"
    ]
    assert missing_costs(["train.keys", "query.sums"], Costs(work={"train.keys": 0})) == []


def test_what_is_missing_of_a_client_app_in_python_is_named_by_its_arguments():
    from tiny import counting_app

    with pytest.raises(ConfigError, match="work_per_example, epochs, examples, evaluate_work_per"):
        fedstale.simulate(
            counting_app(),
            traces=synthetic(5),
            strategy=FedBuff(2, 1),
            initial_arrays={"w": np.zeros(3)},
            until="2 rounds",
        )


# How it is said.


def test_a_table_says_the_work_of_types_and_actions(tmp_path):
    table = "[tool.fedstale.work]\ntrain = 4\nevaluate.default = 0.5\n'query.sums' = 2"
    app = with_table(tmp_path / "app", table)
    result = run(app, tmp_path / "run")
    assert works(result) == {"train": {4.0}, "evaluate": {0.5}}
    config = SimulationConfig.read(result.folder / "config.toml")
    assert config.costs["work.query.sums"] == 2
    assert Costs.from_table(config.costs).work == {"train": 4, "evaluate": 0.5, "query.sums": 2}


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ("[tool.fedstale.work]\ntrian = 4", "work has 'trian': expected a type of message"),
        ("[tool.fedstale.work]\ntrain = -1", "costs.work = {'train': -1}"),
        ("[tool.fedstale.work]\ntrain = 'a'", "costs.work = {'train': 'a'}"),
        ("[tool.fedstale]\nwork = 'costs'", "work = 'costs': expected module:attribute"),
        ("[tool.fedstale]\nwork = 3", "unknown key 'work'"),
        ("[tool.fedstale]\nwork = 'small_app_under_test.client:data2'", "has no such attribute"),
        ("[tool.fedstale]\nconstant-replies = 3", "costs.constant_replies = 3: expected true"),
    ],
)
def test_what_cannot_be_work_is_one_sentence(tmp_path, table, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        run(with_table(tmp_path / "app", table), tmp_path / "run")


WORK = """

def work(message):
    return 6.5 if message.metadata.message_type == "train" else None
"""


def test_a_function_of_the_app_says_the_work(tmp_path):
    table = (
        "[tool.fedstale]\nwork = 'small_app_under_test.client:work'\n"
        "evaluate-work-per-example = 1.0"
    )
    app = with_table(tmp_path / "app", table, client=CLIENT + WORK)
    # Nodes evaluate the examples that they have: 10 to 13.
    result = run(app, tmp_path / "run", run_config={"fraction-evaluate": 1.0})
    assert works(result) == {"train": {6.5}, "evaluate": {10.0, 11.0, 12.0, 13.0}}
    # A run that goes on knows it from the app.
    again = simulate(
        SimulationConfig.read(result.folder / "config.toml"),
        tmp_path / "again",
        traces=TraceSet.constant(4, compute=1.0, downlink_bit_per_s=1e6, uplink_bit_per_s=1e6),
    )
    assert works(again) == works(result)


@pytest.mark.parametrize("as_app", [True, False])
def test_simulate_takes_the_work_in_python(tmp_path, as_app):
    from tiny import counting_app

    given = {"work": lambda message: 2.5} if as_app else {"work": {"train": 2.5, "evaluate": 0}}
    traces = TraceSet.constant(3, compute=1.0, downlink_bit_per_s=1e6, uplink_bit_per_s=1e6)
    if as_app:
        app = write_small_app(tmp_path / "app")
        result = fedstale.simulate(app, traces=traces, **given)
        assert set(result.jobs["work"]) == {2.5}
        assert SimulationConfig.read(result.folder / "config.toml").app == str(app)
    else:
        result = fedstale.simulate(
            counting_app(),
            traces=traces,
            strategy=FedBuff(2, 1),
            initial_arrays=ArrayRecord([np.zeros(3)]),
            until="3 rounds",
            **given,
        )
        assert set(result.jobs.query("status == 'reported'")["work"]) == {2.5}


# The same bytes in all ways.


@pytest.mark.usefixtures("every_version_kept", "local_workers", "no_pages")
def test_replies_of_all_sizes_give_the_same_bytes_in_any_executor_and_after_a_kill(tmp_path):
    app = write_small_app(tmp_path / "app", client=UNEVEN, server=BUFFERED)
    config = SimulationConfig(app=str(app), traces="synthetic:20", executor="inline")
    phones = synthetic(20)
    first = simulate(config, tmp_path / "inline", traces=phones)
    sizes = first.jobs.query("status == 'reported'")["uploaded_bytes"]
    assert first.status == "finished"
    assert sizes.nunique() > 10
    both = replace(config, executor="processes", workers=2)
    simulate(both, tmp_path / "processes", traces=phones)
    with power_cut(lambda version, now: version == 5):
        simulate(config, tmp_path / "killed", traces=phones)
    simulate(config, tmp_path / "killed", traces=phones, resume=True)
    for folder in ("processes", "killed"):
        assert files(tmp_path / folder) == files(tmp_path / "inline")
