"""Arrays of replies are read as NumPy itself would read them."""

import numpy as np
import pytest
from flwr.app import Array
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedstale.strategies.npy import read


@given(
    hnp.arrays(
        st.sampled_from([np.float16, np.float32, np.float64, np.int64, np.bool_, np.dtype(">f4")]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    ),
    st.booleans(),
)
def test_an_array_is_read_as_numpy_reads_it(array, is_fortran):
    if is_fortran and array.ndim:
        array = np.asfortranarray(array)
    found = read(Array(array))
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert found.flags.c_contiguous
    assert found.flags.writeable


def test_an_array_is_memory_of_its_own():
    stored = Array(np.zeros(3))
    read(stored)[:] = 1.0
    np.testing.assert_array_equal(read(stored), np.zeros(3))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nonsense",
        b"\x93NUMPY\x01\x00",
        b"\x93NUMPY\x01\x00\xff\xffshort",
        Array(np.zeros(3)).data[:-1],
        Array(np.zeros(3)).data + b"\x00",
        Array(np.zeros(3)).data.replace(b"(3,)", b"(4,)"),
        Array(np.zeros(3)).data.replace(b"'<f8'", b"'|O' "),
    ],
)
def test_damaged_bytes_are_an_error_and_not_a_crash(data):
    stored = Array(dtype="float64", shape=(3,), stype="numpy.ndarray", data=data)
    with pytest.raises((ValueError, EOFError)):
        read(stored)
