"""Flower's SuperLink with what it lacks on a server that strangers reach.

A gate refuses what registered devices may not send, and the SuperLink can listen at a Unix socket,
which only a proxy reaches, instead of a port, where everyone on the machine is an operator.
"""

import argparse
import os
import socket
import sys
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from flwr.common.constant import (
    SUPERLINK_NODE_ID,
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE,
)
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.supercore.http_logging import get_uvicorn_log_config
from flwr.supercore.logger import console_handler
from flwr.superlink.cli.flower_superlink import (
    SuperLinkLifespan,
    _parse_superlink_lifespan_config,
)
from flwr.superlink.main import create_app
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import JSONResponse

from fedstale.errors import ConfigError
from fedstale.files import PRIVATE_UMASK, check_private, hold, open_private

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_FLEET = "/v1/fleet/"
_SIGNED_FOR_S = TIMESTAMP_TOLERANCE + 2 * SYSTEM_TIME_TOLERANCE


class FleetGate:
    """Refuses what a registered node may not send, although its signature is good.

    Flower signs the time stamp of a request alone, and stores whatever message a registered node
    pushes. So behind Flower's check of the signature this one refuses

    - a push that is no reply, which Flower would deliver to another node as an order (400);
    - a push in another node's name, or to anyone but the SuperLink (400);
    - a signature that was used before, with this body or another (503, which a SuperNode answers by
      signing anew).

    It reads the message that Flower has parsed, so both see the same.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        """Stand in front of an ASGI app, behind Flower's own middleware."""
        self._app = app
        self._seen: dict[tuple[bytes, str], float] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            status, reason = refusal
            await JSONResponse({"detail": reason}, status)(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        request = scope.get("state", {}).get("protobuf_request")
        if request is None or not scope["path"].startswith(_FLEET):
            return None
        if self._is_used(Headers(scope=scope)):
            return 503, "this signature was used before"
        reason = fault_of_push(request) if isinstance(request, PushMessagesRequest) else None
        return None if reason is None else (400, reason)

    def _is_used(self, headers: Headers) -> bool:
        """Note a signature; it is the key and the time stamp, since ECDSA has two for each."""
        # As Flower reads them: the first of several headers, and one key in all its spellings.
        signature = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER]), headers[TIMESTAMP_HEADER]
        now = time.monotonic()
        # Entries are in the order of their instants.
        while self._seen and self._seen[first := next(iter(self._seen))] < now:
            del self._seen[first]
        if signature in self._seen:
            return True
        self._seen[signature] = now + _SIGNED_FOR_S
        return False


def fault_of_push(request: PushMessagesRequest) -> str | None:
    """Return why a push to the SuperLink is none that a SuperNode sends, or None.

    Args:
        request: whose `node` is the one that has signed it.

    Example:
        >>> fault_of_push(PushMessagesRequest())
        'expected one message with its objects, got 0 and 0'
    """
    n_messages, n_trees = len(request.messages_list), len(request.message_object_trees)
    if (n_messages, n_trees) != (1, 1):
        return f"expected one message with its objects, got {n_messages} and {n_trees}"
    about = request.messages_list[0].metadata
    if not about.reply_to_message_id:
        return "expected a reply: a node gives no orders"
    if about.src_node_id != request.node.node_id:
        return "expected a reply from the node that signed it"
    if about.dst_node_id != SUPERLINK_NODE_ID:
        return "expected a reply to the SuperLink"
    return None


def guarded(app: FastAPI) -> FastAPI:
    """Put the gate into a SuperLink's app, behind its check of signatures; return the app."""
    app.user_middleware.append(Middleware(FleetGate))
    return app


def run(arguments: Sequence[str], at: Path | None = None) -> None:
    """Run flower-superlink behind the gate until it is ended.

    Args:
        arguments: of flower-superlink.
        at: Unix socket to listen at, in place of a port, where nothing is encrypted. Who may enter
            its folder and is of this user or group can reach everything, so the folder must be
            closed to others; it is made so if it does not exist.

    Raises:
        ConfigError: the socket cannot be made, others may read the key, the secret or the database,
            or another SuperLink holds the database.
    """
    # The database, above all: nobody but this user reads what is made from here on.
    os.umask(PRIVATE_UMASK)
    options = argparse.ArgumentParser(add_help=False)
    for name in ("--ssl-keyfile", "--superexec-auth-secret-file", "--database"):
        options.add_argument(name, dest=name)
    for name, value in vars(options.parse_known_args(arguments)[0]).items():
        path = None if value is None else file_of(value) if name == "--database" else Path(value)
        if path is not None:
            check_private(name, path.expanduser(), folder=name == "--database")
            if name == "--database":
                hold_database(path)
    sys.argv = ["flower-superlink", *arguments]
    config = _parse_superlink_lifespan_config()
    app = guarded(create_app(config, SuperLinkLifespan))
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            log_config=get_uvicorn_log_config(console_handler.level),
            proxy_headers=False,
            ssl_keyfile=None if at else config.ssl_keyfile,
            ssl_certfile=None if at else config.ssl_certfile,
        )
    )
    server.run(sockets=[_listening(at)] if at else None)


def file_of(database: str) -> Path | None:
    """Return the file of a database, or None if it has none.

    Example:
        >>> file_of("superlink.db"), file_of(":memory:")
        (PosixPath('superlink.db'), None)
    """
    path = database.strip().removeprefix("sqlite:///")
    return None if path in {"", ":memory:", ":flwr-in-memory:"} else Path(path)


def hold_database(path: Path) -> int:
    """Make a database if there is none, and keep other SuperLinks from it while this process lives.

    Returns:
        The open file; closing it lets others have the database.

    Raises:
        ConfigError: another process holds it, or it cannot be made.
    """
    try:
        # SQLite takes an empty file for a new database; its own files beside it get this mode.
        descriptor = open_private(str(path), os.O_RDWR | os.O_CREAT)
    except OSError as problem:
        raise ConfigError(f"database = {str(path)!r}: {problem.strerror}") from None
    owner = hold(descriptor)
    if owner is not None:
        os.close(descriptor)
        raise ConfigError(
            f"database = {str(path)!r} is in use by a SuperLink, {owner}: stop that one, or choose "
            "another file"
        )
    return descriptor


def _listening(at: Path) -> socket.socket:
    """Return a socket at a path that its owner and its group only can connect to."""
    if not at.parent.exists():
        at.parent.mkdir()
        at.parent.chmod(0o750)
    if at.parent.stat().st_mode & 0o007:
        raise ConfigError(
            f"socket = {str(at)!r}: others may enter its folder, and would be operators: "
            f"chmod o= {at.parent}"
        )
    at.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX)
    try:
        made.bind(str(at))
    except OSError as problem:
        raise ConfigError(
            f"socket = {str(at)!r}: {problem}; expected a path of at most 107 bytes in a folder "
            "of this user's"
        ) from None
    # The proxy may run as another user, of this group.
    at.chmod(0o660)
    made.listen(2048)
    return made
