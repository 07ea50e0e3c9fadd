"""A SuperLink's grid that notes what the server sees: one row a job, as of a simulation.

It answers the calls of a strategy's `Observer`, writes them to the log too, and keeps its `Clock`.
What no server can know, such as when a device began to train, stays NaN in the events.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import pandas as pd
import pyarrow as pa
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from fedstale.simulation import flight as fl
from fedstale.simulation.costs import content_bytes
from fedstale.simulation.devices import round_of
from fedstale.simulation.flight import NEVER, UNKNOWN, Flight
from fedstale.strategies.server.clock import clock_of
from fedstale.strategies.server.observer import LogObserver
from fedstale.strategies.server.passing_grid import PassingGrid
from fedstale.strategies.server.validation import p_finish_in
from fedstale.traces import Status


class RecordedGrid(PassingGrid):
    """Passes everything on to another grid, and keeps a book of jobs.

    Its instants count from the moment at which a strategy first sends something or waits. What it
    prepares before takes no time, as in a simulation.
    """

    def __init__(self, grid: Grid, *, unix_now: Callable[[], float] = time.time) -> None:
        """Wrap a grid.

        Args:
            grid: one that does not wait for uploads; see `without_stalls`.
            unix_now: returns seconds since 1970, UTC.
        """
        super().__init__(grid)
        self._clock, self._unix_now = clock_of(grid), unix_now
        self._log = LogObserver()
        self._zero: float | None = None
        self.unix_zero = unix_now()
        """Instant 0, in s since 1970, UTC."""
        self.flights: list[Flight] = []
        """All jobs, in the order of sending."""
        self._by_message: dict[str, Flight] = {}
        self._stated: dict[int, float] = {}
        self.on_measured: Callable[[int, str, Mapping[str, float]], None] = lambda *_: None
        """Called with (version, source, metrics) when a strategy has measured something."""
        self.on_aggregated: Callable[[int, ArrayRecord], None] = lambda *_: None
        """Called with (version, arrays) when a strategy has made a new model."""

    def events(self) -> pa.Table:
        """Return what happened so far, one row a job."""
        nodes = sorted({flight.node_id for flight in self.flights})
        position = {node: i for i, node in enumerate(nodes)}
        rows = [
            replace(
                flight,
                device=position[flight.node_id],
                node_id=_signed(flight.node_id),
                status=fl.FLYING if self._is_flying(flight) else flight.status,
            )
            for flight in self.flights
        ]
        return fl.table_of(rows, pd.Index([str(node) for node in nodes], dtype="str"))

    def _is_flying(self, flight: Flight) -> bool:
        return flight.delivered_at == NEVER

    # The clock of strategies.

    def now(self) -> float:
        """Return seconds since instant 0; 0 before it."""
        return 0.0 if self._zero is None else self._clock.now() - self._zero

    def wait(self, until: float) -> bool:
        """Wait until an instant, or until something may have arrived."""
        self._begin()
        return self._clock.wait(self._clock.now() + max(until - self.now(), 0.0))

    def _begin(self) -> None:
        if self._zero is None:
            self._zero, self.unix_zero = self._clock.now(), self._unix_now()

    # The observer of strategies.

    def job_aggregated(
        self, message_id: str, *, base_version: int, version: int, staleness: int, weight: float
    ) -> None:
        """Note that a reply went into a model version."""
        self._log.job_aggregated(
            message_id,
            base_version=base_version,
            version=version,
            staleness=staleness,
            weight=weight,
        )
        # A job of the run that this one goes on from has its row there.
        job = self._by_message.get(message_id)
        if job is not None:
            job.base_version, job.aggregated_version = base_version, version
            job.staleness, job.weight = float(staleness), float(weight)

    def job_rejected(self, message_id: str, *, reason: str) -> None:
        """Note that the strategy did not use a reply."""
        self._log.job_rejected(message_id, reason=reason)
        job = self._by_message.get(message_id)
        if job is not None and job.status == fl.REPORTED:
            job.status, job.reason = fl.REJECTED, reason

    def aggregated(self, *, version: int, arrays: ArrayRecord) -> None:
        """Note a new model."""
        self._log.aggregated(version=version, arrays=arrays)
        self.on_aggregated(version, arrays)

    def measured(self, *, version: int, source: str, metrics: Mapping[str, float]) -> None:
        """Note metrics of a model version."""
        self._log.measured(version=version, source=source, metrics=metrics)
        self.on_measured(version, source, metrics)

    # Flower's Grid.

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, and open a row for each."""
        self._begin()
        messages, now = list(messages), self.now()
        ids = list(self._grid.push_messages(messages))
        for message, message_id in zip(messages, ids, strict=False):
            self._note(self._flight(message, now), message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived, and note them."""
        replies = list(self._grid.pull_messages(message_ids))
        for reply in replies:
            flight = self._by_message.get(reply.metadata.reply_to_message_id)
            if flight is not None:
                self._hear(flight.node_id, reply)
                self._delivered(flight, reply)
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and wait for the replies, at most `timeout` seconds."""
        missing = {i for i in self.push_messages(messages) if i}
        deadline = NEVER if timeout is None else self.now() + timeout
        replies: list[Message] = []
        while missing and self.now() < deadline:
            self.wait(deadline)
            arrived = list(self.pull_messages(missing))
            missing -= {reply.metadata.reply_to_message_id for reply in arrived}
            replies += arrived
        return replies

    # The book.

    def _flight(self, message: Message, now: float) -> Flight:
        about = message.metadata
        return Flight(
            message=None,
            asked=(UNKNOWN, UNKNOWN, UNKNOWN, about.ttl, UNKNOWN),
            outcome=Status.REPORTED,
            visible_at=NEVER,
            failure=None,
            job_id=len(self.flights),
            node_id=about.dst_node_id,
            device=-1,
            kind=about.message_type,
            round=round_of(message),
            status=fl.UNCLAIMED,
            sent_at=now,
            started_at=UNKNOWN,
            downloaded_at=UNKNOWN,
            trained_at=UNKNOWN,
            reported_at=UNKNOWN,
            ended_at=UNKNOWN,
            download_s=UNKNOWN,
            compute_s=UNKNOWN,
            upload_s=UNKNOWN,
            work=UNKNOWN,
            downloaded_bytes=float(content_bytes(message.content)),
            uploaded_bytes=UNKNOWN,
        )

    def _note(self, flight: Flight, message_id: str | None) -> None:
        if flight.kind.startswith("train"):
            flight.reported_p_finish = self._stated.get(flight.node_id, UNKNOWN)
        self.flights.append(flight)
        if message_id:
            self._by_message[message_id] = flight
        else:
            flight.status, flight.reason = fl.UNCLAIMED, "the SuperLink did not take the message"

    def _hear(self, node_id: int, reply: Message) -> None:
        """Note what a device says of its chance to finish the next job."""
        said = p_finish_in(reply)
        if said is not None:
            self._stated[node_id] = said

    def _delivered(self, flight: Flight, reply: Message) -> None:
        flight.delivered_at = self.now()
        if reply.has_error():
            flight.status, flight.reason = fl.CLIENT_ERROR, reply.error.reason or ""
        else:
            flight.status, flight.reason = fl.REPORTED, ""
            flight.uploaded_bytes = float(content_bytes(reply.content))


def _signed(node_id: int) -> int:
    """Return an unsigned id of 64 bits as the signed number with the same bits."""
    return node_id - 2**64 if node_id >= 2**63 else node_id
