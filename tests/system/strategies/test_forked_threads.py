"""A process that is forked while threads compute has threads of its own."""

import multiprocessing

from fedstale.strategies.types import arrays


def test_a_forked_child_has_threads_of_its_own(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    arrays.each(abs, [(-1,), (-2,)])
    assert arrays._pool.cache_info().currsize
    queue = multiprocessing.get_context("fork").SimpleQueue()
    child = multiprocessing.get_context("fork").Process(
        target=lambda: queue.put(
            (arrays._pool.cache_info().currsize, arrays.each(abs, [(-3,), (4,)]))
        )
    )
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert queue.get() == (0, [3, 4])
