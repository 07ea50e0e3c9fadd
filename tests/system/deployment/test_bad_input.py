"""What goes wrong on real machines is one sentence, and what was reached before is kept.

Each case meets a real SuperLink: nodes with a wrong file, address or clock, a node without
fedstale, a disk that is full, and a checkpoint of another model.
"""

import re

import pytest
from small_deployment import CLIENT, PYPROJECT, wait_for, write_app

from fedstale.deployment import commands
from fedstale.deployment.commands import Address, write_certificates, write_node_key
from fedstale.deployment.diagnosis import explain
from fedstale.deployment.local import LocalDeployment, free_port, run_app
from fedstale.errors import FedstaleError
from fedstale.strategies.server.checkpoint import read_checkpoint

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(600)]

KEYS = """
size = 10
rounds = 2
checkpoints = ""
resume = ""
most-bytes = 0
train-s = 0.0
"""

# After version 2, no file of the ServerApp can be larger than most-bytes.
SERVER = """
import resource
from dataclasses import replace

import numpy as np
from fedstale.strategies import FedBuff
from fedstale.strategies.schedule import k_batch_async
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config

    def evaluate(version, arrays):
        if version == 3 and config["most-bytes"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (config["most-bytes"],) * 2)
        print(f"version {version} mean {arrays['w'].numpy().mean():.6f}", flush=True)

    kept = {key: config[key] or None for key in ("checkpoints", "resume")}
    schedule = replace(k_batch_async(2, 1), recheck_s=1.0)
    strategy = FedBuff(2, schedule=schedule, **kept)
    initial = ArrayRecord({"w": Array(np.zeros(config["size"], dtype=np.float32))})
    strategy.start(
        grid=grid,
        initial_arrays=initial,
        num_rounds=config["rounds"],
        timeout=200.0,
        evaluate_fn=evaluate,
    )
"""

# Python runs a sitecustomize.py that it finds, before anything else.
OTHER_CLOCK = """
import datetime
from types import SimpleNamespace

import flwr.supercore.date as date


class Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.now(tz) + datetime.timedelta(hours={hours})


date.datetime = SimpleNamespace(datetime=Shifted, UTC=datetime.UTC)
"""
WITHOUT_FEDSTALE = """
import sys


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "fedstale":
            raise ModuleNotFoundError("No module named 'fedstale'", name=name)


if any(word.endswith("flwr-clientapp") for word in sys.orig_argv):
    sys.meta_path.insert(0, Missing())
"""


@pytest.fixture(scope="module")
def one_node(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flower")
    with LocalDeployment(folder / "deployment", nodes=1) as deployment:
        yield deployment


@pytest.fixture
def app(tmp_path):
    pyproject = re.sub(r'strategy = "fedavg"\n(.|\n)*', KEYS, PYPROJECT)
    return write_app(tmp_path / "adder", pyproject, SERVER, "import fedstale.client\n" + CLIENT)


def text(deployment, name):
    return deployment.log(name).read_text(errors="replace")


def start_node(
    deployment, folder, *, link=None, ca=None, customised="", registered=True, is_flowers=False
):
    """Start a node in which one thing is wrong, of fedstale or Flower's own; return its name."""
    name = folder.name
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(customised)
    public = write_node_key(folder / "key")
    if registered:
        deployment.control.register(public)
    command = commands.supernode(
        link or deployment.at,
        ca or deployment.tls.ca,
        folder / "key",
        port=free_port(),
        config={"partition-id": 1},
    )
    if is_flowers:
        command = ["flower-supernode", *command[2:]]
    environment = commands.environment(deployment.folder / f"home-{name}")
    environment["PYTHONPATH"] = str(folder / "site")
    found = commands.found(command, environment)
    deployment.processes.start(name, found, environment=environment, log=deployment.log(name))
    return name


def explained(deployment, name):
    """Return what is said of a node that does not come online."""
    wait_for(lambda: explain(text(deployment, name)))
    deployment.processes.kill(name)
    return explain(text(deployment, name))


def test_a_node_with_the_certificate_of_another_authority(deployment, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    other = write_certificates(tmp_path / "elsewhere", ["localhost"])
    name = start_node(deployment, tmp_path, ca=other.ca)
    assert "was not signed by the authority" in explained(deployment, name)


def test_a_node_with_a_wrong_port(deployment, tmp_path):
    name = start_node(deployment, tmp_path, link=Address("127.0.0.1", free_port()))
    assert "check --superlink" in explained(deployment, name)


@pytest.mark.parametrize("hours", [1, -1])
def test_a_node_whose_clock_is_off_by_an_hour(deployment, tmp_path, hours):
    name = start_node(deployment, tmp_path, customised=OTHER_CLOCK.format(hours=hours))
    # It ends, as its unit starts it again; nobody else is affected.
    assert "this machine's clock" in explained(deployment, name)
    assert "set the node's clock" in explain(text(deployment, "superlink"))
    assert deployment.control.nodes()[deployment.node_ids[0]] == "online"


def test_a_run_on_a_superlink_of_an_unknown_name(deployment, app, monkeypatch):
    monkeypatch.setattr("fedstale.deployment.local.LINK", "nowhere")
    with pytest.raises(FedstaleError, match="nowhere"):
        run_app(deployment, app, show=lambda line: None)


@pytest.mark.slow
def test_a_node_without_fedstale_fails_alone(one_node, app, tmp_path):
    deployment = one_node
    name = start_node(deployment, tmp_path, customised=WITHOUT_FEDSTALE, is_flowers=True)
    wait_for(lambda: sorted(deployment.control.nodes().values()).count("online") == 2)
    lines = []
    run_app(deployment, app, show=lines.append)
    assert any("version 2 mean" in line for line in lines), lines
    assert any("rejected: error" in line and "fedstale" in line for line in lines), lines
    assert "needs the package fedstale" in explained(deployment, name)


@pytest.mark.slow
def test_a_full_disk_and_a_checkpoint_of_another_model_leave_the_last_good_one(
    one_node, app, tmp_path
):
    deployment = one_node
    folder = tmp_path / "checkpoints"
    size = 50_000  # float32, 200 kB in a checkpoint
    config = f"checkpoints='{folder}' size={size}"
    lines = []
    run_app(deployment, app, run_config=f"{config} rounds=4 most-bytes=100000", show=lines.append)
    # The limit came before version 3 was kept; the run went on, and said so.
    assert any("version 4 mean" in line for line in lines), lines
    assert any("no checkpoint of version 3" in line for line in lines), lines
    assert read_checkpoint(folder)["versions"]["version"] == 2
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    with pytest.raises(FedstaleError, match="another model"):
        run_app(deployment, app, run_config=f"resume='{folder}' size=20", show=lambda line: None)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    lines = []
    run_app(deployment, app, run_config=f"{config} resume='{folder}' rounds=3", show=lines.append)
    assert any("version 3 mean" in line for line in lines), lines
    assert not any("version 2 mean" in line for line in lines), lines
