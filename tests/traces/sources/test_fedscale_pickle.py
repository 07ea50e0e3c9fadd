import contextlib
import copyreg
import gzip
import os
import pickle
import resource
import struct
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstale.errors import TraceError
from fedstale.traces.sources import fedscale
from fedstale.traces.sources.fedscale import load, loads

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.integers() | st.text() | st.booleans() | st.none()
plain = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.dictionaries(keys, inner),
)


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@settings(max_examples=50)
@given(plain, st.integers(0, 5))
def test_plain_data_comes_back_as_the_standard_library_would_give_it(value, protocol):
    data = pickle.dumps(value, protocol=protocol)
    made, expected = loads(data), pickle.loads(data)
    assert made == expected
    assert repr(made) == repr(expected)


@given(st.binary(), st.integers(3, 5))
def test_bytes_come_back(value, protocol):
    assert loads(pickle.dumps(value, protocol=protocol)) == value


def test_text_of_python_2_comes_back_as_text():
    assert loads(b"}U\x06activeq\x00]q\x01(K\x01K\x02es.") == {"active": [1, 2]}


def test_a_list_that_holds_itself_is_read_and_not_followed():
    loop = []
    loop.append(loop)
    made = loads(pickle.dumps(loop))
    assert made[0] is made


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_call_is_rejected_and_not_made(protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Call:
        def __reduce__(self):
            return os.mkdir, ("made",)

    with pytest.raises(TraceError, match=r"GLOBAL.*rejected"):
        loads(pickle.dumps({1: Call()}, protocol=protocol))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "value",
    [print, Evil(), np.float64(1.0), np.arange(3), {1, 2}, frozenset(), bytearray(b"x"), 1j],
    ids=lambda v: type(v).__name__,
)
@pytest.mark.parametrize("protocol", [2, 5])
def test_everything_that_is_not_plain_is_rejected(value, protocol):
    with pytest.raises(TraceError, match="rejected"):
        loads(pickle.dumps(value, protocol=protocol))


@pytest.mark.parametrize(
    "data",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"(S'true'\nios\nsystem\n.",
        b"(cos\nsystem\nS'true'\no.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02P1\n.",
        b"\x80\x02NQ.",
        b"\x80\x02NNb.",
        b"\x80\x05\x97.",
        b"\x80\x02\xff.",
    ],
    ids=["GLOBAL", "INST", "OBJ", "EXT1", "PERSID", "BINPERSID", "BUILD", "BUFFER", "unknown"],
)
def test_every_instruction_that_could_import_or_call_is_rejected(data):
    with pytest.raises(TraceError, match=r"rejected|unknown"):
        loads(data)


def test_an_extension_that_was_loaded_before_is_rejected_too():
    copyreg.add_extension("os", "system", 1)
    try:
        assert pickle.loads(b"\x80\x02\x82\x01.") is os.system
        with pytest.raises(TraceError, match=r"EXT1 .*rejected"):
            loads(b"\x80\x02\x82\x01.")
    finally:
        copyreg.remove_extension("os", "system", 1)


@settings(max_examples=50)
@given(plain.map(pickle.dumps), st.data())
def test_a_truncated_pickle_is_a_trace_error(data, draw):
    cut = draw.draw(st.integers(0, len(data) - 1))
    with pytest.raises(TraceError):
        loads(data[:cut])


@given(st.binary(max_size=200))
def test_arbitrary_bytes_give_a_value_or_a_trace_error(data):
    with contextlib.suppress(TraceError):
        loads(b"\x80\x04" + data)


@pytest.mark.parametrize("code", [b"r\xff\xff\xff\xff", b"r\xff\xff\xff\x0f", b"p268435455\n"])
def test_a_memo_key_of_millions_costs_nothing(code):
    before = peak_bytes()
    with pytest.raises(TraceError, match="numbers an object"):
        loads(b"\x80\x02N" + code + b".")
    assert peak_bytes() - before < 1 << 27


@pytest.mark.parametrize("code", [b"\x8e", b"\x8d"], ids=["bytes", "text"])
def test_a_length_that_the_file_does_not_have_is_rejected_without_memory(code):
    with pytest.raises(TraceError, match="truncated"):
        loads(b"\x80\x04" + code + struct.pack("<Q", 1 << 60) + b"x.")


@pytest.mark.parametrize("length", [1 << 60, 1 << 33])
def test_a_frame_that_the_file_does_not_have_is_rejected_without_memory(length):
    before = peak_bytes()
    with pytest.raises(TraceError, match="truncated"):
        loads(b"\x80\x04\x95" + struct.pack("<Q", length) + b"N.")
    assert peak_bytes() - before < 1 << 27


def test_lists_nested_deeper_than_any_stack_do_not_break_it():
    made = loads(b"]" * 200_000 + b"a" * 199_999 + b".")
    assert len(made) == 1


def test_a_nested_tuple_is_rejected_because_hashing_it_as_a_key_could_take_for_ever():
    # Sixty doublings: a tree of 2 ** 60 leaves in 300 bytes.
    doubling = b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(60))
    with pytest.raises(TraceError, match=r"TUPLE2 .*rejected"):
        loads(b"\x80\x02}K\x01" + doubling + b"Ns.")


@pytest.mark.parametrize("value", [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)])
def test_no_tuple_is_accepted(value):
    with pytest.raises(TraceError, match=r"TUPLE.*rejected"):
        loads(pickle.dumps([value]))


def test_keys_whose_hashes_are_equal_are_rejected_before_they_are_hashed():
    collide = {k * sys.hash_info.modulus: None for k in range(3000)}
    assert len({hash(k) for k in collide}) == 1
    with pytest.raises(TraceError, match="more than 1000 integers beyond 64 bits"):
        loads(pickle.dumps(collide))
    few = {k: collide[k] for k in list(collide)[:500]}
    assert loads(pickle.dumps(few)) == few


def test_a_list_cannot_be_a_key():
    with pytest.raises(TraceError, match=r"damaged pickle .*unhashable"):
        loads(b"\x80\x02}]Ns.")


def test_more_instructions_than_the_limit_are_rejected(monkeypatch):
    monkeypatch.setattr(fedscale, "MAX_OPCODES", 10)
    with pytest.raises(TraceError, match="more than 10 instructions"):
        loads(pickle.dumps(list(range(100))))


def test_a_file_larger_than_the_limit_is_rejected_also_when_it_is_packed(tmp_path, monkeypatch):
    monkeypatch.setattr(fedscale, "MAX_BYTES", 1000)
    file = tmp_path / "bomb"
    file.write_bytes(gzip.compress(b"\x80\x04" + b"N0" * 1_000_000 + b"N."))
    with pytest.raises(TraceError, match="larger than 1000 bytes"):
        load(file)


@pytest.mark.parametrize("protocol", range(6))
def test_half_of_a_character_is_no_text(protocol):
    with pytest.raises(TraceError, match="damaged pickle"):
        loads(pickle.dumps("a\ud800", protocol=protocol))
