"""Inputs of the learnt forecasters: one short sequence and a few numbers for each device.

Rates enter as logarithms relative to the device's own recent level, so one network serves slow and
fast devices and any unit of work. What was not observed is 0.

No input depends on how far a record has run. In a record of two days, a device with a yesterday is
in its second night, and a network would learn that instead of the night: so the length of a history
is cut at 6 hours, and yesterday enters only as far as the sequence holds it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedstale.traces.arrays import Array
from fedstale.traces.forecast.base import LEAST_RATE, FleetStatistics, log_rate
from fedstale.traces.forecast.observation import DAY_S, EDGES_S, RATES, STEPS, Observation

Floats = npt.NDArray[np.float32]

SEQUENCE = 5
"""Numbers of each step: share online, three rates, its length."""
STATIC = 18
"""Numbers of each device."""
_LONG_S = 6 * 3600.0
BOUND = 5.0
"""Logarithms of ratios are cut here: a factor of 150."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Features:
    """Inputs of n devices."""

    sequence: Floats
    """The history, the oldest step first; shape (steps, n, 5)."""
    static: Floats
    """The rest; shape (n, 18)."""
    level: Array
    """Logarithm of the rate that ratios are relative to; shape (n, 3)."""


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


def _static(
    observed: Observation, known: npt.NDArray[np.bool_], against_fleet: Array, newest: Floats
) -> Floats:
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
