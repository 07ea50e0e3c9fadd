"""Tests whether stated chances hold, which may be looked at after every outcome.

Someone bets on each outcome at the odds that the forecaster has stated, and never more than there
is. If the chances hold, no betting grows wealth in the mean, and by Ville's inequality it reaches
1000 at any time with a chance of at most 1 in 1000. So wealth is an e-value: it may be looked at
whenever one likes, and a test that ends when it is large is still valid. It says that chances do
not hold, and not why: an honest forecaster may be miscalibrated.

Reference:
    Ville. Etude critique de la notion de collectif. Gauthier-Villars, 1939.
    Arnold, Henzi, Ziegel. Sequentially Valid Tests for Forecast Calibration. Annals of Applied
    Statistics 17(3), 2023.
    Waudby-Smith, Ramdas. Estimating Means of Bounded Random Variables by Betting. JRSS B 86(1),
    2024.
"""

from math import log

import numpy as np

from fedstale.traces import Array, Index, Mask

ALARM = 1000.0
"""E-value of an alarm: that of who is honest ever gets so large with a chance of 1 in 1000."""

WAYS = ("over", "under", "short")
"""How statements may fail: chances that are too high or too low, durations that are too short."""

SURE = 0.01
"""A stated chance within this of 1 counts as this far from it: one failure convicts nobody."""

_SHIFTS = (0.5, 1.0, 2.0, 4.0)
"""How much lower the logit of the true chance may be than that of the stated one."""


def log_e_values(p: Array, kept: Array, in_time: Array, owner: Index) -> tuple[Array, Array]:
    """Return the logarithms of e-values against what owners state, after each outcome.

    Durations are tested for being too short alone: jobs that are interrupted have none, and long
    ones are interrupted more often, so half of those that arrive, or more, keep an honest median.

    Args:
        p: stated chances in [0, 1], NaN where none was stated; shape (n,).
        kept: outcomes as of `log_wealth`; shape (n,).
        in_time: whether a job took at most its stated duration, 1 or 0; NaN where none was stated
            or nothing arrived; shape (n,).
        owner: as of `log_wealth`; shape (n,).

    Returns:
        E-values for each of `WAYS`, shape (3, n), and their mean, which is an e-value too; (n,).
    """
    half = np.where(np.isnan(in_time), np.nan, 0.5)
    each = np.stack(
        [
            log_wealth(p, kept, owner),
            log_wealth(1.0 - p, 1.0 - kept, owner),
            log_wealth(half, in_time, owner),
        ]
    )
    mean: Array = np.logaddexp.reduce(each, axis=0) - log(len(WAYS))
    return each, mean


def log_wealth(p: Array, kept: Array, owner: Index) -> Array:
    """Return the logarithm of the wealth after each outcome of bets that chances are too high.

    Wealth starts as 1 for each owner, and is the mean over five bettors. Four hold that the true
    chance has a logit that is lower by 0.5, 1, 2 or 4; the fifth that it is the share of what the
    owner has kept so far (with half a success and half a failure added), where that is less than p.
    It does not grow in the mean if the chance of each outcome, given those before, is p or more.
    With 1 - p and 1 - kept it tests whether chances are too low.

    Args:
        p: stated chances in [0, 1], each before its outcome; NaN where nobody bets; shape (n,).
        kept: outcomes, 1 or 0; NaN where none is known, which counts as whatever of the two leaves
            a bettor less.
        owner: whose chance it is; the outcomes of each owner are together, in their order.

    Returns:
        Shape (n,).

    Example:
        >>> certain = np.full(3, 1.0)
        >>> np.exp(log_wealth(certain, np.array([1.0, 1.0, 0.0]), np.zeros(3, np.int64))).round(1)
        array([0.8, 0.7, 6.4])
    """
    if not p.size:
        return np.zeros(0)
    first = np.append(True, owner[1:] != owner[:-1])
    p = np.minimum(p, 1.0 - SURE)
    tilts = np.exp(_SHIFTS)[:, np.newaxis]
    spread = p + (1.0 - p) * tilts
    known = ~np.isnan(kept) & ~np.isnan(p)
    successes = _before(np.where(known, kept, 0.0), first)
    share = np.minimum((successes + 0.5) / (_before(known, first) + 1.0), p)
    # Of a chance of 0 nobody can hold that it is too high.
    of_share = np.divide(share, p, out=np.ones_like(p), where=p > 0.0)
    if_kept = np.concatenate([1.0 / spread, of_share[np.newaxis]])
    if_not = np.concatenate([tilts / spread, ((1.0 - share) / (1.0 - p))[np.newaxis]])
    # Every bettor holds that a chance is too high, so it is success that leaves less.
    factors = np.where(kept == 0.0, if_not, if_kept)
    wealth = _since(np.log(np.where(np.isnan(p), 1.0, factors)), first)
    most = wealth.max(axis=0)
    found: Array = most + np.log(np.exp(wealth - most).mean(axis=0))
    return found


def _since(values: Array, first: Mask) -> Array:
    """Return the sum of values from the first of each owner on, along the last axis."""
    total = np.cumsum(values, axis=-1)
    starts = np.flatnonzero(first)
    before = np.take(total - values, starts, axis=-1)
    found: Array = total - np.repeat(before, np.diff(np.append(starts, first.size)), axis=-1)
    return found


def _before(values: Array | Mask, first: Mask) -> Array:
    """Return the sum of an owner's values before each."""
    return _since(values.astype(np.float64), first) - values
