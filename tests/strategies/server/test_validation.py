"""What validation accepts, and what it rejects and why."""

import re
from math import inf

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from replies import BASE, GOOD, good, job, reply
from virtual_grid import content, record

from fedstale.errors import ConfigError, ProtocolError
from fedstale.strategies.server.checks import Checks, Validation
from fedstale.strategies.server.versions import Snapshot, Versions, read
from fedstale.strategies.types import RejectionError, forecast_in

pytestmark = pytest.mark.usefixtures("_identity")
ZERO = {"n": np.array(0.0), "on": np.zeros(2)}


def validated(body, validation=None):
    return Checks(validation or Validation()).read(reply(body), job(), Versions(BASE))


def check_size(message, model_bytes, **settings):
    validation = Validation(**settings)
    most = validation.most_bytes_of(model_bytes)
    Checks(validation, most_bytes=most).check_size(message)


def kind_of(body, validation=None):
    with pytest.raises(RejectionError) as caught:
        validated(body, validation)
    assert str(caught.value)
    return caught.value.kind


def stored(data, stype="numpy.ndarray"):
    return Array(dtype="float32", shape=(2, 3), stype=stype, data=data)


def with_w(array):
    body = good()
    body["arrays"]["w"] = array
    return body


def test_a_good_reply_becomes_a_change():
    update = validated(good())
    np.testing.assert_array_equal(update.delta["w"], 1.0)
    np.testing.assert_array_equal(update.delta["b"], 0.0)
    assert update.counts["n"] == 2.0
    np.testing.assert_array_equal(update.counts["on"], [-1.0, 1.0])
    assert (update.examples, update.metrics) == (3.0, {"train_loss": 0.5})
    assert update.delta["w"].dtype == np.float32
    assert update.delta["w"].flags.writeable


def test_an_update_knows_its_job_its_base_and_the_current_version():
    versions = Versions(BASE)
    versions.hold(0)
    for k in (1, 2):
        versions.advance(BASE.stepped({"w": BASE.floats["w"] + k, "b": BASE.floats["b"]}, ZERO))
    update = Checks(Validation()).read(reply(good(), 9), job(9, job_id=4), versions)
    assert (update.node_id, update.message_id, update.job_id) == (9, "m4", 4)
    assert (update.base_version, update.staleness) == (0, 2)
    assert update.base is BASE.floats
    assert update.current is versions.current.floats
    # The change is against the version that the client received.
    np.testing.assert_array_equal(update.delta["w"], 1.0)
    assert np.isnan(update.weight)
    assert not update.limited


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"w": np.ones((2, 3))}, "dtype"),
        ({"w": np.ones((2, 3), np.float16)}, "dtype"),
        ({"w": np.ones((2, 3), np.int32)}, "dtype"),
        ({"w": np.ones((2, 3), np.complex64)}, "dtype"),
        ({"w": np.array([["a", "b", "c"]] * 2)}, "format"),
        ({"n": np.array(6.0, np.float32)}, "dtype"),
        ({"w": np.ones((3, 2), np.float32)}, "shape"),
        ({"w": np.ones(6, np.float32)}, "shape"),
        ({"n": np.ones(1, np.int64)}, "shape"),
        ({"w": np.ones((2000, 3), np.float32)}, "bytes"),
        ({"w": np.full((2, 3), np.nan, np.float32)}, "finite"),
        ({"b": np.array([1.0, -np.inf])}, "finite"),
        ({"x": np.ones(1)}, "names"),
    ],
)
def test_a_reply_that_does_not_fit_the_model_is_rejected_by_kind(changes, kind):
    assert kind_of(good(**changes)) == kind


@pytest.mark.parametrize("array", [np.ones((2, 3)), np.ones((2, 3), np.int32)])
def test_a_rejected_dtype_is_told_with_the_setting_that_converts_it(array):
    with pytest.raises(RejectionError, match=r'expected float32; Validation\(dtypes="cast"\)'):
        validated(good(w=array))
    assert validated(good(w=array), Validation(dtypes="cast")).delta["w"].dtype == np.float32


def test_what_no_setting_converts_is_not_told_of_one():
    with pytest.raises(RejectionError, match=r"complex64: expected float32$"):
        validated(good(w=np.ones((2, 3), np.complex64)))


def test_lists_of_metrics_are_metrics_by_element():
    body = good()
    body["metrics"]["auc"] = [0.5, 0.75]
    assert validated(body).metrics == {"train_loss": 0.5, "auc.0": 0.5, "auc.1": 0.75}


def test_other_dtypes_are_converted_where_asked_for_and_overflow_is_found():
    validation = Validation(dtypes="cast")
    update = validated(good(w=np.ones((2, 3)), n=np.array(6.0, np.float32)), validation)
    assert update.delta["w"].dtype == np.float32
    assert kind_of(good(w=np.full((2, 3), 1e300)), validation) == "finite"
    assert kind_of(good(w=np.ones((2, 3), np.complex64)), validation) == "dtype"


def test_a_change_of_counts_may_be_negative_or_a_fraction():
    body = good(n=np.array(-2), on=np.array([-0.5, 0.5]))
    body["fedstale"] = ConfigRecord({"fedstale.update": "delta"})
    update = validated(body)
    assert update.counts["n"] == -2.0
    np.testing.assert_array_equal(update.counts["on"], [-0.5, 0.5])


def test_a_change_of_counts_beyond_all_integers_is_rejected():
    for n in (2.0**65, -(2.0**65)):
        assert kind_of(good(n=np.array(n))) == "finite"


@pytest.mark.parametrize(("step", "is_kept"), [(5_000.0, True), (6_000.0, False)])
def test_one_weight_beyond_half_precision_is_enough_to_reject_an_update(step, is_kept):
    versions = Versions(Snapshot.of(record(w=np.array([1.0, 60_000.0], np.float16))))
    body = content(record(w=np.array([1.0, step], np.float16)), 1)
    body["fedstale"] = ConfigRecord({"fedstale.update": "delta"})
    if is_kept:
        found = Checks(Validation()).read(reply(body), job(), versions)
        np.testing.assert_array_equal(found.delta["w"], [1.0, step])
    else:
        with pytest.raises(RejectionError, match="beyond the range of float16"):
            Checks(Validation()).read(reply(body), job(), versions)


def save(array):
    return Array(array).data


PLAIN = save(GOOD["w"])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        PLAIN[:8],
        PLAIN[:40],
        b"PK\x03\x04" + PLAIN,
        PLAIN[:6] + b"\x02\x00" + PLAIN[8:],
        PLAIN[:8] + b"\xff\xff" + PLAIN[10:],
        PLAIN[:8] + b"\x00\x00" + PLAIN[10:],
        PLAIN.replace(b"'<f4'", b"'|O' "),
        PLAIN.replace(b"False", b"None "),
        PLAIN.replace(b"(2, 3), }", b"(" * 9),
        PLAIN.replace(b"{'descr'", b"[" * 8),
        PLAIN.replace(b"'shape'", b"'shAPe'"),
        # For a pattern in which digits can be grouped in many ways, this takes for ever.
        PLAIN.replace(b"(2, 3), }" + b" " * 31, b"(" + b"9" * 39),
    ],
)
def test_bytes_that_are_no_plain_array_are_rejected_before_they_are_parsed(data):
    assert kind_of(with_w(stored(data))) == "format"


@pytest.mark.parametrize("data", [PLAIN[:-1], PLAIN + b"\0", PLAIN.replace(b"<f4", b"<f2")])
def test_more_or_fewer_bytes_than_announced_are_rejected(data):
    validation = Validation(dtypes="cast")
    assert kind_of(with_w(stored(data)), validation) == "bytes"


def test_a_dtype_that_does_not_exist_is_rejected():
    assert kind_of(with_w(stored(PLAIN.replace(b"<f4", b"<f3")))) == "format"


def test_an_announced_size_is_never_allocated():
    huge = PLAIN.replace(b"(2, 3), }          ", b"(2000000000, 30), }")
    assert b"2000000000" in huge
    assert kind_of(with_w(stored(huge))) == "shape"


def test_another_serialisation_is_rejected():
    assert kind_of(with_w(stored(PLAIN, "pickle"))) == "format"


@pytest.mark.parametrize("array", [np.asfortranarray(np.arange(6.0).reshape(2, 3))])
@pytest.mark.parametrize("dtype", ["<f8", ">f8"])
def test_any_order_of_axes_and_bytes_is_read_as_numpy_reads_it(array, dtype):
    for order in "CF":
        sent = np.array(array, dtype, order=order)
        found = read(Array(sent), "w", array, (np.dtype(float),), np.dtype(float))
        np.testing.assert_array_equal(found, array)
        assert found.dtype.isnative
        assert found.flags.c_contiguous
        assert found.flags.owndata or found.base is None or found.flags.writeable


@given(
    st.lists(st.integers(0, 4), max_size=5), st.sampled_from(["f2", "f4", "f8", "i1", "u8", "?"])
)
@settings(max_examples=60, deadline=None)
def test_whatever_numpy_saves_is_read_back(shape, code):
    array = np.random.default_rng(0).integers(0, 2, shape).astype(code)
    found = read(Array(np.asarray(array)), "w", np.asarray(array), None, np.dtype(code))
    np.testing.assert_array_equal(found, array)
    assert found.shape == tuple(shape)


@pytest.mark.parametrize("examples", [0, -1, 1e300, float("nan"), inf, [1.0], 10**400])
def test_a_number_of_examples_that_is_none_is_rejected(examples):
    body = RecordDict(
        {"arrays": record(**GOOD), "metrics": MetricRecord({"num-examples": examples})}
    )
    assert kind_of(body) == "examples"


def size_of(body, **settings):
    """The sentence of the limit that a reply exceeds."""
    with pytest.raises(RejectionError) as caught:
        check_size(reply(body), BASE.n_bytes, **settings)
    assert caught.value.kind == "size"
    return str(caught.value)


def with_config(values):
    body = good()
    body["more"] = ConfigRecord(values)
    return body


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            lambda: with_config({"blob": b"x" * 50_000_000}),
            "50,00.,... bytes: at most 1,000,200, by Validation.most_bytes",
        ),
        (lambda: with_config({"text": "x" * 50_000_000}), "bytes: at most 1,000,200,"),
        (lambda: with_config({"parts": ["x" * 10**6] * 50}), "bytes: at most 1,000,200,"),
        (lambda: with_config({"list": [0.5] * 10**6}), "1,000,000 elements of lists: .* 10,000"),
        (
            lambda: RecordDict({f"r{k}": MetricRecord({"a": 1.0}) for k in range(10**4)}),
            "10,000 records: at most 100, by Validation.most_records",
        ),
        (
            lambda: content(record(**GOOD), 1, **{f"m{k}": 1.0 for k in range(300)}),
            "301 metrics and configs: at most 256, by Validation.most_metrics",
        ),
        (lambda: with_config({"n" * 300: 1.0}), "300 characters of a name: at most 200"),
        (
            lambda: RecordDict({"arrays": record(**{f"a{k}": np.ones(1) for k in range(9000)})}),
            "bytes: at most",
        ),
    ],
    ids=["bytes", "text", "texts", "list", "records", "metrics", "name", "arrays"],
)
def test_a_reply_that_is_too_large_is_rejected_unread_and_the_limit_named(body, says, monkeypatch):
    reads = []
    monkeypatch.setattr(Array, "numpy", reads.append)
    assert re.search(says, size_of(body()))
    assert not reads


def test_limits_on_sizes_are_settings_and_the_one_on_bytes_follows_the_model():
    for body in (good(), with_config({"list": [0.5] * 10_000})):
        check_size(reply(body), BASE.n_bytes)
    assert "at most 9," in size_of(with_config({"list": [0.5] * 10}), most_elements=9)
    assert "at most 2," in size_of(with_config({"a": 1}), most_records=2)
    assert "at most 3," in size_of(with_config({"a": 1, "b": 2}), most_metrics=3)
    assert "at most 500," in size_of(good(), most_bytes=500)
    larger = record(**{f"w{k}": np.zeros(10**6, np.float32) for k in range(3)})
    message = reply(RecordDict({"arrays": larger}))
    check_size(message, 3_000_000)
    with pytest.raises(RejectionError, match="bytes: at most 9,000,000"):
        check_size(message, 2_000_000)
    for name in ("most_bytes", "most_records", "most_metrics", "most_elements"):
        with pytest.raises(ConfigError, match=name):
            Validation(**{name: 0})


def test_huge_integers_are_infinite():
    update = validated(content(record(**GOOD), 1, big=10**400))
    assert update.metrics == {"big": inf}


def test_names_that_a_client_chose_do_not_fill_the_log():
    arrays = {f"{'x' * 10_000}{k}": np.ones(1) for k in range(50)}
    with pytest.raises(ProtocolError) as caught:
        validated(content(record(**arrays)))
    assert len(str(caught.value)) < 600


def test_a_forecast_keeps_what_is_a_sensible_number():
    body = good()
    body["fedstale.forecast"] = ConfigRecord(
        {
            "p_finish": 0.5,
            "nan": float("nan"),
            "big": 10**400,
            "words": "x",
            "raw": b"x",
            "list": [1.0, 2.0],
            "longest": [1.0] * 1024,
            "long": [1.0] * 1025,
            "k" * 500: 1.0,
        }
    )
    kept = {"p_finish": 0.5, "list": [1.0, 2.0], "longest": [1.0] * 1024}
    assert forecast_in(reply(body).content) == kept
    body["fedstale.forecast"] = ConfigRecord({f"k{n}": 1.0 for n in range(1000)})
    assert forecast_in(reply(body).content) == {}


@pytest.mark.parametrize(
    "options",
    [
        {"examples_cap": 0.5},
        {"examples_cap": float("nan")},
        {"norm_cap": 0.0},
        {"most_examples": inf},
        {"most_examples": 0},
        {"dtypes": "any"},
        {"window": 0},
        {"enough": 101},
        {"strikes": 0},
        {"rest_s": 0.0},
        {"most_rest_s": 1.0},
    ],
)
def test_a_setting_out_of_range_is_named(options):
    with pytest.raises(ConfigError, match=r"strategy\.Validation\."):
        Validation(**options)


def test_records_are_array_records_only():
    body = RecordDict(
        {"one": record(**GOOD), "two": ArrayRecord(), "m": MetricRecord({"num-examples": 1})}
    )
    assert kind_of(body) == "names"
