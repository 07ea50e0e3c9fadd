"""How curves of accuracy are read, and how those of different arms are compared in pairs."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedstale.comparison.statistics import estimate
from fedstale.traces.arrays import Array

MINUTE_S, SMOOTHED = 60.0, 10
"""Accuracy is read every minute and averaged over the last ten readings."""


def by_minute(at_s: Sequence[float], values: Sequence[float], until_s: float) -> Array:
    """Return values every minute, each averaged over the last ten of these.

    Args:
        at_s: instants from which each value holds, in s; the first at or before 0.
        values: of the same length.
        until_s: end of the readings in s.
    """
    looks = np.arange(0.0, until_s + 1.0, MINUTE_S)
    read = np.array(values)[np.searchsorted(at_s, looks, side="right") - 1]
    sums = np.cumsum(np.concatenate([np.zeros(SMOOTHED), read]))
    count = np.minimum(np.arange(read.size) + 1, SMOOTHED)
    return np.asarray((sums[SMOOTHED:] - sums[: read.size]) / count)


def final(smooth: Array) -> float:
    """Return the mean of the last tenth of some readings."""
    return float(smooth[-(smooth.size // 10) :].mean())


def ratio(base: npt.ArrayLike, values: npt.ArrayLike) -> list[float]:
    """Return how many times the base is of values, paired, with its 95 % interval.

    Returns:
        Geometric mean, and the ends of Student's interval of the mean logarithm; NaN of fewer than
        three pairs.
    """
    found = estimate(np.log(np.asarray(base) / np.asarray(values)).tolist())
    return [float(np.exp(x)) for x in (found.mean, found.low, found.high)]


def difference(base: npt.ArrayLike, values: npt.ArrayLike) -> list[float]:
    """Return how much values are above the base, paired, with the ends of its 95 % interval."""
    found = estimate((np.asarray(values) - np.asarray(base)).tolist())
    return [found.mean, found.low, found.high]
