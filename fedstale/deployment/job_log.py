"""What the server sees of each job on real devices: one row a job, as of a simulation.

What no server can know, such as when a device began to train, stays NaN in the events.
"""

from dataclasses import replace

import pandas as pd
import pyarrow as pa
from flwr.app import Message

from fedstale.simulation import flight as fl
from fedstale.simulation.costs import content_bytes
from fedstale.simulation.devices import round_of
from fedstale.simulation.flight import NEVER, UNKNOWN, Flight
from fedstale.strategies.server.runtime import Callback, Runtime
from fedstale.strategies.server.validation import p_finish_in
from fedstale.traces import Status


class JobLog(Callback):
    """Keeps a row for each job of a run."""

    def __init__(self) -> None:
        """Start with no job."""
        self.flights: list[Flight] = []
        """All jobs, in the order of sending."""
        self.by_message: dict[str, Flight] = {}
        self._reported: dict[int, float] = {}

    def events(self) -> pa.Table:
        """Return what happened so far, one row a job."""
        nodes = sorted({flight.node_id for flight in self.flights})
        position = {node: i for i, node in enumerate(nodes)}
        rows = [
            replace(
                flight,
                device=position[flight.node_id],
                node_id=_signed(flight.node_id),
                status=fl.FLYING if flight.delivered_at == NEVER else flight.status,
            )
            for flight in self.flights
        ]
        return fl.table_of(rows, pd.Index([str(node) for node in nodes], dtype="str"))

    def job_sent(self, run: Runtime, message_id: str, message: Message) -> None:
        """Open a row."""
        self.add(self._flight(run, message), message_id)

    def add(self, flight: Flight, message_id: str) -> None:
        """Take in a row; the id is empty if the message could not be sent."""
        if flight.kind.startswith("train"):
            flight.reported_p_finish = self._reported.get(flight.node_id, UNKNOWN)
        self.flights.append(flight)
        if message_id:
            self.by_message[message_id] = flight
        else:
            flight.status, flight.reason = fl.UNCLAIMED, "the SuperLink did not take the message"

    def reply(self, run: Runtime, message_id: str, reply: Message, status: str) -> None:
        """Note the reply to a job, or the error in its place."""
        flight = self.by_message.get(message_id)
        if flight is None:
            return
        self.hear(flight, reply)
        flight.delivered_at, flight.status = run.now(), status
        if reply.has_error():
            flight.reason = reply.error.reason or ""
        else:
            flight.reason = ""
            flight.uploaded_bytes = float(content_bytes(reply.content))

    def hear(self, flight: Flight, reply: Message) -> None:
        """Note the chance to finish its next job that a device reports."""
        reported = p_finish_in(reply)
        if reported is not None:
            self._reported[flight.node_id] = reported

    def aggregated(
        self,
        run: Runtime,
        message_id: str,
        *,
        base_version: int,
        version: int,
        staleness: int,
        weight: float,
    ) -> None:
        """Note that a reply went into a model version."""
        # A job of the run that this one goes on from has its row there.
        job = self.by_message.get(message_id)
        if job is not None:
            job.base_version, job.aggregated_version = base_version, version
            job.staleness, job.weight = float(staleness), float(weight)

    def rejected(self, run: Runtime, message_id: str, *, reason: str) -> None:
        """Note that the strategy did not use a reply."""
        job = self.by_message.get(message_id)
        if job is not None and job.status == fl.REPORTED:
            job.status, job.reason = fl.REJECTED, reason

    def _flight(self, run: Runtime, message: Message) -> Flight:
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
            sent_at=run.now(),
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


def _signed(node_id: int) -> int:
    """Return an unsigned id of 64 bits as the signed number with the same bits."""
    return node_id - 2**64 if node_id >= 2**63 else node_id
