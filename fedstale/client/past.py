"""What a real device has seen of itself, in the form that forecasters read.

A mod only runs when a message comes, so its past is made of samples: the pace of its own trainings,
how long models took to come, and what was left of the processor. A step of the past without a
sample is unknown, and so is yesterday. The uplink is unknown too: no device sees when its reply has
arrived.
"""

import numpy as np

from fedstale.client.history import History
from fedstale.traces.arrays import Array, Mask
from fedstale.traces.forecast.grid import DAY_S, EDGES_S, RATE_HORIZONS_S, RATES, STEPS
from fedstale.traces.forecast.observation import Observation

# A device that was asked nothing for longer than this may have been away in between.
_LONGEST_SILENCE_S = 1800.0
# What a training wins of a processor that others keep busy; chosen, not measured. Without it, a
# device that is busy but trains would forecast that it never does.
_FAIR_SHARE = 0.5


def observe(history: History, instants: Array, utc_offset_s: float) -> Observation:
    """Return what the device had seen of itself at some instants.

    Rows later than an instant are not seen at it, also if they are there because the clock was set
    back.

    Args:
        history: of the device, with the work of every job.
        instants: in s since 1970, UTC; shape (n,).
        utc_offset_s: local time minus UTC, in s.
    """
    arrived, training_s = history["arrived"], history["training_s"]
    with np.errstate(divide="ignore", invalid="ignore"):
        pace = np.where(training_s > 0, history["work"] / training_s, np.nan)
        carried = 8.0 * history["download_bytes"] / history["travel_s"]
    carried = np.where((history["travel_s"] > 0) & (carried > 0), carried, np.nan)
    when = np.concatenate([history["ready"], arrived])
    compute = np.concatenate([pace, _expected_pace(pace, history["processor_left"])])
    n = instants.size
    unknown = np.full((n, STEPS), np.nan)
    rates = {"compute": _means(when, compute, instants), "downlink": unknown, "uplink": unknown}
    rates["downlink"] = _means(arrived, carried, instants)
    online, since, known_for = _stretch(history, instants)
    return Observation(
        devices=np.zeros(n, dtype=np.int64),
        now=instants,
        history_s=known_for,
        online=online,
        since_s=since,
        time_of_day_s=(instants + utc_offset_s) % DAY_S,
        presence=_means(arrived, history["online"], instants),
        rates=np.stack([rates[name] for name in RATES], axis=1),
        day_ago_online=np.full(n, np.nan),
        day_ago_stayed_s=np.full(n, np.nan),
        day_ago_rates=np.full((n, len(RATES), RATE_HORIZONS_S.size), np.nan),
    )


def _expected_pace(pace: Array, processor_left: Array) -> Array:
    """Return the pace that each reading of the processor lets expect, in work units/s.

    It is the usual pace, as the share that a training gets is to the share that trainings got.

    Args:
        pace: of trainings, NaN for other messages and where unknown; shape (messages,).
        processor_left: share of the processor that was idle, or NaN; same shape.
    """
    share = _FAIR_SHARE + (1.0 - _FAIR_SHARE) * processor_left
    return _median(pace) * share / _median(share[~np.isnan(pace)], default=1.0)


def _median(values: Array, default: float = np.nan) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else default


def _means(when: Array, values: Array, instants: Array) -> Array:
    """Return the mean of the samples in each step before each instant; shape (n, steps)."""
    known = np.isfinite(values) & np.isfinite(when)
    when, values = when[known], values[known]
    result = np.full((instants.size, STEPS), np.nan)
    for row, now in enumerate(instants):
        step = np.searchsorted(EDGES_S, now - when, side="right") - 1
        inside = (step >= 0) & (step < STEPS)
        count = np.bincount(step[inside], minlength=STEPS)
        total = np.bincount(step[inside], weights=values[inside], minlength=STEPS)
        result[row, count > 0] = total[count > 0] / count[count > 0]
    return result


def _stretch(history: History, instants: Array) -> tuple[Mask, Array, Array]:
    """Return whether the device is online, since when, and how long it has been observed, in s."""
    online = np.ones(instants.size, dtype=bool)
    since, known_for = np.zeros(instants.size), np.zeros(instants.size)
    for i, now in enumerate(instants):
        seen = history["arrived"] <= now
        if not seen.any():
            continue
        order = np.argsort(history["arrived"][seen], kind="stable")
        arrived = history["arrived"][seen][order]
        # A device that was sent a message was online, whatever it can read of its link.
        silent = np.flatnonzero(np.diff(arrived) > _LONGEST_SILENCE_S)
        since[i] = now - arrived[silent[-1] + 1 if silent.size else 0]
        known_for[i] = now - arrived[0]
    return online, since, known_for
