"""How many jobs are in flight and how many updates make the next step, decided for each step.

A schedule states both numbers once. A `Pace` is asked for them when a buffer opens, by what is
known then, and they hold until the next one opens; the schedule's `concurrency` is the most that
it may have in flight. `pace=` of a strategy sets it, and so does a selector that is a `Pace` too.

Reference:
    Dutta, Wang, Joshi. Slow and Stale Gradients Can Win the Race. IEEE JSAIT 2021 (AdaSync).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf, isfinite, nan, sqrt
from typing import ClassVar, Literal

from fedstale.errors import FedstaleError
from fedstale.strategies.types import Candidates, Count, Decay, Part, is_count, require


@dataclass(frozen=True, kw_only=True)
class Progress:
    """State of the run when a buffer opens."""

    version: int = 0
    """Version of the model that is sent now."""
    now: float = 0.0
    """The instant in s."""
    concurrency: int
    """Of the schedule: the most jobs that may be in flight."""
    buffer_size: int | None
    """Of the schedule: updates of a server step; None where it waits for all that was sent."""
    after_step: bool = False
    """Whether jobs are sent after a step, which then takes no more updates than jobs."""
    least: int = 1
    """Updates that a step needs, such as those of a robust rule."""
    n_in_flight: int = 0
    """Training jobs that are out."""
    loss: float = nan
    """Mean training loss of the step that was just made; NaN where none was, or states none."""
    find: Callable[[], Candidates] = lambda: Candidates.of([])
    """Returns the candidates."""

    @cached_property
    def candidates(self) -> Candidates:
        """The free nodes with what is known of them; they are looked up when this is first read."""
        return self.find()


class Pace(Part, ABC):
    """Decides for each server step how many jobs are in flight, and how many updates make it."""

    reads_replies: ClassVar[bool] = True
    """Whether the numbers depend on what devices state, such as their losses."""

    @abstractmethod
    def numbers(self, at: Progress) -> tuple[int, int | None]:
        """Return the jobs in flight and the updates of the next step; called once a buffer.

        Args:
            at: where the run stands.

        Returns:
            At least one job and at most `at.concurrency`, and at least `at.least` updates. Where
            jobs are sent after a step, no more updates than jobs, or None to wait for all of them.
            Jobs that are out beyond the first number go on; none is sent until fewer are.
        """


class Ramp(Pace):
    """Begins with few jobs in flight, and has one more every few versions.

    Early on one job after another teaches a model nearly as much as many at once: what is in flight
    is stale as soon as the model has moved, and it moves fast then. It saves device-hours, and may
    take longer. A step takes no more updates than there are jobs in flight.

    Example:
        >>> ramp = Ramp(50)
        >>> [ramp.numbers(Progress(version=v, concurrency=4, buffer_size=2)) for v in (0, 50, 900)]
        [(1, 1), (2, 2), (4, 2)]
    """

    reads_replies = False

    def __init__(self, every: Count, start: Count = 1) -> None:
        """Set the versions from one job more to the next, and the jobs at first; both >= 1."""
        self.every, self.start = every, start

    def numbers(self, at: Progress) -> tuple[int, int | None]:
        """Return the jobs in flight at a version, and the buffer size if these are as many."""
        n = min(self.start + at.version // self.every, at.concurrency)
        return n, at.buffer_size and min(at.buffer_size, n)


class PaceByLoss(Pace):
    """Decides by the training loss of the first step and its running mean; NaN before it."""

    saved = ("first_loss", "loss")
    first_loss = loss = nan

    def follow(self, loss: float, decay: float) -> None:
        """Add the loss of a step to the running mean, unless it is unknown."""
        if isfinite(loss):
            if not isfinite(self.first_loss):
                self.first_loss = self.loss = loss
            self.loss = decay * self.loss + (1.0 - decay) * loss


class AdaSync(PaceByLoss):
    """Raises the updates of a step with the square root of how far the training loss has fallen.

    Early on any update helps and waiting is the cost; later the noise of a small buffer is. With
    F0 the smoothed loss at the beginning, F that of now, P jobs in flight and k0 the schedule's
    buffer size, the batch form has k = k0 sqrt(F0 / F); with the worker form k is the positive root
    of k^2 / (P - k) = k0^2 / (P - k0) F0 / F, which stays below P workers. Both are rounded up, and
    kept between k0 and the largest size; where jobs are sent after a step, that is P at most.

    Example:
        >>> adasync = AdaSync(16, smoothing=0.0)
        >>> steps = [Progress(concurrency=16, buffer_size=2, loss=x) for x in (2.0, 0.5, 0.01)]
        >>> [adasync.numbers(at) for at in steps]
        [(16, 2), (16, 4), (16, 16)]
    """

    def __init__(
        self,
        most: Count | None = None,
        *,
        form: Literal["batch", "worker"] = "batch",
        smoothing: Decay = 0.9,
    ) -> None:
        """Set the rule.

        Args:
            most: largest number of updates; None for as many as jobs are in flight.
            form: "batch" for schedules that send after each reply, "worker" for K-sync and K-async.
            smoothing: decay of the running mean of the training loss, in [0, 1).
        """
        self.most, self.form, self.smoothing = most, form, smoothing

    def numbers(self, at: Progress) -> tuple[int, int | None]:
        """Return all jobs that may be in flight, and the number of updates for the loss."""
        self.follow(at.loss, self.smoothing)
        jobs, start = at.concurrency, at.buffer_size or 1
        most = self.most or max(jobs, start)
        require(most >= start, "AdaSync.most", most, f"at least buffer_size = {start}")
        k = self._root(start, jobs) if self.first_loss > 0.0 else start
        # Rounding must not turn a size that is exactly whole into the next one.
        size = most if k >= most else max(ceil(k - 1e-9), start)
        return jobs, min(size, jobs) if at.after_step else size

    def _root(self, start: int, jobs: int) -> float:
        if self.loss <= 0.0:
            return inf
        fall = self.first_loss / self.loss
        if self.form == "batch":
            return start * sqrt(fall)
        if start >= jobs:
            return jobs
        c = start**2 / (jobs - start) * fall
        # The same root as (sqrt(c^2 + 4 c P) - c) / 2, without the cancellation for large c.
        return 2.0 * jobs / (1.0 + sqrt(1.0 + 4.0 * jobs / c))


def numbers_of(pace: Pace, at: Progress) -> tuple[int, int | None]:
    """Ask a pace for its numbers.

    Raises:
        FedstaleError: it breaks its contract.
    """
    jobs, size = pace.numbers(at)
    is_fit = is_count(jobs) and jobs <= at.concurrency
    is_fit &= at.after_step if size is None else is_count(size, at.least)
    if not is_fit or (at.after_step and size is not None and size > jobs):
        bound = ", and no more than jobs" if at.after_step else ""
        raise FedstaleError(
            f"pace {pace!r} returned {(jobs, size)} at version {at.version}: expected 1 to "
            f"{at.concurrency} jobs in flight, and {at.least} updates of a step or more{bound}"
        )
    return int(jobs), size and int(size)
