"""Compiled loops against NumPy, to the last bit."""

from importlib.util import find_spec

import numpy as np
import pytest
from codec_memory import check_memory
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstale.strategies.messages import codec
from fedstale.strategies.messages.codec import BUCKET, encode
from fedstale.strategies.types import CHUNK, LANES, arrays, compiled
from fedstale.strategies.weighting import ClientUpdate, DirectionalGap, Gap
from fedstale.strategies.weighting.gap import divide_by_gap

needs_numba = pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")


def gap_inputs(rng, n, dtype):
    """Return an update, a current and a base model, and C, with whatever a run can meet."""
    delta, now, base, c = (rng.standard_normal(n).astype(dtype) for _ in range(4))
    c = np.maximum(np.abs(c), np.finfo(dtype).tiny)
    odd = rng.integers(0, n, size=(5, max(n // 50, 1)))
    c[odd[0]] = np.finfo(dtype).tiny
    now[odd[1]] = base[odd[1]]
    now[odd[2]], base[odd[2]] = np.finfo(dtype).max, -np.finfo(dtype).max
    c[odd[3]] = np.inf
    c[odd[4]], now[odd[4]] = np.inf, np.inf
    return delta, now, base, c


@needs_numba
@settings(deadline=None, max_examples=30)
@given(
    n=st.sampled_from([1, 2, LANES - 1, LANES, LANES + 1, 10_000, CHUNK - 1, CHUNK]),
    dtype=st.sampled_from([np.float32, np.float64]),
    cap=st.sampled_from([2.0, 3.0, 7.0, 1e30]),
    seed=st.integers(0, 2**32 - 1),
)
def test_compiled_gap_is_numpys_to_the_last_bit(n, dtype, cap, seed):
    delta, now, base, c = gap_inputs(np.random.default_rng(seed), n, dtype)
    other = delta.copy()
    base.flags.writeable = False
    with np.errstate(all="ignore"):
        expected = divide_by_gap(delta, now, base, c, cap=cap)
    found = compiled._gap_compiled()(other, now, base, c, cap=cap)
    np.testing.assert_array_equal(other, delta)
    np.testing.assert_array_equal(found, expected)


def weighed(weighting, model_sizes, dtype, seed=0):
    rng = np.random.default_rng(seed)
    theta = [
        {name: rng.standard_normal(n).astype(dtype) for name, n in model_sizes.items()}
        for _ in range(4)
    ]
    weighting.observe(theta[0], theta[1], 1.0)
    weighting.observe(theta[1], theta[2], 0.5)
    stale = ClientUpdate(delta=theta[3], base=theta[0], current=theta[2], staleness=2)
    return weighting.weigh(stale), theta[3]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("make", [Gap, lambda: Gap(of="layer"), lambda: DirectionalGap(of="model")])
def test_stale_updates_weigh_the_same_on_any_number_of_threads(monkeypatch, make, dtype):
    sizes = {"w": 3 * CHUNK + 17, "b": 5, "v": CHUNK}
    monkeypatch.setattr(arrays, "LARGE", 1 << 62)
    weight, delta = weighed(make(), sizes, dtype)
    monkeypatch.setattr(arrays, "LARGE", 1)
    loops = [lambda: None] + ([compiled._gap_compiled] if find_spec("numba") else [])
    for loop in loops:
        monkeypatch.setattr(compiled, "_gap_compiled", loop)
        for threads in ("1", "2", "5"):
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
            again, parts = weighed(make(), sizes, dtype)
            assert again == weight
            for name, array in parts.items():
                np.testing.assert_array_equal(array, delta[name])


@needs_numba
def test_the_loop_of_the_gap_is_compiled_for_large_models_in_one_real_dtype_only(monkeypatch):
    monkeypatch.setattr(arrays, "LARGE", 100)
    for dtype, n, expected in (
        (np.float32, 100, True),
        (np.float64, 100, True),
        (np.float32, 99, False),
        (np.float16, 100, False),
        (np.dtype(">f4"), 100, False),
    ):
        model = {"w": np.ones(n, dtype)}
        assert (compiled.gap_loop(model, model) is not None) == expected
    mixed = {"w": np.ones(200, np.float32), "v": np.ones(200, np.float64)}
    assert compiled.gap_loop(mixed) is None


def rounding_inputs(rng, n, dtype):
    """Return elements of buckets of all sizes: of zeros, of nearly nothing, and beyond a number."""
    x = rng.standard_normal(n)
    x[rng.random(n) < 0.2] = 0.0
    x[rng.random(n) < 0.2] *= -0.0
    powers = rng.choice([0.0, 1e-45, 1e-39, 1e-30, 1.0, 1e30, 1e38], -(-n // BUCKET))
    x *= np.repeat(powers, BUCKET)[:n]
    odd = rng.integers(0, n, 3)
    x[odd] = rng.choice([np.nan, np.inf, -np.inf, 1.0], 3)
    with np.errstate(over="ignore"):
        return x.astype(dtype)


@needs_numba
@settings(deadline=None, max_examples=60)
@given(
    n=st.sampled_from([1, BUCKET - 1, BUCKET, BUCKET + 1, 32_767, 32_769, 40_000]),
    dtype=st.sampled_from([np.float32, np.float64]),
    form=st.sampled_from(["int8", "int4", "int2"]),
    is_stochastic=st.booleans(),
    has_left=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_compiled_rounding_is_numpys_to_the_last_bit(
    *, n, dtype, form, is_stochastic, has_left, seed
):
    rng = np.random.default_rng(seed)
    x, base = rounding_inputs(rng, n, dtype), rounding_inputs(rng, n, dtype)
    before = rounding_inputs(rng, n, dtype) if has_left else None

    def encoded(least):
        left = None if before is None else before.copy()
        stream = np.random.default_rng(1) if is_stochastic else None
        with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
            patch.setattr(compiled, "LARGE", least)
            if least == 1:
                patch.setattr(codec, "round_to_codes", None)  # not to be called
            data = encode(x, form, minus=base, left=left, rng=stream)
        return data, None if left is None else left.tobytes()

    assert encoded(1) == encoded(1 << 62)


@needs_numba
def test_compiled_rounding_takes_no_more_memory_than_numpys():
    check_memory("int4")


@needs_numba
def test_the_loop_of_rounding_is_compiled_for_large_arrays_only(monkeypatch):
    monkeypatch.setattr(compiled, "LARGE", 100)
    for n, expected in ((100, True), (99, False)):
        x = np.ones(n, np.float32)
        assert (compiled.rounding_loop(x, x.dtype) is not None) == expected


def test_small_arrays_and_float16_ask_for_no_compiled_loop(monkeypatch):
    def compiles(*_):
        raise AssertionError("compiling takes a second")

    monkeypatch.setattr(compiled, "_gap_compiled", compiles)
    monkeypatch.setattr(compiled, "_rounding_compiled", compiles)
    weighed(Gap(), {"w": 9}, np.float64)
    encode(np.ones(9999, np.float32), "int4")
    encode(np.ones(1 << 20, np.float32), "float16")


def test_without_numba_large_arrays_are_quantised_by_numpy(monkeypatch):
    monkeypatch.setattr(compiled, "LARGE", 100)
    monkeypatch.setattr(compiled, "find_spec", lambda _: None)
    uncached = compiled._rounding_compiled.__wrapped__
    monkeypatch.setattr(compiled, "_rounding_compiled", uncached)
    x = np.arange(-500, 500, dtype=np.float32)
    assert compiled.rounding_loop(x, x.dtype) is None
    y = codec.decode(encode(x, "int8"), "int8", x.shape, x.dtype)
    assert np.abs(x - y).max() <= 2.0
