"""Slots: how many jobs may be sent now, by the schedule and by what was lost."""

from math import inf

from fedstale.strategies.schedule import Schedule
from fedstale.strategies.server.jobs import OpenJobs
from fedstale.strategies.types import Stateful


class Slots(Stateful):
    """Fills up the jobs that are out, or replaces those that are lost.

    A schedule that sends after a reply keeps `concurrency` jobs out. One that sends after a step
    sends once for each buffer; a job of it that is lost is replaced by another node, as long as the
    buffer waits for a number of updates.
    """

    saved = ("most_out", "may_send", "is_short", "n_to_replace", "failed_nodes")

    def __init__(self, schedule: Schedule, jobs: OpenJobs) -> None:
        """Follow the jobs that are out."""
        self._schedule, self._jobs = schedule, jobs
        self._after_step = schedule.send == "after_step"
        self.most_out = 0
        """Most training jobs that were out at a time."""
        self.may_send = True
        """Whether more may be sent than what replaces lost jobs."""
        self.is_short = False
        """Whether there were too few nodes, so that it is worth looking again."""
        self.n_to_replace = 0
        self.failed_nodes: dict[int, None] = {}
        """Nodes whose job has failed since the buffer opened, and that replace no other."""

    def open(self) -> None:
        """Begin a buffer."""
        self.may_send, self.is_short = True, False
        self.forget_lost()

    def forget_lost(self) -> None:
        """Replace nothing of what was lost until now."""
        self.n_to_replace = 0
        self.failed_nodes.clear()

    @property
    def begins(self) -> bool:
        """Whether the jobs of a buffer go out next, all at once."""
        return self._after_step and self.may_send

    def free(self) -> float:
        """Return how many jobs may be sent now."""
        self.is_short = False
        free = (self._schedule.concurrency or inf) - self._jobs.n_out["train"]
        return free if self.may_send else min(free, self.n_to_replace)

    def n_of(self, n_nodes: int, free: float) -> int:
        """Return how many of some free nodes to send to, 0 if these are too few."""
        if n_nodes < (self._schedule.min_available_nodes if self.begins else 1):
            self.is_short = True
            return 0
        return int(min(free, self._schedule.n_sent(n_nodes) if self.may_send else n_nodes))

    def picked(self, n: int) -> None:
        """Note that n nodes were picked, whose jobs are sent next; one may be lost in that."""
        if self.begins and n:
            self.forget_lost()
        elif not self.may_send:
            self.n_to_replace -= n

    def sent(self, n: int, free: float) -> None:
        """Note that jobs of n nodes were sent, of so many that might have been."""
        begins = self.begins
        self.may_send = self.may_send and not (self._after_step and n)
        self.is_short = n < free and (self.may_send or not begins)
        self.most_out = max(self.most_out, self._jobs.n_out["train"])

    def lose(self, node_id: int) -> None:
        """Note that a training job failed; another node replaces it."""
        self.failed_nodes[node_id] = None
        self.count_lost()

    def count_lost(self) -> None:
        """Count a job that will bring nothing, where the buffer waits for a number of updates."""
        if self._after_step and self._schedule.buffer_size is not None:
            self.n_to_replace += 1
