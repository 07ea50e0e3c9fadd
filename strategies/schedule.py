"""When the server sends, how many updates it waits for, and what becomes of the rest.

One description covers the K-family of Dutta et al. and what grew out of it. `in_flight` is the
number of jobs out (their P), `merge_size` the number of updates per step (their K).

Reference:
    Dutta, Wang, Joshi. Slow and Stale Gradients Can Win the Race. IEEE JSAIT 2021.
    Bonawitz et al. Towards Federated Learning at Scale: System Design. MLSys 2019 (over-selection).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal

import numpy as np

from fedstale.strategies.adasync import AdaSync
from fedstale.strategies.settings import is_count, require


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
        >>> k_async(in_flight=8, merge_size=4).rest
        'keep'
    """

    in_flight: int | None = None
    """Jobs out at a time, >= 1; None sends to every node that is online."""
    merge_size: int | AdaSync | None = None
    """Updates per step, >= 1; None waits for every job that was sent."""
    send: Literal["after_merge", "after_reply"] = "after_merge"
    """Send again when the model has moved, or whenever a job has ended."""
    rest: Literal["keep", "cancel"] = "cancel"
    """Jobs still out at a merge: merge them later as stale ones, or forget them."""
    distinct: bool = False
    """With "after_reply": no device contributes twice to one merge."""
    deadline_s: float | LearntDeadline = inf
    """Merge what there is this long after the last merge, in s; with nothing there, the next
    reply."""
    min_online: int = 1
    """Free nodes to wait for before sending after a merge, >= 1."""

    def __post_init__(self) -> None:
        size, flight = self.merge_size, self.in_flight
        require(
            flight is None or is_count(flight),
            *("in_flight", flight, "an integer >= 1, or None for every node that is online"),
        )
        require(
            size is None or isinstance(size, AdaSync) or is_count(size),
            *("merge_size", size, "an integer >= 1 (1 merges every reply at once), AdaSync, None"),
        )
        require(
            self.send in {"after_merge", "after_reply"},
            "send",
            self.send,
            "after_merge|after_reply",
        )
        require(self.rest in {"keep", "cancel"}, "rest", self.rest, "keep|cancel")
        require(is_count(self.min_online), "min_online", self.min_online, "an integer >= 1")
        require(
            isinstance(self.deadline_s, LearntDeadline) or self.deadline_s > 0,
            *("deadline_s", self.deadline_s, "seconds > 0 (inf for none), or LearntDeadline"),
        )
        require(
            not (self.send == "after_reply" and size is None),
            *("merge_size", size, 'an integer >= 1 when send = "after_reply"'),
        )
        most = size.most if isinstance(size, AdaSync) else size
        require(
            self.send == "after_reply" or flight is None or most is None or most <= flight,
            *("merge_size", most, f"at most in_flight = {flight}, or more could never arrive"),
        )


def k_sync(in_flight: int, merge_size: int | AdaSync) -> Schedule:
    """Wait for the first K devices, forget the others, and send to all again."""
    return Schedule(in_flight=in_flight, merge_size=merge_size)


def k_batch_sync(in_flight: int, merge_size: int | AdaSync) -> Schedule:
    """Wait for the first K updates, several from a fast device; forget the others."""
    return Schedule(in_flight=in_flight, merge_size=merge_size, send="after_reply")


def k_async(in_flight: int, merge_size: int | AdaSync) -> Schedule:
    """Wait for the first K devices and send to these again; the others go on and come late."""
    return Schedule(in_flight=in_flight, merge_size=merge_size, rest="keep")


def k_batch_async(in_flight: int, merge_size: int | AdaSync) -> Schedule:
    """Send again after every reply and step after every K; FedBuff's way of waiting."""
    return Schedule(in_flight=in_flight, merge_size=merge_size, send="after_reply", rest="keep")


def over_selection(merge_size: int, factor: float = 1.3) -> Schedule:
    """Send to more devices than are needed, merge the first, and forget the others."""
    require(factor >= 1, "factor", factor, "a number >= 1, such as 1.3")
    return Schedule(in_flight=ceil(merge_size * factor), merge_size=merge_size)


def semi_synchronous(
    in_flight: int | None,
    deadline_s: float | LearntDeadline,
    *,
    rest: Literal["keep", "cancel"] = "keep",
) -> Schedule:
    """Merge what has arrived by a deadline; later replies come into the next merge."""
    return Schedule(in_flight=in_flight, deadline_s=deadline_s, rest=rest)
