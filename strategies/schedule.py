"""When the server sends, how many updates it waits for, and what becomes of the rest.

One description covers the K-family of Dutta et al. and what grew out of it. `concurrency` is the
number of jobs out (their P), `buffer_size` the number of updates per step (their K).

Reference:
    Dutta, Wang, Joshi. Slow and Stale Gradients Can Win the Race. IEEE JSAIT 2021.
    Bonawitz et al. Towards Federated Learning at Scale: System Design. MLSys 2019 (over-selection).

AdaSync: merge few updates while the loss is high, and more as it falls.

Early on, any update helps and waiting is the cost; later, the noise of a small merge is. AdaSync
raises the merge size with the square root of how far the loss has fallen.

Reference:
    Dutta, Wang, Joshi. Slow and Stale Gradients Can Win the Race. IEEE JSAIT 2021.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite, sqrt
from typing import Literal

import numpy as np

from fedstale.strategies.settings import is_count, require

# Rounding must not turn a size that is exactly whole into the next one.
_SLACK = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaSync:
    """How the merge size grows.

    Example:
        >>> adasync = AdaSync(start=2, most=16)
        >>> [adasync.size(first_loss=2.0, loss=loss, concurrency=16) for loss in (2.0, 0.5, 0.01)]
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
        require(is_count(self.start), "buffer_size.start", self.start, "an integer >= 1")
        require(self.most >= self.start, "buffer_size.most", self.most, "an integer >= start")
        require(self.form in {"batch", "worker"}, "buffer_size.form", self.form, "batch|worker")
        require(0 <= self.smoothing < 1, "buffer_size.smoothing", self.smoothing, "one in [0, 1)")

    def size(self, *, first_loss: float, loss: float, concurrency: int) -> int:
        """Return the merge size for a training loss.

        With the batch form k = k0 sqrt(F0 / F); with the worker form k is the positive root of
        k^2 / (P - k) = k0^2 / (P - k0) F0 / F, which stays below P workers. Both are rounded up,
        and kept between k0 and the largest size.

        Args:
            first_loss: F0, smoothed training loss at the beginning; NaN while unknown.
            loss: F, smoothed training loss now.
            concurrency: P, jobs that are out at a time.
        """
        if not isfinite(first_loss) or not isfinite(loss) or first_loss <= 0.0:
            return self.start
        if loss <= 0.0:
            return self.most
        fall = first_loss / loss
        if self.form == "batch":
            k = self.start * sqrt(fall)
        elif self.start >= concurrency:
            k = float(concurrency)
        else:
            c = self.start**2 / (concurrency - self.start) * fall
            # The same root as (sqrt(c^2 + 4 c P) - c) / 2, without the cancellation for large c.
            k = 2.0 * concurrency / (1.0 + sqrt(1.0 + 4.0 * concurrency / c))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LearntDeadline:
    """A deadline that follows how long devices have taken.

    Example:
        >>> LearntDeadline(quantile=0.5).seconds([10.0, 20.0, 90.0])
        20.0
    """

    quantile: float = 0.9
    """Share of recent jobs that would have made it, in (0, 1]."""
    at_least_s: float = 0.0
    """Shortest deadline in s."""
    at_most_s: float = inf
    """Longest deadline in s; also holds while no duration has been seen."""

    def __post_init__(self) -> None:
        require(0 < self.quantile <= 1, "deadline_s.quantile", self.quantile, "one in (0, 1]")
        require(
            0 <= self.at_least_s <= self.at_most_s,
            *("deadline_s.at_least_s", self.at_least_s, "seconds from 0 to at_most_s"),
        )

    def seconds(self, durations_s: Sequence[float]) -> float:
        """Return the deadline in s, given recent durations in s."""
        if not durations_s:
            return self.at_most_s
        quantile = float(np.quantile(np.asarray(durations_s), self.quantile))
        return min(max(quantile, self.at_least_s), self.at_most_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How many jobs are out, how many updates make a step, and what becomes of the rest.

    Example:
        >>> k_async(concurrency=8, buffer_size=4).stragglers
        'keep'
    """

    concurrency: int | None = None
    """Jobs out at a time, >= 1; None sends to every node that is online."""
    buffer_size: int | AdaSync | None = None
    """Updates per step, >= 1; None waits for every job that was sent."""
    send: Literal["after_step", "after_reply"] = "after_step"
    """Send again when the model has moved, or whenever a job has ended."""
    stragglers: Literal["keep", "cancel"] = "cancel"
    """Jobs still out at a merge: merge them later as stale ones, or forget them."""
    distinct: bool = False
    """With "after_reply": no device contributes twice to one merge."""
    deadline_s: float | LearntDeadline = inf
    """Merge what there is this long after the last merge, in s; with nothing there, the next
    reply."""
    min_online: int = 1
    """Free nodes to wait for before sending after a merge, >= 1."""

    def __post_init__(self) -> None:
        size, flight = self.buffer_size, self.concurrency
        require(
            flight is None or is_count(flight),
            *("concurrency", flight, "an integer >= 1, or None for every node that is online"),
        )
        require(
            size is None or isinstance(size, AdaSync) or is_count(size),
            *("buffer_size", size, "an integer >= 1 (1 merges every reply at once), AdaSync, None"),
        )
        require(
            self.send in {"after_step", "after_reply"},
            "send",
            self.send,
            "after_step|after_reply",
        )
        require(self.stragglers in {"keep", "cancel"}, "stragglers", self.stragglers, "keep|cancel")
        require(is_count(self.min_online), "min_online", self.min_online, "an integer >= 1")
        require(
            isinstance(self.deadline_s, LearntDeadline) or self.deadline_s > 0,
            *("deadline_s", self.deadline_s, "seconds > 0 (inf for none), or LearntDeadline"),
        )
        require(
            not (self.send == "after_reply" and size is None),
            *("buffer_size", size, 'an integer >= 1 when send = "after_reply"'),
        )
        most = size.most if isinstance(size, AdaSync) else size
        require(
            self.send == "after_reply" or flight is None or most is None or most <= flight,
            *("buffer_size", most, f"at most concurrency = {flight}, or more could never arrive"),
        )


def k_sync(concurrency: int, buffer_size: int | AdaSync) -> Schedule:
    """Wait for the first K devices, forget the others, and send to all again."""
    return Schedule(concurrency=concurrency, buffer_size=buffer_size)


def k_batch_sync(concurrency: int, buffer_size: int | AdaSync) -> Schedule:
    """Wait for the first K updates, several from a fast device; forget the others."""
    return Schedule(concurrency=concurrency, buffer_size=buffer_size, send="after_reply")


def k_async(concurrency: int, buffer_size: int | AdaSync) -> Schedule:
    """Wait for the first K devices and send to these again; the others go on and come late."""
    return Schedule(concurrency=concurrency, buffer_size=buffer_size, stragglers="keep")


def k_batch_async(concurrency: int, buffer_size: int | AdaSync) -> Schedule:
    """Send again after every reply and step after every K; FedBuff's way of waiting."""
    return Schedule(
        concurrency=concurrency, buffer_size=buffer_size, send="after_reply", stragglers="keep"
    )


def over_selection(buffer_size: int, factor: float = 1.3) -> Schedule:
    """Send to more devices than are needed, merge the first, and forget the others."""
    require(factor >= 1, "factor", factor, "a number >= 1, such as 1.3")
    return Schedule(concurrency=ceil(buffer_size * factor), buffer_size=buffer_size)


def semi_synchronous(
    concurrency: int | None,
    deadline_s: float | LearntDeadline,
    *,
    stragglers: Literal["keep", "cancel"] = "keep",
) -> Schedule:
    """Merge what has arrived by a deadline; later replies come into the next merge."""
    return Schedule(concurrency=concurrency, deadline_s=deadline_s, stragglers=stragglers)
