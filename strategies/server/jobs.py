"""Jobs: their nodes and contents, those in flight, and their ends.

A job's identity is its message id. Timeouts are instants in a heap, so they happen on the clock and
not when something else arrives. A job that was given up may still be answered: its reply is
recognised, and rejected. Flower cannot recall a message, so the node of a cancelled job stays busy
until it answers, or until the job would have timed out.
"""

import heapq
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import starmap
from math import inf
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, ConfigRecordValues, Message, MessageType, RecordDict

from fedstale.errors import FedstaleError
from fedstale.flower import content_bytes
from fedstale.strategies.selection import Selector
from fedstale.strategies.server.runtime import RuntimeGrid
from fedstale.strategies.server.versions import Versions
from fedstale.strategies.stages import Pick, Stage
from fedstale.strategies.types import (
    Bits,
    End,
    Ending,
    History,
    Job,
    NodeIds,
    NodeIndex,
    NodeSet,
    Purpose,
    SelectionContext,
    State,
    Stateful,
    clear_bits,
    packed,
    set_bits,
)

if TYPE_CHECKING:
    from fedstale.strategies.server.strategy import StaleStrategy

logger = logging.getLogger(__name__)

_TYPES: Mapping[Purpose, str] = {"train": MessageType.TRAIN, "evaluate": MessageType.EVALUATE}


@dataclass
class OpenJobs(Stateful):
    """Jobs that are out, jobs that were given up but not answered yet, and how each job ended.

    Which nodes are idle is kept up as jobs start and end. A reply changes one node: with ten
    thousand jobs in flight, a walk over all nodes for each reply would be most of the server's
    work. All are looked up again only when the grid knows others.
    """

    saved = ("n_sent", "endings", "_recalled", "_deadlines")

    n_sent: int = 0
    endings: dict[Ending, int] = field(default_factory=dict)
    """Number of jobs that ended in each way."""
    n_out: Counter[Purpose] = field(default_factory=Counter)
    """Number of jobs that are out for each purpose; always the same object."""
    out: dict[str, Job] = field(default_factory=dict)
    """The jobs that are out, by message id, in the order of sending."""
    awaited: dict[str, None] = field(default_factory=dict)
    """Message ids that may still be answered, those of given-up jobs too."""
    _given_up: dict[str, tuple[Job, Ending]] = field(default_factory=dict)
    _nodes: dict[int, int] = field(default_factory=dict)
    _recalled: dict[str, int] = field(default_factory=dict)
    _deadlines: list[tuple[float, int, str]] = field(default_factory=list)
    _moved: set[int] = field(default_factory=set)
    """Nodes that may have become busy or idle since this was last asked."""
    _everyone: NodeIndex = field(default_factory=lambda: NodeIndex(np.zeros(0, dtype=np.uint64)))
    _idle: Bits = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))

    def open(self, job: Job, timeout_s: float) -> None:
        """Open a job whose message was sent."""
        message_id, node_id = job.message_id, job.node_id
        self.n_sent += 1
        self.out[message_id] = job
        self.awaited[message_id] = None
        if timeout_s < inf:
            heapq.heappush(self._deadlines, (job.sent_at + timeout_s, job.job_id, message_id))
        self.n_out[job.purpose] += 1
        if job.purpose == "train":
            self._nodes[node_id] = self._nodes.get(node_id, 0) + 1
            self._moved.add(node_id)

    def end(self, message_id: str, ending: Ending) -> Job:
        """End an open job; one given up stays known until its reply comes."""
        job = self.out.pop(message_id)
        self.endings[ending] = self.endings.get(ending, 0) + 1
        if ending in {"timed out", "cancelled"}:
            self._given_up[message_id] = (job, ending)
        else:
            del self.awaited[message_id]
        self.n_out[job.purpose] -= 1
        if job.purpose == "train":
            if ending == "cancelled":
                self._recalled[message_id] = job.node_id
            else:
                self._free(job.node_id)
        return job

    def forget(self, message_id: str) -> Ending | None:
        """Return how a given-up job had ended, and forget it; None if it is not one."""
        self._free_recalled(message_id)
        known = self._given_up.pop(message_id, None)
        if known is None:
            return None
        del self.awaited[message_id]
        return known[1]

    def expired(self, now: float) -> list[Job]:
        """Return open jobs whose deadline has passed, in the order of deadlines."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            message_id = heapq.heappop(self._deadlines)[2]
            job = self.out.get(message_id)
            if job is not None:
                late.append(job)
            self._free_recalled(message_id)
        return late

    @property
    def next_deadline(self) -> float:
        """Instant in s of the next timeout of an open or cancelled job; inf if there is none."""
        while self._deadlines:
            at, _, message_id = self._deadlines[0]
            if message_id in self.out or message_id in self._recalled:
                return at
            heapq.heappop(self._deadlines)
        return inf

    def nodes_out(self) -> NodeIds:
        """Return the nodes with a training job that is out, ascending; shape (n,)."""
        nodes = {job.node_id for job in self.out.values() if job.purpose == "train"}
        return np.array(sorted(nodes), dtype=np.uint64)

    def idle(self, online: NodeSet, but: Collection[int] = ()) -> NodeSet:
        """Return the nodes online that have no training job, cancelled or not, but for some."""
        known, everyone, busy = self._everyone, online.everyone, self._nodes
        if everyone is known or np.array_equal(everyone.ids, known.ids):
            if self._moved:
                set_bits(self._idle, known.of(self._moved))
                if now_busy := [node for node in self._moved if node in busy]:
                    clear_bits(self._idle, known.of(now_busy))
        else:
            self._everyone = everyone
            self._idle = packed(np.ones(everyone.ids.size, dtype=np.bool_))
            clear_bits(self._idle, everyone.of(busy.keys()))
        self._moved.clear()
        idle = online.words & self._idle
        if but:
            clear_bits(idle, everyone.of(but))
        return NodeSet(everyone, idle)

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
        return [job for job in self.out.values() if job.purpose == purpose]

    def state_dict(self) -> State:
        """Return all jobs that are known."""
        return super().state_dict() | {
            "open": [_row(job) for job in self.out.values()],
            "given_up": [(_row(job), ending) for job, ending in self._given_up.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        super().load_state_dict(state)
        self.out = {job.message_id: job for job in starmap(Job, state["open"])}
        given_up = [(Job(*row), ending) for row, ending in state["given_up"]]
        self._given_up = {job.message_id: (job, ending) for job, ending in given_up}
        self.awaited = dict.fromkeys([*self.out, *self._given_up])
        self.n_out.clear()
        self.n_out.update(job.purpose for job in self.out.values())
        busy = [job.node_id for job in self.open_jobs("train")] + [*self._recalled.values()]
        self._moved |= {*self._nodes, *busy}
        self._nodes = dict(Counter(busy))


def _row(job: Job) -> tuple[Any, ...]:
    return tuple(getattr(job, field.name) for field in fields(job))


@dataclass(slots=True, kw_only=True, eq=False)
class Dispatcher:
    """Chooses nodes, sends them the current model, and opens their jobs."""

    grid: RuntimeGrid
    """Where the nodes are."""
    strategy: "StaleStrategy"
    """The settings."""
    selector: Selector
    """Of nodes."""
    stages: Sequence[Stage]
    """What happens to messages."""
    asking: Stage | None
    """The stage that sends queries, if one does."""
    rng: np.random.Generator
    """What the selector draws from."""
    configs: dict[Purpose, Mapping[str, object]]
    """What every message holds besides the model."""
    ttl_s: Mapping[Purpose, float]
    """How long a message of each kind lives, in s."""
    jobs: OpenJobs
    """In flight."""
    history: History
    """Of the nodes."""
    versions: Versions
    """Of the model."""
    latest: ArrayRecord
    """Version 0 of the model as Flower sends it; later the last version that was sent."""
    on_pick: list[Callable[[Pick], None]] = field(default_factory=list)
    """Called with each choice of nodes."""
    _version: int = 0
    _contents: dict[Purpose, tuple[int, RecordDict]] = field(default_factory=dict)

    def choose(self, free: NodeSet, k: int, now: float, context: SelectionContext) -> list[int]:
        """Pick at most k of the free nodes by the selector.

        Args:
            free: nodes that may be picked, at least one.
            k: how many, >= 1.
            now: the instant in s.
            context: where the run stands.

        Raises:
            FedstaleError: it breaks its contract.
        """
        drawn_from = self.rng.bit_generator.state if self.on_pick else {}
        candidates = self.history.candidates(free, context, self.jobs.nodes_out)
        # A selector of a user's may return what `node_ids` holds.
        chosen = list(map(int, self.selector.select(candidates, k, now, self.rng)))
        n = len(chosen)
        if n > k or len(set(chosen)) < n or free.n_of(chosen) < n:
            raise FedstaleError(
                f"selector {self.selector!r} returned {chosen}: expected at most {k} distinct "
                "ids of the candidates that it was given"
            )
        for told in self.on_pick:
            told(Pick("train", free, k, chosen, context, drawn_from))
        return chosen

    def draw(self, online: NodeSet, k: int) -> list[int]:
        """Draw k of the online nodes, to evaluate the current version."""
        drawn_from = self.rng.bit_generator.state if self.on_pick else {}
        which = self.rng.choice(len(online), k, replace=False)
        chosen: list[int] = online.at(which).tolist()
        context = SelectionContext(version=self.versions.version)
        for told in self.on_pick:
            told(Pick("evaluate", online, k, chosen, context, drawn_from))
        return chosen

    def send(self, nodes: list[int], purpose: Purpose, now: float) -> list[Job]:
        """Send the current version, or a query, to some nodes, and open the jobs.

        Returns:
            The jobs in the order of nodes; a message that could not be sent has no id.

        Raises:
            FedstaleError: the grid takes none of the messages.
        """
        if not nodes:
            return []
        jobs, messages = self.prepare(nodes, purpose)
        ids: list[str | None] = list(self.grid.push_messages(messages))
        if len(ids) != len(nodes) or not any(ids):
            n_bytes = max(content_bytes(message.content) for message in messages)
            raise FedstaleError(
                f"the grid took none of {len(nodes)} messages with up to {n_bytes:,} bytes: see "
                "the log of the SuperLink, which may have a limit on their size"
            )
        self.open(jobs, ids, now)
        return jobs

    def prepare(self, nodes: list[int], purpose: Purpose) -> tuple[list[Job], list[Message]]:
        """Return jobs that are not sent yet, and their messages."""
        content = self._content(purpose)
        ttl_s, group_id = self.ttl_s[purpose], str(self.versions.version)
        kind = self.asking.query if purpose == "query" and self.asking else _TYPES[purpose]
        jobs, messages = [], []
        for node in nodes:
            job, own = Job(node, purpose, self.versions.version), content
            for stage in self.stages:
                own = stage.outgoing(job, own)
            jobs.append(job)
            messages.append(Message(own, node, kind, ttl=ttl_s, group_id=group_id))
        return jobs, messages

    def open(self, jobs: list[Job], ids: Sequence[str | None], now: float) -> None:
        """Open jobs whose messages were handed to the grid.

        Args:
            jobs: that `prepare` returned.
            ids: of their messages, None for one that could not be sent.
            now: the instant in s.
        """
        for job, message_id in zip(jobs, ids, strict=True):
            job.job_id, job.message_id, job.sent_at = self.jobs.n_sent, message_id or "", now
            if job.purpose == "train":
                self.history.picked(job.node_id, now)
            if message_id is None:
                logger.warning(
                    "node %d: the %s message could not be sent", job.node_id, job.purpose
                )
                if job.purpose == "train":
                    self.history.failed(job.node_id)
                for stage in self.stages:
                    stage.ended(job, End("not sent"))
                continue
            self.jobs.open(job, self.ttl_s[job.purpose])
            if job.purpose != "query":
                self.versions.hold(job.base_version)

    def record(self) -> ArrayRecord:
        """Return the current version as Flower sends it; it is made once.

        The version before is let go of first, and this one shares its memory with the record.
        """
        if self.versions.version != self._version:
            self._version, self.latest, self._contents = self.versions.version, ArrayRecord(), {}
            self.latest = self.versions.current.record(shares=True)
        return self.latest

    def replace(self, record: ArrayRecord) -> None:
        """Send another model as the current version."""
        self._version, self.latest, self._contents = self.versions.version, record, {}

    def _content(self, purpose: Purpose) -> RecordDict:
        """Build the content of a version's messages for one purpose."""
        version = self.versions.version
        if purpose == "query":
            return RecordDict()
        of, content = self._contents.get(purpose, (None, RecordDict()))
        if of != version:
            # Stock strategies count training rounds from 1, and evaluate after the round.
            server_round = version + 1 if purpose == "train" else version
            values = {**self.configs[purpose], "server-round": server_round}
            config = ConfigRecord(cast(dict[str, ConfigRecordValues], values))
            record = self.record()
            content = RecordDict(
                {self.strategy.arrayrecord_key: record, self.strategy.configrecord_key: config}
            )
            self._contents[purpose] = (version, content)
        return content
