"""The runtime of a grid: its clock, checkpointer and callbacks.

Each grid of fedstale carries one `Runtime`. A strategy asks it for the time and tells it what
became of each reply; displays, logs and stopping rules are callbacks of it. Nothing else in this
package asks for the time, so the same strategy runs on a virtual clock and on real devices, and a
strategy never reads anything back from a callback, so watching a run cannot change it.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from math import inf, nextafter
from pathlib import Path
from types import MethodType
from typing import ClassVar, Literal

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedstale.errors import ConfigError, RunEnded, quoted
from fedstale.flower import SUPERLINK_NODE_ID
from fedstale.strategies.stages import Stage
from fedstale.strategies.types import MOST_NAME, ClientUpdate, NodeSet, State

logger = logging.getLogger(__name__)
Limit = Literal["capped", "clipped", "dropped"]

REPORTED, CLIENT_ERROR, REJECTED = "reported", "client-error", "rejected"
"""How a job ended, in the words of events.parquet, as far as any server can know."""

HEARTBEAT_S = 60.0
"""A SuperLink notices a silent node when its heartbeat, every 30 s, has been missed twice."""


class Clock(ABC):
    """Tells the time, and waits."""

    @abstractmethod
    def now(self) -> float:
        """Return the instant in s; only differences mean anything."""

    @abstractmethod
    def wait(self, until: float) -> bool:
        """Wait until an instant, or until something may have arrived if that is earlier.

        Args:
            until: instant in s; may be inf.

        Returns:
            False only if certainly nothing can be pulled now.
        """

    def receive(self, until: float, message_ids: Set[str]) -> Iterable[Message]:
        """Wait until an instant or until replies are here, and pull those to some messages.

        A clock that is no grid has none.
        """
        self.wait(until)
        return ()


class WallClock(Clock):
    """Real time. It cannot know what has arrived, so it wakes up often and says "maybe".

    Example:
        >>> clock = WallClock(poll_s=0.001)
        >>> clock.wait(float("inf"))
        True
    """

    def __init__(self, poll_s: float = 0.2) -> None:
        """Poll every `poll_s` seconds; a pull from a SuperLink costs some milliseconds."""
        self.poll_s = poll_s

    def now(self) -> float:
        """Return seconds since some fixed instant."""
        return time.monotonic()

    def wait(self, until: float) -> bool:
        """Sleep for one poll, or less if the instant is nearer."""
        time.sleep(min(max(until - self.now(), 0.0), self.poll_s))
        return True


class ResumedClock(Clock):
    """Goes on from an instant of an earlier run, as time passes on another clock.

    Example:
        >>> clock = ResumedClock(WallClock(), 3600.0)
        >>> 3600.0 <= clock.now() < 3601.0
        True
    """

    def __init__(self, clock: Clock, now: float) -> None:
        """Continue a clock; `now` is the instant in s at which the earlier run stopped."""
        self._clock, self._lead_s = clock, now - clock.now()

    def now(self) -> float:
        """Return the instant in s."""
        return self._clock.now() + self._lead_s

    def wait(self, until: float) -> bool:
        """Wait on the other clock."""
        return self._clock.wait(self._there(until))

    def receive(self, until: float, message_ids: Set[str]) -> Iterable[Message]:
        """Receive from the other clock."""
        return self._clock.receive(self._there(until), message_ids)

    def _there(self, until: float) -> float:
        """Return an instant on the other clock."""
        there = max(until - self._lead_s, self._clock.now())
        # Rounding must not let a virtual clock stop just before the instant, for ever.
        return there if there + self._lead_s >= until else nextafter(there, inf)


class Checkpointer:
    """Keeps what a run must not lose, if a subclass does; this class keeps nothing."""

    jobs_survive: bool = False
    """Whether jobs in flight go on after a crash; a SuperLink's end with their run."""

    def restored(self) -> State | None:
        """Return the state of the strategy to continue from; None starts anew."""
        return None

    def is_due(self, version: int) -> bool:
        """Return whether to keep the state of the strategy after a version was made."""
        return False

    def keep(self, version: int, state: Callable[[], State]) -> None:
        """Keep the state of the strategy after a version that is due."""


class Callback:
    """Listens to the events of a run; a subclass overrides some.

    Every method gets the run first, for the time (`run.now()`) and for counts of nodes and jobs.
    Callbacks are told one after the other and must not depend on the order: one that raises
    `RunEnded` ends the run after all others have been told.
    """

    reads_messages: ClassVar[bool] = False
    """Whether it reads rounds off messages, and hears nothing of a loop that tells its rounds."""

    def started(self, run: "Runtime") -> None:
        """A loop of rounds begins: a strategy was started, or a workflow."""

    def sending(self, run: "Runtime", messages: Sequence[Message]) -> None:
        """The app is about to send messages; a run that ends here sends none of them."""

    def job_sent(self, run: "Runtime", message_id: str, message: Message) -> None:
        """A message was sent to a node; the id is empty if the grid could not take it."""

    def reply(self, run: "Runtime", message_id: str, reply: Message, status: str) -> None:
        """The reply to a message, or an error in its place, was handed to the strategy.

        Args:
            run: of the job.
            message_id: of the message that is answered.
            reply: with content, or with an error.
            status: "reported", or how the job failed, in the words of events.parquet.
        """

    def rejected(self, run: "Runtime", message_id: str, *, reason: str) -> None:
        """A reply was not used, or a job was given up, and why."""

    def new_version(
        self, run: "Runtime", version: int, arrays: ArrayRecord, updates: Sequence[ClientUpdate]
    ) -> None:
        """There is a new model.

        Args:
            run: in which.
            version: of the model, counted through all loops of the run.
            arrays: those that are sent out, which must not be changed.
            updates: that went into it, without their arrays; none where nobody names them.
        """

    def metrics(
        self, run: "Runtime", version: int, source: str, values: Mapping[str, float]
    ) -> None:
        """Metrics of a version were measured.

        Args:
            run: in which.
            version: of the model, or the round, counted through all loops of the run.
            source: "train", "evaluate" or "server"; "query" for rounds of queries, which have a
                count of their own.
            values: by name.
        """

    def time_moved(self, run: "Runtime") -> None:
        """The clock has moved, or the server has looked for nodes or replies."""

    def ended(self, run: "Runtime", status: str, reason: str) -> None:
        """The run is over: finished, stopped, stuck, interrupted or failed, and why."""


_EVENTS = [name for name, method in vars(Callback).items() if callable(method)]


class RunLogger(Callback):
    """Writes to the log: jobs at DEBUG, errors and metrics at INFO."""

    def reply(self, run: "Runtime", message_id: str, reply: Message, status: str) -> None:
        """Log the error of a node, or of the SuperLink in its place."""
        if reply.has_error():
            node, error = reply.metadata.src_node_id, reply.error
            who = "SuperLink" if node == SUPERLINK_NODE_ID else f"node {node}"
            logger.info("%s: %s: error %d: %s", who, message_id, error.code, error.reason)

    def new_version(
        self, run: "Runtime", version: int, arrays: ArrayRecord, updates: Sequence[ClientUpdate]
    ) -> None:
        """Log that there is a new model, and the replies that were used."""
        for update in updates:
            logger.debug(
                "%s: trained from %d, aggregated into %d, staleness %d, weight %.4g",
                *(update.message_id, update.base_version, version, update.staleness, update.weight),
            )
        logger.debug("version %d: %d arrays", version, len(arrays))

    def metrics(
        self, run: "Runtime", version: int, source: str, values: Mapping[str, float]
    ) -> None:
        """Log metrics."""
        logger.info("version %d, %s: %s", version, source, dict(values))


class Runtime:
    """The clock, the checkpointer and the callbacks of one run.

    It has the methods of a `Callback`, without the run: each notifies the callbacks that have it.
    Where many are told at once, who tells asks `listeners` first whether there are any.

    An app may run several loops of rounds, one after the other: a strategy started twice, two
    strategies, workflows. Each of them counts its versions from 0; callbacks are told versions that
    count on, so that the runs of a run do not mix.
    """

    def __init__(
        self,
        clock: Clock,
        *callbacks: Callback,
        n_online: Callable[[], int] = lambda: 0,
        n_in_flight: Callable[[], int] = lambda: 0,
        name_of: Callable[[int], str] = lambda node_id: f"node {node_id}",
    ) -> None:
        """Begin a run.

        Args:
            clock: tells the time.
            callbacks: told what happens.
            n_online: returns the number of nodes that are online, as far as is known.
            n_in_flight: returns the number of jobs whose end the server has not seen.
            name_of: returns the name of a node for people.
        """
        self.clock = clock
        self.callbacks: tuple[Callback, ...] = ()
        self.listeners: dict[str, list[MethodType]] = {name: [] for name in _EVENTS}
        """The methods that hear of each event."""
        self.checkpointer: Checkpointer | None = None
        """Keeps the strategy's state along with the grid's; None leaves it to the strategy."""
        self.folder: Path | None = None
        """Of the run, for files of stages that are to be in it; None if the run has none."""
        self.strategy: object = None
        """What runs the latest loop; None where the app sends its messages itself."""
        self.stages: tuple[Stage, ...] = ()
        """Those of the latest loop of a strategy."""
        self.summary: dict[str, object] = {}
        """What those stages add to the run's summary."""
        self.own_stages: tuple[Stage, ...] = ()
        """What every strategy has here besides its own."""
        self.n_online, self.n_in_flight, self.name_of = n_online, n_in_flight, name_of
        self.trained = self.queried = 0
        """Rounds so far in which was trained, or versions; and rounds of queries."""
        self.before = 0
        """Rounds of the loops before this one, which are added to its versions."""
        self.n_loops = 0
        """Loops of rounds that go on: none where an app sends its messages itself."""
        self.tells = False
        """Whether the loop that goes on tells its rounds itself."""
        self.is_exact = False
        """Whether a part that is not as it was asked for ends the run, as in a simulation."""
        self.most_bytes = inf
        """Bytes of a reply that the loop that goes on may take in."""
        self.timeout_s = inf
        """How long the replies to the latest messages are waited for together, in s."""
        self.hints: list[str] = []
        """What was not as it was asked for, in sentences for the summary."""
        self.rejections: Counter[str] = Counter()
        """Of the loop that goes on; see `Checks.counts`."""
        self.limits: dict[Limit, dict[int, int]] = {"capped": {}, "clipped": {}}
        """How often numbers of examples were capped, norms clipped and metrics dropped, by node."""
        self.before_checkpoint: Callable[[], None] | None = None
        """Keeps what the run's folder holds, before a checkpoint of the strategy is written."""
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: Callback) -> None:
        """Tell one more callback what happens from now on, as far as it overrides methods."""
        self.callbacks += (callback,)
        for name, listeners in self.listeners.items():
            if getattr(type(callback), name) is not getattr(Callback, name):
                listeners.append(getattr(callback, name))

    def remove(self, callback: Callback) -> None:
        """Tell a callback nothing more."""
        self.callbacks = tuple(other for other in self.callbacks if other is not callback)
        for name, listeners in self.listeners.items():
            # Another list: the callbacks may just be told something.
            self.listeners[name] = [one for one in listeners if one.__self__ is not callback]

    def _notify(self, event: str, *facts: object, **named: object) -> None:
        """Tell an event to all that listen.

        Raises:
            RunEnded: one of them ends the run; all have been told.
        """
        end: RunEnded | None = None
        for listener in self.listeners[event]:
            try:
                listener(self, *facts, **named)
            except RunEnded as asked:
                end = end or asked
        if end is not None:
            raise end

    def now(self) -> float:
        """Return the instant in s."""
        return self.clock.now()

    def fault(self, fault: str, *, is_allowed: bool) -> None:
        """Note that a part is not as it was asked for.

        Args:
            fault: what is missing, and what is there in its place.
            is_allowed: whether a simulation goes on so.

        Raises:
            ConfigError: it does not.
        """
        if self.is_exact and not is_allowed:
            raise ConfigError(f"{fault}; a simulation goes on so with fallback=True alone")
        if fault not in self.hints:
            self.hints.append(fault)

    def hint(self, hint: str) -> None:
        """Say once, in the log and in the summary, what may not be as it was meant."""
        if hint not in self.hints:
            self.hints.append(hint)
            logger.warning("%s", hint)

    @property
    def rounds(self) -> int:
        """Rounds so far: those that trained, or those of queries in an app that trains nothing."""
        return self.trained or self.queried

    @contextmanager
    def loop(
        self, strategy: object, *, tells: bool = False, resumes: bool = False
    ) -> Iterator[None]:
        """Count the versions that are told inside on from those of the loops before.

        Args:
            strategy: what runs the loop; of loops in loops, the outermost is remembered.
            resumes: whether the loop goes on from a checkpoint, and counts as it did before.
            tells: whether the loop tells each of its rounds. If not, it does from the first
                `new_round` on; until then its rounds are read off its messages.
        """
        self.started()
        unheard = [one for one in self.callbacks if tells and one.reads_messages]
        for one in unheard:
            self.remove(one)
        self.strategy = self.strategy if self.n_loops else strategy
        outer = self.before, self.tells
        self.before, self.tells = 0 if resumes else self.trained, tells
        self.n_loops += 1
        try:
            yield
        finally:
            self.n_loops -= 1
            self.before, self.tells = outer if self.n_loops else (self.trained, False)
            self.most_bytes = self.most_bytes if self.n_loops else inf
            for one in unheard:
                self.add(one)

    def new_round(self, number: int) -> None:
        """Note that a loop tells its rounds; one that has told this number begins another count."""
        self.tells = True
        if self.before + number <= self.trained:
            self.before = self.trained

    def new_version(
        self, version: int, arrays: ArrayRecord, updates: Sequence[ClientUpdate] = ()
    ) -> None:
        """Tell that there is a new model, and which updates it is made of."""
        if before := self.before:
            updates = [replace(one, base_version=before + one.base_version) for one in updates]
        self._notify("new_version", before + version, arrays, updates)

    def metrics(
        self, version: int, source: str, values: Mapping[str, float], *, is_over: bool = True
    ) -> None:
        """Tell what was measured of a version; names that devices chose are `quoted`.

        Args:
            version: of the loop that goes on.
            source: as of a callback.
            values: by name.
            is_over: whether the round has come to its end, if it is one of training or queries.
        """
        version += 0 if source == "query" else self.before
        if source == "train" and is_over:
            self.trained = max(self.trained, version)
        if source == "query" and is_over:
            self.queried = max(self.queried, version)
        if len(names := "".join(values)) > MOST_NAME or not names.isprintable():
            values = {quoted(name, MOST_NAME): value for name, value in values.items()}
        self._notify("metrics", version, source, values)

    def started(self) -> None:
        """Tell that a loop of rounds begins."""
        self._notify("started")

    def sending(self, messages: Sequence[Message]) -> None:
        """Tell that messages are about to be sent."""
        self._notify("sending", messages)

    def job_sent(self, message_id: str, message: Message) -> None:
        """Tell that a message was sent; the id is empty if the grid could not take it."""
        self._notify("job_sent", message_id, message)

    def reply(self, message_id: str, reply: Message, status: str) -> None:
        """Tell that a reply, or an error in its place, was handed to the strategy."""
        self._notify("reply", message_id, reply, status)

    def rejected(self, message_id: str, *, reason: str) -> None:
        """Tell that a reply was not used, or a job given up, and why."""
        self._notify("rejected", message_id, reason=quoted(reason))

    def time_moved(self) -> None:
        """Tell that the clock has moved, or the server looked for nodes or replies."""
        self._notify("time_moved")

    def ended(self, status: str, reason: str) -> None:
        """Tell that the run is over, and how."""
        self._notify("ended", status, reason)


class RuntimeGrid(Grid, Clock):
    """A grid of Flower that carries a runtime; it is the clock of its own run."""

    runtime: Runtime

    def receive(self, until: float, message_ids: Set[str]) -> Iterable[Message]:
        """Wait until an instant or until replies are here, and pull those to some messages."""
        return self.pull_messages(message_ids) if self.wait(until) and message_ids else ()

    def online_nodes(self) -> NodeSet:
        """Return the nodes that `get_node_ids` does; a grid of many need not make a list of them.

        A grid that answers this itself gives the nodes each time among the same everyone.
        """
        return NodeSet.of(np.array(list(self.get_node_ids()), dtype=np.uint64))

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message, as older apps do; new ones call `Message`."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)
