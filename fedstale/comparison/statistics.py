"""Means over seeds, and differences paired by seed, with the 95% intervals of Student's t.

Two variants that run with the same seed share their devices and random draws, so the difference
within a seed has less noise than the difference of two means. Nothing is corrected for looking at
many variants at once.

An interval ends where its quantity does: a mean of shares is in [0, 1], and their difference in
[-1, 1]. The true mean is there too, so what is cut off never held it, and the interval holds it as
often as before (Mandelkern, 2002). Of fewer than three values there is no interval: of two it is 13
times as wide as they are apart, and says less than they do.

References:
    Student. The Probable Error of a Mean. Biometrika 6 (1908).
    Mandelkern. Setting Confidence Intervals for Bounded Parameters. Statistical Science 17 (2002).
    Cohen. Statistical Power Analysis for the Behavioral Sciences. 2nd edition (1988).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isclose
from typing import Literal

import numpy as np

LEAST = 3
"""Values that give an interval at least."""
ANY = (-inf, inf)
"""The range of a quantity that has no ends."""
_LEVEL, _POWER, _MOST_PAIRS = 0.95, 0.8, 1000
NOTHING = "-"
"""What stands in a table where there is no value."""


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.4g}"


def _signed(value: float) -> str:
    return f"{value:+.3f}" if abs(value) < 10 else f"{value:+,.4g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean and its 95% interval."""

    mean: float = np.nan
    """NaN of no values."""
    low: float = np.nan
    """Lower end; NaN of fewer than `LEAST` values."""
    high: float = np.nan
    """Upper end; NaN of fewer than `LEAST` values."""
    values: tuple[float, ...] = ()
    """What it comes from."""

    @property
    def n(self) -> int:
        """How many values it comes from."""
        return len(self.values)

    @property
    def numbers(self) -> dict[str, float | int]:
        """The mean, the ends and how many values, by name."""
        return {"mean": self.mean, "low": self.low, "high": self.high, "n": self.n}

    def half_width(self, number: Callable[[float], str] = _number) -> str:
        """Return the mean and half of its interval in words, each number as a function says it.

        An interval that is cut is told by its ends, and too few values by themselves.

        Example:
            >>> estimate([0.4, 0.5, 0.6]).half_width()
            '0.500 ± 0.248'
            >>> estimate([0.3, 0.5, 1.0], (0.0, 1.0)).half_width()
            '0.600 (0.000 to 1.000)'
        """
        up, down = self.high - self.mean, self.mean - self.low
        is_even = isclose(up, down, rel_tol=1e-6, abs_tol=1e-12)
        return f"{number(self.mean)} ± {number(up)}" if is_even else self.ends(number)

    def ends(self, number: Callable[[float], str] = _signed) -> str:
        """Return the mean and its interval in words; numbers have signs, as of a difference.

        Example:
            >>> estimate([0.4, 0.5, 0.6]).ends(), estimate([0.4, 0.6]).ends()
            ('+0.500 (+0.252 to +0.748)', '+0.400, +0.600')
        """
        if self.n == 0:
            return NOTHING
        if self.n < LEAST:
            return ", ".join(map(number, self.values))
        mean, low, high = map(number, (self.mean, self.low, self.high))
        return mean if np.isnan(self.low) else f"{mean} ({low} to {high})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """When a run reached the target."""

    at_s: float
    """Virtual instant in s; the end of the run's time if it never did."""
    ever: bool
    """Whether it did."""
    device_s: float = np.nan
    """What all devices had spent by then, in s."""


Bound = Literal["exact", "at least", "at most", "unknown"]
_BOUNDS: tuple[tuple[Bound, Bound], ...] = (("exact", "at least"), ("at most", "unknown"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUp:
    """How many times as fast as the reference a variant reached the target."""

    ratio: Estimate
    """Geometric mean of the reference's time over the variant's, by seed."""
    bound: Bound
    """What the ratio is where runs that never reached the target count with the time they had."""

    def __str__(self) -> str:
        """Return the ratio, its interval, and what it is a bound of; ~ bounds nothing."""
        before = {"exact": "", "unknown": "~"}.get(self.bound, f"{self.bound} ")
        return before + self.ratio.ends("{:.2f}".format)


def estimate(values: Sequence[float], limits: tuple[float, float] = ANY) -> Estimate:
    """Return the mean of independent values.

    Args:
        values: what is averaged.
        limits: least and largest value that there can be; the interval ends there.

    Example:
        >>> found = estimate([1.0, 2.0, 3.0])
        >>> f"{found.mean:.1f} ({found.low:.3f} to {found.high:.3f})"
        '2.0 (-0.484 to 4.484)'
    """
    array, n = np.asarray(values, dtype=np.float64), len(values)
    if n == 0:
        return Estimate()
    mean, own = float(array.mean()), tuple(array.tolist())
    if n < LEAST or not np.isfinite(array).all():
        return Estimate(mean=mean, values=own)
    from scipy import stats  # noqa: PLC0415 - takes a second, in each process of a comparison

    half = float(stats.t.ppf((1 + _LEVEL) / 2, n - 1) * stats.sem(array))
    low, high = (float(np.clip(end, *limits)) for end in (mean - half, mean + half))
    return Estimate(mean=mean, low=low, high=high, values=own)


def pairs_needed(differences: Estimate) -> int | None:
    """Return how many pairs it takes to show differences like those of some pairs.

    With mean m and standard deviation s, the interval of n pairs leaves out 0 with the probability
    1 - F(t) + F(-t), where t is the quantile of Student's t at 97.5% with n - 1 degrees of freedom,
    and F is the distribution of the noncentral t with as many degrees and the noncentrality
    sqrt(n) m / s (Cohen, 1988). Returned is the least n, from `LEAST` on, for which that is 80%. It
    takes m and s as they were seen, which few pairs know badly.

    Returns:
        None if 1,000 pairs would not do.

    Example:
        >>> pairs_needed(estimate([-1.0, 0.0, 1.0, 2.0, 3.0]))
        22
    """
    from scipy import stats  # noqa: PLC0415 - as in `estimate`

    deviation = float(np.std(differences.values, ddof=1))
    effect = abs(differences.mean) / deviation if deviation else inf * abs(differences.mean)
    if not effect > 0.0:
        return None
    # Fewer than would do if the deviation were known and the distribution normal never do.
    known = sum(stats.norm.ppf([(1 + _LEVEL) / 2, _POWER])) / effect
    for n in range(max(LEAST, int(min(known**2, _MOST_PAIRS + 1))), _MOST_PAIRS + 1):
        quantile = stats.t.ppf((1 + _LEVEL) / 2, n - 1)
        shift = min(effect * np.sqrt(n), 30.0)  # far beyond what is needed, where F fails
        missed = stats.nct.cdf(quantile, n - 1, shift) - stats.nct.cdf(-quantile, n - 1, shift)
        if 1.0 - missed >= _POWER:
            return n
    return None


def difference(
    own: Mapping[int, float],
    reference: Mapping[int, float],
    limits: tuple[float, float] = ANY,
) -> Estimate:
    """Return by how much a variant exceeds the reference, over the seeds that both have.

    Args:
        own: value of the variant by seed.
        reference: value of the reference by seed.
        limits: least and largest value that there can be.
    """
    (least, most), seeds = limits, sorted(own.keys() & reference.keys())
    return estimate([own[seed] - reference[seed] for seed in seeds], (least - most, most - least))


def speed_up(
    own: Mapping[int, Reached],
    reference: Mapping[int, Reached],
    what: Literal["at_s", "device_s"] = "at_s",
) -> SpeedUp | None:
    """Return how many times as fast as the reference a variant is, over the seeds that both have.

    Ratios are averaged as logarithms, so that twice as fast and half as fast cancel out, and no end
    of the interval is below 0.

    Args:
        own: by seed, when the variant reached the target.
        reference: the same of the reference.
        what: is divided, the time or the time of all devices.

    Returns:
        None if no run of either reached the target, or what it took is 0.
    """
    pairs = [(own[seed], reference[seed]) for seed in sorted(own.keys() & reference.keys())]
    took = np.array([[getattr(one, what) for one in pair] for pair in pairs]).reshape(-1, 2)
    if not any(a.ever or b.ever for a, b in pairs) or not (took > 0).all():
        return None
    logs = estimate(np.log(took[:, 1] / took[:, 0]).tolist())
    mean, low, high = (float(np.exp(x)) for x in (logs.mean, logs.low, logs.high))
    ratio = Estimate(mean=mean, low=low, high=high, values=tuple(np.exp(logs.values).tolist()))
    own_never, reference_never = (any(not pair[i].ever for pair in pairs) for i in (0, 1))
    return SpeedUp(ratio=ratio, bound=_BOUNDS[own_never][reference_never])
