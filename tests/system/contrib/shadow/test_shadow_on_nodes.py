"""Training in the background, in processes: of two SuperNodes, and of one that is told to end."""

import ast
import signal
import subprocess
import sys
import time

import psutil
import pytest
from small_deployment import PYPROJECT, write_app

from fedstale.deployment.local import LocalDeployment, run_app

SERVER = """
import numpy as np
from fedstale.strategies import FedBuff
from fedstale.strategies.weighting import constant
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    first = ArrayRecord({"w": Array(np.zeros(3))})
    strategy = FedBuff(2, 1, staleness=constant())
    result = strategy.start(grid, first, num_rounds=8, timeout=200.0)
    print("SEEN", (result.arrays["w"].numpy().tolist(), dict(strategy.rejections)), flush=True)
"""
CLIENT = """
from fedstale.contrib.sites import resident

app = resident("adder.trainer:app", idle_s=200.0)
"""
TRAINER = """
import os
import time
import numpy as np
from fedstale.contrib.shadow import Background, Shadow
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp

weights = np.zeros(3)


def step():
    weights[:] += 1.0
    time.sleep(0.005)


def write(record):
    weights[:] = record["w"].numpy()


app = ClientApp()
trainer = Background(
    Shadow(0.5), step, lambda: ArrayRecord({"w": Array(weights.copy())}), write
)


@app.train()
def train(message, context):
    reply = trainer.answer(message, context)
    node = context.node_config["partition-id"]
    with open(FILE, "a") as file:
        print(node, os.getpid(), reply.content["fedstale.shadow"]["steps"], file=file, flush=True)
    return reply
"""


@pytest.mark.deployment
@pytest.mark.timeout(300)
def test_two_nodes_train_on_while_their_models_travel_until_nobody_wants_them(tmp_path):
    app = write_app(tmp_path / "app", PYPROJECT, SERVER, CLIENT)
    trainer = TRAINER.replace("FILE", repr(str(tmp_path / "ran")))
    (app / "adder" / "trainer.py").write_text(trainer)
    lines = []
    with LocalDeployment(tmp_path / "deployment", nodes=2) as deployment:
        run_app(deployment, app, show=lines.append)
    (text,) = (line for line in lines if line.startswith("SEEN "))
    (w, *_), rejected = ast.literal_eval(text.removeprefix("SEEN "))
    ran = [tuple(map(int, line.split())) for line in (tmp_path / "ran").read_text().splitlines()]
    assert not rejected
    assert len(ran) >= 8
    for node in (0, 1):
        first, *others = [(pid, steps) for n, pid, steps in ran if n == node]
        # One process each, whose training went on from each message to the next.
        assert first[1] == 0
        assert {pid for pid, _ in others} == {first[0]}
        assert all(steps > 0 for _, steps in others)
    # No more than all steps, of which a half is sent at a time.
    assert 0.0 < w <= sum(steps for *_, steps in ran)
    # Trainers whose folder is gone are not wanted any more.
    for folder in list((tmp_path / "deployment").rglob("trainers")):
        folder.rename(folder.with_name("gone"))
    for pid in {pid for _, pid, _ in ran}:
        deadline = time.monotonic() + 30.0
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "it trains on"
            time.sleep(0.1)


ENDING = """
import signal, sys, time
sys.path[:0] = {fixtures!r}
from bench_device import context, message
import torch
from flwr.app import ArrayRecord
from fedstale.contrib.shadow import Background, Shadow

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
network = torch.nn.Linear(200, 200)


def step():
    network(torch.rand(100, 200)).square().mean().backward()


trainer = Background(
    Shadow(0.5),
    step,
    lambda: ArrayRecord(network.state_dict()),
    lambda record: network.load_state_dict(record.to_torch_state_dict()),
)
first = message()
first.content["arrays"] = ArrayRecord(network.state_dict())
trainer.answer(first, context())
print("at work", flush=True)
time.sleep({seconds})
"""


@pytest.mark.parametrize("is_told", [False, True])
def test_a_process_that_ends_ends_its_training_first(is_told):
    from places import ROOT

    seconds = 60.0 if is_told else 0.5
    code = ENDING.format(fixtures=[str(ROOT / "tests" / "fixtures")], seconds=seconds)
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"at work\n"
    if is_told:
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
    assert process.wait(30.0) == 0
    process.stdout.close()
