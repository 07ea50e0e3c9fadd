"""The built-in app `digits` with its training written in NumPy, which is several times faster.

A benchmark of strategies trains hundreds of thousands of devices on a network so small that nearly
all of the time goes into PyTorch's calls. The data, the deal, the order of examples and the numbers
of the run config are the app's own; only the arithmetic is repeated here, and agrees with the app's
within rounding (tests/strategies/test_strategies_benchmark.py).
"""

from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from fedstale.simulation import Executor
from fedstale.simulation.executors import Answer, Call
from fedstale.strategies import npy
from fedstale.strategies.arrays import Array, Model

W1, B1, W2, B2 = "0.weight", "0.bias", "2.weight", "2.bias"


class NumpyDigits(Executor):
    """Answers training messages as the app's clients would."""

    def __init__(self, task: ModuleType) -> None:
        """Take data, deal and streams of random numbers from the app's own module."""
        self.task = task
        self.data = lru_cache(maxsize=4096)(self._data)

    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """Train one device after the other."""
        return [Answer(self._reply(call), call.context) for call in calls]

    def _reply(self, call: Call) -> Message:
        message, config = call.message, call.context.run_config
        partition, n = (
            int(call.context.node_config[key]) for key in ("partition-id", "num-partitions")
        )
        seed = int(config["seed"])
        x, y = self.data(partition, n, float(config["alpha"]), seed)
        model = read_model(message.content.array_records["arrays"])
        server_round = message.content.config_records["config"].get("server-round", 0)
        loss = train(
            model,
            (x, y),
            epochs=int(config["local-epochs"]),
            batch_size=int(config["batch-size"]),
            rate=float(config["learning-rate"]),
            rng=np.random.default_rng((self.task._SHUFFLE, seed, partition, server_round)),
        )
        arrays = ArrayRecord({name: FlowerArray(array) for name, array in model.items()})
        metrics = MetricRecord({"train_loss": loss, "num-examples": len(y)})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    def _data(self, *deal: Any) -> tuple[Array, Array]:  # noqa: ANN401 - arguments of the app
        (images, labels), _ = self.task.client_data(*deal)
        return images.numpy(), labels.numpy()


def read_model(record: ArrayRecord) -> Model:
    """Return a model's own arrays."""
    return {name: npy.read(array).copy() for name, array in record.items()}


def train(
    model: Model,
    data: tuple[Array, Array],
    *,
    epochs: int,
    batch_size: int,
    rate: float,
    rng: np.random.Generator,
) -> float:
    """Train in place with SGD; return the mean loss of the last epoch."""
    images, labels = data
    total, step = 0.0, np.float32(rate)
    for _ in range(epochs):
        total, order = 0.0, rng.permutation(len(labels))
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            x, y, rows = images[batch], labels[batch], np.arange(len(batch))
            hidden, scores = forward(model, x)
            scores -= scores.max(1, keepdims=True)
            p = np.exp(scores)
            sums = p.sum(1, keepdims=True)
            total += float((np.log(sums[:, 0]) - scores[rows, y]).sum())
            p /= sums
            p[rows, y] -= 1
            p *= step / np.float32(len(batch))
            back = (p @ model[W2]) * (hidden > 0)
            model[W2] -= p.T @ hidden
            model[B2] -= p.sum(0)
            model[W1] -= back.T @ x
            model[B1] -= back.sum(0)
    return total / len(labels)


def forward(model: Model, x: Array) -> tuple[Array, Array]:
    """Return the hidden units and the scores of some images."""
    hidden = np.maximum(x @ model[W1].T + model[B1], 0)
    return hidden, hidden @ model[W2].T + model[B2]
