"""The clients' side of a simulation: who they are, what they remember, and when they really run.

A client runs only when its reply is pulled, or along with one that is, where its own is certain to
come and already asked for. Each node keeps one Context between its messages, as a
SuperNode does, and each job has a seed of its own.

That is later than the instants at which the device worked. So what a device knows of itself, its
past, ends where the device was then: when the message had come, and when the answer was ready.
Whatever the trace holds after that instant makes no difference to what is read here.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.app.user_config import UserConfig
from flwr.common.constant import ErrorCode

from fedstale.simulation.compat import error_reply, own_copy, with_content
from fedstale.simulation.costs import CostBook
from fedstale.simulation.devices import FIRST_NODE_ID
from fedstale.simulation.executors import ClientCall, ClientReply, Executor
from fedstale.simulation.jobs import UNKNOWN, JobRow, JobTable, records_in, records_out
from fedstale.strategies.server.runtime import CLIENT_ERROR, REPORTED
from fedstale.strategies.state import State, Stateful
from fedstale.traces import TraceSet
from fedstale.traces.recording.monitor import Reading

if TYPE_CHECKING:
    from fedstale.traces.forecast.observation import Observation, TraceObserver

logger = logging.getLogger(__name__)

_JOB_SEED = b"fedstale job"
# The summary counts them all.
_ERRORS_SHOWN = 5


class Clients(Stateful):
    """Runs the clients behind arrived jobs.

    Args:
        executor: runs them.
        book: learns from their replies what messages cost.
        replay: the traces of their devices.
        seed: of all their randomness.
        run_id: Flower's id of the run.
        run_config: the app's, as each of them sees it.
    """

    saved = ("_book", "_latest")

    def __init__(
        self,
        executor: Executor,
        book: CostBook,
        replay: "Replay",
        *,
        seed: int,
        run_id: int,
        run_config: UserConfig,
    ) -> None:
        self._executor, self._book, self._replay, self._seed = executor, book, replay, seed
        self._run_id, self._run_config = run_id, run_config
        self._contexts: dict[int, Context] = {}
        self._ahead: dict[int, tuple[Context, ClientReply]] = {}
        self._errors: set[str] = set()
        self._latest: dict[int, int] = {}
        """The job of each node whose reply was pulled last."""

    @property
    def n_ahead(self) -> int:
        """Number of jobs that were trained ahead and whose reply has not been pulled (yet).

        At the end of a run these were trained for nothing; there are never more than a batch.
        """
        return len(self._ahead)

    def replies(
        self, jobs: Sequence[JobRow], coming: Callable[[], Iterable[JobRow]] = tuple
    ) -> dict[int, Message]:
        """Train the clients of some arrived jobs, all together where they are different nodes.

        Args:
            jobs: the jobs whose replies are pulled now.
            coming: returns jobs that will report for certain and whose replies are asked for, the
                next to report first. Some are trained along, to fill up the executor's batch.

        Returns:
            The reply of each job id; an error reply where the client failed.
        """
        replies: dict[int, Message] = {}
        for wave in _waves(jobs):
            self._train([job for job in wave if not self._is_ready(job)], coming)
            for job in wave:
                _, answer = self._ahead.pop(job.row)
                node_id = job.message.metadata.dst_node_id
                self._contexts[node_id], self._latest[node_id] = answer.context, job.row
                replies[job.row] = self._taken(job, answer.reply)
        return replies

    def _is_ready(self, job: JobRow) -> bool:
        """Return whether a job was trained ahead, on what its node remembers now."""
        context, _ = self._ahead.get(job.row, (None, None))
        return context is not None and context is self._contexts.get(job.node_id, context)

    def _train(self, jobs: Sequence[JobRow], coming: Callable[[], Iterable[JobRow]]) -> None:
        if not jobs:
            return
        chosen, nodes = list(jobs), {job.node_id for job in jobs}
        room = self._executor.batch - len(chosen) - self.n_ahead
        for job in coming() if room > 0 else ():
            # A node's jobs are trained one after the other: each sees the state of the last.
            if job.row in self._ahead or job.node_id in nodes:
                nodes.add(job.node_id)
                continue
            chosen.append(job)
            nodes.add(job.node_id)
            if len(chosen) - len(jobs) >= room:
                break
        calls = [self._call(job, is_ahead=i >= len(jobs)) for i, job in enumerate(chosen)]
        if self._executor.is_remote:
            contexts = (call.context for call in calls)
            _pack([one.device for one in contexts if isinstance(one, NodeContext)])
        for job, call, answer in zip(chosen, calls, self._executor.run(calls), strict=True):
            before = self._contexts.get(call.context.node_id, call.context)
            self._ahead[job.row] = before, answer

    def _call(self, job: JobRow, *, is_ahead: bool) -> ClientCall:
        sent, node_id = job.message, job.message.metadata.dst_node_id
        latest = self._latest.get(node_id)
        before = None if latest is None else job.jobs[latest]
        device = ReplayedDevice(self._replay, job, before)
        context = NodeContext.of(self._context(node_id), device)
        if is_ahead:
            # The reply may never be pulled, and then the node never did this.
            context.state = deepcopy(context.state) if len(context.state) else RecordDict()
            context.run_config = dict(context.run_config)
        # NumPy's SeedSequence would take as long as all the rest.
        key = f"{self._seed} {node_id} {job.row}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=4, person=_JOB_SEED).digest())
        return ClientCall(with_content(sent, own_copy(sent.content)), context, seed)

    def _taken(self, job: JobRow, reply: Message) -> Message:
        """Return a reply that answers its message, and note how the job ended."""
        message = job.message
        if reply.metadata.reply_to_message_id != message.metadata.message_id:
            text = "the ClientApp answered another message than the one it was given"
            reply = error_reply(message, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, text)
        if reply.has_error():
            job.status, job.reason = CLIENT_ERROR, reply.error.reason or ""
            is_new = job.reason not in self._errors and len(self._errors) < _ERRORS_SHOWN
            self._errors |= {job.reason} if is_new else set()
            level = logging.WARNING if is_new else logging.DEBUG
            logger.log(level, "client on node %d failed: %s", job.node_id, job.reason)
        else:
            job.status, job.reason = REPORTED, ""
            about = message.metadata
            self._book.learn(about.message_type.split(".")[0], about.dst_node_id, reply.content)
        return reply

    def _context(self, node_id: int) -> Context:
        context = self._contexts.get(node_id)
        if context is not None:
            return context
        partition: UserConfig = {
            "partition-id": node_id - FIRST_NODE_ID,
            "num-partitions": self._replay.traces.n_devices,
        }
        return Context(self._run_id, node_id, partition, RecordDict(), dict(self._run_config))

    def state_dict(self) -> State:
        """Return what nodes remember, and what was learnt of costs."""
        contexts = {node: records_out(c.state) for node, c in self._contexts.items()}
        return super().state_dict() | {"contexts": contexts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        super().load_state_dict(state)
        self._contexts = {}
        for node, records in state["contexts"].items():
            self._contexts[node] = self._context(node)
            self._contexts[node].state = records_in(records)


def _waves(jobs: Sequence[JobRow]) -> Iterator[list[JobRow]]:
    """Split jobs so that no node occurs twice in a wave: its second job sees its first's state."""
    left = list(jobs)
    while left:
        wave: dict[int, JobRow] = {}
        left = [job for job in left if wave.setdefault(job.node_id, job) is not job]
        yield list(wave.values())


class NodeContext(Context):
    """The Context of a simulated node, which also knows the device below it."""

    device: "ReplayedDevice"
    """The device while it works on the message that the Context comes with."""

    @classmethod
    def of(cls, context: Context, device: "ReplayedDevice") -> "NodeContext":
        """Return a Context with the same contents, for one message."""
        made = cls.__new__(cls)
        made.__dict__.update(vars(context), device=device)
        return made


@dataclass(eq=False, slots=True)
class Replay:
    """The traces of a run, as their devices see them."""

    traces: TraceSet
    unix_base: float
    """Instant 0 of the run, in s since 1970, UTC."""
    _observer: "TraceObserver | None" = None

    def observe(self, devices: Sequence[int], instants: Sequence[float]) -> "Observation":
        """Return what devices have seen of themselves at instants."""
        # Runs of apps that forecast nothing pay neither for the import nor for the preparation.
        from fedstale.traces.forecast.observation import TraceObserver  # noqa: PLC0415

        if self._observer is None:
            self._observer = TraceObserver(self.traces)
        return self._observer.at(np.array(devices), np.array(instants))

    def is_online(self, devices: Sequence[int], instants: Sequence[float]) -> list[bool]:
        """Return whether devices are available at instants."""
        assert self.traces.availability is not None
        at = np.array(devices), np.array(instants)
        online: list[bool] = self.traces.availability.is_available(*at).tolist()
        return online


class ReplayedDevice:
    """One device while it works on one message; a `ResourceMonitor` on its trace.

    Args:
        replay: its trace.
        job: the message, which it has answered.
        latest: the job whose reply the server has pulled last of this device's, if there is one.
    """

    def __init__(self, replay: Replay, job: JobRow, latest: JobRow | None) -> None:
        self._replay, self._job, self._latest = replay, job, latest
        self.unix_base, self._reads = replay.unix_base, 0
        self._observed: dict[str, Any] = {}

    @property
    def _instants(self) -> tuple[float, float]:
        """When the message had come, and when it was answered, in s."""
        return self._job.downloaded_at, self._job.trained_at

    @cached_property
    def _online(self) -> list[bool]:
        return self._replay.is_online([self._job.device] * 2, self._instants)

    def read(self) -> Reading:
        """Return the device when the message had come, and after that when it was answered."""
        end = min(self._reads, 1)
        self._reads += 1
        instant = self.unix_base + self._instants[end]
        return Reading(instant=instant, online=self._online[end])

    def worked_s(self) -> float:
        """Return how long the device worked, in s."""
        return self._job.trained_at - self._job.downloaded_at

    def travel_s(self) -> float:
        """Return the time from sending to the last byte of the download, in s."""
        return self._job.downloaded_at - self._job.sent_at

    def uploaded_s(self, message_id: str) -> float:
        """Return how long the reply before this one was uploaded, in s; NaN for any other."""
        latest = self._latest
        if latest is None or message_id != JobTable.message_id(latest.job_id):
            return UNKNOWN
        # Replies may be pulled in another order than devices worked in.
        is_before = latest.reported_at <= self._job.downloaded_at
        return latest.reported_at - latest.trained_at if is_before else UNKNOWN

    def cost(self) -> tuple[float, float, float]:
        """Return work units, bytes down and bytes up of the message."""
        job = self._job
        return job.asked_work, job.asked_download_bytes, job.asked_upload_bytes

    def observed(self, history: object, journal: object) -> "Observation":
        """Return what the trace shows up to both ends of the work.

        Args:
            history: the device's own notes, which know no more than its trace.
            journal: of the machine that simulates, which is another device.
        """
        del history, journal
        from fedstale.traces.forecast.observation import Observation  # noqa: PLC0415 - see Replay

        if self._observed:
            return Observation(**self._observed)
        return self._replay.observe([self._job.device] * 2, self._instants)

    def __getstate__(self) -> dict[str, Any]:
        _pack([self])
        return {k: v for k, v in vars(self).items() if k != "_replay"}


def _pack(devices: Sequence[ReplayedDevice]) -> None:
    """Let devices take along what they may be asked in another process; traces stay behind.

    It is not known which apps will ask. For one device it takes a millisecond, for many at once a
    fiftieth of that each.
    """
    devices = [device for device in devices if not device._observed]
    if not devices:
        return
    replay = devices[0]._replay
    positions = [device._job.device for device in devices for _ in range(2)]
    instants = [instant for device in devices for instant in device._instants]
    seen, online = replay.observe(positions, instants), replay.is_online(positions, instants)
    for i, device in enumerate(devices):
        ends = slice(2 * i, 2 * i + 2)
        own = seen.take(ends)
        # Arrays in a dict: a worker whose app forecasts nothing imports no forecaster.
        device._observed = {f.name: getattr(own, f.name) for f in fields(own)}
        device._online = online[ends]
