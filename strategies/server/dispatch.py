"""Which nodes get the next message, and what is in it: one set of records a version for all."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    ConfigRecordValues,
    Message,
    MessageType,
    RecordDict,
)

from fedstale.errors import FedstaleError
from fedstale.strategies.selection import Selector
from fedstale.strategies.server.jobs import OpenJobs
from fedstale.strategies.server.runtime import RuntimeGrid
from fedstale.strategies.server.versions import Versions
from fedstale.strategies.stages import Pick, Stage
from fedstale.strategies.types import (
    Bits,
    History,
    Job,
    NodeIndex,
    NodeSet,
    Purpose,
    SelectionContext,
    clear_bits,
    packed,
    set_bits,
)

if TYPE_CHECKING:
    from fedstale.strategies.server.strategy import StaleStrategy

logger = logging.getLogger(__name__)

_TYPES: Mapping[Purpose, str] = {"train": MessageType.TRAIN, "evaluate": MessageType.EVALUATE}


class IdleNodes:
    """Which nodes are online and have no training job, kept up as jobs start and end.

    A reply changes one node: with ten thousand jobs in flight, a walk over all nodes for each reply
    would be most of the server's work. All are looked up again only when the grid knows others.
    """

    def __init__(self, grid: RuntimeGrid, jobs: OpenJobs) -> None:
        """Follow the jobs on a grid."""
        self._grid, self._jobs = grid, jobs
        self._everyone = NodeIndex(np.zeros(0, dtype=np.uint64))
        self._idle: Bits = np.zeros(0, dtype=np.uint64)

    def free(self, but: Collection[int] = ()) -> NodeSet:
        """Return the nodes that are online and have no training job, but for some others."""
        online = self._grid.online_nodes()
        busy, moved = self._jobs.busy_nodes, self._jobs.take_moved()
        known, everyone = self._everyone, online.everyone
        if everyone is known or np.array_equal(everyone.ids, known.ids):
            # Not `moved & busy`, which may walk over all that are busy.
            set_bits(self._idle, known.of(moved))
            clear_bits(self._idle, known.of(list(filter(busy.__contains__, moved))))
        else:
            self._everyone = everyone
            self._idle = packed(np.ones(everyone.ids.size, dtype=np.bool_))
            clear_bits(self._idle, everyone.of(busy))
        free = online.words & self._idle
        if but:
            clear_bits(free, everyone.of(but))
        return NodeSet(everyone, free)


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
    timeout_s: float
    """How long a message lives, in s."""
    jobs: OpenJobs
    """In flight."""
    history: History
    """Of the nodes."""
    versions: Versions
    """Of the model."""
    latest: ArrayRecord
    """Version 0 of the model as Flower sends it; later the last version that was sent."""
    _version: int = 0
    _contents: dict[Purpose, tuple[int, RecordDict, int]] = field(default_factory=dict)

    def choose(self, free: NodeSet, k: int, now: float, context: SelectionContext) -> list[int]:
        """Let the selector pick at most k of the free nodes.

        Args:
            free: nodes that may be picked, at least one.
            k: how many, >= 1.
            now: the instant in s.
            context: where the run stands.

        Raises:
            FedstaleError: it breaks its contract.
        """
        if not free.everyone.is_ascending:
            # A grid may answer in any order; what is picked depends on the set alone.
            free = NodeSet.of(np.sort(free.ids))
        drawn_from = self.rng.bit_generator.state if self.stages else {}
        candidates = self.history.candidates(free, context, self.jobs.nodes_out)
        # A selector of a user's may return what `node_ids` holds.
        chosen = list(map(int, self.selector.select(candidates, k, now, self.rng)))
        n = len(chosen)
        if n > k or len(set(chosen)) < n or free.n_of(chosen) < n:
            raise FedstaleError(
                f"selector {self.selector!r} returned {chosen}: expected at most {k} distinct "
                "ids of the candidates that it was given"
            )
        for stage in self.stages:
            stage.picked(Pick("train", free, k, chosen, context, drawn_from))
        return chosen

    def draw(self, online: NodeSet, k: int) -> list[int]:
        """Draw k of the online nodes, to evaluate the current version."""
        drawn_from = self.rng.bit_generator.state if self.stages else {}
        which = self.rng.choice(len(online), k, replace=False)
        chosen: list[int] = online.at(which).tolist()
        context = SelectionContext(version=self.versions.version)
        for stage in self.stages:
            stage.picked(Pick("evaluate", online, k, chosen, context, drawn_from))
        return chosen

    def send(self, nodes: list[int], purpose: Purpose, now: float) -> list[Job]:
        """Send the current version, or a query, to at least one node, and open the jobs.

        Returns:
            The jobs in the order of nodes; a message that could not be sent has no id.

        Raises:
            FedstaleError: the grid takes none of the messages.
        """
        jobs, messages = self.prepare(nodes, purpose)
        ids: list[str | None] = list(self.grid.push_messages(messages))
        if len(ids) != len(nodes) or not any(ids):
            n_bytes = max(array_bytes(message.content) for message in messages)
            raise FedstaleError(
                f"the grid took none of {len(nodes)} messages with up to {n_bytes} bytes of "
                "arrays: see the log of the SuperLink, which may have a limit on their size"
            )
        self.open(jobs, ids, now)
        return jobs

    def prepare(self, nodes: list[int], purpose: Purpose) -> tuple[list[Job], list[Message]]:
        """Return jobs that are not sent yet, and their messages."""
        content, n_bytes = self._content(purpose)
        ttl_s, group_id = self.ttl_s(purpose), str(self.versions.version)
        kind = _TYPES.get(purpose) or self._asked_by.query
        jobs, messages = [], []
        # Stages make few contents of one; the messages keep them, and so their ids.
        sizes = {id(content): n_bytes}
        for node in nodes:
            job, own = Job(node, purpose, self.versions.version), content
            for stage in self.stages:
                own = stage.outgoing(job, own)
            if id(own) not in sizes:
                sizes[id(own)] = array_bytes(own)
            job.n_bytes = sizes[id(own)]
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
                continue
            self.jobs.open(job, self.ttl_s(job.purpose))
            if job.purpose != "query":
                self.versions.hold(job.base_version)
        for stage in self.stages if jobs else ():
            stage.sent(jobs)

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

    def ttl_s(self, purpose: Purpose) -> float:
        """Return how long a message of some kind lives, in s."""
        return self._asked_by.wait_s if purpose == "query" else self.timeout_s

    @property
    def _asked_by(self) -> Stage:
        assert self.asking is not None, "queries are sent for a stage"
        return self.asking

    def _content(self, purpose: Purpose) -> tuple[RecordDict, int]:
        """Return what all messages of a version for one purpose hold, and its bytes of arrays."""
        version = self.versions.version
        if purpose == "query":
            return RecordDict(), 0
        of, content, n_bytes = self._contents.get(purpose, (None, RecordDict(), 0))
        if of != version:
            # Stock strategies count training rounds from 1, and evaluate after the round.
            server_round = version + 1 if purpose == "train" else version
            values = {**self.configs[purpose], "server-round": server_round}
            config = ConfigRecord(cast(dict[str, ConfigRecordValues], values))
            record = self.record()
            content = RecordDict(
                {self.strategy.arrayrecord_key: record, self.strategy.configrecord_key: config}
            )
            n_bytes = array_bytes(content)
            self._contents[purpose] = (version, content, n_bytes)
        return content, n_bytes


def array_bytes(content: RecordDict) -> int:
    """Return the bytes of the arrays in the content of a message or a reply."""
    n = 0
    for record in content.values():
        if isinstance(record, ArrayRecord):
            for array in record.values():
                n += len(array.data)
    return n
