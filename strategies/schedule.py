"""When the server sends jobs, how many updates make a server step, and what becomes of stragglers.

`Schedule` describes all of it; the functions below it are the published schedules. `concurrency` is
the number of jobs in flight (P in Dutta et al.), `buffer_size` the number of updates of a server
step (their K). A `Pace` may decide both anew for each step. Where a run stands in its schedule is
its `Standing`.

Reference:
    Dutta, Wang, Joshi. Slow and Stale Gradients Can Win the Race. IEEE JSAIT 2021 (the K-family).
    Bonawitz et al. Towards Federated Learning at Scale: System Design. MLSys 2019 (over-selection).
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf
from typing import Annotated, Literal

from fedstale.strategies.types import (
    AtLeastOne,
    Count,
    PositiveShare,
    Purpose,
    Seconds,
    Stateful,
    check_fields,
    checked,
    require,
)

Stragglers = Literal["keep", "cancel"]
Updates = Annotated[Count, "an integer >= 1 (1 steps at every reply)"]
Deadline = Annotated[Seconds, "seconds > 0 (inf for none)"]
Overhead = Annotated[AtLeastOne, "a finite number >= 1, such as 1.3"]

RECHECK_S = 30.0
"""A strategy whose selector picks no node, or too few, selects again after this long."""

# Where trainings take next to no time, a message may still take some seconds.
_LAST_WAIT_S = 5.0
_DURATIONS_KEPT = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How many jobs are in flight, how many updates make a server step, and when to send.

    Example:
        >>> k_async(concurrency=8, buffer_size=4).stragglers
        'keep'
    """

    concurrency: Count | None = None
    """Jobs in flight, the most with a pace, >= 1; None sends to every free node, or a share."""
    buffer_size: Updates | None = None
    """Updates of a server step, >= 1; None waits for every job that was sent."""
    send: Literal["after_step", "after_reply"] = "after_step"
    """Send again after a server step, or whenever a job has ended. With "after_step" and a buffer
    size, a job that fails before its buffer closes is replaced by one of another free node."""
    stragglers: Stragglers = "cancel"
    """Jobs in flight at a server step: keep them for a later step as stale updates, or cancel."""
    distinct: bool = False
    """With "after_reply": no device contributes twice to one server step."""
    deadline_s: Deadline = inf
    """Step with the updates there are this long after the last step, in s; if there are none, with
    the next one."""
    fraction_train: PositiveShare = 1.0
    """Share of the free nodes to send to, in (0, 1], rounded down but at least one node; below 1
    only without `concurrency` and with "after_step". Flower's share is that of all connected nodes,
    which are the free ones when every reply was waited for."""
    min_available_nodes: Count = 1
    """Free nodes to wait for before sending after a server step, >= 1. Flower counts all connected
    nodes, also those that have not answered yet, and its default is 2."""
    recheck_s: Seconds = RECHECK_S
    """Time in s after which to look again for nodes, when too few are online."""

    def __post_init__(self) -> None:
        check_fields(self)
        jobs, size, share = self.concurrency, self.buffer_size, self.fraction_train
        after_step = self.send == "after_step"
        if jobs is not None or not after_step:
            accepted = '1, with a concurrency or send = "after_reply"'
            require(share == 1, "Schedule.fraction_train", share, accepted)
        if not after_step:
            accepted = 'an integer >= 1 when send = "after_reply"'
            require(size is not None, "Schedule.buffer_size", size, accepted)
        elif jobs is not None and size is not None:
            accepted = f"at most concurrency = {jobs}, or more could never arrive"
            require(size <= jobs, "Schedule.buffer_size", size, accepted)


@checked
def k_sync(concurrency: Count, buffer_size: Updates) -> Schedule:
    """Wait for the first K devices, cancel the others, and send to all again."""
    return Schedule(concurrency=concurrency, buffer_size=buffer_size)


@checked
def k_batch_sync(concurrency: Count, buffer_size: Updates) -> Schedule:
    """Wait for the first K updates, several from a fast device; cancel the other jobs."""
    return Schedule(concurrency=concurrency, buffer_size=buffer_size, send="after_reply")


@checked
def k_async(concurrency: Count, buffer_size: Updates) -> Schedule:
    """Wait for the first K devices and send to these again; the others become stale."""
    return Schedule(concurrency=concurrency, buffer_size=buffer_size, stragglers="keep")


@checked
def k_batch_async(concurrency: Count, buffer_size: Updates) -> Schedule:
    """Send again after every reply and step after every K; the schedule of FedBuff."""
    return Schedule(
        concurrency=concurrency, buffer_size=buffer_size, send="after_reply", stragglers="keep"
    )


@checked
def over_selection(buffer_size: Count, factor: Overhead = 1.3) -> Schedule:
    """Send to more devices than are needed, take the first updates, and cancel the other jobs."""
    return Schedule(concurrency=ceil(buffer_size * factor), buffer_size=buffer_size)


@checked
def semi_synchronous(
    concurrency: Count | None,
    deadline_s: Deadline,
    *,
    stragglers: Stragglers = "keep",
) -> Schedule:
    """Step with what has arrived by a deadline; later replies count in the next step."""
    return Schedule(concurrency=concurrency, deadline_s=deadline_s, stragglers=stragglers)


class Standing(Stateful):
    """The state of a run in its schedule: jobs to send, updates missing, and the end of a wait.

    A schedule that sends after a reply keeps `n_jobs` out. One that sends after a step sends once
    for each buffer; a job of it that is lost is replaced by another node, as long as the buffer
    waits for a number of updates.

    Example:
        >>> standing = Standing(k_async(4, 2), {"train": 3}, 60.0)
        >>> standing.room(), standing.n_missing(0)
        (1, 2)
        >>> standing.n_jobs, standing.size = 2, 1
        >>> standing.room(), standing.n_missing(0)
        (-1, 1)
    """

    saved = (
        *("most_out", "may_send", "is_short", "n_to_replace", "failed_nodes"),
        *("durations_s", "changed_at", "deadline", "n_jobs", "size"),
    )

    def __init__(
        self, schedule: Schedule, n_out: Mapping[Purpose, int], timeout_s: float, now: float = 0.0
    ) -> None:
        """Begin the first buffer.

        Args:
            schedule: the settings.
            n_out: jobs that are out by their purpose; followed.
            timeout_s: time in s after which a job is given up.
            now: the instant in s.
        """
        self._schedule, self._n_out, self._timeout_s = schedule, n_out, timeout_s
        self._after_step = schedule.send == "after_step"
        self.most_out = 0
        """Most training jobs that were out at a time."""
        self.failed_nodes: dict[int, None] = {}
        """Nodes whose job has failed since the buffer opened, and that replace no other."""
        self.durations_s: deque[float] = deque(maxlen=_DURATIONS_KEPT)
        """Of the latest jobs that were answered, in s."""
        self.open(now)

    def open(self, now: float) -> None:
        """Begin a buffer, with the schedule's numbers; a pace has others."""
        self.n_jobs: float = self._schedule.concurrency or inf
        """Jobs in flight until the next buffer."""
        self.size = self._schedule.buffer_size
        """Updates of the step; None waits for every job that was sent."""
        self.is_short = False
        """Whether there were too few nodes, so that it is worth looking again."""
        self.changed_at = now
        """When the buffer was opened, or a job last ended."""
        self.deadline = now + self._schedule.deadline_s
        """When the buffer closes with what is in it."""
        self.may_send, self.n_to_replace = True, 0
        """Whether more may be sent than what replaces lost jobs, and the number of these."""
        self.failed_nodes.clear()

    # What may be sent.

    def room(self) -> float:
        """Return the number of jobs that may be sent now, where nodes are free."""
        self.is_short = False
        room = self.n_jobs - self._n_out["train"]
        return room if self.may_send else min(room, self.n_to_replace)

    def n_of(self, n_free: int, room: float) -> int:
        """Return the number of jobs to send where so many nodes are free; 0 if too few are."""
        schedule = self._schedule
        if n_free < (schedule.min_available_nodes if self._after_step and self.may_send else 1):
            self.is_short = True
            return 0
        share = max(int(n_free * schedule.fraction_train), 1) if self.may_send else n_free
        return int(min(room, share))

    def picked(self, n: int) -> None:
        """Note that n nodes were picked, whose jobs are sent next; one may be lost in that."""
        if not self.may_send:
            self.n_to_replace -= n
        elif self._after_step and n:
            self.n_to_replace = 0
            self.failed_nodes.clear()

    def sent(self, n: int, room: float) -> None:
        """Note that jobs of n nodes were sent, of so many that might have been."""
        begins = self._after_step and self.may_send
        self.may_send = self.may_send and not (self._after_step and n)
        self.is_short = n < room and (self.may_send or not begins)
        self.most_out = max(self.most_out, self._n_out["train"])

    def lose(self, node_id: int | None = None) -> None:
        """Note that a job brings nothing; another one replaces it where a number is waited for.

        Args:
            node_id: that failed, and replaces no other; None for one that did not.
        """
        if node_id is not None:
            self.failed_nodes[node_id] = None
        if self._after_step and self.size is not None:
            self.n_to_replace += 1

    def begin_again(self) -> None:
        """Send as to an empty buffer: no job is out, and none has brought anything."""
        self.may_send, self.n_to_replace = True, 0
        self.failed_nodes.clear()

    # What is missing.

    def n_missing(self, n: int) -> int | None:
        """Return the updates that a step waits for beyond n; None where it waits for no number."""
        return None if self.size is None else max(self.size - n, 0)

    # When to go on anyway.

    def left_s(self, now: float) -> float:
        """Return the longest duration of a job that counts, in s; inf where stragglers are kept."""
        return inf if self._schedule.stragglers == "keep" else max(self.deadline - now, 0.0)

    def next_instant(self, now: float) -> float:
        """Return the instant at which a buffer with updates may close."""
        deadline = self.deadline if now < self.deadline else inf
        is_out = self._n_out["train"]
        return deadline if is_out else min(deadline, self.changed_at + self._timeout_s)

    def is_over(self, now: float) -> bool:
        """Decide whether to step with the updates there are, if no job is out.

        After a reply, jobs go out again at once; if that is impossible for long, go on without.
        """
        return self._after_step or now >= self.changed_at + self._timeout_s

    def patience_s(self) -> float:
        """Return the longest wait for the last evaluations, in s.

        To evaluate takes a device less than to train, so twice the longest of the last trainings is
        enough for one that stays online. It is never more than a job may take, or the schedule's
        deadline gives a whole round.
        """
        longest = max(self.durations_s, default=inf)
        wait_s = min(2.0 * longest, self._schedule.deadline_s)
        return min(self._timeout_s, max(_LAST_WAIT_S, wait_s))
