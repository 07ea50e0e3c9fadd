"""Flower's middleware in one task, against starlette's way."""

import asyncio
import inspect
import re
from collections.abc import Iterator
from typing import get_args, get_origin, get_type_hints

import pytest
from flwr.proto.node_pb2 import Node
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.supernode.main import create_app as create_node_app
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from superlink_app import PULL, SuperLink

from fedstale.deployment.superlink import guarded
from fedstale.deployment.supernode import Arrival, Pauses, holding
from fedstale.deployment.unary import Unary, unary

PATHS = sorted(
    path for _, path in PROTOBUF_REQUEST_TYPES if path.startswith(("/v1/fleet/", "/v1/runtime/"))
)
STREAM = "/v1/control/stream-logs"


def in_one_task(app):
    app.user_middleware[:] = unary(app.user_middleware)
    return app


class Raw:
    """Bytes as a request."""

    def __init__(self, content):
        self.content = content

    def SerializeToString(self):  # noqa: N802 - as protobuf's
        return self.content


def asked(link, path, *, body, is_known, media_type):
    """Return what a SuperLink answers, without what differs from one to another."""
    headers = link.mallory.headers() if is_known and "fleet" in path else {}
    headers |= {"authorization": f"Bearer {link.token}"} if is_known else {}
    headers["content-type"] = media_type
    answer = link.post(path, link.mallory, body, headers)
    lines = [(name, value) for name, value in answer.headers.multi_items() if name != "date"]
    return answer.status_code, lines, re.sub(rb"[0-9]{6,}", b"N", answer.content)


@pytest.fixture(scope="module")
def links():
    return SuperLink(lambda app: app), SuperLink(in_one_task)


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_is_that_of_starlettes_way(links, path):
    kind = PROTOBUF_REQUEST_TYPES["POST", path]
    for is_known in (False, True):
        # What is no protobuf is not read.
        for content in ("empty", "own", "garbage", "text"):
            media_type = "text/plain" if content == "text" else PROTOBUF_MEDIA_TYPE
            answers = []
            for link in links:
                body = Raw(b"\xff" * 40) if content == "garbage" else kind()
                if content == "own" and "node" in kind.DESCRIPTOR.fields_by_name:
                    body.node.CopyFrom(Node(node_id=link.mallory.node_id))
                answers.append(
                    asked(link, path, body=body, is_known=is_known, media_type=media_type)
                )
            assert answers[0] == answers[1]


def test_some_of_these_answers_are_good_and_some_are_refusals():
    link = SuperLink(in_one_task)
    assert link.post(PULL, link.mallory, link.mallory.asking()).status_code == 200
    assert link.post(PULL, link.mallory, link.mallory.asking(7)).status_code == 401


def test_no_handler_of_these_paths_streams_its_answer():
    # An answer piece by piece would be kept back until its end.
    found = {}
    for app in (SuperLink(lambda app: app).app, create_node_app()):
        for route in routes(app):
            if route.path in PATHS:
                hints = get_type_hints(inspect.unwrap(route.endpoint))
                found[route.path] = hints["return"]
    assert sorted(found) == PATHS
    for path, kind in found.items():
        assert not any(
            issubclass(get_origin(one) or one, Iterator)
            for one in (kind, *get_args(kind))
            if inspect.isclass(get_origin(one) or one)
        ), path


def routes(app):
    """Return the routes of an app and of the routers that it includes."""
    waiting, found = list(app.routes), []
    while waiting:
        route = waiting.pop()
        inner = getattr(route, "original_router", None)
        waiting += inner.routes if inner is not None else []
        found += [route] if hasattr(route, "endpoint") else []
    return found


def based(middleware):
    """Return those that take starlette's way."""
    classes = [one.cls for one in middleware if inspect.isclass(one.cls)]
    return [cls for cls in classes if issubclass(cls, BaseHTTPMiddleware)]


@pytest.mark.parametrize(
    ("flowers", "ours"),
    [
        (lambda: SuperLink(lambda app: app).app, lambda: SuperLink(guarded).app),
        (create_node_app, lambda: holding(create_node_app(), Arrival(), Pauses(), 1.0)),
    ],
    ids=["superlink", "supernode"],
)
def test_all_of_flowers_middleware_is_replaced_and_none_of_it_lost(flowers, ours):
    before, now = based(flowers().user_middleware), ours().user_middleware
    assert before
    assert based(now) == []
    assert [one.kwargs["middleware"].cls for one in now if one.cls is Unary] == before


def test_without_flowers_table_of_calls_its_middleware_stays_as_it_is(without):
    without("flwr.supercore.protobuf.translation:PROTOBUF_REQUEST_TYPES")
    flowers = SuperLink(lambda app: app).app.user_middleware
    assert based(SuperLink(guarded).app.user_middleware) == based(flowers)


# One middleware, and an app behind it that a test writes.


async def passed(request, call_next):
    return await call_next(request)


async def read(request, call_next):
    assert await request.body() == b"ab"
    return await call_next(request)


class Connection:
    """A request in two pieces that is closed afterwards, and what was sent in answer."""

    def __init__(self, app, path, dispatch):
        (middleware,) = unary([Middleware(BaseHTTPMiddleware, dispatch=dispatch)])
        self.app = middleware.cls(app, *middleware.args, **middleware.kwargs)
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": [],
            "query_string": b"",
            "server": ("link", 80),
        }
        self.waiting = [
            {"type": "http.request", "body": b"a", "more_body": True},
            {"type": "http.request", "body": b"b", "more_body": False},
        ]
        self.sent = []
        self.has_piece = asyncio.Event()

    async def receive(self):
        return self.waiting.pop(0) if self.waiting else {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)
        if message.get("body"):
            self.has_piece.set()

    async def run(self):
        await asyncio.wait_for(self.app(self.scope, self.receive, self.send), 5.0)


@pytest.mark.parametrize("dispatch", [passed, read])
def test_what_is_behind_receives_the_body_and_then_the_end_of_the_connection(dispatch):
    received = []

    async def behind(scope, receive, send):
        while not received or received[-1]["type"] != "http.disconnect":
            received.append(await receive())
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"1")] * 2})
        await send({"type": "http.response.body", "body": b"c", "more_body": True})
        await send({"type": "http.response.body", "body": b"d"})

    async def run():
        connection = Connection(behind, PULL, dispatch)
        await connection.run()
        return connection.sent

    sent = asyncio.run(run())
    assert b"".join(part.get("body", b"") for part in received) == b"ab"
    assert sent[0]["headers"] == [(b"x", b"1")] * 2
    assert [part.get("body") for part in sent] == [None, b"cd"]


def test_a_stream_of_an_operator_comes_piece_by_piece():
    async def run():
        async def behind(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            # The second piece is made when the first one has arrived.
            await connection.has_piece.wait()
            await send({"type": "http.response.body", "body": b"second"})

        connection = Connection(behind, STREAM, passed)
        await connection.run()
        return connection.sent

    sent = asyncio.run(run())
    assert [part["body"] for part in sent if part.get("body")] == [b"first", b"second"]


def test_an_error_behind_reaches_the_middleware():
    seen = []

    async def translated(request, call_next):
        try:
            return await call_next(request)
        except KeyError as problem:
            seen.append(problem)
            raise

    async def behind(scope, receive, send):
        raise KeyError("gone")

    async def run():
        await Connection(behind, PULL, translated).run()

    with pytest.raises(KeyError, match="gone"):
        asyncio.run(run())
    assert len(seen) == 1
