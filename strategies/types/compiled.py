"""Loops that numba compiles: one pass over memory where NumPy needs six or seven.

NumPy makes a pass for each operation, so that weighing or quantising a large model is bound by the
caches and not by memory. numba is optional (`pip install numba`), and is imported only for large
arrays. Results are those of NumPy to the last bit: no operation is contracted or reordered, and
sums are kept in the order of `arrays.chunk_sum`.
"""

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from fedstale.strategies.types.arrays import LANES, LARGE, Array, is_large

_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


def gap_loop(*models: Mapping[str, Array]) -> Callable[..., float] | None:
    """Return `gap.divide_by_gap` as one compiled loop, or None where it does not pay.

    It pays for large models in float32 or in float64, if numba is installed.

    Args:
        models: what it is to be called on; the first one says which names there are.
    """
    arrays = [model[name] for name in models[0] for model in models]
    fits = len({x.dtype for x in arrays}) == 1 and arrays[0].dtype in _FLOATS
    if not fits or not is_large(models[0]) or not all(x.flags.aligned for x in arrays):
        return None
    return _gap_compiled()


@cache
def _gap_compiled() -> Callable[..., float] | None:
    numba = _numba()
    if numba is None:
        return None

    def signature(real: Any) -> Any:  # noqa: ANN401 - a type of numba's
        written, read = real[::1], numba.types.Array(real, 1, "C", readonly=True)
        return numba.void(written, read, read, read, real, written)

    loop = numba.njit(
        [signature(numba.float32), signature(numba.float64)], nogil=True, error_model="numpy"
    )(_divide_by_gap)

    def divide_by_gap(delta: Array, now: Array, base: Array, c: Array, *, cap: float) -> float:
        sums = np.zeros(LANES, delta.dtype)
        loop(delta, now, base, c, delta.dtype.type(1.0 / cap), sums)
        return float(sums.sum(dtype=np.float64))

    return divide_by_gap


def _divide_by_gap(  # noqa: PLR0917 - compiled loops take no keywords
    delta: Array, now: Array, base: Array, c: Array, least: float, sums: Array
) -> None:
    """Divide one chunk by its gap in place, and add up the weights in lanes."""
    for start in range(0, delta.size, sums.size):
        d, x, y = delta[start : start + sums.size], now[start:], base[start:]
        typical = c[start:]
        for i in range(d.size):
            weight = typical[i] / (abs(x[i] - y[i]) + typical[i])
            if weight < least:  # noqa: PLR1730 - NaN stays NaN, as in np.maximum
                weight = least
            sums[i] += weight
            d[i] *= weight


def rounding_loop(x: Array, real: np.dtype[Any]) -> Callable[..., None] | None:
    """Return `codec.round_to_codes` as one compiled loop, or None where it does not pay.

    It pays for large arrays, if numba is installed.

    Args:
        x: what is quantised.
        real: the dtype that is computed in, float32 or float64.
    """
    return _rounding_compiled(real) if x.size >= LARGE else None


@cache
def _rounding_compiled(real: np.dtype[Any]) -> Callable[..., None] | None:
    numba = _numba()
    if numba is None:
        return None
    number = numba.from_dtype(real)
    array, drawn = number[::1], numba.types.Array(numba.int16, 1, "C", readonly=True)
    signature = numba.void(array, array, drawn, number, number, numba.int8[::1], array, array)
    return numba.njit([signature], nogil=True, error_model="numpy")(_round_to_codes)


def _round_to_codes(  # noqa: PLR0917 - compiled loops take no keywords
    values: Array,
    unit: Array,
    drawn: Array,
    step: float,
    most: float,
    codes: Array,
    left: Array,
    q: Array,
) -> None:
    """Round one chunk, bucket by bucket, which all loops find in the first-level cache."""
    size = values.size // unit.size
    for b in range(unit.size):
        bucket, u = slice(b * size, (b + 1) * size), unit[b]
        v, r, c, d, e = values[bucket], q[bucket], codes[bucket], drawn[bucket], left[bucket]
        if u == 0.0:
            c[:] = 0
            e[:] = v[: e.size]
            continue
        for i in range(size):
            r[i] = v[i] / u
        for i in range(d.size):
            r[i] += step * d[i]
        for i in range(size):
            r[i] = min(max(np.rint(r[i]), -most), most)
            c[i] = np.int8(r[i])
        for i in range(e.size):
            e[i] = v[i] - r[i] * u


def _numba() -> Any:  # noqa: ANN401 - a module or None
    return import_module("numba") if find_spec("numba") is not None else None
