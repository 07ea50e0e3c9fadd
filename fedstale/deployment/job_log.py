"""What the server sees of each job on real devices: one row a job, as of a simulation.

What no server can know, such as when a device began to train, stays NaN in the events.
"""

import numpy as np
import pandas as pd
import pyarrow as pa
from flwr.app import Message

from fedstale.simulation.costs import content_bytes
from fedstale.simulation.devices import round_of
from fedstale.simulation.jobs import IN_FLIGHT, NEVER, UNCLAIMED, UNKNOWN, Columns, JobRow, JobTable
from fedstale.strategies.server.runtime import REJECTED, REPORTED, Callback, Runtime
from fedstale.strategies.server.validation import p_finish_in

_UNSEEN = (
    *("started_at", "downloaded_at", "trained_at", "reported_at", "ended_at"),
    *("download_s", "compute_s", "upload_s", "work", "uploaded_bytes"),
)


class JobLog(Callback):
    """Keeps a row for each job of a run."""

    def __init__(self) -> None:
        """Start with no job."""
        self.jobs = JobTable()
        self._by_message: dict[str, int] = {}
        self._reported: dict[int, float] = {}

    @property
    def n_nodes(self) -> int:
        """Number of nodes that a job was sent to."""
        return len(set(self._node_ids().tolist()))

    def of_message(self, message_id: str) -> JobRow | None:
        """Return the job of a message, or None if it was sent by another run."""
        job_id = self._by_message.get(message_id)
        return None if job_id is None else self.jobs[job_id]

    def events(self) -> pa.Table:
        """Return what happened so far, one row a job."""
        nodes = np.unique(self._node_ids().view(np.uint64))

        def as_of(jobs: Columns) -> Columns:
            jobs["device"] = np.searchsorted(nodes, jobs["node_id"].view(np.uint64))
            jobs["status"][jobs["delivered_at"] == NEVER] = self.jobs.number(IN_FLIGHT)
            return jobs

        names = pd.Index([str(node) for node in nodes.tolist()], dtype="str")
        return pa.concat_tables(self.jobs.tables(as_of, names))

    def job_sent(self, run: Runtime, message_id: str, message: Message) -> None:
        """Open a row."""
        job = JobRow(self.jobs, int(self.jobs.add(1)[0]))
        about = message.metadata
        # The column holds 64 bits with a sign, and ids of nodes have none.
        job.node_id = about.dst_node_id - 2**64 if about.dst_node_id >= 2**63 else about.dst_node_id
        job.kind, job.round, job.sent_at = about.message_type, round_of(message), run.now()
        for name in _UNSEEN:
            setattr(job, name, UNKNOWN)
        job.downloaded_bytes = float(content_bytes(message.content))
        job.status = UNCLAIMED
        self.add(job, message_id)

    def add(self, job: JobRow, message_id: str) -> None:
        """Take in a row of the table; the id is empty if the message could not be sent."""
        if job.kind.startswith("train"):
            job.reported_p_finish = self._reported.get(job.node_id, UNKNOWN)
        if message_id:
            self._by_message[message_id] = job.job_id
        else:
            job.status, job.reason = UNCLAIMED, "the SuperLink did not take the message"

    def reply(self, run: Runtime, message_id: str, reply: Message, status: str) -> None:
        """Note the reply to a job, or the error in its place."""
        job = self.of_message(message_id)
        if job is None:
            return
        self.hear(job, reply)
        job.delivered_at, job.status = run.now(), status
        if reply.has_error():
            job.reason = reply.error.reason or ""
        else:
            job.reason = ""
            job.uploaded_bytes = float(content_bytes(reply.content))

    def hear(self, job: JobRow, reply: Message) -> None:
        """Note the chance to finish its next job that a device reports."""
        reported = p_finish_in(reply)
        if reported is not None:
            self._reported[job.node_id] = reported

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
        job = self.of_message(message_id)
        if job is not None:
            job.aggregate(base_version, version, staleness, weight)

    def rejected(self, run: Runtime, message_id: str, *, reason: str) -> None:
        """Note that the strategy did not use a reply."""
        job = self.of_message(message_id)
        if job is not None and job.status == REPORTED:
            job.status, job.reason = REJECTED, reason

    def _node_ids(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        slots = [self.jobs[job_id].slot for job_id in range(len(self.jobs))]
        return self.jobs.columns["node_id"][slots]
