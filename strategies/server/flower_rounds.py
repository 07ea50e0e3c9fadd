"""Rounds that another loop runs: Flower's four verbs, for strategies that wrap one of ours.

A wrapper, such as Flower's for differential privacy, runs Flower's own loop and calls the four
verbs of the strategy inside: it changes messages on their way out, replies on their way in, and the
model after each step. `FlowerRounds` answers them by parts of an event loop that does not run:
waiting for replies and evaluating on the server are the wrapper's.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from flwr.app import DEFAULT_TTL, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedstale.strategies.server.loop import EventLoop
from fedstale.strategies.server.resume import begin_stages
from fedstale.strategies.server.runtime import Checkpointer, RunLogger, Runtime
from fedstale.strategies.server.superlink import connected
from fedstale.strategies.server.versions import Snapshot
from fedstale.strategies.types import Job, Purpose

if TYPE_CHECKING:
    from fedstale.strategies.server.strategy import StaleStrategy


class FlowerRounds(EventLoop):
    """One run of a synchronous strategy, round by round."""

    def __init__(self, strategy: "StaleStrategy", grid: Grid, initial: ArrayRecord) -> None:
        """Prepare a run.

        Args:
            strategy: the settings.
            grid: where the nodes are.
            initial: version 0 of the model.
        """
        own = connected(grid)
        super().__init__(
            strategy,
            own,
            initial,
            timeout_s=DEFAULT_TTL,
            configs={"train": {}, "evaluate": {}},
            evaluate_fn=None,
            checkpointer=Checkpointer(),
            # The wrapper's rounds are what a grid's callbacks are told of.
            runtime=Runtime(own.runtime.clock, RunLogger()),
        )
        begin_stages(self)
        self._out: tuple[list[Job], list[Message]] = [], []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> list[Message]:
        """Choose nodes, waiting until enough of them are free, and return their messages."""
        self._take_over(server_round - 1, arrays)
        self.dispatcher.configs["train"] = {**self.strategy.train_config, **config}
        self._open()
        # A selector may be a pace: the other loop waits for all replies.
        self.standing.size = None
        now = self.clock.now()
        while len(free := self._free_nodes(now)) < self.schedule.min_available_nodes:
            self.clock.wait(now + self.schedule.recheck_s)
            now = self.clock.now()
        k = self.standing.n_of(len(free), self.standing.room())
        chosen = self.dispatcher.choose(free, k, now, self._context(now))
        return self._messages(chosen, "train")

    def aggregate_train(
        self, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Validate replies and step; return nothing if no reply could be used."""
        self._take_in(replies, "train")
        before = self.versions.version
        if self.buffer.updates:
            self._step(self.clock.now())
        if self.versions.version == before:
            return None, None
        return self.dispatcher.record(), self.strategy.result.train_metrics_clientapp[before + 1]

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> list[Message]:
        """Return the messages to the nodes that evaluate a version; mostly none, see `Options`."""
        self._take_over(server_round, arrays)
        self.dispatcher.configs["evaluate"] = dict(config)
        is_due = self.evaluations.by_nodes and self.evaluations.is_due(server_round)
        nodes = self._evaluators() if is_due else []
        return self._messages(nodes, "evaluate")

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the means of what was measured, by examples."""
        self._take_in(replies, "evaluate")
        return self.strategy.result.evaluate_metrics_clientapp.get(server_round)

    def _evaluate(self) -> None:
        """Do nothing: the other loop calls for evaluations."""

    def _take_over(self, version: int, arrays: ArrayRecord) -> None:
        """Go on from the model that the other loop has, which need not be the one of our step."""
        if version != self.versions.version or arrays is not self.dispatcher.record():
            self.versions.replace(version, Snapshot.of(arrays))
            self.dispatcher.replace(arrays)

    def _messages(self, nodes: list[int], purpose: Purpose) -> list[Message]:
        jobs, messages = self.dispatcher.prepare(nodes, purpose)
        self._out = jobs, messages
        return messages

    def _take_in(self, replies: Iterable[Message], purpose: Purpose) -> None:
        """Open the jobs that have been sent meanwhile, and end each of them."""
        jobs, messages = self._out
        ids = [message.metadata.message_id or None for message in messages]
        now = self.clock.now()
        self.dispatcher.open(jobs, ids, now)
        self._count_sent(jobs)
        self._receive(replies, now)
        for job in self.jobs.open_jobs(purpose):
            self._fail(job, "timed out", "no reply in this round")
