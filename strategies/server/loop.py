"""The event loop behind `StaleStrategy.start`: send, wait, receive, step, evaluate, again.

It holds the state of one run, and says what a checkpoint holds of it. Which grid it talks to and
which clock tells the time, it does not know. Replies that arrive together are taken in the order in
which their jobs were sent, so that their order of arrival within one instant changes nothing.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from math import inf, nan
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.serverapp.strategy import Result

from fedstale.errors import FedstaleError, ProtocolError, first_line, quoted
from fedstale.flower import ErrorCode
from fedstale.strategies.pace import numbers_of
from fedstale.strategies.schedule import Standing
from fedstale.strategies.server.buffer import Buffer, EvaluateFn, Evaluations
from fedstale.strategies.server.checks import Checks
from fedstale.strategies.server.jobs import Dispatcher, OpenJobs
from fedstale.strategies.server.resume import begin_stages, continue_from, state_of
from fedstale.strategies.server.runtime import Checkpointer, Runtime, RuntimeGrid
from fedstale.strategies.server.versions import Snapshot, Versions
from fedstale.strategies.stages import Stage
from fedstale.strategies.types import (
    FORECAST_RECORD,
    PROPERTIES_RECORD,
    ClientUpdate,
    End,
    Ending,
    History,
    Job,
    NodeSet,
    Purpose,
    SelectionContext,
    State,
    Stateful,
    forecast_in,
    full_job_s,
    properties_in,
)

if TYPE_CHECKING:
    from fedstale.strategies.server.strategy import StaleStrategy

logger = logging.getLogger(__name__)

# An app whose clients always fail would otherwise train for ever.
_FAILURES_IN_A_ROW, _CRASHES_OF_EACH = 1000, 5
_AWAY = {
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
}
"""Codes of errors in the place of a node that may come back."""

ShouldStop = Callable[[int, Result], bool]


class EventLoop(Stateful):
    """One run of a strategy, by copies of its selector, weighting and server optimizer."""

    saved = (
        *("selector", "pace", "buffer", "evaluations", "started_at", "standing"),
        *("failures", "jobs", "history", "checks"),
    )

    def __init__(
        self,
        strategy: "StaleStrategy",
        grid: RuntimeGrid,
        initial: ArrayRecord,
        *,
        timeout_s: float,
        configs: Mapping[Purpose, Mapping[str, object]],
        evaluate_fn: EvaluateFn | None,
        checkpointer: Checkpointer,
        should_stop: ShouldStop | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        """Prepare a run; arguments as in `StaleStrategy.start`, with the grid's runtime."""
        self.strategy, self.schedule, self.grid = strategy, strategy.schedule, grid
        self.selector, self.pace, weighting, optimizer, stages = deepcopy(
            (
                *(strategy.selector, strategy.run_pace, strategy.weighting),
                *(strategy.server_optimizer, strategy.run_stages),
            )
        )
        for part in self.selector.faulty():
            grid.runtime.fault(part.fault, is_allowed=part.fallback)
        self.runtime = runtime or grid.runtime
        self.clock = self.runtime.clock
        self.checkpointer, self.should_stop = checkpointer, should_stop
        self.versions = Versions(
            Snapshot.of(initial),
            memory_bytes=strategy.checkpoints.version_memory_bytes,
            folder=strategy.checkpoints.folder,
        )
        stages = (*grid.runtime.own_stages, *stages)
        self.stages: tuple[Stage, ...] = tuple(
            sorted(stages, key=lambda stage: "last" in stage.requires)
        )
        self.asking = next((stage for stage in self.stages if stage.query), None)
        self.jobs, self.history = OpenJobs(), History()
        validation = strategy.validation
        if strategy.robust is not None or any(
            "own norms" in stage.requires for stage in self.stages
        ):
            # A rule withstands large updates, and needs their number: without them it makes no
            # step.
            validation = replace(validation, norm_bound=None)
        grid.runtime.most_bytes = validation.most_bytes_of(self.versions.n_bytes)
        self.checks = Checks(
            validation,
            arrays_key=strategy.arrayrecord_key,
            examples_key=strategy.weighted_by_key,
            # Those of the grid also where another loop runs the rounds.
            limits=grid.runtime.limits,
            most_bytes=grid.runtime.most_bytes,
            weighs_examples=strategy.normalise in ("examples", "steps"),
            needs_steps=strategy.normalise == "steps",
        )
        strategy.rejections = grid.runtime.rejections = self.checks.counts
        self.rng = np.random.default_rng(strategy.seed)
        self.started_at = now = self.clock.now()
        self.standing = Standing(self.schedule, self.jobs.n_out, timeout_s, now)
        self.dispatcher = Dispatcher(
            grid=grid,
            strategy=strategy,
            selector=self.selector,
            stages=self.stages,
            asking=self.asking,
            rng=self.rng,
            configs=dict(configs),
            ttl_s={
                "train": timeout_s,
                "evaluate": timeout_s,
                "query": self.asking.wait_s if self.asking else inf,
            },
            jobs=self.jobs,
            history=self.history,
            versions=self.versions,
            latest=initial,
        )
        self.evaluations = Evaluations(strategy, self.runtime, evaluate_fn)
        self.buffer = Buffer(
            strategy, weighting, optimizer, self.versions, self.checks, self.stages
        )
        self.on_end: list[Callable[[BaseException | None, int], None]] = []
        """Called when the run is over."""
        self.failures = self.n_versions = 0
        self._crashes: dict[int, int] | None = {}
        """Errors in a row of the client of each node that was asked; None once one succeeds."""
        self.done = self._is_first_seen = False

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
        problem: BaseException | None = None
        try:
            if resume is None:
                begin_stages(self)
                self._open()
                self._evaluate()
            else:
                continue_from(self, resume, jobs_survive=jobs_survive)
                if self.versions.version:
                    self._crashes = None
            self._check_done()
            while not self.done:
                version, now = self.versions.version, self.clock.now()
                self._send(now)
                self._advance_to_event(self._next_instant(now))
                made = self.versions.version
                if made > version and self.checkpointer.is_due(made):
                    self._keep(made)
            self._close()
        except BaseException as ended:
            problem = ended
            raise
        finally:
            for told in self.on_end:
                told(problem, self.versions.version)

    def _keep(self, version: int) -> None:
        """Keep the run after a version."""
        if self.runtime.before_checkpoint is not None:
            self.runtime.before_checkpoint()
        self.checkpointer.keep(version, self.state_dict)

    # Sending.

    def _send(self, now: float) -> None:
        """Send to as many nodes as there is room for, if enough are free."""
        room = self.standing.room()
        if room < 1:
            return
        free = self._free_nodes(now)
        k = self.standing.n_of(len(free), room)
        if not k or (self.asking is not None and self._query_free_nodes(self.asking, free, now)):
            return
        chosen = self.dispatcher.choose(free, k, now, self._context(now))
        self.standing.picked(len(chosen))
        self._count_sent(self.dispatcher.send(chosen, "train", now))
        self.standing.sent(len(chosen), room)

    def _context(self, now: float) -> SelectionContext:
        """Describe where the run stands, for a choice of nodes."""
        return SelectionContext(
            n_in_flight=self.jobs.n_out["train"],
            buffer_size=self.standing.size or 0,
            n_missing=self.standing.n_missing(len(self.buffer.updates)) or 0,
            keeps_stragglers=self.schedule.stragglers == "keep",
            version=self.versions.version,
            deadline_s=min(self.standing.left_s(now), self.dispatcher.ttl_s["train"]),
        )

    def _query_free_nodes(self, asking: Stage, free: NodeSet, now: float) -> bool:
        """Ask the free nodes that a stage wants to ask; return whether answers are waited for."""
        if self.jobs.n_out["query"]:
            return True
        due = asking.queries(self.history.candidates(free), now)
        self._count_sent(self.dispatcher.send(due, "query", now))
        return bool(due)

    def _free_nodes(self, now: float) -> NodeSet:
        but = self.checks.resting(now) if self.checks.records else set()
        replaces = not self.standing.may_send
        if replaces or (self.schedule.distinct and self.schedule.send == "after_reply"):
            but |= {update.node_id for update in self.buffer.updates}
        if replaces:
            but |= self.standing.failed_nodes.keys()
        free = self.jobs.idle(self.grid.online_nodes(), but)
        # A grid may answer in any order; what is decided depends on the set alone.
        return free if free.everyone.is_ascending else NodeSet.of(np.sort(free.ids))

    def _count_sent(self, jobs: list[Job]) -> None:
        """Count messages sent, and those that the grid did not take."""
        for job in jobs:
            if job.message_id:
                if job.purpose == "train" and self._crashes is not None:
                    self._crashes.setdefault(job.node_id, 0)
            elif job.purpose == "evaluate":
                self.evaluations.ended(self.versions.version)
            elif job.purpose == "train":
                self.standing.lose(job.node_id)

    # Waiting and receiving.

    def _next_instant(self, now: float) -> float:
        """Return when something must be done although nothing arrives."""
        instants = [self.jobs.next_deadline]
        if self.checks.records:
            instants.append(self.checks.next_return(now))
        if self.buffer.updates:
            instants.append(self.standing.next_instant(now))
        if self.standing.is_short and (self.jobs.out or self.buffer.updates):
            instants.append(now + self.schedule.recheck_s)
        return min(instants)

    def _advance_to_event(self, until: float) -> None:
        """Wait until an instant or for replies, and do what is due then."""
        replies = self.clock.receive(until, self.jobs.awaited.keys())
        now = self.clock.now()
        self._receive(replies, now)
        for job in self.jobs.expired(now):
            self.standing.changed_at = now
            reason = f"no reply within {self.dispatcher.ttl_s[job.purpose]:g} s"
            logger.info("node %d: job %d timed out: %s", job.node_id, job.job_id, reason)
            self._fail(job, "timed out", reason)
        if self.standing.n_to_replace and not self.jobs.n_out["train"] and not self.done:
            # Before the step that would do without: nothing else is waited for.
            self._send(now)
        if self.buffer.updates and not self.done and self._is_due(now):
            self._step(now)
        if not self.jobs.n_out["train"] and not self.buffer.updates:
            self.standing.begin_again()

    def _receive(self, replies: Iterable[Message], now: float) -> None:
        # All first: rejections change the view of awaited ids, which a grid may read meanwhile.
        found: list[tuple[int, Message]] = []
        for reply in replies:
            job = self.jobs.out.get(reply.metadata.reply_to_message_id)
            found.append((-1 if job is None else job.job_id, reply))
        for _, reply in sorted(found, key=itemgetter(0)):
            self._receive_one(reply, now)
            if self.standing.n_missing(len(self.buffer.updates)) == 0 and not self.done:
                self._step(now)

    def _reject_stray(self, reply: Message) -> None:
        message_id = reply.metadata.reply_to_message_id
        ending = self.jobs.forget(message_id)
        reason = f"late: the job was {ending} before" if ending else "no such job is out"
        logger.info("node %d: %s rejected: %s", reply.metadata.src_node_id, message_id, reason)
        self.checks.ignore("late" if ending else "duplicate or unknown")
        self.runtime.rejected(message_id, reason=reason)

    def _receive_one(self, reply: Message, now: float) -> None:
        job = self.jobs.out.get(reply.metadata.reply_to_message_id)
        if job is None:
            self._reject_stray(reply)
            return
        self.standing.changed_at = now
        if reply.has_error():
            reason = f"error {reply.error.code}: {quoted(reply.error.reason)}"
            self._fail(job, "failed", reason, crashed=reply.error.code not in _AWAY)
            return
        try:
            self.checks.check_size(reply)
            for stage in self.stages:
                stage.incoming(job, reply.content)
            if FORECAST_RECORD in reply.content and (forecast := forecast_in(reply.content)):
                self.history.forecast(job.node_id, forecast, now)
            if PROPERTIES_RECORD in reply.content:
                self.history.stated(job.node_id, properties_in(reply.content))
            if job.purpose == "query":
                self.end(job, End("accepted"))
            elif job.purpose == "evaluate":
                found = self.checks.measurements(reply, node_id=job.node_id)
                self.evaluations.add(job.base_version, *found)
                self.end(job, End("accepted"))
            else:
                self._accept(job, self.checks.open(reply, job, self.versions), now)
                if not self._is_first_seen:
                    self._is_first_seen = True
                    self._hint_of_unread(reply)
        except ProtocolError as problem:
            self.checks.reject(job.node_id, problem, now)
            self._fail(job, "rejected", quoted(problem))

    def _hint_of_unread(self, reply: Message) -> None:
        """Hint at the arrays of an accepted reply that nothing reads, if there are any."""
        # Flower's view of them by kind would keep the reply in memory until cycles are collected.
        records = [name for name, r in reply.content.items() if isinstance(r, ArrayRecord)]
        key = self.checks.arrays_key
        is_ours = all(type(stage).__module__.startswith("fedstale.") for stage in self.stages)
        if len(records) > 1 and is_ours:
            others = [name[:40] for name in records if name != key][:5]
            self.grid.runtime.hint(
                f"of the ArrayRecords in a reply {key!r} is the model, by arrayrecord_key, and "
                f"{others} is not read: a Stage of your own may do so"
            )

    def _accept(self, job: Job, update: ClientUpdate, now: float) -> None:
        most = self.strategy.validation.max_staleness
        is_too_stale = most is not None and update.staleness > most
        reason = f"too stale: more than max_staleness = {most} versions behind"
        self.failures, self._crashes = 0, None
        duration = now - job.sent_at
        self.standing.durations_s.append(duration)
        loss, square_loss = self.checks.losses(update)
        facts: dict[str, Any] = {
            "duration_s": duration,
            "examples": update.examples,
            "loss": loss,
            "square_loss": square_loss,
            "staleness": update.staleness,
            "version": self.versions.version,
        }
        if update.share < 1.0:
            forecast = self.history.forecast_of(job.node_id)
            facts["duration_s"] = full_job_s(duration, update.share, forecast)
        self.history.finished(job.node_id, **facts)
        if is_too_stale:
            self.end(job, End("rejected", reason, facts))
            # Its device did nothing wrong: it has no strike, and may be sent to at once.
            self.checks.ignore("too stale")
            self.runtime.rejected(job.message_id, reason=reason)
            self.standing.lose()
        else:
            self.end(job, End("accepted", facts=facts))
            self.buffer.add(update)
            if self.buffer.rejected:
                self._reject_early(now)

    def _reject_early(self, now: float) -> None:
        """Note which updates are left out of the buffer, although their replies were accepted."""
        for update, problem in self.buffer.rejected:
            self.checks.reject(update.node_id, problem, now)
            self._leave_out(update, str(problem))
            self.standing.lose(update.node_id)
        self.buffer.rejected.clear()

    def _leave_out(self, update: ClientUpdate, reason: str) -> None:
        """Note that the update of an accepted reply is not aggregated."""
        self.runtime.rejected(update.message_id, reason=reason)
        job = Job(update.node_id, "train", update.base_version, update.job_id, update.message_id)
        for stage in self.stages:
            stage.ended(job, End("left out", reason))

    # How jobs end.

    def end(self, job: Job, end: End) -> None:
        """End a job, and tell whoever follows it: the one place where jobs end."""
        self.jobs.end(job.message_id, end.how)
        if job.purpose != "query":
            self.versions.release(job.base_version)
        if job.purpose == "evaluate":
            self.evaluations.ended(job.base_version)
        for stage in self.stages:
            stage.ended(job, end)

    def _fail(self, job: Job, how: Ending, reason: str, *, crashed: bool = False) -> None:
        self.end(job, End(how, reason))
        self.runtime.rejected(job.message_id, reason=reason)
        if job.purpose != "train":
            return
        self.history.failed(job.node_id)
        self.standing.lose(job.node_id)
        self.failures += 1
        if self.failures >= max(_FAILURES_IN_A_ROW, 3 * self.standing.most_out):
            raise FedstaleError(
                f"{self.failures} jobs failed one after the other, the last one with: "
                f"{first_line(reason)}"
            )
        if self._crashes is not None:
            self._crashes[job.node_id] = self._crashes.get(job.node_id, 0) + 1 if crashed else 0
            jobs = self.schedule.concurrency or self.standing.most_out
            if crashed and all_crash(self._crashes, jobs, self.grid):
                raise FedstaleError(
                    f"every client fails: each of the {len(self._crashes)} nodes that were asked "
                    f"has failed {_CRASHES_OF_EACH} times in a row or more, the last one with: "
                    f"{first_line(reason)}; mend the ClientApp"
                )

    # Stepping.

    def _is_due(self, now: float) -> bool:
        """Return whether to step with what there is, because nothing is worth waiting for."""
        if now >= self.standing.deadline and self.buffer.is_enough():
            return True
        if self.jobs.n_out["train"] or (self.standing.n_to_replace and self.jobs.n_out["query"]):
            return False
        return self.standing.is_over(now)

    def _step(self, now: float) -> None:
        """Make the next version of the model out of the buffer, or discard it."""
        try:
            snapshot = self.buffer.step()
        except ProtocolError as problem:
            loss = nan
            self._reject_early(now)
            for update in self.buffer.updates:
                logger.info("node %d: its update is left out: %s", update.node_id, problem)
                self._leave_out(update, str(problem))
        else:
            if self.buffer.rejected:
                self._reject_early(now)
            loss = self._advance(snapshot)
        self._open(loss)

    def _open(self, loss: float = nan) -> None:
        """Begin a buffer, after a step with a training loss; the pace has a say in its numbers."""
        self.buffer.open()
        # A step and its evaluation take time on real devices.
        self.standing.open(now := self.clock.now())
        if self.pace is None:
            return
        at = self.strategy.progress(
            version=self.versions.version,
            now=now,
            n_in_flight=self.jobs.n_out["train"],
            loss=loss,
            find=lambda: self.history.candidates(
                self._free_nodes(now), self._context(now), self.jobs.nodes_out
            ),
        )
        self.standing.n_jobs, self.standing.size = numbers_of(self.pace, at)

    def _advance(self, snapshot: Snapshot) -> float:
        """Make a version, and return the mean training loss of its updates."""
        version = self.versions.advance(snapshot)
        if self.schedule.stragglers == "cancel":
            for left in self.jobs.open_jobs("train"):
                self.end(left, End("cancelled"))
        # The record of the version before is let go of before another one is made.
        self.strategy.result.arrays = ArrayRecord()
        self.strategy.result.arrays = arrays = self.dispatcher.record()
        self.runtime.new_version(version, arrays, self.buffer.updates)
        metrics = self.buffer.metrics()
        self.evaluations.note("train", version, metrics)
        if self.evaluations.is_due(version):
            self._evaluate()
        self._check_done()
        if self.should_stop is not None and self.should_stop(version, self.strategy.result):
            self.done = True
        return metrics.get(self.strategy.validation.loss_key, nan)

    # Measuring.

    def _evaluate(self) -> None:
        """Evaluate the current version on the server, and ask some nodes to."""
        version = self.versions.version
        self.evaluations.on_server(version, self.dispatcher.record)
        if version and self.evaluations.by_nodes:
            nodes = self._evaluators()
            self._count_sent(self.dispatcher.send(nodes, "evaluate", self.clock.now()))

    def _evaluators(self) -> list[int]:
        """Draw the nodes that evaluate the current version, and wait for what they measure."""
        online = self.grid.online_nodes()
        k = self.evaluations.start(self.versions.version, len(online))
        return self.dispatcher.draw(online, k) if k else []

    # The end.

    def _check_done(self) -> None:
        """Note whether this version is the last."""
        limit_s = inf if self.strategy.until is None else self.strategy.until.time_s
        self.done = (
            self.versions.version >= self.n_versions
            or self.evaluations.is_reached
            or (limit_s < inf and self.clock.now() >= self.started_at + limit_s)
        )

    def _close(self) -> None:
        """End what is still out, and wait for the last evaluations, but not for silent nodes."""
        for update in self.buffer.updates:
            self.runtime.rejected(update.message_id, reason="the run ended before its server step")
        for left in (*self.jobs.open_jobs("train"), *self.jobs.open_jobs("query")):
            self.end(left, End("cancelled"))
        if not self.evaluations.is_due(self.versions.version):
            self._evaluate()
        patience_s = self.standing.patience_s()
        until = self.clock.now() + patience_s
        while self.jobs.out and self.clock.now() < until:
            self._advance_to_event(min(self.jobs.next_deadline, until))
        for silent in self.jobs.open_jobs("evaluate"):
            self._fail(silent, "timed out", f"no reply within {patience_s:g} s of the last version")
        logger.info("ended at version %d; jobs: %s", self.versions.version, self.jobs.endings)

    def state_dict(self) -> State:
        """Return the state for a checkpoint, between two turns."""
        return super().state_dict() | state_of(self)


def all_crash(crashes: Mapping[int, int], jobs: int, grid: RuntimeGrid) -> bool:
    """Return whether the clients of all nodes fail, of as many as there are jobs at a time."""
    if min(crashes.values()) < _CRASHES_OF_EACH:
        return False
    return len(crashes) >= min(jobs, len(grid.online_nodes().everyone.ids))
