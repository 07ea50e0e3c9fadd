"""Reads arrays that a stranger sent: sizes are compared before anything is parsed or allocated.

A reply holds arrays in NumPy's file format. Its header is a Python literal, and a general parser of
those can be made to take much time and memory; so only the one form that `numpy.save` writes for
plain numbers is known here. Nothing about a stranger's header is remembered.
"""

import re
from collections.abc import Container

import numpy as np
from flwr.app import Array as FlowerArray

from fedstale.errors import ProtocolError
from fedstale.strategies.arrays import Array

STYPE = "numpy.ndarray"
MOST_HEADER_BYTES = 1024
"""`numpy.save` needs 128 for any array of up to a dozen axes."""

_MAGIC = b"\x93NUMPY\x01\x00"
_AT = len(_MAGIC) + 2
_HEADER = re.compile(
    rb"\{'descr': '([<>|][fiubc][0-9]{1,2})', 'fortran_order': (True|False), "
    rb"'shape': \((|[0-9]{1,18},|[0-9]{1,18}(?:, [0-9]{1,18}){1,31})\), \} *\n"
)
# Each byte can be matched in one way only: with optional separators a run of digits could be split
# in so many ways that a refusal would take for ever.


class RefusalError(ProtocolError):
    """A reply that may not touch the model."""

    def __init__(self, kind: str, text: str) -> None:
        """Keep a word to count by, and the sentence for people."""
        super().__init__(text)
        self.kind = kind


def read(
    stored: FlowerArray,
    name: str,
    like: Array,
    dtypes: Container[np.dtype[np.generic]] | None,
) -> Array:
    """Return a stored array of known shape, in memory of its own, native bytes and C order.

    Args:
        stored: as it came.
        name: of the array, for sentences.
        like: the model's array of that name.
        dtypes: accepted, in native byte order; None accepts all real numbers, also smaller and
            larger ones.

    Raises:
        RefusalError: it is not such an array.
    """
    data = stored.data
    if stored.stype != STYPE:
        raise RefusalError(
            "format", f"arrays[{name!r}] is stored as {stored.stype[:40]!r}: {STYPE!r}?"
        )
    # A float64 in place of each element is the most that any accepted dtype takes.
    most = like.size * max(like.itemsize, 8) + MOST_HEADER_BYTES + _AT
    if len(data) > most:
        raise RefusalError(
            "bytes", f"arrays[{name!r}] takes {len(data):,} bytes: at most {most:,} fit"
        )
    body = _AT + int.from_bytes(data[_AT - 2 : _AT], "little")
    if not data.startswith(_MAGIC) or not _AT < body <= min(len(data), _AT + MOST_HEADER_BYTES):
        raise RefusalError("format", f"arrays[{name!r}] cannot be read: no file of numpy.save")
    header = _HEADER.fullmatch(data[_AT:body])
    if header is None:
        raise RefusalError(
            "format", f"arrays[{name!r}] cannot be read: its dtype or header is not plain numbers'"
        )
    shape = tuple(int(n) for n in header[3].replace(b",", b" ").split())
    if shape != like.shape:
        raise RefusalError("shape", f"arrays[{name!r}] has shape {shape}: expected {like.shape}")
    try:
        dtype = np.dtype(header[1].decode())
    except TypeError as problem:
        raise RefusalError(
            "dtype", f"arrays[{name!r}] has dtype {header[1]!r}: no such"
        ) from problem
    native = dtype.newbyteorder("=")
    if native not in dtypes if dtypes is not None else native.kind not in "fiub":
        raise RefusalError("dtype", f"arrays[{name!r}] has dtype {native}: expected {like.dtype}")
    if len(data) - body != like.size * dtype.itemsize:
        raise RefusalError(
            "bytes",
            f"arrays[{name!r}] has {len(data) - body:,} bytes of numbers: expected "
            f"{like.size * dtype.itemsize:,}",
        )
    flat = np.frombuffer(data, dtype, offset=body)
    if header[2] == b"True":
        return np.array(flat.reshape(shape[::-1]).transpose(), native, order="C")
    return np.array(flat.reshape(shape), native)
