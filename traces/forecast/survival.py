"""From the survival of a session and the rates of a device to the times of a job and p_finish.

A `DeviceForecast` holds, for each device, the survival of its session (the probability to remain
online) on a grid of horizons, and quantiles of what its processor and links will carry. A
`JobForecast` follows from it: a job takes longer than h exactly if less than its amount is carried
within h, so the q-quantile of a time is where the (1 - q)-quantile of the
carried amount passes the job's amount: the inverse of an integral, as in `trips`. A mean rate would
give a biased time, since 1/x is convex.

The phases of a job follow one another. A device that is slow to a quantile in one phase is taken to
be as slow in the others, which errs on the side of width; calibration on outcomes trims it.

A forecaster's quantiles are right on average over the fleet that it was trained on. With a
`Calibration` each device keeps one number for each end of each interval, the miscoverage that it
takes of the fleet's calibration scores, and moves it after every outcome: up a little when the end
held, down when it did not. Over time every device gets the coverage that it was promised, whatever
its distribution; that takes long where a device has a job a day.

Reference:
    Gibbs, Candes. Adaptive Conformal Inference Under Distribution Shift. NeurIPS 2021: the set
    {y : S(x, y) <= Q(1 - a_t)} with a_{t+1} = a_t + gamma (a - err_t).

Differences from the paper:
    - The two ends are corrected apart, so that both miss equally often.
    - a_t outside (0, 1) takes an infinite or an empty set there; here the largest or smallest
      calibration score is used, since an infinite forecast is of no use.
    - Scores are differences of logarithms: a slow device errs by more seconds than a fast one.
"""

from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from fedstale.traces import Array, Index, Job, Mask, outline
from fedstale.traces.forecast.observation import LEVELS, RATE_HORIZONS_S
from fedstale.traces.forecast.sessions import HORIZONS_S

_COMPUTE, _DOWNLINK, _UPLINK = range(3)
_Z = np.array([NormalDist().inv_cdf(float(level)) for level in LEVELS])
_DRAWS = np.array([NormalDist().inv_cdf((i + 0.5) / 16) for i in range(16)])
_SURVIVAL_EDGES = np.concatenate([[0.0], HORIZONS_S])
_EDGES = np.concatenate([[0.0], RATE_HORIZONS_S])
_WIDTHS = np.diff(_EDGES)
# Devices are computed this many at a time, so that their arrays stay in the cache.
_CHUNK = 1024
_LEAST_RATE = 1e-9
_GRID = np.linspace(0.0, 1.0, 201)
# Finite, so that a device which never carries anything still gets an answer that can be sent.
LONGEST_S = 1e9
"""The longest time that is ever forecast, in s."""
PHASES = ("training_s", "reporting_s", "total_s")
"""The times of a `JobForecast`, in the order of every array that has an axis of phases."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class JobForecast:
    """Forecasts of n devices, of one job each. Never NaN and never infinite."""

    times_s: Array
    """Quantiles of the times in s, in the order of `PHASES`; shape (n, 3, quantiles)."""
    p_finish: Array
    """Probability to be online throughout and done by the deadline, in [0, 1]; shape (n,)."""

    __repr__ = outline

    @property
    def training_s(self) -> Array:
        """Quantiles of the time to train, in s; shape (n, quantiles)."""
        return self.times_s[:, 0]

    @property
    def reporting_s(self) -> Array:
        """Quantiles of the time to upload, in s; shape (n, quantiles)."""
        return self.times_s[:, 1]

    @property
    def total_s(self) -> Array:
        """Quantiles of the time from sending to the last byte if nothing interrupts, in s."""
        return self.times_s[:, 2]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class DeviceForecast:
    """What n devices will do, on `HORIZONS_S` and `RATE_HORIZONS_S`, whatever the job."""

    online: Mask
    """Whether the device is available now; shape (n,)."""
    survival: Array
    """Probability to remain online, or offline, beyond each horizon; shape (n, horizons)."""
    available: Array
    """Probability to be online at each horizon, whatever happens until then; (n, horizons)."""
    new_session_survival: Array
    """Probability that a session which begins lasts beyond each horizon; shape (horizons,)."""
    rates: Array
    """Quantiles of the mean rate over each horizon, >= 0; (n, 3, rate horizons, quantiles)."""

    __repr__ = outline

    def of_job(self, job: Job) -> JobForecast:
        """Return the forecast of a job that is sent now.

        An infinite deadline is none. Whether an interrupted job is lost or paused makes no
        difference here: `p_finish` is the probability that nothing interrupts.

        Args:
            job: what is sent; each field a scalar or of shape (n,).
        """
        n = self.online.size
        sizes = np.empty((4, n))
        for row, x in zip(
            sizes, (job.download_bytes, job.work, job.upload_bytes, job.ttl_s), strict=True
        ):
            row[:] = x
        sizes[[0, 2]] *= 8.0
        times = np.empty((3, LEVELS.size, n))
        p = np.empty(n)
        for i in range(0, n, _CHUNK):
            part = slice(i, i + _CHUNK)
            times[:, :, part] = _times(self.rates[part], *sizes[:3, part])
            p[part] = self._p_finish(part, times[2, :, part], sizes[3, part])
        return JobForecast(times_s=np.ascontiguousarray(times.transpose(2, 0, 1)), p_finish=p)

    def _p_finish(self, part: slice, total: Array, deadline: Array) -> Array:
        times = sampled(total)
        survival = np.ascontiguousarray(self.survival[part].T, dtype=np.float64)
        # Devices offline get another answer below; they are few among those that are forecast.
        p = (survival_at(survival, times) * (times <= deadline)).mean(axis=0)
        offline = np.flatnonzero(~self.online[part])
        if offline.size:
            p[offline] = self._p_finish_offline(
                times[:, offline], survival[:, offline], deadline[offline]
            )
        return np.clip(p, 0.0, 1.0)

    def _p_finish_offline(self, times: Array, offline: Array, deadline: Array) -> Array:
        """Return the probability to come online early enough and then to stay long enough."""
        middle = 0.5 * (_SURVIVAL_EDGES[1:] + _SURVIVAL_EDGES[:-1])
        comes = -np.diff(offline, axis=0, prepend=1.0)
        lasts = survival_at(self.new_session_survival[:, None], times)
        p = np.zeros(deadline.size)
        for k in range(HORIZONS_S.size):
            p += comes[k] * (lasts * (times <= deadline - middle[k])).mean(axis=0)
        return p


def sampled(quantiles: Array) -> Array:
    """Return 16 equally probable values of log-normal pieces through the quantiles.

    Args:
        quantiles: shape (quantiles, n).

    Returns:
        Rising; shape (16, n).
    """
    logs = np.log(np.maximum(quantiles, 1e-6))
    low = (logs[1] - logs[0]) / (_Z[1] - _Z[0])
    high = (logs[2] - logs[1]) / (_Z[2] - _Z[1])
    below = np.count_nonzero(_DRAWS < 0)
    drawn = np.empty((_DRAWS.size, logs.shape[1]))
    np.multiply(_DRAWS[:below, None], low, out=drawn[:below])
    np.multiply(_DRAWS[below:, None], high, out=drawn[below:])
    drawn += logs[1]
    np.minimum(drawn, np.log(LONGEST_S), out=drawn)
    return np.asarray(np.exp(drawn, out=drawn))


def survival_at(survival: Array, t: Array) -> Array:
    """Return the survival at t, with a constant rate of leaving between horizons.

    Beyond the last horizon the rate of the last piece goes on.

    Args:
        survival: at each horizon, falling; shape (horizons, n), or (horizons, 1) for all alike.
        t: times in s, >= 0; shape (m, n).

    Returns:
        Shape (m, n).

    Example:
        >>> half = 0.5 ** (HORIZONS_S / 3600.0)
        >>> survival_at(half[:, None], np.array([[0.0, 1800.0, 7200.0]])).round(4)
        array([[1.    , 0.7071, 0.25  ]])
    """
    logs = np.zeros((HORIZONS_S.size + 1, survival.shape[1]))
    np.log(np.maximum(survival, 1e-9), out=logs[1:])
    slope = np.diff(logs, axis=0) / np.diff(_SURVIVAL_EDGES)[:, None]
    start = logs[:-1] - slope * _SURVIVAL_EDGES[:-1, None]
    piece = _below(HORIZONS_S[:-1, None, None], t)
    where = (
        piece
        if survival.shape[1] == 1
        else piece * survival.shape[1] + np.arange(survival.shape[1])
    )
    left = slope.ravel()[where]
    left *= t
    left += start.ravel()[where]
    np.clip(left, -50.0, 0.0, out=left)
    return np.asarray(np.exp(left, out=left))


def _times(rates: Array, down: Array, work: Array, up: Array) -> Array:
    """Return the quantiles of the time to train, to upload and of the whole; (3, quantiles, n).

    Args:
        rates: shape (n, 3, rate horizons, quantiles).
        down: bits to receive; shape (n,).
        work: to do; shape (n,).
        up: bits to send; shape (n,).
    """
    # The devices are the last axis of all that follows, where arithmetic is fast.
    by_channel = np.maximum(rates.transpose(1, 2, 3, 0), _LEAST_RATE)
    downloaded = _time(_carried(by_channel[_DOWNLINK]), down, None)
    trained = _time(_carried(by_channel[_COMPUTE]), work, downloaded)
    begins = np.minimum(downloaded + trained, LONGEST_S)
    reported = _time(_carried(by_channel[_UPLINK]), up, begins)
    return np.stack([trained, reported, np.minimum(begins + reported, LONGEST_S)])


def _carried(rates: Array) -> Array:
    """Return the amount carried by the end of each horizon, at each quantile, rising in both.

    Args:
        rates: of one channel, > 0; shape (rate horizons, quantiles, n).

    Returns:
        Shape (1 + rate horizons, quantiles, n), the slowest quantile last, as of times; the first
        amount is 0.
    """
    horizons, levels, n = rates.shape
    carried = np.zeros((horizons + 1, levels, n))
    # A time is long where little is carried, so its quantiles come in the other order.
    np.multiply(rates[:, ::-1], RATE_HORIZONS_S[:, None, None], out=carried[1:])
    for k in range(1, horizons):
        np.maximum(carried[k + 1], carried[k], out=carried[k + 1])
    for k in range(levels - 1, 0, -1):
        np.maximum(carried[:, k - 1], carried[:, k], out=carried[:, k - 1])
    return carried


def _time(carried: Array, amount: Array, begins: Array | None) -> Array:
    """Return the quantiles of the time that a phase takes which begins after a while.

    Args:
        carried: of the phase's channel; shape (1 + rate horizons, quantiles, n).
        amount: what the phase has to carry; shape (n,).
        begins: quantiles of when it begins, in s, shape (quantiles, n); None for at once.

    Returns:
        Quantiles in s, rising; shape (quantiles, n).
    """
    result = _inverse(carried, np.broadcast_to(amount, carried.shape[1:]))
    if begins is not None:
        later = _inverse(carried, _upto(carried, begins) + amount) - begins
        # Slow drift widens with the delay, fast noise does not: take what is wider.
        for k, level in enumerate(LEVELS):
            if level < 0.5:
                np.minimum(later[k], result[k], out=result[k])
            elif level > 0.5:
                np.maximum(later[k], result[k], out=result[k])
            else:
                result[k] = later[k]
    np.clip(result, 0.0, LONGEST_S, out=result)
    result *= amount > 0
    for k in range(1, LEVELS.size):
        np.maximum(result[k], result[k - 1], out=result[k])
    return result


def _upto(carried: Array, t: Array) -> Array:
    """Interpolate the amount carried within t; shape (quantiles, n), as that of t."""
    piece = _below(_EDGES[1:-1, None, None], t)
    low, slope = _piece(carried, piece)
    slope *= t - _EDGES[piece]
    slope += low
    return slope


def _inverse(carried: Array, amount: Array) -> Array:
    """Return when an amount has been carried; shape (quantiles, n), as that of the amount."""
    piece = _below(carried[1:-1], amount)
    low, slope = _piece(carried, piece)
    time = amount - low
    time /= np.maximum(slope, _LEAST_RATE)
    time += _EDGES[piece]
    return time


def _below(edges: Array, x: Array) -> Index:
    """Return how many of the edges, the first axis, are at most x."""
    # Bytes are summed four times as fast as truth values.
    return (edges <= x).view(np.int8).sum(axis=0, dtype=np.int8).astype(np.int64)


def _piece(carried: Array, piece: Index) -> tuple[Array, Array]:
    """Look up the amount carried before a piece of the grid, and the rate on it."""
    flat = carried.reshape(-1)
    where = piece * piece.size
    where += np.arange(piece.size).reshape(piece.shape)
    low = flat[where]
    where += piece.size
    slope = flat[where]
    slope -= low
    # Beyond the last horizon something goes on to be carried, at the mean rate if need be.
    stopped = (slope <= 0.0) & (piece == RATE_HORIZONS_S.size - 1)
    slope /= _WIDTHS[piece]
    np.copyto(slope, carried[-1] / RATE_HORIZONS_S[-1], where=stopped)
    return low, slope


MISS = 0.1
"""How often each end may be passed."""


class Calibration:
    """Corrects the intervals of n devices by their own outcomes.

    Args:
        n_devices: number of devices.
        scores: quantiles of the fleet's scores on `linspace(0, 1, 201)`; shape (3, 2, 201), by
            phase and by end. A score is by how much, in logarithms, the truth lay outside an end;
            less than 0 is inside.
        step: gamma, how far one outcome moves a device, >= 0; 0 keeps the fleet's correction.
    """

    def __init__(self, n_devices: int, scores: Array, step: float = 0.05) -> None:
        self.scores, self.step = scores, step
        self.miscoverage: Array = np.full((n_devices, len(PHASES), 2), MISS)

    def corrected(self, devices: npt.ArrayLike, forecast: JobForecast) -> JobForecast:
        """Return the forecast with the outer quantiles of every time corrected.

        Args:
            devices: device of each forecast; shape (n,).
            forecast: of shape n.
        """
        devices = np.asarray(devices, dtype=np.int64)
        level = 1.0 - self.miscoverage[devices]
        shift = np.empty(level.shape)
        for p, end in np.ndindex(level.shape[1:]):
            shift[:, p, end] = np.interp(level[:, p, end], _GRID, self.scores[p, end])
        low, middle, high = np.moveaxis(forecast.times_s, -1, 0)
        low = np.minimum(low * np.exp(-shift[..., 0]), middle)
        high = np.maximum(high * np.exp(shift[..., 1]), middle)
        return replace(forecast, times_s=np.stack([low, middle, high], axis=-1))

    def learn(self, devices: npt.ArrayLike, forecast: JobForecast, outcome: Array) -> None:
        """Move each device by one outcome of its own.

        Args:
            devices: distinct; shape (n,).
            forecast: corrected, as it was given when the job was sent; of shape n.
            outcome: what the times were, in s, NaN where a phase was not finished; shape (n, 3).
        """
        devices = np.asarray(devices, dtype=np.int64)
        gamma = self.step
        known, quantiles = np.isfinite(outcome), forecast.times_s
        missed = np.stack([outcome < quantiles[..., 0], outcome > quantiles[..., 2]], axis=-1)
        before = self.miscoverage[devices]
        moved = np.clip(before + gamma * (MISS - missed), -gamma, 1.0 + gamma)
        self.miscoverage[devices] = np.where(known[..., None], moved, before)
