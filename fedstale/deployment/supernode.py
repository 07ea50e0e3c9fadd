"""Flower's SuperNode, whose parts wait for each other by long polls.

Flower's SuperExec asks its SuperNode for a task, and each request costs the two some milliseconds
of processor time: ten times a second, as much as all else that a small message takes on a device.
Here it is held for some seconds, and answered as soon as a message is there with all its objects,
which a ClientApp would otherwise look for again after 1, 2, 4 s. And the SuperNode, which looks
every half second for the reply, is woken when the ClientApp has handed over the last of it, its
state.

A run may end while a message of it comes. Flower then leaves the message where it is: a ClientApp
works on it, its reply is not waited for, and every later reply of this node waits in turn for the
next message. Here such a message is thrown away (`fedstale.flower.supernode`).
"""

import asyncio
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from fedstale.deployment.long_polls import disconnection, first_of, nothing
from fedstale.deployment.processes import name_process
from fedstale.flower import command_line, features
from fedstale.flower import supernode as flowers

_NAME = "flower-supernode"
_ACQUIRE, _ANSWERED = "/v1/runtime/acquire-task", "/v1/runtime/push-task-output"


class WaitingTask:
    """Flag of a complete message that waits for its task to be acquired.

    One event loop waits for it; other threads say that it is so.
    """

    def __init__(self) -> None:
        self.is_closed = False
        """Whether `wait` returns at once."""
        self._event = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def wait(self, gone: "asyncio.Future[None]", timeout_s: float) -> None:
        """Wait for one, for the end of the connection, or for some seconds."""
        self._loop = asyncio.get_running_loop()
        if not self.is_closed:
            await first_of(self._event, gone, timeout_s)

    def take(self) -> None:
        """Note that its task is being acquired."""
        self._event.clear()

    def say(self) -> None:
        """Note that a complete message has come; called by another thread."""
        if self._loop is None:
            self._event.set()
            return
        # A loop that has ended has no request waiting.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._event.set)

    def close(self) -> None:
        """End `wait` at once from now on."""
        self.is_closed = True
        self.say()


class ReplyWait:
    """Stands for Python's `time` in a SuperNode's loop: a pause is over when a reply is there."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def sleep(self, seconds: float) -> None:
        """Wait for a reply, but not longer than some seconds."""
        self._event.wait(seconds)
        self._event.clear()

    def end(self) -> None:
        """End the pause: a reply is there."""
        self._event.set()


class TaskLongPoll:
    """Holds a SuperExec's request for a task, in front of a SuperNode's Runtime API.

    The request of a SuperExec that was killed meanwhile takes no task: its connection is closed.
    """

    def __init__(self, app: ASGIApp, task: WaitingTask, pauses: ReplyWait, hold_s: float) -> None:
        """Stand in front of an ASGI app, behind Flower's own middleware.

        Args:
            app: a SuperNode's Runtime API.
            task: says when there is a task.
            pauses: is told when a ClientApp has answered.
            hold_s: how long a request is held at most, in s.
        """
        self._app, self._task, self._pauses, self._hold_s = app, task, pauses, hold_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; hold it first if it acquires a task."""
        path = scope.get("path")
        if path != _ACQUIRE:
            await self._app(scope, receive, send)
            if path == _ANSWERED:
                self._pauses.end()
            return
        async with disconnection(receive) as gone:
            await self._task.wait(gone, self._hold_s)
            is_gone = gone.done()
        if is_gone:
            await JSONResponse({"detail": "ask again"}, 503)(scope, receive, send)
            return
        self._task.take()
        # Flower's middleware has read the body.
        await self._app(scope, nothing, send)


def holding(app: FastAPI, task: WaitingTask, pauses: ReplyWait, hold_s: float) -> FastAPI:
    """Hold requests for tasks at a SuperNode's Runtime API; return it."""
    app.user_middleware.append(Middleware(TaskLongPoll, task=task, pauses=pauses, hold_s=hold_s))
    return app


def run(arguments: Sequence[str], hold_s: float = 5.0) -> None:
    """Run flower-supernode until it ends.

    Args:
        arguments: of flower-supernode.
        hold_s: how long its SuperExec's request for a task is held at most, in s.
    """
    name_process(_NAME)
    sys.argv = [_NAME, *arguments]
    if features.has("long polls of tasks"):
        task, pauses = WaitingTask(), ReplyWait()
        flowers.hold_tasks(
            partial(holding, task=task, pauses=pauses, hold_s=hold_s),
            pauses,
            is_whole=task.say,
            at_exit=task.close,
        )
    if features.has("messages of an ended run"):
        flowers.throw_away_ended()
    command_line.program(_NAME)()


if __name__ == "__main__":
    run(sys.argv[1:])
