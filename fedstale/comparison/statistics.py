"""Means over seeds, and differences paired by seed, with the 95% intervals of Student's t.

Two variants that run with the same seed share their devices and random draws, so the difference
within a seed has less noise than the difference of two means. Nothing is corrected for looking at
many variants at once.

References:
    Student. The Probable Error of a Mean. Biometrika 6 (1908).
    Kaplan, Meier. Nonparametric Estimation from Incomplete Observations. Journal of the American
    Statistical Association 53 (1958).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedstale.reports import Array

_LEVEL = 0.95
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
    """Lower end; NaN of fewer than two values."""
    high: float = np.nan
    """Upper end; NaN of fewer than two values."""
    n: int = 0
    """How many values it comes from."""

    def half_width(self, number: Callable[[float], str] = _number) -> str:
        """Return the mean and half of its interval in words, each number as a function says it.

        Example:
            >>> Estimate(mean=0.5, low=0.4, high=0.6, n=5).half_width()
            '0.500 ± 0.100'
        """
        if self.n == 0:
            return NOTHING
        half = (self.high - self.low) / 2
        return number(self.mean) if np.isnan(half) else f"{number(self.mean)} ± {number(half)}"

    def ends(self, number: Callable[[float], str] = _signed) -> str:
        """Return the mean and its interval in words; numbers have signs, as of a difference.

        Example:
            >>> Estimate(mean=0.1, low=-0.05, high=0.25, n=5).ends()
            '+0.100 (-0.050 to +0.250)'
        """
        if self.n == 0:
            return NOTHING
        mean, low, high = map(number, (self.mean, self.low, self.high))
        return mean if np.isnan(self.low) else f"{mean} ({low} to {high})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """When a run reached the target."""

    at_s: float
    """Virtual instant in s; the end of the run's time if it never did."""
    ever: bool
    """Whether it did."""


def kaplan_meier(times: Iterable[Reached]) -> tuple[Array, Array]:
    """Return the share of runs that had reached the target by each instant.

    A run that never did counts as one that was watched until its time was over (Kaplan and Meier,
    1958).

    Args:
        times: of at least one run.

    Returns:
        Instants in s, increasing, and the share from each of them on; both of shape (instants,).
    """
    from scipy.stats import CensoredData, ecdf  # noqa: PLC0415 - as in `estimate`

    times = list(times)
    found = ecdf(
        CensoredData(
            uncensored=[time.at_s for time in times if time.ever],
            right=[time.at_s for time in times if not time.ever],
        )
    ).cdf
    return found.quantiles, found.probabilities


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


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values.

    Example:
        >>> found = estimate([1.0, 2.0, 3.0])
        >>> f"{found.mean:.1f} ({found.low:.3f} to {found.high:.3f})"
        '2.0 (-0.484 to 4.484)'
    """
    array, n = np.asarray(values, dtype=np.float64), len(values)
    if n == 0:
        return Estimate()
    mean = float(array.mean())
    if n == 1 or not np.isfinite(array).all():
        return Estimate(mean=mean, n=n)
    from scipy import stats  # noqa: PLC0415 - takes a second, in each process of a comparison

    half = float(stats.t.ppf((1 + _LEVEL) / 2, n - 1) * stats.sem(array))
    return Estimate(mean=mean, low=mean - half, high=mean + half, n=n)


def difference(own: Mapping[int, float], reference: Mapping[int, float]) -> Estimate:
    """Return by how much a variant exceeds the reference, over the seeds that both have.

    Args:
        own: value of the variant by seed.
        reference: value of the reference by seed.
    """
    return estimate([own[seed] - reference[seed] for seed in sorted(own.keys() & reference.keys())])


def speed_up(own: Mapping[int, Reached], reference: Mapping[int, Reached]) -> SpeedUp | None:
    """Return how many times as fast as the reference a variant is, over the seeds that both have.

    Ratios are averaged as logarithms, so that twice as fast and half as fast cancel out.

    Args:
        own: by seed, when the variant reached the target.
        reference: the same of the reference.

    Returns:
        None if no run of either reached the target, or a time is 0.
    """
    pairs = [(own[seed], reference[seed]) for seed in sorted(own.keys() & reference.keys())]
    if not any(a.ever or b.ever for a, b in pairs) or any(
        min(a.at_s, b.at_s) <= 0 for a, b in pairs
    ):
        return None
    logs = estimate([float(np.log(b.at_s / a.at_s)) for a, b in pairs])
    ratio = {name: float(np.exp(getattr(logs, name))) for name in ("mean", "low", "high")}
    own_never, reference_never = (any(not pair[i].ever for pair in pairs) for i in (0, 1))
    return SpeedUp(ratio=Estimate(**ratio, n=logs.n), bound=_BOUNDS[own_never][reference_never])
