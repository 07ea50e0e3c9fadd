"""Random sub-networks on real SuperNodes: what a device is sent and sends, packed and cut."""

import ast

import numpy as np
import pytest
from small_deployment import PYPROJECT, write_app

from fedstale.deployment.local import LocalDeployment, run_app

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(600)]

SERVER = """
import numpy as np
from fedstale.contrib.tickets import Tickets
from fedstale.strategies import FedAvg
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    first = ArrayRecord({"w": Array(np.zeros((20, 20), np.float32)), "b": Array(np.zeros(3))})
    strategy = FedAvg(2, min_available_nodes=2, stages=[Tickets(0.25)])
    result = strategy.start(grid, first, num_rounds=3, timeout=200.0)
    seen = {
        "moved": sorted(set(result.arrays["w"].numpy().ravel().tolist())),
        "share": float((result.arrays["w"].numpy() != 0.0).mean()),
        "b": result.arrays["b"].numpy().tolist(),
        "train": dict(result.train_metrics_clientapp[3]),
        "rejected": dict(strategy.rejections),
    }
    print("SEEN", seen, flush=True)
"""

CLIENT = """
from fedstale.contrib.tickets import TicketsMod
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp


def watch(message, context, call_next):
    sizes = [len(r["w"].data) for r in message.content.array_records.values() if "w" in r]
    sizes += [len(r["flat"].data) for r in message.content.array_records.values() if "flat" in r]
    reply = call_next(message, context)
    reply.content["sizes"] = MetricRecord({"num-examples": 1, "received": sizes[0]})
    return reply


app = ClientApp(mods=[watch, TicketsMod()])


@app.train()
def train(message, context):
    arrays = {name: x.numpy() + 1 for name, x in message.content["arrays"].items()}
    arrays = ArrayRecord({name: Array(x) for name, x in arrays.items()})
    return Message(RecordDict({"arrays": arrays}), reply_to=message)
"""


def test_real_nodes_are_sent_a_quarter_of_a_layer_and_move_that_alone(tmp_path):
    app = write_app(tmp_path / "app", PYPROJECT, SERVER, CLIENT)
    lines = []
    with LocalDeployment(tmp_path / "deployment", nodes=2) as deployment:
        run_app(deployment, app, show=lines.append)
    (text,) = (line for line in lines if line.startswith("SEEN "))
    seen = ast.literal_eval(text.removeprefix("SEEN "))
    assert not seen["rejected"]
    # Each weight moved by 1 a round where at least one of two devices had it.
    assert np.isclose(seen["moved"], [0.0, 3.0]).all()
    assert 0.25 < seen["share"] < 0.5
    assert seen["b"] == [3.0] * 3
    assert seen["train"]["received"] < 0.5 * 1600
