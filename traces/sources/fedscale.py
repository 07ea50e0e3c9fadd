"""Readers of FedScale's two files: when clients were online, and how fast they are.

Both are pickles. A pickle is a program, so nothing in one is run: the bytes are first checked to
hold only instructions that build dictionaries, lists, numbers, strings, bytes, booleans and None,
and are then loaded by an unpickler that imports nothing. Memory and time are bounded by the size of
the file and by the number of instructions. Tuples are rejected: as a dictionary key, a tuple built
of itself takes for ever to hash. So are many integers beyond 64 bits, whose hashes can be made
equal, which would slow a dictionary down.

Reference:
    Lai, Dai, Singapuram, Liu, Zhu, Madhyastha, Chowdhury. FedScale: Benchmarking Model and System
    Performance of Federated Learning at Scale. ICML 2022.
"""

import io
import math
import pickle
import pickletools
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NoReturn

import numpy as np
import pandas as pd

from fedstale.errors import TraceError
from fedstale.traces import Availability, Series, TraceSet
from fedstale.traces.sources.archives import number, read_file

COMPUTE_UNIT = "seconds of the median client of the file"
MAX_BYTES = 256 << 20
MAX_OPCODES = 60_000_000
_CAPACITY = ("computation", "communication")
_MOST_KBIT_PER_S = 1e9
_MOST_LARGE_INTEGERS = 1000

_PLAIN = {
    *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE"),
    *("INT", "LONG", "LONG1", "LONG4", "BININT", "BININT1", "BININT2", "FLOAT", "BINFLOAT"),
    *("BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "EMPTY_LIST", "LIST", "APPEND", "APPENDS"),
    *("EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"),
    *("GET", "BINGET", "LONG_BINGET"),
}
"""The accepted instructions, named as in the standard library's pickletools."""
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_DAMAGED = (
    *(pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError),
    *(AttributeError, OverflowError, MemoryError),
)
"""What Python's unpickler raises where instructions or their arguments are damaged."""
_INTEGERS = frozenset({"INT", "LONG", "LONG1", "LONG4"})


def read_behaviour(path: str | Path) -> TraceSet:
    """Return the availability of the clients in a client_behave_trace.

    The file is {client: {"active": [s], "inactive": [s], "finish_time": s, ...}}: the client is
    online from active[i] to inactive[i], and all of it repeats after finish_time. The file does not
    state the local time of instant 0.

    Args:
        path: the pickle, gzipped or not.

    Returns:
        A set that knows availability only; each client repeats after its own finish_time.

    Raises:
        TraceError: the file is missing, damaged, holds more than plain data, or has no usable
            client.
    """
    path = Path(path)
    counts: Counter[str] = Counter()
    ids: list[str] = []
    lengths: list[float] = []
    windows: list[list[tuple[float, float]]] = []
    for client, known in _clients(path):
        length = number(known.get("finish_time"))
        if not 0 < length < math.inf:
            counts["dropped: client without a finish_time above 0"] += 1
            continue
        ids.append(client)
        lengths.append(length)
        windows.append(_pairs(known, counts))
    if not ids:
        raise TraceError(f"{path}: no client with a finish_time: expected a client_behave_trace")
    owner = np.repeat(np.arange(len(ids)), [len(each) for each in windows])
    starts, ends = np.array(list(chain(*windows)), dtype=np.float64).reshape(-1, 2).T
    online, repairs = Availability.repaired(owner, starts, ends, np.array(lengths), join_s=0.0)
    counts += repairs
    counts["kept: client that is never online"] = int(np.sum(np.diff(online.offsets) == 0))
    return TraceSet(device_ids=pd.Index(ids, dtype="str"), availability=online, repairs=counts)


def read_capacity(path: str | Path) -> TraceSet:
    """Return the constant speeds of the clients in a client_device_capacity, and their links.

    The file is {client: {"computation": ms per sample, "communication": kbit/s}}. The median client
    gets speed 1. The time per sample is that of inference; speeds are only compared with each
    other here, so what training costs more cancels out. There is one bandwidth for both ways:
    downlink and uplink are therefore equal, which real links are not. A kbit is taken as 1000 bit.

    Args:
        path: the pickle, gzipped or not.

    Returns:
        A set that knows compute, downlink and uplink.

    Raises:
        TraceError: the file is missing, damaged, holds more than plain data, or has no usable
            client.
    """
    path = Path(path)
    counts: Counter[str] = Counter()
    table = pd.DataFrame(
        [(id_, *map(number, map(known.get, _CAPACITY))) for id_, known in _clients(path)],
        columns=["client", *_CAPACITY],
    )
    # A speed must be finite both ways: 1 / 1e-320 is not.
    for name, most in zip(_CAPACITY, (math.inf, _MOST_KBIT_PER_S), strict=True):
        good = table[name].between(1e-9, most, inclusive="neither")
        counts[f"dropped: client whose {name} is not a number above 0"] += int((~good).sum())
        table = table[good]
    if table.empty:
        raise TraceError(
            f"{path}: no client with computation and communication: expected a "
            "client_device_capacity"
        )
    speeds = 1.0 / table["computation"].to_numpy(np.float64)
    bit_per_s = table["communication"].to_numpy(np.float64) * 1e3
    return TraceSet(
        device_ids=pd.Index(table["client"], dtype="str", name=None),
        compute=Series.constant(speeds / np.median(speeds)),
        downlink=Series.constant(bit_per_s),
        uplink=Series.constant(bit_per_s),
        compute_unit=COMPUTE_UNIT,
        repairs=counts,
    )


def _clients(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the name of each client, and its record; an empty one for what is none."""
    data = load(path)
    if not isinstance(data, dict) or not data:
        raise TraceError(f"{path}: expected a pickled dictionary of clients")
    for client, record in data.items():
        yield str(client), record if isinstance(record, dict) else {}


def _pairs(record: dict[str, object], counts: Counter[str]) -> list[tuple[float, float]]:
    """Return the windows of one client; NaN where one is not a number."""
    active, inactive = record.get("active"), record.get("inactive")
    if not isinstance(active, list) or not isinstance(inactive, list):
        counts["dropped: client's windows that are not lists"] += 1
        return []
    unpaired = abs(len(active) - len(inactive))
    counts["dropped: start without an end, or end without a start"] += unpaired
    return list(zip(map(number, active), map(number, inactive), strict=False))


def load(path: Path) -> object:
    """Return the plain data of a pickle file, gzipped or not.

    Raises:
        TraceError: the file is missing, too large or damaged, or holds anything but plain data.
    """
    data = read_file(path, MAX_BYTES)
    try:
        return loads(data)
    except TraceError as e:
        raise TraceError(f"{path}: {e}") from None


def loads(data: bytes) -> object:
    """Return the plain data of a pickle.

    Raises:
        TraceError: the pickle is damaged, too long, or holds anything but plain data.

    Example:
        >>> loads(pickle.dumps({1: [2.5, "a", None]}))
        {1: [2.5, 'a', None]}
        >>> loads(pickle.dumps(len))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        fedstale.errors.TraceError: the pickle asks for STACK_GLOBAL at byte 28: rejected, ...
    """
    try:
        _check(data)
        return _PlainUnpickler(io.BytesIO(data), encoding="latin-1").load()
    except TraceError:
        raise
    except _DAMAGED as e:
        raise TraceError(f"truncated or damaged pickle ({e}): expected plain data") from None


def _check(data: bytes) -> None:
    """Raise a TraceError if a pickle does anything but build plain data, or asks for much memory.

    The lengths of strings are checked against the file by `pickletools.genops` itself.
    """
    n_large = 0
    for n, (opcode, argument, at) in enumerate(pickletools.genops(data)):
        name, number = opcode.name, argument if isinstance(argument, int) else 0
        if n >= MAX_OPCODES:
            raise TraceError(f"the pickle has more than {MAX_OPCODES} instructions: rejected")
        if name not in _PLAIN:
            raise TraceError(
                f"the pickle asks for {name} at byte {at}: rejected, only dictionaries, lists, "
                "numbers and strings are accepted"
            )
        if isinstance(argument, str):
            # Half of a character, which Python would let pass, is no text that can be stored.
            argument.encode()
        elif name in _PUTS and number > n:
            # Python's memo is an array: an index makes it as long.
            raise TraceError(f"the pickle numbers an object {number} at byte {at}: rejected")
        elif name in _INTEGERS and not -(1 << 63) <= number < 1 << 63:
            n_large += 1
            if n_large > _MOST_LARGE_INTEGERS:
                raise TraceError(
                    f"the pickle has more than {_MOST_LARGE_INTEGERS} integers beyond 64 bits: "
                    "rejected"
                )
        elif name == "FRAME" and number > len(data):
            raise TraceError("truncated or damaged pickle (a frame beyond its end)")


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise TraceError(f"the pickle asks for {module_name}.{global_name}: rejected")

    def persistent_load(self, pid: object) -> NoReturn:
        raise TraceError(f"the pickle asks for the object {pid!r} from outside: rejected")
