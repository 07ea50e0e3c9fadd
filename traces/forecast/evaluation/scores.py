"""Scores of forecasts, and their intervals.

Scores take forecasts and outcomes and return one number for each example, or for each column;
unknown outcomes are NaN and stay so. Intervals come from resampling whole devices: examples of one
device are not independent.

Reference:
    Gneiting, Raftery. Strictly Proper Scoring Rules, Prediction, and Estimation. Journal of the
    American Statistical Association 102(477), 2007.
    Hyndman, Koehler. Another Look at Measures of Forecast Accuracy. International Journal of
    Forecasting 22(4), 2006 (MASE).
"""

import numpy as np
import pandas as pd
from sklearn.metrics import average_precision_score

from fedstale.traces.arrays import Array, Index
from fedstale.traces.forecast.observation import LEVELS

# A wrong probability of exactly 0 or 1 would have an infinite loss.
_LEAST_P = 1e-4
_BINS = 10
_DRAWS = 300


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

    A constant forecast scores the base rate.

    Example:
        >>> round(average_precision(np.array([0.9, 0.8, 0.1]), np.array([1.0, 0.0, 1.0])), 4)
        0.8333
    """
    known = ~np.isnan(happened)
    if happened[known].sum() == 0:
        return float("nan")
    return float(average_precision_score(happened[known], p[known]))


def reliability(p: Array, happened: Array) -> pd.DataFrame:
    """Return how reliable probabilities are, in ten bins of equal width.

    Args:
        p: probabilities; shape (n,).
        happened: 1, 0 or NaN; shape (n,).

    Returns:
        Columns predicted (mean probability), observed (how often it happened) and n; NaN, NaN, 0 in
        an empty bin.
    """
    known = ~np.isnan(happened)
    which = np.minimum((p[known] * _BINS).astype(np.int64), _BINS - 1)
    count = np.bincount(which, minlength=_BINS).astype(np.float64)
    with np.errstate(invalid="ignore"):
        predicted = np.bincount(which, weights=p[known], minlength=_BINS) / count
        observed = np.bincount(which, weights=happened[known], minlength=_BINS) / count
    return pd.DataFrame({"predicted": predicted, "observed": observed, "n": count})


def mean_with_interval(scores: Array, devices: Index) -> tuple[float, float, float]:
    """Return the mean of a score and its 95 % interval, resampling whole devices.

    Args:
        scores: of each example, NaN where unknown; shape (n,).
        devices: device of each example; shape (n,).

    Returns:
        Mean, 2.5 % and 97.5 % quantiles of the resampled mean; NaN where nothing is known.
    """
    known = np.isfinite(scores)
    if not known.any():
        return (float("nan"),) * 3
    _, block = np.unique(devices[known], return_inverse=True)
    total = np.bincount(block, weights=scores[known])
    count = np.bincount(block).astype(np.float64)
    rng = np.random.default_rng(0)
    weights = rng.multinomial(count.size, np.full(count.size, 1.0 / count.size), size=_DRAWS)
    means = (weights @ total) / (weights @ count)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(scores[known].mean()), float(low), float(high)
