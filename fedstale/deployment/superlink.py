"""Flower's SuperLink with what it lacks on a server that strangers reach.

A gate refuses what registered devices may not send, requests for messages are held until there is
some, and the SuperLink can listen at a Unix socket, which only a proxy reaches, instead of a port,
where everyone on the machine is an operator.
"""

import argparse
import datetime
import errno
import logging
import os
import resource
import shutil
import socket
import sqlite3
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from sqlalchemy.exc import OperationalError
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedstale.deployment.long_polls import LongPollMiddleware, LongPolls, Orders
from fedstale.errors import ConfigError
from fedstale.files import PRIVATE_UMASK, check_private, hold, open_private
from fedstale.flower import SUPERLINK_NODE_ID, features, superlink_grid
from fedstale.flower import superlink as flower
from fedstale.strategies.server import Validation

logger = logging.getLogger(__name__)

_FLEET = "/v1/fleet/"
_HOUR_S = 3600.0
_MOST_REPLY, _most_bytes_of = 4_000_000_000, Validation().most_bytes_of
_FILES = 8192
_FOR_NOW = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_AGAIN_S = 60.0
_LONGEST_HOLD_S = 25.0
"""A SuperNode waits 30 s for an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """Limits of one registered node; more than that is refused before it is stored or read.

    A SuperNode gives up a reply that is refused with 413, and goes on; with 503 it tries again.
    """

    record_bytes: int = 1_000_000
    """Of an object that is no piece of an array, >= 1: each ConfigRecord and each MetricRecord is
    one, and so are the names in a reply (413)."""
    reply_objects: int = 20_000
    """Objects of a reply, >= 1: its records, its arrays and their pieces of 5 MB (413)."""
    reply_bytes: int | None = None
    """Of all objects of a reply, >= 1 (413). None for as much as `Validation` takes for the arrays
    in the largest message that its run has sent, up to 4 GB, and for 4 GB before there is one; then
    no node stores more in a run than so much for each message that it was sent."""
    node_replies_per_hour: int = 3600
    """Replies of a node within an hour, >= 1 (503). A SuperNode asks for work every 3 s."""
    node_bytes_per_hour: int = 40_000_000_000
    """Bytes of a node's objects within an hour, >= 1 (503): 90 Mbit/s all the time."""


@dataclass(slots=True)
class _Hour:
    """What a node has sent within an hour."""

    until: float
    n_bytes: int = 0
    n_replies: int = 0
    of_replies: Counter[object] = field(default_factory=Counter)
    """Bytes of each reply, by the session of its upload."""
    logged: set[str] = field(default_factory=set)
    """Limits that the log has told of."""


class FleetGate:
    """Refuses what a registered node may not send, although its signature is good.

    Flower signs the time stamp of a request alone, and stores whatever message a registered node
    pushes. So behind Flower's check of the signature this one refuses

    - a push that is no reply, which Flower would deliver to another node as an order (400);
    - a push in another node's name, or to anyone but the SuperLink (400);
    - a signature that was used before, with this body or another, or may have been before the
      SuperLink was started again (503, which a SuperNode answers by signing anew);
    - what is beyond the `Quotas` (413 or 503). The first such refusal of a node and limit within an
      hour is a warning in the log, with the node, the limit and the number.

    It reads the message that Flower has parsed, so both see the same; of an object it reads the
    first bytes.
    """

    def __init__(
        self,
        app: ASGIApp,
        quotas: Quotas = Quotas(),
        since: float | None = None,
        orders: Orders | None = None,
    ) -> None:
        """Wrap an ASGI app, behind Flower's own middleware.

        Args:
            app: that.
            quotas: of each node.
            orders: by which replies are measured; they are not without.
            since: instant of `time.monotonic` before which another gate may have seen signatures
                that this one has not; those made until then are refused. None if there was none.
        """
        self._app, self._quotas, self._since = app, quotas, since
        self._orders = orders or Orders()
        self._stored: Counter[object] = Counter()
        """Bytes that each node has stored in each run, by which they are measured."""
        self._early_s, late_s = flower.stamp_window_s()
        self._signed_for_s = late_s + 2 * self._early_s
        self._seen: dict[tuple[bytes, str], float] = {}
        self._hours: dict[int, _Hour] = {}
        """Of each node that has sent something: only registered ones come this far."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        kind, request = flower.request_of(scope)
        if request is None or not scope["path"].startswith(_FLEET):
            await self._app(scope, receive, send)
        elif (refusal := self._refusal(kind, request, scope)) is not None:
            await JSONResponse({"detail": refusal[1]}, refusal[0])(scope, receive, send)
        elif kind == "PushObjectRequest":
            with self._counted(request, scope):
                await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, kind: str, request: Any, scope: Scope) -> tuple[int, str] | None:
        if self._may_be_used(Headers(scope=scope)):
            return 503, "this signature was used before, or is from before this SuperLink's start"
        if kind == "PushMessagesRequest":
            reason = fault_of_push(request)
            return self._excess_of_reply(request) if reason is None else (400, reason)
        return self._excess_of_object(request) if kind == "PushObjectRequest" else None

    def _excess_of_reply(self, request: Any) -> tuple[int, str] | None:
        hour, quotas = self._hour(request.node.node_id), self._quotas
        hour.n_replies += 1
        most = quotas.node_replies_per_hour
        if hour.n_replies > most:
            return self._refuse(503, request.node.node_id, "node-replies-per-hour", most, most + 1)
        n = len(flower.object_ids(request.message_object_trees[0]))
        if n > quotas.reply_objects:
            most = quotas.reply_objects
            return self._refuse(413, request.node.node_id, "reply-objects", most, n)
        return None

    def _excess_of_object(self, request: Any) -> tuple[int, str] | None:
        node, n, quotas = request.node.node_id, len(request.object_content), self._quotas
        is_piece = request.object_content.startswith(superlink_grid.PIECE)
        if not is_piece and n > quotas.record_bytes:
            return self._refuse(413, node, "record-bytes", quotas.record_bytes, n)
        for limit, most, counts, key in self._limits(request):
            # What is there already is not stored again.
            if counts[key] + n > most and not self._orders.read(request.object_id):
                return self._refuse(413, node, limit, most, counts[key] + n)
        hour = self._hour(node)
        total = hour.n_bytes + n
        if total > quotas.node_bytes_per_hour:
            return self._refuse(503, node, "node-bytes-per-hour", quotas.node_bytes_per_hour, total)
        hour.n_bytes = total
        return None

    def _limits(self, request: Any) -> list[tuple[str, int, Counter[object], object]]:
        """Return limits of what is stored: name, bytes, and where and by what they are counted."""
        node, run_id, given = request.node.node_id, request.run_id, self._quotas.reply_bytes
        largest = inf if given is not None else self._orders.largest.get(run_id, inf)
        is_measured, most = largest < inf, given or _MOST_REPLY
        if is_measured:
            most = min(most, _most_bytes_of(int(largest)))
        limits = [("reply-bytes", most, self._hour(node).of_replies, request.session_id)]
        if is_measured:
            of_all = most * self._orders.n_sent[run_id, node]
            limits.append(("reply-bytes of all messages", of_all, self._stored, (run_id, node)))
        return limits

    @contextmanager
    def _counted(self, request: Any, scope: Scope) -> Iterator[None]:
        """Count an object, unless Flower turns out not to store it."""
        limits, n = self._limits(request), len(request.object_content)
        for _, _, counts, key in limits:
            counts[key] += n
        try:
            yield
        finally:
            if not getattr(flower.response_of(scope), "stored", False):
                for _, _, counts, key in limits:
                    counts[key] -= n

    def _hour(self, node_id: int) -> _Hour:
        """Return a node's account of its hour; a new one begins when it is over."""
        now = time.monotonic()
        hour = self._hours.get(node_id)
        if hour is None or hour.until <= now:
            hour = self._hours[node_id] = _Hour(now + _HOUR_S)
        return hour

    def _refuse(self, status: int, node: int, limit: str, most: int, n: int) -> tuple[int, str]:
        logged = self._hour(node).logged
        if limit not in logged:
            logged.add(limit)
            logger.warning("node %d: refused: %s = %d: got %d", node, limit, most, n)
        return status, f"{limit} = {most}: got {n}"

    def _may_be_used(self, headers: Headers) -> bool:
        """Note a signature; it is the key and the time stamp, since ECDSA has two for each."""
        made, now = datetime.datetime.fromisoformat(headers[flower.TIMESTAMP]), time.monotonic()
        age_s = (flower.now() - made).total_seconds()
        # A stamp may be that early.
        if self._since is not None and age_s + self._early_s >= now - self._since:
            return True
        # As Flower reads them: the first of several headers, and one key in all its spellings.
        signature = b64decode(headers[flower.PUBLIC_KEY]), headers[flower.TIMESTAMP]
        # Entries are in the order of their instants.
        while self._seen and self._seen[first := next(iter(self._seen))] < now:
            del self._seen[first]
        if signature in self._seen:
            return True
        self._seen[signature] = now + self._signed_for_s
        return False


def fault_of_push(request: Any) -> str | None:
    """Return why a push to the SuperLink is none that a SuperNode sends, or None.

    Args:
        request: a PushMessagesRequest, whose `node` is the one that has signed it.

    Example:
        >>> from types import SimpleNamespace
        >>> fault_of_push(SimpleNamespace(messages_list=[], message_object_trees=[]))
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


class WaitsForDatabase:
    """Answers 503 in place of 500 while the database is full, or too many write to it at once.

    A SuperNode or ServerApp that reads 500 ends; with 503 it tries again.
    """

    def __init__(self, app: ASGIApp, folder: Path) -> None:
        """Wrap an ASGI app, behind the middleware that turns errors into 500.

        Args:
            app: which raises what SQLite does.
            folder: of the database, for the log.
        """
        self._app, self._folder = app, folder
        self._failed: set[str] = set()
        """Paths that have failed, and have not succeeded since."""
        self._logged_at = -_AGAIN_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; the log tells of the first that fails, and once a minute from then."""
        has_begun = False

        async def sent(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, sent)
        except (OperationalError, OSError) as problem:
            if has_begun or not is_for_now(problem):
                raise
            self._log(scope["path"], problem)
            await JSONResponse({"detail": "the database cannot be written"}, 503)(
                scope, receive, send
            )
        else:
            if self._failed and scope.get("path") in self._failed:
                self._failed.clear()
                self._logged_at = -_AGAIN_S
                logger.warning("the database in %s is written again", self._folder)

    def _log(self, path: str, problem: Exception) -> None:
        self._failed.add(path)
        if time.monotonic() < self._logged_at + _AGAIN_S:
            return
        self._logged_at = time.monotonic()
        why = problem.orig if isinstance(problem, OperationalError) else problem
        logger.error(
            "the database in %s cannot be written: %s; %.1f MB are free there. Nodes and "
            "ServerApps try again until it can",
            *(self._folder, why, shutil.disk_usage(self._folder).free / 1e6),
        )


def is_for_now(problem: Exception) -> bool:
    """Return whether an error says that the disk is full or fails, or that others write now.

    Example:
        >>> is_for_now(OSError(errno.ENOSPC, "no space")), is_for_now(OSError("other"))
        (True, False)
    """
    if isinstance(problem, OSError):
        return problem.errno in {errno.ENOSPC, errno.EDQUOT}
    # Its lowest byte is the kind.
    code = getattr(getattr(problem, "orig", None), "sqlite_errorcode", None)
    return code is not None and code & 0xFF in _FOR_NOW


def guarded(
    app: FastAPI,
    quotas: Quotas | None = None,
    *,
    folder: Path = Path(),
    since: float | None = None,
    polls: LongPolls | None = None,
) -> FastAPI:
    """Put the gate into a SuperLink's app, and what waits for disk and work; return it.

    Without the names of Flower that one of these needs, that one is left out; never the gate.

    Args:
        app: a SuperLink's.
        quotas: of each node.
        folder: of its database.
        since: as for `FleetGate`.
        polls: long polls of nodes, behind the gate; None answers each at once, and measures no
            reply by what was sent.

    Raises:
        ConfigError: the gate needs a name that this Flower does not have.
    """
    features.require("gate of a SuperLink")
    orders = None if polls is None else polls.orders
    inside = [Middleware(FleetGate, quotas=quotas or Quotas(), since=since, orders=orders)]
    if polls is not None and features.has("long polls of nodes"):
        run_ids, polls.orders.read = flower.store_of(app)
        polls.orders.largest.update(dict.fromkeys(run_ids, inf))
        inside.append(Middleware(LongPollMiddleware, polls=polls))
    flower.place(app, outside=[Middleware(WaitsForDatabase, folder=folder)], inside=inside)
    return app


class _Server(uvicorn.Server):
    """Ends without waiting for requests that are held."""

    def __init__(self, config: uvicorn.Config, polls: LongPolls) -> None:
        super().__init__(config)
        self._polls = polls

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._polls.close()
        super().handle_exit(sig, frame)


def run(
    arguments: Sequence[str],
    at: Path | None = None,
    quotas: Quotas | None = None,
    *,
    hold_s: float = 20.0,
) -> None:
    """Run flower-superlink behind the gate until it is ended.

    Args:
        arguments: of flower-superlink.
        at: Unix socket to listen at, in place of a port, where nothing is encrypted. Who may enter
            its folder and is of this user or group can reach everything, so the folder must be
            closed to others; it is made so if it does not exist.
        quotas: of each node; those of `Quotas` if not given.
        hold_s: how long a node's request for a message is held, in s, from 0 to 25.

    Raises:
        ConfigError: the socket cannot be made, others may read the key, the secret or the database,
            another SuperLink holds the database, it is damaged, or this Flower has no place for the
            gate.
    """
    features.require("gate of a SuperLink")
    if not 0.0 <= hold_s <= _LONGEST_HOLD_S:
        raise ConfigError(f"hold = {hold_s:g}: expected 0 to {_LONGEST_HOLD_S:g} s")
    # The database, above all: nobody but this user reads what is made from here on.
    os.umask(PRIVATE_UMASK)
    options = argparse.ArgumentParser(add_help=False)
    for name in ("--ssl-keyfile", "--superexec-auth-secret-file", "--database"):
        options.add_argument(name, dest=name)
    given = vars(options.parse_known_args(arguments)[0])
    for name in ("--ssl-keyfile", "--superexec-auth-secret-file"):
        if given[name] is not None:
            check_private(name, Path(given[name]).expanduser())
    database = given["--database"]
    path = None if database is None else file_of(database)
    since = None
    if path is not None:
        check_private("--database", path, folder=True)
        was_used = path.exists() and path.stat().st_size > 0
        hold_database(path)
        check_database(path)
        since = time.monotonic() if was_used else None
    polls = LongPolls(hold_s=hold_s)
    if features.has("turns at the database"):
        flower.take_turns()
    app, config = flower.app_of(arguments)
    app = guarded(
        app,
        quotas,
        folder=path.parent if path else Path(),
        since=since,
        polls=polls,
    )
    _make_room()
    server = _Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            log_config=flower.log_config(),
            proxy_headers=False,
            ssl_keyfile=None if at else config.ssl_keyfile,
            ssl_certfile=None if at else config.ssl_certfile,
        ),
        polls,
    )
    server.run(sockets=[_listening(at)] if at else None)


def _make_room() -> None:
    """Raise this process's limit of open files to the requests that are held, where it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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


def check_database(path: Path) -> None:
    """Read a whole database that nobody else holds, by SQLite's `quick_check`.

    Raises:
        ConfigError: it is damaged.
    """
    try:
        with closing(sqlite3.connect(path)) as opened:
            (found,) = opened.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as problem:
        found = str(problem)
    if found != "ok":
        raise ConfigError(
            f"database = {str(path)!r} cannot be used: {' '.join(found.split())}; if it is "
            "damaged, move it away with its files -wal and -shm, put a backup in its place or "
            "register the nodes again, and start the runs again, which go on from their checkpoints"
        )


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
