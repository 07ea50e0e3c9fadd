"""The event loop behind `StaleStrategy.start`: send, wait, receive, merge, evaluate, again.

It holds the state of one run. Which grid it talks to and which clock tells the time, it does not
know. Replies that arrive together are taken in the order in which their jobs were sent, so that
their order of arrival within one instant changes nothing.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from math import inf, nan
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedstale.errors import FedstaleError, ProtocolError
from fedstale.strategies.schedule import LearntDeadline
from fedstale.strategies.selection.base import Selector
from fedstale.strategies.server.buffer import Merging
from fedstale.strategies.server.checkpoint import Checkpointer, State
from fedstale.strategies.server.clients import History
from fedstale.strategies.server.clock import clock_of
from fedstale.strategies.server.dispatch import Dispatch, Outbox
from fedstale.strategies.server.jobs import PURPOSES, Ending, Ledger, Purpose, SentJob
from fedstale.strategies.server.loop_state import continue_from, state_of
from fedstale.strategies.server.merge import Merge
from fedstale.strategies.server.metrics import Evaluations, Scores
from fedstale.strategies.server.node_set import NodeSet
from fedstale.strategies.server.observer import observer_of
from fedstale.strategies.server.online import Roster
from fedstale.strategies.server.progress import Progress
from fedstale.strategies.server.reputation import Reputation
from fedstale.strategies.server.validation import Answer, forecast_in
from fedstale.strategies.server.versions import Snapshot, Versions
from fedstale.strategies.server_optimizer import ServerOptimizer
from fedstale.strategies.weighting.base import Weighting

if TYPE_CHECKING:
    from fedstale.strategies.strategy import StaleStrategy

logger = logging.getLogger(__name__)

# An app whose clients always fail would otherwise train for ever.
_FAILURES_IN_A_ROW = 1000
_DURATIONS_KEPT = 200

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
Parts = tuple[Selector, Weighting, ServerOptimizer]


class EventLoop:
    """One run of a strategy."""

    def __init__(
        self,
        strategy: "StaleStrategy",
        parts: Parts,
        grid: Grid,
        initial: ArrayRecord,
        *,
        timeout_s: float,
        configs: Mapping[Purpose, Mapping[str, object]],
        evaluate_fn: EvaluateFn | None,
        keeper: Checkpointer | None = None,
    ) -> None:
        """Prepare a run; arguments as in `StaleStrategy.start`."""
        self.strategy, self.schedule, self.grid = strategy, strategy.schedule, grid
        self.selector, weighting, optimizer = parts
        self.clock, self.observer = clock_of(grid), observer_of(grid)
        self.evaluate_fn, self.timeout_s, self.keeper = evaluate_fn, timeout_s, keeper
        self.versions = Versions(
            Snapshot.of(initial),
            memory_bytes=strategy.version_memory_bytes,
            folder=None if strategy.checkpoints is None else strategy.checkpoints.folder,
        )
        self.ledger, self.history = Ledger(), History()
        self.roster = Roster(grid, self.ledger)
        self.evaluations, self.reputation = Evaluations(), Reputation(strategy.validation)
        strategy.rejections = self.reputation.counts
        self.rng = np.random.default_rng(strategy.seed)
        now = self.clock.now()
        self.progress = Progress(started_at=now, now=now)
        self.outbox = Outbox(grid, initial, configs, strategy, timeout_s)
        self.dispatch = Dispatch(
            self.outbox,
            self.selector,
            ledger=self.ledger,
            history=self.history,
            versions=self.versions,
            rng=self.rng,
        )
        self.scores = Scores(strategy.result, self.progress, self.observer)
        self.merging = Merging(
            strategy,
            weighting,
            optimizer,
            versions=self.versions,
            examples=self.reputation.examples,
            norms=self.reputation.norms,
        )
        self.durations_s: deque[float] = deque(maxlen=_DURATIONS_KEPT)
        self.asked_at: dict[int, float] = {}
        self.failures = self.most_out = self.n_versions = 0
        self.done = False
        self._open_merge()

    def run(
        self, n_versions: int, resume: State | None = None, *, jobs_survive: bool = False
    ) -> None:
        """Make versions of the model until there are enough, or the strategy says stop.

        Args:
            n_versions: how many, with those of the run that is resumed.
            resume: what that run left.
            jobs_survive: whether the jobs that were out then can still be answered.
        """
        self.n_versions = n_versions
        if resume is None:
            self._evaluate()
        else:
            continue_from(self, resume, jobs_survive=jobs_survive)
        self._look_up()
        while not self.done:
            version = self.versions.version
            self._send()
            self._take_turn(self._next_instant())
            if self.keeper is not None and self.versions.version > version:
                self.keeper.keep(self.versions.version, lambda: state_of(self))
        self._close()

    def abandon_jobs(self) -> None:
        """Forget every job that is out: no reply to it can come any more."""
        for purpose in PURPOSES:
            for job in self.ledger.open_jobs(purpose):
                self._end(job, "cancelled")
        for message_id in list(self.ledger.awaited()):
            self.ledger.forget(message_id)

    @property
    def merge(self) -> Merge:
        """The merge in the making."""
        return self.merging.merge

    # Sending.

    def _open_merge(self) -> None:
        self.merging.opened()
        self.opened_at = self.changed_at = self.clock.now()
        self.may_send, self.short = True, False
        deadline = self.schedule.deadline_s
        if isinstance(deadline, LearntDeadline):
            deadline = deadline.seconds(self.durations_s)
        self.deadline = self.opened_at + deadline

    def _send(self) -> None:
        """Fill up the jobs that are out, if the schedule allows it now."""
        free_slots = (self.schedule.concurrency or inf) - self.ledger.n_training
        self.short = False
        if not self.may_send or free_slots < 1:
            return
        free = self._free_nodes()
        after_step = self.schedule.send == "after_step"
        if len(free) < (self.schedule.min_available_nodes if after_step else 1):
            self.short = True
            return
        if self._is_asking(free):
            return
        # A reply that comes after its merge counts only where the rest of a merge is kept.
        now = self.clock.now()
        deadline_s = inf if self.schedule.stragglers == "keep" else max(self.deadline - now, 0.0)
        k = int(min(free_slots, self.schedule.n_sent(len(free))))
        chosen = self.dispatch.choose(free, k, now, deadline_s)
        self._push(chosen, "train")
        self.may_send = not (after_step and chosen)
        self.short = self.may_send and len(chosen) < free_slots
        self.most_out = max(self.most_out, self.ledger.n_training)

    def _is_asking(self, free: NodeSet) -> bool:
        """Ask free nodes whose forecast is too old; return whether answers are waited for."""
        ask = self.strategy.forecast_request
        if ask is None:
            return False
        if self.ledger.n_asked:
            return True
        heard_at = self.history.candidates(free).forecast_at
        nodes = free.ids.tolist()
        asked_at = [self.asked_at.get(node, nan) for node in nodes]
        due = ask.due(nodes, np.fmax(heard_at, asked_at), self.clock.now())
        self.asked_at.update(dict.fromkeys(due, self.clock.now()))
        self._push(due, "query")
        return bool(due)

    def _free_nodes(self) -> NodeSet:
        but = self.reputation.resting(self.clock.now())
        if self.schedule.distinct and self.schedule.send == "after_reply":
            but |= {job.node_id for job in self.merge.jobs}
        return self.roster.free(but)

    def _push(self, nodes: list[int], purpose: Purpose) -> None:
        unsent, n_bytes = self.dispatch.push(nodes, purpose, self.clock.now())
        self.progress.sent_bytes += n_bytes
        for _ in unsent if purpose == "evaluate" else ():
            self._evaluated(self.versions.version)

    # Waiting and receiving.

    def _next_instant(self) -> float:
        """Return when something must be done although nothing arrives."""
        instants = [self.ledger.next_deadline]
        instants.append(self.reputation.next_return(self.clock.now()))
        if self.merge.jobs:
            if self.clock.now() < self.deadline:
                instants.append(self.deadline)
            if not self.ledger.n_training:
                instants.append(self.changed_at + self.timeout_s)
        if self.short and (self.ledger.n_open or self.merge.jobs):
            instants.append(self.clock.now() + self.strategy.recheck_s)
        return min(instants)

    def _take_turn(self, until: float) -> None:
        if self.clock.wait(until):
            awaited = self.ledger.awaited()
            self._receive(self.grid.pull_messages(awaited) if awaited else ())
        self._expire()
        if self._is_due():
            self._step()
        if not self.ledger.n_training and not self.merge.jobs:
            self.may_send = True

    def _receive(self, replies: Iterable[Message]) -> None:
        known: list[tuple[int, Message]] = []
        # Refusals change the view of awaited ids, which a grid may read for as long as it answers.
        for reply in list(replies):
            job = self.ledger.open_job(reply.metadata.reply_to_message_id)
            if job is None:
                self._refuse_late(reply)
            else:
                known.append((job.job_id, reply))
        for _, reply in sorted(known, key=lambda pair: pair[0]):
            self._receive_one(reply)
            if self._is_full():
                self._step()

    def _refuse_late(self, reply: Message) -> None:
        message_id = reply.metadata.reply_to_message_id
        ending = self.ledger.forget(message_id)
        reason = f"late: the job was {ending} before" if ending else "no such job is out"
        self.progress.received_bytes += _n_bytes(reply)
        self.reputation.drop("late" if ending else "duplicate or unknown")
        self.observer.job_rejected(message_id, reason=reason)

    def _receive_one(self, reply: Message) -> None:
        message_id = reply.metadata.reply_to_message_id
        job = self.ledger.open_job(message_id)
        if job is None:
            self._refuse_late(reply)
            return
        self.progress.received_bytes += _n_bytes(reply)
        self.changed_at = self.clock.now()
        if reply.has_error():
            self._fail(job, "failed", f"error {reply.error.code}: {reply.error.reason}")
            return
        if said := forecast_in(reply):
            self.history.forecast(job.node_id, said, self.changed_at)
        try:
            if job.purpose == "query":
                self._end(job, "accepted")
            elif job.purpose == "evaluate":
                found = self.reputation.measurements(reply, node_id=job.node_id)
                self.evaluations.add(job.base_version, *found)
                self._end(job, "accepted")
            else:
                base = self.versions[job.base_version]
                answer = self.reputation.open(reply, base, node_id=job.node_id)
                self._accept(job, answer)
        except ProtocolError as problem:
            self.reputation.refuse(job.node_id, problem, self.changed_at)
            self._fail(job, "rejected", str(problem))

    def _accept(self, job: SentJob, answer: Answer) -> None:
        staleness = self.merging.accept(job, answer)
        self._end(job, "accepted")
        self.failures = 0
        duration = self.changed_at - job.sent_at
        self.durations_s.append(duration)
        self.history.finished(
            job.node_id,
            duration_s=duration,
            examples=answer.examples,
            loss=answer.metrics.get(self.strategy.loss_key, nan),
            square_loss=answer.metrics.get(self.strategy.square_loss_key, nan),
            staleness=staleness,
            version=self.versions.version,
        )

    # How jobs end.

    def _end(self, job: SentJob, ending: Ending) -> None:
        self.ledger.end(job.message_id, ending)
        if job.purpose != "query":
            self.versions.release(job.base_version)
        if job.purpose == "evaluate":
            self._evaluated(job.base_version)

    def _evaluated(self, version: int) -> None:
        """Note that one more evaluation of a version has ended."""
        metrics = self.evaluations.ended(version)
        if metrics:
            self.scores.note("evaluate", version, metrics)

    def _fail(self, job: SentJob, ending: Ending, reason: str) -> None:
        self._end(job, ending)
        self.observer.job_rejected(job.message_id, reason=reason)
        if job.purpose != "train":
            return
        self.history.failed(job.node_id)
        self.failures += 1
        if self.failures >= max(_FAILURES_IN_A_ROW, 3 * self.most_out):
            raise FedstaleError(
                f"{self.failures} jobs failed one after the other, the last one with: {reason}"
            )

    def _expire(self) -> None:
        for job in self.ledger.expired(self.clock.now()):
            self.changed_at = self.clock.now()
            ttl_s = self.outbox.ttl_s(job.purpose)
            self._fail(job, "timed out", f"no reply within {ttl_s:g} s")

    # Merging.

    def _is_full(self) -> bool:
        concurrency = self.schedule.concurrency or max(self.most_out, 1)
        return self.merging.is_full(concurrency) and not self.done

    def _is_due(self) -> bool:
        """Return whether to merge what there is, because nothing is worth waiting for."""
        if not self.merge.jobs or self.done:
            return False
        now = self.clock.now()
        if now >= self.deadline and self.merging.is_enough():
            return True
        if self.ledger.n_training:
            return False
        # After a reply, jobs go out again at once; if that is impossible for long, go on without.
        return self.schedule.send == "after_step" or now >= self.changed_at + self.timeout_s

    def _step(self) -> None:
        """Make the next version of the model out of the merge, or drop it."""
        merge = self.merge
        try:
            snapshot = self.merging.step()
        except ProtocolError as problem:
            for job in merge.jobs:
                self.observer.job_rejected(job.message_id, reason=str(problem))
        else:
            self._advance(merge, snapshot)
        self._open_merge()

    def _advance(self, merge: Merge, snapshot: Snapshot) -> None:
        version = self.versions.advance(snapshot)
        for job in merge.jobs:
            self.observer.job_aggregated(
                job.message_id,
                base_version=job.base_version,
                version=version,
                staleness=version - 1 - job.base_version,
                weight=job.weight,
            )
        if self.schedule.stragglers == "cancel":
            for left in self.ledger.open_jobs("train"):
                self._end(left, "cancelled")
        self.progress.version = version
        arrays = self.outbox.record(version, snapshot)
        self.strategy.result.arrays = arrays
        self.observer.aggregated(version=version, arrays=arrays)
        metrics = merge.metrics()
        self.merging.learn(metrics)
        self.scores.note("train", version, metrics)
        if version % self.strategy.evaluate_every == 0:
            self._evaluate()
        self._look_up()

    # Measuring.

    def _evaluate(self) -> None:
        """Evaluate the current version on the server, and ask some nodes to."""
        version = self.versions.version
        if self.evaluate_fn is not None:
            record = self.outbox.record(version, self.versions.current)
            self.scores.on_server(version, self.evaluate_fn(version, record))
        share, least = self.strategy.fraction_evaluate, self.strategy.min_evaluate_nodes
        if (share or least) and version:
            online = self.roster.online()
            k = min(max(int(len(online) * share), least), len(online))
            if k:
                self.evaluations.start(version, k)
                chosen = self.rng.choice(len(online), k, replace=False)
                self._push(online.at(chosen).tolist(), "evaluate")

    # The end.

    def _look_up(self) -> None:
        """See whether this version is the last."""
        self.progress.now = self.clock.now()
        enough = self.versions.version >= self.n_versions
        self.done = enough or bool(self.strategy.stop_when(self.progress))

    def _close(self) -> None:
        """End what is still out, and wait for the last evaluations."""
        for job in self.merge.jobs:
            self.observer.job_rejected(job.message_id, reason="the run ended before its merge")
        for left in (*self.ledger.open_jobs("train"), *self.ledger.open_jobs("query")):
            self._end(left, "cancelled")
        if self.versions.version % self.strategy.evaluate_every:
            self._evaluate()
        while self.ledger.n_open:
            if self.clock.wait(self.ledger.next_deadline):
                self._receive(self.grid.pull_messages(self.ledger.awaited()))
            self._expire()
        logger.info("ended at version %d; jobs: %s", self.versions.version, self.ledger.endings)


def _n_bytes(reply: Message) -> int:
    if reply.has_error():
        return 0
    records = [record for record in reply.content.values() if isinstance(record, ArrayRecord)]
    return sum(len(array.data) for record in records for array in record.values())
