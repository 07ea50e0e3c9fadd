"""Fashion-MNIST, and small networks on it that are trained without autograd.

A network is arrays w0, b0, w1, b1, .. of linear layers with ReLU between them. The images are those
of Debian's package dataset-fashion-mnist, or of the folder that FASHION_MNIST names.
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from fedstale.flower import model_of, record_of
from fedstale.simulation import Executor
from fedstale.simulation.executors import ClientCall, ClientReply
from fedstale.strategies.types import Array, Model
from lab.apps import IMAGES, opened


@cache
def images() -> tuple[Array, Array, Array, Array]:
    """Return what is trained on, float32 of shape (60000, 784) in [0, 1], and 10,000 to test on.

    Returns:
        Images and labels, and images and labels of the test set.
    """
    (train_x, train_y), (test_x, test_y) = opened("fashion").task.load_data(IMAGES)
    flat = [(x.numpy().reshape(len(x), -1) / 255).astype(np.float32) for x in (train_x, test_x)]
    return flat[0], train_y.numpy(), flat[1], test_y.numpy()


class Clients(Executor):
    """Trains clients on what they hold; each job of one draws anew."""

    def __init__(self, dealt: Sequence[Array], seed: int, stream: int) -> None:
        """Take the images of each client, and the seed and the stream that jobs draw from."""
        self._deal, self._seed, self._stream = dealt, seed, stream
        self._jobs = np.zeros(len(dealt), dtype=np.int64)

    def train(self, model: Model, mine: Array, rng: np.random.Generator) -> dict[str, float]:
        """Train a model on some images, in place, and return metrics."""
        raise NotImplementedError

    def run(self, calls: Sequence[ClientCall]) -> list[ClientReply]:
        """Return the changes and metrics."""
        return [ClientReply(self._reply(call.message), call.context) for call in calls]

    def _reply(self, message: Message) -> Message:
        client = int(message.metadata.dst_node_id) - 1000
        rng = np.random.default_rng((self._seed, self._stream, client, self._jobs[client]))
        self._jobs[client] += 1
        received, mine = model_of(message.content["arrays"]), self._deal[client]
        model = {name: array.copy() for name, array in received.items()}
        metrics = self.train(model, mine, rng)
        content = {
            "arrays": record_of({name: model[name] - received[name] for name in model}),
            "metrics": MetricRecord({"num-examples": len(mine), **metrics}),
            "form": ConfigRecord({"fedstale.update": "delta"}),
        }
        return Message(RecordDict(content), reply_to=message)


def initial(sizes: tuple[int, ...], seed: int) -> Model:
    """Return a network of some widths, drawn as PyTorch draws linear layers."""
    rng, model = np.random.default_rng(seed), {}
    for k, (n, width) in enumerate(pairwise(sizes)):
        for name, shape in ((f"w{k}", (n, width)), (f"b{k}", (width,))):
            model[name] = rng.uniform(-(n**-0.5), n**-0.5, shape).astype(np.float32)
    return model


def scores(model: Model, x: Array) -> Array:
    """Return the logits, shape (n, classes)."""
    return _layers(model, x)[-1]


def losses(model: Model, x: Array, y: Array) -> Array:
    """Return the cross-entropy of each example in nats, shape (n,)."""
    return -_log_shares(scores(model, x))[np.arange(len(y)), y]


def train(
    model: Model,
    x: Array,
    y: Array,
    batches: list[Array],
    rate: float,
    *,
    dropped: float = 0.0,
    decay: float = 0.0,
    rng: np.random.Generator | None = None,
) -> float:
    """Take a step of SGD for each batch, in place.

    Args:
        model: changed in place.
        x: images.
        y: their labels.
        batches: which of them each step is of.
        rate: the learning rate.
        dropped: chance that a unit of the last hidden layer is dropped.
        decay: of weights.
        rng: draws what is dropped.

    Returns:
        The mean loss over the steps, each before it was taken.
    """
    last, total = len(model) // 2 - 1, 0.0
    for some in batches:
        mask = None
        if dropped and rng is not None:
            kept = rng.random((len(some), model[f"w{last}"].shape[0])) >= dropped
            mask = kept.astype(np.float32) / np.float32(1.0 - dropped)
        units = _layers(model, x[some], mask)
        logs, rows = _log_shares(units[-1]), np.arange(len(some))
        total += -float(logs[rows, y[some]].mean())
        up = np.exp(logs)
        up[rows, y[some]] -= 1
        up /= np.float32(len(some))
        for k in range(last, -1, -1):
            w, b = model[f"w{k}"], model[f"b{k}"]
            down = up @ w.T if k else up
            grown = units[k].T @ up
            if decay:
                grown += np.float32(decay) * w
            w -= np.float32(rate) * grown
            b -= np.float32(rate) * up.sum(0)
            up = down * (units[k] > 0) if k else down
            if k == last and mask is not None and k:
                up *= mask
    return total / len(batches)


def _layers(model: Model, x: Array, mask: Array | None = None) -> list[Array]:
    """Return the input, each hidden layer's units and the logits."""
    units, n = [x], len(model) // 2
    for k in range(n):
        x = x @ model[f"w{k}"] + model[f"b{k}"]
        if k < n - 1:
            x = np.maximum(x, 0)
            if k == n - 2 and mask is not None:
                x = x * mask
        units.append(x)
    return units


def _log_shares(logits: Array) -> Array:
    """Return the logarithm of the softmax."""
    logits = logits - logits.max(1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))
