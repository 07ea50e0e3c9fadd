"""AdaSync: merge few updates while the loss is high, and more as it falls.

Early on, any update helps and waiting is the cost; later, the noise of a small merge is. AdaSync
raises the merge size with the square root of how far the loss has fallen.

Reference:
    Dutta, Wang, Joshi. Slow and Stale Gradients Can Win the Race. IEEE JSAIT 2021.
"""

from dataclasses import dataclass
from math import ceil, isfinite, sqrt
from typing import Literal

from fedstale.strategies.settings import is_count, require

# Rounding must not turn a size that is exactly whole into the next one.
_SLACK = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaSync:
    """How the merge size grows.

    Example:
        >>> adasync = AdaSync(start=2, most=16)
        >>> [adasync.size(first_loss=2.0, loss=loss, in_flight=16) for loss in (2.0, 0.5, 0.01)]
        [2, 4, 16]
    """

    start: int = 1
    """k0, the merge size at the first loss, >= 1."""
    most: int
    """Largest merge size, >= start."""
    form: Literal["batch", "worker"] = "batch"
    """"batch" for schedules that send after each reply, "worker" for K-sync and K-async."""
    smoothing: float = 0.9
    """Decay of the running mean of the training loss, in [0, 1)."""

    def __post_init__(self) -> None:
        require(is_count(self.start), "merge_size.start", self.start, "an integer >= 1")
        require(self.most >= self.start, "merge_size.most", self.most, "an integer >= start")
        require(self.form in {"batch", "worker"}, "merge_size.form", self.form, "batch|worker")
        require(0 <= self.smoothing < 1, "merge_size.smoothing", self.smoothing, "one in [0, 1)")

    def size(self, *, first_loss: float, loss: float, in_flight: int) -> int:
        """Return the merge size for a training loss.

        With the batch form k = k0 sqrt(F0 / F); with the worker form k is the positive root of
        k^2 / (P - k) = k0^2 / (P - k0) F0 / F, which stays below P workers. Both are rounded up,
        and kept between k0 and the largest size.

        Args:
            first_loss: F0, smoothed training loss at the beginning; NaN while unknown.
            loss: F, smoothed training loss now.
            in_flight: P, jobs that are out at a time.
        """
        if not isfinite(first_loss) or not isfinite(loss) or first_loss <= 0.0:
            return self.start
        if loss <= 0.0:
            return self.most
        fall = first_loss / loss
        if self.form == "batch":
            k = self.start * sqrt(fall)
        elif self.start >= in_flight:
            k = float(in_flight)
        else:
            c = self.start**2 / (in_flight - self.start) * fall
            # The same root as (sqrt(c^2 + 4 c P) - c) / 2, without the cancellation for large c.
            k = 2.0 * in_flight / (1.0 + sqrt(1.0 + 4.0 * in_flight / c))
        return min(max(ceil(k - _SLACK), self.start), self.most)


class SmoothedLoss:
    """Exponential running mean, and its first value.

    Example:
        >>> loss = SmoothedLoss(0.5)
        >>> for value in (4.0, 2.0, float("nan")):
        ...     loss.add(value)
        >>> loss.first, loss.now
        (4.0, 3.0)
    """

    def __init__(self, decay: float) -> None:
        """Set the decay in [0, 1)."""
        self.decay = decay
        self.first = self.now = float("nan")

    def add(self, loss: float) -> None:
        """Take in a loss; one that is not finite is left out."""
        if not isfinite(loss):
            return
        if not isfinite(self.first):
            self.first = self.now = loss
        self.now = self.decay * self.now + (1.0 - self.decay) * loss
