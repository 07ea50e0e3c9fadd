"""The clients' side of a simulation: who they are, what they remember, and when they really run.

A client runs only when its reply is pulled, or along with one that is, where its own is certain to
come and already asked for. Each node keeps one Context between its messages, as a
SuperNode does, and each job has a seed of its own.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.app.user_config import UserConfig

from fedstale.simulation.compat import ErrorCode, error_reply, own_copy, with_content
from fedstale.simulation.costs import CostBook
from fedstale.simulation.devices import FIRST_NODE_ID
from fedstale.simulation.executors import ClientCall, ClientReply, Executor
from fedstale.simulation.jobs import JobRow, records_in, records_out
from fedstale.simulation.replayed import NodeContext, Replay
from fedstale.strategies.server.runtime import CLIENT_ERROR, REPORTED
from fedstale.strategies.state import State, Stateful

logger = logging.getLogger(__name__)

_JOB_SEED = b"fedstale job"


class Clients(Stateful):
    """Runs the clients behind arrived jobs."""

    saved = ("_book", "_replay")

    def __init__(
        self,
        executor: Executor,
        book: CostBook,
        *,
        n: int,
        seed: int,
        run_id: int,
        run_config: UserConfig,
        replay: Replay,
    ) -> None:
        self._executor, self._book, self._replay = executor, book, replay
        self._n, self._seed = n, seed
        self._run_id, self._run_config = run_id, run_config
        self._contexts: dict[int, Context] = {}
        self._ahead: dict[int, tuple[Context, ClientReply]] = {}

    @property
    def n_ahead(self) -> int:
        """Number of jobs that were trained ahead and whose reply nobody has pulled (yet).

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
                _, answer = self._ahead.pop(job.job_id)
                self._contexts[job.node_id] = answer.context
                self._replay.finished(job)
                replies[job.job_id] = self._taken(job, answer.reply)
        return replies

    def _is_ready(self, job: JobRow) -> bool:
        """Return whether a job was trained ahead, on what its node remembers now."""
        context, _ = self._ahead.get(job.job_id, (None, None))
        return context is not None and context is self._contexts.get(job.node_id, context)

    def _train(self, jobs: Sequence[JobRow], coming: Callable[[], Iterable[JobRow]]) -> None:
        if not jobs:
            return
        chosen, nodes = list(jobs), {job.node_id for job in jobs}
        room = self._executor.batch - len(chosen) - self.n_ahead
        for job in coming() if room > 0 else ():
            # A node's jobs are trained one after the other: each sees the state of the last.
            if job.job_id in self._ahead or job.node_id in nodes:
                nodes.add(job.node_id)
                continue
            chosen.append(job)
            nodes.add(job.node_id)
            if len(chosen) - len(jobs) >= room:
                break
        calls = [self._call(job, is_ahead=i >= len(jobs)) for i, job in enumerate(chosen)]
        for job, call, answer in zip(chosen, calls, self._executor.run(calls), strict=True):
            before = self._contexts.get(job.node_id, call.context)
            self._ahead[job.job_id] = before, answer

    def _call(self, job: JobRow, *, is_ahead: bool) -> ClientCall:
        message = with_content(job.message, own_copy(job.message.content))
        context = NodeContext.of(self._context(job.node_id), self._replay.device(job))
        if is_ahead:
            # Nobody may ever pull the reply, and then the node never did this.
            context.state = deepcopy(context.state) if len(context.state) else RecordDict()
            context.run_config = dict(context.run_config)
        return ClientCall(message, context, self._seed_of(job))

    def _seed_of(self, job: JobRow) -> int:
        """Return the seed of a job; NumPy's SeedSequence would take as long as all the rest."""
        key = f"{self._seed} {job.node_id} {job.job_id}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=4, person=_JOB_SEED).digest())

    def _taken(self, job: JobRow, reply: Message) -> Message:
        """Return a reply that answers its message, and note how the job ended."""
        message = job.message
        if reply.metadata.reply_to_message_id != message.metadata.message_id:
            text = "the ClientApp answered another message than the one it was given"
            reply = error_reply(message, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, text)
        if reply.has_error():
            job.status, job.reason = CLIENT_ERROR, reply.error.reason or ""
            logger.warning("client on node %d failed: %s", job.node_id, job.reason)
        else:
            job.status, job.reason = REPORTED, ""
            self._book.learn(job.kind.split(".")[0], job.node_id, reply.content)
        return reply

    def _context(self, node_id: int) -> Context:
        context = self._contexts.get(node_id)
        if context is not None:
            return context
        partition: UserConfig = {"partition-id": node_id - FIRST_NODE_ID, "num-partitions": self._n}
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
        later = []
        for job in left:
            if job.node_id in wave:
                later.append(job)
            else:
                wave[job.node_id] = job
        yield list(wave.values())
        left = later
