"""Models as named NumPy arrays, walked in chunks that fit in a core's cache, on all cores.

Everything that a server does to a model is element by element, so it is done chunk by chunk and in
place: a model of any size needs no temporary copy of itself, and the chunks of a large one are
shared among threads (NumPy releases the interpreter while it computes). Chunks do not depend on the
number of threads, and what is summed over them is added in their order, so results are the same to
the last bit on any number. That number follows `OMP_NUM_THREADS`, which also tells BLAS and torch,
and otherwise the cores that this process may run on.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import cache, partial
from math import inf, isfinite, sqrt
from operator import itemgetter, methodcaller
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Model = dict[str, Array]
Result = TypeVar("Result")

CHUNK = 1 << 17
"""Elements of a chunk: a float32 temporary of it fits in the second-level cache of server cores."""

LARGE = 1 << 20
"""Elements of a model from which on its chunks are shared among the cores."""

_FLAT = methodcaller("reshape", -1)

_LANES = 512
"""Running sums of `chunk_sum`: together they fit in the first-level cache."""

MOST_THREADS = 16
"""Such work is bound by memory, which a few cores saturate."""


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


def over_chunks(work: Callable[..., Result], *models: Mapping[str, Array]) -> list[Result]:
    """Call work on each chunk of equally shaped models, on all cores if they are large.

    Args:
        work: takes one chunk of each model, and may write to it.
        models: the first one says which names there are.

    Returns:
        What work returned for each chunk, in the order of names and chunks.

    Example:
        >>> model = {"w": np.array([1.0, 2.0]), "b": np.array([4.0])}
        >>> over_chunks(np.sum, model)
        [np.float64(3.0), np.float64(4.0)]
    """
    # Most models are small, their arrays one chunk each, and there are thousands of replies a
    # second: no comprehension, which is a call of its own.
    size = 0
    for array in models[0].values():
        size += array.size
    results: list[Result] = []
    if size >= LARGE:
        parts = [part for name in models[0] for part in chunks(*[model[name] for model in models])]
        return each(work, parts)
    for name, first in models[0].items():
        arrays = map(itemgetter(name), models)
        if 0 < first.size <= CHUNK:
            results.append(work(*map(_FLAT, arrays)))
        else:
            results += [work(*part) for part in chunks(*arrays)]
    return results


def add_scaled(total: Model, part: Model, factor: float) -> None:
    """Add factor * part to total, in place and without a temporary model."""
    over_chunks(partial(_add_scaled, factor=factor), total, part)


def _add_scaled(x: Array, y: Array, *, factor: float) -> None:
    if factor == 1.0:
        np.add(x, y, out=x)
    elif factor == -1.0:
        np.subtract(x, y, out=x)
    else:
        np.add(x, y * x.dtype.type(factor), out=x)


def scale(model: Model, factor: float) -> None:
    """Multiply a model by a number in place; by exactly 1 does nothing."""
    if factor != 1.0:
        over_chunks(partial(_scale, factor=factor), model)


def _scale(x: Array, *, factor: float) -> None:
    np.multiply(x, x.dtype.type(factor), out=x)


def copy_of(model: Mapping[str, Array]) -> Model:
    """Return a model with memory of its own, in C order."""
    new: Model = {}
    for name, array in model.items():
        new[name] = np.empty(array.shape, array.dtype)
    over_chunks(np.copyto, new, model)
    return new


def zeros_like(model: Mapping[str, Array], dtype: npt.DTypeLike | None = None) -> Model:
    """Return zeros in the shapes of a model; in its own dtypes if none is given."""
    new: Model = {}
    for name, array in model.items():
        new[name] = np.zeros(array.shape, dtype or array.dtype)
    return new


def at_least_single(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Return a dtype of real numbers, or float32 in the place of float16."""
    return np.promote_types(dtype, np.float32)


def is_finite(model: Mapping[str, Array]) -> bool:
    """Return whether no element is NaN or infinite."""
    return all(over_chunks(_is_finite, model))


def _is_finite(x: Array) -> bool:
    return bool(np.isfinite(x).all())


def inner(x: Array, y: Array) -> float:
    """Return the inner product of two chunks, whatever number of threads a BLAS would use.

    It is summed in the chunks' own precision, or in float64 where it leaves their range.
    """
    product = float(np.einsum("i,i->", x, y))
    if isfinite(product):
        return product
    return float(np.einsum("i,i->", x.astype(np.float64), y.astype(np.float64)))


def chunk_sum(x: Array) -> float:
    """Return the sum of a chunk.

    Element i is added to running sum i mod `_LANES`, in the chunk's own precision; the running sums
    are then added in float64.
    """
    whole = x.size - x.size % _LANES
    sums = x[:whole].reshape(-1, _LANES).sum(axis=0)
    sums[: x.size - whole] += x[whole:]
    return float(sums.sum(dtype=np.float64))


def norm_of(model: Model) -> float:
    """Return the Euclidean norm over all arrays of a model, in float64."""
    total = sum(over_chunks(_square, model))
    return sqrt(total) if total < inf else inf


@np.errstate(invalid="ignore")  # of a NaN that signals; whoever asks for a norm looks at it
def _square(x: Array) -> float:
    wide = x.astype("float64", copy=False)
    return inner(wide, wide)


def square_distance(one: Mapping[str, Array], other: Mapping[str, Array]) -> float:
    """Return the squared Euclidean distance of two models, chunk by chunk in their own precision.

    Args:
        one: a model, or some arrays of it.
        other: a model that has at least these arrays.
    """
    return sum(over_chunks(_square_distance, one, other))


def _square_distance(x: Array, y: Array) -> float:
    apart = np.subtract(x, y, dtype=at_least_single(x.dtype))
    return inner(apart, apart)


def n_threads() -> int:
    """Return the number of threads that share large work, from 1 to `MOST_THREADS`."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if asked.isdecimal() and int(asked):
        return min(int(asked), MOST_THREADS)
    return min(n_cores(), MOST_THREADS)


def each(work: Callable[..., Result], items: Sequence[Iterable[Any]]) -> list[Result]:
    """Call work(*item) for every item, on all cores.

    Threads take items as they get to them, so that a core which others use as well delays none.
    Settings such as `np.errstate` hold in all of them.

    Args:
        work: must not depend on the order of the items, nor call `each`.
        items: the arguments of each call.

    Returns:
        What the calls returned, in the order of the items.

    Raises:
        Exception: what a call raised; no call is running any more then.

    Example:
        >>> each(max, [(1, 2), (4, 3)])
        [2, 4]
    """
    n_helpers = min(n_threads(), len(items)) - 1
    if n_helpers < 1:
        return [work(*item) for item in items]
    todo: SimpleQueue[int] = SimpleQueue()
    for k in range(len(items)):
        todo.put(k)
    results: dict[int, Result] = {}

    def drain() -> None:
        while True:
            try:
                k = todo.get_nowait()
            except Empty:
                return
            results[k] = work(*items[k])

    pool = _pool(n_threads() - 1)
    helpers = [pool.submit(copy_context().run, drain) for _ in range(n_helpers)]
    try:
        drain()
    finally:
        wait(helpers)
    for helper in helpers:
        helper.result()
    return [results[k] for k in range(len(items))]


def n_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _pool(n: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n, thread_name_prefix="fedstale-cores")


# The threads of a pool do not live on in a forked child, which makes its own when it needs one.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
