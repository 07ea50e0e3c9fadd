"""The LSTM forecaster: about 10,000 parameters, pooled over devices, run with NumPy alone.

One recurrent layer reads the device's past, the oldest step first; one hidden layer joins its last
state with what is known of the device; the output is a rate of leaving for each piece of the
horizon grid, and quantiles of log rates. Quantiles cannot cross: the outer ones are the median
minus and plus positive numbers. Training needs torch, and is in `lstm_training`; a device that only
forecasts does not import it.

Reference:
    Hochreiter, Schmidhuber. Long Short-Term Memory. Neural Computation 9(8), 1997. The use follows
    Huang et al., Prophet: Proactive Candidate-Selection for Federated Learning by Predicting the
    Qualities of Training and Reporting Phases (arXiv 2020).
"""

from collections.abc import Callable
from typing import Self

import numpy as np

from fedstale.errors import TraceError
from fedstale.traces.arrays import Array
from fedstale.traces.forecast.examples import Examples
from fedstale.traces.forecast.features import SEQUENCE, STATIC, Features, Floats, features
from fedstale.traces.forecast.forecaster import Forecaster, Prior, State
from fedstale.traces.forecast.grid import HORIZONS_S, LEVELS, RATE_HORIZONS_S, RATES
from fedstale.traces.forecast.observation import Observation
from fedstale.traces.forecast.outlook import Outlook

HIDDEN = 32
STAYS = HORIZONS_S.size
OUTPUTS = STAYS + len(RATES) * RATE_HORIZONS_S.size * LEVELS.size
SHAPES = {
    "recurrent": (SEQUENCE + HIDDEN + 1, 4 * HIDDEN),
    "hidden": (HIDDEN + STATIC + 1, HIDDEN),
    "output": (HIDDEN + STATIC + 1, OUTPUTS),
}
"""Shapes of the three weight matrices; the last row of each is its bias."""

# Devices are worked out this many at a time, so that a step's arrays stay in the cache.
_CHUNK = 2048


class LSTM(Forecaster):
    """Long short-term memory over a device's past, with quantiles of what comes."""

    kind = "lstm"

    def __init__(self) -> None:
        self.prior: Prior
        self.weights: dict[str, Floats] = {}

    def fit(
        self,
        training: Examples,
        validation: Examples,
        *,
        seed: int,
        progress: Callable[[int, float, float], None] | None = None,
        checkpoint: str | None = None,
    ) -> Self:
        """Train until the loss on the validation devices no longer falls.

        Args:
            training: what to learn from.
            validation: of other devices.
            seed: of the first weights and of the order of examples.
            progress: told the epoch and both losses after each epoch.
            checkpoint: folder to keep the state of training in, to go on after an interruption.
        """
        from fedstale.traces.forecast.lstm_training import train  # noqa: PLC0415 - imports torch

        self.prior = Prior.of(training)
        self.weights = train(
            training, validation, self.prior, seed=seed, progress=progress, checkpoint=checkpoint
        )
        return self

    @property
    def n_parameters(self) -> int:
        """Number of weights."""
        return sum(w.size for w in self.weights.values())

    def outlook(self, seen: Observation) -> Outlook:
        """Return what the network says of each device."""
        n = len(seen)
        given = features(seen, self.prior)
        raw = np.empty((n, OUTPUTS), dtype=np.float32)
        for i in range(0, n, _CHUNK):
            part = slice(i, i + _CHUNK)
            raw[part] = forward(self.weights, given.sequence[:, part], given.static[part])
        stays, rates = read_out(raw, given)
        return Outlook(online=seen.online, stays=stays, fresh=self.prior.fresh, rates=rates)

    def state_dict(self) -> State:
        """Return the prior and the weights."""
        return self.prior.state_dict() | self.weights

    def load_state_dict(self, state: State) -> None:
        """Take over the prior and the weights.

        Raises:
            TraceError: a weight has not the shape of this version.
        """
        for name, shape in SHAPES.items():
            if state[name].shape != shape:
                raise TraceError(
                    f"weights {name!r} of shape {state[name].shape}: expected {shape}; train again"
                )
        self.prior = Prior.from_state(state)
        self.weights = {name: state[name].astype(np.float32) for name in SHAPES}


def forward(weights: dict[str, Floats], sequence: Floats, static: Floats) -> Floats:
    """Return the raw outputs of the network.

    Args:
        weights: as in `SHAPES`; gates in the order input, forget, output, candidate.
        sequence: shape (steps, n, 5).
        static: shape (n, 18).

    Returns:
        Shape (n, outputs).
    """
    n = static.shape[0]
    three = 3 * HIDDEN
    # sigmoid(x) = (1 + tanh(x / 2)) / 2: one tanh over all four gates is faster than two calls.
    kernel = weights["recurrent"].copy()
    kernel[:, :three] *= 0.5
    joined = np.zeros((n, SEQUENCE + HIDDEN + 1), dtype=np.float32)
    joined[:, -1] = 1.0
    state = joined[:, SEQUENCE:-1]
    cell = np.zeros((n, HIDDEN), dtype=np.float32)
    gates = np.empty((n, 4 * HIDDEN), dtype=np.float32)
    for step in sequence:
        joined[:, :SEQUENCE] = step
        np.matmul(joined, kernel, out=gates)
        np.tanh(gates, out=gates)
        opened = gates[:, :three]
        opened *= 0.5
        opened += 0.5
        cell *= opened[:, HIDDEN : 2 * HIDDEN]
        cell += opened[:, :HIDDEN] * gates[:, three:]
        np.multiply(np.tanh(cell), opened[:, 2 * HIDDEN :], out=state)
    ones = np.ones((n, 1), dtype=np.float32)
    inner = np.concatenate([state, static, ones], axis=1) @ weights["hidden"]
    # The numbers also go straight to the output: to repeat the last value is to add one of them.
    return np.concatenate([np.maximum(inner, 0.0), static, ones], axis=1) @ weights["output"]


def read_out(raw: Floats, given: Features) -> tuple[Array, Array]:
    """Return what raw outputs mean: (probabilities to stay, quantiles of rates)."""
    # The chance to stay through one piece, given that the device stayed so far.
    pieces = 1.0 / (1.0 + np.exp(-raw[:, :STAYS].clip(-30, 30)))
    stays = np.cumprod(pieces, axis=1, dtype=np.float64)
    shape = (raw.shape[0], len(RATES), RATE_HORIZONS_S.size, LEVELS.size)
    low, middle, high = np.moveaxis(raw[:, STAYS:].reshape(shape), 3, 0)
    quantiles = np.stack([middle - _softplus(low), middle, middle + _softplus(high)], axis=3)
    return stays, np.exp(given.level[:, :, None, None] + quantiles)


def _softplus(x: Floats) -> Floats:
    return np.logaddexp(x, np.float32(0.0))
