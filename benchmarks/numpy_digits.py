"""The built-in app `digits` with its training written in NumPy, which is several times faster.

A benchmark of strategies trains hundreds of thousands of devices on a network so small that nearly
all of the time goes into PyTorch's calls. The data, the deal, the order of examples and the numbers
of the run config are the app's own; only the arithmetic is repeated here, and agrees with the app's
within rounding (benchmarks/tests/test_strategies_benchmark.py).
"""

from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from fedstale.client import local_steps
from fedstale.simulation import Executor
from fedstale.simulation.executors import ClientCall, ClientReply
from fedstale.strategies.types import Array, Model

_DEAL_RARE = 101
"""Stream of random numbers, apart from those of the app."""
W1, B1, W2, B2 = "0.weight", "0.bias", "2.weight", "2.bias"


class NumpyDigits(Executor):
    """Answers training messages as the app's clients would."""

    def __init__(self, task: ModuleType, deal: Sequence[Array] | None = None) -> None:
        """Take data, deal and streams of random numbers from the app's own module.

        Args:
            task: the app's module of that name.
            deal: the examples of each device, in place of the app's deal.
        """
        self.task, self.deal = task, deal
        self.data = lru_cache(maxsize=4096)(self._data)

    def run(self, calls: Sequence[ClientCall]) -> list[ClientReply]:
        """Train one device after the other."""
        return [ClientReply(self._reply(call), call.context) for call in calls]

    def _reply(self, call: ClientCall) -> Message:
        message, config = call.message, call.context.run_config
        partition, n = (
            int(call.context.node_config[key]) for key in ("partition-id", "num-partitions")
        )
        seed = int(config["seed"])
        x, y = self.data(partition, n, float(config["alpha"]), seed)
        model = read_model(message.content.array_records["arrays"])
        server_round = message.content.config_records["config"].get("server-round", 0)
        epochs, batch_size = int(config["local-epochs"]), int(config["batch-size"])
        loss = train(
            model,
            (x, y),
            epochs=epochs,
            batch_size=batch_size,
            rate=float(config["learning-rate"]),
            rng=np.random.default_rng((self.task.SHUFFLE, seed, partition, server_round)),
            steps=local_steps(message, epochs, -(-len(y) // batch_size)),
            mu=float(config.get("proximal-mu", 0.0)),
        )
        arrays = ArrayRecord({name: FlowerArray(array) for name, array in model.items()})
        metrics = MetricRecord({"train_loss": loss, "num-examples": len(y)})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    def _data(self, partition: int, *rest: Any) -> tuple[Array, Array]:  # noqa: ANN401 - of the app
        if self.deal is None:
            (images, labels), _ = self.task.client_data(partition, *rest)
            return images.numpy(), labels.numpy()
        images, labels = (part.numpy() for part in self.task.load_data(rest[-1])[0])
        mine = self.deal[partition]
        # As in the app, every fifth example is not for training.
        mine = mine[np.arange(len(mine)) % 5 != 4]
        return images[mine], labels[mine]


def deal_rare_to(
    owners: Array, labels: Array, rare: Sequence[int], *, alpha: float, seed: int
) -> list[Array]:
    """Deal some classes to some devices alone.

    Each rare class is split among the owners by a Dirichlet distribution of concentration 1. Of
    every other class the owners share a twentieth in the same way; the rest goes to the other
    devices, by a Dirichlet distribution of concentration `alpha`.

    Args:
        owners: whether a device owns the rare classes, bool of shape (devices,).
        labels: of the examples, int of shape (examples,).
        rare: the classes that only owners hold.
        alpha: > 0; small is uneven.
        seed: of the draw.

    Returns:
        The examples of each device, at least one each.
    """
    rng = np.random.default_rng((seed, _DEAL_RARE))
    own, others = np.flatnonzero(owners), np.flatnonzero(~owners)
    owner = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        places = rng.permutation(np.flatnonzero(labels == label))
        cut = len(places) if label in rare else len(places) // 20
        owner[places[:cut]] = _split(cut, own, 1.0, rng)
        owner[places[cut:]] = _split(len(places) - cut, others, alpha, rng)
    for device in np.flatnonzero(np.bincount(owner, minlength=len(owners)) == 0):
        spare = (np.bincount(owner, minlength=len(owners))[owner] > 1) & ~np.isin(labels, rare)
        owner[rng.choice(np.flatnonzero(spare))] = device
    return [np.flatnonzero(owner == device) for device in range(len(owners))]


def _split(n: int, devices: Array, alpha: float, rng: np.random.Generator) -> Array:
    """Return who gets each of n examples."""
    ends = np.cumsum(rng.dirichlet(np.full(len(devices), alpha)))
    ranks = (np.arange(n) + 0.5) / max(n, 1)
    return devices[np.minimum(np.searchsorted(ends, ranks), len(devices) - 1)]


def read_model(record: ArrayRecord) -> Model:
    """Return a model's own arrays."""
    return {name: array.numpy() for name, array in record.items()}


def train(
    model: Model,
    data: tuple[Array, Array],
    *,
    epochs: int,
    batch_size: int,
    rate: float,
    rng: np.random.Generator,
    steps: int | None = None,
    mu: float = 0.0,
) -> float:
    """Train in place with SGD; return the mean loss of the last steps, as many as in an epoch.

    Args:
        model: changed in place.
        data: images and labels.
        epochs: of a whole job.
        batch_size: examples of one step.
        rate: of SGD.
        rng: orders the examples of each epoch.
        steps: to take of these epochs; None takes all.
        mu: of FedProx.
    """
    images, labels = data
    step = np.float32(rate)
    received = {name: array.copy() for name, array in model.items()} if mu else {}
    orders = [rng.permutation(len(labels)) for _ in range(epochs)]
    starts = range(0, len(labels), batch_size)
    batches = [order[start : start + batch_size] for order in orders for start in starts]
    losses: list[float] = []
    taken = batches[:steps]
    for batch in taken:
        x, y, rows = images[batch], labels[batch], np.arange(len(batch))
        hidden, scores = forward(model, x)
        scores -= scores.max(1, keepdims=True)
        p = np.exp(scores)
        sums = p.sum(1, keepdims=True)
        losses.append(float((np.log(sums[:, 0]) - scores[rows, y]).sum()))
        p /= sums
        p[rows, y] -= 1
        p *= step / np.float32(len(batch))
        back = (p @ model[W2]) * (hidden > 0)
        pulls = {name: step * np.float32(mu) * (model[name] - w) for name, w in received.items()}
        model[W2] -= p.T @ hidden
        model[B2] -= p.sum(0)
        model[W1] -= back.T @ x
        model[B1] -= back.sum(0)
        for name, pull in pulls.items():
            model[name] -= pull
    last = slice(-len(starts), None)
    return sum(losses[last]) / max(sum(len(batch) for batch in taken[last]), 1)


def forward(model: Model, x: Array) -> tuple[Array, Array]:
    """Return the hidden units and the scores of some images."""
    hidden = np.maximum(x @ model[W1].T + model[B1], 0)
    return hidden, hidden @ model[W2].T + model[B2]
