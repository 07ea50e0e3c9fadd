"""Messages and replies of a device in compact formats, with error feedback.

What rounding leaves out of a reply is owed to the server (error feedback). A node owes it from the
moment at which the server has accepted that reply: its next message says which one was the last.
Until then the node's Context holds both what was owed before the reply and what would be after it,
so that a reply that is lost, however and wherever, changes nothing. A model of other names, shapes
or dtypes owes nothing.
"""

import logging
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict

from fedstale.errors import ProtocolError
from fedstale.flower import ClientAppCallable, ErrorCode
from fedstale.strategies.messages import (
    COMPACT_RECORD,
    Requested,
    decoded,
    is_quantised,
    quantised,
    stated,
    without_asking,
)
from fedstale.strategies.server import UPDATE_KEY
from fedstale.strategies.types import FormatName, at_least_single

OWED_RECORD = "fedstale.owed"
"""Name of the record in the Context's state: what accepted replies have left out."""
NEXT_RECORD = "fedstale.owed-next"
"""Name of that of what is owed if the last reply is accepted."""
NEXT_OF_RECORD = "fedstale.owed-next-of"
"""Name of that of the message that the last reply answers."""

logger = logging.getLogger(__name__)


class Compressing:
    """One message to a device, from its arrival until its reply is as it goes out."""

    def __init__(self, message: Message, context: Context, asked: Requested) -> None:
        """Put the arrays of a message in full.

        Args:
            message: whose content is replaced.
            context: of the node.
            asked: what the message asks.

        Raises:
            ProtocolError: an array cannot be read.
        """
        self.received = message.content
        """The content as it arrived."""
        self._asked, self._state, self._about = asked, context.state, message.metadata
        self._is_open = True
        message.content = without_asking(decoded(message.content))
        self._models = dict(message.content.array_records)

    def finish(self, reply: Message) -> None:
        """Put the arrays of a reply into the format that was asked for, once."""
        if not self._is_open or reply.has_error():
            return
        self._is_open = False
        if self._about.message_type.split(".")[0] == "train":
            self._compress(reply.content)
        reply.content[COMPACT_RECORD] = stated()

    def _compress(self, content: RecordDict) -> None:
        owed = _owed(self._state, self._asked.accepted)
        form, models = self._asked.up, self._models
        if form is None:
            return
        is_delta = any(c.get(UPDATE_KEY) == "delta" for c in content.config_records.values())
        records = content.array_records
        for key, record in records.items():
            only = len(models) == 1 == len(records)
            model = models.get(key) or (next(iter(models.values())) if only else None)
            if model is None:
                continue
            content[key], left = _nearest(record, model, form, owed, is_delta=is_delta)
            self._state[NEXT_RECORD] = ArrayRecord({k: Array(x) for k, x in left.items()})
            self._state[NEXT_OF_RECORD] = ConfigRecord({"message": self._about.message_id})


_UNDER_WAY: ContextVar[Compressing | None] = ContextVar("fedstale-compressing", default=None)


def under_way() -> Compressing | None:
    """Return the message around which a mod will put the reply into a format; None without."""
    return _UNDER_WAY.get()


def compressed(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Call the app with full arrays, and compress its reply as the message asks.

    A message whose arrays cannot be read is answered with an error.
    """
    asked = Requested.of(message.content)
    if asked is None:
        return call_next(message, context)
    try:
        compressing = Compressing(message, context, asked)
    except ProtocolError as problem:
        return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, f"{problem}"), reply_to=message)
    token = _UNDER_WAY.set(compressing)
    try:
        reply = call_next(message, context)
    finally:
        _UNDER_WAY.reset(token)
    compressing.finish(reply)
    return reply


def _owed(state: RecordDict, accepted: str) -> ArrayRecord:
    """Read the error owed to the server, given the reply that it has accepted last."""
    about, left = state.pop(NEXT_OF_RECORD, None), state.pop(NEXT_RECORD, None)
    if isinstance(about, ConfigRecord) and accepted and about.get("message") == accepted:
        state[OWED_RECORD] = left if isinstance(left, ArrayRecord) else ArrayRecord()
    owed = state.get(OWED_RECORD)
    return owed if isinstance(owed, ArrayRecord) else ArrayRecord()


def _nearest(
    record: ArrayRecord, model: ArrayRecord, form: FormatName, owed: ArrayRecord, *, is_delta: bool
) -> tuple[ArrayRecord, Mapping[str, Any]]:
    """Quantise large arrays of a record as changes with the error owed; return the new error."""
    names = _large(record, model, form)
    if not all(name in owed and _is_like(owed[name], record[name]) for name in names):
        if len(owed):
            logger.info("the model is another one: what was left out of replies is dropped")
        owed = ArrayRecord()
    made, lefts = dict(record), {}
    for name in names:
        x, minus = record[name].numpy(), None if is_delta else model[name].numpy()
        left = np.zeros(x.shape, at_least_single(x.dtype))
        if name in owed:
            left = np.ascontiguousarray(owed[name].numpy())
        made[name] = quantised(x, form, minus=minus, left=left)
        lefts[name] = left
    return ArrayRecord(made), lefts


def _large(record: ArrayRecord, model: ArrayRecord, form: FormatName) -> list[str]:
    """Return the arrays of a reply that go in a format: those of the model that are large."""
    return [
        name
        for name, array in record.items()
        if name in model
        and _is_plain(array)
        and (array.dtype, tuple(array.shape)) == (model[name].dtype, tuple(model[name].shape))
        and is_quantised(form, array.dtype, tuple(array.shape))
    ]


def _is_plain(array: Array) -> bool:
    return array.stype == "numpy.ndarray" and array.dtype in ("float16", "float32", "float64")


def _is_like(owed: Array, array: Array) -> bool:
    wide = str(at_least_single(array.dtype))
    return (owed.dtype, tuple(owed.shape)) == (wide, tuple(array.shape))
