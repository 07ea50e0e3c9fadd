"""The jobs in flight, and the one place where a job ends.

A job's identity is its message id. Timeouts are instants in a heap, so they happen on the clock and
not when something else arrives. A job that was given up may still be answered: its reply is
recognised, and rejected. Flower cannot recall a message, so the node of a cancelled job stays busy
until it answers, or until the job would have timed out.
"""

import heapq
from collections import Counter
from collections.abc import KeysView, Mapping, Set
from dataclasses import astuple, dataclass, field
from itertools import starmap
from math import inf
from typing import Any, Literal

from fedstale.strategies.messages import FormatName
from fedstale.strategies.types import State, Stateful

Purpose = Literal["train", "evaluate", "query"]
PURPOSES: tuple[Purpose, ...] = ("train", "evaluate", "query")
Ending = Literal["accepted", "rejected", "failed", "timed out", "cancelled"]


@dataclass(frozen=True, slots=True)
class SentJob:
    """One message that was sent."""

    job_id: int
    """Counts up from 0; sums run in this order."""
    message_id: str
    node_id: int
    purpose: Purpose
    base_version: int
    """Version of the model that it carried."""
    sent_at: float
    """Instant in s."""
    up: FormatName | None = None
    """Format that its reply was asked in; None for in full."""
    down: FormatName | None = None
    """Format of the model that it carried; None for in full."""
    share: float | None = None
    """Share of the work that it asked for; None where it asked for none."""


@dataclass
class OpenJobs(Stateful):
    """Jobs that are out, jobs that were given up but not answered yet, and how each job ended."""

    saved = ("n_sent", "endings", "_recalled", "_deadlines")

    n_sent: int = 0
    endings: dict[Ending, int] = field(default_factory=dict)
    """Number of jobs that ended in each way."""
    n_out: Counter[Purpose] = field(default_factory=Counter)
    """Number of jobs that are out for each purpose."""
    _open: dict[str, SentJob] = field(default_factory=dict)
    _given_up: dict[str, tuple[SentJob, Ending]] = field(default_factory=dict)
    _nodes: dict[int, int] = field(default_factory=dict)
    _recalled: dict[str, int] = field(default_factory=dict)
    _deadlines: list[tuple[float, int, str]] = field(default_factory=list)
    _awaited: dict[str, None] = field(default_factory=dict)
    _moved: set[int] = field(default_factory=set)

    def send(
        self,
        message_id: str,
        *,
        node_id: int,
        purpose: Purpose,
        version: int,
        now: float,
        timeout_s: float,
        up: FormatName | None = None,
        down: FormatName | None = None,
        share: float | None = None,
    ) -> SentJob:
        """Open a job."""
        job = SentJob(
            job_id=self.n_sent,
            message_id=message_id,
            node_id=node_id,
            purpose=purpose,
            base_version=version,
            sent_at=now,
            up=up,
            down=down,
            share=share,
        )
        self.n_sent += 1
        self._open[message_id] = job
        self._awaited[message_id] = None
        if timeout_s < inf:
            heapq.heappush(self._deadlines, (now + timeout_s, job.job_id, message_id))
        self.n_out[purpose] += 1
        if purpose == "train":
            self._nodes[node_id] = self._nodes.get(node_id, 0) + 1
            self._moved.add(node_id)
        return job

    def end(self, message_id: str, ending: Ending) -> SentJob:
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

    def open_job(self, message_id: str) -> SentJob | None:
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

    def expired(self, now: float) -> list[SentJob]:
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

    def open_jobs(self, purpose: Purpose) -> list[SentJob]:
        """Return the jobs that are out for a purpose, in the order of sending."""
        return [job for job in self._open.values() if job.purpose == purpose]

    def awaited(self) -> KeysView[str]:
        """Return the message ids that may still be answered, given-up ones too; a live view."""
        return self._awaited.keys()

    def state_dict(self) -> State:
        """Return all jobs that are known."""
        return super().state_dict() | {
            "open": [astuple(job) for job in self._open.values()],
            "given_up": [(astuple(job), ending) for job, ending in self._given_up.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        super().load_state_dict(state)
        self._open = {job.message_id: job for job in starmap(SentJob, state["open"])}
        given_up = [(SentJob(*fields), ending) for fields, ending in state["given_up"]]
        self._given_up = {job.message_id: (job, ending) for job, ending in given_up}
        self._awaited = dict.fromkeys([*self._open, *self._given_up])
        self.n_out = Counter(job.purpose for job in self._open.values())
        busy = [job.node_id for job in self.open_jobs("train")] + [*self._recalled.values()]
        self._moved |= {*self._nodes, *busy}
        self._nodes = dict(Counter(busy))
