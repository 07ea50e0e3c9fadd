"""Packed messages and held questions on real nodes: the model is the one that arithmetic says."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from small_deployment import PYPROJECT, write_app

from fedstale.deployment.local import run_app

N_ARRAYS, ROUNDS = 40, 3

SERVER = f"""
import hashlib

import numpy as np
from fedstale.strategies.server.superlink import without_stalls
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid, context):
    arrays = {{f"w{{i}}": Array(np.full((i, 2), i, np.float32)) for i in range({N_ARRAYS})}}
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3)
    with without_stalls(grid) as grid:
        push = grid._grid.push_messages

        def counted(messages):
            for message in messages:
                (record,) = message.content.array_records.values()
                print("SENT", len(record), flush=True)
            return push(messages)

        grid._grid.push_messages = counted
        result = strategy.start(
            grid=grid, initial_arrays=ArrayRecord(arrays), num_rounds={ROUNDS}, timeout=200.0
        )
    found = hashlib.sha256(b"".join(a.numpy().tobytes() for a in result.arrays.values()))
    print("MODEL", found.hexdigest(), flush=True)
"""

CLIENT = """
import numpy as np
from fedstale.client import PackMod
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp(MODS)


@app.train()
def train(message, context):
    node = context.node_config["partition-id"]
    step = np.float32(0.25 * (node + 1))
    arrays = {k: Array(a.numpy() + step) for k, a in message.content["arrays"].items()}
    metrics = MetricRecord({"num-examples": [1, 1, 2][node]})
    content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
    return Message(content, reply_to=message)
"""


def expected():
    """Return the digest of the model: these means have no rounding."""
    step = 0.25 * (0.25 * 1 + 0.25 * 2 + 0.5 * 3)
    arrays = [np.full((i, 2), i + ROUNDS * step, np.float32) for i in range(N_ARRAYS)]
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def run(deployment, folder, mods):
    app = write_app(folder, PYPROJECT, SERVER, CLIENT.replace("MODS", mods))
    lines = []
    run_app(deployment, app, show=lines.append)
    words = [line.split() for line in lines]
    (model,) = (w[1] for w in words if w[:1] == ["MODEL"])
    return model, [int(w[1]) for w in words if w[:1] == ["SENT"]]


@pytest.mark.deployment
@pytest.mark.slow
def test_packed_messages_come_to_the_same_model_bit_for_bit(deployment, tmp_path: Path):
    model, sent = run(deployment, tmp_path / "packed", "mods=[PackMod()]")
    assert model == expected()
    assert sent == [N_ARRAYS] * 3 + [1] * 3 * (ROUNDS - 1)
    model, sent = run(deployment, tmp_path / "plain", "")
    assert model == expected()
    assert sent == [N_ARRAYS] * 3 * ROUNDS
