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

from fedstale.simulation import flight as fl
from fedstale.simulation.compat import ErrorCode, error_reply, own_copy, with_content
from fedstale.simulation.costs import CostBook
from fedstale.simulation.devices import FIRST_NODE_ID
from fedstale.simulation.executors import ClientCall, ClientReply, Executor
from fedstale.simulation.flight import Flight
from fedstale.simulation.replayed import NodeContext, Replay
from fedstale.simulation.saved import records_in, records_out

logger = logging.getLogger(__name__)

_JOB_SEED = b"fedstale job"


class Clients:
    """Runs the clients behind arrived jobs."""

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
        self, flights: Sequence[Flight], coming: Callable[[], Iterable[Flight]] = tuple
    ) -> dict[int, Message]:
        """Train the clients of some arrived jobs, all together where they are different nodes.

        Args:
            flights: the jobs whose replies are pulled now.
            coming: returns jobs that will report for certain and whose replies are asked for, the
                next to report first. Some are trained along, to fill up the executor's batch.

        Returns:
            The reply of each job id; an error reply where the client failed.
        """
        replies: dict[int, Message] = {}
        for wave in _waves(flights):
            self._train([f for f in wave if not self._is_ready(f)], coming)
            for flight in wave:
                _, answer = self._ahead.pop(flight.job_id)
                self._contexts[flight.node_id] = answer.context
                self._replay.finished(flight)
                replies[flight.job_id] = self._taken(flight, answer.reply)
        return replies

    def _is_ready(self, flight: Flight) -> bool:
        """Return whether a job was trained ahead, on what its node remembers now."""
        context, _ = self._ahead.get(flight.job_id, (None, None))
        return context is not None and context is self._contexts.get(flight.node_id, context)

    def _train(self, flights: Sequence[Flight], coming: Callable[[], Iterable[Flight]]) -> None:
        if not flights:
            return
        chosen, nodes = list(flights), {f.node_id for f in flights}
        room = self._executor.batch - len(chosen) - self.n_ahead
        for flight in coming() if room > 0 else ():
            # A node's jobs are trained one after the other: each sees the state of the last.
            if flight.job_id in self._ahead or flight.node_id in nodes:
                nodes.add(flight.node_id)
                continue
            chosen.append(flight)
            nodes.add(flight.node_id)
            if len(chosen) - len(flights) >= room:
                break
        calls = [self._call(flight, is_ahead=i >= len(flights)) for i, flight in enumerate(chosen)]
        for flight, call, answer in zip(chosen, calls, self._executor.run(calls), strict=True):
            before = self._contexts.get(flight.node_id, call.context)
            self._ahead[flight.job_id] = before, answer

    def _call(self, flight: Flight, *, is_ahead: bool) -> ClientCall:
        assert flight.message is not None
        message = with_content(flight.message, own_copy(flight.message.content))
        context = NodeContext.of(self._context(flight.node_id), self._replay.device(flight))
        if is_ahead:
            # Nobody may ever pull the reply, and then the node never did this.
            context.state = deepcopy(context.state) if len(context.state) else RecordDict()
            context.run_config = dict(context.run_config)
        return ClientCall(message, context, self._seed_of(flight))

    def _seed_of(self, flight: Flight) -> int:
        """Return the seed of a job; NumPy's SeedSequence would take as long as all the rest."""
        key = f"{self._seed} {flight.node_id} {flight.job_id}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=4, person=_JOB_SEED).digest())

    def _taken(self, flight: Flight, reply: Message) -> Message:
        """Return a reply that answers its message, and note how the job ended."""
        message = flight.message
        assert message is not None
        if reply.metadata.reply_to_message_id != message.metadata.message_id:
            text = "the ClientApp answered another message than the one it was given"
            reply = error_reply(message, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, text)
        if reply.has_error():
            flight.status, flight.reason = fl.CLIENT_ERROR, reply.error.reason or ""
            logger.warning("client on node %d failed: %s", flight.node_id, flight.reason)
        else:
            flight.status, flight.reason = fl.REPORTED, ""
            self._book.learn(flight.kind.split(".")[0], flight.node_id, reply.content)
        return reply

    def _context(self, node_id: int) -> Context:
        context = self._contexts.get(node_id)
        if context is not None:
            return context
        partition: UserConfig = {"partition-id": node_id - FIRST_NODE_ID, "num-partitions": self._n}
        return Context(self._run_id, node_id, partition, RecordDict(), dict(self._run_config))

    def state_dict(self) -> dict[str, Any]:
        """Return what nodes remember, and what was learnt of costs."""
        return {
            "contexts": {str(n): records_out(c.state) for n, c in self._contexts.items()},
            "book": self._book.state_dict(),
            "replay": self._replay.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self._contexts = {}
        for node, records in state["contexts"].items():
            context = self._context(int(node))
            context.state = records_in(records)
            self._contexts[int(node)] = context
        self._book.load_state_dict(state["book"])
        self._replay.load_state_dict(state["replay"])


def _waves(flights: Sequence[Flight]) -> Iterator[list[Flight]]:
    """Split jobs so that no node occurs twice in a wave: its second job sees its first's state."""
    left = list(flights)
    while left:
        wave: dict[int, Flight] = {}
        later = []
        for flight in left:
            if flight.node_id in wave:
                later.append(flight)
            else:
                wave[flight.node_id] = flight
        yield list(wave.values())
        left = later
