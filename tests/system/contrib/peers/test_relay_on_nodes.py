"""Five sites on real SuperNodes, of which one lies, behind a relay that can read no model."""

import ast

import pytest
from places import BUILT_IN
from site_keys import write_keys
from small_deployment import PYPROJECT, write_app

from fedstale.deployment.local import LocalDeployment, run_app

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(600)]

N, LIAR, ROUNDS = 5, 3, 8

SERVER = f"""
import numpy as np
from fedstale.strategies import FedAvg
from fedstale.contrib.peers import Relay
from fedstale.strategies.server.superlink import without_stalls
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    first = ArrayRecord({{"w": Array(np.zeros((65, 10), np.float32))}})
    strategy = FedAvg(
        {N}, min_available_nodes={N}, stages=[Relay("complete", {N})], fraction_evaluate=1.0
    )
    with without_stalls(grid) as own:
        result = strategy.start(own, first, num_rounds={ROUNDS}, timeout=200.0)
        relay = next(stage for stage in own.runtime.stages if isinstance(stage, Relay))
    seen = {{
        "names": sorted({{name for model in relay.models.values() for name in model}}),
        "sites": sorted(relay.models),
        "moved": float(np.abs(result.arrays["w"].numpy()).max()),
        "train": dict(result.train_metrics_clientapp[{ROUNDS}]),
        "evaluate": dict(result.evaluate_metrics_clientapp[{ROUNDS}]),
        "rejected": dict(strategy.rejections),
    }}
    print("SEEN", seen, flush=True)
"""

CLIENT = """
import json

import numpy as np
from fedstale.client import PackMod
from fedstale.contrib.peers import ScreenMod
from fedstale.strategies.robust import Median
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp


def screen(message, context, call_next):
    folder = "KEYS/site-{}".format(context.node_config["partition-id"])
    mod = ScreenMod(Median(f=1), key=folder + "/site.key", peers=folder + "/peers.toml")
    return mod(message, context, call_next)


app = ClientApp(mods=[PackMod(), screen])


def digits():
    with open("DIGITS", encoding="utf-8") as file:
        found = json.load(file)
    x = np.array([[int(level, 17) for level in image] for image in found["images"]]) / 16.0
    return np.hstack([x, np.ones((len(x), 1))]), np.array([int(y) for y in found["labels"]])


@app.train()
def train(message, context):
    site = context.node_config["partition-id"]
    x, y = digits()
    x, y = x[: 1400][site :: 5], y[: 1400][site :: 5]
    w = before = message.content["arrays"]["w"].numpy()
    for _ in range(40):
        p = np.exp(x @ w)
        p /= p.sum(1, keepdims=True)
        w = w - 0.5 * x.T @ (p - np.eye(10)[y]) / len(y)
    if site == LIAR:
        w = before - 20.0 * (w - before)
    arrays = ArrayRecord({"w": Array(w.astype(np.float32))})
    metrics = MetricRecord({"num-examples": len(y)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    x, y = digits()
    right = np.argmax(x[1400:] @ message.content["arrays"]["w"].numpy(), axis=1) == y[1400:]
    metrics = MetricRecord({"num-examples": len(right), "accuracy": float(right.mean())})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
"""


def test_five_sites_learn_digits_although_one_lies_and_the_relay_can_read_nothing(tmp_path):
    for site in range(N):
        write_keys(tmp_path / "keys", site, sorted({*range(N)} - {site}))
    client = CLIENT.replace("KEYS", str(tmp_path / "keys")).replace("LIAR", str(LIAR))
    client = client.replace("DIGITS", str(BUILT_IN / "digits" / "digits_app" / "digits.json"))
    app = write_app(tmp_path / "app", PYPROJECT, SERVER, client)
    lines = []
    with LocalDeployment(tmp_path / "deployment", nodes=N) as deployment:
        run_app(deployment, app, show=lines.append)
    (text,) = (line for line in lines if line.startswith("SEEN "))
    seen = ast.literal_eval(text.removeprefix("SEEN "))
    assert seen["names"] == ["sealed"]
    assert seen["sites"] == list(range(N))
    assert not seen["rejected"]
    assert seen["moved"] == 0.0
    assert seen["train"]["screened"] == N
    assert seen["train"]["silent-jobs"] == 0
    assert seen["evaluate"]["accuracy"] > 0.8
