"""The statistics that recorded and generated devices should share, beside those of the package.

Large sets are looked at through a sample of evenly spaced devices.
"""

from collections.abc import Sequence

import numpy as np

from fedstale.traces.arrays import DAY_S, Array, Index
from fedstale.traces.availability import Availability
from fedstale.traces.series import Series
from fedstale.traces.synthetic.marginals import (
    STEP_S,
    Marginal,
    looked_at_s,
    plain,
    quantiles,
    spread,
)
from fedstale.traces.synthetic.marginals import availability_marginal as of_package

LINK_LAGS_S = (1, 10, 60)
ONLINE_LAGS_S = (1800.0, 7200.0, DAY_S, 3 * DAY_S)
"""Lags of the autocorrelation of being online, in s, to which a cycle of a week adds a week."""
LOAD_LAGS = (1, 3, 12)
OUTAGE = 0.01
"""Share of a link's median rate below which it counts as out."""
_WEEK_S = 7 * DAY_S
_MOST_DEVICES, _MOST_LINKS = 4000, 300
_MOST_INSTANTS = 10_000
_PLACES_A_LINK = 600


def availability_marginal(
    traces: Availability, *, epoch_s: float = 0.0, cycle_s: float = DAY_S
) -> Marginal:
    """Describe how devices come and go, as `fedstale.traces.synthetic.marginals` does.

    Args:
        traces: the devices.
        epoch_s: time of the cycle at instant 0, in s.
        cycle_s: a day or a week, in s.

    Returns:
        The same, and `autocorrelation` (of being online, around the mean of all, at those of
        `ONLINE_LAGS_S` that logs reach).
    """
    lags_s = (*ONLINE_LAGS_S, *([_WEEK_S] if cycle_s == _WEEK_S else []))
    devices, end = spread(traces.n_devices, _MOST_DEVICES), looked_at_s(traces, cycle_s)
    found = of_package(traces, epoch_s=epoch_s, cycle_s=cycle_s)
    return {**found, "autocorrelation": persistence(traces, devices, end, lags_s)}


def persistence(
    traces: Availability, devices: Index, end: float, lags_s: Sequence[float]
) -> list[float]:
    """Return the autocorrelation of being online, around the mean of all, at lags logs reach.

    Args:
        traces: the devices.
        devices: positions of those to look at; shape (n,).
        end: instant up to which to look, in s.
        lags_s: in s, rising.
    """
    step_s = max(3 * STEP_S, end / _MOST_INSTANTS)
    who, when = (x.ravel() for x in np.meshgrid(devices, np.arange(STEP_S, end, step_s)))
    start, last = traces.log_at(who, when)
    who, when, last = who[start < last], when[start < last], last[start < last]
    online = traces.is_available(who, when).astype(np.float64)
    mean, found = online.mean(), []
    for lag in lags_s:
        known = when + lag < last
        later = traces.is_available(who[known], when[known] + lag)
        if later.size == 0 or online.var() == 0:
            break
        products = (online[known] - mean) * (later - mean)
        found.append(products.mean() / online.var())
    return plain(np.array(found))


def link_marginal(traces: Series) -> Marginal:
    """Return how fast links are, each link counting alike.

    Returns:
        `bit_per_s` (quantiles over links and time), `relative` (the same of the rate divided by
        the link's median), `out` (share of time below 1 % of the link's
        median), `autocorrelation` (of the logarithm of the rate within a link, at `LINK_LAGS_S`).
    """
    rates, relative, lagged = [], [], []
    for device in spread(traces.n_devices, _MOST_LINKS):
        length = min(float(traces.lengths[traces.rows[device]]), 7200.0, traces.until)
        grid = np.arange(0.5, max(length, 1.0))
        one = traces.value_at(np.full(grid.size, device), grid)
        middle = float(np.median(one[one > 0])) if (one > 0).any() else 1.0
        # Links of different length are weighted to count alike.
        rates.append(np.resize(one[spread(one.size, _PLACES_A_LINK)], _PLACES_A_LINK))
        relative.append(rates[-1] / middle)
        if one.size >= 10 * max(LINK_LAGS_S):
            lagged.append(autocorrelation(np.log(np.maximum(one / middle, OUTAGE)), LINK_LAGS_S))
    below = np.concatenate(relative) < OUTAGE
    return {
        "bit_per_s": quantiles(np.concatenate(rates)),
        "relative": quantiles(np.concatenate(relative)),
        "out": float(round(below.mean(), 5)),
        "autocorrelation": plain(np.mean(lagged, axis=0)) if lagged else [],
    }


def load_marginal(traces: Series) -> Marginal:
    """Return how busy processors are, from rows that hold the share left over.

    Returns:
        `load` (quantiles over processors and time) and `autocorrelation` (at `LOAD_LAGS` steps,
        around the mean of all).
    """
    rows = []
    for row in spread(traces.lengths.size, _MOST_DEVICES):
        _, left = traces.row_segments(row)
        rows.append(1.0 - left)
    pooled = np.concatenate(rows)
    lagged = [
        [(x[:-k] * x[k:]).mean() for k in LOAD_LAGS] for x in (r - pooled.mean() for r in rows)
    ]
    return {
        "load": quantiles(pooled),
        "autocorrelation": plain(np.mean(lagged, axis=0) / max(pooled.var(), 1e-12)),
    }


def speed_marginal(work_per_s: Array) -> Marginal:
    """Return quantiles of the speeds of idle devices, in work units/s."""
    return {"work_per_s": quantiles(work_per_s)}


def autocorrelation(x: Array, lags: Sequence[int]) -> Array:
    """Return the autocorrelation of a series around its own mean, at each lag."""
    x = x - x.mean()
    return np.array([(x[:-k] * x[k:]).mean() / max((x * x).mean(), 1e-12) for k in lags])
