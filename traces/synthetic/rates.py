"""Links and background loads of a generated population.

A link's rate, relative to the link's own median, stays a while at one of a few levels (a cell, a
valley, an open road) and moves around it as an autocorrelated log-normal: a Markov chain whose
states are autoregressive in the logarithm. Each level has a twin in which the link is out and
nothing passes, so that a link comes back from an outage to where it was. How fast a device's link
is in the middle is one log-normal number of the device.

A load is a Gaussian in disguise: the sum of a part of the device's own, a slow and a fast
autoregressive part is Gaussian with variance 1, and each value is replaced by the load that has its
rank in the recording (a Gaussian copula). The loads are then exactly as frequent as recorded.
"""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from fedstale.traces import DAY_S, Array

LINK_LEVELS = 4
LOAD_LEVELS = np.array([0.0005, 0.02, 0.05, *np.arange(0.1, 0.95, 0.1), 0.95, 0.98, 0.99, 0.9995])
"""Levels of the stored quantiles of the load."""
SCORES = np.array([NormalDist().inv_cdf(float(p)) for p in LOAD_LEVELS])
"""Gaussians of these ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regimes:
    """How a link's rate, divided by its median, moves from second to second.

    States are the levels, slowest first, then the outages at these levels.
    """

    move: tuple[tuple[float, ...], ...]
    """Probability of each next state, given the present one; rows sum to 1."""
    share: tuple[float, ...]
    """Share of time in each state, for the first second."""
    mean_log: tuple[float, ...]
    """Mean logarithm of the relative rate at each level."""
    sd_log: tuple[float, ...]
    """Standard deviation of that logarithm."""
    phi: tuple[float, ...]
    """Its autocorrelation from one second to the next, in [0, 1)."""


def draw_links(model: Regimes, n: int, seconds: int, rng: np.random.Generator) -> Array:
    """Return relative rates of n links, one a second; shape (n, seconds)."""
    edges = np.cumsum(model.move, axis=1)
    edges[:, -1] = 1.0
    mean, sd, phi = (np.array(x) for x in (model.mean_log, model.sd_log, model.phi))
    fresh = np.sqrt(1 - phi**2)
    u = rng.random((seconds, n))
    noise = rng.standard_normal((seconds, n))
    states = np.empty((seconds, n), np.int64)
    states[0] = np.searchsorted(np.cumsum(model.share)[:-1], u[0], side="right")
    for t in range(1, seconds):
        states[t] = (edges[states[t - 1]] <= u[t][:, None]).sum(axis=1)
    level = states % LINK_LEVELS
    kept, new = phi[level], fresh[level] * noise
    z = noise
    for t in range(1, seconds):
        z[t] = kept[t] * z[t - 1] + new[t]
    return np.exp(np.where(states < LINK_LEVELS, mean[level] + sd[level] * z, -np.inf)).T


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """How busy processors are, and for how long."""

    load: tuple[float, ...]
    """Quantiles of the load, in [0, 1], at `LOAD_LEVELS`."""
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


def draw_loads(model: Background, n: int, steps: int, rng: np.random.Generator) -> Array:
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
    return np.interp(z, SCORES, model.load).T
