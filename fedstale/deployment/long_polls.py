"""Long polls: a node's request for a message is held until there is one.

A SuperNode asks the SuperLink for a message and sleeps 3 s when there is none (Flower 1.41 to 1.43,
`supernode/start_client_internal.py`, line 263). Here, in the SuperLink's process, such a request
is held for up to 20 s and answered as soon as a message for its node is there with all its
objects. Pushes pass through the same process and wake it, so the database is asked less than
before. The SuperNode waits 30 s for an answer (`supercore/protobuf/client.py`, line 113), and the
proxy 300 s (`fedstale.deployment.doors`).

A message is not given away before its last object has come: a SuperNode that misses an object
looks again after 1, 2, 4 s (`supercore/constant.py`, `PULL_INITIAL_BACKOFF`). From Flower 1.43 on
the SuperLink keeps it until the node confirms it, and gives it again to one that asks before.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedstale.flower import superlink as flower
from fedstale.flower import superlink_grid

_PULL = "/v1/fleet/pull-messages"
_FROM_APPS = "/v1/runtime/"
_OBJECTS = 100_000
_UPLOAD_S = 180.0
"""After how long without an object the SuperLink takes an upload for given up."""


@dataclass(slots=True)
class _Pending:
    """A message to a node of which objects are missing."""

    node: int
    message_id: str
    n_missing: int
    run_id: int


@dataclass(slots=True)
class Orders(superlink_grid.Objects):
    """Which messages ServerApps have sent, as far as the size of a reply is measured by it."""

    largest: dict[int, float] = field(default_factory=dict)
    """Of each run, the bytes of arrays in its largest message. None of a run that has sent no array
    yet; infinity of one that has sent some to a process before this one."""
    n_sent: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Messages of each run to each node."""

    def sent(self, message: _Pending) -> None:
        """Note a message that has all its objects."""
        self.n_sent[message.run_id, message.node] += 1
        if n := self.size(message.message_id):
            self.largest[message.run_id] = max(n, self.largest.get(message.run_id, 0))
        if len(self._known) >= _OBJECTS:
            self._known.clear()


@dataclass(slots=True)
class _Push:
    """The objects that a ServerApp still uploads."""

    waiting: dict[str, list[_Pending]]
    """Messages that need each object."""
    at: float
    """Instant of the last object in s."""


@dataclass(eq=False, slots=True, kw_only=True)
class LongPolls:
    """The nodes that have a complete message, and those whose request is held.

    All of it happens in one event loop.
    """

    hold_s: float = 20.0
    """How long a request is held at most, in s."""
    most: int = 1000
    """Requests that are held at once; more are answered at once."""
    most_of_node: int = 8
    """The same of one node."""
    orders: Orders = field(default_factory=Orders)
    """Told of each message that is complete."""
    n_held: int = field(default=0, init=False)
    """Requests that are held now."""
    is_closed: bool = field(default=False, init=False)
    """Whether nothing is held any more."""
    _held: dict[int, list[asyncio.Event]] = field(
        default_factory=lambda: defaultdict(list), init=False
    )
    _ready: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set), init=False)
    """Of each node, the messages that are complete and that it has not been given."""
    _incomplete: dict[int, int] = field(default_factory=lambda: defaultdict(int), init=False)
    _pushes: dict[str, _Push] = field(default_factory=dict, init=False)
    _loop: asyncio.AbstractEventLoop | None = field(default=None, init=False)

    def enter(self, node: int) -> asyncio.Event | None:
        """Hold a request; return the event that ends it, or None if there are too many."""
        held = self._held.get(node, ())
        if self.is_closed or self.n_held >= self.most or len(held) >= self.most_of_node:
            return None
        self._loop = asyncio.get_running_loop()
        event = asyncio.Event()
        self._held[node].append(event)
        self.n_held += 1
        return event

    def leave(self, node: int, event: asyncio.Event) -> None:
        """Release a request that was held."""
        self.n_held -= 1
        self._held[node].remove(event)
        if not self._held[node]:
            del self._held[node]

    def may_ask(self, node: int) -> bool:
        """Return whether the SuperLink would give a node complete messages only."""
        return self.is_closed or not self._incomplete.get(node) or bool(self._ready.get(node))

    def answered(self, node: int, message_ids: Collection[str]) -> None:
        """Note which messages the SuperLink gave to a node; Flower 1.43 may give one twice."""
        left = self._ready.pop(node, set()).difference(message_ids)
        if message_ids and left:
            self._ready[node] = left

    @contextmanager
    def announcing(self, nodes: Collection[int]) -> Iterator[None]:
        """Count the messages that are being pushed to nodes as incomplete."""
        for node in nodes:
            self._incomplete[node] += 1
        try:
            yield
        finally:
            for node in nodes:
                self._end(node)
                self._wake(node)

    def pushed(self, request: Any, response: Any) -> None:
        """Note the messages that a ServerApp has pushed, before their objects."""
        now, missing = time.monotonic(), set(response.objects_to_push)
        self._forget(now)
        waiting: dict[str, list[_Pending]] = defaultdict(list)
        for proto, tree, message_id in zip(
            request.messages_list,
            request.message_object_trees,
            response.message_ids,
            strict=True,
        ):
            if not message_id:
                continue
            about, own = proto.metadata, missing.intersection(flower.object_ids(tree))
            message = _Pending(about.dst_node_id, message_id, len(own), about.run_id)
            if not own:
                self._complete(message)
                continue
            self._incomplete[message.node] += 1
            for object_id in own:
                waiting[object_id].append(message)
        if waiting:
            self._pushes[response.session_id] = _Push(dict(waiting), now)

    def stored(self, session_id: str, object_id: str, content: bytes) -> None:
        """Note an object of a push, and wake the nodes whose message it completes."""
        push = self._pushes.get(session_id)
        if push is None:
            return
        push.at = time.monotonic()
        self.orders.note(object_id, content)
        for message in push.waiting.pop(object_id, ()):
            message.n_missing -= 1
            if not message.n_missing:
                self._end(message.node)
                self._complete(message)
        if not push.waiting:
            del self._pushes[session_id]

    def close(self) -> None:
        """Answer all requests, and hold no more of them; may be called from a signal handler."""
        self.is_closed = True
        if self._loop is not None:
            # A loop that has ended holds no request.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake_all)

    def _wake_all(self) -> None:
        for held in self._held.values():
            for event in held:
                event.set()

    def _complete(self, message: _Pending) -> None:
        self.orders.sent(message)
        self._ready[message.node].add(message.message_id)
        self._wake(message.node)

    def _wake(self, node: int) -> None:
        # A SuperNode asks one request at a time: of several, the last one has a listener.
        if self._held.get(node):
            self._held[node][-1].set()

    def _end(self, node: int) -> None:
        self._incomplete[node] -= 1
        if not self._incomplete[node]:
            del self._incomplete[node]

    def _forget(self, now: float) -> None:
        """Forget pushes that their ServerApp has given up, as the SuperLink does."""
        over = now - _UPLOAD_S
        for session_id in [key for key, push in self._pushes.items() if push.at < over]:
            push = self._pushes.pop(session_id)
            messages = {id(m): m for each in push.waiting.values() for m in each}
            for message in messages.values():
                self._end(message.node)
                self._wake(message.node)


class LongPollMiddleware:
    """Holds requests of nodes for messages, in front of a SuperLink's app and behind its gate.

    Only requests with a good signature are held. What is beyond the limits of `LongPolls` is
    answered at once, as without this. A closed connection releases its request. Within the 20 s a
    message may be lost to a node whose connection broke without being closed, as it may during a
    download.
    """

    def __init__(self, app: ASGIApp, polls: LongPolls) -> None:
        """Stand in front of an ASGI app, behind Flower's own middleware."""
        self._app, self._polls = app, polls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; hold it first if it asks for a message."""
        kind, request = flower.request_of(scope)
        if kind == "PullMessagesRequest" and scope["path"] == _PULL:
            await self._pull(request.node.node_id, scope, receive, send)
            return
        if not scope["path"].startswith(_FROM_APPS):
            await self._app(scope, receive, send)
        elif kind == "PushAppMessagesRequest":
            # The SuperLink knows of them before its response tells which objects are missing.
            with self._polls.announcing({m.metadata.dst_node_id for m in request.messages_list}):
                await self._app(scope, receive, send)
                if (response := flower.response_of(scope)) is not None:
                    self._polls.pushed(request, response)
        else:
            await self._app(scope, receive, send)
            if kind == "PushObjectRequest" and flower.response_of(scope) is not None:
                self._polls.stored(request.session_id, request.object_id, request.object_content)

    async def _pull(self, node: int, scope: Scope, receive: Receive, send: Send) -> None:
        event = self._polls.enter(node)
        if event is None:
            await self._app(scope, receive, send)
            return
        try:
            async with disconnection(receive) as gone:
                answer = await self._answer(node, event, gone, scope)
        finally:
            self._polls.leave(node, event)
        for part in answer:
            await send(part)

    async def _answer(
        self, node: int, event: asyncio.Event, gone: "asyncio.Future[None]", scope: Scope
    ) -> list[Message]:
        """Return the SuperLink's answer once it has a message, or the time is over."""
        polls = self._polls
        answer: list[Message] = []
        deadline = time.monotonic() + polls.hold_s
        while True:
            event.clear()
            left = deadline - time.monotonic()
            if left <= 0 or polls.may_ask(node):
                answer, message_ids = await self._asked(scope)
                is_empty = message_ids == []
                # What came while the SuperLink looked is not forgotten.
                if message_ids is not None and not (is_empty and event.is_set()):
                    polls.answered(node, message_ids)
                if not is_empty or left <= 0 or polls.is_closed:
                    return answer
            await first_of(event, gone, left)
            if gone.done():
                # Nobody listens, so nothing may be taken out of the line.
                return answer or await answer_of(
                    JSONResponse({"detail": "ask again"}, 503), scope, nothing
                )
            if answer and not event.is_set():
                return answer

    async def _asked(self, scope: Scope) -> tuple[list[Message], list[str] | None]:
        """Return the SuperLink's response and the ids in it; None in their place if it refuses."""
        # The body of the request has been read.
        answer = await answer_of(self._app, scope, nothing)
        response = flower.response_of(scope)
        if answer[0].get("status") != HTTPStatus.OK or response is None:
            return answer, None
        return answer, [one.metadata.message_id for one in response.messages_list]


async def answer_of(app: ASGIApp, scope: Scope, receive: Receive) -> list[Message]:
    """Collect the parts of an app's response: its start and its body."""
    answer: list[Message] = []

    async def keep(part: Message) -> None:
        answer.append(part)

    await app(scope, receive, keep)
    return answer


async def nothing() -> Message:
    """Receive an empty body: that of the request was read before."""
    return {"type": "http.request", "body": b"", "more_body": False}


@asynccontextmanager
async def disconnection(receive: Receive) -> AsyncIterator["asyncio.Future[None]"]:
    """Yield a future that is done when the client closes its connection.

    Args:
        receive: of a request whose body was read.
    """
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        yield gone
    finally:
        gone.cancel()


async def _disconnected(receive: Receive) -> None:
    # Starlette raises this where it is asked once more after that.
    with suppress(RuntimeError):
        while (await receive())["type"] != "http.disconnect":
            pass


async def first_of(event: asyncio.Event, gone: "asyncio.Future[None]", timeout_s: float) -> None:
    """Wait for an event, the end of the connection or an instant."""
    woken = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait(
            (woken, gone), timeout=max(timeout_s, 0.0), return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        woken.cancel()
