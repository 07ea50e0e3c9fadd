"""Estimating a generated population from recordings, and the statistics that both should share.

Each part is fitted by the module that draws it. A marginal is what recorded and generated devices
are compared and described by: plain numbers in plain dictionaries, ready for TOML, JSON or a table.
Large sets are looked at through a sample of evenly spaced devices. Nothing is tuned by hand.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
import pandas as pd

from fedstale.errors import TraceError
from fedstale.traces import DAY_S, Array, Availability, Index, Series, TraceSet, rounded
from fedstale.traces.synthetic import diurnal
from fedstale.traces.synthetic import links as regimes
from fedstale.traces.synthetic import load as background_model
from fedstale.traces.synthetic.diurnal import WEEK_S
from fedstale.traces.synthetic.population import Links, Population

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Levels of the quantiles of marginals."""
LINK_LAGS_S = (1, 10, 60)
ONLINE_LAGS_S = (1800.0, 7200.0, DAY_S, 3 * DAY_S)
"""Lags of the autocorrelation of being online, in s, to which a cycle of a week adds a week."""
LOAD_LAGS = (1, 3, 12)
_CLASSES = 10
_MOST_PROCESSORS = 4000
_MOST_DEVICES = 4000
_MOST_LINKS = 300
_MOST_INSTANTS = 10_000
_STEP_S = 600.0
_PLACES_A_LINK = 600
_LEAST_LINK_S = 100

Marginal: TypeAlias = dict[str, float | list[float]]


def fit(
    *,
    availability: TraceSet,
    network: Sequence[TraceSet],
    background: TraceSet,
    compute: TraceSet,
    cycle: Literal["day", "week"] = "day",
) -> tuple[Population, dict[str, Marginal]]:
    """Return the population that recordings come from, and the marginals that it should have.

    Args:
        availability: devices that come and go, in records of whole days.
        network: sets of links; all their downlinks count, and at least one set must know the
            uplinks too. Links that are constant are drawn constant.
        background: processors, with the share that is left of them, on a regular grid.
        compute: constant speeds of devices.
        cycle: whether devices keep hours of the day, or of the week.

    Returns:
        Parameters for `TraceSet.synthetic`, and the recordings' marginals by part: availability,
        downlink, uplink, background and speed.

    Raises:
        TraceError: a recording does not know what it is asked for, or holds too little.
    """
    online, left = availability.channel("availability"), background.channel("compute")
    speeds = compute.channel("compute").value_at(np.arange(compute.n_devices), 0.0)
    if speeds.min() <= 0:
        raise TraceError("compute to fit: a device has speed 0; leave it out")
    if compute.compute_unit is None:
        raise TraceError(
            "compute to fit: compute_unit is missing: expected what one unit of work is"
        )
    if left.step_s is None:
        raise TraceError("background to fit: expected loads on a regular grid")
    cycle_s = {"day": DAY_S, "week": WEEK_S}.get(cycle)
    if cycle_s is None:
        raise TraceError(f"cycle = {cycle!r}: expected 'day' or 'week'")
    if cycle_s == WEEK_S and availability.epoch is None:
        raise TraceError("availability to fit: knows no calendar time, so no weekdays")
    weekday = 0 if availability.epoch is None else pd.Timestamp(availability.epoch).weekday()
    links, epoch_s = _grids(network), availability.midnight_s or 0.0
    epoch_s += weekday * DAY_S * (cycle_s == WEEK_S)
    classes = np.array_split(np.sort(speeds), min(_CLASSES, speeds.size))
    some = _spread(left.n_devices, _MOST_PROCESSORS)
    loads = [1.0 - left.segments(int(device))[1] for device in some]
    population = Population(
        availability=diurnal.fit(online, epoch_s, cycle_s=cycle_s),
        links=_fit_links(links),
        background=background_model.fit(loads, left.step_s),
        # The geometric mean of a class: speeds differ by factors.
        speed=rounded(np.array([np.exp(np.log(c).mean()) for c in classes]), 5),
        compute_unit=compute.compute_unit,
    )
    uplinks = [up for _, up in links if up is not None]
    return population, {
        "availability": availability_marginal(online, epoch_s=epoch_s, cycle_s=cycle_s),
        "downlink": link_marginal(Series.regular([down for down, _ in links], step_s=1.0)),
        "uplink": link_marginal(Series.regular(uplinks, step_s=1.0)),
        "background": load_marginal(left),
        "speed": speed_marginal(speeds),
    }


def availability_marginal(
    traces: Availability, *, epoch_s: float = 0.0, cycle_s: float = DAY_S
) -> Marginal:
    """Return how devices come and go.

    Args:
        traces: the devices.
        epoch_s: time of the cycle at instant 0, in s.
        cycle_s: a day, of which no more than a week is looked at, or a week, in s.

    Returns:
        `hourly` (mean share of devices online, for each hour of the cycle), `share` (quantiles,
        over devices, of the share of time they are online), both of the time in which they were
        logged, `never` (share of devices that never are),
        `autocorrelation` (of being online, around the mean of all, at those of `ONLINE_LAGS_S`
        that logs reach), `session_s` and `gap_s` (quantiles of lengths of windows, and of gaps
        inside records; a window that never ends has no length).
    """
    devices = _spread(traces.n_devices, _MOST_DEVICES)
    end = float(traces.lengths.max())
    # A short record that repeats still says something about every hour of a day.
    is_week = cycle_s == WEEK_S
    end = min(max(end, cycle_s) if traces.repeat else end, traces.until)
    end = end if is_week else min(end, 7 * DAY_S)
    by_hour = np.zeros((2, round(cycle_s / 3600)))
    online_s, logged_s = np.zeros((2, devices.size))
    step_s = min(_STEP_S * (3 if is_week else 1), end / 10)
    for t in np.arange(step_s / 2, end, step_s):
        logged = np.less(*traces.log_at(devices, t))
        online = traces.is_available(devices, t) & logged
        by_hour[:, int((t + epoch_s) % cycle_s // 3600)] += online.sum(), logged.sum()
        online_s += online
        logged_s += logged
    seen = logged_s > 0
    owner, starts, ends = traces.sessions(devices)
    endless = (ends - starts == traces.record_s()[devices][owner]) & traces.repeat
    # What lies between two windows is known if no gap of the log does.
    follows = owner[1:] == owner[:-1]
    if traces.gap_starts.size:
        at = np.mod(starts - traces.shifts[devices[owner]], traces.record_s()[devices[owner]])
        known_since, _ = traces.log_at(devices[owner], at)
        follows &= (at - known_since)[1:] >= (starts[1:] - ends[:-1])
    gaps = (starts[1:] - ends[:-1])[follows]
    counts = np.bincount(owner, minlength=devices.size)
    return {
        "hourly": _plain(by_hour[0] / np.maximum(by_hour[1], 1)),
        "share": _quantiles(online_s[seen] / logged_s[seen]),
        "never": float(round((counts == 0).mean(), 5)),
        "autocorrelation": persistence(
            traces, devices, end, (*ONLINE_LAGS_S, *([WEEK_S] if is_week else []))
        ),
        "session_s": _quantiles((ends - starts)[~endless]),
        "gap_s": _quantiles(gaps),
    }


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
    step_s = max(3 * _STEP_S, end / _MOST_INSTANTS)
    who, when = (x.ravel() for x in np.meshgrid(devices, np.arange(_STEP_S, end, step_s)))
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
    return _plain(np.array(found))


def link_marginal(traces: Series) -> Marginal:
    """Return how fast links are, each link counting alike.

    Returns:
        `bit_per_s` (quantiles over links and time), `relative` (the same of the rate divided by
        the link's median), `out` (share of time below 1 % of the link's
        median), `autocorrelation` (of the logarithm of the rate within a link, at `LINK_LAGS_S`).
    """
    rates, relative, lagged = [], [], []
    for device in _spread(traces.n_devices, _MOST_LINKS):
        length = min(float(traces.lengths[traces.rows[device]]), 7200.0, traces.until)
        grid = np.arange(0.5, max(length, 1.0))
        one = traces.value_at(np.full(grid.size, device), grid)
        middle = float(np.median(one[one > 0])) if (one > 0).any() else 1.0
        # Links of different length are weighted to count alike.
        rates.append(np.resize(one[_spread(one.size, _PLACES_A_LINK)], _PLACES_A_LINK))
        relative.append(rates[-1] / middle)
        if one.size >= 10 * max(LINK_LAGS_S):
            lagged.append(
                regimes.autocorrelation(np.log(np.maximum(one / middle, 0.01)), LINK_LAGS_S)
            )
    below = np.concatenate(relative) < 0.01
    return {
        "bit_per_s": _quantiles(np.concatenate(rates)),
        "relative": _quantiles(np.concatenate(relative)),
        "out": float(round(below.mean(), 5)),
        "autocorrelation": _plain(np.mean(lagged, axis=0)) if lagged else [],
    }


def load_marginal(traces: Series) -> Marginal:
    """Return how busy processors are, from rows that hold the share left over.

    Returns:
        `load` (quantiles over processors and time) and `autocorrelation` (at `LOAD_LAGS` steps,
        around the mean of all).
    """
    rows = []
    for row in _spread(traces.lengths.size, _MOST_DEVICES):
        _, left = traces.row_segments(row)
        rows.append(1.0 - left)
    pooled = np.concatenate(rows)
    lagged = [
        [(x[:-k] * x[k:]).mean() for k in LOAD_LAGS] for x in (r - pooled.mean() for r in rows)
    ]
    return {
        "load": _quantiles(pooled),
        "autocorrelation": _plain(np.mean(lagged, axis=0) / max(pooled.var(), 1e-12)),
    }


def speed_marginal(work_per_s: Array) -> Marginal:
    """Return quantiles of the speeds of idle devices, in work units/s."""
    return {"work_per_s": _quantiles(work_per_s)}


def _spread(n: int, most: int) -> Index:
    return np.unique(np.linspace(0, n - 1, min(n, most)).astype(np.int64))


def _quantiles(x: Array) -> list[float]:
    return _plain(np.quantile(x, LEVELS)) if x.size else []


def _plain(x: Array) -> list[float]:
    return list(rounded(x, 5))


def _fit_links(links: Sequence[tuple[Array, Array | None]]) -> Links:
    middle = np.log([regimes.median_of(down) for down, _ in links])
    both = [(down, up) for down, up in links if up is not None]
    if len(both) < 2 or len(links) < 2:
        raise TraceError("network to fit: expected at least 2 links that know their uplink too")
    share = np.log([regimes.median_of(up) / regimes.median_of(down) for down, up in both])
    of_both = [moment for x in (middle, share) for moment in (x.mean(), x.std(ddof=1))]
    mean, sd, share_mean, share_sd = rounded(np.array(of_both), 6)
    return Links(
        median_log=mean,
        median_log_sd=sd,
        uplink_share_log=share_mean,
        uplink_share_log_sd=share_sd,
        downlink=regimes.fit([down for down, _ in links]),
        uplink=regimes.fit([up for _, up in both]),
    )


def _grids(network: Sequence[TraceSet]) -> list[tuple[Array, Array | None]]:
    """Return downlink and, where it is known, uplink of each link, one rate a second."""
    links: list[tuple[Array, Array | None]] = []
    for traces in network:
        downlink = traces.channel("downlink")
        for device in range(traces.n_devices):
            up = None if traces.uplink is None else _grid(traces.uplink, device)
            links.append((_grid(downlink, device), up))
    if not links:
        raise TraceError("network to fit: expected at least one set of links")
    return links


def _grid(series: Series, device: int) -> Array:
    # What is constant has a row of one second that repeats.
    seconds = np.arange(max(np.floor(series.lengths[series.rows[device]]), _LEAST_LINK_S))
    return series.value_at(np.full(seconds.size, device), seconds + 0.5)
