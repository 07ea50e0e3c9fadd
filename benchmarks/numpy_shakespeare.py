"""The built-in app `shakespeare` with its training written in NumPy, several times faster.

On batches of eight short lines nearly all of PyTorch's time goes into its calls. The text, the
deal, the model and the order of examples are the app's own; only the arithmetic of one GRU layer is
repeated here, forwards and backwards through time, and agrees with the app's within rounding
(benchmarks/tests/test_strategies_benchmark.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from types import ModuleType
from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from numpy_digits import read_model

from fedstale.apps.client import order
from fedstale.simulation import Executor
from fedstale.simulation.executors import ClientCall, ClientReply
from fedstale.strategies.types import Array, Model

EMBED, GUESS_W, GUESS_B = "embed.weight", "guess.weight", "guess.bias"
W_X, W_H, B_X, B_H = (
    f"recur.{name}_l0" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
)


class NumpyShakespeare(Executor):
    """Answers training messages as the app's clients would, on the first of their lines."""

    def __init__(self, task: ModuleType, play: ModuleType, most: int) -> None:
        """Take text, deal and order from the app's own modules.

        Args:
            task: the app's module of that name.
            play: the app's module of that name.
            most: examples that a device trains on; the rest of its text is left out.
        """
        self.task, self.play, self.most = task, play, most
        self.data = lru_cache(maxsize=4096)(self._data)

    def run(self, calls: Sequence[ClientCall]) -> list[ClientReply]:
        """Train one device after the other."""
        return [ClientReply(self._reply(call), call.context) for call in calls]

    def _reply(self, call: ClientCall) -> Message:
        message, config = call.message, call.context.run_config
        partition, n = (
            int(call.context.node_config[key]) for key in ("partition-id", "num-partitions")
        )
        codes = self.data(str(config["text"]), partition, n)
        model = read_model(message.content.array_records["arrays"])
        server_round: Any = message.content.config_records["config"].get("server-round", 0)
        seed = (int(config["seed"]), partition, int(server_round))
        loss = train(
            model,
            codes,
            order(len(codes), int(config["local-epochs"]), seed),
            batch_size=int(config["batch-size"]),
            rate=float(config["learning-rate"]),
            max_norm=self.task.MAX_NORM,
        )
        arrays = ArrayRecord({name: FlowerArray(array) for name, array in model.items()})
        metrics = MetricRecord({"train_loss": loss, "num-examples": len(codes)})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    def _data(self, text: str, partition: int, n: int) -> Array:
        codes = self.task.split(self.task.encode(self.play.deal(text, n)[partition]))[0]
        return np.asarray(codes.numpy()[: self.most])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Past:
    """What went on at each place of some lines; arrays of shape (length, lines, ...)."""

    embedded: Array
    before: Array
    """State before."""
    after: Array
    gates: Array
    """Reset and update gate."""
    new: Array
    remembered: Array
    """What the new state takes from the old one, before the reset gate."""


def train(
    model: Model, codes: Array, order: Array, *, batch_size: int, rate: float, max_norm: float
) -> float:
    """Train in place with SGD on clipped gradients; return the mean loss of the last epoch.

    Args:
        model: the arrays of the app's network.
        codes: int of shape (lines, length + 1).
        order: int of shape (epochs, lines).
        batch_size: lines of one step.
        rate: of SGD.
        max_norm: gradients longer than this are shortened to it.
    """
    total = 0.0
    for epoch in order:
        total = 0.0
        for start in range(0, len(epoch), batch_size):
            batch = codes[epoch[start : start + batch_size]]
            loss, gradient = descend(model, batch)
            total += loss * len(batch)
            norm = sqrt(sum(float(np.vdot(g, g)) for g in gradient.values()))
            step = np.float32(rate * min(1.0, max_norm / (norm + 1e-6)))
            for name, descent in gradient.items():
                model[name] -= step * descent
    return total / len(codes)


def descend(model: Model, codes: Array) -> tuple[float, Model]:
    """Return the mean loss on some lines in nats a character, and its gradient."""
    inputs, targets = codes[:, :-1].T, codes[:, 1:].T
    past = _forward(model, inputs)
    p, losses = _guess(model, past.after, targets)
    place = np.arange(targets.size)
    flat = p.reshape(targets.size, -1)
    flat[place, targets.ravel()] -= 1
    flat /= np.float32(targets.size)
    states = past.after.reshape(targets.size, -1)
    gradient = {GUESS_W: flat.T @ states, GUESS_B: flat.sum(0)}
    return float(losses.mean()), gradient | _backward(model, inputs, past, p @ model[GUESS_W])


def evaluate(model: Model, codes: Array) -> tuple[float, float]:
    """Return the mean loss in nats a character and the share of characters guessed."""
    targets = codes[:, 1:].T
    p, losses = _guess(model, _forward(model, codes[:, :-1].T).after, targets)
    return float(losses.mean()), float((p.argmax(-1) == targets).mean())


def _guess(model: Model, states: Array, targets: Array) -> tuple[Array, Array]:
    """Return the probability of each character, and the loss of the right one."""
    scores = states @ model[GUESS_W].T + model[GUESS_B]
    scores -= scores.max(-1, keepdims=True)
    right = np.take_along_axis(scores, targets[..., None], -1)[..., 0]
    np.exp(scores, out=scores)
    sums = scores.sum(-1, keepdims=True)
    scores /= sums
    return scores, np.log(sums[..., 0]) - right


def _forward(model: Model, inputs: Array) -> _Past:
    embedded = model[EMBED][inputs]
    received = embedded @ model[W_X].T + model[B_X]
    length, lines, width = received.shape
    n = width // 3
    w, b, half = np.ascontiguousarray(model[W_H].T), model[B_H], np.float32(0.5)
    states = np.zeros((length + 1, lines, n), np.float32)
    gates = np.empty((length, lines, 2 * n), np.float32)
    new, remembered = (np.empty((length, lines, n), np.float32) for _ in range(2))
    for t in range(length):
        state, gate = states[t], gates[t]
        old = state @ w
        old += b
        remembered[t] = old[:, 2 * n :]
        # The logistic function by tanh, which does not overflow.
        np.add(received[t, :, : 2 * n], old[:, : 2 * n], out=gate)
        gate *= half
        np.tanh(gate, out=gate)
        gate *= half
        gate += half
        np.multiply(gate[:, :n], remembered[t], out=new[t])
        new[t] += received[t, :, 2 * n :]
        np.tanh(new[t], out=new[t])
        np.subtract(state, new[t], out=states[t + 1])
        states[t + 1] *= gate[:, n:]
        states[t + 1] += new[t]
    return _Past(
        embedded=embedded,
        before=states[:-1],
        after=states[1:],
        gates=gates,
        new=new,
        remembered=remembered,
    )


def _backward(model: Model, inputs: Array, past: _Past, from_above: Array) -> Model:
    """Return the gradient of all but the guess, given that of the loss by each state."""
    length, lines, n = past.new.shape
    reset, update = past.gates[..., :n], past.gates[..., n:]
    # What a change of the state makes of each gate's input; known before going back.
    to_new = (1 - update) * (1 - past.new**2)
    slopes = np.stack(
        [
            to_new * past.remembered * reset * (1 - reset),
            (past.before - past.new) * update * (1 - update),
            to_new * reset,
        ],
        axis=2,
    )
    old = np.empty((length, lines, 3, n), np.float32)
    reached = np.empty_like(from_above)
    carried = np.zeros((lines, n), np.float32)
    for t in range(length - 1, -1, -1):
        np.add(from_above[t], carried, out=reached[t])
        np.multiply(reached[t][:, None], slopes[t], out=old[t])
        carried = old[t].reshape(lines, 3 * n) @ model[W_H]
        carried += reached[t] * update[t]
    received = old.copy()
    received[:, :, 2] = reached * to_new
    old, received = (x.reshape(length * lines, 3 * n) for x in (old, received))
    embed = np.zeros_like(model[EMBED])
    np.add.at(embed, inputs.ravel(), received @ model[W_X])
    return {
        W_H: old.T @ past.before.reshape(-1, n),
        B_H: old.sum(0),
        W_X: received.T @ past.embedded.reshape(length * lines, -1),
        B_X: received.sum(0),
        EMBED: embed,
    }
