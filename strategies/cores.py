"""Large work spread over the cores of this machine, with the same result on any number of them.

NumPy lets go of the interpreter while it computes, so threads are enough, and arrays are shared.
How many there are follows `OMP_NUM_THREADS`, which also tells BLAS and torch, and otherwise the
cores that this process may run on.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import cache
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")

MOST_THREADS = 16
"""Memory is the limit of such work, and a few cores reach it."""


def n_threads() -> int:
    """Return how many threads share large work, from 1 to `MOST_THREADS`."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if asked.isdecimal() and int(asked):
        return min(int(asked), MOST_THREADS)
    return min(n_cores(), MOST_THREADS)


def each(work: Callable[..., Result], items: Sequence[Iterable[Any]]) -> list[Result]:
    """Call work(*item) for every item, on all cores.

    Threads take items as they get to them, so that a core which others use as well holds nobody up.
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
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _pool(n: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n, thread_name_prefix="fedstale-cores")


# The threads of a pool do not live on in a forked child, which makes its own when it needs one.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
