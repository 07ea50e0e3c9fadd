"""The clients' side of a simulation: who they are, what they remember, and when they really run.

A client runs only when its reply is pulled. Each node keeps one Context between its messages, as a
SuperNode does, and each job has a seed of its own.
"""

import logging
from collections.abc import Iterator, Sequence

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.app.user_config import UserConfig

from fedstale.simulation import flight as fl
from fedstale.simulation.compat import ErrorCode, error_reply, own_copy, with_content
from fedstale.simulation.costs import CostBook
from fedstale.simulation.executors import Call, Executor
from fedstale.simulation.fleet import FIRST_NODE_ID
from fedstale.simulation.flight import Flight

logger = logging.getLogger(__name__)

_JOB_SEED = 1


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
    ) -> None:
        self._executor, self._book = executor, book
        self._n, self._seed = n, seed
        self._run_id, self._run_config = run_id, run_config
        self._contexts: dict[int, Context] = {}

    def replies(self, flights: Sequence[Flight]) -> dict[int, Message]:
        """Train the clients of some arrived jobs, all together where they are different nodes.

        Returns:
            The reply of each job id; an error reply where the client failed.
        """
        replies: dict[int, Message] = {}
        for wave in _waves(flights):
            calls = [self._call(flight) for flight in wave]
            answers = self._executor.run(calls)
            for flight, call, answer in zip(wave, calls, answers, strict=True):
                self._contexts[flight.node_id] = answer.context
                replies[flight.job_id] = self._taken(flight, call, answer.reply)
        return replies

    def _call(self, flight: Flight) -> Call:
        assert flight.message is not None
        message = with_content(flight.message, own_copy(flight.message.content))
        key = (_JOB_SEED, flight.node_id, flight.job_id)
        seed = np.random.SeedSequence(self._seed, spawn_key=key).generate_state(1)[0]
        return Call(message, self._context(flight.node_id), int(seed))

    def _taken(self, flight: Flight, call: Call, reply: Message) -> Message:
        """Return a reply that answers its message, and note how the job ended."""
        if reply.metadata.reply_to_message_id != call.message.metadata.message_id:
            text = "the ClientApp answered another message than the one it was given"
            reply = error_reply(call.message, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, text)
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
