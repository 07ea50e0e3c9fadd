"""Scores of forecasts, and how sure they are.

Each function takes what was said and what happened and returns one number for each example, or for
each column; unknown outcomes are NaN and stay so. Intervals come from resampling whole devices:
examples of one device are not independent.

Reference:
    Gneiting, Raftery. Strictly Proper Scoring Rules, Prediction, and Estimation. Journal of the
    American Statistical Association 102(477), 2007.
    Hyndman, Koehler. Another Look at Measures of Forecast Accuracy. International Journal of
    Forecasting 22(4), 2006 (MASE).
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fedstale.traces.arrays import Array
from fedstale.traces.forecast.grid import LEVELS

# A probability of exactly 0 or 1 that is wrong would cost infinitely much.
_LEAST_P = 1e-4


def pinball(quantiles: Array, truth: Array) -> Array:
    """Return the pinball loss, summed over the levels of the quantiles.

    Args:
        quantiles: shape (..., quantiles).
        truth: shape (...).

    Example:
        >>> pinball(np.array([[1.0, 2.0, 3.0]]), np.array([2.5])).round(3)
        array([0.45])
    """
    miss = truth[..., None] - quantiles
    return np.maximum(LEVELS * miss, (LEVELS - 1.0) * miss).sum(axis=-1)


def covered(quantiles: Array, truth: Array) -> Array:
    """Return 1 where the truth lies between the outer quantiles, 0 where not, NaN if unknown."""
    inside = (quantiles[..., 0] <= truth) & (truth <= quantiles[..., -1])
    return np.where(np.isnan(truth), np.nan, inside)


def brier(p: Array, happened: Array) -> Array:
    """Return the squared error of a probability.

    Example:
        >>> brier(np.array([0.8]), np.array([1.0])).round(2)
        array([0.04])
    """
    return (p - happened) ** 2


def log_loss(p: Array, happened: Array) -> Array:
    """Return minus the logarithm of the probability of what happened; p is kept off 0 and 1."""
    p = np.clip(p, _LEAST_P, 1.0 - _LEAST_P)
    return -(happened * np.log(p) + (1.0 - happened) * np.log1p(-p))


def average_precision(p: Array, happened: Array) -> float:
    """Return the area under the curve of precision against recall; NaN if nothing happened.

    Equal probabilities share one step of the curve, so a constant forecast scores the base rate.

    Example:
        >>> average_precision(np.array([0.9, 0.8, 0.1]), np.array([1.0, 0.0, 1.0])).__round__(4)
        0.8333
    """
    known = ~np.isnan(happened)
    p, happened = p[known], happened[known]
    if happened.sum() == 0:
        return float("nan")
    order = np.argsort(-p, kind="stable")
    hits = np.cumsum(happened[order])
    last = np.append(np.diff(p[order]) != 0, True)
    hits, asked = hits[last], np.flatnonzero(last) + 1.0
    gained = np.diff(hits, prepend=0.0)
    return float((gained * hits / asked).sum() / hits[-1])


def reliability(p: Array, happened: Array, *, bins: int = 10) -> Array:
    """Return, for bins of equal width, the mean probability, how often it happened, and the count.

    Args:
        p: probabilities; shape (n,).
        happened: 1, 0 or NaN; shape (n,).
        bins: number of bins.

    Returns:
        Shape (bins, 3); NaN, NaN, 0 in an empty bin.
    """
    known = ~np.isnan(happened)
    which = np.minimum((p[known] * bins).astype(np.int64), bins - 1)
    count = np.bincount(which, minlength=bins).astype(np.float64)
    with np.errstate(invalid="ignore"):
        said = np.bincount(which, weights=p[known], minlength=bins) / count
        came = np.bincount(which, weights=happened[known], minlength=bins) / count
    return np.stack([said, came, count], axis=1)


def mean_with_interval(
    scores: Array, devices: npt.NDArray[np.int64], *, seed: int = 0, draws: int = 300
) -> tuple[float, float, float]:
    """Return the mean of a score and its 95 % interval, resampling whole devices.

    Args:
        scores: of each example, NaN where unknown; shape (n,).
        devices: whose example it is; shape (n,).
        seed: of the resampling.
        draws: number of resamples.

    Returns:
        Mean, 2.5 % and 97.5 % quantiles of the resampled mean; NaN where nothing is known.
    """
    known = np.isfinite(scores)
    if not known.any():
        return (float("nan"),) * 3
    _, block = np.unique(devices[known], return_inverse=True)
    total = np.bincount(block, weights=scores[known])
    count = np.bincount(block).astype(np.float64)
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(count.size, np.full(count.size, 1.0 / count.size), size=draws)
    means = (weights @ total) / (weights @ count)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(scores[known].mean()), float(low), float(high)


def per_device(
    scores: Array, devices: npt.NDArray[np.int64], reduce: Callable[[Array], float]
) -> Array:
    """Return a summary of the scores of each device that has any; shape (devices with any,)."""
    known = np.isfinite(scores)
    order = np.argsort(devices[known], kind="stable")
    owner, sorted_scores = devices[known][order], scores[known][order]
    starts = np.flatnonzero(np.diff(owner, prepend=-1))
    return np.array([reduce(part) for part in np.split(sorted_scores, starts[1:])])
