"""From the processes that a forecaster predicts to what a server asks: times of a job, and whether.

An outlook holds, for each device, the probability to remain online on a grid of horizons, and
quantiles of what its processor and links will carry. A job takes longer than h exactly if less than
its amount is carried within h, so the q-quantile of a time is where the (1 - q)-quantile of the
carried amount passes the job's amount: the inverse of an integral, as in `trips`. A mean rate would
give a biased time, since 1/x is convex.

The phases of a job follow one another. A device that is slow to a quantile in one phase is taken to
be as slow in the others, which errs on the side of width; calibration on outcomes trims it.
"""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from fedstale.traces.arrays import Array, Index, Mask
from fedstale.traces.forecast.grid import HORIZONS_S, LEVELS, RATE_HORIZONS_S
from fedstale.traces.trip import Job

_COMPUTE, _DOWNLINK, _UPLINK = range(3)
_Z = np.array([NormalDist().inv_cdf(float(level)) for level in LEVELS])
_DRAWS = np.array([NormalDist().inv_cdf((i + 0.5) / 16) for i in range(16)])
_STAY_EDGES = np.concatenate([[0.0], HORIZONS_S])
_EDGES = np.concatenate([[0.0], RATE_HORIZONS_S])
_LEAST_RATE = 1e-9
# Finite, so that a device which never carries anything still gets an answer that can be sent.
LONGEST_S = 1e9
"""The longest time that is ever forecast, in s."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Forecast:
    """What n devices say of one job each. Never NaN and never infinite."""

    training_s: Array
    """Quantiles of the time to train, in s; shape (n, quantiles)."""
    reporting_s: Array
    """Quantiles of the time to upload, in s; shape (n, quantiles)."""
    total_s: Array
    """Quantiles of the time from sending to the last byte if nothing interrupts; (n, quantiles)."""
    p_finish: Array
    """Probability to be online throughout and done by the deadline, in [0, 1]; shape (n,)."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Outlook:
    """What n devices will do, on the grids of `fedstale.traces.forecast.grid`."""

    online: Mask
    """Whether the device is available now; shape (n,)."""
    stays: Array
    """Probability to remain as it is, there or away, beyond each horizon; shape (n, horizons)."""
    fresh: Array
    """Probability of a window that begins to last beyond each horizon; shape (horizons,)."""
    rates: Array
    """Quantiles of the mean rate over each horizon, >= 0; (n, 3, rate horizons, quantiles)."""

    def forecast(self, job: Job) -> Forecast:
        """Return what follows for a job that is sent now.

        An infinite deadline is none. Whether an interrupted job is lost or paused makes no
        difference here: `p_finish` is the probability that nothing interrupts.

        Args:
            job: what is asked; each field a scalar or of shape (n,).
        """
        n = self.online.size
        down, work, up = (
            np.broadcast_to(np.asarray(x, dtype=np.float64), (n,))
            for x in (job.download_bytes, job.work, job.upload_bytes)
        )
        carried = _carried(self.rates)
        zero = np.zeros((n, LEVELS.size))
        downloaded = _time(carried[:, _DOWNLINK], down * 8.0, zero)
        trained = _time(carried[:, _COMPUTE], work, downloaded)
        begins = np.minimum(downloaded + trained, LONGEST_S)
        reported = _time(carried[:, _UPLINK], up * 8.0, begins)
        total = np.minimum(begins + reported, LONGEST_S)
        deadline = np.broadcast_to(np.asarray(job.ttl_s, dtype=np.float64), (n,))
        return Forecast(
            training_s=trained,
            reporting_s=reported,
            total_s=total,
            p_finish=self._p_finish(total, deadline),
        )

    def _p_finish(self, total: Array, deadline: Array) -> Array:
        times = sampled(total)
        p = np.empty(self.online.size)
        here = self.online
        in_time = times[here] <= deadline[here, None]
        p[here] = (survival(self.stays[here], times[here]) * in_time).mean(axis=1)
        away = ~here
        if away.any():
            p[away] = self._p_finish_later(times[away], self.stays[away], deadline[away])
        return np.clip(p, 0.0, 1.0)

    def _p_finish_later(self, times: Array, away: Array, deadline: Array) -> Array:
        """Return the probability to come back early enough and then to stay long enough."""
        middle = 0.5 * (_STAY_EDGES[1:] + _STAY_EDGES[:-1])
        comes = -np.diff(np.concatenate([np.ones((len(away), 1)), away], axis=1))
        lasts = survival(np.broadcast_to(self.fresh, away.shape), times)
        p = np.zeros(len(away))
        for k in range(HORIZONS_S.size):
            in_time = middle[k] + times <= deadline[:, None]
            p += comes[:, k] * (lasts * in_time).mean(axis=1)
        return p


def sampled(quantiles: Array) -> Array:
    """Return 16 equally probable values of log-normal pieces through the quantiles; (n, 16)."""
    logs = np.log(np.maximum(quantiles, 1e-6))
    low = (logs[:, 1] - logs[:, 0]) / (_Z[1] - _Z[0])
    high = (logs[:, 2] - logs[:, 1]) / (_Z[2] - _Z[1])
    slope = np.where(_DRAWS < 0, low[:, None], high[:, None])
    return np.exp(np.minimum(logs[:, 1:2] + slope * _DRAWS, np.log(LONGEST_S)))


def survival(stays: Array, t: Array) -> Array:
    """Return the probability to remain beyond t, with a constant rate of leaving between horizons.

    Beyond the last horizon the rate of the last piece goes on.

    Args:
        stays: at each horizon, falling; shape (n, horizons).
        t: times in s, >= 0; shape (n, m).

    Example:
        >>> half = 0.5 ** (HORIZONS_S / 3600.0)
        >>> survival(half[None], np.array([[0.0, 1800.0, 7200.0]])).round(4)
        array([[1.    , 0.7071, 0.25  ]])
    """
    logs = np.zeros((len(stays), HORIZONS_S.size + 1))
    np.log(np.maximum(stays, 1e-9), out=logs[:, 1:])
    k = np.clip(np.searchsorted(_STAY_EDGES, t, side="right") - 1, 0, HORIZONS_S.size - 1)
    each = np.arange(len(stays))[:, None]
    left, right = logs[each, k], logs[each, k + 1]
    part = (t - _STAY_EDGES[k]) / (_STAY_EDGES[k + 1] - _STAY_EDGES[k])
    return np.exp(np.maximum(left + part * (right - left), -50.0))


def _carried(rates: Array) -> Array:
    """Return the amount carried by the end of each horizon, at each quantile, rising in both.

    Args:
        rates: shape (n, 3, rate horizons, quantiles).

    Returns:
        Shape (n, 3, quantiles, 1 + rate horizons); the first amount is 0.
    """
    n, channels, horizons, levels = rates.shape
    carried = np.zeros((n, channels, levels, horizons + 1))
    amounts = np.maximum(rates, _LEAST_RATE) * RATE_HORIZONS_S[:, None]
    amounts = np.maximum.accumulate(amounts, axis=2)
    carried[..., 1:] = np.maximum.accumulate(amounts, axis=3).swapaxes(2, 3)
    return carried


def _time(carried: Array, amount: Array, begins: Array) -> Array:
    """Return the quantiles of the time that a phase takes which begins after a while.

    Args:
        carried: of the phase's channel; shape (n, quantiles, 1 + rate horizons).
        amount: what the phase has to carry; shape (n,).
        begins: quantiles of when it begins, in s; shape (n, quantiles).

    Returns:
        Quantiles in s, rising; shape (n, quantiles).
    """
    levels = LEVELS.size
    # A time is long where little is carried, so its quantiles come in the other order.
    curves = carried[:, ::-1].reshape(-1, carried.shape[2])
    amounts, delay = np.repeat(amount, levels), begins.ravel()
    at_once = _inverse(curves, amounts).reshape(-1, levels)
    later = _inverse(curves, _upto(curves, delay) + amounts).reshape(-1, levels) - begins
    # Slow drift widens with the delay, fast noise does not: take what is wider.
    wider = np.where(LEVELS < 0.5, np.minimum(later, at_once), np.maximum(later, at_once))
    result = np.where(LEVELS == 0.5, later, wider)
    result = np.where(amount[:, None] > 0, np.clip(result, 0.0, LONGEST_S), 0.0)
    return np.maximum.accumulate(result, axis=1)


def _upto(curves: Array, t: Array) -> Array:
    """Return what is carried within t; shape (m,), for curves of shape (m, 1 + horizons)."""
    piece = np.clip(np.searchsorted(_EDGES, t, side="right") - 1, 0, RATE_HORIZONS_S.size - 1)
    low, slope = _piece(curves, piece)
    return low + (t - _EDGES[piece]) * slope


def _inverse(curves: Array, amount: Array) -> Array:
    """Return when an amount has been carried; shape (m,)."""
    reached = (curves <= amount[:, None]).sum(axis=1) - 1
    piece = np.minimum(reached, RATE_HORIZONS_S.size - 1)
    low, slope = _piece(curves, piece)
    return _EDGES[piece] + (amount - low) / np.maximum(slope, _LEAST_RATE)


def _piece(curves: Array, piece: Index) -> tuple[Array, Array]:
    """Return what is carried before a piece of the grid, and the rate on it."""
    each = np.arange(len(curves))
    low, high = curves[each, piece], curves[each, piece + 1]
    slope = (high - low) / (_EDGES[piece + 1] - _EDGES[piece])
    # Beyond the last horizon something goes on to be carried, at the mean rate if need be.
    last = (piece == RATE_HORIZONS_S.size - 1) & (high <= low)
    return low, np.where(last, curves[:, -1] / RATE_HORIZONS_S[-1], slope)
