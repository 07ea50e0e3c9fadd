"""The LSTM forecaster: one network for sessions and one for each channel, run with NumPy alone.

The network of sessions reads the device's finished runs and, beside them, what the device counted
of itself; for each state it returns the log-odds of surviving each piece of the horizon grid, once
in it, and of being online at each horizon. The network of a channel reads the channel's history and
returns quantiles of its logarithm, which cannot cross: the outer ones are the median minus and plus
positive numbers. They are then moved until they cover as often as they say on the devices of the
validation (conformalised quantile regression).

One recurrent layer reads a sequence, the oldest step first. A hidden layer joins its last state
with other inputs, which also go straight to the output: without the layers it is a linear model,
without the sequence the perceptron. Training needs torch, and is in `lstm_training`; a device that
only forecasts does not import it. x / (1 + |x|) takes the place of the hyperbolic tangent in the
gates, and a half of it and a half that of the logistic function: a third of the time, for the same
loss.

Reference:
    Hochreiter, Schmidhuber. Long Short-Term Memory. Neural Computation 9(8), 1997.
    Huang, Yang, Pan et al. Prophet: Proactive Candidate-Selection for Federated Learning by
    Predicting the Qualities of Training and Reporting Phases. arXiv 2020.
    Romano, Patterson, Candes. Conformalized Quantile Regression. NeurIPS 2019.
"""

from typing import ClassVar, Self

import numpy as np

from fedstale.errors import TraceError
from fedstale.traces import Array
from fedstale.traces.forecast.base import FleetStatistics, Forecaster, State
from fedstale.traces.forecast.dataset import Examples
from fedstale.traces.forecast.inputs import (
    BOUND,
    CHANNEL_NUMBERS,
    RUN_NUMBERS,
    SESSION_NUMBERS,
    STEP_NUMBERS,
    ChannelInputs,
    Floats,
    HalfHours,
    channel_inputs,
    channel_targets,
    session_inputs,
)
from fedstale.traces.forecast.observation import LEVELS, RATE_HORIZONS_S, RATES, Observation
from fedstale.traces.forecast.sessions import HORIZONS_S

SESSIONS = "sessions"
"""Name of the network of sessions; those of channels are called as the channels."""
# Devices are computed this many at a time, so that a step's arrays stay in the cache.
_CHUNK = 512
_H, _R = HORIZONS_S.size, RATE_HORIZONS_S.size


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
    size = np.empty((4 * cells, n), dtype=np.float32)
    opened, candidate, size_of_cell = gates[: 3 * cells], gates[3 * cells :], size[:cells]
    transposed = np.ascontiguousarray(kernel.T)
    for step in sequence:
        joined[:numbers] = step.T
        np.matmul(transposed, joined, out=gates)
        # Softsign, x / (1 + |x|), is the activation.
        np.abs(gates, out=size)
        size += 1.0
        gates /= size
        opened *= 0.5
        opened += 0.5
        candidate *= opened[:cells]
        cell *= opened[cells : 2 * cells]
        cell += candidate
        np.abs(cell, out=size_of_cell)
        size_of_cell += 1.0
        np.divide(cell, size_of_cell, out=state)
        state *= opened[2 * cells :]
    return state


class LSTM(Forecaster):
    """Long short-term memory over the runs of a device and the histories of its channels."""

    kind = "lstm"

    cells: ClassVar[dict[str, int]] = {SESSIONS: 32, **dict.fromkeys(RATES, 16)}
    """Width of each network's recurrent layer."""
    width: ClassVar[dict[str, int]] = {SESSIONS: 128, **dict.fromkeys(RATES, 24)}
    """Width of each network's hidden layer."""

    def __init__(self) -> None:
        self.around: HalfHours
        self.mean, self.scale = np.zeros(SESSION_NUMBERS), np.ones(SESSION_NUMBERS)
        """Of the numbers of the training devices."""
        self.networks: dict[str, Weights] = {}
        """Weights by name; a channel that no training device knew has none."""
        self.spread = np.ones(len(RATES))
        """Usual spread of each channel; shape (3,)."""
        self.margins = np.zeros((len(RATES), _R, 2))
        """By how much the outer quantiles are moved outwards, in spreads; (3, horizons, 2)."""

    @classmethod
    def shapes(cls, name: str) -> dict[str, tuple[int, int]]:
        """Return the shapes of the weights of a network."""
        is_channel = name != SESSIONS
        return shapes(
            sequence=STEP_NUMBERS if is_channel else RUN_NUMBERS,
            static=CHANNEL_NUMBERS if is_channel else SESSION_NUMBERS,
            outputs=_R * LEVELS.size if is_channel else 4 * _H,
            cells=cls.cells[name],
            width=cls.width[name],
        )

    def fit(self, training: Examples, validation: Examples, *, seed: int) -> Self:
        """Train each network and keep its best epoch on the validation devices.

        Losses of each epoch are logged.

        Args:
            training: what to learn from.
            validation: of other devices.
            seed: of the first weights and of the order of examples.
        """
        import torch  # noqa: PLC0415 - a device that only forecasts has none

        from fedstale.traces.forecast import lstm_training  # noqa: PLC0415 - imports torch

        self.fleet, self.around = FleetStatistics.of(training), HalfHours.of(training)
        self.networks = {}
        channels = [name for i, name in enumerate(RATES) if np.isfinite(training.rates[:, i]).any()]
        parts = self, training, validation
        threads = torch.get_num_threads()
        # So small networks are no faster on several threads, and sums in the same order on one.
        torch.set_num_threads(1)
        try:
            if np.isfinite(training.survival).any():
                self.networks[SESSIONS] = lstm_training.train_sessions(*parts, seed)
            for name in channels:
                self.networks[name] = lstm_training.train_channel(*parts, name, seed)
        finally:
            torch.set_num_threads(threads)
        self.margins = self._margins(validation)
        return self

    def _margins(self, validation: Examples) -> Array:
        """Return by how much outer quantiles miss the levels on the validation devices."""
        made = np.zeros((len(RATES), _R, 2))
        for channel, name in enumerate(RATES):
            if name not in self.networks:
                continue
            given, ratios = self._ratios(validation.observed, channel)
            truth = channel_targets(validation.rates[:, channel], given)
            for k in range(_R):
                known = ~np.isnan(truth[:, k])
                if known.any():
                    y, q = truth[known, k], ratios[known, k]
                    made[channel, k] = (
                        np.quantile(q[:, 0] - y, 1.0 - LEVELS[0]),
                        np.quantile(y - q[:, 2], LEVELS[2]),
                    )
        return made

    def predict_sessions(self, observed: Observation) -> tuple[Array, Array]:
        """Return the outputs of the network of sessions for each device."""
        survival, available = np.empty((2, len(observed), _H))
        for i in range(0, len(observed), _CHUNK):
            part = slice(i, i + _CHUNK)
            survival[part], available[part] = self._sessions(observed.take(part))
        return survival, available

    def _sessions(self, observed: Observation) -> tuple[Array, Array]:
        state, around = observed.online.astype(np.int64), self.around.of_devices(observed)
        if SESSIONS not in self.networks:
            return around.survival, around.available
        numbers, runs = session_inputs(observed, self.fleet, around)
        raw = forward(self.networks[SESSIONS], runs, self.standardised(numbers))
        of_state = raw.reshape(2, 2, _H, -1)[state, :, :, np.arange(state.size)]
        chances = 1.0 / (1.0 + np.exp(-of_state.clip(-30, 30).astype(np.float64)))
        # The probability to survive one piece, given that the device survived so far.
        survival = np.cumprod(chances[:, 0], axis=1, dtype=np.float64)
        return survival, chances[:, 1]

    def standardised(self, numbers: Array) -> Floats:
        """Return the numbers of sessions in standard deviations, 0 where unknown.

        Args:
            numbers: of `session_inputs`; shape (n, SESSION_NUMBERS).
        """
        z = np.clip((numbers - self.mean) / self.scale, -BOUND, BOUND)
        return np.nan_to_num(z).astype(np.float32)

    def predict_rates(self, observed: Observation) -> Array:
        """Return the outputs of the networks of channels; the fleet's where there is none."""
        n = len(observed)
        rates = np.broadcast_to(self.fleet.rates, (n, *self.fleet.rates.shape)).copy()
        for channel, name in enumerate(RATES):
            if name not in self.networks:
                continue
            for i in range(0, n, _CHUNK):
                part = slice(i, i + _CHUNK)
                given, ratios = self._ratios(observed.take(part), channel)
                ratios[:, :, 0] -= self.margins[channel, :, 0]
                ratios[:, :, 2] += self.margins[channel, :, 1]
                ratios = np.maximum.accumulate(ratios, axis=2)
                ratios *= given.spread[:, None, None]
                rates[part, channel] = np.exp(ratios + given.level[:, None, None])
        return rates

    def _ratios(self, observed: Observation, channel: int) -> tuple[ChannelInputs, Array]:
        """Return a channel's inputs and its quantiles before any margin, as `quantiles_of` does."""
        given = self.channel_inputs(observed, channel)
        raw = forward(self.networks[RATES[channel]], given.sequence, given.static)
        return given, quantiles_of(raw)

    def channel_inputs(self, observed: Observation, channel: int) -> ChannelInputs:
        """Return the inputs of a channel's network; see `fedstale.traces.forecast.inputs`."""
        spread = float(self.spread[channel])
        return channel_inputs(observed, channel, self.fleet.rates[channel], spread)

    def state_dict(self) -> State:
        """Return all arrays by name."""
        return (
            self.fleet.state_dict()
            | {"around.survival": self.around.survival, "around.available": self.around.available}
            | {name: getattr(self, name) for name in ("mean", "scale", "spread", "margins")}
            | {
                f"{network}.{name}": weight
                for network, weights in self.networks.items()
                for name, weight in weights.items()
            }
        )

    def load_state_dict(self, state: State) -> None:
        """Restore all arrays.

        Raises:
            TraceError: one has not the shape of this version.
        """
        bins = (HalfHours.BINS, _H)
        expected: dict[str, tuple[int, ...]] = {
            "around.survival": bins,
            "around.available": bins,
            "mean": self.mean.shape,
            "scale": self.scale.shape,
            "spread": self.spread.shape,
            "margins": self.margins.shape,
        }
        self.networks = {}
        for network in (SESSIONS, *RATES):
            if f"{network}.output" in state:
                of_network = self.shapes(network)
                expected |= {f"{network}.{name}": shape for name, shape in of_network.items()}
                self.networks[network] = {
                    name: state[f"{network}.{name}"].astype(np.float32) for name in of_network
                }
        for name, shape in expected.items():
            if state[name].shape != shape:
                raise TraceError(
                    f"weights {name!r} of shape {state[name].shape}: expected {shape}; train again"
                )
        self.fleet = FleetStatistics.from_state(state)
        self.around = HalfHours(
            survival=state["around.survival"], available=state["around.available"]
        )
        for name in ("mean", "scale", "spread", "margins"):
            setattr(self, name, state[name])


def quantiles_of(raw: Floats) -> Array:
    """Return the quantiles that the outputs of a channel's network stand for.

    Args:
        raw: shape (horizons x quantiles, n).

    Returns:
        Logarithms of rates against the level, in spreads, rising; shape (n, horizons, quantiles).
    """
    low, median, high = raw.T.astype(np.float64).reshape(-1, _R, LEVELS.size).transpose(2, 0, 1)
    return np.stack([median - _softplus(low), median, median + _softplus(high)], axis=2)


def _softplus(x: Array) -> Array:
    # Not `logaddexp`, which is not vectorised.
    result: Array = np.maximum(x, 0.0) + np.log(1.0 + np.exp(-np.abs(x)))
    return result
