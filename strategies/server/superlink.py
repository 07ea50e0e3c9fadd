"""The grid of real devices: Flower's own, with a runtime, and without stalls.

A SuperLink shows that a reply exists before its arrays are uploaded, and Flower's `pull_messages`
then waits for them: one device on a slow link would hold up all others. Here replies are claimed
at once and fetched by worker threads, each one when its last object has arrived.
"""

import logging
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Self

from flwr.app import Message
from flwr.serverapp import Grid

from fedstale.flower import Run, asked_ids, quote_error, superlink_grid
from fedstale.strategies.server.packing import PackedNodes
from fedstale.strategies.server.runtime import (
    CLIENT_ERROR,
    REPORTED,
    Clock,
    RunLogger,
    Runtime,
    RuntimeGrid,
    WallClock,
)
from fedstale.strategies.stages import Compatibility, OlderClients

if TYPE_CHECKING:
    from fedstale.flower.superlink_grid import Reply


@contextmanager
def shown_with_flowers() -> Iterator[None]:
    """Route fedstale's log lines, from INFO on, as Flower's.

    In the process of a ServerApp no handler is configured, and they would be lost;
    whoever has configured a handler for them keeps it.
    """
    ours = logging.getLogger("fedstale")
    added = [h for h in logging.getLogger("flwr").handlers if not ours.handlers]
    level = ours.level
    for handler in added:
        ours.addHandler(handler)
    if added and level == logging.NOTSET:
        ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        for handler in added:
            ours.removeHandler(handler)
        ours.setLevel(level)


# How long to leave an upload alone that was not complete: a share of its age (`_LAG`) in these
# limits.
_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.1, 4.0
# A poll costs some ms of CPU here and at the SuperLink; nothing is noticed later than this share
# of the time that it took anyway.
_LAG = 0.05


logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Uploads(WallClock):
    """Replies of a SuperLink, fetched by threads when they have completely arrived.

    As a clock it wakes up as soon as a reply is there. Polls come at most every `poll_s` seconds,
    and rarer the longer nothing happens.
    """

    grid: Any
    """Flower's, of a ServerApp process."""
    poll_s: float = 0.2
    """Shortest time between two polls, in s."""
    longest_poll_s: float = 1.0
    """Longest time between two polls, in s."""
    workers: int = 2
    """Threads that fetch replies."""
    max_held: int = 8
    """Replies that are fetched ahead of the event loop at most; more stay at the SuperLink, so that
    memory is bounded while the loop is busy elsewhere."""
    most_bytes: float = inf
    """Bytes of a reply that the loop takes in."""

    def __post_init__(self) -> None:
        self._pool = _threads(self.workers)
        self._changed = threading.Condition()
        self._claimed: dict[str, Reply] = {}
        self._arrived: dict[str, Message] = {}
        self._problem: BaseException | None = None
        self._silence = superlink_grid.Silence(self.grid)
        self._active_at = self.now()

    def wait(self, until: float) -> bool:
        """Wait for the next poll, an instant or a complete reply, whichever is first."""
        silence = self.now() - self._active_at
        pace = min(max(_LAG * silence, self.poll_s), self.longest_poll_s)
        end = min(until, self.now() + pace)
        with self._changed:
            while not (self._arrived or self._problem) and (now := self.now()) < end:
                self._look()
                looks = [r.look_at for r in self._claimed.values() if r.look_at > now]
                self._changed.wait(min([end, *looks]) - now)
        return True

    def sent(self, message_id: str, message: Message) -> None:
        """Poll often again: something was sent."""
        self._active_at = self.now()
        self._silence.sent(message_id, message, self._active_at)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to some messages that have arrived; never wait for the others.

        Raises:
            Exception: whatever the SuperLink's grid raised in a worker.
        """
        wanted, errors = list(message_ids), list[Message]()
        with self._changed:
            unknown = [i for i in wanted if i not in self._claimed and i not in self._arrived]
        if unknown:
            claimed = superlink_grid.Reply.claims(self.grid, unknown)
            with self._changed:
                self._claimed.update((reply.job, reply) for reply in claimed)
            if claimed:
                self._active_at = self.now()
                self._silence.answered(reply.job for reply in claimed)
            errors = self._silence.errors(unknown, self.now())
        with self._changed:
            if self._problem is not None:
                raise self._problem
            found = [self._arrived.pop(i) for i in wanted if i in self._arrived]
            self._look()
        return found + errors

    def _look(self) -> None:
        """Make workers look at the replies that are due; the lock is held."""
        at_hand = len(self._arrived) + sum(reply.busy for reply in self._claimed.values())
        now = self.now()
        due = [r for r in self._claimed.values() if not r.busy and r.look_at <= now]
        due.sort(key=lambda reply: reply.look_at)
        for reply in due[: max(self.max_held - at_hand, 0)]:
            reply.busy = True
            self._pool.submit(self._fetch, reply)

    def _fetch(self, reply: "Reply") -> None:
        problem, fetched = None, None
        try:
            fetched = reply.fetch(self.grid, self.most_bytes)
        except BaseException as raised:
            problem = raised  # to be raised again in the event loop
        with self._changed:
            reply.busy = False
            if problem is not None:
                self._problem = problem
            elif fetched is None:
                now = self.now()
                reply.first_look_at = min(reply.first_look_at, now)
                pause = max(_LAG * (now - reply.first_look_at), _SHORTEST_LOOK_S)
                reply.look_at = now + min(pause, _LONGEST_LOOK_S)
            else:
                del self._claimed[reply.job]
                self._arrived[reply.job] = fetched
            self._changed.notify_all()

    def close(self) -> None:
        """Fetch nothing more until the next pull."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = _threads(self.workers)


def _threads(n: int) -> ThreadPoolExecutor:
    """Return a pool of threads, none of which is started before there is something to do."""
    return ThreadPoolExecutor(n, thread_name_prefix="pull")


class ForwardingGrid(RuntimeGrid):
    """A grid with a runtime before another grid; a subclass sends, pulls and tells the time."""

    def __init__(self, grid: Grid) -> None:
        """Stand before a grid."""
        self._grid = grid

    def set_run(self, run: Run) -> None:
        """Set the run."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """The run."""
        return self._grid.run

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and wait for their replies, at most `timeout` s by this grid's clock."""
        missing = {message_id for message_id in self.push_messages(messages) if message_id}
        deadline = inf if timeout is None else self.now() + timeout
        replies: list[Message] = []
        while missing and self.now() < deadline:
            self.wait(deadline)
            arrived = list(self.pull_messages(missing))
            missing -= {reply.metadata.reply_to_message_id for reply in arrived}
            replies += arrived
        return replies


class SuperLinkGrid(ForwardingGrid):
    """Flower's own grid with a runtime; pulling from it never waits for an upload.

    Arrays to and from nodes of a SuperLink that can unpack travel as one object (see `packing`).

    Instants count from the moment at which a strategy first sends something or waits. What it
    prepares before takes no time, as in a simulation.

    A context manager, which may be entered again inside: from the first entry to the last exit the
    log of the run is shown in Flower's, and the threads that fetch replies end with it.
    """

    def __init__(
        self, grid: Grid, *, clock: Clock | None = None, uploads: Uploads | None = None
    ) -> None:
        """Connect to a grid; see `connected`.

        Args:
            grid: of a ServerApp.
            clock: tells the time; wall time if not given.
            uploads: fetches replies; if not given, a SuperLink's are fetched with default settings,
                and any other grid is asked itself.
        """
        super().__init__(grid)
        if uploads is None and superlink_grid.is_of_a_superlink(grid):
            uploads = Uploads(grid)
        self._uploads = uploads
        self._clock: Clock = uploads or clock or WallClock()
        self._packing = PackedNodes() if uploads is not None else None
        self._began_at: float | None = None
        self._open: dict[str, float] = {}
        self._n_online = self._n_entered = 0
        self._shown = ExitStack()
        self.runtime = Runtime(
            self,
            RunLogger(),
            n_online=lambda: self._n_online,
            n_in_flight=lambda: len(self._open),
        )
        self.runtime.own_stages = (Compatibility(), OlderClients(is_on=False))

    def __enter__(self) -> Self:
        """Show the run's log in Flower's."""
        self._n_entered += 1
        if self._n_entered == 1 and self._uploads is not None:
            self._shown.enter_context(shown_with_flowers())
        return self

    def __exit__(self, *_: object) -> None:
        """Fetch nothing more."""
        self._n_entered -= 1
        if not self._n_entered:
            self._shown.close()
            if self._uploads is not None:
                self._uploads.close()

    # The clock.

    def now(self) -> float:
        """Return seconds since the first message was sent; 0 before."""
        return 0.0 if self._began_at is None else self._clock.now() - self._began_at

    def begin(self) -> None:
        """Start the clock, unless it runs."""
        if self._began_at is None:
            self._began_at = self._clock.now()

    def wait(self, until: float) -> bool:
        """Wait for an instant, the next poll or a complete reply, whichever is first."""
        self.begin()
        may_pull = self._clock.wait(self._clock.now() + max(until - self.now(), 0.0))
        self.runtime.time_moved()
        return may_pull

    # Flower's Grid.

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that are online."""
        nodes = list(self._grid.get_node_ids())
        self._n_online = len(nodes)
        self.runtime.time_moved()
        return nodes

    def get_nodes(self) -> Iterable[Any]:
        """Return the nodes that are online, with what is known of them."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages."""
        self.begin()
        messages = list(messages)
        self.runtime.sending(messages)
        sent = messages if self._packing is None else self._packing.packed(messages)
        ids = list(self._grid.push_messages(sent))
        for message_id, message in zip(ids, messages, strict=False):
            if message_id:
                lifetime_s = superlink_grid.lifetime_s(message.metadata)
                self._open[message_id] = self.now() + lifetime_s
                if self._uploads is not None:
                    self._uploads.sent(message_id, message)
            self.runtime.job_sent(message_id or "", message)
        self.runtime.time_moved()
        return ids

    def pull_messages(  # type: ignore[override] # Flower 1.43's
        self,
        reply_to_message_ids: Iterable[str] | None = None,
        *,
        message_ids: Iterable[str] | None = None,
    ) -> Iterable[Message]:
        """Return the replies to some messages that have arrived; never wait for the others.

        Args:
            reply_to_message_ids: of the messages; all that are still open if not given.
            message_ids: the same, as Flower called it up to 1.42.

        Raises:
            Exception: whatever the SuperLink's grid raised in a worker.
        """
        wanted = asked_ids(reply_to_message_ids, message_ids)
        source = self._grid if self._uploads is None else self._uploads
        if self._uploads is not None:
            self._uploads.most_bytes = self.runtime.most_bytes
        asked = list(self._open) if wanted is None else wanted
        replies = [quote_error(reply) for reply in source.pull_messages(asked)]
        if self._packing is not None:
            most = self.runtime.most_bytes
            replies = [self._packing.unpacked(reply, most) for reply in replies]
        for reply in replies:
            message_id = reply.metadata.reply_to_message_id
            self._open.pop(message_id, None)
            self.runtime.reply(message_id, reply, CLIENT_ERROR if reply.has_error() else REPORTED)
        now = self.now()
        for message_id in [key for key, until in self._open.items() if until < now]:
            del self._open[message_id]
        self.runtime.time_moved()
        return replies


def connected(grid: Grid) -> RuntimeGrid:
    """Return a grid with a runtime: the given one, or the one that stands before it from now on.

    Args:
        grid: what a ServerApp was given. Each grid of Flower's has one `SuperLinkGrid`, however
            often this is called, so that all who watch a run watch the same one.
    """
    if isinstance(grid, RuntimeGrid):
        return grid
    attributes = vars(grid)
    if "fedstale_grid" not in attributes:
        attributes["fedstale_grid"] = SuperLinkGrid(grid)
    own: SuperLinkGrid = attributes["fedstale_grid"]
    return own


@contextmanager
def without_stalls(grid: Grid) -> Iterator[RuntimeGrid]:
    """Give a grid with a runtime that never waits for an upload, and end its threads afterwards."""
    own = connected(grid)
    with own if isinstance(own, SuperLinkGrid) else ExitStack():
        yield own
