"""Flower's messages, records and arrays from the inside, for grids and clients of one process.

`Message(...)` reads a process-wide identity that has no public setter, and a message's id can only
be given by writing its metadata. What stands on the wire is here as numbers and words. All of it
was read in Flower 1.34 to 1.43. Up to 1.37 there is no such identity: a message has no run and no
sender before its grid sends it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import flwr
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    Metadata,
    MetricRecord,
    RecordDict,
)

from fedstale.errors import ConfigError, quoted
from fedstale.flower.arrays import n_value_bytes
from fedstale.flower.features import FEATURES

if TYPE_CHECKING:
    from flwr.supercore import run

    Run: TypeAlias = run.Run
else:
    Run = Any

SUPERLINK_NODE_ID = 1
"""Node id of a ServerApp, and of the SuperLink where that answers in a node's place."""

_ENDS = ("_src_node_id", "_dst_node_id"), ("_src_task_id", "_dst_task_id")
# On the wire an array travels with its name, dtype and shape, and each record with a type and ids.
_ARRAY_OVERHEAD = 160
_RECORD_OVERHEAD = 120
_MESSAGE_OVERHEAD = 300
_NUMBER_BYTES = 8
SECAGG_RECORD = "secaggplus_configs"
"""Record of a message that is a stage of SecAgg+."""
_SECAGG_STAGES = ("setup", "share_keys", "unmask")
"""The stages of SecAgg+ in which a client does not train; "collect_masked_vectors" is left."""

Record = ArrayRecord | MetricRecord | ConfigRecord
Records = TypeVar("Records", bound=RecordDict | Record)

ClientAppCallable: TypeAlias = Callable[[Message, Context], Message]
"""What answers a message to a client: the app, or a mod with all that is in it."""
Mod: TypeAlias = Callable[[Message, Context, ClientAppCallable], Message]
"""What stands around that."""


class Size(NamedTuple):
    """Bytes of a message on the wire."""

    fixed: int
    """Envelope, names, shapes, numbers and texts."""
    values: int
    """Values of arrays, and bytes in config records: what grows with the model."""


class ErrorCode:
    """What an error reply is about, as a number on the wire."""

    CLIENT_APP_RAISED_EXCEPTION = 2
    MESSAGE_UNAVAILABLE = 3
    REPLY_MESSAGE_UNAVAILABLE = 4
    NODE_UNAVAILABLE = 5
    MOD_FAILED_PRECONDITION = 6
    CLIENT_APP_CRASHED = 8


class _Identity:
    """In the place of Flower's `TaskIdentity`, where a message asks for none."""

    _run_id = _node_id = _task_id = None


def _identity() -> Any:
    """Return the class that holds the identity under which this process makes messages."""
    return vars(Message)["__init__"].__globals__.get("TaskIdentity", _Identity)


@contextmanager
def identity(run_id: int) -> Iterator[None]:
    """Create messages of a run inside, as a ServerApp process would.

    Raises:
        ConfigError: the messages of this Flower ask for something else.
    """
    ours = _identity()
    before = ours._run_id, ours._node_id, ours._task_id
    ours._run_id, ours._node_id, ours._task_id = run_id, SUPERLINK_NODE_ID, 1
    try:
        _try_message()
        yield
    finally:
        ours._run_id, ours._node_id, ours._task_id = before


@cache
def _try_message() -> None:
    try:
        Message(RecordDict(), SUPERLINK_NODE_ID, MessageType.TRAIN)
    except Exception as problem:
        raise ConfigError(
            f"simulation: Flower {flwr.__version__} makes no message ({problem}): nothing can be "
            f"simulated; {FEATURES[0].expected()}"
        ) from problem


def empty_run(run_id: int) -> Run:
    """Return a grid's record of its run, with nothing in it but the id."""
    from flwr.supercore import run

    return run.Run.create_empty(run_id)


def asked_ids(
    reply_to_message_ids: Iterable[str] | None, message_ids: Iterable[str] | None
) -> Iterable[str] | None:
    """Return the ids that `Grid.pull_messages` was given; None if none, which asks for all.

    Args:
        reply_to_message_ids: the argument's name from Flower 1.43 on.
        message_ids: its name up to Flower 1.42.

    Raises:
        TypeError: both were given.
    """
    if reply_to_message_ids is not None and message_ids is not None:
        raise TypeError("give reply_to_message_ids or message_ids, not both: they are the same")
    return message_ids if reply_to_message_ids is None else reply_to_message_ids


def stamp(message: Message, message_id: str, created_at: float, ttl: float | None = None) -> None:
    """Give a message its id and its times, and a run and a sender if it has none.

    Args:
        message: to be sent, where there is an `identity`.
        message_id: its id.
        created_at: Unix time in s.
        ttl: for how long it is kept, in s; None leaves that to the message.
    """
    about = message.__dict__["_metadata"].__dict__
    about["_message_id"], about["_created_at"] = message_id, created_at
    if not about["_src_node_id"]:
        about["_run_id"], about["_src_node_id"] = _identity()._run_id, SUPERLINK_NODE_ID
    if ttl is not None:
        about["_ttl"] = ttl


def stamp_reply(reply: Message, message: Message, message_id: str, created_at: float) -> None:
    """Give a reply its id and its time; it is kept for as long as the message would have been."""
    sent, about = message.__dict__["_metadata"].__dict__, reply.__dict__["_metadata"].__dict__
    about["_message_id"], about["_created_at"] = message_id, created_at
    about["_ttl"] = sent["_created_at"] + sent["_ttl"] - created_at


def sent_to(message: Message) -> tuple[int, str, str, float, RecordDict]:
    """Return receiver, type, group, ttl in s and content of a message that is sent."""
    held = message.__dict__
    about = held["_metadata"].__dict__
    kind, content = about["_message_type"], held["_content"]
    return about["_dst_node_id"], kind, about["_group_id"], about["_ttl"], content


def error_reply(message: Message, code: int, reason: str) -> Message:
    """Return the reply that the SuperLink writes in a node's place.

    Like the SuperLink's, it names the SuperLink as its source: only `reply_to_message_id` tells
    which job failed.
    """
    reply = Message(Error(code, reason), reply_to=message)
    reply.metadata.__dict__["_src_node_id"] = SUPERLINK_NODE_ID
    return reply


def quote_error(reply: Message) -> Message:
    """Cut and quote the text of a reply that is an error, as it enters the server."""
    held = reply.__dict__
    if (error := held["_error"]) is not None:
        held["_error"] = Error(error.code, quoted(error.reason or ""))
    return reply


def received(reply: Message, message: Message) -> Message:
    """Return a client's reply to a message as it enters a server; see `quote_error`."""
    answered = reply.__dict__["_metadata"].__dict__["_reply_to_message_id"]
    if answered != message.__dict__["_metadata"].__dict__["_message_id"]:
        text = "the ClientApp answered another message than the one it was given"
        return error_reply(message, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, text)
    return reply if reply.__dict__["_error"] is None else quote_error(reply)


def message_of(
    metadata: Metadata, content: RecordDict | None = None, error: Error | None = None
) -> Message:
    """Return a message with some metadata, and with content or an error."""
    # Documented by no overload.
    return Message(metadata=metadata, content=content, error=error)  # type: ignore[call-overload]


def with_content(message: Message, content: RecordDict) -> Message:
    """Return a message with the same metadata, in an object of its own, and other content."""
    made, about = object.__new__(Message), object.__new__(Metadata)
    about.__dict__ = message.__dict__["_metadata"].__dict__.copy()
    made.__dict__ = message.__dict__ | {"_metadata": about, "_content": content, "_error": None}
    return made


def reply_with(message: Message, content: RecordDict) -> Message:
    """Return a reply as `Message(content, reply_to=message)` makes it, but for its times.

    Those a grid stamps on it anyway, and Flower's constructor takes four times as long.
    """
    reply = with_content(message, content)
    about = reply.__dict__["_metadata"].__dict__
    about["_message_id"], about["_reply_to_message_id"] = "", about["_message_id"]
    for source, target in _ENDS:
        about[source], about[target] = about[target], about[source]
    return reply


def bytes_of_message(message: Message) -> bytes:
    """Return a message in Flower's format of the wire."""
    from flwr.common.serde import message_to_proto

    return message_to_proto(message).SerializeToString()


def message_of_bytes(data: bytes) -> Message:
    """Restore a message from the bytes of `bytes_of_message`."""
    from flwr.common.serde import message_from_proto
    from flwr.proto.message_pb2 import Message as ProtoMessage

    return message_from_proto(ProtoMessage.FromString(data))


def bytes_of_records(content: RecordDict) -> bytes:
    """Return the records of a message in Flower's format of the wire."""
    from flwr.common.serde import recorddict_to_proto

    return recorddict_to_proto(content).SerializeToString()


def records_of_bytes(data: bytes) -> RecordDict:
    """Restore records from the bytes of `bytes_of_records`."""
    from flwr.common.serde import recorddict_from_proto
    from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

    return recorddict_from_proto(ProtoRecordDict.FromString(data))


def trains_nothing(content: RecordDict) -> bool:
    """Test whether a message is a stage of SecAgg+ without training."""
    configs = entries(content).get(SECAGG_RECORD)
    return isinstance(configs, ConfigRecord) and configs.get("stage") in _SECAGG_STAGES


def own_message(message: Message) -> Message:
    """Return a message whose records its receiver may write to; see `own_copy`."""
    return with_content(message, own_copy(message.__dict__["_content"]))


def own_messages(messages: Iterable[Message]) -> list[Message]:
    """Return messages as they are now, whatever their sender then writes to their records.

    Those with the same records share a copy of them.
    """
    copies: dict[int, RecordDict] = {}
    own = []
    for message in messages:
        content = message.__dict__["_content"]
        if id(content) not in copies:
            copies[id(content)] = own_copy(content)
        own.append(with_content(message, copies[id(content)]))
    return own


def own_copy(content: RecordDict, *, arrays: bool = True) -> RecordDict:
    """Return records that one may write to without changing what others send, receive or keep.

    A strategy puts the same records into every message of a round. The bytes of the arrays are
    immutable and stay shared.

    Args:
        content: the records.
        arrays: whether the objects that hold an array's bytes are copied too.
    """
    # Without a function for each object: this is done for each job.
    new = object.__new__
    own: dict[str, Any] = {}
    for name, record in entries(content).items():
        held = entries(record).copy()
        own[name] = made = new(type(record))
        made.__dict__ = record.__dict__ | {"_data": held}
        if not isinstance(record, ArrayRecord):
            for key, value in held.items():
                if isinstance(value, list):
                    held[key] = value.copy()
        elif arrays:
            for key, array in held.items():
                held[key] = twin = new(type(array))
                # An array looks at each attribute that is set.
                twin.__dict__.update(array.__dict__)
    whole = new(RecordDict)
    whole.__dict__ = content.__dict__ | {"_data": own}
    return whole


def size_of(message: Message) -> Size:
    """Measure a message or reply; an error is as long as its reason."""
    if message.has_error():
        return Size(_MESSAGE_OVERHEAD + len((message.error.reason or "").encode()), 0)
    return content_size(message.content)


def content_bytes(content: RecordDict) -> int:
    """Measure a message with this content on the wire, in bytes."""
    return sum(content_size(content))


def content_size(content: RecordDict) -> Size:
    """Measure a message with this content on the wire, apart what grows with the model.

    Array data and bytes are counted exactly; names, shapes and envelopes by their typical size.
    Tests hold the sum for small models within 3% of Flower's own serialisation of all arrays
    packed as one, and within 15% of each apart. Of the bytes of SecAgg+, only masked models are
    values: keys and shares do not grow with a model.
    """
    fixed, values = _MESSAGE_OVERHEAD, 0
    for key, record in entries(content).items():
        fixed += _RECORD_OVERHEAD
        if isinstance(record, ArrayRecord):
            for name, array in entries(record).items():
                n = n_value_bytes(array)
                values += n
                fixed += len(array.data) - n + len(name) + _ARRAY_OVERHEAD
            continue
        for name, value in entries(record).items():
            if type(value) is float or type(value) is int:
                # Most are, and a call would take longer than the rest.
                fixed += len(name) + 8 + _NUMBER_BYTES
                continue
            total, n = _value_bytes(value)
            if key == SECAGG_RECORD and name != "masked_params":
                # Keys and shares do not grow with the model.
                n = 0
            values += n
            fixed += len(name) + 8 + total - n
    return Size(fixed, values)


def _value_bytes(value: object) -> tuple[int, int]:
    """Measure a value, and how many of its bytes are of the type bytes."""
    if isinstance(value, bytes):
        return len(value), len(value)
    if isinstance(value, str):
        return len(value), 0
    if isinstance(value, list):
        if value and isinstance(value[0], int | float):
            # The values of a list are of one type.
            return _NUMBER_BYTES * len(value), 0
        each = [_value_bytes(v) for v in value]
        return sum(total for total, _ in each), sum(n for _, n in each)
    return _NUMBER_BYTES, 0


def round_of(message: Message) -> int:
    """Read the round that a strategy wrote into a message; -1 for none."""
    group_id = message.metadata.group_id
    return int(group_id) if group_id.isdecimal() else round_and_share_in(message.content)[0]


def round_and_share_in(content: RecordDict) -> tuple[int, bool]:
    """Read the round that a strategy wrote into a message, or -1, and if stages ask for more."""
    number, asks = -1, False
    for record in entries(content).values():
        if not isinstance(record, ConfigRecord):
            continue
        said = entries(record)
        if number < 0 and isinstance(said.get("server-round"), int):
            number = int(said["server-round"])
        for key in said:
            asks = asks or key.startswith("fedstale.")
    return number, asks


entries: Callable[[RecordDict | Record], dict[str, Any]] = attrgetter("_data")
"""Returns what a record holds; its own `items` and `get` take several times as long."""


def filled(like: Records, held: dict[str, Any]) -> Records:
    """Return a record like another one, with entries that are known to be fine.

    Flower's own constructors check each entry, and take several times as long.
    """
    made = object.__new__(type(like))
    made.__dict__ = like.__dict__ | {"_data": held}
    return made
