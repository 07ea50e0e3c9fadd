"""A SuperLink's grid whose real nodes act replayed devices, some times faster than they were.

Strategies see the time, the nodes and the failures of the trace, as in a simulation: the plan of a
job is worked out by the same code when it is sent, and travels with the message to the node, whose
`RealtimeApp` acts it. A job that the trace loses is not sent: the grid reports its failure
when a SuperLink would. Everything else is real: processes, messages, the order of arrival.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median

import pyarrow as pa
from flwr.app import ConfigRecord, Message

from fedstale.config import FLOWER_OVERHEAD, Costs
from fedstale.contrib.replay.client import REALTIME_RECORD
from fedstale.deployment import JobLog
from fedstale.errors import RunEnded
from fedstale.flower import asked_ids, error_reply, own_copy, size_of, stamp, with_content
from fedstale.runs import IN_FLIGHT, NEVER
from fedstale.simulation import FIRST_NODE_ID, Columns, CostModel, Devices, JobRow, RunsAfter
from fedstale.strategies.server import (
    CLIENT_ERROR,
    REPORTED,
    ForwardingGrid,
    RunLogger,
    Runtime,
    SuperLinkGrid,
)
from fedstale.traces import OnInterrupt, TraceSet

logger = logging.getLogger(__name__)

# Real seconds beyond the time to live, so that the plan and not Flower ends a job.
_GRACE_S = 120.0
_TOO_LATE_S = 1.0
_SPENT = ("work", "download_s", "compute_s", "upload_s", "downloaded_bytes", "uploaded_bytes")
_REMEMBERED = 20


class _PlannedJobs(JobLog):
    """Rows of planned jobs: the grid writes their spending and their ends."""

    def job_sent(self, run: Runtime, message_id: str, message: Message) -> None:
        """Leave the row to the grid."""

    def reply(self, run: Runtime, message_id: str, reply: Message, status: str) -> None:
        """Leave the row to the grid."""


class ReplayGrid(ForwardingGrid):
    """Node i + 1000 is device i of the traces and the SuperNode with partition-id i.

    Times are seconds of the trace, from the moment at which a strategy first sends or waits.
    """

    def __init__(
        self,
        grid: SuperLinkGrid,
        traces: TraceSet,
        nodes: Sequence[int],
        *,
        costs: Costs,
        speed_up: float,
        on_interrupt: OnInterrupt = "abort",
        until_s: float = math.inf,
        lead_s: float = FLOWER_OVERHEAD["upload-overhead-s"],
        unix_now: Callable[[], float] = time.time,
    ) -> None:
        """Make nodes act devices.

        Args:
            grid: of the SuperLink.
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
        super().__init__(grid)
        self._superlink, self._unix_now = grid, unix_now
        self.unix_zero = unix_now()
        """Instant 0, in s since 1970, UTC."""
        self._log = _PlannedJobs()
        self._book = CostModel(costs)
        self._fleet = Devices(traces, self._book, on_interrupt)
        self._nodes, self._speed_up, self._until_s = nodes, speed_up, until_s
        self._due_at: dict[int, float] = {}
        self._first_lead_s = lead_s
        self._lost: dict[str, tuple[float, Message]] = {}
        self._warned = False
        self.late_s: list[float] = []
        """Real seconds by which replies came later than planned."""
        self.there_s: list[float] = []
        """Real seconds from sending a message to a ClientApp that has it, if the node was free."""
        self.back_s: list[float] = []
        """Real seconds from the end of a ClientApp's work to the server's pulling the reply."""
        self._node_free_at: dict[int, float] = {}
        self.runtime = Runtime(
            self,
            RunLogger(),
            self._log,
            n_online=lambda: len(list(self.get_node_ids())),
            n_in_flight=lambda: len(self._log.open),
            name_of=lambda node_id: self._fleet.device_id(node_id - FIRST_NODE_ID),
        )

    def _begin(self) -> None:
        if not self._superlink.now():
            self._superlink.begin()
            self.unix_zero = self._unix_now()

    def now(self) -> float:
        """Return the instant of the trace in s."""
        return self._superlink.now() * self._speed_up

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
        may_pull = self._superlink.wait(self._superlink.now() + left)
        self.runtime.time_moved()
        return may_pull

    # Flower's Grid.

    def get_node_ids(self) -> Iterable[int]:
        """Return the devices that are available, and whose nodes are online."""
        self._fleet.available.move(self.now())
        is_online = self._fleet.available.is_online()
        connected = set(self._superlink.get_node_ids())
        return [
            FIRST_NODE_ID + i
            for i, node in enumerate(self._nodes)
            if node in connected and is_online[i]
        ]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages with their plans.

        Raises:
            ConfigError: a device does not exist, the cost of a message is unknown, or its ttl is
                not above 0.
        """
        self._begin()
        messages, now = list(messages), self.now()
        self.runtime.sending(messages)
        table = self._log
        rows = self._fleet.send(messages, now, table)[0]
        table.count_on(rows, self.runtime.before)
        jobs = [table.open[row] for row in range(rows.start, rows.stop)]
        # The real reply comes when the plan is long made: it holds what is expected.
        table.columns["runs_after"][rows] = RunsAfter.DELIVERY
        self._fleet.follow(table, [job.row for job in jobs])
        ids = iter(
            self._superlink.push_messages([self._with_plan(job) for job in jobs if job.is_answered])
        )
        given: list[str] = []
        for job, message in zip(jobs, messages, strict=True):
            self._due_at[job.row] = job.reported_at
            message_id = next(ids) if job.is_answered else self._lose(job)
            for name in ("started_at", "downloaded_at", "trained_at", "reported_at", "ended_at"):
                setattr(job, name, NEVER)
            table.name(job, message_id)
            self.runtime.job_sent(message_id, message)
            given.append(message_id)
        return given

    def pull_messages(  # type: ignore[override] # Flower 1.43's
        self,
        reply_to_message_ids: Iterable[str] | None = None,
        *,
        message_ids: Iterable[str] | None = None,
    ) -> Iterable[Message]:
        """Return the replies and failures that can be seen by now, and note them.

        Args:
            reply_to_message_ids: messages that they answer; all that are out if not given.
            message_ids: the same, as Flower called it up to 1.42.
        """
        asked, now = asked_ids(reply_to_message_ids, message_ids), self.now()
        wanted = None if asked is None else list(asked)
        lost = self._lost if wanted is None else [i for i in wanted if i in self._lost]
        failed = [i for i in lost if self._lost[i][0] <= now]
        real = None if wanted is None else [i for i in wanted if i not in self._lost]
        arrived = () if real == [] else self._superlink.pull_messages(real)
        replies = [*(self._lost.pop(i)[1] for i in failed), *arrived]
        for reply in replies:
            message_id = reply.metadata.reply_to_message_id
            job = self._log.of_message(message_id)
            if job is None:
                continue
            self._log.learn(job.node_id, reply)
            self._delivered(job, reply)
            self.runtime.reply(message_id, reply, job.status)
        return replies

    def _lose(self, job: JobRow) -> str:
        message_id = f"lost-{job.row}"
        stamp(job.message, message_id, self.unix_zero, job.message.metadata.ttl)
        error = error_reply(job.message, job.error_code, job.reason)
        self._lost[message_id] = job.visible_at, error
        return message_id

    def events(self) -> pa.Table:
        """Return the log so far, one row a job; lost jobs have spent what the trace says."""
        now, table = self.now(), self._log

        def as_of(jobs: Columns) -> Columns:
            is_out = (jobs["delivered_at"] == NEVER) & (jobs["visible_at"] > now)
            jobs["status"][is_out] = table.number(IN_FLIGHT)
            jobs["reason"][is_out] = table.number("")
            for name in _SPENT:
                jobs[name][is_out] = 0.0
            return jobs

        return pa.concat_tables(table.tables(as_of, self._fleet.traces.device_ids))

    def _with_plan(self, job: JobRow) -> Message:
        content = own_copy(job.message.content)
        train_at, due_at = (
            self.unix_zero + instant / self._speed_up
            for instant in (job.downloaded_at, job.reported_at)
        )
        # To arrive on time, a reply leaves earlier.
        lead_s = median(self.back_s[-_REMEMBERED:] or [self._first_lead_s])
        content[REALTIME_RECORD] = ConfigRecord({"train_at": train_at, "reply_at": due_at - lead_s})
        message = with_content(job.message, content)
        message.metadata.dst_node_id = self._nodes[job.device]
        message.metadata.ttl = message.metadata.ttl / self._speed_up + _GRACE_S
        return message

    def _delivered(self, job: JobRow, reply: Message) -> None:
        self._log.end(job, self.now())
        if reply.has_error():
            if job.is_answered:
                job.status, job.reason = CLIENT_ERROR, reply.error.reason or ""
            return
        # The strategy has sent the job to the device, so the reply comes from the device.
        if reply.metadata.src_node_id == self._nodes[job.device]:
            reply.metadata.__dict__["_src_node_id"] = job.node_id
        record = reply.content.config_records.get(REALTIME_RECORD)
        if record is not None:
            del reply.content[REALTIME_RECORD]
            taken, began, trained, left = (
                (float(record[name]) - self.unix_zero) * self._speed_up  # type: ignore[arg-type]
                for name in ("taken_at", "began_at", "trained_at", "left_at")
            )
            job.started_at, job.downloaded_at, job.trained_at = taken, began, trained
            if job.sent_at >= self._node_free_at.get(job.device, 0.0):
                self.there_s.append((taken - job.sent_at) / self._speed_up)
            self.back_s.append((job.delivered_at - left) / self._speed_up)
            self._node_free_at[job.device] = job.delivered_at
        job.reported_at = job.ended_at = job.delivered_at
        job.status, job.reason = REPORTED, ""
        size = size_of(reply)
        charged = self._book.message_bytes(size, job.scale)
        form = self._log.form(job.row)
        self._book.learn(form, job.node_id, reply, size, charged, job.work_share)
        due_at = self._due_at[job.row]
        self.late_s.append((job.delivered_at - due_at) / self._speed_up)
        late_s = (job.trained_at - due_at) / self._speed_up
        if late_s > _TOO_LATE_S and not self._warned:
            self._warned = True
            logger.warning(
                "job %d was done %.1f s after its reply was due: with a smaller speed-up than %g, "
                "Flower's own time would fit into the jobs",
                *(job.row, late_s, self._speed_up),
            )
