"""A SuperLink's grid whose real nodes act replayed devices, some times faster than they were.

Strategies see the time, the nodes and the failures of the trace, as in a simulation: the plan of a
job is worked out by the same code when it is sent, and travels with the message to the node, whose
`PacedApp` acts it. A job that the trace loses is not sent: the grid reports its failure
when a SuperLink would. Everything else is real: processes, messages, the order of arrival.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from statistics import median

import pandas as pd
import pyarrow as pa
from flwr.app import Message
from flwr.serverapp import Grid

from fedstale.deployment.paced import PACING_RECORD, Pacing
from fedstale.deployment.recorded_grid import RecordedGrid
from fedstale.simulation import flight as fl
from fedstale.simulation.clock import RunEnded
from fedstale.simulation.compat import error_reply, own_copy, stamp, with_content
from fedstale.simulation.costs import FLOWER_OVERHEAD, CostBook, Costs
from fedstale.simulation.devices import FIRST_NODE_ID, Fleet
from fedstale.simulation.flight import NEVER, Flight
from fedstale.traces import TraceSet
from fedstale.traces.trip import OnInterrupt

logger = logging.getLogger(__name__)

# Real seconds beyond the time to live, so that the plan and not Flower ends a job.
_GRACE_S = 120.0
_TOO_LATE_S = 1.0
_REMEMBERED = 20


class ReplayGrid(RecordedGrid):
    """Node i + 1000 is device i of the traces and the SuperNode with partition-id i.

    Times are seconds of the trace, from the moment at which a strategy first sends or waits.
    """

    def __init__(
        self,
        grid: Grid,
        traces: TraceSet,
        nodes: Mapping[int, int],
        *,
        costs: Costs,
        speed_up: float,
        on_interrupt: OnInterrupt = "abort",
        until_s: float = math.inf,
        lead_s: float = FLOWER_OVERHEAD["upload-overhead-s"],
        unix_now: Callable[[], float] = time.time,
    ) -> None:
        """Let nodes act devices.

        Args:
            grid: of the SuperLink; it does not wait for uploads.
            traces: complete devices.
            nodes: Flower's id of the node that acts each device, by position.
            costs: what messages cost, with the number of epochs resolved.
            speed_up: seconds of the trace in one real second.
            on_interrupt: what happens to a job when its device goes offline.
            until_s: instant of the trace at which the run ends.
            lead_s: real seconds by which a reply leaves before it is due, until the first ones
                have told how long it takes.
            unix_now: returns seconds since 1970, UTC.
        """
        super().__init__(grid, unix_now=unix_now)
        self._book = CostBook(costs)
        self._fleet = Fleet(traces, self._book, on_interrupt)
        self._nodes, self._speed_up, self._until_s = dict(nodes), speed_up, until_s
        self._device_ids: pd.Index = traces.device_ids
        self._planned: dict[int, tuple[float, float]] = {}
        self._first_lead_s = lead_s
        self._lost: dict[str, tuple[float, Message]] = {}
        self._warned = False
        self.there_s: list[float] = []
        """Real seconds from sending a message to a ClientApp that has it, if the node was free."""
        self.back_s: list[float] = []
        """Real seconds from the end of a ClientApp's work to the server's pulling the reply."""
        self._node_free_at: dict[int, float] = {}

    def now(self) -> float:
        """Return the instant of the trace in s."""
        return super().now() * self._speed_up

    def wait(self, until: float) -> bool:
        """Wait until an instant of the trace, or until something may have arrived.

        Raises:
            RunEnded: the run is over.
        """
        self._begin()
        if self.now() >= self._until_s:
            raise RunEnded(f"reached {self._until_s:,.0f} s of the trace")
        until = min([until, self._until_s, *(at for at, _ in self._lost.values())])
        left = max(until - self.now(), 0.0) / self._speed_up
        return self._clock.wait(self._clock.now() + left)

    def get_node_ids(self) -> Iterable[int]:
        """Return the devices that are available, and whose nodes are online."""
        is_online = self._fleet.presence(self.now()).is_online
        there = set(self._grid.get_node_ids())
        return [
            FIRST_NODE_ID + i
            for i, node in sorted(self._nodes.items())
            if node in there and is_online[i]
        ]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages with their plans.

        Raises:
            ConfigError: a device does not exist, the cost of a message is unknown, or its ttl is
                not above 0.
        """
        self._begin()
        messages, now = list(messages), self.now()
        jobs = self._fleet.send(messages, now, first_job_id=len(self.flights))
        flights = self._fleet.follow(jobs)
        sent = [flight for flight in flights if flight.failure is None]
        ids = iter(self._grid.push_messages([self._with_plan(flight) for flight in sent]))
        given: list[str] = []
        for flight in flights:
            self._planned[flight.job_id] = flight.reported_at, flight.visible_at
            message_id = next(ids) if flight.failure is None else self._lose(flight)
            for name in ("started_at", "downloaded_at", "trained_at", "reported_at", "ended_at"):
                setattr(flight, name, NEVER)
            flight.message = None
            self._note(flight, message_id)
            given.append(message_id)
        return given

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies and failures that can be seen by now, and note them."""
        now, wanted = self.now(), list(message_ids)
        failed = [i for i in wanted if i in self._lost and self._lost[i][0] <= now]
        replies = [self._lost.pop(i)[1] for i in failed]
        for reply in replies:
            self._delivered(self._by_message[reply.metadata.reply_to_message_id], reply)
        real = [i for i in wanted if i not in self._lost and i not in failed]
        return [*replies, *(super().pull_messages(real) if real else ())]

    def _lose(self, flight: Flight) -> str:
        assert flight.message is not None
        assert flight.failure is not None
        message_id = f"lost-{flight.job_id}"
        stamp(flight.message, message_id, self.unix_zero, flight.message.metadata.ttl)
        self._lost[message_id] = flight.visible_at, error_reply(flight.message, *flight.failure)
        return message_id

    def events(self) -> pa.Table:
        """Return what happened so far, one row a job; lost jobs have spent what the trace says."""
        now = self.now()
        rows = []
        for flight in self.flights:
            is_out = flight.delivered_at == NEVER and self._planned[flight.job_id][1] > now
            rows.append(_flying(flight) if is_out else flight)
        return fl.table_of(rows, self._device_ids)

    @property
    def late_s(self) -> list[float]:
        """Real seconds by which replies came later than planned, in the order of sending."""
        return [
            (flight.reported_at - self._planned[flight.job_id][0]) / self._speed_up
            for flight in self.flights
            if flight.reported_at < NEVER
        ]

    @property
    def _lead_s(self) -> float:
        return median(self.back_s[-_REMEMBERED:]) if self.back_s else self._first_lead_s

    def _with_plan(self, flight: Flight) -> Message:
        assert flight.message is not None
        content = own_copy(flight.message.content)
        pacing = Pacing(
            train_at=self._unix(flight.downloaded_at),
            # Who wants to be there on time leaves earlier.
            reply_at=self._unix(flight.reported_at) - self._lead_s,
        )
        content[PACING_RECORD] = pacing.record()
        message = with_content(flight.message, content)
        message.metadata.dst_node_id = self._nodes[flight.device]
        message.metadata.ttl = message.metadata.ttl / self._speed_up + _GRACE_S
        return message

    def _unix(self, instant: float) -> float:
        return self.unix_zero + instant / self._speed_up

    def _since_zero(self, unix: float) -> float:
        return (unix - self.unix_zero) * self._speed_up

    def _delivered(self, flight: Flight, reply: Message) -> None:
        if reply.has_error():
            status = flight.status if flight.failure is not None else fl.CLIENT_ERROR
            reason = flight.reason if flight.failure is not None else reply.error.reason or ""
            flight.delivered_at = self.now()
            flight.status, flight.reason = status, reason
            return
        # The strategy has sent the job to the device, and is answered by the device.
        if reply.metadata.src_node_id == self._nodes[flight.device]:
            reply.metadata.__dict__["_src_node_id"] = flight.node_id
        record = reply.content.config_records.get(PACING_RECORD)
        if record is not None:
            del reply.content[PACING_RECORD]
            taken, began, trained, left = (
                self._since_zero(float(record[name]))  # type: ignore[arg-type]
                for name in ("taken_at", "began_at", "trained_at", "left_at")
            )
            flight.started_at, flight.downloaded_at, flight.trained_at = taken, began, trained
            if flight.sent_at >= self._node_free_at.get(flight.device, 0.0):
                self.there_s.append((taken - flight.sent_at) / self._speed_up)
            self.back_s.append((self.now() - left) / self._speed_up)
            self._node_free_at[flight.device] = self.now()
        flight.delivered_at = flight.reported_at = flight.ended_at = self.now()
        flight.status, flight.reason = fl.REPORTED, ""
        self._book.learn(flight.kind.split(".")[0], flight.node_id, reply.content)
        self._warn_if_late(flight)

    def _warn_if_late(self, flight: Flight) -> None:
        late_s = (flight.trained_at - self._planned[flight.job_id][0]) / self._speed_up
        if late_s > _TOO_LATE_S and not self._warned:
            self._warned = True
            logger.warning(
                "job %d was done %.1f s after its reply was due: with a smaller speed-up than %g, "
                "Flower's own time would fit into the jobs",
                *(flight.job_id, late_s, self._speed_up),
            )


def _flying(flight: Flight) -> Flight:
    return replace(
        flight,
        status=fl.FLYING,
        reason="",
        work=0.0,
        download_s=0.0,
        compute_s=0.0,
        upload_s=0.0,
        downloaded_bytes=0.0,
        uploaded_bytes=0.0,
    )
