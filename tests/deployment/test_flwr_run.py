"""The built-in apps and a new one, deployed by Flower's own commands on loopback."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from fedstale.new_app import create
from fedstale.simulation.flower_app import BUILT_IN

BIN = Path(sys.executable).parent

pytestmark = pytest.mark.deployment


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextmanager
def process(command, environment, log):
    """Run a command in a process group of its own, and leave nothing of it behind."""
    with log.open("wb") as out:
        started = subprocess.Popen(
            [BIN / command[0], *map(str, command[1:])],
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield started
    finally:
        # Flower's client processes outlive a polite request to their parents.
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def wait_until_healthy(url, limit_s=60.0):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    pytest.fail(f"{url} did not answer within {limit_s} s")


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """Return the environment in which `flwr run APP loopback` finds a SuperLink with two nodes."""
    folder = tmp_path_factory.mktemp("flower")
    environment = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(folder),
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
        "OMP_NUM_THREADS": "1",
    }
    link = f"127.0.0.1:{free_port()}"
    (folder / "config.toml").write_text(
        f'[superlink]\ndefault = "loopback"\n[superlink.loopback]\naddress = "{link}"\n'
        "insecure = true\n"
    )
    command = ["flower-superlink", "--insecure", "--port", link.split(":")[1]]
    command += ["--disable-runtime-dependency-installation"]
    with process(command, environment, folder / "superlink.log"):
        wait_until_healthy(f"http://{link}/health")
        with ExitStack() as nodes:
            for i in range(2):
                command = ["flower-supernode", "--insecure", "--superlink", link]
                command += ["--port", free_port()]
                command += ["--node-config", f"partition-id={i} num-partitions=2"]
                log = folder / f"supernode-{i}.log"
                nodes.enter_context(process(command, environment, log))
            yield environment


def flwr_run(app, environment, run_config):
    return subprocess.run(
        [BIN / "flwr", "run", app, "loopback", "--stream", "--run-config", run_config],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def accuracies(text):
    """Return the accuracies that the server logged round by round."""
    text = re.sub(r"\x1b\[\d+m", "", text)
    return [float(a) for a in re.findall(r"MetricRecord: \{.*?'accuracy': ([\d.]+)", text)]


def test_digits_runs_on_real_supernodes_as_it_is(federation):
    run = flwr_run(BUILT_IN / "digits", federation, "num-server-rounds=2 fraction-train=1.0")
    assert run.returncode == 0, run.stdout + run.stderr
    found = accuracies(run.stdout + run.stderr)
    assert len(found) == 2, run.stdout + run.stderr
    assert found[-1] > 0.7


def test_a_new_app_runs_on_real_supernodes_as_it_is(federation, tmp_path):
    create(tmp_path / "my-app")
    run = flwr_run(tmp_path / "my-app", federation, "num-server-rounds=1")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Strategy execution finished" in run.stdout + run.stderr
