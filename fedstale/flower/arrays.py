"""Flower's arrays from the inside: the one reader of their headers, and arrays made quickly.

A Flower `Array` is bytes in NumPy's file format, whose header is a Python literal. NumPy's own
reader evaluates it: that takes 40 us for a plain header and up to 80 ms for one of 1 KiB that is
made to be slow, and may warn or raise almost anything. Here a regular expression reads the one form
that `numpy.save` writes for plain numbers, in 1 us, of a table of dtypes and at most
`MOST_HEADER_BYTES`. So it may read what a stranger has sent, and allocates nothing by what is
announced.

For a small array nearly all the time goes into its header. All messages of a run have the same
few, so headers are remembered, and `quick_arrays` lets Flower's arrays be read and written by them;
bytes and values are those of NumPy, and anything unusual goes to NumPy itself. For the digits app
this is a quarter of a client.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from io import BytesIO
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord

from fedstale.flower.features import has

STYPE = "numpy.ndarray"
"""What the `stype` of an array says if its bytes are in NumPy's format."""
MOST_HEADER_BYTES = 1024
"""`numpy.save` needs 128 for any array of up to a dozen axes."""

_MAGIC = b"\x93NUMPY\x01\x00"
_START = len(_MAGIC) + 2
"""Bytes of a stored array that say how long its header is."""
_HEADER = re.compile(
    rb"\{'descr': '([<>|][a-z][0-9]{1,2})', 'fortran_order': (True|False), "
    rb"'shape': \((|[0-9]{1,18},|[0-9]{1,18}(?:, [0-9]{1,18}){1,31})\)(?:, )?\} *\n"
)
# Each byte can be matched in one way only: with optional separators a run of digits could be split
# in so many ways that a mismatch would take for ever.

NO_HEADER = "no file of numpy.save, or its dtype or header is not plain numbers'"
"""Why an array cannot be read that has no `Header`."""

_PLAIN = "biufc"
_DTYPES = {
    dtype.str.encode(): np.dtype(dtype.str)
    for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]
    for dtype in (np.dtype(code), np.dtype(code).newbyteorder())
}

_their_numpy = Array.numpy
_their_from_ndarray: Any = vars(Array).get("from_numpy_ndarray")


def record_of(model: Mapping[str, npt.ArrayLike]) -> ArrayRecord:
    """Return arrays as Flower's, by the same names."""
    return ArrayRecord({name: Array(np.asarray(x)) for name, x in model.items()})


def model_of(record: ArrayRecord) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a record that was checked, by the same names."""
    return {name: array.numpy() for name, array in record.items()}


class Header(NamedTuple):
    """The header of a stored array of plain numbers."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool
    """Whether the first axis varies fastest."""
    begin: int
    """Where the values begin, in bytes."""
    n_bytes: int
    """Of the values."""


def header_of(data: bytes) -> Header | None:
    """Parse the header of a stored array; None if it is not `numpy.save`'s of plain numbers.

    Example:
        >>> header_of(written_array(np.zeros((2, 3), np.float32)).data).shape
        (2, 3)
    """
    return _header_in(data[: _header_end(data[:_START])])


@lru_cache(maxsize=4096)
def _header_end(start: bytes) -> int:
    """Return where the header that begins so ends; 0 for one that is not read."""
    if not start.startswith(_MAGIC) or len(start) < _START:
        return 0
    end = _START + int.from_bytes(start[len(_MAGIC) :], "little")
    return end if end <= MOST_HEADER_BYTES else 0


@lru_cache(maxsize=4096)
def _header_in(header: bytes) -> Header | None:
    found = _HEADER.fullmatch(header, _START)
    dtype = _DTYPES.get(found[1]) if found else None
    if found is None or dtype is None:
        return None
    shape = tuple(map(int, found[3].replace(b",", b" ").split()))
    return Header(dtype, shape, found[2] == b"True", len(header), prod(shape) * dtype.itemsize)


def quick_arrays() -> AbstractContextManager[None]:
    """Read and write every Flower array inside the quick way."""
    # To replace methods makes Python forget what it knows of the class.
    is_done = Array.numpy is read_array or not has("quick arrays")
    return nullcontext() if is_done else _replacing_methods()


@contextmanager
def _replacing_methods() -> Iterator[None]:
    ours = {"numpy": read_array, "from_numpy_ndarray": staticmethod(written_array)}
    before = {name: vars(Array)[name] for name in ours}
    for name, function in ours.items():
        setattr(Array, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(Array, name, function)


def written_array(ndarray: npt.NDArray[Any]) -> Array:
    """Return an array as Flower stores it; the bytes are those of `numpy.save`.

    Example:
        >>> written_array(np.array([[1, 2]])).shape
        (1, 2)
    """
    if not has("quick arrays"):
        return Array(ndarray)
    # A byte order other than the machine's, records and strings are rare.
    if type(ndarray) is not np.ndarray or ndarray.dtype.kind not in _PLAIN:
        return cast(Array, _their_from_ndarray.__get__(None, Array)(ndarray))
    is_fortran = ndarray.flags.f_contiguous and not ndarray.flags.c_contiguous
    name, header = _header_for(ndarray.dtype, ndarray.shape, is_fortran=is_fortran)
    body = ndarray.tobytes("F") if is_fortran else ndarray.tobytes()
    # Past the checks of its constructor: the bytes are known to fit.
    array = Array.__new__(Array)
    array.__dict__.update(
        _is_dirty=True, dtype=name, shape=ndarray.shape, stype=STYPE, data=header + body
    )
    return array


def read_array(array: Array) -> npt.NDArray[Any]:
    """Return a stored array in memory of its own, as `numpy.load` does.

    Raises:
        ValueError: the bytes are no array of plain values.
        TypeError: the bytes are not in NumPy's format.

    Example:
        >>> read_array(written_array(np.array([[1, 2]])))
        array([[1, 2]])
    """
    data = array.data
    header = header_of(data) if array.stype == STYPE else None
    if header is None or len(data) - header.begin < header.n_bytes:
        return _their_numpy(array)
    dtype, shape, is_fortran, begin, n_bytes = header
    flat = np.frombuffer(data, dtype, count=n_bytes // dtype.itemsize, offset=begin).copy()
    if is_fortran:
        return flat.reshape(shape[::-1]).transpose()
    return flat.reshape(shape)


def n_value_bytes(array: Array) -> int:
    """Return how many bytes of a stored array are its values: all but NumPy's header, if any.

    Example:
        >>> n_value_bytes(written_array(np.zeros((2, 3), np.float32)))
        24
    """
    n = len(array.data)
    return n if array.stype != STYPE else max(n - _header_end(array.data[:_START]), 0)


@lru_cache(maxsize=4096)
def _header_for(
    dtype: np.dtype[Any], shape: tuple[int, ...], *, is_fortran: bool
) -> tuple[str, bytes]:
    example = np.broadcast_to(np.zeros((), dtype), shape)
    fields = np.lib.format.header_data_from_array_1_0(example)
    file = BytesIO()
    np.lib.format.write_array_header_1_0(file, {**fields, "fortran_order": is_fortran})
    return str(dtype), file.getvalue()
