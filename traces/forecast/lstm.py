"""The LSTM forecaster: about 10,000 parameters, pooled over devices, run with NumPy alone.

One recurrent layer reads the device's history, the oldest step first; one hidden layer joins its
last state with what is known of the device. For survival the output is what to add to the log-odds
of a baseline, the hourly chain of the fleet, for each piece of the horizon grid: training starts at
that baseline, and a few recorded days need not teach the hours of the day anew. For rates the
output is quantiles of their logarithms, which cannot cross: the outer ones are the median minus and
plus positive numbers. Training needs torch, and is in `lstm_training`; a device that only forecasts
does not import it.

Its inputs, shared by gradient boosting, are one short sequence and a few numbers for each device.
Rates enter as logarithms relative to the device's own recent level, so one network serves slow and
fast devices and any unit of work. What was not observed is 0. No input depends on how far a record
has run. In a record of two days, a device with a yesterday is in its second night, and a network
would learn that instead of the night: so the length of a history is cut at 6 hours, and yesterday
enters only as far as the sequence holds it.

x / (1 + |x|) takes the place of the hyperbolic tangent in the gates, and a half of it and a half
that of the logistic function: a third of the time, for the same loss.

Reference:
    Hochreiter, Schmidhuber. Long Short-Term Memory. Neural Computation 9(8), 1997. The use follows
    Huang et al., Prophet: Proactive Candidate-Selection for Federated Learning by Predicting the
    Qualities of Training and Reporting Phases (arXiv 2020).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from fedstale.errors import TraceError
from fedstale.traces.arrays import DAY_S, Array, Mask
from fedstale.traces.forecast.base import (
    LEAST_RATE,
    FleetStatistics,
    Forecaster,
    State,
    log_rate,
)
from fedstale.traces.forecast.baselines import HOURS, HourlyChain
from fedstale.traces.forecast.dataset import Examples
from fedstale.traces.forecast.observation import (
    EDGES_S,
    HORIZONS_S,
    LEVELS,
    RATE_HORIZONS_S,
    RATES,
    STEPS,
    Observation,
)

Floats = npt.NDArray[np.float32]

SEQUENCE = 5
"""Numbers of each step: share online, three rates, its length."""
STATIC = 18
"""Numbers of each device."""
_LONG_S = 6 * 3600.0
BOUND = 5.0
"""Logarithms of ratios are cut here: a factor of 150."""

HIDDEN = 32
PIECES = HORIZONS_S.size
"""Outputs for survival, one for each piece of the horizon grid."""
OUTPUTS = PIECES + len(RATES) * RATE_HORIZONS_S.size * LEVELS.size
SHAPES = {
    "gates": (SEQUENCE + HIDDEN + 1, 4 * HIDDEN),
    "hidden": (HIDDEN + STATIC + 1, HIDDEN),
    "output": (HIDDEN + STATIC + 1, OUTPUTS),
}
"""Shapes of the three weight matrices; the last row of each is its bias."""

# Devices are computed this many at a time, so that a step's arrays stay in the cache.
_CHUNK = 512


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Features:
    """Inputs of n devices."""

    sequence: Floats
    """The history, the oldest step first; shape (steps, n, 5)."""
    static: Floats
    """The rest; shape (n, 18)."""
    level: Array
    """Logarithm of the rate that ratios are relative to; shape (n, 3)."""


class LSTM(Forecaster):
    """Long short-term memory over a device's history, with quantiles of its rates."""

    kind = "lstm"
    saved = ("leaving", *SHAPES)

    def __init__(self) -> None:
        self.chain: HourlyChain
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
            progress: called with the epoch and both losses after each epoch.
            checkpoint: folder to keep the state of training in, to go on after an interruption.
        """
        from fedstale.traces.forecast.lstm_training import train  # noqa: PLC0415 - imports torch

        self.fleet, self.chain = FleetStatistics.of(training), HourlyChain.of(training)
        self.weights = train(
            training,
            validation,
            self.fleet,
            self.chain,
            seed=seed,
            progress=progress,
            checkpoint=checkpoint,
        )
        return self

    def predict(self, observed: Observation) -> tuple[Array, Array]:
        """Return the outputs of the network for each device."""
        n = len(observed)
        survival = np.empty((PIECES, n))
        rates = np.empty((len(RATES), RATE_HORIZONS_S.size, LEVELS.size, n))
        for i in range(0, n, _CHUNK):
            part = slice(i, i + _CHUNK)
            given = features(observed.take(part), self.fleet)
            raw = forward(self.weights, given.sequence, given.static)
            online, clock = observed.online[part], observed.time_of_day_s[part]
            raw[:PIECES] += self.chain.log_odds(online, clock).T
            survival[:, part], rates[..., part] = read_out(raw, given)
        return survival.T, rates.transpose(3, 0, 1, 2)

    def state_dict(self) -> State:
        """Return the fleet statistics, the chain and the weights."""
        return self.fleet.state_dict() | {"leaving": self.chain.leaving} | self.weights

    def load_state_dict(self, state: State) -> None:
        """Restore the fleet statistics, the chain and the weights.

        Raises:
            TraceError: a weight has not the shape of this version.
        """
        for name, shape in {"leaving": (2, HOURS), **SHAPES}.items():
            if state[name].shape != shape:
                raise TraceError(
                    f"weights {name!r} of shape {state[name].shape}: expected {shape}; train again"
                )
        self.fleet = FleetStatistics.from_state(state)
        self.chain = HourlyChain(leaving=state["leaving"])
        self.weights = {name: state[name].astype(np.float32) for name in SHAPES}


def forward(weights: dict[str, Floats], sequence: Floats, static: Floats) -> Floats:
    """Return the raw outputs of the network.

    Args:
        weights: as in `SHAPES`; gates in the order input, forget, output, candidate.
        sequence: shape (steps, n, 5).
        static: shape (n, 18).

    Returns:
        Shape (outputs, n).
    """
    # Devices are the last axis in here: gates are then whole rows, and arithmetic on them is fast.
    n, three, kernel = static.shape[0], 3 * HIDDEN, weights["gates"].T
    joined = np.zeros((SEQUENCE + HIDDEN + 1, n), dtype=np.float32)
    joined[-1] = 1.0
    state = joined[SEQUENCE:-1]
    cell = np.zeros((HIDDEN, n), dtype=np.float32)
    gates = np.empty((4 * HIDDEN, n), dtype=np.float32)
    spare = np.empty((4 * HIDDEN, n), dtype=np.float32)
    opened, candidate = gates[:three], gates[three:]
    for step in sequence:
        joined[:SEQUENCE] = step.T
        np.matmul(kernel, joined, out=gates)
        _softsign(gates, spare, gates)
        opened *= 0.5
        opened += 0.5
        candidate *= opened[:HIDDEN]
        cell *= opened[HIDDEN : 2 * HIDDEN]
        cell += candidate
        _softsign(cell, spare[:HIDDEN], state)
        state *= opened[2 * HIDDEN :]
    inputs = np.concatenate([state, static.T, joined[-1:]])
    inner = weights["hidden"].T @ inputs
    # The inputs also go straight to the output: the last value is repeated by adding one of them.
    np.maximum(inner, 0.0, out=inputs[:HIDDEN])
    return np.asarray(weights["output"].T @ inputs, dtype=np.float32)


def _softsign(x: Floats, spare: Floats, out: Floats) -> None:
    np.abs(x, out=spare)
    spare += 1.0
    np.divide(x, spare, out=out)


def read_out(raw: Floats, given: Features) -> tuple[Array, Array]:
    """Return the forecasts that raw outputs stand for.

    Args:
        raw: from `forward`, the chain's log-odds of survival added; shape (outputs, n).
        given: inputs of the same devices.

    Returns:
        Survival, shape (horizons, n), and quantiles of rates, shape (3, rate
        horizons, quantiles, n).
    """
    # The probability to survive one piece, given that the device survived so far.
    pieces = 1.0 / (1.0 + np.exp(-raw[:PIECES].clip(-30, 30)))
    survival = np.cumprod(pieces, axis=0, dtype=np.float64)
    n = raw.shape[1]
    logs = raw[PIECES:].reshape(len(RATES), RATE_HORIZONS_S.size, LEVELS.size, n)
    outer = _softplus(logs[:, :, ::2])
    logs[:, :, 0] = logs[:, :, 1] - outer[:, :, 0]
    logs[:, :, 2] = logs[:, :, 1] + outer[:, :, 1]
    return survival, np.exp(logs) * np.exp(given.level.T)[:, None, None]


def _softplus(x: Floats) -> Floats:
    # Not `logaddexp`, which is not vectorised.
    return np.maximum(x, 0.0) + np.log(1.0 + np.exp(-np.abs(x)))


def features(observed: Observation, fleet: FleetStatistics) -> Features:
    """Return the inputs of a learnt forecaster.

    Args:
        observed: histories of n devices.
        fleet: stands for what a device has not observed.
    """
    n = len(observed)
    # Devices are the last axis in memory, where arithmetic is fast, and the first in the result.
    rates = np.ascontiguousarray(observed.rates.transpose(2, 1, 0), dtype=np.float32)
    logs = np.log(np.maximum(rates, np.float32(LEAST_RATE)))
    known = ~np.isnan(logs)
    logs[~known] = 0.0
    count = known.sum(axis=0)
    middle = np.log(fleet.rates[:, 1, 1])[:, None]
    level = np.where(count > 0, logs.sum(axis=0) / np.maximum(count, 1), middle)
    sequence = np.empty((STEPS, SEQUENCE, n), dtype=np.float32)
    backwards = slice(None, None, -1)
    sequence[:, 0] = np.nan_to_num(observed.online_share).T[backwards]
    relative = sequence[:, 1:4]
    np.subtract(logs[backwards], level.astype(np.float32), out=relative)
    np.clip(relative, -BOUND, BOUND, out=relative)
    relative *= known[backwards]
    sequence[:, 4] = (np.log(np.diff(EDGES_S)) / 5.0 - 1.0)[backwards, None]
    static = _static(observed, known, level - middle, relative[-1])
    return Features(sequence=sequence.transpose(0, 2, 1), static=static.T, level=level.T)


def flat(given: Features) -> Floats:
    """Return the same numbers as one row for each device; (n, steps x 4 + 18)."""
    steps = given.sequence[:, :, :4].transpose(1, 0, 2).reshape(given.static.shape[0], 4 * STEPS)
    return np.concatenate([steps, given.static], axis=1)


def _static(observed: Observation, known: Mask, against_fleet: Array, newest: Floats) -> Floats:
    angle = 2 * np.pi * observed.time_of_day_s / DAY_S
    clock = ~np.isnan(angle)
    rows = [
        observed.online,
        _duration(observed.since_s),
        _duration(np.minimum(observed.history_s, _LONG_S)),
        clock,
        *(np.where(clock, f(k * angle), 0.0) for k in (1, 2) for f in (np.sin, np.cos)),
        ~np.isnan(observed.online_share).all(axis=1),
        *(known[:, channel].any(axis=0) for channel in range(len(RATES))),
        *np.clip(against_fleet, -BOUND, BOUND),
        *newest,
    ]
    result = np.empty((STATIC, len(observed)), dtype=np.float32)
    for i, row in enumerate(rows):
        result[i] = row
    assert len(rows) == STATIC
    return result


def _duration(t: Array) -> Array:
    """Return a duration on a scale where seconds to days lie between -3 and 3."""
    return (np.log1p(t) - 6.0) / 2.0


def ratios(rates: Array, level: Array) -> Array:
    """Return the targets of learnt forecasters for rates: log ratios, cut; NaN where unknown.

    Args:
        rates: mean rates over the horizons; shape (n, 3, rate horizons).
        level: of `Features`; shape (n, 3).
    """
    assert rates.shape[1] == len(RATES)
    return np.clip(log_rate(rates) - level[:, :, None], -BOUND, BOUND)
