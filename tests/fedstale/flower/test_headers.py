"""Headers of NumPy files that strangers send: read for what `numpy.save` writes, in no time."""

import time

import numpy as np
import pytest
from flwr.app import Array

from fedstale.flower import header_of


def header(about):
    """Return a .npy file with this header and no data."""
    text = about.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def npy(descr="'<f4'", shape="(1,)"):
    return header(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}")


HUGE = 2**62
NONE = {
    "no file": b"abc",
    "nothing": b"",
    "a pickle": npy("'|O'", "(1,)"),
    "a shape beyond all numbers": npy(shape="(" + f"{HUGE}, " * 300 + ")"),
    "a negative shape": npy(shape="(-1,)"),
    "two negative numbers": npy(shape="(-1, -1)") + b"1234",
    "a dtype that is none": npy("'huh'"),
    "a header without end": npy()[:20],
    "a header that nests": header("(" * 5000),
    "a header of another version": b"\x93NUMPY\x09\x00" + npy()[8:],
}


@pytest.mark.parametrize("data", NONE.values(), ids=NONE)
def test_what_numpy_has_not_saved_has_no_header(data):
    assert header_of(data) is None


def padded(text, version=1):
    """Return a .npy file of eight bytes with this text as its header."""
    width = 2 if version == 1 else 4
    head = text.encode() + b"\n"
    return (
        b"\x93NUMPY" + bytes([version, 0]) + len(head).to_bytes(width, "little") + head + bytes(8)
    )


def described(descr="'<f8'", shape="(1,)", order="False"):
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"


FIELDS = "[" + ", ".join(f"('{i}', 'b')" for i in range(700)) + "]"
SLOW = {
    "axes of 1": padded(described(shape="(" + "1, " * 3000 + ")")),
    "numbers of another Python": padded(described(shape="(" + "1L, " * 2000 + ")")),
    "a number of many digits": padded(described(shape="(" + "9" * 9000 + ",)")),
    "fields by commas": padded(described("'" + ",".join("b" * 4500) + "'", "()")),
    "fields as a list": padded(described(FIELDS, "()")),
    "arithmetic": padded(described(shape="(" + "+1, " * 2000 + ")")),
    "sums of complex numbers": padded(described(shape="(" + "1+1j, " * 1500 + ")")),
    "brackets in brackets": padded("(" * 4000 + ")" * 4000),
    "blanks": padded(described() + " " * 60_000),
    "blanks inside": padded("{" + " " * 9000 + "'descr': '<f8'}"),
    "other letters": padded(described("'\u00bc" + "\u0661" * 3000 + "'")),
    "a Fortran order of many words": padded(described(order="not " * 2000 + "True")),
    "a short header that nests": padded(described("'" + ",".join("b" * 400) + "'", "()")),
    "a longer kind of header": padded(described(shape="(" + "1, " * 3000 + ")"), version=2),
    "the longest kind of header": padded(described(shape="(" + "1, " * 3000 + ")"), version=3),
    "a header that is cut": padded(described(FIELDS, "()"))[:3000],
}


def seconds(*files):
    """Return the CPU time that reading headers takes, of three tries the shortest."""
    tries = []
    for _ in range(3):
        before = time.process_time()
        for data in files:
            header_of(data)
        tries.append(time.process_time() - before)
    return min(tries)


@pytest.mark.parametrize("data", SLOW.values(), ids=SLOW)
def test_a_header_takes_no_longer_than_an_honest_one(data):
    n = 20
    honest = Array(np.zeros(max(len(data) - 128, 0), np.uint8)).data
    assert header_of(data) is None
    assert seconds(*[honest] * (n - 1), data) <= 3 * seconds(*[honest] * n) + 5e-4
