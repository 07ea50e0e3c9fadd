"""The private parts of Flower 1.41 that a Grid in one process must touch, all in one place.

`Message(...)` reads a process-wide identity that has no public setter, and a message's id can only
be given by writing its metadata. Read this file first when the pinned version of Flower moves.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.error import Error
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

__all__ = [
    "ErrorCode",
    "Run",
    "error_reply",
    "filled",
    "identity",
    "own_copy",
    "replaced",
    "reply_with",
    "stamp",
    "with_content",
]


Record = ArrayRecord | MetricRecord | ConfigRecord
Records = TypeVar("Records", bound=RecordDict | Record)
T = TypeVar("T")


@contextmanager
def identity(run_id: int) -> Iterator[None]:
    """Let this process create messages of a run, as a ServerApp process would."""
    before = TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, SUPERLINK_NODE_ID, 1
    try:
        yield
    finally:
        TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id = before


@contextmanager
def replaced(
    stand_ins: Sequence[tuple[Callable[..., Any], Callable[..., Any]]], within: Sequence[str]
) -> Iterator[None]:
    """Put functions in the place of others wherever modules of some packages have bound these.

    Args:
        stand_ins: each function with its stand-in.
        within: names of packages or modules; with their sub-modules.
    """
    prefixes = tuple(f"{package}." for package in within)
    wanted = {id(original): (original, stand_in) for original, stand_in in stand_ins}
    bound = [
        (module, name, *wanted[id(value)])
        for path, module in list(sys.modules.items())
        if module is not None and f"{path}.".startswith(prefixes)
        for name, value in list(vars(module).items())
        if id(value) in wanted
    ]
    try:
        for module, name, _, stand_in in bound:
            setattr(module, name, stand_in)
        yield
    finally:
        for module, name, original, _ in bound:
            setattr(module, name, original)


def stamp(message: Message, message_id: str, created_at: float, ttl: float) -> None:
    """Give a message its id and its times; created_at is a Unix time, ttl is in s."""
    metadata = message.metadata
    metadata.__dict__["_message_id"] = message_id
    metadata.created_at, metadata.ttl = created_at, ttl


def error_reply(message: Message, code: int, reason: str) -> Message:
    """Return the reply that the SuperLink writes in a node's place.

    Like the SuperLink's, it names the SuperLink as its source: only `reply_to_message_id` tells
    which job failed.
    """
    reply = Message(Error(code, reason), reply_to=message)
    reply.metadata.__dict__["_src_node_id"] = SUPERLINK_NODE_ID
    return reply


def with_content(message: Message, content: RecordDict) -> Message:
    """Return a message with the same metadata, in an object of its own, and other content."""
    made = _shallow(message)
    made.__dict__.update(_metadata=_shallow(message.metadata), _content=content, _error=None)
    return made


def reply_with(message: Message, content: RecordDict) -> Message:
    """Return a reply as `Message(content, reply_to=message)` makes it, but for its times.

    Those a grid stamps on it anyway, and Flower's constructor takes four times as long.
    """
    reply, request = with_content(message, content), message.metadata
    reply.metadata.__dict__.update(
        _message_id="",
        _reply_to_message_id=request.message_id,
        _src_node_id=request.dst_node_id,
        _dst_node_id=request.src_node_id,
        _src_task_id=request.dst_task_id,
        _dst_task_id=request.src_task_id,
    )
    return reply


def own_copy(content: RecordDict) -> RecordDict:
    """Return records that a client may write to without changing what other clients receive.

    A strategy puts the same records into every message of a round. The bytes of the arrays are
    immutable and stay shared.
    """
    return filled(content, {name: _own_record(record) for name, record in content.items()})


def _own_record(record: Record) -> Record:
    entries = record.__dict__["_data"]
    if isinstance(record, ArrayRecord):
        return filled(record, {key: _shallow(array) for key, array in entries.items()})
    return filled(record, dict(entries))


def filled(like: Records, entries: dict[str, Any]) -> Records:
    """Return a record like another one, with entries that are known to be fine.

    Flower's own constructors check each entry, and take several times as long.
    """
    made = _shallow(like)
    made.__dict__["_data"] = entries
    return made


def _shallow(original: T) -> T:
    """Return another object with the same attributes."""
    own = object.__new__(type(original))
    own.__dict__.update(original.__dict__)
    return own
