"""Which nodes get the next message, and what is in it: one set of records a version for all."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.app.typing import ConfigRecordValues

from fedstale.errors import FedstaleError
from fedstale.strategies.messages import Asked, FormatName
from fedstale.strategies.selection import Selector
from fedstale.strategies.selection.forecast_request import QUERY
from fedstale.strategies.server.compacting import CompactNodes
from fedstale.strategies.server.jobs import OpenJobs, Purpose
from fedstale.strategies.server.record import Record
from fedstale.strategies.server.releases import RELEASE, state_release
from fedstale.strategies.server.runtime import RuntimeGrid
from fedstale.strategies.server.versions import Versions
from fedstale.strategies.server.working import WorkNodes
from fedstale.strategies.types import (
    History,
    NodeSet,
    Places,
    Situation,
    Words,
    clear_bits,
    packed,
    set_bits,
)
from fedstale.strategies.work import asking

if TYPE_CHECKING:
    from fedstale.strategies.strategy import StaleStrategy

logger = logging.getLogger(__name__)

_TYPES: Mapping[Purpose, str] = {
    "train": MessageType.TRAIN,
    "evaluate": MessageType.EVALUATE,
    "query": QUERY,
}


class FreeNodes:
    """Which nodes are online and have no training job, kept up as jobs start and end.

    A reply changes one node: with ten thousand jobs in flight, a walk over all nodes for each reply
    would be most of the server's work. All are looked up again only when the grid knows others.
    """

    def __init__(self, grid: RuntimeGrid, jobs: OpenJobs) -> None:
        """Follow the jobs on a grid."""
        self._grid, self._jobs = grid, jobs
        self._everyone = Places(np.zeros(0, dtype=np.uint64))
        self._idle: Words = np.zeros(0, dtype=np.uint64)

    def free(self, but: Collection[int] = ()) -> NodeSet:
        """Return the nodes that are online and have no training job, but for some others."""
        online = self._grid.online_nodes()
        busy, moved = self._jobs.busy_nodes, self._jobs.take_moved()
        known, everyone = self._everyone, online.everyone
        if everyone is known or np.array_equal(everyone.ids, known.ids):
            # Not `moved & busy`, which may walk over all that are busy.
            set_bits(self._idle, known.of(moved))
            clear_bits(self._idle, known.of([node for node in moved if node in busy]))
        else:
            self._everyone = everyone
            self._idle = packed(np.ones(everyone.ids.size, dtype=np.bool_))
            clear_bits(self._idle, everyone.of(busy))
        free = online.words & self._idle
        if but:
            clear_bits(free, everyone.of(but))
        return NodeSet(everyone, free)


@dataclass(frozen=True, slots=True)
class _Own:
    """What is of one node's own in a message to it; None for in full, and for no share."""

    up: FormatName | None = None
    down: FormatName | None = None
    share: float | None = None


_NOTHING = _Own()


@dataclass(slots=True, kw_only=True, eq=False)
class Dispatcher:
    """Chooses nodes, sends them the current model, and opens their jobs."""

    grid: RuntimeGrid
    """Where the nodes are."""
    strategy: "StaleStrategy"
    """The settings."""
    selector: Selector
    """Of nodes."""
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
    compact: CompactNodes | None = None
    """What nodes are asked for, where messages are made smaller."""
    run_record: Record | None = None
    """Of what is picked, if one is kept."""
    work: WorkNodes | None = None
    """Which share of the work nodes are asked for, where they are."""
    _version: int = 0
    _contents: dict[Purpose, tuple[int, RecordDict, int]] = field(default_factory=dict)
    _shares: dict[float, RecordDict] = field(default_factory=dict)
    """What was made of a content by asking for a share; of the last one alone, which is a model."""
    _shared: RecordDict | None = None
    _own: dict[int, _Own] = field(default_factory=dict)
    """Of the messages that have been made and not opened, by node."""

    def choose(self, free: NodeSet, k: int, now: float, deadline_s: float) -> list[int]:
        """Let the selector pick at most k of the free nodes.

        Args:
            free: nodes that may be picked, at least one.
            k: how many, >= 1.
            now: the instant in s.
            deadline_s: time in s in which a reply to a job sent now counts.

        Raises:
            FedstaleError: it breaks its contract.
        """
        situation = Situation(
            n_in_flight=self.jobs.n_out["train"],
            version=self.versions.version,
            deadline_s=min(deadline_s, self.timeout_s),
        )
        if self.run_record is not None and not free.everyone.is_ascending:
            # A grid may answer in any order; a line of the record has the set alone.
            free = NodeSet.of(np.sort(free.ids))
        drawn_from = None if self.run_record is None else self.rng.bit_generator.state
        candidates = self.history.candidates(free, situation)
        # A selector of a user's may return what `node_ids` holds.
        chosen = [int(node) for node in self.selector.select(candidates, k, now, self.rng)]
        n = len(chosen)
        if n > k or len(set(chosen)) < n or free.n_of(chosen) < n:
            raise FedstaleError(
                f"selector {self.selector!r} returned {chosen}: expected at most {k} distinct "
                "ids of the candidates that it was given"
            )
        if self.run_record is not None and drawn_from is not None:
            self.run_record.picked(free, k, now, situation, drawn_from, chosen)
        return chosen

    def push(self, nodes: list[int], purpose: Purpose) -> tuple[list[str | None], list[int]]:
        """Send the current version, or a query, to at least one node.

        Returns:
            Ids of the messages, None for one that could not be sent; bytes of arrays of each.

        Raises:
            FedstaleError: the grid takes none of the messages.
        """
        _, full_bytes = self._content(purpose)
        messages = self.messages(nodes, purpose)
        n_bytes = [full_bytes] * len(nodes)
        if self.compact is not None and purpose == "train":
            n_bytes = [_array_bytes(message.content) for message in messages]
        ids: list[str | None] = list(self.grid.push_messages(messages))
        if len(ids) != len(nodes) or not any(ids):
            raise FedstaleError(
                f"the grid took none of {len(nodes)} messages with up to {max(n_bytes)} bytes of "
                "arrays: see the log of the SuperLink, which may have a limit on their size"
            )
        return ids, n_bytes

    def messages(self, nodes: list[int], purpose: Purpose) -> list[Message]:
        """Return messages with the current version, or with a query, to some nodes."""
        content, _ = self._content(purpose)
        ttl_s, group_id = self.ttl_s(purpose), str(self.versions.version)
        contents = [content] * len(nodes)
        if purpose == "train" and (self.compact or self.work):
            contents = [self._content_for(node, content) for node in nodes]
        return [
            Message(content, node, _TYPES[purpose], ttl=ttl_s, group_id=group_id)
            for node, content in zip(nodes, contents, strict=True)
        ]

    def _content_for(self, node: int, content: RecordDict) -> RecordDict:
        """Return the content of a message to one node: in its formats, and with its share."""
        forecast = self.history.forecast_of(node)
        asked, down = (
            (Asked(), None) if self.compact is None else self.compact.asked(node, forecast)
        )
        share = None
        if self.work is not None:
            upload = 1.0 if self.compact is None else self.compact.upload(node, asked.up)
            share = self.work.share_of(forecast, upload)
            content = self._with_share(content, share)
        if self.compact is not None:
            keys = self.strategy.arrayrecord_key, self.strategy.configrecord_key
            content = self.compact.content(asked, down, content, keys)
        self._own[node] = _Own(asked.up, down, share)
        return content

    def _with_share(self, content: RecordDict, share: float) -> RecordDict:
        """Return a content that asks for a share; the same object for all nodes with it."""
        if self._shared is not content:
            self._shared, self._shares = content, {}
        if share not in self._shares:
            key, made = self.strategy.configrecord_key, RecordDict(dict(content))
            made[key] = asking(content.config_records[key], share)
            self._shares[share] = made
        return self._shares[share]

    def open(self, nodes: list[int], ids: list[str | None], purpose: Purpose, now: float) -> int:
        """Open a job for each message that was sent, and return how many were.

        Args:
            nodes: that the messages went to.
            ids: of the messages in the order of nodes, None for one that could not be sent.
            purpose: of all of them.
            now: the instant in s.
        """
        version, first_job = self.versions.version, self.jobs.n_sent
        for node, message_id in zip(nodes, ids, strict=True):
            own = self._own.pop(node, _NOTHING)
            if purpose == "train":
                self.history.picked(node, now)
            if message_id is None:
                logger.warning("node %d: the %s message could not be sent", node, purpose)
                if purpose == "train":
                    self.history.failed(node)
                continue
            self.jobs.send(
                message_id,
                node_id=node,
                purpose=purpose,
                version=version,
                now=now,
                timeout_s=self.ttl_s(purpose),
                up=own.up,
                down=own.down,
                share=own.share,
            )
            if purpose != "query":
                self.versions.hold(version)
        if self.run_record is not None:
            self.run_record.sent(first_job, now)
        return len(ids) - ids.count(None)

    def record(self) -> ArrayRecord:
        """Return the current version as Flower sends it; it is made once."""
        if self.versions.version != self._version:
            self._version = self.versions.version
            self.latest = self.versions.current.record()
        return self.latest

    def replace(self, record: ArrayRecord) -> None:
        """Send another model as the current version."""
        self._version, self.latest, self._contents = self.versions.version, record, {}

    def ttl_s(self, purpose: Purpose) -> float:
        """Return how long a message of some kind lives, in s."""
        request = self.strategy.forecast_request
        return request.wait_s if request and purpose == "query" else self.timeout_s

    def _content(self, purpose: Purpose) -> tuple[RecordDict, int]:
        """Return what all messages of a version for one purpose hold, and its bytes of arrays."""
        version = self.versions.version
        if purpose == "query" and self.strategy.forecast_request is not None:
            content = self.strategy.forecast_request.content()
            if release := self.grid.runtime.release:
                state_release(content, release)
            return content, 0
        of, content, n_bytes = self._contents.get(purpose, (None, RecordDict(), 0))
        if of != version:
            # Stock strategies count training rounds from 1, and evaluate after the round.
            server_round = version + 1 if purpose == "train" else version
            values = {**self.configs[purpose], "server-round": server_round}
            if release := self.grid.runtime.release:
                values[RELEASE] = release
            config = ConfigRecord(cast(dict[str, ConfigRecordValues], values))
            record = self.record()
            content = RecordDict(
                {self.strategy.arrayrecord_key: record, self.strategy.configrecord_key: config}
            )
            n_bytes = _array_bytes(content)
            self._contents[purpose] = (version, content, n_bytes)
        return content, n_bytes


def _array_bytes(content: RecordDict) -> int:
    records = (record for record in content.values() if isinstance(record, ArrayRecord))
    return sum(len(array.data) for record in records for array in record.values())
