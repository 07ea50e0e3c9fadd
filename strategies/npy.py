"""Reads the arrays in replies without parsing the same header over and over.

Replies hold arrays in NumPy's own file format, and all replies of a run have the same few headers.
Parsing them is most of the time that a small array takes, so what a header says is remembered.
"""

from functools import lru_cache
from io import BytesIO

import numpy as np
import numpy.typing as npt
from flwr.app import Array as FlowerArray

from fedstale.strategies.arrays import Array

_MAGIC = b"\x93NUMPY\x01"
_LENGTH_AT = 8


def read(stored: FlowerArray) -> Array:
    """Return a stored array, in memory of its own and in C order.

    Raises:
        ValueError: the bytes are no array of plain values.

    Example:
        >>> read(FlowerArray(np.array([[1, 2]])))
        array([[1, 2]])
    """
    data = stored.data
    if not data.startswith(_MAGIC):
        return np.array(stored.numpy(), order="C")
    body = _LENGTH_AT + 2 + int.from_bytes(data[_LENGTH_AT : _LENGTH_AT + 2], "little")
    shape, is_fortran, dtype = _header(data[:body])
    flat = np.frombuffer(data, dtype, offset=body)
    if is_fortran:
        return np.array(flat.reshape(shape[::-1]).transpose(), order="C")
    return flat.reshape(shape).copy()


@lru_cache(maxsize=4096)
def _header(header: bytes) -> tuple[tuple[int, ...], bool, npt.DTypeLike]:
    file = BytesIO(header)
    np.lib.format.read_magic(file)
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    return shape, is_fortran, dtype
