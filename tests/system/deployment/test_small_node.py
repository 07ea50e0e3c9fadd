"""A node whose environment has no more than the extra `client` brings."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from small_deployment import PYPROJECT, write_app

from fedstale.deployment import commands
from fedstale.deployment.local import LocalDeployment, run_app

pytestmark = [pytest.mark.deployment, pytest.mark.slow]

ABSENT = ("torch", "sklearn", "pandas", "pyarrow", "scipy", "plotly", "ray", "gymnasium", "jinja2")

# Runs in the environment of the tests, which has everything.
SERVER = """
import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp

from fedstale.live import observed
from fedstale.strategies import Callback, FedAvg

app = ServerApp()


class Said(Callback):
    def reply(self, run, message_id, reply, status):
        print("reply", status, dict(reply.content["metrics"]), flush=True)
        print("forecast", sorted(reply.content["fedstale.forecast"]), flush=True)


@app.main()
def main(grid, context):
    initial = ArrayRecord({"w": Array(np.zeros(10, dtype=np.float32))})
    result = FedAvg().start(observed(grid, Said()), initial, num_rounds=2, timeout=200.0)
    print("mean", result.arrays["w"].numpy().mean(), flush=True)
"""

CLIENT = f"""
import resource
import time
from importlib.util import find_spec

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from fedstale.client import ForecastMod

app = ForecastMod().client_app()


@app.train()
def train(message, context):
    if found := [name for name in {ABSENT!r} if find_spec(name)]:
        raise RuntimeError(f"{{found}} are installed")
    started_cpu_s = time.process_time()
    w = message.content["arrays"]["w"].numpy() + np.float32(1)
    used = resource.getrusage(resource.RUSAGE_SELF)
    metrics = MetricRecord(
        {{"num-examples": 1, "cpu-s": started_cpu_s, "peak-mb": used.ru_maxrss / 1000}}
    )
    content = RecordDict({{"arrays": ArrayRecord({{"w": Array(w)}}), "metrics": metrics}})
    return Message(content, reply_to=message)
"""


class OnSmallNodes(LocalDeployment):
    """A deployment whose SuperNodes have an environment of their own."""

    def __init__(self, folder, environment):
        super().__init__(folder, nodes=1)
        self.environment = environment

    def _start(self, name, command):
        if not name.startswith("node-"):
            super()._start(name, command)
            return
        own = commands.environment(self._home(name), threads=1)
        own["PATH"] = f"{self.environment / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin"
        program = [str(self.environment / "bin" / command[0]), *command[1:]]
        self.processes.start(name, program, environment=own, log=self.log(name))


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Install the extra into a fresh environment; FEDSTALE_SMALL_VENV names one that is there."""
    if "FEDSTALE_SMALL_VENV" in os.environ:
        return Path(os.environ["FEDSTALE_SMALL_VENV"])
    folder = tmp_path_factory.mktemp("small") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", f"{ROOT}[client]"]
    installed = subprocess.run(pip, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"no package index: {installed.stderr[-500:]}")
    return folder


@pytest.mark.timeout(1200)
def test_a_numpy_client_trains_and_forecasts_where_only_the_extra_client_is(environment, tmp_path):
    app = write_app(tmp_path / "adder", PYPROJECT, SERVER, CLIENT)
    lines = []
    with OnSmallNodes(tmp_path / "deployment", environment) as deployment:
        run_app(deployment, app, show=lines.append)
    text = "\n".join(lines)
    assert "mean 2.0" in text, text
    assert text.count("reply reported") == 2
    # The second job is forecast by what the first one took.
    assert re.search(r"forecast \[.*'p_finish'.*'total_s'", text), text
    print(*re.findall(r"'cpu-s'.*?}", text), sep="\n")
