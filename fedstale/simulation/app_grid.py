"""The grid while it serves other people's server code.

An app may use the grid from several threads, which take turns; may write to a record that it has
sent; and may wait for nodes in a loop of its own, which differs from one that never ends in that it
lets time pass. `AppGrid` sees to all three, and shows the app virtual time.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import numpy as np
from flwr.app import Message

from fedstale.compat import ServerThreads, VirtualTime, wrapped
from fedstale.flower import asked_ids, own_messages, stamp
from fedstale.simulation.trace_grid import TraceGrid
from fedstale.strategies.types import Bits, NodeSet

_OPERATIONS = (
    *("wait", "receive", "sleep", "online_nodes"),
    *("push_messages", "pull_messages", "send_and_receive"),
)
"""Methods that move the clock or send: threads of an app use them in turn."""
_WORK = "run", "have_replied"
"""Methods of `Clients` in which an app's clients run, and see wall time."""
_LOOKS_OF_A_LOOP = 100
"""An app that asks who is online this often at one instant is looping, not looking."""


class AppGrid(TraceGrid):
    """A `TraceGrid` for as long as an app runs on it that is not fedstale's own."""

    _threads: ServerThreads
    _seen: tuple[object, Bits] | None = None
    """What had been sent and had arrived at the last look at who is online, and who was."""
    _n_looks = 0
    _looked_at = 0.0

    @classmethod
    @contextmanager
    def serving(cls, grid: TraceGrid, packages: Sequence[str]) -> Iterator[None]:
        """Make a grid one of these while the block runs, which is the app.

        Args:
            grid: that goes on as it was after the block.
            packages: import names of the app.

        Raises:
            RunEnded: the run is over, also where only a thread of the app has met its end.
            FedstaleError: a thread of the app has done what is not possible.
        """
        kind: Any = type(grid)
        # A grid of a user's class stays one.
        grid.__class__ = cls if kind is TraceGrid else type(kind.__name__, (kind, cls), {})
        assert isinstance(grid, cls)
        own = grid
        # The method that takes turns, once there is one.
        sleep = lambda seconds: own.sleep(seconds)  # noqa: E731, PLW0108
        time = VirtualTime(own.now, sleep, own._unix_base)
        own._threads = threads = ServerThreads(time, lambda: own._next_event, own._advance)
        own.runtime.add(threads)
        try:
            with (
                time.running(("flwr.serverapp", *packages)),
                wrapped(own, _OPERATIONS, threads.take_turn),
                wrapped(own._clients, _WORK, time.outside),
                threads.running(packages),
            ):
                yield
        finally:
            own.runtime.remove(threads)
            # It holds the grid, which must go with its last user and not with the collector.
            del own._threads
            own.__class__ = kind

    def wait(self, until: float) -> bool:
        """Move the clock, for an app that does not look for nodes meanwhile."""
        has_arrived = super().wait(until)
        self._seen = None
        return has_arrived

    def receive(self, until: float, message_ids: Set[str] | None) -> list[Message]:
        """Receive replies, for an app that does not look for nodes meanwhile if it has a limit."""
        replies = super().receive(until, message_ids)
        if until < np.inf:
            self._seen = None
        return replies

    def sleep(self, seconds: float) -> None:
        """Move the clock on, as far as other threads go on."""
        until = self._now + max(seconds, 0.0)
        self._advance(self._threads.until(until) if self._threads.several else until)

    def online_nodes(self) -> NodeSet:
        """Return the nodes that are online now.

        An app that asks, sleeps and asks again, with nothing else in between, is waiting for nodes:
        the clock then moves to the next change of availability, so that it never loops in place. So
        it does for one that asks a hundred times without sleeping.

        Raises:
            RunEnded: no device comes online any more, or never enough at once.
        """
        nodes = super().online_nodes()
        if self._is_stalled(nodes.words):
            if self._threads.several and self._threads.others_wait():
                # They move the clock; a thread that only looks takes a little time at last.
                self._advance(self._threads.until(self._now))
            else:
                self._idle()
            nodes = self._fleet.online(self._now)
            self._most_online = max(self._most_online, self._fleet.available.n_online)
        self._seen, self._looked_at = (self._so_far, nodes.words), self._now
        return nodes

    @property
    def _so_far(self) -> tuple[int, int]:
        """What differs once something has been sent or has arrived."""
        return len(self._jobs), self._open

    def _is_stalled(self, online: Bits) -> bool:
        """Test if a look at the online nodes is one too many, with nothing else in between."""
        so_far, seen = self._seen or (None, online)
        if so_far != self._so_far or not np.array_equal(online, seen):
            self._n_looks = 0
            return False
        self._n_looks += 1
        return self._now > self._looked_at or self._n_looks >= _LOOKS_OF_A_LOOP

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages as they are now, whatever the app then writes to their records."""
        messages = list(messages)
        ids = super().push_messages(own_messages(messages))
        for message, message_id in zip(messages, ids, strict=True):
            stamp(message, message_id, self._unix_base + self._now)
        return ids

    def pull_messages(  # type: ignore[override] # Flower 1.43's
        self,
        reply_to_message_ids: Iterable[str] | None = None,
        *,
        message_ids: Iterable[str] | None = None,
    ) -> Iterable[Message]:
        """Return replies; one of several threads that asks for none lets the others go on."""
        asked = asked_ids(reply_to_message_ids, message_ids)
        wanted = asked if asked is None or isinstance(asked, Set) else set(asked)
        if wanted is None or wanted or not self._threads.several:
            return super().pull_messages(wanted)
        self._advance(self._threads.until(self._now))
        return []

    def _move(self, until: float = np.inf, missing: Set[str] | None = None) -> list[str]:
        """Move as far as other threads go on, and return which of the missing are here."""
        if not self._threads.several:
            return super()._move(until, missing)
        n_before = len(self._jobs) - self._open

        def has_arrived() -> bool:
            if missing is None:
                return len(self._jobs) - self._open > n_before
            return missing <= self._arrived.keys()

        target = self._threads.until(until, has_arrived)
        if target > -np.inf:
            _ = self._advance(target) if target < np.inf else self._idle()
        return [key for key in missing or () if key in self._arrived]
