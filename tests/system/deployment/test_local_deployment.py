"""Flower's own processes with TLS and node keys, started by fedstale."""

import subprocess
import sys
from itertools import pairwise

import psutil
import pytest
from small_deployment import Running, means, stop, wait_for, write_app

from fedstale.deployment import commands
from fedstale.deployment.commands import write_node_key
from fedstale.deployment.diagnosis import explain
from fedstale.deployment.local import LocalDeployment, free_port, run_app
from fedstale.errors import FedstaleError

pytestmark = pytest.mark.deployment


def start(deployment, name, command):
    environment = commands.environment(deployment.folder / f"home-{name}")
    found = commands.found(command, environment)
    deployment.processes.start(name, found, environment=environment, log=deployment.log(name))


def log(deployment, name):
    return deployment.log(name).read_text(errors="replace")


def test_three_nodes_train_in_rounds_and_as_they_come_and_strangers_stay_outside(
    deployment, tmp_path
):
    app = write_app(tmp_path / "adder")
    known = deployment.control.nodes()
    key = tmp_path / "stranger"
    write_node_key(key)
    stranger = commands.supernode(
        deployment.at, deployment.tls.ca, key, port=free_port(), config={}
    )
    start(deployment, "stranger", stranger)
    plain = ["flower-supernode", "--insecure", "--superlink", str(deployment.at)]
    start(deployment, "plain", [*plain, "--port", str(free_port())])
    lines = []
    run_app(deployment, app, run_config="strategy='fedavg' rounds=1", show=lines.append)
    # Nodes add 1, 2 and 3.
    assert means(lines)[1] == pytest.approx(2.0), lines
    lines = []
    run_app(deployment, app, run_config="strategy='gap-aware' rounds=2", show=lines.append)
    assert set(means(lines)) == {0, 1, 2}, lines
    assert any("version 2, train" in line for line in lines), "no progress in the log"
    wait_for(lambda: not deployment.processes.is_running("stranger"))
    assert "register its public key" in explain(log(deployment, "stranger"))
    wait_for(lambda: "does not answer plain HTTP" in (explain(log(deployment, "plain")) or ""))
    deployment.processes.kill("plain")
    nodes = deployment.control.nodes()
    assert nodes.keys() == known.keys()
    assert [nodes[node] for node in deployment.node_ids.values()] == ["online"] * 3


def test_a_run_survives_a_node_killed_in_training_and_uses_one_that_joins_late(tmp_path):
    app = write_app(tmp_path / "adder")
    others = set(psutil.Process().children(recursive=True))
    with LocalDeployment(tmp_path / "deployment", nodes=2) as deployment:
        config = "strategy='gap-aware' rounds=1000 concurrency=3 buffer-size=1 train-s=1.0"
        run = Running(deployment, app, config)
        run.until(lambda: "Start `flwr-clientapp`" in log(deployment, "node-0"))
        deployment.processes.kill("node-0")
        deployment.add_node(2)
        run.until(lambda: "Sending: train" in log(deployment, "node-2"))
        merged = len(means(run.lines))
        run.until(lambda: len(means(run.lines)) >= merged + 2)
        found = [mean for _, mean in sorted(means(run.lines).items())]
        assert all(b > a for a, b in pairwise(found)), found
        # Its job ends as soon as the SuperLink misses its heartbeats, and not at its time-out.
        run.until(lambda: any("SuperLink: " in x and "Node Unavailable" in x for x in run.lines))
        (run_id,) = deployment.control.runs()
        stop(deployment, run_id)
        run.thread.join(100.0)
        started = set(psutil.Process().children(recursive=True)) - others
    assert len(started) >= 3
    assert not psutil.wait_procs(started, timeout=0)[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_superlink_that_was_killed_comes_back_with_its_nodes(tmp_path):
    app = write_app(tmp_path / "adder")
    with LocalDeployment(tmp_path / "deployment", nodes=2) as deployment:
        run_app(deployment, app, show=lambda line: None)
        registered = deployment.control.nodes()
        deployment.processes.kill("superlink")
        deployment.start_superlink()
        assert deployment.control.nodes().keys() == registered.keys()
        wait_for(lambda: list(deployment.control.nodes().values()) == ["online"] * 2)
        lines = []
        run_app(deployment, app, show=lines.append)
        assert means(lines)[1] == pytest.approx(1.5)
        assert [status for status, _ in deployment.control.runs().values()] == [
            "finished:completed"
        ] * 2
        with pytest.raises(FedstaleError, match="concurrency = 0: expected"):
            run_app(deployment, app, run_config="strategy='gap-aware' concurrency=0")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_survives_its_superlink(tmp_path):
    app = write_app(tmp_path / "adder")
    with LocalDeployment(tmp_path / "deployment", nodes=2) as deployment:
        config = "strategy='gap-aware' rounds=3 buffer-size=1 train-s=2.0"
        run = Running(deployment, app, config)
        run.until(lambda: "Start `flwr-clientapp`" in log(deployment, "node-0"))
        (run_id,) = deployment.control.runs()
        deployment.processes.kill("superlink")
        deployment.start_superlink()
        # The log that was being followed breaks off, but not the run.
        run.thread.join(60)
        wait_for(lambda: deployment.control.runs()[run_id][0] == "finished:completed", limit_s=300)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_of_100_mb_passes(tmp_path):
    app = write_app(tmp_path / "adder")
    with LocalDeployment(tmp_path / "deployment", nodes=2) as deployment:
        lines = []
        size = 25_000_000  # float32
        config = f"strategy='gap-aware' rounds=1 concurrency=2 buffer-size=2 size={size}"
        run_app(deployment, app, run_config=config, show=lines.append)
        assert means(lines)[1] == pytest.approx(1.5), lines


@pytest.mark.slow
def test_kill_9_of_fedstale_up_leaves_nothing_running(tmp_path):
    app = write_app(tmp_path / "adder")
    code = "import typer; from fedstale.cli.apps import up; typer.run(up)"
    command = [sys.executable, "-c", code, str(app), "--out", str(tmp_path / "deployment")]
    command += ["--run-config", "train-s=600.0"]
    with subprocess.Popen(command, start_new_session=True) as process:
        log_of_node = tmp_path / "deployment" / "node-0.log"
        text = "Start `flwr-clientapp`"
        wait_for(lambda: log_of_node.exists() and text in log_of_node.read_text())
        started = psutil.Process(process.pid).children(recursive=True)
        # Of Flower, under a supervisor each: SuperLink, two SuperNodes, flwr run, and theirs.
        assert len(started) >= 12
        process.kill()
    assert not psutil.wait_procs(started, timeout=20.0)[1]
