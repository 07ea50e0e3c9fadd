"""One loop over memory where NumPy needs six: rounding to whole numbers, compiled by numba.

numba is optional (`pip install 'fedstale[fast]'`), and is imported only when a large array is
quantised. Results are those of NumPy to the last bit: no operation is contracted or reordered.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from fedstale.strategies.arrays import LARGE, Array


def rounding_loop(x: Array, real: np.dtype[Any]) -> Callable[..., None] | None:
    """Return `codec.round_to_codes` as one compiled loop, or None where it does not pay.

    It pays for large arrays, if numba is installed.

    Args:
        x: what is quantised.
        real: the dtype that is computed in, float32 or float64.
    """
    return _compiled(real) if x.size >= LARGE else None


@cache
def _compiled(real: np.dtype[Any]) -> Callable[..., None] | None:
    if find_spec("numba") is None:
        return None
    numba: Any = import_module("numba")
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
