"""Models as named NumPy arrays, and a walk over them in chunks that fit in a core's cache.

Everything that a server does to a model is element by element, so it is done chunk by chunk and in
place: a model of any size then needs no temporary copy of itself.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Model = dict[str, Array]

CHUNK = 1 << 15
"""Elements of a chunk: five float32 arrays of it fit in the second-level cache of server cores."""


def chunks(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Yield flat views of equally shaped contiguous arrays, chunk by chunk.

    Example:
        >>> x = np.zeros((2, 2))
        >>> for (part,) in chunks(x):
        ...     part += 1
        >>> x.sum()
        np.float64(4.0)
    """
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, CHUNK):
        yield tuple(part[start : start + CHUNK] for part in flat)


def add_scaled(total: Model, part: Model, factor: float) -> None:
    """Add factor * part to total, in place and without a temporary model."""
    for name, into in total.items():
        for x, y in chunks(into, part[name]):
            np.add(x, y if factor == 1.0 else y * into.dtype.type(factor), out=x)


def scale(model: Model, factor: float) -> None:
    """Multiply a model by a number in place; by exactly 1 does nothing."""
    if factor != 1.0:
        for array in model.values():
            np.multiply(array, array.dtype.type(factor), out=array)


def zeros_like(model: Mapping[str, Array], dtype: npt.DTypeLike | None = None) -> Model:
    """Return zeros in the shapes of a model; in its own dtypes if none is given."""
    return {name: np.zeros(array.shape, dtype or array.dtype) for name, array in model.items()}


def is_finite(model: Mapping[str, Array]) -> bool:
    """Return whether no element is NaN or infinite."""
    return all(np.isfinite(part).all() for array in model.values() for (part,) in chunks(array))


def inner(x: Array, y: Array) -> float:
    """Return the inner product of two chunks, whatever number of threads a BLAS would use."""
    return float(np.einsum("i,i->", x, y))
