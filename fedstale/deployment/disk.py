"""A SuperLink whose disk is full waits for space, and so do all that speak to it.

Flower answers 500 to a request that its database cannot write, and what asked gives up: a SuperNode
ends, and so does a ServerApp. With 503 both try again until it can.
"""

import errno
import logging
import shutil
import sqlite3
import time
from pathlib import Path

from sqlalchemy.exc import OperationalError
from starlette.responses import JSONResponse

from fedstale.deployment.clock import Asgi, Receive, Scope, Send

logger = logging.getLogger(__name__)

_FULL = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}
_AGAIN_S = 60.0


class WaitsForDisk:
    """Answers 503 in place of 500 while the disk of the database takes no more."""

    def __init__(self, app: Asgi, folder: Path) -> None:
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

        async def sent(message: Scope) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, sent)
        except (OperationalError, OSError) as problem:
            if has_begun or not is_disk_full(problem):
                raise
            self._tell(scope["path"], problem)
            await JSONResponse({"detail": "the disk is full"}, 503)(scope, receive, send)
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
            "ServerApps wait until there is space",
            *(self._folder, why, shutil.disk_usage(self._folder).free / 1e6),
        )


def is_disk_full(problem: Exception) -> bool:
    """Return whether an error says that the disk is full, or fails.

    Example:
        >>> is_disk_full(OSError(errno.ENOSPC, "no space")), is_disk_full(OSError("other"))
        (True, False)
    """
    if isinstance(problem, OSError):
        return problem.errno in {errno.ENOSPC, errno.EDQUOT}
    # Its lowest byte is the kind.
    code = getattr(getattr(problem, "orig", None), "sqlite_errorcode", None)
    return code is not None and code & 0xFF in _FULL
