"""A network of 64-32-10 units on scikit-learn's digits, for single gradients without messages."""

from collections.abc import Callable

import numpy as np

from fedstale.strategies.types import Array, Model

Draw = Callable[[int, tuple[int, ...]], Array]
"""Draws a layer's weights, given how many inputs it has and its shape."""
_SHAPES = {"w1": (64, (64, 32)), "b1": (64, (32,)), "w2": (32, (32, 10)), "b2": (32, (10,))}


def initial(draw: Draw) -> Model:
    """Return a network."""
    return {name: draw(n_inputs, shape) for name, (n_inputs, shape) in _SHAPES.items()}


def scores(model: Model, x: Array) -> tuple[Array, Array]:
    """Return the hidden units and the logits of some images, shape (n, 64)."""
    hidden = np.maximum(x @ model["w1"] + model["b1"], 0)
    return hidden, hidden @ model["w2"] + model["b2"]


def gradient(model: Model, x: Array, y: Array) -> tuple[float, Model]:
    """Return the mean cross-entropy in nats, and its gradient."""
    hidden, logits = scores(model, x)
    logits = logits - logits.max(1, keepdims=True)
    p, rows = np.exp(logits), np.arange(len(y))
    sums = p.sum(1, keepdims=True)
    loss = float((np.log(sums[:, 0]) - logits[rows, y]).mean())
    p /= sums
    p[rows, y] -= 1
    p /= p.dtype.type(len(y))
    back = (p @ model["w2"].T) * (hidden > 0)
    return loss, {"w1": x.T @ back, "b1": back.sum(0), "w2": hidden.T @ p, "b2": p.sum(0)}
