"""How devices come and go, in a few numbers that describe and compare sets of them.

A marginal is plain numbers in a plain dictionary, ready for TOML, JSON or a table. Large sets are
looked at through a sample of evenly spaced devices.
"""

from typing import TypeAlias

import numpy as np

from fedstale.traces import DAY_S, Array, Availability, Index, rounded

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Levels of the quantiles of marginals."""
STEP_S = 600.0
"""Time between two looks at a day, in s."""
_WEEK_S = 7 * DAY_S
_MOST_DEVICES = 4000

Marginal: TypeAlias = dict[str, float | list[float]]


def availability_marginal(
    traces: Availability, *, epoch_s: float = 0.0, cycle_s: float = DAY_S
) -> Marginal:
    """Describe how devices come and go.

    Args:
        traces: the devices.
        epoch_s: time of the cycle at instant 0, in s.
        cycle_s: a day, of which no more than a week is looked at, or a week, in s.

    Returns:
        `hourly` (mean share of devices online, for each hour of the cycle), `share` (quantiles,
        over devices, of the share of time they are online), both of the time in which they were
        logged, `never` (share of devices that never are), `session_s` and `gap_s` (quantiles of
        lengths of windows, and of gaps inside records; a window that never ends has no length).
    """
    devices = spread(traces.n_devices, _MOST_DEVICES)
    end = looked_at_s(traces, cycle_s)
    by_hour = np.zeros((2, round(cycle_s / 3600)))
    online_s, logged_s = np.zeros((2, devices.size))
    step_s = min(STEP_S * (3 if cycle_s == _WEEK_S else 1), end / 10)
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
        "hourly": plain(by_hour[0] / np.maximum(by_hour[1], 1)),
        "share": quantiles(online_s[seen] / logged_s[seen]),
        "never": float(round((counts == 0).mean(), 5)),
        "session_s": quantiles((ends - starts)[~endless]),
        "gap_s": quantiles(gaps),
    }


def looked_at_s(traces: Availability, cycle_s: float) -> float:
    """Return up to which instant devices are looked at, in s."""
    end = float(traces.lengths.max())
    # A short record that repeats still says something about every hour of a day.
    end = min(max(end, cycle_s) if traces.repeat else end, traces.until)
    return end if cycle_s == _WEEK_S else min(end, _WEEK_S)


def spread(n: int, most: int) -> Index:
    """Return at most so many positions of n, evenly spaced."""
    return np.unique(np.linspace(0, n - 1, min(n, most)).astype(np.int64))


def quantiles(x: Array) -> list[float]:
    """Return the quantiles at `LEVELS`; none of nothing."""
    return plain(np.quantile(x, LEVELS)) if x.size else []


def plain(x: Array) -> list[float]:
    """Return numbers to five digits, as files hold them."""
    return list(rounded(x, 5))
