"""Background load of a generated population: what else a device's processor is doing.

A load is a Gaussian in disguise: the sum of a part of the device's own, a slow and a fast
autoregressive part is Gaussian with variance 1, and each value is replaced by the load that has its
rank in the recording (a Gaussian copula). The loads are then exactly as frequent as recorded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import NormalDist

import numpy as np

from fedstale.errors import TraceError
from fedstale.traces import DAY_S, Array, rounded

LEVELS = np.array([0.0005, 0.02, 0.05, *np.arange(0.1, 0.95, 0.1), 0.95, 0.98, 0.99, 0.9995])
"""Levels of the stored quantiles of the load."""
_SCORES = np.array([NormalDist().inv_cdf(float(p)) for p in LEVELS])
_LAGS = (1, 2, 3, 6, 12, 24, 48)
_PHIS_SLOW = (0.9, 0.95, 0.97, 0.98, 0.99, 0.995)
_PHIS_FAST = (0.0, 0.2, 0.4, 0.6, 0.7, 0.8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """How busy processors are, and for how long."""

    load: tuple[float, ...]
    """Quantiles of the load, in [0, 1], at `LEVELS`."""
    own: float
    """Share of the variance that is the device's own and never changes."""
    slow: float
    """Share of the variance in the slow part."""
    fast: float
    """Share of the variance in the fast part."""
    phi_slow: float
    """Autocorrelation of the slow part from one step to the next."""
    phi_fast: float
    """Autocorrelation of the fast part."""
    step_s: float
    """Length of a step in s."""
    hourly: tuple[float, ...] = ()
    """What is added to the Gaussian in each hour of the day; 24 numbers, or none."""


def draw(model: Background, n: int, steps: int, rng: np.random.Generator) -> Array:
    """Return loads of n processors, in [0, 1], from a midnight on; shape (n, steps)."""
    # One device in each n-th part of the distribution: a small pool is then as varied as a large.
    parts = (rng.permutation(n) + rng.random(n)) / n
    own = np.array([NormalDist().inv_cdf(p) for p in parts.clip(1e-9, 1 - 1e-9)])
    noise = rng.standard_normal((2, steps, n))
    slow, fast = noise[:, 0]
    z = np.empty((steps, n))
    for t in range(steps):
        if t:
            slow = model.phi_slow * slow + np.sqrt(1 - model.phi_slow**2) * noise[0, t]
            fast = model.phi_fast * fast + np.sqrt(1 - model.phi_fast**2) * noise[1, t]
        z[t] = np.sqrt(model.own) * own + np.sqrt(model.slow) * slow + np.sqrt(model.fast) * fast
    if model.hourly:
        # Over a day, the loads are as frequent as without.
        hourly = np.array(model.hourly) - np.mean(model.hourly)
        hour = np.arange(steps) * model.step_s % DAY_S // 3600
        z = (z + hourly[hour.astype(np.int64), None]) / np.sqrt(1.0 + hourly.var())
    return np.interp(z, _SCORES, model.load).T


def fit(loads: Sequence[Array], step_s: float) -> Background:
    """Return the background load of recorded processors.

    The shares and autocorrelations are those that come nearest, in least squares, to the recorded
    autocorrelations of the load at lags up to 48 steps, on a grid of autocorrelations.

    Args:
        loads: in [0, 1], one a step; arrays of equal shape (steps,).
        step_s: length of a step in s.

    Raises:
        TraceError: records are shorter than 49 steps or of different lengths.
    """
    if len({len(x) for x in loads}) != 1 or len(loads[0]) <= max(_LAGS):
        raise TraceError("background to fit: expected records of one length, at least 49 steps")
    table = np.array(loads)
    load = rounded(np.quantile(table, LEVELS), 5)
    # Where nothing varies, there is nothing to remember.
    (own, slow, fast), phi_slow, phi_fast = (1.0, 0.0, 0.0), 0.0, 0.0
    if np.ptp(table) > 0:
        centred = table - table.mean()
        recorded = [(centred[:, :-lag] * centred[:, lag:]).mean() / table.var() for lag in _LAGS]
        target = _correlation_before(load, np.array(recorded))
        _, (own, slow, fast), phi_slow, phi_fast = min(
            (_shares(target, a, b) for a, b in product(_PHIS_SLOW, _PHIS_FAST)),
            key=lambda found: found[0],
        )
    return Background(
        load=load,
        own=own,
        slow=slow,
        fast=fast,
        phi_slow=phi_slow,
        phi_fast=phi_fast,
        step_s=float(step_s),
    )


def _shares(
    target: Array, phi_slow: float, phi_fast: float
) -> tuple[float, tuple[float, float, float], float, float]:
    """Return the squared error of the best shares of variance, the shares, and the two phis."""
    lags = np.array(_LAGS)
    slow, fast = phi_slow**lags, phi_fast**lags
    # Shares sum to 1, so the fast one is what the other two leave.
    matrix = np.stack([1 - fast, slow - fast], axis=1)
    solution = np.linalg.lstsq(matrix, target - fast, rcond=None)[0]
    own = float(np.clip(solution[0], 0, 1))
    share = float(np.clip(solution[1], 0, 1 - own))
    rest = 1 - own - share
    error = float(((own + share * slow + rest * fast - target) ** 2).sum())
    return error, (round(own, 5), round(share, 5), round(rest, 5)), phi_slow, phi_fast


def _correlation_before(load: tuple[float, ...], after: Array) -> Array:
    """Return the correlations that Gaussians must have for the loads to have those given."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    weights = weights / weights.sum()
    x, y = nodes[:, None], nodes[None, :]
    mass = weights[:, None] * weights[None, :]

    def value(z: Array) -> Array:
        return np.interp(z, _SCORES, load)

    mean = (weights * value(nodes)).sum()
    variance = (weights * value(nodes) ** 2).sum() - mean**2
    grid = np.linspace(0.0, 1.0, 101)
    made = [(mass * value(x) * value(r * x + np.sqrt(1 - r * r) * y)).sum() - mean**2 for r in grid]
    return np.interp(after, np.array(made) / variance, grid)
