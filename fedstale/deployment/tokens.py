"""One-time tokens, by which devices join without an operator who carries their keys.

A token lets one key in. The server keeps its hash alone, in SQLite beside the SuperLink's database,
and binds it to the first key that shows it before that key is registered: so a join that is cut,
even by kill -9, is finished by the same key with the same token, and by no other. `EnrolmentGate`
takes tokens in front of Flower's app, at one path, and registers keys as a table of keys does.
"""

import asyncio
import datetime
import json
import logging
import os
import secrets
import sqlite3
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from fedstale.deployment.audit import LOG, AuditLog
from fedstale.deployment.enrolment import GONE, NodeKey, Registry
from fedstale.deployment.joining import (
    ID_LENGTH,
    JOIN_PATH,
    NAME,
    SIGNED_WITH,
    digest_of,
    statement,
    token_id,
)
from fedstale.errors import ConfigError, FedstaleError
from fedstale.files import check_private, open_private
from fedstale.flower import features, superlink

logger = logging.getLogger(__name__)

BODY_BYTES = 4096
"""Most that a device sends; it needs some 600."""

_LOCK_S = 30.0
_MOST_WAITING = 32
_MINUTE_S = 60.0
_LINES_PER_MINUTE = 60
_FIELDS = ("token", "public_key", "name", "signature")
_TABLE = """
CREATE TABLE IF NOT EXISTS token (
    digest TEXT PRIMARY KEY, expires_at REAL NOT NULL, key TEXT, node_id TEXT
)"""


class RefusalError(Exception):
    """A join that is none: the status of the answer, and the reason for device and log."""

    def __init__(self, status: int, reason: str, token: str | None = None) -> None:
        """Refuse.

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
        ...     (token,) = tokens.make(1, 60.0, AuditLog(Path(folder) / "log"))
        ...     tokens.claim(digest_of(token), "SHA256:a")
        ...     tokens.claim(digest_of(token), "SHA256:b")
        Traceback (most recent call last):
        ...
        fedstale.deployment.tokens.RefusalError: this token was used by another key
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

    def make(self, count: int, valid_s: float, log: AuditLog) -> list[str]:
        """Return new tokens of 256 random bits, of which the hashes are kept."""
        made = [secrets.token_urlsafe(32) for _ in range(count)]
        ends = time.time() + valid_s
        expires = datetime.datetime.fromtimestamp(ends, datetime.UTC).isoformat(timespec="seconds")
        about = {"tokens": [token_id(token) for token in made], "expires": expires}
        with log.noted("make tokens", **about), self._changing() as rows:
            rows.executemany(
                "INSERT INTO token (digest, expires_at) VALUES (?, ?)",
                [(digest_of(token), ends) for token in made],
            )
        return made

    def revoke(self, log: AuditLog) -> list[str]:
        """Let all tokens expire that have let nobody in; return their ids."""
        now = time.time()
        with log.noted("revoke tokens") as about, self._changing() as rows:
            found = rows.execute(
                "UPDATE token SET expires_at = ? WHERE node_id IS NULL AND expires_at > ? "
                "RETURNING digest",
                (now, now),
            ).fetchall()
            gone = [digest[:ID_LENGTH] for (digest,) in found]
            about["tokens"] = gone
        return gone

    def claim(self, digest: str, key: str) -> int | None:
        """Bind a token to a key, if it is bound to no other.

        Args:
            digest: of the token.
            key: fingerprint.

        Returns:
            The id of the node that this key has become by this token, or None if it has not yet.

        Raises:
            RefusalError: the token is unknown, expired, or another key's.
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
            raise RefusalError(403, "this token is none of this server's")
        owner, node_id, ends = found
        if owner not in {None, key}:
            raise RefusalError(409, "this token was used by another key", digest[:ID_LENGTH])
        if node_id is not None:
            return int(node_id)
        if ends <= time.time():
            raise RefusalError(410, "this token has expired", digest[:ID_LENGTH])
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
class Joining:
    """What a device asks that has a token."""

    digest: str
    """Of the token, which is not kept."""
    key: NodeKey

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read and check a request.

        Raises:
            RefusalError: it is none, or whoever made it does not hold the key.
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
            raise RefusalError(400, f"expected {', '.join(_FIELDS)} of a device") from None
        digest = digest_of(token)
        try:
            said = statement(digest, public, name)
            owner = load_pem_public_key(key.pem)
            assert isinstance(owner, EllipticCurvePublicKey)
            owner.verify(proof, said, SIGNED_WITH)
        except InvalidSignature:
            raise RefusalError(403, "the signature is not this key's") from None
        return cls(digest, key)


class Enrolment:
    """Lets in whoever has a token, and has each join in the log."""

    def __init__(self, tokens: Tokens, registry: Registry, log: AuditLog) -> None:
        """Use a SuperLink's tokens, nodes and log."""
        self._tokens, self._registry, self._log = tokens, registry, log
        self._minute, self._lines, self._left_out = 0, 0, 0

    def join(self, body: bytes, address: str) -> int:
        """Register the key of a request.

        Args:
            body: of the request.
            address: where it came from.

        Returns:
            The node's id; the same for the same key and token.

        Raises:
            RefusalError: it may not.
        """
        asked = Joining.parse(body)
        token = asked.digest[:ID_LENGTH]
        known = self._tokens.claim(asked.digest, asked.key.fingerprint)
        if known is not None:
            node = self._registry.listed().get(asked.key.pem)
            # After a rotation or a revocation the token must not bring the old key back.
            if node is None or node.status == GONE or node.node_id != known:
                raise RefusalError(410, "this key is no node's any more", token)
            return known
        try:
            log = self._log.also(token=token, address=address)
            (node,) = self._registry.enrol([asked.key], log)
        except FedstaleError as problem:
            raise RefusalError(409, str(problem), token) from None
        self._tokens.finish(asked.digest, node.node_id)
        return node.node_id

    def note(self, refused: RefusalError, address: str) -> None:
        """Write a refusal to the log.

        A stranger must not fill the disk: of those without a token of this server, sixty within a
        minute get a line, and the next line says how many got none.
        """
        about: dict[str, object] = {"address": address, "reason": refused.reason}
        if refused.token:
            about["token"] = refused.token
        else:
            minute = int(time.monotonic() // _MINUTE_S)
            if minute != self._minute:
                self._minute, self._lines = minute, 0
            if self._lines >= _LINES_PER_MINUTE:
                self._left_out += 1
                return
            self._lines += 1
        if self._left_out:
            about["left_out"], self._left_out = self._left_out, 0
        self._log.add("enrol", "refused", **about)


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
                body: bytes | RefusalError = await _body(request)
            except RefusalError as refused:
                body = refused
            async with self._turn:
                return await run_in_threadpool(self._joined, body, _source(request))
        except ClientDisconnect:
            return JSONResponse({"detail": "the request ends early"}, 400)
        finally:
            self._n_waiting -= 1

    def _joined(self, body: bytes | RefusalError, address: str) -> JSONResponse:
        try:
            try:
                if isinstance(body, RefusalError):
                    raise body
                node_id = self._enrolment.join(body, address)
            except RefusalError as refused:
                self._enrolment.note(refused, address)
                return JSONResponse({"detail": refused.reason}, refused.status)
        except Exception:
            # Not 500: to try again is right, and the token waits for this key.
            logger.exception("a device at %s could not join", address)
            return JSONResponse({"detail": "the server could not do it: try again"}, 503)
        return JSONResponse({"node_id": str(node_id)})


async def _body(request: Request) -> bytes:
    """Return the body of a request, of which no more is read than may be.

    Raises:
        RefusalError: it is no POST, or too long.
    """
    if request.method != "POST":
        raise RefusalError(405, "expected POST")
    length = request.headers.get("content-length", "0")
    found = bytearray()
    if length.isdecimal() and int(length) <= BODY_BYTES:
        async for some in request.stream():
            found += some
            if len(found) > BODY_BYTES:
                break
        else:
            return bytes(found)
    raise RefusalError(413, f"expected at most {BODY_BYTES} bytes")


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
        ConfigError: the tokens or the log cannot be used, or others may read them.
    """
    if not features.has("joining by tokens"):
        return app
    who = {"superlink": str(database)}
    enrolment = Enrolment(
        Tokens(database),
        Registry(superlink.NodeRegister(app), **who),
        AuditLog(database.parent / LOG, **who),
    )
    app.user_middleware.insert(0, Middleware(EnrolmentGate, enrolment=enrolment))
    return app
