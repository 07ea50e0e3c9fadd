"""Links of a generated population: log-normal rates that switch between regimes.

A link's rate, relative to the link's own median, stays a while at one of a few levels (a cell, a
valley, an open road) and moves around it as an autocorrelated log-normal: a Markov chain whose
states are autoregressive in the logarithm. Each level has a twin in which the link is out and
nothing passes, so that a link comes back from an outage to where it was. How fast a device's link
is in the middle is one log-normal number of the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedstale.errors import TraceError
from fedstale.traces import Array, rounded

LEVELS = 4
OUTAGE = 0.01
"""Share of a link's median rate below which it counts as out."""
_WIDTHS_S = (5, 9, 15, 25, 41, 61, 91)
_LAGS_S = (1, 3, 10, 30, 60)


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


STEADY = Regimes(
    move=((1.0,) + (0.0,) * (2 * LEVELS - 1),) * (2 * LEVELS),
    share=(1.0,) + (0.0,) * (2 * LEVELS - 1),
    mean_log=(0.0,) * LEVELS,
    sd_log=(0.0,) * LEVELS,
    phi=(0.0,) * LEVELS,
)
"""A link that always carries its median."""


def draw(model: Regimes, n: int, seconds: int, rng: np.random.Generator) -> Array:
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
    level = states % LEVELS
    kept, new = phi[level], fresh[level] * noise
    z = noise
    for t in range(1, seconds):
        z[t] = kept[t] * z[t - 1] + new[t]
    return np.exp(np.where(states < LEVELS, mean[level] + sd[level] * z, -np.inf)).T


def fit(links: Sequence[Array]) -> Regimes:
    """Return the regimes of recorded links.

    A second below 1 % of its link's median is an outage. Levels are the quarters of the relative
    rate, smoothed over the seconds without outage; transitions are counted. The width of the
    smoothing says how long a level lasts: the one is taken whose links have, drawn with a fixed
    seed, the autocorrelation nearest to the recorded one.

    Args:
        links: rates of each link, one a second; each of shape (seconds,).

    Raises:
        TraceError: there are fewer than 100 s in all, or a link carries nothing.
    """
    if sum(map(len, links)) < 100:
        raise TraceError("network to fit: expected at least 100 s of links")
    if all(np.ptp(rates) == 0 for rates in links):
        return STEADY
    logs = [np.log(np.maximum(rates / median_of(rates), OUTAGE)) for rates in links]
    long = [x for x in logs if x.size >= 10 * max(_LAGS_S)] or logs
    wanted = np.mean([autocorrelation(x, _LAGS_S) for x in long], axis=0)

    def error(model: Regimes) -> float:
        drawn = draw(model, 64, 3600, np.random.default_rng(0))
        logs = (np.log(np.maximum(x, OUTAGE)) for x in drawn)
        got = np.mean([autocorrelation(x, _LAGS_S) for x in logs], axis=0)
        return float(((got - wanted) ** 2).sum())

    return min((_fit_width(logs, width) for width in _WIDTHS_S), key=error)


def _fit_width(logs: Sequence[Array], width: int) -> Regimes:
    out = [x <= np.log(OUTAGE) for x in logs]
    smooth = [_smoothed(x, ~o, width) for x, o in zip(logs, out, strict=True)]
    every = np.concatenate(logs)
    alive = ~np.concatenate(out)
    cuts = np.quantile(np.concatenate(smooth)[alive], np.arange(1, LEVELS) / LEVELS)
    levels = [np.searchsorted(cuts, s) for s in smooth]
    states = [x + LEVELS * o for x, o in zip(levels, out, strict=True)]
    k = 2 * LEVELS
    # A little of each transition, so that every state can be reached and left.
    moves = np.full((k, k), 0.1 / k)
    for s in states:
        np.add.at(moves, (s[:-1], s[1:]), 1)
    joined = np.concatenate(states)
    mean, sd, phi = np.zeros(LEVELS), np.zeros(LEVELS), np.zeros(LEVELS)
    for level in range(LEVELS):
        here = every[joined == level]
        mean[level], sd[level] = here.mean(), here.std()
        pairs = [_pairs(x, s, level) for x, s in zip(logs, states, strict=True)]
        a, b = (np.concatenate(p) - mean[level] for p in zip(*pairs, strict=True))
        phi[level] = np.clip((a * b).sum() / max((a * a).sum(), 1e-12), 0.0, 0.999)
    return Regimes(
        move=tuple(rounded(row, 6) for row in moves / moves.sum(axis=1, keepdims=True)),
        share=rounded(np.bincount(joined, minlength=k) / joined.size, 6),
        mean_log=rounded(mean, 6),
        sd_log=rounded(sd, 6),
        phi=rounded(phi, 6),
    )


def median_of(rates: Array) -> float:
    """Return the median of the rates that are not 0.

    Raises:
        TraceError: all of them are 0.
    """
    carried = rates[rates > 0]
    if carried.size == 0:
        raise TraceError("network to fit: a link carries nothing at all; leave it out")
    return float(np.median(carried))


def _smoothed(x: Array, alive: npt.NDArray[np.bool_], width: int) -> Array:
    """Return the mean over the seconds around each that are no outage; the last known elsewhere."""
    kernel = np.ones(min(width, x.size))
    n = np.convolve(alive, kernel, "same")
    sums = np.convolve(np.where(alive, x, 0.0), kernel, "same")
    known = np.flatnonzero(n > 0.5)
    held = known[(np.searchsorted(known, np.arange(x.size), side="right") - 1).clip(0)]
    return sums[held] / n[held]


def autocorrelation(x: Array, lags: Sequence[int]) -> Array:
    """Return the autocorrelation of a series around its own mean, at each lag."""
    x = x - x.mean()
    return np.array([(x[:-k] * x[k:]).mean() / max((x * x).mean(), 1e-12) for k in lags])


def _pairs(x: Array, states: Array, regime: int) -> tuple[Array, Array]:
    both = (states[:-1] == regime) & (states[1:] == regime)
    return x[:-1][both], x[1:][both]
