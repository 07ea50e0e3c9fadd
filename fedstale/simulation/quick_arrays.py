"""Flower's arrays without the same header being written and parsed over and over.

A Flower `Array` is bytes in NumPy's file format. For a small array nearly all the time goes into
its header of 128 bytes: Python's parser reads it, and NumPy formats it anew. All messages of a run
have the same few headers, so they are remembered; bytes and values are those of NumPy, and anything
unusual goes to NumPy itself. For the digits app (four arrays) this is a fifth of a client.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from io import BytesIO
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from flwr.app import Array
from flwr.common.constant import SType

_MAGIC = b"\x93NUMPY\x01"
_LENGTH_AT = 8
_PLAIN = "biufc"

_their_numpy = Array.numpy
_their_from_ndarray = Array.__dict__["from_numpy_ndarray"]


@contextmanager
def quick_arrays() -> Iterator[None]:
    """Let every Flower array inside be read and written the quick way."""
    before = Array.__dict__["numpy"], Array.__dict__["from_numpy_ndarray"]
    _install(read, staticmethod(written))
    try:
        yield
    finally:
        _install(*before)


def install() -> None:
    """Let every Flower array of this process be read and written the quick way, from now on."""
    _install(read, staticmethod(written))


def _install(numpy: Any, from_ndarray: Any) -> None:  # noqa: ANN401 - descriptors
    Array.numpy = numpy  # type: ignore[method-assign]
    Array.from_numpy_ndarray = from_ndarray  # type: ignore[method-assign]


def written(ndarray: npt.NDArray[Any]) -> Array:
    """Return an array as Flower stores it; the bytes are those of `numpy.save`.

    Example:
        >>> written(np.array([[1, 2]])).shape
        (1, 2)
    """
    # A byte order other than the machine's, records and strings are rare.
    if type(ndarray) is not np.ndarray or ndarray.dtype.kind not in _PLAIN:
        return cast(Array, _their_from_ndarray.__get__(None, Array)(ndarray))
    is_fortran = ndarray.flags.f_contiguous and not ndarray.flags.c_contiguous
    name, header = _header_for(ndarray.dtype, ndarray.shape, is_fortran=is_fortran)
    body = ndarray.tobytes("F") if is_fortran else ndarray.tobytes()
    return stored(name, ndarray.shape, header + body)


def written_each(stack: npt.NDArray[Any]) -> list[Array]:
    """Return the arrays of a stack, one for each place of its first axis, as Flower stores them.

    Example:
        >>> [one.shape for one in written_each(np.zeros((2, 3)))]
        [(3,), (3,)]
    """
    each, shape = [stack[i, ...] for i in range(len(stack))], stack.shape[1:]
    if stack.dtype.kind not in _PLAIN:
        return [written(one) for one in each]
    name, header = _header_for(stack.dtype, shape, is_fortran=False)
    return [stored(name, shape, header + one.tobytes()) for one in each]


def stored(dtype: str, shape: tuple[int, ...], data: bytes) -> Array:
    """Return a Flower array of bytes that are known to fit, past the checks of its constructor."""
    array = Array.__new__(Array)
    array.__dict__.update(_is_dirty=True, dtype=dtype, shape=shape, stype=SType.NUMPY, data=data)
    return array


def read(array: Array) -> npt.NDArray[Any]:
    """Return a stored array in memory of its own, as `numpy.load` does.

    Raises:
        ValueError: the bytes are no array of plain values.
        TypeError: the bytes are not in NumPy's format.

    Example:
        >>> read(written(np.array([[1, 2]])))
        array([[1, 2]])
    """
    data = array.data
    if array.stype != SType.NUMPY or not data.startswith(_MAGIC):
        return _their_numpy(array)
    body = _LENGTH_AT + 2 + int.from_bytes(data[_LENGTH_AT : _LENGTH_AT + 2], "little")
    shape, is_fortran, dtype, n_bytes = _header_of(data[:body])
    if dtype.kind not in _PLAIN or len(data) - body < n_bytes:
        return _their_numpy(array)
    flat = np.frombuffer(data, dtype, count=n_bytes // dtype.itemsize, offset=body).copy()
    if is_fortran:
        return flat.reshape(shape[::-1]).transpose()
    return flat.reshape(shape)


@lru_cache(maxsize=4096)
def _header_of(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    file = BytesIO(header)
    np.lib.format.read_magic(file)
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    return shape, is_fortran, dtype, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


@lru_cache(maxsize=4096)
def _header_for(
    dtype: np.dtype[Any], shape: tuple[int, ...], *, is_fortran: bool
) -> tuple[str, bytes]:
    example = np.broadcast_to(np.zeros((), dtype), shape)
    fields = np.lib.format.header_data_from_array_1_0(example)
    file = BytesIO()
    np.lib.format.write_array_header_1_0(file, {**fields, "fortran_order": is_fortran})
    return str(dtype), file.getvalue()
