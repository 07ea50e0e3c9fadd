"""What nodes find in their config, and what is said of an app with too few partitions for them."""

import logging
from dataclasses import replace

import pandas as pd
import pyarrow as pa
import pytest
from interruptions import no_pages
from invoked_command import invoked
from small_app import CLIENT, PYPROJECT, write_small_app

import fedstale
from fedstale.config import SimulationConfig
from fedstale.errors import ConfigError
from fedstale.runs import RunFolder
from fedstale.simulation.nodes import NodeConfigs, missing_partitions, node_configs
from fedstale.traces import TraceSet

__all__ = ["no_pages"]

pytestmark = pytest.mark.usefixtures("no_pages")

N_PARTITIONS = 12
LOADERS = {
    "IndexError": f"list(range({N_PARTITIONS}))[partition]",
    "KeyError": f"dict.fromkeys(range({N_PARTITIONS}))[partition]",
    "ValueError": f"list(range({N_PARTITIONS})).index(partition)",
}
"""Ways to ask for a partition that is not there, by the error."""


@pytest.fixture
def ran(tmp_path):
    """Return a function that simulates the small app with some lines before it loads its data."""

    def go(line="pass", *, devices=20, pyproject=PYPROJECT, **options):
        client = CLIENT.replace("    rng = np.", f"    {line}\n    rng = np.")
        app = write_small_app(tmp_path / "app", client=client, pyproject=pyproject)
        given = {"strategy": "FedAvg", "fraction-evaluate": 0.0, **options.pop("run_config", {})}
        traces = TraceSet.ideal(devices)
        return fedstale.simulate(
            app, traces=traces, out=tmp_path / "run", run_config=given, **options
        )

    return go


@pytest.mark.parametrize("kind", LOADERS)
def test_clients_that_fail_from_some_partition_on_are_told_of_once(ran, kind, caplog):
    with caplog.at_level(logging.WARNING, "fedstale.simulation"):
        run = ran(LOADERS[kind])
    (line,) = [one for one in caplog.messages if "partition" in one and "--devices" in one]
    assert line == run.summary["hint"]
    assert line == (
        f"clients fail with {kind} on all of 8 partition ids from 12 on, and on none of 12 below: "
        "the app seems to have 12 partitions; use --devices 12, or let devices share data: "
        "--set partitions=12, or partitions = 12 in a config.toml or in Python"
    )


@pytest.mark.parametrize("line", ["[][partition % 2]", "1 // (partition < 12)", "[][partition]"])
def test_clients_that_fail_otherwise_are_told_of_no_partitions(ran, line):
    assert not ran(line).summary["hint"]


@pytest.fixture
def ended(tmp_path):
    """Return a function that makes the folder of a run from its table of jobs."""

    def make(table):
        with RunFolder.create(tmp_path / "ended") as folder:
            folder.write_events(table)
        return folder

    return make


def events(*failed, n=20, reason="IndexError: list index out of range (client.py:3)"):
    status = ["client-error" if i in failed else "reported" for i in range(n)]
    reasons = [reason if i in failed else "" for i in range(n)]
    ids = [str(i) for i in range(n)]
    return pa.table({"device_id": ids, "status": status, "reason": reasons})


@pytest.mark.parametrize(
    ("failed", "n", "said"),
    [
        ((19,), 20, "19 partitions"),
        ((9,), 10, ""),  # one of ten is often the last by chance
        ((3, 19), 20, ""),
        ((18, 19), 20, "18 partitions"),
    ],
)
def test_what_may_be_chance_is_not_told(ended, failed, n, said):
    ids = pd.Index([str(i) for i in range(n)])
    told = missing_partitions(ended(events(*failed, n=n)), NodeConfigs(ids))
    assert said in told
    assert bool(said) == bool(told)


def test_partitions_that_nobody_tried_leave_a_range(ended):
    table = events(17, 18, 19).filter(pa.array([i not in (15, 16) for i in range(20)]))
    told = missing_partitions(ended(table), NodeConfigs([str(i) for i in range(20)]))
    assert "between 15 and 17 partitions; use --devices 15" in told


def test_partition_ids_wrap_so_that_devices_share_data(ran):
    run = ran("assert partition < 3", partitions=3, devices=8)
    assert run.status == "finished"
    assert set(run.jobs["status"]) == {"reported"}
    assert not run.summary["hint"]
    assert SimulationConfig.read(run.folder / "config.toml").partitions == 3
    nodes = NodeConfigs([str(i) for i in range(8)], partitions=3)
    assert [nodes.of(i)["partition-id"] for i in range(8)] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert {nodes.of(i)["num-partitions"] for i in range(8)} == {3}


def test_an_app_with_few_partitions_runs_on_many_devices_where_they_wrap(ran, caplog):
    run = ran(LOADERS["IndexError"], partitions=N_PARTITIONS)
    assert not run.summary["client_errors"]
    assert not run.summary["hint"]


TOML = '[device-1]\nram = 4\nfast = true\n[device-3]\nram = 8\nslow.cpu = "a53"\n'
OWN = {"device-1": {"ram": 4, "fast": True}, "device-3": {"ram": 8, "slow.cpu": "a53"}}


def configs(given, n=5):
    ids = pd.Index([f"device-{i}" for i in range(n)])
    return node_configs(SimulationConfig(app="a", traces="b", node_config=given), ids, ids[:4])


def test_a_device_has_what_a_file_says_of_it(tmp_path):
    (tmp_path / "nodes.toml").write_text(TOML)
    nodes = configs(str(tmp_path / "nodes.toml"))
    for i in range(4):
        usual = {"partition-id": i, "num-partitions": 4, "device-id": f"device-{i}"}
        assert nodes.of(i) == usual | OWN.get(f"device-{i}", {})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('["7"]\nram = 4', "device '7', which the traces have not: expected one of"),
        ("ram = 4", "has ram = 4: expected a device id with a table"),
        ('["1"]\nram = [4]', "expected a device id with a table of numbers"),
        ("not toml [", "cannot be read as TOML"),
        (None, "no such file"),
    ],
)
def test_a_file_that_says_nothing_of_devices_is_refused(tmp_path, text, sentence):
    path = tmp_path / "nodes.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        configs(str(path))
    assert sentence in str(caught.value)
    assert str(path) in str(caught.value)


def test_clients_find_their_device_in_their_node_config(tmp_path):
    (tmp_path / "nodes.toml").write_text("".join(f"[device-{i}]\nram = {i}\n" for i in range(6)))
    client = CLIENT.replace(
        '"num-examples": len(x)}',
        '"num-examples": len(x), "ram": context.node_config["ram"], '
        '"id": int(context.node_config["device-id"][7:])}',
        1,
    )
    app = write_small_app(tmp_path / "other", client=client)
    run = fedstale.simulate(
        app,
        traces=TraceSet.ideal(6),
        node_config=tmp_path / "nodes.toml",
        run_config={"rounds": 1},
        out=tmp_path / "run2",
    )
    assert run.last("train")["ram"] == run.last("train")["id"] > 1.0


def test_a_file_of_settings_has_both_and_its_run_repeats_itself(tmp_path, capsys):
    app = write_small_app(tmp_path / "app")
    (tmp_path / "nodes.toml").write_text("[device-1]\nram = 4\n")
    (tmp_path / "my.toml").write_text(
        f"app = {str(app)!r}\ntraces = 'ideal:4'\npartitions = 2\n"
        f"node_config = {str(tmp_path / 'nodes.toml')!r}\n"
    )
    first, again = tmp_path / "first", tmp_path / "again"
    for settings, out in ((tmp_path / "my.toml", first), (first / "config.toml", again)):
        code, _, err = invoked(["simulate", settings, "-o", out], capsys)
        assert code == 0, err
    assert (first / "config.toml").read_text() == (again / "config.toml").read_text()
    assert SimulationConfig.read(again / "config.toml").partitions == 2
    assert (first / "events.parquet").read_bytes() == (again / "events.parquet").read_bytes()


def test_tables_of_python_stand_in_the_config_of_the_run_and_are_read_back(ran):
    run = ran(devices=4, node_config={"device-2": {"ram": 4}}, run_config={"rounds": 1})
    config = SimulationConfig.read(run.folder / "config.toml")
    assert config.node_config == {"device-2": {"ram": 4}}
    assert replace(config).effective()["node-config"] == {"device-2": {"ram": 4}}


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"partitions": 0}, "partitions = 0: expected a whole number >= 1"),
        ({"node_config": 3}, "node_config = 3: expected a file, or tables"),
        ({"node_config": {"device-0": {"ram": None}}}, "expected a device id with a table"),
        ({"node_config": {"device-0": 4}}, "expected a device id with a table"),
        ({"node_config": {"phone": {"ram": 4}}}, "device 'phone', which the traces have not"),
    ],
)
def test_settings_of_nodes_that_cannot_be_are_refused_before_anything_is_written(
    ran, tmp_path, setting, sentence
):
    with pytest.raises(ConfigError, match=sentence):
        ran(**setting)
    assert not (tmp_path / "run").exists()
