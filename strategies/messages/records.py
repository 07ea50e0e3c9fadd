"""Quantised arrays in Flower's records, and what server and device say to one another about them.

A quantised array is a Flower `Array` with the dtype and shape of what it stands for; its `stype`
names the format, such as "fedstale.int4", and its bytes are those of `codec`. In a reply it is a
change of the array that was received, whatever the rest of the reply is; in a message it is the
array itself.

A server that uses formats says in the config of a message which format the reply is asked in, and
which reply of this node was the last to be accepted. It is no record of its own, since mods of
Flower's for privacy accept a single ConfigRecord. A device that understands it says so in its
reply, by the record `COMPACT_RECORD`, and nobody is sent quantised arrays before that.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedstale.errors import ProtocolError
from fedstale.strategies.messages.codec import FORMATS, decode, encode, is_quantised
from fedstale.strategies.types import Array, FormatName

COMPACT_RECORD = "fedstale.compact"
"""Name of the ConfigRecord by which a device says that it understands formats."""
ASKED = "fedstale.compact"
"""Key of what is asked, in the config of a message; others begin with it."""

_VERSION = 1
_UP, _ACCEPTED = f"{ASKED}.up", f"{ASKED}.accepted"
_STYPE = "fedstale."
_BY_STYPE: Mapping[str, FormatName] = {f"{_STYPE}{form}": form for form in FORMATS}


@dataclass(frozen=True, slots=True)
class Requested:
    """What a message asks of its reply."""

    up: FormatName | None = None
    """Format of the reply's arrays; None for in full."""
    accepted: str = ""
    """Id of the message behind the last reply of this node that was accepted; empty for none."""

    def within(self, config: ConfigRecord) -> ConfigRecord:
        """Return the config of a message with what is asked, as another record."""
        values: dict[str, Any] = {**config, ASKED: _VERSION, _UP: self.up or ""}
        return ConfigRecord(values | ({_ACCEPTED: self.accepted} if self.accepted else {}))

    @classmethod
    def of(cls, content: RecordDict) -> "Requested | None":
        """Read the request of a message; None where there is none that this release can fulfil."""
        names = _asking(content)
        record = content[names[0]] if names else None
        if not isinstance(record, ConfigRecord) or record.get(ASKED) != _VERSION:
            return None
        up, accepted = record.get(_UP), record.get(_ACCEPTED)
        form = next((form for form in FORMATS if form == up), None)
        if up and form is None:
            return None
        return cls(form, accepted if isinstance(accepted, str) else "")


def _asking(content: RecordDict) -> list[str]:
    """Return the names of the records that ask for a format."""
    return [k for k, r in content.items() if isinstance(r, ConfigRecord) and ASKED in r]


def without_asking(content: RecordDict) -> RecordDict:
    """Return the content of a message as it is without formats, in an object of its own."""
    made = RecordDict(dict(content))
    for name in _asking(content):
        kept = {k: v for k, v in content.config_records[name].items() if not k.startswith(ASKED)}
        made[name] = ConfigRecord(cast(Any, kept))
    return made


def stated() -> ConfigRecord:
    """Return the record by which a device says that it understands formats."""
    return ConfigRecord({"version": _VERSION})


def is_stated(content: RecordDict) -> bool:
    """Return whether the sender of a reply understands formats."""
    record = content.get(COMPACT_RECORD)
    return isinstance(record, ConfigRecord) and record.get("version") == _VERSION


def form_of(array: FlowerArray) -> FormatName | None:
    """Return the format of a stored array; None where it is none of ours."""
    return _BY_STYPE.get(array.stype)


def quantised(
    x: Array, form: FormatName, *, minus: Array | None = None, left: Array | None = None
) -> FlowerArray:
    """Return an array as Flower sends it; see `codec.encode`."""
    data = encode(x, form, minus=minus, left=left)
    return FlowerArray(str(x.dtype), x.shape, f"{_STYPE}{form}", data)


def full(array: FlowerArray) -> Array:
    """Return a quantised array in its own dtype.

    Raises:
        ProtocolError: it is none, or does not add up.
    """
    form, dtype = form_of(array), array.dtype
    if form is None or dtype not in ("float16", "float32", "float64"):
        raise ProtocolError(f"is stored as {array.stype[:40]!r} of {dtype[:40]!r}: no such format")
    shape = tuple(array.shape)
    return decode(array.data, form, shape, dtype).astype(dtype, copy=False)


def decoded(content: RecordDict) -> RecordDict:
    """Return a message's content with every quantised array in full.

    Raises:
        ProtocolError: one cannot be read.
    """
    if not has_quantised(content):
        return content
    records = {
        key: _full(record) if isinstance(record, ArrayRecord) else record
        for key, record in content.items()
    }
    return RecordDict(records)


def has_quantised(content: RecordDict) -> bool:
    """Return whether some array of a message is quantised."""
    records = [record for record in content.values() if isinstance(record, ArrayRecord)]
    return any([array.stype in _BY_STYPE for record in records for array in record.values()])


def formats_of(content: RecordDict) -> tuple[str, str]:
    """Return the formats of a message's arrays and of those that it asks for; empty for in full."""
    asked = Requested.of(content)
    if asked is None:
        return "", ""
    records = (record for record in content.values() if isinstance(record, ArrayRecord))
    forms = (form_of(array) for record in records for array in record.values())
    return next((form for form in forms if form), ""), asked.up or ""


def _full(record: ArrayRecord) -> ArrayRecord:
    arrays = {}
    for name, array in record.items():
        try:
            arrays[name] = FlowerArray(full(array)) if form_of(array) else array
        except ProtocolError as problem:
            raise ProtocolError(f"arrays[{name[:80]!r}] {problem}") from None
    return ArrayRecord(arrays)


def coarse(record: ArrayRecord, form: FormatName) -> ArrayRecord:
    """Return a model as it is sent in a format: its large arrays quantised to the nearest."""
    return ArrayRecord(
        {
            name: quantised(array.numpy(), form)
            if is_quantised(form, array.dtype, tuple(array.shape))
            else array
            for name, array in record.items()
        }
    )
