"""Who may be a node, on the server: devices join with one-time tokens, and a node's key changes.

A token lets one key in. The server keeps its hash alone, in SQLite beside the SuperLink's database,
and binds it to the first key that shows it before that key is registered: so a join that is cut,
even by kill -9, is finished by the same key with the same token, and by no other. `EnrolmentGate`
takes tokens in front of Flower's app, at one path. What joins, and what is rejected, is in the
SuperLink's log.

To register and unregister single nodes is Flower's own (`flwr supernode`). A new key for a node
that stays the same node is not: Flower gives each key an id of its own, and a server's history of a
node (how long it takes, how often it fails) is by that id. So `rotate` changes the key in the
SuperLink's database, and the id stays.
"""

import asyncio
import json
import logging
import os
import secrets
import sqlite3
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
    load_ssh_public_key,
)
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from fedstale.deployment.joining import (
    ID_LENGTH,
    JOIN_PATH,
    NAME,
    SIGNED_WITH,
    digest_of,
    statement,
)
from fedstale.errors import ConfigError, FedstaleError
from fedstale.files import check_private, open_private
from fedstale.flower import command_line, features, superlink

logger = logging.getLogger(__name__)

BODY_BYTES = 4096
"""Most that a device sends; it needs some 600."""
NIST = ec.SECP192R1, ec.SECP224R1, ec.SECP256R1, ec.SECP384R1, ec.SECP521R1
"""Curves of the keys that Flower takes."""
GONE = "unregistered"
"""Status of a node that was unregistered, whose key Flower never takes again."""

_LOCK_S = 30.0
_MOST_WAITING = 32
_FIELDS = ("token", "public_key", "name", "signature")
_TABLE = """
CREATE TABLE IF NOT EXISTS token (
    digest TEXT PRIMARY KEY, expires_at REAL NOT NULL, key TEXT, node_id TEXT
)"""


@dataclass(frozen=True, slots=True)
class NodeKey:
    """The public half of a node's key, and what its owner calls the node."""

    name: str
    pem: bytes
    """As Flower stores it."""
    fingerprint: str
    """As `ssh-keygen -l` shows it."""

    @classmethod
    def parse(cls, name: str, line: str) -> Self:
        """Read a key from the line of a .pub file.

        Raises:
            ConfigError: it is none that Flower takes.
        """
        try:
            key = load_ssh_public_key(line.strip().encode())
        except (ValueError, UnsupportedAlgorithm) as problem:
            raise ConfigError(f"node {name!r}: no public key of OpenSSH: {problem}") from None
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, NIST):
            raise ConfigError(
                f"node {name!r}: expected a key of a NIST curve: ssh-keygen -t ecdsa -b 384"
            )
        blob = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1]
        digest = b64encode(sha256(b64decode(blob)).digest()).decode().rstrip("=")
        return cls(name, command_line.public_pem(key), f"SHA256:{digest}")


class JoinError(Exception):
    """A join that is rejected: the status of the answer, and the reason for device and log."""

    def __init__(self, status: int, reason: str, token: str | None = None) -> None:
        """State why.

        Args:
            status: of HTTP.
            reason: which holds nothing that the device sent.
            token: id of the token, if the server knows it.
        """
        super().__init__(reason)
        self.status, self.reason, self.token = status, reason, token


class Tokens:
    """The tokens of a SuperLink; several processes may use them at once.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     tokens = Tokens(Path(folder) / "superlink.db")
        ...     (token,) = tokens.make(1, 60.0)
        ...     tokens.claim(digest_of(token), "SHA256:a")
        ...     tokens.claim(digest_of(token), "SHA256:b")
        Traceback (most recent call last):
        ...
        fedstale.deployment.enrolment.JoinError: this token was used by another key
    """

    def __init__(self, database: Path) -> None:
        """Open what belongs to a SuperLink's database, and make it if there is none.

        Args:
            database: of the SuperLink; the tokens are beside it, in DATABASE.tokens.

        Raises:
            ConfigError: the file cannot be used, or others may read it.
        """
        self.path = database.with_name(f"{database.name}.tokens")
        check_private("tokens", self.path, folder=True)
        try:
            os.close(open_private(str(self.path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW))
            with self._changing() as rows:
                rows.execute(_TABLE)
        except (OSError, sqlite3.Error) as problem:
            raise ConfigError(f"tokens = {str(self.path)!r} cannot be used: {problem}") from None

    @classmethod
    def of(cls, database: Path) -> Self:
        """Open those of a SuperLink on this machine, which may be running.

        Raises:
            ConfigError: this is no database of this user's, or as for the constructor.
        """
        if not database.is_file():
            raise ConfigError(
                f"database = {str(database)!r}: expected the file of flower-superlink"
            )
        if database.stat().st_uid != os.geteuid():
            raise ConfigError(
                f"database = {str(database)!r} is another user's: run this as that user, or the "
                "SuperLink cannot read the tokens"
            )
        return cls(database)

    def make(self, count: int, valid_s: float) -> list[str]:
        """Return new tokens of 256 random bits, of which the hashes are kept."""
        made = [secrets.token_urlsafe(32) for _ in range(count)]
        ends = time.time() + valid_s
        with self._changing() as rows:
            rows.executemany(
                "INSERT INTO token (digest, expires_at) VALUES (?, ?)",
                [(digest_of(token), ends) for token in made],
            )
        return made

    def revoke(self) -> list[str]:
        """Let all tokens expire that have let no device in; return their ids."""
        now = time.time()
        with self._changing() as rows:
            found = rows.execute(
                "UPDATE token SET expires_at = ? WHERE node_id IS NULL AND expires_at > ? "
                "RETURNING digest",
                (now, now),
            ).fetchall()
        return [digest[:ID_LENGTH] for (digest,) in found]

    def claim(self, digest: str, key: str) -> int | None:
        """Bind a token to a key, if it is bound to no other.

        Args:
            digest: of the token.
            key: fingerprint.

        Returns:
            The id of the node that this key has become by this token, or None if it has not yet.

        Raises:
            JoinError: the token is unknown, expired, or another key's.
        """
        with self._changing() as rows:
            # One statement: of two keys at once, the second finds the key of the first.
            rows.execute(
                "UPDATE token SET key = ? WHERE digest = ? AND key IS NULL AND expires_at > ?",
                (key, digest, time.time()),
            )
            found = rows.execute(
                "SELECT key, node_id, expires_at FROM token WHERE digest = ?", (digest,)
            ).fetchone()
        if found is None:
            raise JoinError(403, "this token is none of this server's")
        owner, node_id, ends = found
        if owner not in {None, key}:
            raise JoinError(409, "this token was used by another key", digest[:ID_LENGTH])
        if node_id is not None:
            return int(node_id)
        if ends <= time.time():
            raise JoinError(410, "this token has expired", digest[:ID_LENGTH])
        return None

    def finish(self, digest: str, node_id: int) -> None:
        """Note whom a token has let in: it never registers anyone again."""
        with self._changing() as rows:
            rows.execute("UPDATE token SET node_id = ? WHERE digest = ?", (str(node_id), digest))

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, timeout=_LOCK_S)) as rows, rows:
            yield rows


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """The request of a device to join with a token."""

    digest: str
    """Of the token, which is not kept."""
    key: NodeKey

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read and check a request.

        Raises:
            JoinError: it is none, or whoever made it does not hold the key.
        """
        try:
            found = json.loads(body)
            token, public, name, signature = (found[field] for field in _FIELDS)
            if not all(isinstance(found[field], str) for field in _FIELDS):
                raise TypeError
            # What is signed is text that cannot be read in two ways.
            if not (NAME.fullmatch(name) and token.isascii() and public.isprintable()):
                raise ValueError
            key = NodeKey.parse(name, public)
            proof = b64decode(signature, validate=True)
        except (ValueError, TypeError, KeyError, RecursionError, ConfigError):
            raise JoinError(400, f"expected {', '.join(_FIELDS)} of a device") from None
        digest = digest_of(token)
        try:
            said = statement(digest, public, name)
            owner = load_pem_public_key(key.pem)
            assert isinstance(owner, ec.EllipticCurvePublicKey)
            owner.verify(proof, said, SIGNED_WITH)
        except InvalidSignature:
            raise JoinError(403, "the signature is not this key's") from None
        return cls(digest, key)


class Enrolment:
    """Registers the key of each device that shows a good token."""

    def __init__(self, tokens: Tokens, nodes: superlink.NodeRegister) -> None:
        """Use a SuperLink's tokens and nodes."""
        self._tokens, self._nodes = tokens, nodes

    def join(self, body: bytes) -> tuple[int, str]:
        """Register the key of a request.

        Args:
            body: of the request.

        Returns:
            The node's id, the same for the same key and token; and who it is, for the log.

        Raises:
            JoinError: it may not.
        """
        asked = JoinRequest.parse(body)
        key, token = asked.key, asked.digest[:ID_LENGTH]
        known = self._tokens.claim(asked.digest, key.fingerprint)
        nodes: list[Any] = list(self._nodes.list_nodes())
        own = next((node for node in nodes if bytes(node.public_key) == key.pem), None)
        about = f"{key.name}, key {key.fingerprint}, token {token}"
        is_other = known is not None and (own is None or own.node_id != known)
        # After a rotation the token must not bring the old key back.
        if is_other or (own is not None and own.status == GONE):
            raise JoinError(410, "this key is no node's any more: make another one", token)
        if known is not None:
            return known, about
        if own is None:
            if any(node.name == key.name and node.status != GONE for node in nodes):
                raise JoinError(409, f"node {key.name!r} is registered with another key", token)
            node_id = self._nodes.register_node(key.pem, key.name)
        else:
            node_id = int(own.node_id)
        self._tokens.finish(asked.digest, node_id)
        return node_id, about


class EnrolmentGate:
    """Takes tokens at one path, in front of Flower's app, which sees nothing of it.

    One join at a time has a thread, so that a flood takes none from Flower's own requests; who
    comes when too many wait gets 503.
    """

    def __init__(self, app: ASGIApp, enrolment: Enrolment) -> None:
        """Stand in front of an ASGI app."""
        self._app, self._enrolment = app, enrolment
        self._turn, self._n_waiting = asyncio.Lock(), 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a join, or pass a request on."""
        if scope["type"] != "http" or scope["path"] != JOIN_PATH:
            await self._app(scope, receive, send)
            return
        answer = await self._answer(Request(scope, receive))
        await answer(scope, receive, send)

    async def _answer(self, request: Request) -> JSONResponse:
        if self._n_waiting >= _MOST_WAITING:
            return JSONResponse({"detail": "too many join at once: try again"}, 503)
        self._n_waiting += 1
        try:
            try:
                body: bytes | JoinError = await _body(request)
            except JoinError as problem:
                body = problem
            async with self._turn:
                return await run_in_threadpool(self._joined, body, _source(request))
        except ClientDisconnect:
            return JSONResponse({"detail": "the request ends early"}, 400)
        finally:
            self._n_waiting -= 1

    def _joined(self, body: bytes | JoinError, address: str) -> JSONResponse:
        try:
            if isinstance(body, JoinError):
                raise body
            node_id, about = self._enrolment.join(body)
        except JoinError as problem:
            token = f", token {problem.token}" if problem.token else ""
            logger.warning("a device at %s may not join: %s%s", address, problem.reason, token)
            return JSONResponse({"detail": problem.reason}, problem.status)
        except Exception:
            # Not 500: to try again is right, and the token waits for this key.
            logger.exception("a device at %s could not join", address)
            return JSONResponse({"detail": "the server could not do it: try again"}, 503)
        logger.warning("node %d has joined from %s: %s", node_id, address, about)
        return JSONResponse({"node_id": str(node_id)})


async def _body(request: Request) -> bytes:
    """Return the body of a request, of which no more is read than may be.

    Raises:
        JoinError: it is no POST, or too long.
    """
    if request.method != "POST":
        raise JoinError(405, "expected POST")
    length = request.headers.get("content-length", "0")
    found = bytearray()
    if length.isdecimal() and int(length) <= BODY_BYTES:
        async for some in request.stream():
            found += some
            if len(found) > BODY_BYTES:
                break
        else:
            return bytes(found)
    raise JoinError(413, f"expected at most {BODY_BYTES} bytes")


def _source(request: Request) -> str:
    """Return the address of a device, which the proxy states where it comes by a Unix socket."""
    if request.client is not None:
        return request.client.host
    return request.headers.get("x-real-ip", "unknown")


def joinable(app: FastAPI, database: Path) -> FastAPI:
    """Let devices with a token join a SuperLink; return its app.

    Args:
        app: of the SuperLink.
        database: its file.

    Raises:
        ConfigError: the tokens cannot be used, or others may read them.
    """
    if not features.has("joining by tokens"):
        return app
    enrolment = Enrolment(Tokens(database), superlink.NodeRegister(app))
    app.user_middleware.insert(0, Middleware(EnrolmentGate, enrolment=enrolment))
    return app


def rotate(database: Path, node: str, key: NodeKey) -> int:
    """Give a node another key, on the server; its id, and all that goes by it, stays.

    The old key is rejected from then on: let the device's SuperNode end before, and start with the
    new key after.

    Args:
        database: of the SuperLink, which may be running.
        node: name or id.
        key: the new one.

    Returns:
        The node's id.

    Raises:
        ConfigError: this is no database of a SuperLink.
        FedstaleError: there is no such node, or the key was used before.
    """
    if not database.is_file():
        raise ConfigError(f"database = {str(database)!r}: expected the file of flower-superlink")
    try:
        with closing(sqlite3.connect(database, timeout=_LOCK_S)) as opened, opened:
            found = opened.execute("SELECT node_id, name FROM node WHERE status != ?", (GONE,))
            # SQLite holds 64 bits with a sign, and ids of nodes have none.
            ids = [signed for signed, name in found if node in {name, str(signed % 2**64)}]
            if len(ids) != 1:
                raise FedstaleError(f"node {node!r}: {len(ids)} registered nodes have this name")
            opened.execute("UPDATE node SET public_key = ? WHERE node_id = ?", (key.pem, ids[0]))
            return ids[0] % 2**64
    except sqlite3.IntegrityError:
        raise FedstaleError(
            f"node {node!r}: the new key was registered before: make another one on the device"
        ) from None
    except sqlite3.Error as problem:
        raise ConfigError(
            f"database = {str(database)!r}: {problem}; expected the file of flower-superlink, "
            "which this user may write"
        ) from None
