"""Flower's middleware without what starlette needs for responses that are streamed.

Each `BaseHTTPMiddleware` of starlette runs what is behind it in a task of its own and hands the
response over piece by piece, which costs every request some hundred microseconds, and a SuperLink
has eight or nine of them in a row, a SuperNode two or three. A request of the Fleet and Runtime
APIs has one message and gets one, so here their `dispatch` is given the whole response.
"""

from collections.abc import Sequence
from functools import cache

from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedstale.flower import features
from fedstale.flower import superlink as flower


@cache
def _calls() -> frozenset[tuple[str, str]]:
    """Return method and path of each request that gets one message."""
    parts = ("/v1/fleet/", "/v1/runtime/")
    return frozenset(one for one in flower.calls() if one[1].startswith(parts))


class Unary:
    """A middleware of Flower's, in one task where a request gets one message.

    All other requests, those of operators among them, take starlette's way.
    """

    def __init__(self, app: ASGIApp, middleware: Middleware) -> None:
        """Stand in front of an ASGI app, in the place of a `BaseHTTPMiddleware`."""
        made = middleware.cls(app, *middleware.args, **middleware.kwargs)
        assert isinstance(made, BaseHTTPMiddleware)
        self._app, self._streams, self._calls = app, made, _calls()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by `dispatch`."""
        if scope["type"] != "http" or (scope["method"], scope["path"]) not in self._calls:
            await self._streams(scope, receive, send)
            return
        request = _Request(scope, receive)

        async def call_next(_: Request) -> Response:
            start, *parts = await answer_of(self._app, scope, request.rest)
            response = Response(b"".join(part.get("body", b"") for part in parts), start["status"])
            response.raw_headers = list(start["headers"])
            return response

        response = await self._streams.dispatch_func(request, call_next)
        await response(scope, receive, send)


class _Request(Request):
    """Keeps the body that a middleware has read for what is behind it."""

    _read: bytes | None = None

    async def body(self) -> bytes:
        """Return the whole body."""
        self._read = await super().body()
        return self._read

    async def rest(self) -> Message:
        """Return what is behind this middleware is to receive next."""
        if self._read is None:
            return await self.receive()
        body, self._read = self._read, None
        return {"type": "http.request", "body": body, "more_body": False}


async def answer_of(app: ASGIApp, scope: Scope, receive: Receive) -> list[Message]:
    """Return what an app sends: the start of a response and its body."""
    answer: list[Message] = []

    async def keep(part: Message) -> None:
        answer.append(part)

    await app(scope, receive, keep)
    return answer


def unary(middleware: Sequence[Middleware]) -> list[Middleware]:
    """Return an app's middleware with `Unary` in the place of each `BaseHTTPMiddleware`."""
    if not features.has("table of calls"):
        return list(middleware)
    return [
        Middleware(Unary, middleware=one)
        if isinstance(one.cls, type) and issubclass(one.cls, BaseHTTPMiddleware)
        else one
        for one in middleware
    ]
