"""Smaller messages on real nodes: the SuperLink receives and hands out the bytes that were said."""

import json

import pytest
from small_deployment import PYPROJECT, write_app

from fedstale.deployment.local import run_app
from fedstale.strategies.messages.codec import n_bytes

N = 300_000
"""Numbers of the model: 1.2 MB."""
NODES, ROUNDS = 3, 2

SERVER = f"""
import json
import threading

import numpy as np
from fedstale.strategies import FedAvg, Compression
from fedstale.strategies.server.superlink import without_stalls
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    # By object: one that is asked for again, while others are still on their way, is one.
    pulled, pushed, lock = {{}}, {{}}, threading.Lock()
    client = grid._runtime_client
    pull, push = client.PullObject, client.PushObject

    def counting_pull(request):
        answer = pull(request)
        with lock:
            pulled[request.object_id] = len(answer.object_content)
        return answer

    def counting_push(request):
        with lock:
            pushed[request.object_id] = len(request.object_content)
        return push(request)

    client.PullObject, client.PushObject = counting_pull, counting_push
    model = np.random.default_rng(0).standard_normal({N}).astype(np.float32)

    def evaluate(version, arrays):
        # After each round: what it took, and how far the model is.
        moved = float((arrays["w"].numpy() - model).mean())
        took = [sum(sizes.values()) for sizes in (pushed, pulled)]
        print("ROUND " + json.dumps([*took, moved]), flush=True)
        pushed.clear(), pulled.clear()

    strategy = FedAvg({NODES}, stages=STAGES)
    with without_stalls(grid) as grid:
        strategy.start(
            grid, ArrayRecord({{"w": Array(model)}}), {ROUNDS}, 200.0, evaluate_fn=evaluate
        )
"""

CLIENT = """
import numpy as np
from fedstale.client import CompressionMod
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp(mods=[CompressionMod()])


@app.train()
def train(message, context):
    rng = np.random.default_rng(context.node_config["partition-id"])
    w = message.content["arrays"]["w"].numpy()
    w = Array((w + 1 + rng.standard_normal(w.shape)).astype(np.float32))
    metrics = MetricRecord({"num-examples": 1})
    content = RecordDict({"arrays": ArrayRecord({"w": w}), "metrics": metrics})
    return Message(content, reply_to=message)
"""


def rounds(deployment, folder, messages):
    """Return bytes pushed, bytes pulled and the mean move of the model, of each round."""
    app = write_app(folder, PYPROJECT, SERVER.replace("STAGES", messages), CLIENT)
    lines = []
    run_app(deployment, app, show=lines.append)
    found = [json.loads(line.split("ROUND ", 1)[1]) for line in lines if "ROUND " in line]
    assert len(found) == 1 + ROUNDS, "\n".join(lines)
    return found[1:]


@pytest.mark.deployment
@pytest.mark.slow
def test_a_superlink_receives_and_hands_out_the_bytes_that_shapes_say(deployment, tmp_path):
    full, small = 4 * N, {form: n_bytes(form, N) for form in ("int4", "int8")}
    for pushed, pulled, _ in rounds(deployment, tmp_path / "full", "[]"):
        # Objects with the same bytes are stored once, so a model for all nodes is one.
        assert pushed == pytest.approx(full, rel=0.02)
        assert pulled == pytest.approx(NODES * full, rel=0.02)
    first, second = rounds(deployment, tmp_path / "small", '[Compression("int4", down="int8")]')
    assert first[0] == pytest.approx(full, rel=0.02)
    assert second[0] == pytest.approx(small["int8"], rel=0.02)
    for _, pulled, _ in (first, second):
        assert pulled == pytest.approx(NODES * small["int4"], rel=0.02)
    # The model has moved by as much as it does in full.
    assert [move for _, _, move in (first, second)] == pytest.approx([1.0, 2.0], abs=0.02)
