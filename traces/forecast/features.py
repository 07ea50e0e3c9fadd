"""What the learnt forecasters are shown: one short sequence and a few numbers for each device.

Rates enter as logarithms relative to the device's own recent level, so one network serves slow and
fast devices and any unit of work. What was not observed is 0.

Nothing here tells how far a record has run. In a record of two days, whoever has a yesterday is in
its second night, and a network would learn that instead of the night: so a history is as long as 6
hours or shorter, and yesterday is seen only as far as the sequence shows it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedstale.traces.arrays import Array
from fedstale.traces.forecast.forecaster import Prior
from fedstale.traces.forecast.grid import DAY_S, EDGES_S, RATES, STEPS
from fedstale.traces.forecast.naive import log_rate
from fedstale.traces.forecast.observation import Observation

Floats = npt.NDArray[np.float32]

SEQUENCE = 5
"""Numbers of each step: presence, three rates, its length."""
STATIC = 18
"""Numbers of each device."""
_LONG_S = 6 * 3600.0
BOUND = 5.0
"""Logarithms of ratios are cut here: a factor of 150."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Features:
    """Inputs of n devices."""

    sequence: Floats
    """The past, the oldest step first; shape (steps, n, 5)."""
    static: Floats
    """The rest; shape (n, 18)."""
    level: Array
    """Logarithm of the rate that ratios are relative to; shape (n, 3)."""


def features(seen: Observation, prior: Prior) -> Features:
    """Return what a learnt forecaster is shown of each device.

    Args:
        seen: the past of n devices.
        prior: of the fleet, for what a device has not seen.
    """
    n = len(seen)
    logs = log_rate(seen.rates).astype(np.float32)
    known = ~np.isnan(logs)
    count = known.sum(axis=2)
    middle = np.log(prior.rates[:, 1, 1])
    sums = np.where(known, logs, 0.0).sum(axis=2)
    level = np.where(count > 0, sums / np.maximum(count, 1), middle)
    relative = logs - level[:, :, None].astype(np.float32)
    relative = np.where(known, np.clip(relative, -BOUND, BOUND), 0.0)
    sequence = np.empty((STEPS, n, SEQUENCE), dtype=np.float32)
    backwards = slice(None, None, -1)
    sequence[:, :, 0] = np.nan_to_num(seen.presence).T[backwards]
    sequence[:, :, 1:4] = relative.transpose(2, 0, 1)[backwards]
    sequence[:, :, 4] = (np.log(np.diff(EDGES_S)) / 5.0 - 1.0)[backwards, None]
    static = _static(seen, known, level - middle, relative[:, :, 0])
    return Features(sequence=sequence, static=static, level=level)


def flat(given: Features) -> Floats:
    """Return the same numbers as one row for each device; (n, steps x 4 + 18)."""
    past = given.sequence[:, :, :4].transpose(1, 0, 2).reshape(given.static.shape[0], 4 * STEPS)
    return np.concatenate([past, given.static], axis=1)


def _static(
    seen: Observation, known: npt.NDArray[np.bool_], against_fleet: Array, newest: Floats
) -> Floats:
    angle = 2 * np.pi * seen.time_of_day_s / DAY_S
    clock = ~np.isnan(angle)
    columns = [
        seen.online,
        _duration(seen.since_s),
        _duration(np.minimum(seen.history_s, _LONG_S)),
        clock,
        *(np.where(clock, f(k * angle), 0.0) for k in (1, 2) for f in (np.sin, np.cos)),
        ~np.isnan(seen.presence).all(axis=1),
        *(known[:, channel].any(axis=1) for channel in range(len(RATES))),
        *list(np.clip(against_fleet, -BOUND, BOUND).T),
        *list(newest.T),
    ]
    result = np.empty((len(seen), STATIC), dtype=np.float32)
    assert len(columns) == STATIC
    for i, column in enumerate(columns):
        result[:, i] = column
    return result


def _duration(t: Array) -> Array:
    """Return a duration on a scale where seconds to days lie between -3 and 3."""
    return (np.log1p(t) - 6.0) / 2.0


def ratios(rates: Array, level: Array) -> Array:
    """Return what learnt forecasters predict of rates: log ratios, cut; NaN where unknown.

    Args:
        rates: mean rates over the horizons; shape (n, 3, rate horizons).
        level: of `Features`; shape (n, 3).
    """
    assert rates.shape[1] == len(RATES)
    return np.clip(log_rate(rates) - level[:, :, None], -BOUND, BOUND)
