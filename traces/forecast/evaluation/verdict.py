"""Whether a forecaster pays: its share of the loss of persistence, and a sentence on it.

The loss of a quantity is the Brier score of being online later, or the pinball loss of the
logarithm of a rate, over all horizons. The share is the geometric mean, over the quantities, of the
forecaster's loss divided by that of persistence; what persistence foresees is left out.
"""

from collections.abc import Mapping
from math import ceil
from typing import Literal

import numpy as np
import pandas as pd

from fedstale.traces import Array, Index
from fedstale.traces.forecast.base import Forecaster
from fedstale.traces.forecast.baselines import Persistence
from fedstale.traces.forecast.dataset import TURN_SHARE, Examples
from fedstale.traces.forecast.evaluation import scores
from fedstale.traces.forecast.observation import RATES

LEAST_BLOCKS = 5
"""Devices, or days of fewer devices, that a forecaster is judged by at least."""
_FORESEEN = 1e-6
"""Loss of an example up to which there was nothing to forecast."""
_QUANTITIES = ("available", *RATES)


def against_persistence(
    forecasters: Mapping[str, Forecaster], tested: Examples, usual: Persistence, least: Array
) -> pd.DataFrame:
    """Return which share of persistence's loss each forecaster has, the smallest first.

    Args:
        forecasters: fitted ones, by name; persistence is left out.
        tested: examples at rolling origins.
        usual: persistence, fitted on the same examples.
        least: from `least_rates`.

    Returns:
        Columns forecaster, share, its 95 % interval low and high, blocks (devices or days that it
        resamples, for both forecasters the same), and the share of each quantity, NaN where there
        was nothing to forecast.
    """
    _, block = np.unique(scores.blocks(tested.observed), return_inverse=True)
    n = int(block.max()) + 1
    weights = np.concatenate([np.ones((1, n)), scores.resampled(n)])
    of_usual = weights @ _sums(usual, tested, least, block)
    something = of_usual > _FORESEEN * len(tested)
    rows = []
    for name, forecaster in forecasters.items():
        if isinstance(forecaster, Persistence):
            continue
        own = weights @ _sums(forecaster, tested, least, block)
        shares = np.divide(own, of_usual, out=np.full(own.shape, np.nan), where=something)
        # A draw without anything to forecast of a quantity says nothing of it.
        known = np.where(np.isnan(shares), shares[0], shares)[:, something[0]]
        if known.size:
            with np.errstate(divide="ignore"):
                means = np.exp(np.log(known).mean(axis=1))
            low, high = np.quantile(means[1:], [0.025, 0.975])
            rows.append((name, means[0], low, high, n, *shares[0]))
    columns = ["forecaster", "share", "low", "high", "blocks", *_QUANTITIES]
    return pd.DataFrame(rows, columns=columns).sort_values("share", ignore_index=True)


def _sums(forecaster: Forecaster, tested: Examples, least: Array, block: Index) -> Array:
    """Return the sum of each quantity's losses over each block; shape (blocks, 4)."""
    forecast = forecaster.forecast(tested.observed)
    chances = scores.brier(forecast.available, tested.available)
    rates = scores.pinball(scores.logs(forecast.rates, least), scores.logs(tested.rates, least))
    losses = np.column_stack([np.nansum(chances, axis=1), np.nansum(rates, axis=2)])
    return np.stack([np.bincount(block, weights=each) for each in losses.T], axis=1)


def judged(low: float, high: float, blocks: int) -> Literal["better", "level", "worse", "unknown"]:
    """Return how a forecaster is against persistence, by the interval of its share of the loss.

    Example:
        >>> judged(0.79, 0.86, 40), judged(0.95, 1.03, 40), judged(1.02, 1.2, 40)
        ('better', 'level', 'worse')
        >>> judged(0.79, 0.86, 3)
        'unknown'
    """
    if blocks < LEAST_BLOCKS:
        return "unknown"
    return "better" if high < 1.0 else "worse" if low > 1.0 else "level"


def verdict(table: pd.DataFrame) -> str:
    """Return whether the best forecaster pays, in a sentence; nothing if none was scored.

    Args:
        table: from `against_persistence`.
    """
    if table.empty:
        return ""
    name, share, low, high, n = table.iloc[0][["forecaster", "share", "low", "high", "blocks"]]
    loss = f"{share:.2f} of persistence's loss"
    match judged(low, high, n):
        case "better":
            return f"{name} has {loss} [{low:.2f}, {high:.2f}]: use it."
        case "worse":
            return f"{name} has {loss} [{low:.2f}, {high:.2f}]: use persistence."
        case "level":
            interval = f"{loss} [{low:.2f}, {high:.2f}]"
            return f"{name} is level with persistence here, with {interval}: use persistence."
    more = ceil((LEAST_BLOCKS - n) / (1.0 - TURN_SHARE))
    return (
        f"{name} has {loss} on {n} days, too few to tell: use persistence, or record {more} days "
        "more."
    )
