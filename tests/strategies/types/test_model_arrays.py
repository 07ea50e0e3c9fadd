import numpy as np
import pytest

from fedstale.strategies.types import add_scaled, arrays, over_chunks
from fedstale.strategies.types.arrays import CHUNK


def test_threads_follow_openmp_and_else_the_cores_of_this_process(monkeypatch):
    monkeypatch.setattr(arrays, "n_cores", lambda: 3)
    for said, expected in (("2", 2), ("4,2", 4), ("0", 3), ("many", 3), ("", 3), ("999", 16)):
        monkeypatch.setenv("OMP_NUM_THREADS", said)
        assert arrays.n_threads() == expected
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert arrays.n_threads() == 3


@pytest.mark.parametrize("threads", ["1", "2", "3", "16"])
def test_results_come_in_the_order_of_the_items(monkeypatch, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert arrays.each(lambda x: x * x, [(x,) for x in range(100)]) == [x * x for x in range(100)]
    assert arrays.each(lambda: 1, []) == []


def test_an_error_in_any_thread_is_raised(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with pytest.raises(ZeroDivisionError):
        arrays.each(lambda x: 1 / x, [(x,) for x in (1, 2, 0, 4, 5)])


def test_errstate_of_the_caller_holds_in_all_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    big = [(np.full(1000, 3e38, np.float32),) for _ in range(200)]
    with np.errstate(over="ignore"):
        assert all(np.isinf(x).all() for x in arrays.each(lambda x: x + x, big))
    with pytest.warns(RuntimeWarning, match="overflow"):
        arrays.each(lambda x: x + x, big)


def test_a_model_of_small_and_large_arrays_is_walked_whole():
    sizes = {"large": 2 * CHUNK + 1, "none": 0, "one": 1, "chunk": CHUNK, "many": 8 * CHUNK}
    total = {name: np.ones(n, np.float32) for name, n in sizes.items()}
    part = {name: np.full(n, 2.0, np.float32) for name, n in sizes.items()}
    add_scaled(total, part, 0.5)
    assert all((array == 2.0).all() for array in total.values())
    expected = [CHUNK, CHUNK, 1, 1, CHUNK, *[CHUNK] * 8]
    assert over_chunks(np.size, total) == expected
