"""What a SuperLink waits for in place of ending nodes and runs: clocks, its database and its disk.

Flower signs the time stamp of each request, and answers 401 to one that is more than 5 s early or
305 s late; a SuperNode that reads 401 ends for good. It also reckons by the wall clock until when a
node counts as online and a ServerApp as alive, so that a jump of the server's clock ends runs. And
it answers 500 to a request that its database has no room for, on which a ServerApp ends. With 503
all of them try again.
"""

import datetime
import errno
import logging
import shutil
import sqlite3
import time
from base64 import b64decode
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from sqlalchemy.exc import OperationalError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedstale.deployment.joining import SIGNED_WITH
from fedstale.flower import superlink as flower

logger = logging.getLogger(__name__)

_FLEET = "/v1/fleet/"
_JUMP_S, _AGAIN_S = 5.0, 60.0
_FOR_NOW = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


class SteadyClock:
    """The time that Flower reckons by, which goes on evenly while this machine's clock jumps.

    Flower looks at its clock in threads of its own too, so a jump must reach it at one moment: when
    what its database says is to last has been moved as well.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with what the clock says now.

        Args:
            wall: the clock that may jump, in s.
            steady: one that does not.
        """
        self._wall, self._steady = wall, steady
        self._offset = wall() - steady()

    def now(self, tz: datetime.tzinfo | None = None) -> datetime.datetime:
        """Return the time, as `datetime.now` does."""
        return datetime.datetime.fromtimestamp(self._steady() + self._offset, tz)

    def jump_s(self) -> float:
        """Return by how many seconds the clock has jumped and this one has not yet; mostly 0."""
        jump_s = self._wall() - self._steady() - self._offset
        return jump_s if abs(jump_s) > _JUMP_S else 0.0

    def follow(self, state: Any, jump_s: float) -> None:  # noqa: ANN401 - Flower's
        """Jump as well, so that at no moment anything seems to have lapsed."""
        if jump_s > 0.0:
            flower.shift(state, jump_s)
        self._offset += jump_s
        if jump_s < 0.0:
            flower.shift(state, jump_s)


class ServerClock:
    """Keeps nodes online and runs alive when the server's clock is set, or after it has slept.

    Before the first request that comes after a jump, whatever Flower's database says is to last
    until some instant lasts until the same time after the jump.
    """

    def __init__(self, app: ASGIApp, clock: SteadyClock) -> None:
        """Stand in front of a SuperLink's app, before anything that looks into its database.

        Args:
            app: an ASGI app.
            clock: which Flower in this process reckons by.
        """
        self._app, self._clock = app, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Look at the clock, and pass the request on."""
        if scope["type"] == "http" and (jump_s := self._clock.jump_s()):
            # In the event loop, so that one request does it.
            self._clock.follow(flower.state_of(scope["app"]), jump_s)
            logger.warning(
                "this server's clock has jumped by %+.0f s, or it has slept; nodes and runs are "
                "given as much time. A node whose clock differs now is refused until they agree",
                jump_s,
            )
        await self._app(scope, receive, send)


class NodeClocks:
    """Lets a SuperNode whose clock is wrong wait until it is right, in place of ending it.

    A request with a good signature of a registered key, whose stamp Flower would not take, gets
    503, which a SuperNode answers by trying again. All others are passed on to Flower.
    """

    def __init__(self, app: ASGIApp) -> None:
        """Stand in front of an ASGI app, behind Flower's translation and before its check."""
        self._app = app
        # A little less than Flower takes, which looks later.
        self._early_s, self._late_s = flower.stamp_window_s()
        self._wrong: dict[bytes, int] = {}
        """Of each public key whose clock is wrong, the node."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http" and scope["path"].startswith(_FLEET):
            refusal = await self._refusal(scope)
            if refusal is not None:
                await JSONResponse({"detail": refusal}, 503)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _refusal(self, scope: Scope) -> str | None:
        found = _stamped(Headers(scope=scope))
        if found is None:
            return None
        late_s, key, _ = found
        is_right = -self._early_s < late_s < self._late_s
        if is_right and key not in self._wrong:
            return None
        node = await run_in_threadpool(_signer, flower.state_of(scope["app"]), *found)
        if node is None:
            return None
        if is_right:
            del self._wrong[key]
            logger.warning("node %d: its clock is right again", node)
            return None
        side = f"{abs(late_s):.0f} s {'behind' if late_s > 0 else 'ahead of'} this server's"
        if key not in self._wrong:
            self._wrong[key] = node
            logger.warning("node %d: its clock is %s; it is refused until they agree", node, side)
        return f"the node's clock is {side}"


def _stamped(headers: Headers) -> tuple[float, bytes, tuple[bytes, bytes]] | None:
    """Return how late a request is in s, its public key, and what was signed and how.

    None if a header is missing, or is none that Flower reads.
    """
    try:
        key = b64decode(headers[flower.PUBLIC_KEY], validate=True)
        signature = b64decode(headers[flower.SIGNATURE], validate=True)
        stamp = headers[flower.TIMESTAMP]
        late_s = (flower.now() - datetime.datetime.fromisoformat(stamp)).total_seconds()
        return late_s, key, (stamp.encode("ascii"), signature)
    except (KeyError, ValueError, TypeError):
        return None


def _signer(state: Any, late_s: float, key: bytes, signed: tuple[bytes, bytes]) -> int | None:  # noqa: ANN401 - Flower's
    """Return the node that has signed, or None if no registered one has."""
    node: int | None = state.get_node_id_by_public_key(key)
    text, signature = signed
    with suppress(InvalidSignature, ValueError):
        if node and isinstance(owner := load_pem_public_key(key), EllipticCurvePublicKey):
            owner.verify(signature, text, SIGNED_WITH)
            return node
    return None


class WaitsForDatabase:
    """Answers 503 in place of 500 while the database is full, or too many write to it at once."""

    def __init__(self, app: ASGIApp, folder: Path) -> None:
        """Stand in front of an ASGI app, behind what makes a 500 of an error.

        Args:
            app: which raises what SQLite does.
            folder: of the database, for the log.
        """
        self._app, self._folder = app, folder
        self._failed: set[str] = set()
        """Paths that have failed, and have not succeeded since."""
        self._told_at = -_AGAIN_S

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
            self._tell(scope["path"], problem)
            await JSONResponse({"detail": "the database cannot be written"}, 503)(
                scope, receive, send
            )
        else:
            if self._failed and scope.get("path") in self._failed:
                self._failed.clear()
                self._told_at = -_AGAIN_S
                logger.warning("the database in %s is written again", self._folder)

    def _tell(self, path: str, problem: Exception) -> None:
        self._failed.add(path)
        if time.monotonic() < self._told_at + _AGAIN_S:
            return
        self._told_at = time.monotonic()
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
