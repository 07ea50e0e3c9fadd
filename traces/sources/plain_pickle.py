"""Pickles of plain data, read by a machine that can make nothing else.

A pickle is a program, and Python's own unpickler runs whatever it names. This one knows only the
instructions that build dictionaries, lists, tuples, numbers, strings, bytes, booleans and None; it
has no instruction that imports, calls or sets attributes, so there is nothing to escape to. Work
and memory are bounded by the size of the file and by the number of instructions.

Dictionary keys are single values, never tuples: hashing a tuple built of itself can take for ever.
"""

import pickletools
import struct
from collections.abc import Callable
from pathlib import Path

from fedstale.errors import TraceError
from fedstale.traces.sources.archives import Limits, read_file

MAX_BYTES = 256 << 20
MAX_OPCODES = 60_000_000

_KEYS = (str, int, float, bool, bytes, type(None))
_STOP = ord(".")


def load(path: Path, *, max_bytes: int = MAX_BYTES, max_opcodes: int = MAX_OPCODES) -> object:
    """Return the plain data of a pickle file, gzipped or not.

    Raises:
        TraceError: the file is missing, too large or damaged, or holds anything but plain data.
    """
    data = read_file(path, Limits(member_bytes=max_bytes))
    try:
        return loads(data, max_opcodes=max_opcodes)
    except TraceError as e:
        raise TraceError(f"{path}: {e}") from None


def loads(data: bytes, *, max_opcodes: int = MAX_OPCODES) -> object:
    """Return the plain data of a pickle.

    Raises:
        TraceError: the pickle is damaged, too long, or holds anything but plain data.

    Example:
        >>> import pickle
        >>> loads(pickle.dumps({1: [2.5, "a", None]}))
        {1: [2.5, 'a', None]}
        >>> loads(pickle.dumps(print))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        fedstale.errors.TraceError: the pickle asks for STACK_GLOBAL at byte 30: refused, ...
    """
    machine = _Machine(data)
    try:
        return machine.run(max_opcodes)
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as e:
        if isinstance(e, TraceError):
            raise
        raise TraceError(
            f"truncated or damaged pickle near byte {machine.at}: expected plain data"
        ) from None


class _Machine:
    """The stack, the marks and the memo of one pickle that is being read."""

    __slots__ = ("at", "data", "marks", "memo", "stack")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[object] = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}

    def run(self, max_opcodes: int) -> object:
        data = self.data
        for _ in range(max_opcodes):
            code = data[self.at]
            self.at += 1
            act = _ACTIONS.get(code)
            if act is not None:
                act(self)
            elif code == _STOP:
                return self.stack.pop()
            else:
                name = _NAMES.get(code, f"the unknown instruction {code:#04x}")
                raise TraceError(
                    f"the pickle asks for {name} at byte {self.at - 1}: refused, only "
                    "dictionaries, lists, tuples, numbers and strings are accepted"
                )
        raise TraceError(f"the pickle has more than {max_opcodes} instructions: refused")

    def take(self, size: int) -> bytes:
        start = self.at
        self.at = end = start + size
        if end > len(self.data):
            raise IndexError
        return self.data[start:end]

    def number(self, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "little", signed=signed)

    def line(self) -> bytes:
        end = self.data.index(b"\n", self.at)
        text = self.data[self.at : end]
        self.at = end + 1
        return text

    def since_mark(self) -> list[object]:
        mark = self.marks.pop()
        if mark > len(self.stack):
            raise IndexError
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def last(self, count: int) -> list[object]:
        if len(self.stack) < count:
            raise IndexError
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return items

    def extend(self, items: list[object]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise TypeError
        target.extend(items)

    def update(self, items: list[object], target: object = None) -> None:
        target = self.stack[-1] if target is None else target
        if type(target) is not dict or len(items) % 2:
            raise TypeError
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in _KEYS:
                raise TraceError(
                    f"the pickle has a {type(key).__name__} as a dictionary key near byte "
                    f"{self.at}: expected numbers or strings"
                )
            target[key] = value


def _push(make: Callable[[_Machine], object]) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(make(m))


def _float(m: _Machine) -> object:
    return struct.unpack(">d", m.take(8))[0]


def _int_line(m: _Machine) -> object:
    text = m.line()
    # Protocols 0 and 1 write booleans so.
    return text == b"01" if text in (b"00", b"01") else int(text)


def _dict(m: _Machine) -> object:
    made: dict[object, object] = {}
    m.update(m.since_mark(), made)
    return made


def _proto(m: _Machine) -> None:
    version = m.number(1)
    if version > 5:
        raise TraceError(f"pickle protocol {version}: expected 0 to 5")


def _memoise(m: _Machine, key: int) -> None:
    m.memo[key] = m.stack[-1]


# One entry an instruction, named as in the standard library's pickletools.
_BY_NAME: dict[str, Callable[[_Machine], object]] = {
    "PROTO": _proto,
    "FRAME": lambda m: m.take(8),
    "MARK": lambda m: m.marks.append(len(m.stack)),
    "POP": lambda m: m.stack.pop(),
    "POP_MARK": lambda m: m.since_mark(),
    "NONE": _push(lambda _: None),
    "NEWTRUE": _push(lambda _: True),
    "NEWFALSE": _push(lambda _: False),
    "INT": _push(_int_line),
    "LONG": _push(lambda m: int(m.line().removesuffix(b"L"))),
    "BININT": _push(lambda m: m.number(4, signed=True)),
    "BININT1": _push(lambda m: m.number(1)),
    "BININT2": _push(lambda m: m.number(2)),
    "LONG1": _push(lambda m: m.number(m.number(1), signed=True)),
    "LONG4": _push(lambda m: m.number(m.number(4), signed=True)),
    "FLOAT": _push(lambda m: float(m.line())),
    "BINFLOAT": _push(_float),
    "SHORT_BINSTRING": _push(lambda m: m.take(m.number(1)).decode("latin-1")),
    "BINSTRING": _push(lambda m: m.take(m.number(4)).decode("latin-1")),
    # Half of a character, which Python would let pass, is no text that can be stored.
    "UNICODE": _push(lambda m: m.line().decode("raw-unicode-escape").encode().decode()),
    "SHORT_BINUNICODE": _push(lambda m: m.take(m.number(1)).decode()),
    "BINUNICODE": _push(lambda m: m.take(m.number(4)).decode()),
    "BINUNICODE8": _push(lambda m: m.take(m.number(8)).decode()),
    "SHORT_BINBYTES": _push(lambda m: m.take(m.number(1))),
    "BINBYTES": _push(lambda m: m.take(m.number(4))),
    "BINBYTES8": _push(lambda m: m.take(m.number(8))),
    "EMPTY_LIST": _push(lambda _: []),
    "LIST": _push(lambda m: m.since_mark()),
    "APPEND": lambda m: m.extend(m.last(1)),
    "APPENDS": lambda m: m.extend(m.since_mark()),
    "EMPTY_DICT": _push(lambda _: {}),
    "DICT": _push(_dict),
    "SETITEM": lambda m: m.update(m.last(2)),
    "SETITEMS": lambda m: m.update(m.since_mark()),
    "EMPTY_TUPLE": _push(lambda _: ()),
    "TUPLE": _push(lambda m: tuple(m.since_mark())),
    "TUPLE1": _push(lambda m: tuple(m.last(1))),
    "TUPLE2": _push(lambda m: tuple(m.last(2))),
    "TUPLE3": _push(lambda m: tuple(m.last(3))),
    "PUT": lambda m: _memoise(m, int(m.line())),
    "BINPUT": lambda m: _memoise(m, m.number(1)),
    "LONG_BINPUT": lambda m: _memoise(m, m.number(4)),
    "MEMOIZE": lambda m: _memoise(m, len(m.memo)),
    "GET": _push(lambda m: m.memo[int(m.line())]),
    "BINGET": _push(lambda m: m.memo[m.number(1)]),
    "LONG_BINGET": _push(lambda m: m.memo[m.number(4)]),
}
_NAMES = {ord(op.code): op.name for op in pickletools.opcodes}
_ACTIONS = {code: _BY_NAME[name] for code, name in _NAMES.items() if name in _BY_NAME}
