"""A trainer that stays between messages: a process with the app's libraries, data and GPU.

Flower starts a process for each message to a ClientApp, in which nothing of the message before is
left. `resident` makes a ClientApp that hands each message, with its Context, to one process of its
own, the trainer, through a Unix socket in a folder that nobody else may enter. The trainer is
started by the first message of a run, keeps the modules of the app, and answers one message at a
time. What travels is Flower's own serialisation, with the bytes of arrays behind it as they are,
which may be more than a message of Protocol Buffers can hold, and JSON for the settings in a
Context.

Either side may be killed. A message whose trainer is gone is answered in the message's own process,
as if there were no trainer; a trainer whose message is gone drops the answer.
"""

import hashlib
import importlib
import json
import logging
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedstale import __version__
from fedstale.errors import ConfigError, ProtocolError
from fedstale.files import exposure, hold, is_held, make_private, open_private
from fedstale.flower import (
    bytes_of_message,
    bytes_of_records,
    message_of_bytes,
    records_of_bytes,
    with_content,
)

_FOLDER = "trainers"
"""Name of the folder of sockets and logs, in Flower's own (FLWR_HOME)."""

_MESSAGE_PROGRAM = "flwr-clientapp"
_PROGRAM = (
    "import json, sys; given = json.loads(sys.argv.pop()); sys.path[:] = given.pop('path'); "
    "from fedstale.contrib.sites.resident import stay; stay(**given)"
)
_SIZE = struct.Struct("!Q")
_CREDENTIALS = struct.Struct("iII")
"""Process, user and group at the other end of a Unix socket, as Linux tells them."""
_READY = b"\n"
_START_S, _STARTS = 60.0, 3
"""For how long a message waits for a trainer to listen, and how often it starts one."""
_POLL_S = 0.02
_TICK_S = 1.0
"""How often a trainer looks whether it is still wanted."""
_PATIENCE_S = 300.0
"""How long one part of a message may take to reach the trainer, or of an answer to leave it."""

logger = logging.getLogger(__name__)

Told = tuple[dict[str, Any], Message | None, RecordDict]
"""Settings, a message and the state of a Context, as one side tells the other."""


def resident(app: str, *, idle_s: float = 1800.0, memory_bytes: int | None = None) -> ClientApp:
    """Return a ClientApp whose messages are answered by a process that stays between them.

        app = resident("my_app.trainer:app")

    On a node, one such trainer for each user, node, run and bundle of the app imports the named
    module and keeps it. Elsewhere, as in a simulation, and on other systems than Linux, this
    imports the named ClientApp and returns it.

    Args:
        app: the ClientApp, with all its mods, as module:attribute; in a module that does not import
            the one which calls this.
        idle_s: the trainer ends after so many s without a message.
        memory_bytes: it ends after an answer with which it holds more memory than this; None: it
            does not.

    Raises:
        ConfigError: an argument is out of range; or, elsewhere than on a node, there is no such
            ClientApp.
    """
    if app.count(":") != 1:
        raise ConfigError(f"app = {app!r}: expected module:attribute of a ClientApp")
    if not 0 < idle_s < math.inf:
        raise ConfigError(f"idle_s = {idle_s}: expected a number of seconds > 0")
    if memory_bytes is not None and memory_bytes < 1:
        raise ConfigError(f"memory_bytes = {memory_bytes}: expected bytes >= 1, or None for all")
    is_of_message = Path(sys.argv[0]).name == _MESSAGE_PROGRAM
    if not is_of_message or sys.platform != "linux":
        return _loaded(app)
    return ResidentApp(app, idle_s=idle_s, memory_bytes=memory_bytes)


class ResidentApp(ClientApp):
    """A ClientApp in the process of a message, which asks the trainer; made by `resident`."""

    def __init__(self, app: str, **limits: float | None) -> None:
        super().__init__()
        self._app, self._limits = app, limits

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the trainer's answer, or the app's own if there is none.

        Raises:
            ConfigError: the folder of trainers is another user's, or others may enter it.
            Exception: what the app has raised, with its type's name.
        """
        given = {"reference": self._app, **self._limits, "path": sys.path}
        log = _log(context, given)
        folder = _own(log.parent)
        try:
            # A connection that ends is an answer that never comes.
            with _connected(folder, log, given) as connection, connection.makefile("rb") as file:
                _send(connection, _settings(context), message, context.state)
                told, answered, left = _received(file)
        except Exception as problem:
            said = f"{type(problem).__name__}: {problem}; log: {log}"
            logger.warning("the trainer gave no answer, and this process runs the app (%s)", said)
            return _loaded(self._app)(message, context)
        finally:
            os.close(folder)
        context.state.clear()
        context.state.update(left)
        vars(context).update(told["context"])
        if answered is None:
            raise _as_raised(**told["raised"], log=log)
        return answered


def _log(context: Context, given: dict[str, Any]) -> Path:
    """Return the log of a trainer, which no other node, run or app has, nor one started otherwise.

    The bundle's folder, whose name has its hash, is on the path.
    """
    # Nothing else in the process of a message needs it.
    from fedstale.flower import command_line  # noqa: PLC0415

    told = json.dumps([given, sys.executable, __version__])
    digest = hashlib.sha256(told.encode()).hexdigest()[:16]
    name = f"run-{context.run_id}-node-{context.node_id}-{digest}.log"
    return command_line.flower_home().absolute() / _FOLDER / name


def _connected(folder: int, log: Path, given: dict[str, Any]) -> socket.socket:
    """Return a connection to a trainer that waits for a message; start one if there is none.

    Raises:
        OSError: it cannot be started.
    """
    since, started = time.monotonic(), list[subprocess.Popen[bytes]]()
    while time.monotonic() < since + _START_S:
        connection = socket.socket(socket.AF_UNIX)
        with suppress(OSError):
            connection.connect(_at(folder, log))
            since = math.inf
            # One that is at work is waited for. Nothing comes of one that ends just now.
            if _is_own(connection) and connection.recv(len(_READY)):
                return connection
        connection.close()
        since = min(since, time.monotonic())
        if all(one.poll() is not None for one in started) and not is_held(log):
            if len(started) == _STARTS:
                raise ChildProcessError(f"it ended {_STARTS} times before it was ready")
            started.append(_started(log, given))
        time.sleep(_POLL_S)
    raise TimeoutError(f"it did not listen within {_START_S:g} s")


def _started(log: Path, given: dict[str, Any]) -> "subprocess.Popen[bytes]":
    out = open_private(str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        # Whoever waits for the message's pipes or session must not wait for the trainer.
        return subprocess.Popen(
            [sys.executable, "-P", "-u", "-c", _PROGRAM, json.dumps({**given, "log": str(log)})],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    finally:
        os.close(out)


def stay(reference: str, log: str, idle_s: float, memory_bytes: int | None) -> None:
    """Be the trainer: answer messages until none has come for long, or one of its limits is met.

    Args:
        reference: the ClientApp, as module:attribute.
        log: beside which the socket is; one process at a time holds it.
        idle_s: how long to wait for a message, in s.
        memory_bytes: after an answer with more resident memory than this it ends.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    folder = os.open(Path(log).parent, os.O_RDONLY | os.O_DIRECTORY)
    at, load = _at(folder, Path(log)), cache(partial(_loaded, reference))
    with open(log, "ab") as held, socket.socket(socket.AF_UNIX) as listener:
        if hold(held.fileno()) is not None:
            # Another message's process was first.
            return
        # A trainer that has ended leaves it.
        with suppress(FileNotFoundError):
            os.unlink(at)
        listener.bind(at)
        listener.listen()
        listener.settimeout(_TICK_S)
        opened: list[Any] = [held, listener]
        # What the app forks, such as workers that load data, must not keep a dead trainer's socket.
        os.register_at_fork(after_in_child=lambda: [each.close() for each in opened])
        last = time.monotonic()
        while _is_there(folder, Path(log).parent) and time.monotonic() < last + idle_s:
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                opened[2:] = [connection]
                with connection:
                    can_go_on = answer(connection, load)
                last = time.monotonic()
                if not can_go_on or _memory_bytes() > (memory_bytes or math.inf):
                    break


def answer(connection: socket.socket, load: Callable[[], ClientApp]) -> bool:
    """Answer the message that a connection brings; drop a connection that brings none.

    Args:
        connection: from another process of this user.
        load: returns the ClientApp.

    Returns:
        Whether the ClientApp can be loaded, as far as this has shown.
    """
    if not _is_own(connection):
        logger.warning("refused: a process of another user")
        return True
    try:
        connection.settimeout(_PATIENCE_S)
        connection.sendall(_READY)
        with connection.makefile("rb") as file:
            told, message, state = _received(file)
        if message is None:
            raise ProtocolError("there is none")
        context = Context(**told["context"], state=state)
    except Exception as problem:
        logger.warning("a connection brought no message: %s: %s", type(problem).__name__, problem)
        return True
    app: ClientApp | None = None
    replied: Message | None = None
    raised = None
    try:
        app = load()
        replied = app(message, context)
        if not isinstance(replied, Message):
            raise TypeError(f"the ClientApp returned {type(replied).__name__}, expected a Message")
    except Exception as problem:
        # Whatever the app raises is its answer.
        traceback.print_exc()
        kind = type(problem)
        raised = {"module": kind.__module__, "name": kind.__qualname__, "text": str(problem)}
    try:
        about = _settings(context) | {"raised": raised}
        _send(connection, about, replied if raised is None else None, context.state)
    except Exception as problem:
        logger.warning("an answer is dropped: %s: %s", type(problem).__name__, problem)
    return app is not None


def _loaded(reference: str) -> ClientApp:
    """Import a ClientApp.

    Raises:
        ConfigError: the module has no such ClientApp.
    """
    module, _, attribute = reference.partition(":")
    found = getattr(importlib.import_module(module), attribute, None)
    if not isinstance(found, ClientApp) or isinstance(found, ResidentApp):
        raise ConfigError(
            f"app = {reference!r}: expected a ClientApp in a module that does not import the one "
            f"which calls resident, found {type(found).__name__}"
        )
    return found


def _as_raised(module: str, name: str, text: str, log: Path) -> Exception:
    """Return an exception that prints as the app's own, so that Flower's error reply is alike."""
    made = type(name, (Exception,), {"__module__": module})(text)
    made.add_note(f"raised in the trainer; the traceback is in {log}")
    return made


def _settings(context: Context) -> dict[str, Any]:
    """Return a Context's fields besides its state."""
    return {"context": {name: x for name, x in vars(context).items() if name != "state"}}


def _own(folder: Path) -> int:
    """Open the folder of trainers; make it if there is none.

    Raises:
        ConfigError: it is another user's, or others may enter it.
    """
    make_private(folder)
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    owner, user = os.fstat(opened).st_uid, os.geteuid()
    fault = exposure(folder)
    if owner != user:
        fault = f"{folder} is of user {owner}: expected a folder of user {user}, who runs the app"
    if fault:
        os.close(opened)
        raise ConfigError(f"resident: {fault}")
    return opened


def _at(folder: int, log: Path) -> str:
    """Return the address of a trainer's socket: shorter than its path, which may be too long."""
    return f"/proc/self/fd/{folder}/{log.stem}.sock"


def _is_there(folder: int, path: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.fstat(folder), path.stat())
    return False


def _is_own(connection: socket.socket) -> bool:
    """Return whether the process at the other end runs as this one's user."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(told)[1]
    return uid == os.geteuid()


def _memory_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _send(
    connection: socket.socket, about: dict[str, Any], message: Message | None, state: RecordDict
) -> None:
    """Send settings, a message if there is one, and the state of a Context."""
    arrays: list[bytes] = []
    told = b""
    if message is not None:
        if not message.has_error():
            message = with_content(message, _detach_arrays(message.content, arrays))
        told = bytes_of_message(message)
    parts = [told, bytes_of_records(_detach_arrays(state, arrays)), *arrays]
    for part in (json.dumps(about | {"parts": len(parts)}).encode(), *parts):
        connection.sendall(_SIZE.pack(len(part)))
        if part:
            # Sending nothing fails too where the other side has all, has answered and is gone.
            connection.sendall(part)


def _received(file: BinaryIO) -> Told:
    """Read a message of the other side.

    Raises:
        ProtocolError: it is cut short.
        Exception: it cannot be read.
    """
    about = json.loads(_part(file))
    told, state, *arrays = (_part(file) for _ in range(about["parts"]))
    message, rest = message_of_bytes(told) if told else None, iter(arrays)
    if message is not None and not message.has_error():
        message = with_content(message, _attach_arrays(message.content, rest))
    return about, message, _attach_arrays(records_of_bytes(state), rest)


def _detach_arrays(content: RecordDict, arrays: list[bytes]) -> RecordDict:
    """Detach the bytes of arrays from records, and add them to a list."""
    made = RecordDict(dict(content))
    for key, record in content.array_records.items():
        made[key] = ArrayRecord({name: _with_bytes(array, b"") for name, array in record.items()})
        arrays += (array.data for array in record.values())
    return made


def _attach_arrays(content: RecordDict, arrays: Iterator[bytes]) -> RecordDict:
    """Attach the bytes that `_detach_arrays` has taken off."""
    for key, record in content.array_records.items():
        content[key] = ArrayRecord(
            {name: _with_bytes(array, next(arrays)) for name, array in record.items()}
        )
    return content


def _with_bytes(array: Array, data: bytes) -> Array:
    return Array(array.dtype, array.shape, array.stype, data)


def _part(file: BinaryIO) -> bytes:
    return _whole(file, _SIZE.unpack(_whole(file, _SIZE.size))[0])


def _whole(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise ProtocolError(f"the connection ended after {len(data)} of {size} bytes")
    return data
