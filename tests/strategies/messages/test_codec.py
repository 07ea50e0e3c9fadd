"""Quantised arrays: what rounding may change, sizes, and bytes of strangers."""

import sys

import numpy as np
import pytest
from codec_memory import check_memory
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from fedstale.errors import ProtocolError
from fedstale.strategies.messages.codec import (
    BUCKET,
    FORMATS,
    LEAST,
    decode,
    encode,
    is_quantised,
    n_bytes,
)

LEVELS = {"int8": 127, "int4": 7, "int2": 1}
WHOLE = tuple(LEVELS)

SIZES = st.one_of(
    st.integers(0, 1100), st.sampled_from([BUCKET, 2 * BUCKET, (1 << 15) - 1, 1 << 15, 40_000])
)


@st.composite
def values(draw, dtypes=("f4", "f8", "f2")):
    """Draw an array whose buckets are of different sizes, some of them 0."""
    n, dtype = draw(SIZES), draw(st.sampled_from(dtypes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    most = 4 if dtype == "f2" else 30
    powers = rng.integers(-most, most, -(-max(n, 1) // BUCKET)) * rng.integers(0, 2)
    x = rng.standard_normal(n) * np.repeat(10.0**powers, BUCKET)[:n]
    x[rng.random(n) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = 0.0
    return x.astype(dtype)


def slowly(x, form):
    """Encode and decode, element by element: an oracle in float64."""
    result = np.empty(x.size)
    for start in range(0, x.size, BUCKET):
        bucket = x[start : start + BUCKET].astype(np.float64)
        s = float(np.float32(np.abs(bucket).max()))
        for i, each in enumerate(bucket):
            q = round(each / s * LEVELS[form]) if s else 0
            result[start + i] = q * s / LEVELS[form]
    return result


def scale_of(x):
    """Return the largest element of each bucket, at each of its elements."""
    buckets = [np.abs(x[i : i + BUCKET]).max() for i in range(0, x.size, BUCKET)]
    return np.repeat(np.array(buckets, np.float64), BUCKET)[: x.size]


@pytest.mark.parametrize("form", WHOLE)
@given(x=values())
def test_nearest_rounding_is_off_by_half_a_step_at_most(form, x):
    y = decode(encode(x, form), form, x.shape, x.dtype)
    half = scale_of(x) / (2 * LEVELS[form])
    # Quotients, products and the scale itself are rounded to float32.
    slack = scale_of(x) * 4 * np.finfo(np.float32).eps + 127 * np.finfo(np.float32).tiny
    assert (np.abs(y.astype(np.float64) - x) <= half + slack).all()


@pytest.mark.parametrize("form", WHOLE)
def test_numbers_are_those_of_the_formula_element_by_element(form):
    x = np.random.default_rng(0).standard_normal(1300)
    y = decode(encode(x, form), form, x.shape, x.dtype)
    np.testing.assert_allclose(y, slowly(x, form), rtol=1e-6)


@pytest.mark.parametrize("form", FORMATS)
@given(x=values())
def test_sizes_follow_from_shapes_and_results_are_of_the_same_shape_and_precision(form, x):
    x = x if x.size % 2 else x.reshape(2, -1)
    with np.errstate(over="ignore"):
        is_within = np.isfinite(x.astype(np.float16)).all()
    data = encode(x, form)
    assert len(data) == n_bytes(form, x.size)
    if form == "float16" and not is_within:
        return
    y = decode(data, form, x.shape, x.dtype)
    assert y.shape == x.shape
    assert y.dtype == np.promote_types(x.dtype, np.float32)


def test_an_element_takes_the_bits_of_its_format_and_a_share_of_a_scale():
    n = 100 * BUCKET
    bits = {form: 8 * n_bytes(form, n) / n for form in FORMATS}
    assert bits == {"float16": 16, "int8": 8.0625, "int4": 4.0625, "int2": 2.0625}


@pytest.mark.parametrize("form", FORMATS)
@given(x=values(("f4", "f8")), seed=st.integers(0, 99))
def test_what_is_left_out_and_what_is_sent_add_up(form, x, seed):
    rng = np.random.default_rng(seed)
    x = np.clip(x, -1e4, 1e4)
    base = rng.standard_normal(x.size).astype(x.dtype)
    before = rng.standard_normal(x.size).astype(x.dtype)
    left = before.copy()
    y = decode(encode(x, form, minus=base, left=left), form, x.shape, x.dtype)
    wanted = (x - base) + before
    # Adding what was subtracted rounds once more.
    most = np.abs(wanted).max(initial=0.0)
    np.testing.assert_allclose(y + left, wanted, rtol=0.0, atol=4 * np.finfo(np.float32).eps * most)


@pytest.mark.parametrize("form", FORMATS)
def test_error_feedback_delivers_a_constant_change_in_full(form):
    rng = np.random.default_rng(3)
    delta, left = rng.standard_normal(900).astype(np.float32), np.zeros(900, np.float32)
    total, n = np.zeros(900), 400
    for _ in range(n):
        total += decode(encode(delta, form, left=left), form, delta.shape, delta.dtype)
    # Without feedback an element that is rounded to 0 would never arrive.
    np.testing.assert_allclose(total / n, delta, atol=np.abs(left).max() / n + 1e-5)
    assert np.abs(left).max() < 10.0


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("has_torch", [True, False])
def test_float16_rounds_as_numpy_does_with_torch_and_without(dtype, has_torch, monkeypatch):
    if has_torch:
        pytest.importorskip("torch")
    else:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    rng = np.random.default_rng(0)
    # Ties between two neighbours, and numbers that are subnormal in float16, among others.
    x = np.concatenate([rng.standard_normal(40_000), np.arange(4096) / 2, 2.0**-26 * np.arange(99)])
    x, left = x.astype(dtype), rng.standard_normal(x.size).astype(dtype)
    wanted = x.astype(np.float16)
    assert encode(x, "float16") == wanted.tobytes()
    owed = (x + left).astype(np.float16)
    after = left.copy()
    assert encode(x, "float16", left=after) == owed.tobytes()
    np.testing.assert_array_equal(after, x + left - owed.astype(dtype))
    y = decode(wanted.tobytes(), "float16", x.shape, x.dtype)
    np.testing.assert_array_equal(y, wanted.astype(np.promote_types(dtype, np.float32)))


def test_small_arrays_integers_and_what_would_grow_go_in_full():
    assert is_quantised("int2", np.float32, (LEAST,))
    assert not is_quantised("int2", np.float32, (LEAST - 1,))
    assert not is_quantised("int2", np.int64, (10_000,))
    assert not is_quantised("int2", np.bool_, (10_000,))
    assert not is_quantised("int8", np.dtype(np.float32).newbyteorder(), (10_000,))
    assert not is_quantised("int8", np.longdouble, (10_000,))
    # No smaller than it is.
    assert not is_quantised("float16", np.float16, (10_000,))


# Bytes of strangers, and numbers that have none.


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_has_its_size_and_is_refused(form, bad):
    x = np.ones(3 * BUCKET, np.float32)
    x[BUCKET] = bad
    data = encode(x, form, left=np.zeros(x.shape, x.dtype))
    assert len(data) == n_bytes(form, x.size)
    with pytest.raises(ProtocolError, match=r"a scale of nan|NaN, infinity"):
        decode(data, form, x.shape, x.dtype)


def test_what_float16_cannot_hold_is_refused():
    x = np.ones(LEAST, np.float32)
    x[0] = 1e5
    with pytest.raises(ProtocolError, match="more than float16 can"):
        decode(encode(x, "float16"), "float16", x.shape, x.dtype)


def test_what_a_scale_cannot_hold_is_refused():
    x = np.full(LEAST, 1e39)
    with pytest.raises(ProtocolError, match="scale of nan"):
        decode(encode(x, "int8"), "int8", x.shape, x.dtype)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -1.0, -1e-30])
@pytest.mark.parametrize("form", WHOLE)
def test_scales_that_are_none_are_refused(form, scale):
    data = bytearray(encode(np.ones(3 * BUCKET, np.float32), form))
    data[4:8] = np.float32(scale).tobytes()
    with pytest.raises(ProtocolError, match=f"has a scale of {np.float32(scale)}"):
        decode(bytes(data), form, (3 * BUCKET,), np.float32)


@pytest.mark.parametrize(("form", "code"), [("int8", 128), ("int4", 0xF0), ("int2", 3)])
def test_numbers_beyond_the_format_are_refused(form, code):
    data = bytearray(encode(np.zeros(LEAST, np.float32), form))
    data[-1] = code
    with pytest.raises(ProtocolError, match=f"a number that {form} does not use"):
        decode(bytes(data), form, (LEAST,), np.float32)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("change", [-4, -1, 1, 4, 10_000])
def test_other_lengths_are_refused(form, change):
    data = encode(np.ones(LEAST, np.float32), form)
    data = data[:change] if change < 0 else data + bytes(change)
    with pytest.raises(ProtocolError, match=r"bytes: expected .* for \(256,\)"):
        decode(data, form, (LEAST,), np.float32)


@pytest.mark.parametrize("form", WHOLE)
def test_more_scales_than_buckets_are_refused(form):
    data = encode(np.ones(BUCKET, np.float32), form)
    with pytest.raises(ProtocolError, match="bytes: expected"):
        decode(data[:4] + data, form, (BUCKET,), np.float32)


@pytest.mark.parametrize("form", FORMATS)
def test_a_shape_of_a_terabyte_takes_no_memory_before_it_is_refused(form):
    with pytest.raises(ProtocolError, match="bytes: expected"):
        decode(b"\0" * 1000, form, (10**6, 10**6), np.float32)


@pytest.mark.parametrize("form", FORMATS)
@given(data=st.data(), dtype=st.sampled_from(["f4", "f8"]))
def test_any_bytes_of_the_right_length_are_numbers_or_refused(form, data, dtype):
    n = data.draw(st.integers(0, 600))
    size = n_bytes(form, n)
    raw = data.draw(npst.arrays(np.uint8, size, elements=st.integers(0, 255))).tobytes()
    try:
        x = decode(raw, form, (n,), dtype)
    except ProtocolError:
        return
    assert x.shape == (n,)
    assert not np.isnan(x).any()


@pytest.mark.parametrize("form", FORMATS)
def test_memory_is_that_of_a_chunk_beyond_in_and_out(form):
    check_memory(form)
