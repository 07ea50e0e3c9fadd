"""A Grid that shows what passes through it, for a ServerApp on real devices.

It stands between any strategy and the SuperLink's Grid, so stock strategies can be watched too;
those of fedstale also tell it of merges and metrics. It adds no message and changes none.
"""

import logging
import time
from collections.abc import Iterable, Mapping

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from fedstale.live.watching import Moment, Sink
from fedstale.strategies.server.clock import Clock
from fedstale.strategies.server.observer import observer_of
from fedstale.strategies.server.passing_grid import PassingGrid

logger = logging.getLogger(__name__)

# A SuperLink gives up on a message at its time to live, Flower's default for which is 12 hours.
_LONGEST_S = 43_200.0


def observed(grid: Grid, sink: Sink) -> Grid:
    """Return a grid that tells a sink what passes through it.

    Args:
        grid: what the ServerApp was given; under `fedstale simulate` it is returned as it is, since
            `--live` watches a simulation from outside.
        sink: for instance a `Board` that is being served.
    """
    return grid if isinstance(grid, Clock) else LiveObserver(grid, sink)


class LiveObserver(PassingGrid):
    """A Grid, and the `Observer` of fedstale's strategies, that passes everything on."""

    def __init__(self, grid: Grid, sink: Sink) -> None:
        """Watch from now on: instants count from here."""
        super().__init__(grid)
        self._sink, self._then = sink, observer_of(grid)
        self._began = time.monotonic()
        self._open: dict[str, float] = {}
        self._nodes: dict[str, int] = {}
        self._online = self._version = 0

    # The observer of strategies.

    def job_aggregated(
        self, message_id: str, *, base_version: int, version: int, staleness: int, weight: float
    ) -> None:
        """Pass on a merge."""
        facts = {"base_version": base_version, "version": version, "staleness": staleness}
        self._then.job_aggregated(message_id, **facts, weight=weight)
        self._sink.merged(self._now(), float(staleness), weight)

    def job_rejected(self, message_id: str, *, reason: str) -> None:
        """Pass on a refusal; error replies have been noted when they came."""
        self._then.job_rejected(message_id, reason=reason)
        if not reason.startswith("error "):
            self._sink.failed(self._now(), self._name(message_id), "rejected", reason)

    def aggregated(self, *, version: int, arrays: ArrayRecord) -> None:
        """Pass on a new model."""
        self._then.aggregated(version=version, arrays=arrays)
        self._version = max(self._version, version)
        self._moved()

    def measured(self, *, version: int, source: str, metrics: Mapping[str, float]) -> None:
        """Pass on metrics."""
        self._then.measured(version=version, source=source, metrics=metrics)
        for name, value in metrics.items():
            self._sink.measured(self._now(), version, source, name, value)

    # Flower's Grid.

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that are connected."""
        nodes = list(self._grid.get_node_ids())
        self._online = len(nodes)
        self._moved()
        return nodes

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages."""
        sent = list(messages)
        ids = list(self._grid.push_messages(sent))
        for message_id, message in zip(ids, sent, strict=False):
            if message_id:
                self._note_sent(message_id, message)
        self._moved()
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived."""
        replies = list(self._grid.pull_messages(message_ids))
        self._note_received(replies)
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and wait for the replies."""
        sent = list(messages)
        ids = [f"waiting-{i}" for i in range(len(sent))]
        for message_id, message in zip(ids, sent, strict=True):
            self._note_sent(message_id, message)
        self._moved()
        replies = list(self._grid.send_and_receive(sent, timeout=timeout))
        for message_id in ids:
            self._forget(message_id)
        self._note_received(replies)
        return replies

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _name(self, message_id: str) -> str:
        node = self._nodes.get(message_id)
        return "a node" if node is None else f"node {node}"

    def _note_sent(self, message_id: str, message: Message) -> None:
        ttl = message.metadata.ttl if message.metadata.ttl else _LONGEST_S
        self._open[message_id] = self._now() + min(ttl, _LONGEST_S)
        self._nodes[message_id] = message.metadata.dst_node_id

    def _note_received(self, replies: Iterable[Message]) -> None:
        for reply in replies:
            message_id = reply.metadata.reply_to_message_id
            if reply.has_error():
                # The SuperLink is the source of its own error replies, so the node is looked up.
                reason = f"{reply.error.code}: {reply.error.reason}"
                self._sink.failed(self._now(), self._name(message_id), "error", reason)
            self._open.pop(message_id, None)
        self._moved()

    def _forget(self, message_id: str) -> None:
        self._open.pop(message_id, None)
        self._nodes.pop(message_id, None)

    def _moved(self) -> None:
        now = self._now()
        for message_id in [key for key, until in self._open.items() if until < now]:
            self._forget(message_id)
        # Refusals come after replies; of old jobs nobody speaks any more.
        while len(self._nodes) > 100_000:
            self._nodes.pop(next(iter(self._nodes)))
        self._sink.moved(
            Moment(now=now, online=self._online, n_in_flight=len(self._open), rounds=self._version)
        )
