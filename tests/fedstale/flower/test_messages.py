"""What Flower keeps to itself of a message, against Flower's own."""

import numpy as np
import pytest
from array_kinds import KINDS
from flwr import app as flower_app
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from fedstale import flower
from fedstale.errors import ConfigError
from fedstale.flower import identity, messages, quick_arrays, read_array, written_array

CONTENT = RecordDict(
    {
        "arrays": ArrayRecord([np.zeros((2, 3)), np.ones(4, np.float32)]),
        "config": ConfigRecord({"server-round": 3, "name": "x"}),
        "metrics": MetricRecord({"loss": 0.5}),
    }
)


@pytest.fixture
def message():
    with identity(7):
        made = Message(CONTENT, 1000, "train.first")
        flower.stamp(made, "message-5", 12.0, 60.0)
    return made


@given(st.data(), KINDS, arrays_of.array_shapes(min_dims=0, min_side=0, max_dims=4), st.booleans())
def test_quick_arrays_hold_the_bytes_and_values_of_numpys(data, dtype, shape, is_turned):
    array = data.draw(arrays_of.arrays(dtype, shape))
    array = array.T if is_turned else array
    theirs, ours = Array(array), written_array(array)
    assert ours == theirs
    assert ours.is_dirty == theirs.is_dirty
    assert ours.object_id == theirs.object_id
    back = read_array(theirs)
    assert back.dtype == theirs.numpy().dtype
    assert back.flags.writeable
    assert back.flags.f_contiguous == theirs.numpy().flags.f_contiguous
    np.testing.assert_array_equal(back, theirs.numpy())
    with quick_arrays():
        assert Array(array) == theirs


def test_a_cut_array_fails_as_numpy_fails():
    array = written_array(np.arange(5))
    array.data = array.data[:-3]
    with pytest.raises(ValueError):  # noqa: PT011 - numpy's own words
        array.numpy()
    with quick_arrays(), pytest.raises(ValueError):  # noqa: PT011
        array.numpy()


def test_without_the_names_that_they_need_arrays_are_flowers_own(without):
    without("flwr.app:Array._is_dirty")
    own = Array.numpy
    with quick_arrays():
        assert Array.numpy is own
        array = written_array(np.arange(4.0))
    assert array == Array(np.arange(4.0))
    np.testing.assert_array_equal(read_array(array), np.arange(4.0))


def test_numbers_and_words_on_the_wire_are_flowers():
    constant = pytest.importorskip("flwr.common.constant")
    codes = {k: v for k, v in vars(flower.ErrorCode).items() if not k.startswith("_")}
    assert codes == {name: getattr(constant.ErrorCode, name) for name in codes}
    assert constant.SUPERLINK_NODE_ID == flower.SUPERLINK_NODE_ID
    assert written_array(np.zeros(1)).stype == Array(np.zeros(1)).stype


def test_stages_of_secure_aggregation_are_told_from_training_by_flowers_words():
    words = pytest.importorskip("flwr.common.secure_aggregation.secaggplus_constants")
    for stage in words.Stage.all():
        content = RecordDict({words.RECORD_KEY_CONFIGS: ConfigRecord({words.Key.STAGE: stage})})
        is_training = stage == words.Stage.COLLECT_MASKED_VECTORS
        assert flower.trains_nothing(content) is not is_training
    assert not flower.trains_nothing(CONTENT)
    assert not flower.trains_nothing(RecordDict({words.RECORD_KEY_CONFIGS: MetricRecord()}))
    for record, key, grows in (
        ("config", "any", True),
        (words.RECORD_KEY_CONFIGS, words.Key.MASKED_PARAMETERS, True),
        (words.RECORD_KEY_CONFIGS, words.Key.PUBLIC_KEY_1, False),
    ):
        size = flower.content_size(RecordDict({record: ConfigRecord({key: bytes(5)})}))
        assert size.values == 5 * grows


def test_a_message_and_its_records_come_back_from_bytes(message):
    back = flower.message_of_bytes(flower.bytes_of_message(message))
    assert back.content == CONTENT
    assert vars(back.metadata) == vars(message.metadata)
    assert flower.records_of_bytes(flower.bytes_of_records(CONTENT)) == CONTENT


def test_a_quick_reply_is_flowers_reply_but_for_its_times(message):
    with identity(7):
        theirs = Message(CONTENT, reply_to=message)
    ours = flower.reply_with(message, CONTENT)
    times = dict.fromkeys(("_created_at", "_ttl"))
    assert vars(ours.metadata) | times == vars(theirs.metadata) | times
    assert ours.content is CONTENT


def test_ids_to_pull_may_go_by_the_name_of_any_flower():
    assert flower.asked_ids(["a"], None) == flower.asked_ids(None, ["a"]) == ["a"]
    assert flower.asked_ids(None, None) is None
    assert flower.asked_ids([], None) == []
    with pytest.raises(TypeError, match="not both"):
        flower.asked_ids(["a"], ["a"])


def sent():
    made = Message(RecordDict(), 1000, "query")
    flower.stamp(made, "message-6", 12.0)
    return made.metadata.run_id, made.metadata.src_node_id


def made_as_before(self, content, dst_node_id, message_type):
    """Make a message as Flower did when only its grid knew the run."""
    about = flower_app.Metadata(
        *(0, "", 0, dst_node_id, "", "", 0.0, 60.0, message_type),
    )
    self.__dict__.update(_metadata=about, _content=content, _error=None)


@pytest.mark.parametrize("made", [Message.__init__, made_as_before], ids=["now", "before"])
def test_an_identity_is_put_back_even_where_there_was_none(made, monkeypatch):
    monkeypatch.setattr(Message, "__init__", made)
    with identity(3):
        with identity(4):
            assert sent() == (4, 1)
        assert sent() == (3, 1)
    assert flower.empty_run(5).run_id == 5


@pytest.mark.parametrize("problem", [RuntimeError("no task is set"), TypeError("no node")])
def test_a_flower_whose_messages_ask_for_more_is_told_in_a_sentence(problem, monkeypatch):
    def init(*_):
        raise problem

    monkeypatch.setattr(Message, "__init__", init)
    messages._try_message.cache_clear()
    with pytest.raises(ConfigError, match=f"simulation: Flower .* makes no message .{problem}.: "):
        identity(3).__enter__()
    messages._try_message.cache_clear()
