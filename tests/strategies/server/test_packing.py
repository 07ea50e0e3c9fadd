"""Arrays as one object: the same bits come out, and what a stranger made up does not."""

import copy
import tracemalloc

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import ErrorCode
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from virtual_grid import VirtualGrid

from fedstale.errors import ProtocolError
from fedstale.strategies.messages import quantised
from fedstale.strategies.server import SuperLinkGrid
from fedstale.strategies.server.packing import (
    MOST_ARRAYS,
    PACKED_RECORD,
    PACKING_RECORD,
    PackedNodes,
    advertised,
    can_unpack,
    pack,
    unpack,
)
from fedstale.strategies.server.superlink import Uploads

pytestmark = pytest.mark.usefixtures("_identity")

DTYPES = st.one_of(
    arrays_of.boolean_dtypes(),
    arrays_of.integer_dtypes(endianness="?"),
    arrays_of.unsigned_integer_dtypes(endianness="?"),
    arrays_of.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    arrays_of.complex_number_dtypes(endianness="?"),
)
SHAPES = arrays_of.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
ARRAYS = st.builds(
    lambda array, fortran: np.asfortranarray(array) if fortran and array.ndim else array,
    arrays_of.arrays(DTYPES, SHAPES),
    st.booleans(),
)
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
RECORDS = st.dictionaries(NAMES, ARRAYS, max_size=6).map(
    lambda found: ArrayRecord({name: Array(array) for name, array in found.items()})
)
CONTENTS = st.dictionaries(
    NAMES,
    RECORDS | st.just(ConfigRecord({"lr": 0.1})) | st.just(MetricRecord({"n": 1})),
    max_size=4,
).map(RecordDict)


def sent(content):
    """Return content as it arrives by Flower's own objects."""
    parts = get_all_nested_objects(content)
    contents = {key: part.deflate() for key, part in parts.items()}
    return inflate_object_from_contents(content.object_id, contents)


def model(n=3, value=1.0):
    return ArrayRecord({f"layer.{i}": Array(np.full((2, i), value, np.float32)) for i in range(n)})


def content(n=3, value=1.0):
    return RecordDict({"arrays": model(n, value), "metrics": MetricRecord({"num-examples": 2})})


@given(CONTENTS)
def test_what_is_unpacked_is_what_was_packed_bit_for_bit(content):
    before = copy.deepcopy(content)
    packed = pack(content)
    found = unpack(sent(packed))
    assert found == content == before
    for name, record in content.array_records.items():
        assert list(found[name]) == list(record)
        assert [a.data for a in found[name].values()] == [a.data for a in record.values()]
    n = sum(map(len, content.array_records.values()))
    assert (PACKED_RECORD in packed) == (n > 1)
    if n > 1:
        assert [len(record) for record in packed.array_records.values()] == [1]


def test_a_big_model_of_many_dtypes_travels_as_one_array():
    kinds = [np.float16, np.float32, np.float64, np.int8, np.uint64, bool, np.complex64]
    rng = np.random.default_rng(0)
    made = {
        f"w{i}": Array((100 * rng.normal(size=(300, 500))).astype(k)) for i, k in enumerate(kinds)
    }
    made |= {"none": Array(np.zeros((0, 7))), "one": Array(np.array(3.0, np.float32))}
    content = RecordDict({"arrays": ArrayRecord(made)})
    packed = sent(pack(content))
    assert unpack(packed)["arrays"] == content["arrays"]
    # Two objects of the array and of its record, and what every message has.
    assert len(get_all_nested_objects(pack(content))) == 5
    assert len(get_all_nested_objects(content)) > 2 * len(made)


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"w": Array(np.zeros(3))},
        {f"{i}": Array(np.zeros(0)) for i in range(MOST_ARRAYS + 1)},
        {"w" * 300_000: Array(np.zeros(3)), "v" * 300_000: Array(np.zeros(3))},
        {"w": Array("a;b", (3,), "numpy.ndarray", b"..."), "b": Array(np.zeros(3))},
    ],
    ids=["none", "one", "too many", "long names", "a dtype of two"],
)
def test_what_is_not_worth_packing_goes_as_it_is(arrays):
    content = RecordDict({"arrays": ArrayRecord(arrays), "config": ConfigRecord({"lr": 0.1})})
    packed = pack(content)
    assert can_unpack(packed)
    assert packed["arrays"] is content["arrays"]
    assert unpack(packed) == content


@pytest.mark.parametrize(
    "array",
    [
        Array("float32", (3,), "torch.tensor", b"..."),
        Array("float32", (4,), "numpy.ndarray", Array(np.zeros(3)).data),
        Array(np.zeros(3, "M8[s]")),
        Array(np.array(["a", "b"])),
        quantised(np.ones((20, 30), np.float32), "int4"),
    ],
    ids=["another format", "not what it says", "times", "texts", "quantised"],
)
def test_an_array_of_any_kind_comes_out_as_it_was(array):
    content = RecordDict({"arrays": ArrayRecord({"w": array, "b": Array(np.zeros(3))})})
    packed = sent(pack(content))
    assert PACKED_RECORD in packed
    assert unpack(packed) == content


def test_records_of_the_names_of_packing_are_no_fault():
    content = RecordDict({PACKED_RECORD: model(), "other": model()})
    assert PACKED_RECORD in pack(content)
    assert "names" not in pack(content)[PACKING_RECORD]


def test_content_that_was_never_packed_is_returned_as_it_is():
    plain = content()
    assert unpack(plain) is plain
    assert not can_unpack(plain)
    assert unpack(advertised(plain)) == plain


def forged(change):
    """Return packed content that a device has changed before it was sent."""
    packed = pack(content())
    about, flat = packed[PACKING_RECORD], packed[PACKED_RECORD]["flat"]
    change(packed, about, flat)
    return sent(packed)


def put(key, value):
    return lambda packed, about, flat: about.update({key: value})


def instead(array):
    def change(packed, about, flat):
        packed[PACKED_RECORD] = ArrayRecord({"flat": array})

    return change


HUGE = 2**62
PLAIN = "2,;float32;numpy.ndarray"
HOSTILE = {
    "another version": put("version", 1),
    "no version": put("version", "1"),
    "no names": put("names", 3),
    "names that are numbers": put("names", [1, 2, 3]),
    "fewer names": put("names", ["a", "b"]),
    "a name twice": put("names", ["a", "a", "b"]),
    "too many names": put("names", [f"{i}" for i in range(MOST_ARRAYS + 1)]),
    "too many sizes": put("sizes", [0] * (MOST_ARRAYS + 1)),
    "more records": put("records", ["arrays", "more"]),
    "a record that is there": put("records", ["metrics"]),
    "a record twice": lambda packed, about, flat: about.update(
        {"records": ["a", "a"], "counts": [1, 2]}
    ),
    "a negative count": lambda packed, about, flat: about.update(
        {"records": ["a", "b"], "counts": [4, -1]}
    ),
    "a huge count": put("counts", [HUGE]),
    "a negative size": put("sizes", [500, -100, 0]),
    "a huge size": put("sizes", [HUGE, HUGE, HUGE]),
    "other sizes": put("sizes", [1, 1, 1]),
    "another checksum": put("checksum", 1),
    "no checksum": put("checksum", ""),
    "no array": lambda packed, about, flat: (
        packed.pop(PACKED_RECORD) and packed.update({PACKED_RECORD: ArrayRecord()})
    ),
    "no record of arrays": lambda packed, about, flat: packed.update(
        {PACKED_RECORD: ConfigRecord({"flat": 1})}
    ),
    "an array of floats": instead(Array(np.zeros(9))),
    "an array by another name": lambda packed, about, flat: packed.update(
        {PACKED_RECORD: ArrayRecord({"w": flat})}
    ),
    "a shape that says more": lambda packed, about, flat: packed.update(
        {PACKED_RECORD: ArrayRecord({"flat": Array("uint8", (HUGE,), "numpy.ndarray", flat.data)})}
    ),
    "a negative shape": instead(Array("uint8", (-1,), "numpy.ndarray", b"")),
    "nothing": instead(Array("uint8", (0,), "numpy.ndarray", b"")),
    "a flat array that was cut": lambda packed, about, flat: packed.update(
        {
            PACKED_RECORD: ArrayRecord(
                {"flat": Array("uint8", flat.shape, "numpy.ndarray", flat.data[:-1])}
            )
        }
    ),
    "no forms": put("forms", "2,;float32;numpy.ndarray"),
    "fewer forms": put("forms", ["2,;float32;numpy.ndarray"]),
    "forms that are numbers": put("forms", [1, 2, 3]),
    "a form of two parts": put("forms", ["2,;float32", PLAIN, PLAIN]),
    "a form of four parts": put("forms", [f"{PLAIN};", PLAIN, PLAIN]),
    "a negative axis": put("forms", ["-2,;float32;numpy.ndarray", PLAIN, PLAIN]),
    "an axis of many digits": put("forms", ["9" * 9000 + ",;float32;x", PLAIN, PLAIN]),
    "axes without end": put("forms", ["1," * 100_000 + ";float32;x", PLAIN, PLAIN]),
    "an axis of other letters": put("forms", ["\u0661,;float32;x", PLAIN, PLAIN]),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_what_pack_cannot_have_made_is_refused_without_taking_memory(change):
    packed = forged(change)
    tracemalloc.start()
    with pytest.raises(ProtocolError):
        unpack(packed)
    assert tracemalloc.get_traced_memory()[1] < 4_000_000
    tracemalloc.stop()


@pytest.mark.parametrize(
    "large", [{"w": Array(np.zeros(10**5, np.uint8))}, {"n" * 10**5: Array(np.ones(1))}]
)
def test_a_reply_of_more_than_may_be_taken_in_is_not_unpacked_whatever_is_large(large, monkeypatch):
    body = RecordDict({"arrays": ArrayRecord({"b": Array(np.ones(3)), **large})})
    grid = SuperLinkGrid(VirtualGrid({}), uploads=Uploads(None))
    packed = reply(3, pack(body))
    monkeypatch.setattr(Uploads, "pull_messages", lambda self, ids: [packed])
    for most_bytes, found in ((101_000, body), (99_000, packed.content)):
        grid.runtime.most_bytes = most_bytes
        assert [each.content for each in grid.pull_messages(["m"])] == [found]


def test_the_forgery_without_a_change_is_unpacked():
    """So that each of the above is refused for its change alone."""
    assert unpack(forged(lambda packed, about, flat: None)) == content()


def message(node, body):
    return Message(body, node, "train")


def reply(node, body):
    return Message(body, reply_to=message(node, RecordDict()))


def test_a_node_is_sent_packed_messages_once_it_has_said_that_it_unpacks():
    nodes = PackedNodes()
    plain = [message(1, content()), message(2, content())]
    assert nodes.packed(plain) == plain
    first = nodes.unpacked(reply(1, advertised(content())))
    assert first.content == content()
    assert nodes.unpacked(reply(2, content())).content == content()
    for_one, for_two = nodes.packed(plain)
    assert PACKED_RECORD in for_one.content
    assert for_two is plain[1]
    # What a strategy has made stays as it is, and the id that a grid gives is that of the strategy.
    assert plain[0].content == content()
    assert for_one.metadata is plain[0].metadata
    assert nodes.unpacked(reply(1, pack(content(value=2.0)))).content == content(value=2.0)


def test_messages_of_one_version_share_what_is_packed():
    nodes, arrays = PackedNodes(), model()
    for node in (1, 2, 3):
        nodes.unpacked(reply(node, advertised(RecordDict())))
    bodies = [RecordDict({"arrays": arrays, "c": ConfigRecord({"i": i})}) for i in range(2)]
    bodies.append(RecordDict({"others": arrays}))
    first, second, third = nodes.packed([message(i + 1, body) for i, body in enumerate(bodies)])
    assert first.content[PACKED_RECORD] is second.content[PACKED_RECORD]
    for each, body in zip((first, second, third), bodies, strict=True):
        assert unpack(each.content) == body


def test_a_reply_that_cannot_be_unpacked_is_an_error_of_that_job_which_names_the_node(caplog):
    bad = reply(77, forged(put("sizes", [1, 1, 1])))
    found = PackedNodes().unpacked(bad)
    assert found.has_error()
    assert found.metadata is bad.metadata
    assert found.error.code == ErrorCode.MOD_FAILED_PRECONDITION
    assert "the reply cannot be unpacked" in found.error.reason
    assert found.error.reason in caplog.text


def test_an_error_reply_passes():
    failed = make_message(reply(1, content()).metadata, error=Error(3, "no"))
    nodes = PackedNodes()
    assert nodes.unpacked(failed) is failed
    assert nodes.packed([failed]) == [failed]
