"""The jobs in flight, and the one place where a job ends.

A job's identity is its message id. Timeouts are instants in a heap, so they happen on the clock and
not when something else arrives. A job that was given up may still be answered: its reply is
recognised, and rejected. Flower cannot recall a message, so the node of a cancelled job stays busy
until it answers, or until the job would have timed out.
"""

import heapq
from collections import Counter
from collections.abc import KeysView, Mapping, Set
from dataclasses import dataclass, field, fields
from itertools import starmap
from math import inf
from typing import Any

import numpy as np

from fedstale.strategies.types import Ending, Job, NodeIds, Purpose, State, Stateful


@dataclass
class OpenJobs(Stateful):
    """Jobs that are out, jobs that were given up but not answered yet, and how each job ended."""

    saved = ("n_sent", "endings", "_recalled", "_deadlines")

    n_sent: int = 0
    endings: dict[Ending, int] = field(default_factory=dict)
    """Number of jobs that ended in each way."""
    n_out: Counter[Purpose] = field(default_factory=Counter)
    """Number of jobs that are out for each purpose; always the same object."""
    _open: dict[str, Job] = field(default_factory=dict)
    _given_up: dict[str, tuple[Job, Ending]] = field(default_factory=dict)
    _nodes: dict[int, int] = field(default_factory=dict)
    _recalled: dict[str, int] = field(default_factory=dict)
    _deadlines: list[tuple[float, int, str]] = field(default_factory=list)
    _awaited: dict[str, None] = field(default_factory=dict)
    _moved: set[int] = field(default_factory=set)

    def open(self, job: Job, timeout_s: float) -> None:
        """Open a job whose message was sent."""
        message_id, node_id = job.message_id, job.node_id
        self.n_sent += 1
        self._open[message_id] = job
        self._awaited[message_id] = None
        if timeout_s < inf:
            heapq.heappush(self._deadlines, (job.sent_at + timeout_s, job.job_id, message_id))
        self.n_out[job.purpose] += 1
        if job.purpose == "train":
            self._nodes[node_id] = self._nodes.get(node_id, 0) + 1
            self._moved.add(node_id)

    def end(self, message_id: str, ending: Ending) -> Job:
        """End an open job; one given up stays known until its reply comes."""
        job = self._open.pop(message_id)
        self.endings[ending] = self.endings.get(ending, 0) + 1
        if ending in {"timed out", "cancelled"}:
            self._given_up[message_id] = (job, ending)
        else:
            del self._awaited[message_id]
        self.n_out[job.purpose] -= 1
        if job.purpose == "train":
            if ending == "cancelled":
                self._recalled[message_id] = job.node_id
            else:
                self._free(job.node_id)
        return job

    def open_job(self, message_id: str) -> Job | None:
        """Return a job that is out, or None."""
        return self._open.get(message_id)

    def forget(self, message_id: str) -> Ending | None:
        """Return how a given-up job had ended, and forget it; None if it is not one."""
        self._free_recalled(message_id)
        known = self._given_up.pop(message_id, None)
        if known is None:
            return None
        del self._awaited[message_id]
        return known[1]

    def expired(self, now: float) -> list[Job]:
        """Return open jobs whose deadline has passed, in the order of deadlines."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            message_id = heapq.heappop(self._deadlines)[2]
            job = self._open.get(message_id)
            if job is not None:
                late.append(job)
            self._free_recalled(message_id)
        return late

    @property
    def next_deadline(self) -> float:
        """Instant in s of the next timeout of an open or cancelled job; inf if there is none."""
        while self._deadlines:
            at, _, message_id = self._deadlines[0]
            if message_id in self._open or message_id in self._recalled:
                return at
            heapq.heappop(self._deadlines)
        return inf

    @property
    def n_open(self) -> int:
        """Jobs of any kind that are out."""
        return len(self._open)

    def nodes_out(self) -> NodeIds:
        """Return the nodes with a training job that is out, ascending; shape (n,)."""
        nodes = {job.node_id for job in self._open.values() if job.purpose == "train"}
        return np.array(sorted(nodes), dtype=np.uint64)

    @property
    def busy_nodes(self) -> KeysView[int]:
        """Nodes that have a training job, cancelled or not; a view that changes with the jobs."""
        return self._nodes.keys()

    def take_moved(self) -> Set[int]:
        """Return nodes that may have become busy or free since this was last called."""
        moved, self._moved = self._moved, set()
        return moved

    def _free_recalled(self, message_id: str) -> None:
        node_id = self._recalled.pop(message_id, None)
        if node_id is not None:
            self._free(node_id)

    def _free(self, node_id: int) -> None:
        self._nodes[node_id] -= 1
        if not self._nodes[node_id]:
            del self._nodes[node_id]
            self._moved.add(node_id)

    def open_jobs(self, purpose: Purpose) -> list[Job]:
        """Return the jobs that are out for a purpose, in the order of sending."""
        return [job for job in self._open.values() if job.purpose == purpose]

    def awaited(self) -> KeysView[str]:
        """Return the message ids that may still be answered, given-up ones too; a live view."""
        return self._awaited.keys()

    def state_dict(self) -> State:
        """Return all jobs that are known."""
        return super().state_dict() | {
            "open": [_row(job) for job in self._open.values()],
            "given_up": [(_row(job), ending) for job, ending in self._given_up.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        super().load_state_dict(state)
        self._open = {job.message_id: job for job in starmap(Job, state["open"])}
        given_up = [(Job(*row), ending) for row, ending in state["given_up"]]
        self._given_up = {job.message_id: (job, ending) for job, ending in given_up}
        self._awaited = dict.fromkeys([*self._open, *self._given_up])
        self.n_out.clear()
        self.n_out.update(job.purpose for job in self._open.values())
        busy = [job.node_id for job in self.open_jobs("train")] + [*self._recalled.values()]
        self._moved |= {*self._nodes, *busy}
        self._nodes = dict(Counter(busy))


def _row(job: Job) -> tuple[Any, ...]:
    return tuple(getattr(job, field.name) for field in fields(job))
