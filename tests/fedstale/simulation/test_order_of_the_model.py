"""A model comes back in the order of the app's record: a list of layers fits again."""

import json

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from safetensors.numpy import save

import fedstale
from fedstale.errors import ProtocolError
from fedstale.runs import model_bytes, read_model
from fedstale.strategies import parse

COSTS = {"work_per_example": 0.5, "epochs": 1, "examples": 20}
LISTED = {str(i): np.full(2, i, np.float32) for i in range(13)}
MIXED = {
    "b.weight": np.ones((2, 2), np.float64),
    "a.weight": np.ones(3, np.float32),
    "c.count": np.ones(1, np.int64),
    "a.bias": np.ones(2, np.float64),
    "B": np.ones(2, np.float16),
}


@pytest.fixture
def client():
    app = ClientApp()

    @app.train()
    def train(message, context):
        metrics = MetricRecord({"train_loss": 0.0, "num-examples": 20})
        content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def simulated(client, model, strategy, out, **more):
    given = {"initial_arrays": model, "traces": "synthetic:12@sites", "until": "3 rounds"}
    given |= {"executor": "inline", "out": out, **COSTS, **more}
    return fedstale.simulate(client, strategy=parse(strategy), **given)


@pytest.mark.parametrize("model", [LISTED, MIXED], ids=["listed", "mixed"])
@pytest.mark.parametrize(
    "strategy",
    [
        "FedBuff(4, 2)",
        "FedAvg()",
        "GapAware(4, 2)",
        "FedBuff(4, 2, stages=[Compression('int8')])",
        "flower.FedAvg(fraction_evaluate=0.0)",
        "flower.FedProx(fraction_evaluate=0.0, proximal_mu=0.1)",
    ],
)
def test_it_is_that_of_the_record(client, model, strategy, tmp_path):
    run = simulated(client, model, strategy, tmp_path / "run")
    assert list(run.model) == list(model)
    again = fedstale.read_run(tmp_path / "run").model
    if strategy.startswith("flower."):
        # Flower's mean makes floats of integers.
        return
    assert [(name, array.dtype) for name, array in again.items()] == [
        (name, array.dtype) for name, array in model.items()
    ]


def test_it_is_that_of_the_record_after_a_run_has_gone_on(client, tmp_path):
    more = {"until": "1m"}
    paused = simulated(client, LISTED, "FedBuff(4, 2)", tmp_path / "run", pause_at="20s", **more)
    assert (paused.status, list(paused.model)) == ("interrupted", list(LISTED))
    run = simulated(client, LISTED, "FedBuff(4, 2)", tmp_path / "run", resume=True, **more)
    assert (run.status, list(run.model)) == ("stopped", list(LISTED))


def test_a_file_without_an_order_is_read_as_before(tmp_path):
    (tmp_path / "model").write_bytes(save(MIXED))
    assert set(read_model(tmp_path / "model")) == set(MIXED)
    record = ArrayRecord({name: Array(array) for name, array in MIXED.items()})
    (tmp_path / "model").write_bytes(model_bytes(record))
    assert list(read_model(tmp_path / "model")) == list(MIXED)


@pytest.mark.parametrize("order", ['["a"]', '{"a": 1}', "nonsense", '[1, "b"]', '["a", "a"]', "7"])
def test_an_order_that_is_none_is_an_error(tmp_path, client, order):
    run = simulated(client, {"a": np.ones(1), "b": np.ones(1)}, "FedBuff(4, 2)", tmp_path / "run")
    arrays = {"a": np.ones(1), "b": np.ones(1)}
    path = run.folder / "model.safetensors"
    path.write_bytes(save(arrays, metadata={"order": order}))
    with pytest.raises(ProtocolError, match="is not a readable model"):
        _ = fedstale.read_run(run.folder).model
    path.write_bytes(save(arrays, metadata={"order": json.dumps(["b", "a"])}))
    assert list(fedstale.read_run(run.folder).model) == ["b", "a"]
