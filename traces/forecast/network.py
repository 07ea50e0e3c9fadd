"""A small network, run with NumPy alone: an LSTM, a hidden layer and a straight line beside it.

One recurrent layer reads a sequence, the oldest step first. A hidden layer joins its last state
with other inputs, which also go straight to the output: without the layers it is a linear model,
without the sequence a perceptron. Training needs torch, and is in `lstm_training`; a device that
only forecasts does not import it.

x / (1 + |x|) takes the place of the hyperbolic tangent in the gates, and a half of it and a half
that of the logistic function: a third of the time, for the same loss.

Reference:
    Hochreiter, Schmidhuber. Long Short-Term Memory. Neural Computation 9(8), 1997.
"""

import numpy as np

from fedstale.traces.forecast.inputs import Floats

Weights = dict[str, Floats]


def shapes(
    *, sequence: int, static: int, outputs: int, cells: int, width: int
) -> dict[str, tuple[int, int]]:
    """Return the shapes of the weight matrices, the last row of each its bias.

    Args:
        sequence: numbers of a step.
        static: other inputs.
        outputs: of the network.
        cells: of the recurrent layer; 0 for a network without memory.
        width: of the hidden layer; 0 for a linear model.
    """
    made = {"output": (width + static + 1, outputs)}
    if width:
        made["hidden"] = (cells + static + 1, width)
    if cells:
        # Gates in the order input, forget, output, candidate.
        made["gates"] = (sequence + cells + 1, 4 * cells)
    return made


def forward(weights: Weights, sequence: Floats, static: Floats) -> Floats:
    """Return the outputs of the network.

    Args:
        weights: of shapes as from `shapes`.
        sequence: shape (steps, n, numbers).
        static: shape (n, numbers).

    Returns:
        Shape (outputs, n).
    """
    # Devices are the last axis in here: gates are then whole rows, and arithmetic on them is fast.
    inputs = [static.T, np.ones((1, static.shape[0]), dtype=np.float32)]
    inner = []
    if "hidden" in weights:
        state = [_last_state(weights["gates"], sequence)] if "gates" in weights else []
        inner = [np.maximum(weights["hidden"].T @ np.concatenate([*state, *inputs]), 0.0)]
    return np.asarray(weights["output"].T @ np.concatenate([*inner, *inputs]), dtype=np.float32)


def _last_state(kernel: Floats, sequence: Floats) -> Floats:
    """Return the state of the recurrent layer after the last step; shape (cells, n)."""
    (_, n, numbers), cells = sequence.shape, kernel.shape[1] // 4
    joined = np.zeros((numbers + cells + 1, n), dtype=np.float32)
    joined[-1] = 1.0
    state = joined[numbers:-1]
    cell = np.zeros((cells, n), dtype=np.float32)
    gates = np.empty((4 * cells, n), dtype=np.float32)
    spare = np.empty((4 * cells, n), dtype=np.float32)
    opened, candidate = gates[: 3 * cells], gates[3 * cells :]
    transposed = np.ascontiguousarray(kernel.T)
    for step in sequence:
        joined[:numbers] = step.T
        np.matmul(transposed, joined, out=gates)
        _softsign(gates, spare, gates)
        opened *= 0.5
        opened += 0.5
        candidate *= opened[:cells]
        cell *= opened[cells : 2 * cells]
        cell += candidate
        _softsign(cell, spare[:cells], state)
        state *= opened[2 * cells :]
    return state


def _softsign(x: Floats, spare: Floats, out: Floats) -> None:
    np.abs(x, out=spare)
    spare += 1.0
    np.divide(x, spare, out=out)
