"""Who gets the next message, and what is in it: one set of records a version, shared by all."""

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.app.typing import ConfigRecordValues
from flwr.serverapp import Grid

from fedstale.errors import FedstaleError
from fedstale.strategies.selection.base import Selector
from fedstale.strategies.selection.forecast_request import QUERY
from fedstale.strategies.server.clients import History, Situation
from fedstale.strategies.server.jobs import Ledger, Purpose
from fedstale.strategies.server.node_set import Mask, NodeSet, Places
from fedstale.strategies.server.runtime import RuntimeGrid
from fedstale.strategies.server.versions import Snapshot, Versions

if TYPE_CHECKING:
    from fedstale.strategies.strategy import StaleStrategy

logger = logging.getLogger(__name__)

_TYPES: Mapping[Purpose, str] = {
    "train": MessageType.TRAIN,
    "evaluate": MessageType.EVALUATE,
    "query": QUERY,
}


class Outbox:
    """Sends the current model."""

    def __init__(
        self,
        grid: Grid,
        initial: ArrayRecord,
        configs: Mapping[Purpose, Mapping[str, object]],
        strategy: "StaleStrategy",
        timeout_s: float,
    ) -> None:
        """Set what every message holds besides the model."""
        self._grid, self._configs, self.timeout_s = grid, configs, timeout_s
        self._arrayrecord_key = strategy.validation.arrayrecord_key
        self._configrecord_key = strategy.configrecord_key
        self._ask = strategy.forecast_request
        self._version, self._record = 0, initial
        self._latest: dict[Purpose, tuple[int, RecordDict, int]] = {}

    def record(self, version: int, snapshot: Snapshot) -> ArrayRecord:
        """Return a version as Flower sends it; the latest one is made once."""
        if version != self._version:
            self._version, self._record = version, snapshot.record()
        return self._record

    def push(
        self, nodes: list[int], purpose: Purpose, version: int, snapshot: Snapshot
    ) -> tuple[list[str | None], int]:
        """Send a version, or a query, to some nodes.

        Returns:
            Ids of the messages in the order of nodes, None for one that could not be sent, and the
            bytes of arrays in them.

        Raises:
            FedstaleError: the grid takes none of the messages.
        """
        content, n_bytes = self._content(purpose, version, snapshot)
        messages = [
            Message(content, node, _TYPES[purpose], ttl=self.ttl_s(purpose), group_id=str(version))
            for node in nodes
        ]
        ids: list[str | None] = list(self._grid.push_messages(messages))
        if len(ids) != len(nodes) or not any(ids):
            raise FedstaleError(
                f"the grid took none of {len(nodes)} messages with {n_bytes} bytes of arrays each: "
                "see the log of the SuperLink, which may have a limit on their size"
            )
        return ids, n_bytes * sum(message_id is not None for message_id in ids)

    def ttl_s(self, purpose: Purpose) -> float:
        """Return how long a message of some kind lives, in s."""
        return self._ask.wait_s if purpose == "query" and self._ask else self.timeout_s

    def _content(
        self, purpose: Purpose, version: int, snapshot: Snapshot
    ) -> tuple[RecordDict, int]:
        """Return what all messages of a version for one purpose hold, and its bytes of arrays."""
        if purpose == "query" and self._ask is not None:
            return self._ask.content(), 0
        of, content, n_bytes = self._latest.get(purpose, (None, RecordDict(), 0))
        if of != version:
            # Stock strategies count training rounds from 1, and evaluate after the round.
            server_round = version + 1 if purpose == "train" else version
            values = {**self._configs[purpose], "server-round": server_round}
            config = ConfigRecord(cast(dict[str, ConfigRecordValues], values))
            record = self.record(version, snapshot)
            content = RecordDict({self._arrayrecord_key: record, self._configrecord_key: config})
            n_bytes = sum(len(array.data) for array in record.values())
            self._latest[purpose] = (version, content, n_bytes)
        return content, n_bytes


class FreeNodes:
    """Which nodes are online and have no training job, kept up as jobs start and end.

    A reply changes one node: with ten thousand jobs in flight, a walk over all nodes for each reply
    would be most of the server's work. All are looked up again only when the grid knows others.
    """

    def __init__(self, grid: RuntimeGrid, ledger: Ledger) -> None:
        """Follow the jobs of a ledger on a grid."""
        self._grid, self._ledger = grid, ledger
        self._everyone = Places(np.zeros(0, dtype=np.uint64))
        self._is_idle: Mask = np.zeros(0, dtype=np.bool_)

    def online(self) -> NodeSet:
        """Return the nodes that are online, in the order of the grid."""
        return self._grid.online_nodes()

    def free(self, but: Collection[int] = ()) -> NodeSet:
        """Return the nodes that are online and have no training job, but for some others."""
        online, busy, moved = self.online(), self._ledger.busy_nodes, self._ledger.take_moved()
        known, everyone = self._everyone, online.everyone
        if everyone is known or np.array_equal(everyone.ids, known.ids):
            # Not `moved - busy`, which would walk over all that are busy.
            self._is_idle[known.of([node for node in moved if node not in busy])] = True
            self._is_idle[known.of([node for node in moved if node in busy])] = False
        else:
            self._everyone = everyone
            self._is_idle = np.ones(everyone.ids.size, dtype=np.bool_)
            self._is_idle[everyone.of(busy)] = False
        is_free = online.is_in & self._is_idle
        if but:
            is_free[everyone.of(but)] = False
        return NodeSet(everyone, is_free)


class Dispatch:
    """Chooses nodes, sends them the current model, and opens their jobs."""

    def __init__(
        self,
        outbox: Outbox,
        selector: Selector,
        *,
        ledger: Ledger,
        history: History,
        versions: Versions,
        rng: np.random.Generator,
    ) -> None:
        """Work on the books of one run."""
        self._outbox, self._selector, self._rng = outbox, selector, rng
        self._ledger, self._history, self._versions = ledger, history, versions

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
            n_in_flight=self._ledger.n_training,
            version=self._versions.version,
            deadline_s=min(deadline_s, self._outbox.timeout_s),
        )
        candidates = self._history.candidates(free, situation)
        chosen = self._selector.select(candidates, k, now, self._rng)
        n = len(chosen)
        if n > k or len(set(chosen)) < n or free.n_of(chosen) < n:
            raise FedstaleError(
                f"selector {self._selector!r} returned {chosen}: expected at most {k} distinct "
                "ids of the candidates that it was given"
            )
        return chosen

    def push(self, nodes: list[int], purpose: Purpose, now: float) -> tuple[list[int], int]:
        """Send the current version, or a query, and open a job for each message.

        Returns:
            Nodes whose message could not be sent, and the bytes of arrays sent.
        """
        if not nodes:
            return [], 0
        version, unsent = self._versions.version, []
        ids, n_bytes = self._outbox.push(nodes, purpose, version, self._versions.current)
        for node, message_id in zip(nodes, ids, strict=True):
            if purpose == "train":
                self._history.picked(node, now)
            if message_id is None:
                logger.warning("node %d: the %s message could not be sent", node, purpose)
                if purpose == "train":
                    self._history.failed(node)
                unsent.append(node)
                continue
            self._ledger.send(
                message_id,
                node_id=node,
                purpose=purpose,
                version=version,
                now=now,
                timeout_s=self._outbox.ttl_s(purpose),
            )
            if purpose != "query":
                self._versions.hold(version)
        return unsent, n_bytes
