"""The network of the built-in app `fashion` in NumPy, several times faster on a few images.

On batches of ten images nearly all of PyTorch's time goes into its calls. The model is the app's;
only the arithmetic of its two convolutions and its linear layer is repeated here, and agrees with
the app's within rounding (benchmarks/tests/test_agent_training.py).
"""

from collections.abc import Iterator

import numpy as np

from fedstale.strategies.types import Array, Model

_W1, _B1, _W2, _B2, _W3, _B3 = (f"{i}.{what}" for i in (0, 2, 5) for what in ("weight", "bias"))
_SIDE, _ONE, _TWO = 28, 14, 7
"""Pixels in a row of an image, and after each convolution."""
_AT_A_TIME = 50


def patches(images: Array) -> Array:
    """Return what each place of the first convolution sees.

    Args:
        images: uint8 of shape (n, 28, 28).

    Returns:
        float32 of shape (n, 196, 9).
    """
    padded = np.zeros((len(images), _SIDE + 2, _SIDE + 2, 1), np.float32)
    padded[:, 1:-1, 1:-1, 0] = images / np.float32(255)
    return _patches(padded, _ONE).reshape(len(images), _ONE**2, 9)


def train(
    model: Model, data: tuple[Array, Array], order: Array, *, batch_size: int, rate: float
) -> float:
    """Train in place with SGD; return the mean loss of the last epoch.

    Args:
        model: the arrays of the app's network.
        data: what `patches` returns of n images, and their labels, int of shape (n,).
        order: of the examples, one row an epoch; shape (epochs, n).
        batch_size: examples of one step.
        rate: of SGD.
    """
    seen, labels = data
    total, step = 0.0, np.float32(rate)
    for epoch in order:
        total = 0.0
        for start in range(0, len(epoch), batch_size):
            batch = epoch[start : start + batch_size]
            loss, gradient = descend(model, seen[batch], labels[batch])
            total += loss * len(batch)
            for name, descent in gradient.items():
                model[name] -= step * descent
    return total / len(labels)


def scores(model: Model, seen: Array) -> Array:
    """Return logits of shape (n, 10) of what `patches` returns."""
    # So many images at a time stay in a processor's cache.
    parts = np.array_split(seen, -(-len(seen) // _AT_A_TIME))
    return np.concatenate([_forward(model, part)[-1] for part in parts])


def descend(model: Model, seen: Array, labels: Array) -> tuple[float, Model]:
    """Return the mean cross-entropy of some images in nats, and its gradient."""
    n, rows = len(labels), np.arange(len(labels))
    first, between, second, logits = _forward(model, seen)
    logits = logits - logits.max(axis=1, keepdims=True)
    p = np.exp(logits)
    sums = p.sum(axis=1, keepdims=True)
    loss = float((np.log(sums[:, 0]) - logits[rows, labels]).mean())
    p /= sums
    p[rows, labels] -= 1
    p /= np.float32(n)
    flat = _flat(second)
    back = (p @ model[_W3]).reshape(n, -1, _TWO**2).transpose(0, 2, 1) * (second > 0)
    back = back.reshape(n * _TWO**2, -1)
    kernel = _kernel(model[_W2])
    to_patches = (back @ kernel).reshape(n, _TWO, _TWO, 3, 3, -1)
    padded = np.zeros((n, _ONE + 2, _ONE + 2, first.shape[-1]), np.float32)
    for i, j, here in _places(_TWO):
        padded[here] += to_patches[:, :, :, i, j]
    down = padded[:, 1:-1, 1:-1].reshape(first.shape) * (first > 0)
    down = down.reshape(n * _ONE**2, -1)
    out, channels = model[_W2].shape[:2]
    return loss, {
        _W1: (down.T @ seen.reshape(n * _ONE**2, 9)).reshape(model[_W1].shape),
        _B1: down.sum(axis=0),
        _W2: (back.T @ between).reshape(out, 3, 3, channels).transpose(0, 3, 1, 2),
        _B2: back.sum(axis=0),
        _W3: p.T @ flat,
        _B3: p.sum(axis=0),
    }


def _forward(model: Model, seen: Array) -> tuple[Array, Array, Array, Array]:
    """Return the first layer, what the second sees, the second layer, and the logits."""
    n = len(seen)
    first = np.maximum(seen @ model[_W1].reshape(-1, 9).T + model[_B1], 0)
    padded = np.zeros((n, _ONE + 2, _ONE + 2, first.shape[-1]), np.float32)
    padded[:, 1:-1, 1:-1] = first.reshape(n, _ONE, _ONE, -1)
    between = _patches(padded, _TWO).reshape(n * _TWO**2, -1)
    second = np.maximum(between @ _kernel(model[_W2]).T + model[_B2], 0).reshape(n, _TWO**2, -1)
    return first, between, second, _flat(second) @ model[_W3].T + model[_B3]


def _flat(second: Array) -> Array:
    """Return units in the order of the app: channels first."""
    return second.transpose(0, 2, 1).reshape(len(second), -1)


def _kernel(weights: Array) -> Array:
    """Return weights of shape (out, in, 3, 3) in the order of patches; shape (out, 9 in)."""
    return weights.transpose(0, 2, 3, 1).reshape(len(weights), -1)


def _patches(padded: Array, side: int) -> Array:
    """Return the surroundings of every second pixel; shape (n, side, side, 3, 3, channels)."""
    n, channels = len(padded), padded.shape[-1]
    found = np.empty((n, side, side, 3, 3, channels), np.float32)
    for i, j, here in _places(side):
        found[:, :, :, i, j] = padded[here]
    return found


def _places(side: int) -> Iterator[tuple[int, int, tuple[slice, slice, slice]]]:
    """Yield where each weight of a kernel lies on a padded image, for all of its places."""
    for i in range(3):
        for j in range(3):
            rows, columns = slice(i, i + 2 * side, 2), slice(j, j + 2 * side, 2)
            yield i, j, (slice(None), rows, columns)
