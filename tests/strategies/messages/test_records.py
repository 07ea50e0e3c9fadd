"""Quantised arrays in Flower's records, alone and packed."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedstale.errors import ProtocolError
from fedstale.strategies.messages.codec import FORMATS, bytes_of, n_bytes
from fedstale.strategies.messages.records import (
    ASKED,
    COMPACT_RECORD,
    Requested,
    coarse,
    decoded,
    form_of,
    is_stated,
    quantised,
    stated,
    without_asking,
)
from fedstale.strategies.server.packing import PACKED_RECORD, pack, unpack

MODEL = {
    "w": np.random.default_rng(0).standard_normal((20, 30)).astype(np.float32),
    "half": np.linspace(-1, 1, 300).astype(np.float16),
    "b": np.arange(9, dtype=np.float32),
    "n": np.array(3),
}


def record(**arrays):
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def model():
    return RecordDict({"arrays": coarse(record(**MODEL), "int4"), "config": ConfigRecord()})


def test_only_large_arrays_of_floats_are_quantised():
    made = coarse(record(**MODEL), "int4")
    assert {name: form_of(array) for name, array in made.items()} == {
        "w": "int4",
        "half": "int4",
        "b": None,
        "n": None,
    }
    sent = [n_bytes("int4", 600), n_bytes("int4", 300), MODEL["b"].nbytes, MODEL["n"].nbytes]
    assert [len(made[name].data) for name in ("w", "half")] == sent[:2]
    assert bytes_of(MODEL.values(), "int4") == sum(sent)


def test_what_is_decoded_has_the_names_shapes_and_dtypes_of_the_model():
    content = decoded(model())
    for name, array in MODEL.items():
        found = content["arrays"][name].numpy()
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        np.testing.assert_allclose(found, array, atol=np.abs(array).max() / 14 * 1.001)
    plain = RecordDict({"arrays": record(**MODEL)})
    assert decoded(plain) is plain


def test_a_mod_or_an_app_that_does_not_know_the_format_cannot_take_it_for_numbers():
    with pytest.raises(TypeError, match=r"fedstale\.int4"):
        model()["arrays"]["w"].numpy()


def test_packed_records_come_out_as_they_were():
    content = model()
    packed = pack(content)
    assert PACKED_RECORD in packed
    assert list(packed.array_records) == [PACKED_RECORD]
    assert unpack(packed) == content
    assert decoded(unpack(packed)) == decoded(content)


@pytest.mark.parametrize("form", FORMATS)
def test_an_array_that_does_not_add_up_is_named(form):
    array = quantised(MODEL["w"], form)
    array.shape = (20, 31)
    with pytest.raises(ProtocolError, match=r"arrays\['w'\] has .* bytes: expected"):
        decoded(RecordDict({"arrays": ArrayRecord({"w": array})}))
    array.shape, array.dtype = (20, 30), "object"
    with pytest.raises(ProtocolError, match="no such format"):
        decoded(RecordDict({"arrays": ArrayRecord({"w": array})}))


@pytest.mark.parametrize(
    "asked",
    [
        Requested(),
        Requested("int4"),
        Requested("int2", "message-7"),
    ],
)
def test_what_is_asked_is_understood(asked):
    config = ConfigRecord({"lr": 0.1})
    content = RecordDict({"arrays": record(), "config": asked.within(config)})
    assert Requested.of(content) == asked
    assert without_asking(content) == RecordDict({"arrays": record(), "config": config})


@pytest.mark.parametrize(
    "record",
    [
        ConfigRecord(),
        ConfigRecord({ASKED: 2}),
        ConfigRecord({ASKED: 1, f"{ASKED}.up": "int3"}),
    ],
)
def test_what_a_later_release_asks_is_left_alone(record):
    assert Requested.of(RecordDict({"config": record})) is None
    assert Requested.of(RecordDict()) is None


def test_a_device_says_that_it_understands():
    assert is_stated(RecordDict({COMPACT_RECORD: stated()}))
    assert not is_stated(RecordDict({COMPACT_RECORD: ConfigRecord({"version": 2})}))
    assert not is_stated(RecordDict())


def test_bytes_are_counted_before_memory_is_taken():
    array = quantised(MODEL["w"], "int2")
    array.shape = (999999999999, 999999999999)
    with pytest.raises(ProtocolError, match="bytes: expected"):
        decoded(RecordDict({"arrays": ArrayRecord({"w": array})}))
