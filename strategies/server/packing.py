"""One object a message: all arrays of a message as one, on the way between server and device.

Flower sends each array as two objects or more, and each object has calls of its own on four legs.
A packed message holds the bytes of the same arrays in one flat array of uint8, one after the other;
a ConfigRecord says which is which, with their dtypes, shapes and formats, as a message says them
without. What is unpacked is what was packed, bit for bit, so strategies and ClientApps see no
difference; whoever reads an array checks it, packed or not.

Who can unpack says so in its messages, and nobody is sent a packed message before that. A device
says so by a mod (`fedstale.client.PackMod`), a server by the packed message itself.
"""

import io
import logging
import re
import zlib
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice, pairwise
from math import inf
from typing import TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

from fedstale.errors import ProtocolError, quoted
from fedstale.flower import STYPE, ErrorCode, message_of
from fedstale.strategies.server.checks import sizes_of

PACKING_RECORD = "fedstale.packing"
"""Name of the ConfigRecord by which a message says that its sender can unpack."""
PACKED_RECORD = "fedstale.packed"
"""Name of the ArrayRecord that holds one array in place of all others."""
MOST_ARRAYS = 10_000
"""Arrays of a packed message at most; one that has more goes as it is."""

_VERSION = 2
_FLAT = "flat"
# A SuperLink's gate takes records of 1 MB.
_MOST_TEXT = 500_000
_FORM = re.compile(r"((?:[0-9]{1,18},){0,64});([^;]*);([^;]*)", re.DOTALL | re.ASCII)
"""Shape, dtype and format of an array."""

T = TypeVar("T", str, int)

logger = logging.getLogger(__name__)


def pack(content: RecordDict) -> RecordDict:
    """Return a message's content with all its arrays as one, and what `can_unpack` reads.

    The content itself stays as it is. Its arrays go into the result as they are where packing
    would save nothing (fewer than two arrays), where there are more than `MOST_ARRAYS` or the names
    are too long, and where a record has the name of packing itself.

    Example:
        >>> arrays = ArrayRecord({"w": Array(np.ones(3)), "b": Array(np.zeros(()))})
        >>> content = RecordDict({"arrays": arrays, "config": ConfigRecord({"lr": 0.1})})
        >>> packed = pack(content)
        >>> sorted(packed)
        ['config', 'fedstale.packed', 'fedstale.packing']
        >>> unpack(packed) == content
        True
    """
    records = {name: r for name, r in content.items() if isinstance(r, ArrayRecord)}
    about = _described(records)
    n_text = sum(len(text) for texts in about.values() for text in texts)
    fits = 2 <= len(about["names"]) <= MOST_ARRAYS and n_text <= _MOST_TEXT
    if PACKED_RECORD in content or not fits or not all(map(_FORM.fullmatch, about["forms"])):
        return advertised(content)
    return _with(content, *_packed(records, about))


def unpack(content: RecordDict) -> RecordDict:
    """Return a message's content as it was before `pack`; ArrayRecords come first.

    What was never packed is returned as it is. Nothing is allocated beyond what has arrived.

    Raises:
        ProtocolError: it cannot have been made by `pack`, or was changed after that.
    """
    if not can_unpack(content):
        return content
    about = content.config_records[PACKING_RECORD]
    if about.get("version") != _VERSION:
        raise ProtocolError(f"version of packing: expected {_VERSION}")
    rest = {k: r for k, r in content.items() if k not in (PACKING_RECORD, PACKED_RECORD)}
    if PACKED_RECORD not in content:
        return RecordDict(rest)
    records, counts = _listed(about, "records", str), _listed(about, "counts", int)
    names, sizes = _listed(about, "names", str), _listed(about, "sizes", int)
    forms = _listed(about, "forms", str)
    n = len(names)
    if len(records) != len(counts) or (sum(counts), len(sizes), len(forms)) != (n, n, n):
        raise ProtocolError(
            f"packed arrays do not add up: {len(records)} records with {len(counts)} counts, "
            f"{n} names, {len(sizes)} sizes and {len(forms)} forms"
        )
    if len(set(records)) != len(records) or set(records) & set(rest):
        raise ProtocolError("packed arrays: a record is there twice")
    arrays = map(_array, forms, _pieces(content, about, sizes))
    named = zip(names, arrays, strict=True)
    found = {record: dict(islice(named, k)) for record, k in zip(records, counts, strict=True)}
    if sum(map(len, found.values())) != len(names):
        raise ProtocolError("packed arrays: a name is twice in a record")
    return RecordDict({**{name: ArrayRecord(each) for name, each in found.items()}, **rest})


def can_unpack(content: RecordDict) -> bool:
    """Return whether the sender of a message can unpack."""
    # Requested of every message; Flower's own view of the config records takes fifty times as long.
    return PACKING_RECORD in content and isinstance(content[PACKING_RECORD], ConfigRecord)


def advertised(content: RecordDict) -> RecordDict:
    """Return a message's content as it is, with the statement that its sender can unpack."""
    return _with(content, None, ConfigRecord({"version": _VERSION}))


class PackedNodes:
    """The nodes of a run that can unpack, as their replies have said; packs what they are sent."""

    def __init__(self) -> None:
        """Know no node."""
        self._nodes: set[int] = set()

    def packed(self, messages: Iterable[Message]) -> list[Message]:
        """Return messages as they travel: those to nodes that can unpack are packed.

        Metadata are those of the messages themselves, which stay as they are.
        """
        # Messages of one version share its arrays.
        made: dict[tuple[int, ...], tuple[ArrayRecord | None, ConfigRecord]] = {}
        return [
            self._packed(message, made)
            if message.metadata.dst_node_id in self._nodes and message.has_content()
            else message
            for message in messages
        ]

    def _packed(
        self,
        message: Message,
        made: dict[tuple[int, ...], tuple[ArrayRecord | None, ConfigRecord]],
    ) -> Message:
        arrays = message.content.array_records
        key = tuple(hash(name) for name in arrays) + tuple(map(id, arrays.values()))
        if key in made:
            return message_of(message.metadata, _with(message.content, *made[key]))
        content = pack(message.content)
        made[key] = content.array_records.get(PACKED_RECORD), content.config_records[PACKING_RECORD]
        return message_of(message.metadata, content)

    def unpacked(self, reply: Message, most_bytes: float = inf) -> Message:
        """Return a reply as the device made it, and note whether the device can unpack.

        One that cannot be unpacked is an error reply, and a line in the log with its node.

        Args:
            reply: to any kind of message.
            most_bytes: of what is unpacked, and of what packing says of it; a reply of more is
                returned as it is, and validation, which has the same limit, rejects it.
        """
        if not reply.has_content() or not can_unpack(reply.content):
            return reply
        node = reply.metadata.src_node_id
        self._nodes.add(node)
        content = dict(reply.content)
        about: dict[str, object] = {PACKING_RECORD: content.pop(PACKING_RECORD)}
        if max(sizes_of(about)[0], sizes_of(content)[0]) > most_bytes:
            return reply
        try:
            return message_of(reply.metadata, unpack(reply.content))
        except ProtocolError as problem:
            reason = f"the reply cannot be unpacked: {quoted(problem)}"
            logger.warning("node %d: %s", node, reason)
            return message_of(
                reply.metadata, error=Error(ErrorCode.MOD_FAILED_PRECONDITION, reason)
            )


def _described(records: dict[str, ArrayRecord]) -> dict[str, list[str]]:
    """Return the names of records and arrays, and what each array is besides its bytes."""
    arrays = [array for record in records.values() for array in record.values()]
    return {
        "records": list(records),
        "names": [name for record in records.values() for name in record],
        "forms": [
            f"{''.join(f'{n},' for n in array.shape)};{array.dtype};{array.stype}"
            for array in arrays
        ],
    }


def _packed(
    records: dict[str, ArrayRecord], about: dict[str, list[str]]
) -> tuple[ArrayRecord, ConfigRecord]:
    arrays = [array for record in records.values() for array in record.values()]
    sizes = [len(array.data) for array in arrays]
    data = b"".join([_header(sum(sizes)), *(array.data for array in arrays)])
    flat = Array("uint8", (sum(sizes),), STYPE, data)
    made = ConfigRecord({"version": _VERSION, "sizes": sizes, "checksum": zlib.crc32(data)})
    made["counts"] = [len(record) for record in records.values()]
    made.update(about)
    return ArrayRecord({_FLAT: flat}), made


def _with(content: RecordDict, packed: ArrayRecord | None, about: ConfigRecord) -> RecordDict:
    """Return content with what was packed in the place of its arrays, if something was."""
    rest = {
        name: record
        for name, record in content.items()
        if name != PACKING_RECORD and (packed is None or not isinstance(record, ArrayRecord))
    }
    first = {} if packed is None else {PACKED_RECORD: packed}
    return RecordDict({**first, **rest, PACKING_RECORD: about})


def _header(n: int) -> bytes:
    """Return how numpy's file of n bytes begins."""
    file = io.BytesIO()
    about = {"descr": "|u1", "fortran_order": False, "shape": (n,)}
    np.lib.format.write_array_header_1_0(file, about)
    return file.getvalue()


def _listed(about: ConfigRecord, key: str, kind: type[T]) -> Sequence[T]:
    value = about.get(key)
    found = [each for each in value if type(each) is kind] if isinstance(value, list) else None
    if found is None or found != value:
        raise ProtocolError(f"packed arrays: {key}: expected a list of {kind.__name__}")
    if len(found) > MOST_ARRAYS:
        raise ProtocolError(f"packed arrays: {len(found)} {key}: expected at most {MOST_ARRAYS}")
    if any(isinstance(each, int) and each < 0 for each in found):
        raise ProtocolError(f"packed arrays: {key}: expected numbers >= 0")
    return found


def _pieces(content: RecordDict, about: ConfigRecord, sizes: Sequence[int]) -> Iterable[bytes]:
    """Return the bytes of each array."""
    record = content.array_records.get(PACKED_RECORD, ArrayRecord())
    flat = record.get(_FLAT)
    n = sum(sizes)
    if flat is None or (flat.dtype, tuple(flat.shape), flat.stype) != ("uint8", (n,), STYPE):
        raise ProtocolError(f"packed arrays: expected one array of {n} uint8; {_CHANGED}")
    header = _header(n)
    data = memoryview(flat.data)
    if len(data) != len(header) + n or data[: len(header)] != header:
        raise ProtocolError(f"packed arrays: expected {n} bytes behind a header of uint8")
    if zlib.crc32(data) != about.get("checksum"):
        raise ProtocolError(f"packed arrays: their checksum is another; {_CHANGED}")
    ends = accumulate(sizes, initial=len(header))
    return (bytes(data[start:end]) for start, end in pairwise(ends))


_CHANGED = "if a mod has changed them, PackMod or ForecastMod must come before it"


def _array(form: str, data: bytes) -> Array:
    found = _FORM.fullmatch(form)
    if found is None:
        raise ProtocolError(f"packed arrays: {form[:80]!r} is no shape, dtype and format")
    return Array(found[2], tuple(map(int, found[1].split(",")[:-1])), found[3], data)
