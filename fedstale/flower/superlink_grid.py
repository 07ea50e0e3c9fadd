"""Pulling replies from a SuperLink, each by itself.

A SuperLink shows that a reply exists before its arrays are there, and Flower's `pull_messages`
waits for them: one device on a slow link holds up all others. A `Reply` is claimed at once, and
fetched with Flower's own code when its last object has come.

Up to Flower 1.42 a SuperLink answers in the place of a node that has gone offline, and of a message
that has expired. From 1.43 on it says nothing, and `Silence` gives the same answers.
"""

import copy
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, TypeGuard

from flwr.app import DEFAULT_TTL, Error, Message, Metadata
from flwr.serverapp import Grid

from fedstale.errors import quoted
from fedstale.flower.features import has
from fedstale.flower.messages import SUPERLINK_NODE_ID, ErrorCode, message_of

if TYPE_CHECKING:
    from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
    from flwr.superlink.grid import HttpGrid

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 5.0
"""Between two questions for who is online, in s; a SuperLink itself notices after 30 to 60."""
PIECE = b"ArrayChunk "
"""How an object begins that is a piece of an array."""
_ENVELOPE = 600
"""Bytes of each object of a reply that count for nothing: more than names and ids take."""
_MOST_REPEATED = 4e9
"""Bytes of a reply's arrays where nothing limits those that come: a chunk may be in them often."""
_GONE = "Error: Node Unavailable - the node went offline before its reply came"
_EXPIRED = "Error: Message Unavailable - the message expired before its reply came"


def is_of_a_superlink(grid: Grid) -> "TypeGuard[HttpGrid]":
    """Test if a grid is that of a ServerApp process, with replies that can be fetched so."""
    # Importing it takes a second, and whoever has made one has imported it.
    module = sys.modules.get("flwr.superlink.grid.http_grid")
    return module is not None and isinstance(grid, module.HttpGrid) and has("single replies")


def lifetime_s(message: Metadata) -> float:
    """Return for how long a SuperLink waits for the reply to a message, in s."""
    return min(message.ttl or DEFAULT_TTL, DEFAULT_TTL)


class _NotYetThereError(Exception):
    """An object of a reply has not been uploaded yet."""


class _TooLargeError(Exception):
    """A reply is larger than what is taken in."""


@dataclass(slots=True)
class Reply:
    """A reply that is known to exist, and that only this process can fetch from now on."""

    job: str
    """Id of the message that it answers."""
    claim: "PullAppMessagesResponse"
    """The SuperLink's answer, cut down to this reply."""
    look_at: float = 0.0
    """Instant in s of the next look."""
    first_look_at: float = inf
    """Instant in s of the first one."""
    busy: bool = False
    """Whether a worker is at it."""

    @staticmethod
    def claims(grid: "HttpGrid", jobs: Iterable[str]) -> "list[Reply]":
        """Return the replies that exist to some messages, whether uploaded or not.

        Ask once for each: up to Flower 1.42 the answer to a second question is an error.
        """
        from flwr.proto.runtime_pb2 import PullAppMessagesResponse

        answer = grid._runtime_client.PullMessages(_question(jobs))
        return [
            Reply(
                job=proto.metadata.reply_to_message_id,
                claim=PullAppMessagesResponse(messages_list=[proto], message_object_trees=[tree]),
            )
            for proto, tree in zip(answer.messages_list, answer.message_object_trees, strict=True)
        ]

    def fetch(self, grid: "HttpGrid", most_bytes: float = inf) -> Message | None:
        """Return the reply, or None if some of it has not arrived.

        Devices upload the root of a reply last, so mostly one small request finds out. One whose
        upload broke off, that cannot be read, or is no answer of this node to this job, becomes an
        error reply; so does one of more than twice the bytes, as soon as so many have come.
        """
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest

        client = _Answered(grid._runtime_client, self.claim, 2 * most_bytes)
        root = self.claim.message_object_trees[0].object_id
        about = self.claim.messages_list[0].metadata
        try:
            request = PullObjectRequest(node=grid.node, run_id=grid.run.run_id, object_id=root)
            client.gone = not client.PullObject(request).object_found
            # Flower's own code checks, confirms and inflates: with its answers given, in one go.
            twin = copy.copy(grid)
            twin._client = client  # type: ignore[assignment]
            found = list(twin.pull_messages([self.job]))
        except _NotYetThereError:
            return None
        except _TooLargeError as problem:
            if not client.has_all:
                done = ConfirmMessageReceivedRequest(node=grid.node, run_id=grid.run.run_id)
                done.message_object_id = root
                grid._runtime_client.ConfirmMessageReceived(done)
            return self._unreadable(str(problem))
        except Exception as problem:
            # Flower confirms what it has, and then reads what a device wrote, which may raise
            # anything. What is raised before is about the connection.
            if not client.has_all:
                raise
            return self._unreadable(quoted(f"{type(problem).__name__}: {problem}"))
        if not found:
            # Flower 1.43 only logs that it broke off, and every Flower that it is too large.
            return self._error("the reply is unavailable: its upload broke off, or it is too large")
        (reply,) = found
        source = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
        if client.has_all and source != (self.job, about.src_node_id):
            return self._unreadable("it is an answer to another message")
        return reply

    def _unreadable(self, why: str) -> Message:
        """Return an error reply in place of one that a device made up."""
        node = self.claim.messages_list[0].metadata.src_node_id
        logger.warning("node %d: its reply cannot be read: %s", node, why)
        return self._error(f"the reply cannot be read: {why}")

    def _error(self, reason: str) -> Message:
        about = self.claim.messages_list[0].metadata
        error = Error(ErrorCode.MESSAGE_UNAVAILABLE, reason)
        return _error_reply(about, self.job, about.src_node_id, error)


@dataclass(slots=True)
class Objects:
    """Objects of messages, as Flower's API carries them, and the bytes of arrays in each."""

    read: Callable[[str], bytes] = field(default=lambda object_id: b"")
    """Reads an object that was not noted."""
    _known: dict[str, float | bytes] = field(default_factory=dict)
    """The bytes of arrays in an object, or the object until they are asked for."""

    def note(self, object_id: str, content: bytes) -> None:
        """Note an object of a message."""
        self._known[object_id] = len(content) if content.startswith(PIECE) else content

    def size(self, object_id: str) -> float:
        """Return the bytes of arrays in an object, each as often as it is named there.

        Flower sends equal arrays, and equal pieces of one as of zeros, only once. Infinity of an
        object that names its parts in a way which is not known.
        """
        try:
            if object_id not in self._known:
                self.note(object_id, self.read(object_id))
            found = self._known[object_id]
            if isinstance(found, bytes):
                found = sum(map(self.size, _parts_of(found)))
        except (AttributeError, LookupError, TypeError, ValueError):
            found = inf
        self._known[object_id] = found
        return found


def _parts_of(content: bytes) -> list[str]:
    r"""Return the ids of the objects that an object of a message names, as often as it does.

    Raises:
        AttributeError, LookupError, TypeError, ValueError: it names them in another way.

    Example:
        >>> _parts_of(b'Array a,b 34\0{"arraychunk_ids": [0, 1, 1]}')
        ['a', 'b', 'b']
    """
    head, _, body = content.partition(b"\0")
    kind, ids = head.decode().split(" ")[:2] if b" " in head else ("", "")
    if kind == "Message":
        return [ids] if ids else []
    if kind == "Array":
        chunks = ids.split(",")
        return [chunks[place] for place in json.loads(body)["arraychunk_ids"]]
    return list(json.loads(body).values()) if kind in {"RecordDict", "ArrayRecord"} else []


class _Answered:
    """A client of the Runtime API that has its answer on messages, and never waits for objects."""

    def __init__(self, client: Any, claim: Any, most_bytes: float) -> None:
        self._client, self._claim, self._most_bytes = client, claim, most_bytes
        self._lock, self._n_bytes = threading.Lock(), 0
        self._objects = Objects(read=dict[str, bytes]().__getitem__)
        self.gone = False
        """Whether the upload was broken off; objects that others still upload do not matter."""
        self.has_all = False
        """Whether all objects of the reply have been pulled."""

    def PullMessages(self, request: "PullAppMessagesRequest") -> "PullAppMessagesResponse":  # noqa: N802
        """Return the SuperLink's earlier answer."""
        return self._claim

    def PullObject(self, request: "PullObjectRequest") -> "PullObjectResponse":  # noqa: N802
        """Return an object, or raise if it will come later."""
        from flwr.proto.message_pb2 import PullObjectResponse

        if self.gone:
            return PullObjectResponse(object_found=False)
        answer: PullObjectResponse = self._client.PullObject(request)
        if answer.object_found and not answer.object_available:
            raise _NotYetThereError
        content = answer.object_content
        with self._lock:
            self._objects.note(request.object_id, content)
            self._n_bytes += max(len(content) - _ENVELOPE, 0)
        self._check(self._n_bytes, self._most_bytes)
        return answer

    @staticmethod
    def _check(n_bytes: float, most_bytes: float) -> None:
        """Raise if a reply has more bytes than are taken in."""
        if n_bytes > most_bytes:
            raise _TooLargeError(f"it has {n_bytes:,.0f} bytes or more: at most {most_bytes:,.0f}")

    def ConfirmMessageReceived(self, request: object) -> object:  # noqa: N802
        """Confirm the reply, so that the SuperLink forgets it."""
        answer: object = self._client.ConfirmMessageReceived(request)
        self.has_all = True
        most = self._most_bytes if self._most_bytes < inf else _MOST_REPEATED
        n_bytes = self._objects.size(self._claim.message_object_trees[0].object_id)
        self._check(n_bytes, max(most, self._n_bytes))
        return answer


def _names_replies() -> bool:
    """Return whether PullMessages takes `reply_to_message_ids`, as from Flower 1.43 on.

    From the same release on a SuperLink leaves messages unanswered for good.
    """
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest

    return "reply_to_message_ids" in PullAppMessagesRequest.DESCRIPTOR.fields_by_name


def _question(jobs: Iterable[str]) -> "PullAppMessagesRequest":
    """Return the question for the replies to some messages."""
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest

    if not _names_replies():
        return PullAppMessagesRequest(message_ids=jobs)
    request = PullAppMessagesRequest()
    request.reply_to_message_ids.vals.extend(jobs)
    # Without any it would otherwise count as left out, and ask for all.
    request.reply_to_message_ids.SetInParent()
    return request


@dataclass(slots=True)
class _Sent:
    """A message that has no reply."""

    about: Metadata
    at: float
    """Instant in s."""

    def is_over(self, now: float) -> bool:
        """Return whether it has expired."""
        return now >= self.at + lifetime_s(self.about)


class Silence:
    """Error replies in the SuperLink's place, where that leaves a message unanswered for good."""

    def __init__(self, grid: "HttpGrid") -> None:
        """Know of no message yet; never ask a SuperLink that answers itself."""
        self._grid, self._is_needed = grid, _names_replies()
        self._sent: dict[str, _Sent] = {}
        self._online: set[int] = set()
        self._looked_at = -inf

    def sent(self, message_id: str, message: Message, now: float) -> None:
        """Note a message, but not its content.

        Args:
            message_id: as the SuperLink has it.
            message: to a node that was online.
            now: instant in s.
        """
        if self._is_needed:
            self._sent[message_id] = _Sent(message.metadata, now)

    def answered(self, message_ids: Iterable[str]) -> None:
        """Forget messages to which a reply exists."""
        for message_id in message_ids:
            self._sent.pop(message_id, None)

    def errors(self, message_ids: Iterable[str], now: float) -> list[Message]:
        """Return error replies to those of some messages that nobody will answer.

        Args:
            message_ids: to which no reply exists.
            now: instant in s.
        """
        if not self._sent:
            return []
        looks = now >= self._looked_at + _LOOK_EVERY_S
        if looks:
            self._online, self._looked_at = set(self._grid.get_node_ids()), now
        errors = []
        for message_id in message_ids:
            sent = self._sent.get(message_id)
            if sent is not None and (error := self._error(sent, now)) is not None:
                errors.append(_error_reply(sent.about, message_id, SUPERLINK_NODE_ID, error))
                del self._sent[message_id]
        if looks:
            # Nobody asks for the reply to a job that was cancelled.
            kept = {key: sent for key, sent in self._sent.items() if not sent.is_over(now)}
            self._sent = kept
        return errors

    def _error(self, sent: _Sent, now: float) -> Error | None:
        if sent.is_over(now):
            return Error(ErrorCode.MESSAGE_UNAVAILABLE, _EXPIRED)
        if sent.about.dst_node_id not in self._online and self._looked_at > sent.at:
            return Error(ErrorCode.NODE_UNAVAILABLE, _GONE)
        return None


def _error_reply(about: Any, message_id: str, source: int, error: Error) -> Message:
    """Return an error as the reply to a message.

    Args:
        about: metadata of the message or of another reply to it, as an object or as protobuf.
        message_id: of the message.
        source: node that the error is from.
        error: what went wrong.
    """
    metadata = Metadata(
        run_id=about.run_id,
        message_id="",
        src_node_id=source,
        dst_node_id=SUPERLINK_NODE_ID,
        message_type=about.message_type,
        group_id=about.group_id,
        ttl=0.0,
        reply_to_message_id=message_id,
        created_at=about.created_at,
    )
    return message_of(metadata, error=error)
