"""Nodes whose ClientApps are forks: their SuperExecs killed, apps that end, two runs at once."""

import subprocess
import time
from contextlib import suppress

import psutil
import pytest
from small_deployment import CLIENT, PYPROJECT, Running, means, wait_for, write_app

from fedstale.deployment import commands
from fedstale.deployment.local import LINK

pytestmark = pytest.mark.deployment

ENDS_ITSELF = CLIENT.replace(
    "def train(message, context):",
    "def train(message, context):\n"
    "    import os\n"
    "    if context.node_config['partition-id'] == 1 and context.run_config['ends']:\n"
    "        os._exit(3)",
)


DIES_WITH_ITS_REPLY = CLIENT.replace(
    "def train(message, context):",
    "def train(message, context):\n"
    "    import os\n"
    "    from flwr.supernode.runtime import run_clientapp\n"
    "    if context.node_config['partition-id'] == 1 and not os.path.exists(FILE):\n"
    "        open(FILE, 'w').close()\n"
    "        run_clientapp.push_objects = lambda *_, **__: os.kill(os.getpid(), 9)",
)


def superexecs(deployment):
    """Return the SuperExecs of all nodes, which are named otherwise than their forks."""
    below = [
        process
        for number in range(3)
        for process in psutil.Process(deployment.processes.pid(f"node-{number}")).children(True)
    ]
    found = []
    for process in below:
        # A ClientApp may just have ended.
        with suppress(psutil.Error):
            is_warm = "fedstale.deployment.warm" in process.cmdline()
            found += [process] if is_warm and process.name() != "flwr-clientapp" else []
    return found


def test_a_killed_superexec_of_a_node_loses_not_even_the_job(deployment, tmp_path):
    app = write_app(tmp_path / "adder")
    run = Running(deployment, app, "rounds=2 train-s=5.0")
    killed = superexecs(deployment)
    assert len(killed) == 3
    run.until(lambda: sum(len(p.children()) for p in killed) == 3)
    for process in killed:
        process.kill()
    found = means(run.end())
    assert found == {0: 0.0, 1: pytest.approx(2.0), 2: pytest.approx(4.0)}
    assert not {process.pid for process in superexecs(deployment)} & {p.pid for p in killed}


def test_two_runs_of_two_apps_share_the_nodes(deployment, tmp_path):
    one = write_app(tmp_path / "one", PYPROJECT)
    other = write_app(tmp_path / "other", PYPROJECT.replace("1.0.0", "1.0.1"))
    environment = deployment.operator_environment()
    runs = [
        subprocess.Popen(
            commands.found(commands.run(app, LINK, "rounds=3"), environment),
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for app in (one, other)
    ]
    for run in runs:
        lines = run.communicate(timeout=200)[0].splitlines()
        assert means(lines)[3] == pytest.approx(6.0), lines


@pytest.fixture
def dies(tmp_path):
    """Return an app of which one ClientApp is killed in the middle of its reply, once."""
    client = DIES_WITH_ITS_REPLY.replace("FILE", repr(str(tmp_path / "died")))
    return write_app(tmp_path / "dies", client=client)


@pytest.mark.parametrize("is_fork", [True, False])
def test_a_node_whose_client_app_dies_with_its_reply_trains_again(
    deployment, dies, tmp_path, is_fork
):
    for process in superexecs(deployment):
        process.kill()
    if not is_fork:
        # These nodes share the libraries of the first app that they answer.
        Running(deployment, write_app(tmp_path / "first"), "rounds=1").end()
    found = means(Running(deployment, dies, "rounds=1 timeout=15.0").end())
    assert found[1] == pytest.approx((1 + 3) / 2)
    wait_for(lambda: list(deployment.control.nodes().values()).count("online") >= 3)
    found = means(Running(deployment, dies, "rounds=1").end())
    assert found[1] == pytest.approx((1 + 2 + 3) / 3)


@pytest.mark.slow
def test_half_a_reply_is_given_up_after_three_minutes_at_most(deployment, dies):
    # At once if the SuperNode was ended before it told the SuperLink of the reply, else in 180 s.
    began = time.monotonic()
    found = means(Running(deployment, dies, "rounds=1 timeout=400.0").end())
    assert found[1] == pytest.approx((1 + 3) / 2)
    assert time.monotonic() - began < 210.0


@pytest.mark.slow
def test_an_app_that_ends_its_process_is_an_error_of_that_node_alone(deployment, tmp_path):
    app = write_app(tmp_path / "ends", PYPROJECT + "ends = true\n", client=ENDS_ITSELF)
    # The SuperNode waits until the ClientApp's heartbeats have not come for a minute.
    found = means(Running(deployment, app, "rounds=1").end())
    assert found[1] == pytest.approx((1 + 3) / 2)
