"""Quantised arrays as bytes: pure functions over NumPy arrays, with sizes known from shapes.

Elements are taken in buckets of `BUCKET`. With s = max|x| of a bucket, an element becomes the whole
number q = round(x / s L), of 8, 4 or 2 bits for L = 127, 7 or 1, and is read as q s / L: nearest
rounding is off by s / (2 L) at most. Bytes are the scales s of all buckets, as float32, and then
the numbers, the first one in the lowest bits. "float16" has no scales: elements are rounded to it.

What rounding leaves can be given back to the next message (error feedback: Karimireddy, Rebjock,
Stich, Jaggi. Error Feedback Fixes SignSGD and other Gradient Compression Schemes. ICML 2019).
Arrays are walked in chunks: beyond what comes in and goes out there is memory for one.
"""

import io
import sys
from collections.abc import Iterable
from functools import cache
from math import prod
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from fedstale.errors import ProtocolError
from fedstale.strategies.types import Array, FormatName, at_least_single

FORMATS: tuple[FormatName, ...] = get_args(FormatName)
"""From the finest to the coarsest."""
BUCKET = 512
"""Elements that share a scale."""
LEAST = 256
"""Elements of the smallest array that is quantised."""

_BITS = {"int8": 8, "int4": 4, "int2": 2}
_LEVELS = {"int8": 127, "int4": 7, "int2": 1}
_CHUNK = 1 << 15
"""Elements: what is worked on fits in the second-level cache."""
_SCALE = np.dtype("<f4")
_HALF = np.dtype("<f2")
_NO_NUMBER = 0x7C00
"""Exponent of NaN and infinity in float16."""
# Below it a quotient by a unit loses digits; what is smaller is left to the next message.
_LEAST_UNIT = float(np.finfo(np.float32).tiny)
_FLOATS = tuple(map(np.dtype, ("f2", "f4", "f8")))


def n_bytes(form: FormatName, n: int) -> int:
    """Return the bytes of n elements in a format.

    Example:
        >>> [n_bytes(form, 1024) for form in FORMATS]
        [2048, 1032, 520, 264]
    """
    if form == "float16":
        return _HALF.itemsize * n
    return _SCALE.itemsize * n_buckets(n) + -(-n * _BITS[form] // 8)


def n_buckets(n: int) -> int:
    """Return the number of scales of n elements."""
    return -(-n // BUCKET)


def is_quantised(form: FormatName, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> bool:
    """Return whether arrays of a dtype and shape are sent in a format, and not in full.

    These are floating-point numbers in the machine's byte order, of `LEAST` elements or more, that
    take fewer bytes in the format.

    Example:
        >>> is_quantised("int4", np.float32, (16, 16)), is_quantised("int4", np.int64, (16, 16))
        (True, False)
    """
    dtype, n = np.dtype(dtype), prod(shape)
    return dtype in _FLOATS and n >= LEAST and n_bytes(form, n) < n * dtype.itemsize


def bytes_of(arrays: Iterable[Array], form: FormatName | None) -> int:
    """Return the bytes of the numbers of arrays as they are sent in a format; None for in full."""
    return sum(
        n_bytes(form, x.size)
        if form is not None and is_quantised(form, x.dtype, x.shape)
        else x.nbytes
        for x in arrays
    )


def encode(
    x: Array, form: FormatName, *, minus: Array | None = None, left: Array | None = None
) -> bytes:
    """Return x, or x - minus + left, as `n_bytes` bytes.

    A bucket with NaN or infinity has NaN as its scale, so that sizes depend on nothing but shapes;
    `decode` refuses it. So it does for an element beyond float16 in that format.

    Args:
        x: real numbers of any shape and of the dtypes of `is_quantised`.
        form: of the result.
        minus: subtracted before; x's shape.
        left: what earlier messages left out, which is added before, and is set to what this one
            leaves out; x's shape, C-contiguous, float32, or float64 for an x in float64.

    Example:
        >>> left = np.zeros(3, np.float32)
        >>> data = encode(np.array([-1.0, 0.1, 2.0], np.float32), "int2", left=left)
        >>> decode(data, "int2", (3,), np.float32)
        array([0., 0., 2.], dtype=float32)
        >>> left
        array([-1. ,  0.1,  0. ], dtype=float32)
    """
    real = at_least_single(x.dtype)
    flat = x.reshape(-1)
    minus = None if minus is None else minus.reshape(-1)
    left = None if left is None else left.reshape(-1)
    n = flat.size
    if not n:
        return b""
    # The bytes of a BytesIO can be written in place, and are handed over without a copy.
    file = io.BytesIO()
    file.seek(n_bytes(form, n) - 1)
    file.write(b"\0")
    with file.getbuffer() as buffer:
        out = np.frombuffer(buffer, np.uint8)
        values = np.empty(_padded(min(n, _CHUNK)), real)
        for start in range(0, n, _CHUNK):
            part = slice(start, min(start + _CHUNK, n))
            v = values[: part.stop - start]
            if minus is None:
                v[...] = flat[part]
            else:
                np.subtract(flat[part], minus[part], out=v, dtype=real)
            if left is not None:
                v += left[part]
            rest = None if left is None else left[part]
            if form == "float16":
                _halve(v, out, start, rest)
            else:
                _quantise(values, part, form, out, n, rest)
        del out
    return file.getvalue()


def _padded(n: int) -> int:
    return BUCKET * n_buckets(n)


def _halve(v: Array, out: Array, start: int, left: Array | None) -> None:
    """Write a chunk as float16."""
    into = out[2 * start : 2 * (start + v.size)].view(_HALF)
    torch: Any = sys.modules.get("torch")
    with np.errstate(over="ignore", invalid="ignore"):
        if torch is not None and v.dtype == np.float32:
            # By the processor: the same numbers, several times as fast. (From float64 it would
            # round twice.)
            half = torch.from_numpy(into).copy_(torch.from_numpy(v))
            if left is not None:
                np.subtract(v, half.float().numpy(), out=left)
            return
        into[...] = v
        if left is not None:
            # A look-up is twice as fast as NumPy's conversion.
            np.subtract(v, np.take(_halves(v.dtype), into.view("<u2"), mode="clip"), out=left)


@cache
def _halves(real: np.dtype[Any]) -> Array:
    """Return every float16 by its bits; shape (65536,)."""
    return np.arange(1 << 16, dtype="<u2").view(_HALF).astype(real)


def _quantise(  # noqa: PLR0917 - one chunk of what `encode` was given
    values: Array,
    part: slice,
    form: FormatName,
    out: Array,
    n: int,
    left: Array | None,
) -> None:
    """Write a chunk as scales and whole numbers.

    Args:
        values: of the chunk, from its first element on; padded in place to whole buckets.
        part: where it is among all n elements.
        form: of the result.
        out: all bytes.
        n: number of all elements.
        left: of the chunk, set to what rounding leaves; None where that is not kept.
    """
    size, bits, levels = part.stop - part.start, _BITS[form], _LEVELS[form]
    padded = values[: _padded(size)]
    padded[size:] = 0.0
    q, real = np.abs(padded), padded.dtype
    first = part.start // BUCKET
    places = slice(_SCALE.itemsize * first, _SCALE.itemsize * n_buckets(part.stop))
    scales, rounded = out[places].view(_SCALE), q.reshape(-1, BUCKET)
    with np.errstate(over="ignore", invalid="ignore"):
        scales[...] = rounded.max(axis=1)
        unit = _units(scales, levels, real)
    # A unit of nearly nothing is none.
    unusable, tiny = ~np.isfinite(unit), unit < _LEAST_UNIT
    scales[unusable], scales[tiny] = np.nan, 0.0
    unit[unusable | tiny] = 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        np.divide(padded.reshape(-1, BUCKET), unit[:, None], out=rounded)
    np.rint(q, out=q)
    rounded[unit == 0.0] = 0.0
    codes = q.astype(np.int8)
    if left is not None:
        rounded *= unit[:, None]
        np.subtract(values[:size], q[:size], out=left)
    begins = _SCALE.itemsize * n_buckets(n) + part.start * bits // 8
    into = out[begins : begins + -(-size * bits // 8)]
    into[...] = _joined(codes.view(np.uint8), bits, levels)[: into.size]


def _units(scales: Array, levels: int, real: np.dtype[Any]) -> Array:
    """Return s / L of each bucket, as both sides compute it."""
    return scales.astype(real) / real.type(levels)


def _joined(codes: Array, bits: int, levels: int) -> Array:
    """Return whole numbers as bytes, several in one where they are short.

    Args:
        codes: two's complements of one byte each, whole buckets of them; may be written to.
        bits: of a number.
        levels: L, which is added to numbers of less than a byte.
    """
    if bits == 8:
        return codes
    codes += np.uint8(levels)
    if bits == 4:
        pairs = codes.view("<u2")
        return (pairs | (pairs >> 4)).astype(np.uint8)
    fours = codes.view("<u4")
    fours = fours | (fours >> 6)
    return (fours | (fours >> 12)).astype(np.uint8)


def decode(data: bytes, form: FormatName, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Decode the bytes of `encode` into an array of some shape; float32 in the place of float16.

    The number of bytes and the scales are checked before memory is taken.

    Args:
        data: as it came.
        form: of the data.
        shape: of the result.
        dtype: of what was encoded.

    Raises:
        ProtocolError: `encode` cannot have made the data of finite numbers.
    """
    real, n = at_least_single(dtype), prod(shape)
    if len(data) != n_bytes(form, n):
        raise ProtocolError(
            f"has {len(data):,} bytes: expected {n_bytes(form, n):,} for {shape} in {form}"
        )
    if form == "float16":
        # NumPy's own question takes four times as long as all the rest.
        exponents = np.frombuffer(data, "<u2")
        if any(
            (exponents[i : i + _CHUNK] & _NO_NUMBER == _NO_NUMBER).any()
            for i in range(0, n, _CHUNK)
        ):
            raise ProtocolError("holds NaN, infinity, or more than float16 can")
        return np.frombuffer(data, _HALF).astype(real).reshape(shape)
    scales = np.frombuffer(data, _SCALE, n_buckets(n))
    if not (np.isfinite(scales).all() and (scales >= 0.0).all()):
        bad = scales[~(np.isfinite(scales) & (scales >= 0.0))][0]
        raise ProtocolError(f"has a scale of {bad}: expected finite numbers >= 0")
    units = _units(scales, _LEVELS[form], real)
    codes = np.frombuffer(data, np.uint8, offset=scales.nbytes)
    result, per_byte = np.empty(n, real), 8 // _BITS[form]
    room = np.empty(_padded(min(n, _CHUNK)), real)
    for start in range(0, n, _CHUNK):
        size = min(_CHUNK, n - start)
        part = codes[start // per_byte : -(-(start + size) // per_byte)]
        values, room[size:] = room[: part.size * per_byte], 0.0
        np.take(_table(form, real), part, out=values.view(_wide(real, per_byte)), mode="clip")
        if np.isnan(values.max()):
            raise ProtocolError(f"has a number that {form} does not use")
        buckets = room[: _padded(size)].reshape(-1, BUCKET)
        with np.errstate(over="ignore"):  # of the largest scales; infinity is found by who reads
            buckets *= units[start // BUCKET :][: len(buckets), None]
        result[start : start + size] = room[:size]
    return result.reshape(shape)


def _wide(real: np.dtype[Any], n: int) -> np.dtype[Any]:
    """Return a dtype of n numbers, which are copied as one."""
    return np.dtype((np.void, n * real.itemsize))


@cache
def _table(form: FormatName, real: np.dtype[Any]) -> Array:
    """Return the numbers in each byte, NaN where the format uses no such; shape (256,)."""
    bits, levels = _BITS[form], _LEVELS[form]
    byte = np.arange(256)[:, None]
    if bits == 8:
        q = byte - 256 * (byte > 127)
    else:
        q = (byte >> np.arange(0, 8, bits) & (1 << bits) - 1) - levels
    values = np.where(np.abs(q) <= levels, q, np.nan).astype(real)
    return np.ascontiguousarray(values).view(_wide(real, 8 // bits)).reshape(256)
