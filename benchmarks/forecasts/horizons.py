"""Scores of forecasters at each horizon, with intervals that resample whole devices.

Scores take forecasts and outcomes and return one number for each example, or for each column;
unknown outcomes are NaN and stay so. The chances are scored by Brier scores, their skill and their
calibration; the rates by the pinball loss of their logarithms, and by how often intervals cover.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from fedstale.traces import Array, Index
from fedstale.traces.forecast import HORIZONS_S, RATES, DeviceForecast, Examples, Forecaster
from fedstale.traces.forecast.backtest import (
    blocks,
    brier,
    logs,
    pinball,
    reliability,
    resampled,
)
from fedstale.traces.forecast.observation import RATE_HORIZONS_S

_COLUMNS = ["forecaster", "quantity", "horizon_s", "metric", "value", "low", "high", "n"]


def by_horizon(
    forecasters: Mapping[str, Forecaster], tested: Examples, least: Array
) -> pd.DataFrame:
    """Score forecasters on the horizon grid.

    Args:
        forecasters: fitted ones, by the name in the table.
        tested: examples at rolling origins.
        least: from `least_rates`.

    Returns:
        Columns forecaster, quantity, horizon_s, metric, value, low, high, n.
    """
    rows: list[tuple[object, ...]] = []
    for name, forecaster in forecasters.items():
        forecast = forecaster.forecast(tested.observed)
        rows += _chances(name, forecast, tested)
        rows += _rates(name, forecast, tested, least)
    return pd.DataFrame(rows, columns=_COLUMNS)


def _chances(name: str, forecast: DeviceForecast, tested: Examples) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    online, block = tested.observed.online, blocks(tested.observed)
    for quantity, chosen, chances, outcomes in (
        ("online", online, forecast.survival, tested.survival),
        ("offline", ~online, forecast.survival, tested.survival),
        ("available", np.ones(online.size, dtype=bool), forecast.available, tested.available),
    ):
        for k, horizon in enumerate(HORIZONS_S):
            p, happened = chances[chosen, k], outcomes[chosen, k]
            known = int(np.count_nonzero(~np.isnan(happened)))
            if known == 0:
                continue
            head = (name, quantity, float(horizon))
            rows += scored(head, {"brier": brier(p, happened)}, block[chosen], known)
            for metric, value in (
                ("skill", skill(p, happened)),
                ("ece", calibration_error(p, happened)),
            ):
                rows.append((*head, metric, value, np.nan, np.nan, known))
    return rows


def _rates(
    name: str, forecast: DeviceForecast, tested: Examples, least: Array
) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    truth, predicted = logs(tested.rates, least), logs(forecast.rates, least)
    block = blocks(tested.observed)
    for c, channel in enumerate(RATES):
        for k, horizon in enumerate(RATE_HORIZONS_S):
            y, q = truth[:, c, k], predicted[:, c, k]
            known = int(np.count_nonzero(~np.isnan(y)))
            if known:
                metrics = {"pinball": pinball(q, y), "coverage": covered(q, y)}
                rows += scored((name, channel, float(horizon)), metrics, block, known)
    return rows


def covered(quantiles: Array, truth: Array) -> Array:
    """Score coverage: 1 if the truth lies between the outer quantiles, 0 if not, NaN if unknown."""
    inside = (quantiles[..., 0] <= truth) & (truth <= quantiles[..., -1])
    return np.where(np.isnan(truth), np.nan, inside)


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
