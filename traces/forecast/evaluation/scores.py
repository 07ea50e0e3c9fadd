"""Scores of forecasts, and the intervals of their means.

Scores take forecasts and outcomes and return one number for each example, or for each column;
unknown outcomes are NaN and stay so. Errors of rates are differences of logarithms, which need no
unit and are the errors of times with the sign turned. Intervals come from resampling whole devices:
examples of one device are not independent. Fewer than five devices are resampled by their days.

Reference:
    Gneiting, Raftery. Strictly Proper Scoring Rules, Prediction, and Estimation. Journal of the
    American Statistical Association 102(477), 2007.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from fedstale.traces import DAY_S, Array, Index
from fedstale.traces.forecast.base import LEAST_RATE
from fedstale.traces.forecast.dataset import FEW, Examples
from fedstale.traces.forecast.observation import LEVELS, Observation

# A wrong probability of exactly 0 or 1 would have an infinite loss.
_LEAST_P = 1e-4
_BINS = 10
_DRAWS = 300


def least_rates(training: Examples) -> Array:
    """Return a thousandth of the fleet's median rate of each channel; shape (3,).

    Lower rates are scored as this: differences between dead links do not matter, and their
    logarithms would be most of every mean.
    """
    rates = training.rates
    known = [r[~np.isnan(r)] for r in np.moveaxis(rates, 1, 0)]
    return np.array([1e-3 * np.median(r) if r.size else LEAST_RATE for r in known])


def logs(rates: Array, least: Array) -> Array:
    """Return logarithms of rates, none below the least; the channel is the second axis."""
    return np.log(np.maximum(rates, least.reshape(1, -1, *[1] * (rates.ndim - 2))))


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
    """Score coverage: 1 if the truth lies between the outer quantiles, 0 if not, NaN if unknown."""
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


def skill(p: Array, happened: Array) -> float:
    """Compute the Brier skill over the base rate of this test.

    It is 1 minus the ratio of their Brier scores; NaN where all or nothing happened.

    Example:
        >>> round(skill(np.array([0.8, 0.2, 0.5]), np.array([1.0, 0.0, np.nan])), 2)
        0.84
    """
    known = ~np.isnan(happened)
    base = float(np.var(happened[known])) if known.any() else 0.0
    return 1.0 - float(np.mean(brier(p, happened)[known])) / base if base > 0 else float("nan")


def calibration_error(p: Array, happened: Array) -> float:
    """Return the expected calibration error, in ten bins of equal width.

    Reference:
        Naeini, Cooper, Hauskrecht. Obtaining Well Calibrated Probabilities Using Bayesian Binning.
        AAAI 2015.

    Example:
        >>> round(calibration_error(np.full(4, 0.5), np.array([1.0, 1.0, 1.0, 0.0])), 2)
        0.25
    """
    bins = reliability(p, happened)
    bins = bins[bins["n"] > 0]
    miss = (bins["predicted"] - bins["observed"]).abs()
    return float((miss * bins["n"]).sum() / bins["n"].sum())


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


def blocks(observed: Observation) -> Index:
    """Return a number for what is resampled as a whole: a device, or of few devices a day of one.

    Args:
        observed: the examples.
    """
    devices, days = observed.devices, np.floor(observed.now / DAY_S).astype(np.int64)
    if np.unique(devices).size >= FEW:
        return devices
    return devices * (days.max(initial=0) + 1) + days


def resampled(n: int) -> Array:
    """Return how often each of n blocks is drawn in each of some samples; shape (samples, n)."""
    weights = np.random.default_rng(0).multinomial(n, np.full(n, 1.0 / n), size=_DRAWS)
    return weights.astype(np.float64)


def mean_with_interval(scores: Array, blocks: Index) -> tuple[float, float, float]:
    """Return the mean of a score and its 95 % interval, resampling whole blocks.

    Args:
        scores: of each example, NaN where unknown; shape (n,).
        blocks: block of each example, such as its device; shape (n,).

    Returns:
        Mean, 2.5 % and 97.5 % quantiles of the resampled mean; NaN where nothing is known.
    """
    known = np.isfinite(scores)
    if not known.any():
        return (float("nan"),) * 3
    _, block = np.unique(blocks[known], return_inverse=True)
    total, count = np.bincount(block, weights=scores[known]), np.bincount(block)
    weights = resampled(count.size)
    means = (weights @ total) / (weights @ count)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(scores[known].mean()), float(low), float(high)


def scored(
    head: tuple[object, ...], metrics: Mapping[str, Array], blocks: Index, n: int
) -> list[tuple[object, ...]]:
    """Return rows of a table: what is scored, the metric, its mean with interval, and n."""
    return [
        (*head, metric, *mean_with_interval(score, blocks), n) for metric, score in metrics.items()
    ]
