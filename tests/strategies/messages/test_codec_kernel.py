"""The compiled loop of rounding against NumPy, to the last bit."""

import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstale.strategies.messages import codec, codec_kernel
from fedstale.strategies.messages.codec import BUCKET, encode
from fedstale.strategies.messages.codec_kernel import rounding_loop

needs_numba = pytest.mark.skipif(
    find_spec("numba") is None, reason="needs numba: pip install 'fedstale[fast]'"
)


def drawn(rng, n, dtype):
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
    x, base = drawn(rng, n, dtype), drawn(rng, n, dtype)
    before = drawn(rng, n, dtype) if has_left else None

    def encoded(least):
        left = None if before is None else before.copy()
        stream = np.random.default_rng(1) if is_stochastic else None
        with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
            patch.setattr(codec_kernel, "LARGE", least)
            if least == 1:
                patch.setattr(codec, "round_to_codes", None)  # not to be called
            data = encode(x, form, minus=base, left=left, rng=stream)
        return data, None if left is None else left.tobytes()

    assert encoded(1) == encoded(1 << 62)


@needs_numba
def test_the_loop_is_compiled_for_large_arrays_only(monkeypatch):
    monkeypatch.setattr(codec_kernel, "LARGE", 100)
    for n, expected in ((100, True), (99, False)):
        assert (rounding_loop(np.ones(n, np.float32), np.dtype("f4")) is not None) == expected


def test_a_small_array_is_quantised_without_importing_numba():
    code = """
import sys, numpy as np
from fedstale.strategies.messages.codec import encode
encode(np.ones(9999, np.float32), "int4")
print("numba" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False"]


def test_without_numba_large_arrays_are_quantised_by_numpy(monkeypatch):
    monkeypatch.setattr(codec_kernel, "LARGE", 100)
    monkeypatch.setattr(codec_kernel, "find_spec", lambda _: None)
    monkeypatch.setattr(codec_kernel, "_compiled", codec_kernel._compiled.__wrapped__)
    x = np.arange(-500, 500, dtype=np.float32)
    assert rounding_loop(x, x.dtype) is None
    y = codec.decode(encode(x, "int8"), "int8", x.shape, x.dtype)
    assert np.abs(x - y).max() <= 2.0
