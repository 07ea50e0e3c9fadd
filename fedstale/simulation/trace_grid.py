"""A Flower Grid of replayed devices under a virtual clock.

Pushing a message schedules the device's download, training and upload; pulling replies moves the
clock to the next event. Everything that a ServerApp can see follows what a SuperLink shows it: who
is online, replies, error replies, and silence until a message expires. A client runs as late as can
be: when the size of its reply decides when that arrives, or, where the app promises the size, when
its reply is pulled. Work that a trace loses before is never computed.
"""

import gc
import heapq
import weakref
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from flwr.app import Message, UserConfig
from flwr.clientapp import ClientApp

from fedstale.compat import free_start
from fedstale.config import Costs
from fedstale.errors import RunEnded
from fedstale.flower import (
    Run,
    asked_ids,
    empty_run,
    entries,
    error_reply,
    identity,
    quick_arrays,
    stamp,
    stamp_reply,
)
from fedstale.simulation.clients import RUN_ID, Clients, Replay
from fedstale.simulation.costs import CostModel, WorkHook
from fedstale.simulation.devices import FIRST_NODE_ID, Devices
from fedstale.simulation.executors import Executor, InlineExecutor
from fedstale.simulation.jobs import ANSWERED, JobRow, JobTable, RunsAfter
from fedstale.simulation.nodes import NodeConfigs
from fedstale.strategies.server import Runtime, RuntimeGrid
from fedstale.strategies.types import FORECAST_RECORD, NodeSet, State, Stateful
from fedstale.traces import OnInterrupt, TraceSet

# A strategy that has sent nothing for this long waits for something that will not come.
_PATIENCE_S = 7 * 86_400.0
_LONGEST_STEP_S = 600.0


# Order of events of one instant: a reply at its deadline counts.
_REPLY, _FAILURE = 0, 1


class TraceGrid(Stateful, RuntimeGrid):
    """Runs Flower messages on replayed devices.

    Node i + 1000 is device i of the traces, and has partition-id i unless `nodes` says otherwise.
    One grid at a time can run in a process, because Flower keeps the identity of the running task
    in a global.

        costs = Costs(work_per_example=0.01, epochs=1, examples=50)
        grid = TraceGrid(traces, client_app, costs=costs)
        with grid.running():
            result = FedAvg().start(grid=grid, initial_arrays=arrays, num_rounds=3)
        grid.events().to_pandas()
    """

    saved = (
        *("_now", "_events", "_open", "_fleet", "_clients", "_jobs"),
        *("_unfollowed", "_unseen_until", "_to_run", "_busy_at", "_step_s", "_most_online"),
    )

    def __init__(
        self,
        traces: TraceSet,
        client: ClientApp | Executor,
        *,
        costs: Costs,
        seed: int = 0,
        run_config: UserConfig | None = None,
        on_interrupt: OnInterrupt = "abort",
        until_s: float = np.inf,
        work: WorkHook | None = None,
        nodes: NodeConfigs | None = None,
        results: Iterable[Path] = (),
    ) -> None:
        """Enrol every device of the traces.

        Args:
            traces: complete devices.
            client: the ClientApp, or an executor that runs it.
            costs: what messages cost; epochs may name a key of the run config.
            seed: of all client randomness.
            run_config: the app's run config, as clients see it.
            on_interrupt: what happens to a job when its device goes offline.
            until_s: virtual instant at which the run ends.
            work: returns the work units of a message, before what `costs` says; None leaves a
                message to that.
            nodes: what each device has in its node config; None for a partition-id of its own,
                their number, and its device-id.
            results: folders in which the ServerApp may meet results that it has named by a date;
                it begins on another one, as `free_start` says.

        Raises:
            TraceError: the traces lack a channel.
            ConfigError: costs name a run-config key that does not exist.
        """
        config: UserConfig = dict(run_config or {})
        book = CostModel(costs.resolved(config), work)
        executor = client if isinstance(client, Executor) else InlineExecutor(client)
        self._fleet = Devices(traces, book, on_interrupt)
        epoch = pd.Timestamp(traces.epoch or "2000-01-01").tz_localize(None)
        first = float((epoch - pd.Timestamp(0)).total_seconds())
        self._unix_base = free_start(first, results)
        self.nodes = nodes or NodeConfigs(traces.device_ids)
        """What each device has in its node config."""
        self._clients = Clients(
            executor,
            book,
            Replay(traces, first),
            seed=seed,
            run_config=config,
            nodes=self.nodes,
        )
        self._run, self._promises = empty_run(RUN_ID), costs.constant_replies
        self._now, self._until = 0.0, until_s
        self._events: list[tuple[float, int, int]] = []
        """A heap of what will happen, by instant, kind and job, never by payload: on constant
        traces many events fall on one instant."""
        self._unfollowed: list[int] = []
        self._unseen_until = np.inf
        self._to_run: list[tuple[float, int]] = []
        """A heap of the jobs that wait for their client, by the instant at which it must run."""
        self._awaited: dict[int, float] = {}
        """Jobs that are waited for in any case, and until when: no other gets their replies."""
        self._jobs = JobTable()
        self._arrived: dict[str, JobRow] = {}
        self._open = 0
        self._busy_at = self._step_s = 0.0
        """Since when nothing has been sent or has arrived, and how far the clock moved last."""
        self._most_online = 0
        # No cycle: a grid of a million devices must go with its last user, not with the collector.
        own = weakref.proxy(self)
        self.runtime = Runtime(
            own,
            self._jobs,
            n_online=lambda: own.n_online,
            n_in_flight=lambda: own._open,
            name_of=lambda node_id: own._fleet.device_id(node_id - FIRST_NODE_ID),
        )
        self.runtime.is_exact = True

    # The run.

    @contextmanager
    def running(self, *packages: str, is_ours: bool = False) -> Iterator[None]:
        """Give the code inside the part of the ServerApp: it creates messages, in virtual time.

        Args:
            packages: import names of the app, whose modules may have bound `time.sleep` by name.
            is_ours: whether the code is fedstale's alone, which asks for no time but the grid's,
                starts no thread and writes to no record that it has sent. For all other code the
                grid is an `AppGrid` inside.

        Raises:
            RunEnded: the run is over, also where only a thread of the app has met its end.
            FedstaleError: a thread of the app has done what is not possible.
        """
        # Every message makes objects, so garbage is looked for often; what has been imported so
        # far is none, and to look through it each time takes an eighth of an empty simulation.
        gc.freeze()
        try:
            with ExitStack() as stack:
                stack.enter_context(identity(self._run.run_id))
                stack.enter_context(quick_arrays())
                if not is_ours:
                    # Which is a grid itself.
                    from fedstale.simulation.app_grid import AppGrid  # noqa: PLC0415

                    stack.enter_context(AppGrid.serving(self, packages))
                yield
        finally:
            gc.unfreeze()

    def events(self) -> pa.Table:
        """Return the events so far, one row a job; jobs in flight have spent some by now."""
        return pa.concat_tables(self.event_tables())

    def event_tables(self) -> Iterator[pa.Table]:
        """Yield what `events` returns in parts that fit in memory, at least one."""
        self._follow()
        now = self._now
        return self._jobs.tables(
            lambda jobs: self._fleet.as_of(jobs, self._jobs, now), self._fleet.traces.device_ids
        )

    @property
    def n_online(self) -> int:
        """Number of devices that are available now."""
        self._fleet.available.move(self._now)
        return self._fleet.available.n_online

    # The clock of strategies.

    def now(self) -> float:
        """Return the virtual instant in s."""
        return self._now

    def wait(self, until: float) -> bool:
        """Move the clock to an instant, or to the next reply or failure if that comes first.

        With nothing in flight and no instant given, moves to the next change of availability.

        Args:
            until: instant in s; may be inf.

        Returns:
            Whether a reply can be pulled now.

        Raises:
            RunEnded: the run is over, or nothing can ever happen again.
        """
        if not self._found(None):
            self._move(until)
        return bool(self._found(None))

    def receive(self, until: float, message_ids: Set[str] | None) -> list[Message]:
        """Return the replies to some messages, after moving the clock as `wait` does if need be.

        Args:
            until: instant in s; may be inf.
            message_ids: of the messages; None for all whose replies nobody else waits for.

        Returns:
            Replies and error replies in the order of their arrival; possibly none.

        Raises:
            RunEnded: the run is over, or nothing can ever happen again.
        """
        found = self._found(message_ids) if self._arrived else []
        if not found:
            self._move(until)
            found = self._found(message_ids) if self._arrived else []
        if not found:
            return []
        if self._now >= self._until:
            raise self._over()
        return self._deliver(found, message_ids or ())

    def sleep(self, seconds: float) -> None:
        """Move the clock on; what happens on the way can be pulled afterwards."""
        self._advance(self._now + max(seconds, 0.0))

    # What a checkpoint holds.

    def state_dict(self) -> State:
        """Return everything that has happened and that is under way.

        Jobs whose device has not been followed stay so: which jobs are trained together must not
        depend on when a checkpoint is written. A reply that has not been pulled is made anew.
        """
        return super().state_dict() | {
            "arrived": [job.row for job in self._arrived.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the grid."""
        super().load_state_dict(state)
        self._arrived = {JobTable.message_id(row): self._jobs.open[row] for row in state["arrived"]}
        for row, job in self._jobs.open.items():
            # The run may go on on another date.
            stamp(job.message, JobTable.message_id(row), self._unix_base + job.sent_at)

    # Flower's Grid.

    def set_run(self, run: Run) -> None:
        """Set the run that this grid belongs to."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run that this grid belongs to."""
        return self._run

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that are online now; see `online_nodes`."""
        return self.online_nodes().ids.tolist()

    def online_nodes(self) -> NodeSet:
        """Return the nodes that are online now.

        Raises:
            RunEnded: the run is over.
        """
        if self._now >= self._until:
            raise self._over()
        nodes = self._fleet.online(self._now)
        self._most_online = max(self._most_online, self._fleet.available.n_online)
        return nodes

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages as they are now; each node works on one at a time, in the order of sending.

        Returns:
            Ids of the messages, in their order.

        Raises:
            ConfigError: a node does not exist, the cost of a message is unknown, or its ttl is not
                above 0.
            RunEnded: the run is over.
        """
        if self._now >= self._until:
            raise self._over()
        now = self._now
        messages = list(messages)
        listeners = self.runtime.listeners
        if listeners["sending"]:
            self.runtime.sending(messages)
        rows, unseen_until = self._fleet.send(messages, now, self._jobs)
        numbers = range(rows.start, rows.stop)
        ids = list(map(JobTable.message_id, numbers))
        if self.runtime.before:
            self._jobs.count_on(rows, self.runtime.before)
        if self._promises:
            self._clients.sent(self._jobs, numbers)
        for message, message_id in zip(messages, ids, strict=True):
            stamp(message, message_id, self._unix_base + now)
        if any(self._jobs.reported.values()):
            self._jobs.note_reported(numbers, messages)
        self._unseen_until = min(self._unseen_until, unseen_until)
        self._unfollowed += numbers
        self._open += len(messages)
        if listeners["job_sent"]:
            for message, message_id in zip(messages, ids, strict=True):
                self.runtime.job_sent(message_id, message)
        self._busy_at, self._step_s = now, 0.0
        return ids

    def pull_messages(  # type: ignore[override] # Flower 1.43's
        self,
        reply_to_message_ids: Iterable[str] | None = None,
        *,
        message_ids: Iterable[str] | None = None,
    ) -> Iterable[Message]:
        """Return the replies that have arrived; if none has, move on to the next event first.

        Args:
            reply_to_message_ids: messages that they answer; all if not given.
            message_ids: the same, as Flower called it up to 1.42.

        Returns:
            Replies and error replies in the order of their arrival; possibly none.

        Raises:
            RunEnded: the run is over.
        """
        asked = asked_ids(reply_to_message_ids, message_ids)
        wanted = asked if asked is None or isinstance(asked, Set) else set(asked)
        if self._now >= self._until:
            raise self._over()
        return self.receive(np.inf, wanted) if wanted is None or wanted else []

    def _found(self, wanted: Set[str] | None) -> list[str]:
        """Return the messages among those wanted, or of all, whose reply is here for this one."""
        if wanted is None:
            return [key for key, job in self._arrived.items() if job.row not in self._awaited]
        return [key for key in self._arrived if key in wanted]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and wait for the replies, at most `timeout` virtual seconds.

        Returns:
            Replies and error replies in the order of their arrival. What is still missing stays in
            flight, as on a SuperLink.

        Raises:
            RunEnded: the run is over.
        """
        self.runtime.timeout_s = np.inf if timeout is None else timeout
        wanted = set(self.push_messages(messages))
        deadline = self._now + self.runtime.timeout_s
        missing, rows = wanted.copy(), range(len(self._jobs) - len(wanted), len(self._jobs))
        self._awaited |= dict.fromkeys(rows, deadline)
        try:
            while missing and self._now < deadline:
                # A message always expires, so there is an event for as long as one is missing.
                missing.difference_update(self._move(deadline, missing))
        finally:
            for row in rows:
                del self._awaited[row]
        found = self._found(wanted)
        return self._deliver(found) if found else []

    # How the clock moves.

    @property
    def _next_event(self) -> float:
        """Instant of the next reply or failure in s, or one after the end; inf if there is none."""
        while True:
            event = self._events[0][0] if self._events else np.inf
            at = self._to_run[0][0] if self._to_run else np.inf
            if self._unfollowed and self._unseen_until <= min(at, event):
                self._follow()
            elif at > event or event == at == np.inf:
                return event
            elif at > self._until:
                return at
            else:
                self._run_clients(until=at)

    def _follow(self) -> None:
        """Find out what devices do with the jobs that were sent."""
        if not self._unfollowed:
            return
        rows, self._unfollowed, self._unseen_until = self._unfollowed, [], np.inf
        self._schedule(*self._fleet.follow(self._jobs, rows))

    def _schedule(self, known: list[int], open_: Iterable[tuple[float, int]] = ()) -> None:
        """Schedule jobs with a known end, and those with a client that must run first."""
        if known:
            columns = self._jobs.columns
            for row in known:
                at = columns["visible_at"].item(row)
                kind = _REPLY if columns["error_code"].item(row) == ANSWERED else _FAILURE
                if at < np.inf:
                    heapq.heappush(self._events, (max(at, self._now), kind, row))
                if kind == _FAILURE:
                    self._clients.drop_lost(self._jobs.open[row])
        for entry in open_:
            heapq.heappush(self._to_run, entry)

    def _run_clients(self, until: float) -> None:
        """Run the clients that must run by an instant, and others along, and see what it means.

        Those run along that are waited for in any case, and, to fill up the executor's batch, the
        next ones.
        """
        heap, end, awaited, rows = self._to_run, self._until, self._awaited, []
        while heap and heap[0][0] <= until:
            rows.append(heapq.heappop(heap)[1])
        if awaited:
            along = [e for e in heap if e[0] <= min(awaited.get(e[1], -np.inf), end)]
            if along:
                rows += [row for _, row in sorted(along)]
                self._to_run = heap = sorted(set(heap).difference(along))
        room = self._clients.executor.batch - len(rows)
        while heap and room > 0 and heap[0][0] <= end:
            if self._clients.may_change(self._jobs.open[heap[0][1]].node_id):
                break
            rows.append(heapq.heappop(heap)[1])
            room -= 1
        jobs = [self._jobs.open[row] for row in rows]
        changed = self._clients.run(jobs, self._now)
        behind = self._fleet.finish(self._jobs, rows, changed)
        self._schedule(rows)
        if any(behind):
            self._schedule(*behind)

    def _advance(self, to: float) -> list[str]:
        """Move the clock, and return the messages to which replies arrived on the way."""
        if self._now >= self._until:
            raise self._over()
        limit = min(to, self._until)
        if limit >= self._unseen_until:
            self._follow()
        while self._to_run and self._to_run[0][0] <= limit:
            self._run_clients(until=limit)
        events, happened = self._events, []
        while events and events[0][0] <= limit:
            row = heapq.heappop(events)[2]
            happened.append(JobTable.message_id(row))
            self._arrived[happened[-1]] = self._jobs.open[row]
        self._now = max(self._now, limit)
        self._open -= len(happened)
        if happened:
            self._busy_at, self._step_s = self._now, 0.0
        elif not self._open and self._now - self._busy_at > _PATIENCE_S:
            raise RunEnded(
                f"nothing happened for {_PATIENCE_S / 86_400:.0f} days of virtual time, in which "
                f"at most {self._most_online} of {self._fleet.traces.n_devices} devices were seen "
                "online at once: let the strategy wait for fewer nodes, or use more devices",
                stuck=True,
            )
        if self.runtime.listeners["time_moved"]:
            self.runtime.time_moved()
        return happened

    def _move(self, until: float = np.inf, missing: Set[str] | None = None) -> list[str]:
        """Move to an instant, or to the next reply or failure if that is earlier.

        With nothing in flight and no instant given, to the next change of nodes.

        Args:
            until: instant in s.
            missing: messages whose replies are waited for, all of them; None for any reply.

        Returns:
            The messages whose replies arrived on the way.
        """
        target = min(until, self._next_event)
        return self._advance(target) if target < np.inf else self._idle()

    def _over(self) -> RunEnded:
        return RunEnded(f"reached {self._until:,.0f} s of virtual time")

    def _idle(self) -> list[str]:
        """Move on although nothing is asked of any device: to the next event or change of nodes."""
        now = self._now
        self._fleet.available.move(now)
        change, event = self._fleet.available.next_change, self._next_event
        if min(change, event) == np.inf:
            raise RunEnded(
                "nothing can ever happen again: no job is in flight and no device comes or goes",
                stuck=True,
            )
        # Further each time, so that few steps lead far.
        self._step_s = min(max(2 * self._step_s, 1.0), _LONGEST_STEP_S)
        return self._advance(min(max(change, now + self._step_s), event))

    def _deliver(self, message_ids: list[str], wanted: Iterable[str] = ()) -> list[Message]:
        """Hand over arrived replies, after training the clients behind them.

        Args:
            message_ids: what is delivered now.
            wanted: what the server waits for besides; clients among them may be trained along.
        """
        jobs = [self._arrived.pop(key) for key in message_ids]

        def coming() -> list[JobRow]:
            asked = (self._jobs.of_message(key) for key in wanted)
            certain = [
                job
                for job in asked
                if job is not None
                and job.row in self._jobs.open
                and job.runs_after == RunsAfter.DELIVERY
                and job.is_answered
                and job.visible_at < self._until
            ]
            return sorted(certain, key=lambda job: (job.visible_at, job.row))

        columns = self._jobs.columns
        code_of, visible_at = columns["error_code"].item, columns["visible_at"].item
        answered = [job for job in jobs if code_of(job.row) == ANSWERED]
        if answered:
            self._clients.have_replied(answered, coming)
        delivered = []
        for job, message_id in zip(jobs, message_ids, strict=True):
            row, code = job.row, code_of(job.row)
            if code == ANSWERED:
                assert job.run is not None
                assert job.run.reply is not None
                reply = job.run.reply
                if not reply.has_error() and FORECAST_RECORD in entries(reply.content):
                    self._jobs.learn(columns["node_id"].item(row), reply)
            else:
                reply = error_reply(job.message, code, job.reason)
            stamp_reply(reply, job.message, f"reply-{row}", self._unix_base + visible_at(row))
            delivered.append(reply)
            if self._promises:
                self._clients.delivered(job)
            self._jobs.end(job, self._now)
            self.runtime.reply(message_id, reply, self._jobs.word(columns["status"].item(row)))
        return delivered
