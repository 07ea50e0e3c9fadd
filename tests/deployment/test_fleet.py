"""Flower's own processes with TLS and node keys, started by fedstale."""

import subprocess
import sys

import pytest
from small_deployment import Running, means, wait_for, write_app

from fedstale.deployment import commands, processes
from fedstale.deployment.certificates import write_node_key
from fedstale.deployment.diagnosis import explain
from fedstale.deployment.fleet import free_port
from fedstale.deployment.up import fleet_up, run_app
from fedstale.errors import FedstaleError

pytestmark = pytest.mark.deployment


@pytest.fixture(autouse=True)
def own_records(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def start(fleet, name, command):
    environment = commands.environment(fleet.folder / f"home-{name}")
    found = commands.found(command, environment)
    fleet.family.start(name, found, environment=environment, log=fleet.log(name))


def log(fleet, name):
    return fleet.log(name).read_text(errors="replace")


def test_three_nodes_train_in_rounds_and_as_they_come_and_strangers_stay_outside(tmp_path):
    app = write_app(tmp_path / "adder")
    with fleet_up(tmp_path / "fleet", nodes=3) as fleet:
        key = tmp_path / "stranger"
        write_node_key(key)
        stranger = commands.supernode(fleet.at, fleet.tls.ca, key, port=free_port(), config={})
        start(fleet, "stranger", stranger)
        plain = ["flower-supernode", "--insecure", "--superlink", str(fleet.at)]
        start(fleet, "plain", [*plain, "--port", str(free_port())])
        lines = []
        run_app(fleet, app, run_config="strategy='fedavg' rounds=1", show=lines.append)
        # Nodes add 1, 2 and 3.
        assert means(lines)[1] == pytest.approx(2.0), lines
        lines = []
        run_app(fleet, app, run_config="strategy='gap-aware' rounds=2", show=lines.append)
        assert set(means(lines)) == {0, 1, 2}, lines
        assert any("version 2, train" in line for line in lines), "no progress in the log"
        wait_for(lambda: not fleet.family.is_running("stranger"))
        assert "register its public key" in explain(log(fleet, "stranger"))
        wait_for(lambda: "does not answer plain HTTP" in (explain(log(fleet, "plain")) or ""))
        assert sorted(fleet.control.nodes().values()) == ["online"] * 3
        mark = fleet.family.mark
    assert list(processes.members(mark)) == []
    assert list(processes.records_folder().iterdir()) == []


def test_a_run_survives_a_node_killed_in_training_and_uses_one_that_joins_late(tmp_path):
    app = write_app(tmp_path / "adder")
    with fleet_up(tmp_path / "fleet", nodes=2) as fleet:
        config = "strategy='gap-aware' rounds=2 concurrency=3 buffer-size=1 train-s=1.0"
        run = Running(fleet, app, config)
        run.until(lambda: "Start `flwr-clientapp`" in log(fleet, "node-0"))
        fleet.family.kill("node-0")
        fleet.add_node(2)
        lines = run.end()
        assert means(lines)[2] > means(lines)[1] > 0.0, lines
        wait_for(lambda: "Sending: train" in log(fleet, "node-1") + log(fleet, "node-2"))
        assert "Receiving: train" in log(fleet, "node-2")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_superlink_that_was_killed_comes_back_with_its_nodes(tmp_path):
    app = write_app(tmp_path / "adder")
    with fleet_up(tmp_path / "fleet", nodes=2) as fleet:
        run_app(fleet, app, show=lambda line: None)
        registered = fleet.control.nodes()
        fleet.family.kill("superlink")
        fleet.start_superlink()
        assert fleet.control.nodes().keys() == registered.keys()
        wait_for(lambda: list(fleet.control.nodes().values()) == ["online"] * 2)
        lines = []
        run_app(fleet, app, show=lines.append)
        assert means(lines)[1] == pytest.approx(1.5)
        assert [status for status, _ in fleet.control.runs().values()] == ["finished:completed"] * 2
        with pytest.raises(FedstaleError, match="concurrency = 0: expected"):
            run_app(fleet, app, run_config="strategy='gap-aware' concurrency=0")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_survives_its_superlink_if_the_executor_is_apart(tmp_path):
    app = write_app(tmp_path / "adder")
    with fleet_up(tmp_path / "fleet", nodes=2, executor_apart=True) as fleet:
        config = "strategy='gap-aware' rounds=3 buffer-size=1 train-s=2.0"
        run = Running(fleet, app, config)
        run.until(lambda: "Start `flwr-clientapp`" in log(fleet, "node-0"))
        (run_id,) = fleet.control.runs()
        fleet.family.kill("superlink")
        fleet.start_superlink()
        # The log that was being followed breaks off, but not the run.
        run.thread.join(60)
        wait_for(lambda: fleet.control.runs()[run_id][0] == "finished:completed", limit_s=300)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_of_100_mb_passes(tmp_path):
    app = write_app(tmp_path / "adder")
    with fleet_up(tmp_path / "fleet", nodes=2) as fleet:
        lines = []
        size = 25_000_000  # float32
        config = f"strategy='gap-aware' rounds=1 concurrency=2 buffer-size=2 size={size}"
        run_app(fleet, app, run_config=config, show=lines.append)
        assert means(lines)[1] == pytest.approx(1.5), lines


@pytest.mark.slow
def test_kill_9_of_fedstale_up_leaves_nothing_running(tmp_path):
    app = write_app(tmp_path / "adder")
    code = "import typer; from fedstale import deploy_commands; typer.run(deploy_commands.up)"
    command = [sys.executable, "-c", code, str(app), "--out", str(tmp_path / "fleet")]
    command += ["--run-config", "train-s=600.0"]
    with subprocess.Popen(command, start_new_session=True) as process:
        state = processes.records_folder()
        wait_for(lambda: state.is_dir() and list(state.glob("*.json")))
        (record,) = state.glob("*.json")
        log_of_node = tmp_path / "fleet" / "node-0.log"
        started = "Start `flwr-clientapp`"
        wait_for(lambda: log_of_node.exists() and started in log_of_node.read_text())
        assert len(list(processes.members(record.stem))) >= 8
        process.kill()
    wait_for(lambda: not list(processes.members(record.stem)), limit_s=20.0)
