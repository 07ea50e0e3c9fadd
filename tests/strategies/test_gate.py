"""What the gate lets through, what it refuses and why, and what a run remembers at it."""

import logging
from math import inf

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_grid import content, identity, record

from fedstale.errors import ConfigError, ProtocolError
from fedstale.strategies.arrays import norm_of
from fedstale.strategies.server.caps import Cap, CappedMerge
from fedstale.strategies.server.merge import Merge, Merged
from fedstale.strategies.server.reputation import Reputation
from fedstale.strategies.server.validation import RejectionError, Validation, forecast_in, read
from fedstale.strategies.server.versions import Snapshot

BASE = Snapshot.of(
    record(w=np.zeros((2, 3), np.float32), b=np.ones(2), n=np.array(4), on=np.array([True, False]))
)
GOOD = {
    "w": np.ones((2, 3), np.float32),
    "b": np.ones(2),
    "n": np.array(6),
    "on": np.array([False, True]),
}


@pytest.fixture(autouse=True)
def _identity():
    with identity():
        yield


def reply(body, node_id=7):
    sent = Message(RecordDict(), dst_node_id=node_id, message_type="train")
    return Message(body, reply_to=sent)


def good(examples=3, **arrays):
    return content(record(**(GOOD | arrays)), examples, train_loss=0.5)


def kind_of(body, validation=None):
    with pytest.raises(RejectionError) as caught:
        (validation or Validation()).open(reply(body), BASE)
    assert str(caught.value)
    return caught.value.kind


def stored(data, stype="numpy.ndarray"):
    return Array(dtype="float32", shape=(2, 3), stype=stype, data=data)


def with_w(array):
    body = good()
    body["arrays"]["w"] = array
    return body


def test_a_good_reply_becomes_a_change():
    answer = Validation().open(reply(good()), BASE)
    np.testing.assert_array_equal(answer.delta["w"], 1.0)
    np.testing.assert_array_equal(answer.delta["b"], 0.0)
    assert answer.counts["n"] == 2.0
    np.testing.assert_array_equal(answer.counts["on"], [-1.0, 1.0])
    assert (answer.examples, answer.metrics) == (3.0, {"train_loss": 0.5})
    assert answer.delta["w"].dtype == np.float32
    assert answer.delta["w"].flags.writeable


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
def test_a_reply_that_does_not_fit_the_model_is_refused_by_kind(changes, kind):
    assert kind_of(good(**changes)) == kind


def test_other_dtypes_are_converted_where_asked_for_and_overflow_is_found():
    validation = Validation(dtypes="cast")
    answer = validation.open(reply(good(w=np.ones((2, 3)), n=np.array(6.0, np.float32))), BASE)
    assert answer.delta["w"].dtype == np.float32
    assert kind_of(good(w=np.full((2, 3), 1e300)), validation) == "finite"
    assert kind_of(good(w=np.ones((2, 3), np.complex64)), validation) == "dtype"


def test_a_change_of_counts_may_be_negative_or_a_fraction():
    body = good(n=np.array(-2), on=np.array([-0.5, 0.5]))
    body["fedstale"] = ConfigRecord({"fedstale.update": "delta"})
    answer = Validation().open(reply(body), BASE)
    assert answer.counts["n"] == -2.0
    np.testing.assert_array_equal(answer.counts["on"], [-0.5, 0.5])


def test_a_change_of_counts_beyond_all_integers_is_refused():
    assert kind_of(good(n=np.array(1e300))) == "finite"


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
def test_bytes_that_are_no_plain_array_are_refused_before_they_are_parsed(data):
    assert kind_of(with_w(stored(data))) == "format"


@pytest.mark.parametrize("data", [PLAIN[:-1], PLAIN + b"\0", PLAIN.replace(b"<f4", b"<f2")])
def test_more_or_fewer_bytes_than_announced_are_refused(data):
    validation = Validation(dtypes="cast")
    assert kind_of(with_w(stored(data)), validation) == "bytes"


def test_a_dtype_that_does_not_exist_is_refused():
    assert kind_of(with_w(stored(PLAIN.replace(b"<f4", b"<f3")))) == "dtype"


def test_an_announced_size_is_never_allocated():
    huge = PLAIN.replace(b"(2, 3), }          ", b"(2000000000, 30), }")
    assert b"2000000000" in huge
    assert kind_of(with_w(stored(huge))) == "shape"


def test_another_serialisation_is_refused():
    assert kind_of(with_w(stored(PLAIN, "pickle"))) == "format"


@pytest.mark.parametrize("array", [np.asfortranarray(np.arange(6.0).reshape(2, 3))])
@pytest.mark.parametrize("dtype", ["<f8", ">f8"])
def test_any_order_of_axes_and_bytes_is_read_as_numpy_reads_it(array, dtype):
    for order in "CF":
        sent = np.array(array, dtype, order=order)
        found = read(Array(sent), "w", array, (np.dtype(float),))
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
    found = read(Array(np.asarray(array)), "w", np.asarray(array), None)
    np.testing.assert_array_equal(found, array)
    assert found.shape == tuple(shape)


@pytest.mark.parametrize("examples", [0, -1, 1e300, float("nan"), inf, [1.0], 10**400])
def test_a_number_of_examples_that_is_none_is_refused(examples):
    body = RecordDict(
        {"arrays": record(**GOOD), "metrics": MetricRecord({"num-examples": examples})}
    )
    assert kind_of(body) == "examples"


def test_too_many_metrics_or_too_long_names_are_refused_and_huge_integers_are_infinite():
    many = {f"m{k}": 1.0 for k in range(300)}
    assert kind_of(content(record(**GOOD), 1, **many)) == "metrics"
    assert kind_of(content(record(**GOOD), 1, **{"m" * 300: 1.0})) == "metrics"
    answer = Validation().open(reply(content(record(**GOOD), 1, big=10**400)), BASE)
    assert answer.metrics == {"big": inf}


def test_the_names_a_stranger_chose_do_not_fill_the_log():
    arrays = {f"{'x' * 10_000}{k}": np.ones(1) for k in range(50)}
    with pytest.raises(ProtocolError) as caught:
        Validation().open(reply(content(record(**arrays))), BASE)
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
            "long": [1.0] * 5000,
            "k" * 500: 1.0,
        }
    )
    assert forecast_in(reply(body)) == {"p_finish": 0.5, "list": [1.0, 2.0]}
    body["fedstale.forecast"] = ConfigRecord({f"k{n}": 1.0 for n in range(1000)})
    assert forecast_in(reply(body)) == {}


@pytest.mark.parametrize(
    "options",
    [
        {"examples_cap": 0.5},
        {"examples_cap": float("nan")},
        {"norm_cap": 0.0},
        {"most_examples": inf},
        {"dtypes": "any"},
        {"window": 0},
        {"enough": 101},
        {"strikes": 0},
        {"rest_s": 0.0},
        {"most_rest_s": 1.0},
    ],
)
def test_a_setting_out_of_range_is_named(options):
    with pytest.raises(ConfigError, match=r"strategy\.validation\."):
        Validation(**options)


# Caps.


def test_a_cap_is_a_multiple_of_the_median_over_nodes_with_one_voice_each():
    cap = Cap(1.5, window=4, enough=3)
    for node, value in enumerate([10.0, 20.0]):
        cap.hear(node, value)
    assert not cap.settled
    assert cap.limit(1e9) == 1e9
    for _ in range(50):
        cap.hear(2, 1e9)
    assert cap.settled
    assert cap.limit(1e9) == 30.0
    assert cap.limit(5.0) == 5.0
    for node in range(3, 6):
        cap.hear(node, 40.0)
    # The window holds nodes 2 to 5.
    assert cap.limit(1e9) == 60.0


def test_no_cap_trusts_everybody():
    cap = Cap(None, window=4, enough=3)
    assert cap.settled
    assert cap.limit(1e9) == 1e9


def added(merge, numbers, reputation=None, base=BASE):
    for node, examples in enumerate(numbers):
        delta = {
            "w": np.full((2, 3), 0.1 * node, np.float32),
            "b": np.full(2, -0.3 * node),
        }
        counts = {"n": np.array(1.0), "on": np.zeros(2)}
        if isinstance(merge, CappedMerge):
            merge.cap.hear(node, examples)
        merge.add(
            Merged(f"m{node}", node, 0, 1.0), delta, counts, examples=examples, metrics={"l": node}
        )
    return merge


@pytest.mark.parametrize("normalise", ["examples", "buffer_size", "weights"])
@pytest.mark.parametrize("n", [1, 2, 4, 9, 40])
def test_where_nothing_is_capped_a_capped_merge_is_a_merge_to_the_last_bit(n, normalise):
    numbers = [10.0 + (k % 3) for k in range(n)]
    plain = added(Merge(BASE, normalise), numbers)
    capped = added(CappedMerge(BASE, normalise, cap=Cap(1.5, 100, 5)), numbers)
    assert capped.jobs == plain.jobs
    for one, two in zip(plain.finish(), capped.finish(), strict=True):
        for name in one:
            assert one[name].tobytes() == two[name].tobytes()
    assert plain.metrics() == capped.metrics()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("n", [3, 4, 5, 8])
def test_a_liar_in_the_first_merge_of_a_run_is_capped_whenever_it_comes(n, first):
    numbers = [10.0] * (n - 1)
    numbers.insert(0 if first else n - 1, 1e9)
    merge = added(CappedMerge(BASE, "examples", cap=Cap(1.5, 100, 5)), numbers)
    merge.finish()
    assert merge.mass == pytest.approx(10.0 * (n - 1) + 15.0)


def test_few_nodes_that_answer_often_do_not_fill_the_memory():
    merge = CappedMerge(BASE, "buffer_size", cap=Cap(1.5, 100, 5))
    for _ in range(100):
        added(merge, [1.0, 2.0])
        assert len(merge._early) < 20


def test_a_capped_merge_goes_on_from_its_state():
    cap = Cap(1.5, 100, 5)
    merge = added(CappedMerge(BASE, "examples", cap=cap), [10.0, 1e9, 10.0])
    again = CappedMerge(BASE, "examples", cap=Cap(1.5, 100, 5))
    again.cap.load_state_dict(cap.state_dict())
    again.load_state_dict(merge.state_dict())
    assert again.jobs == merge.jobs
    np.testing.assert_array_equal(again.finish()[0]["w"], merge.finish()[0]["w"])


# What a run remembers.


def admit(reputation, examples=10, node_id=7, **arrays):
    message = reply(good(examples, **arrays), node_id)
    return reputation.open(message, BASE, node_id=node_id)


def test_a_claim_counts_for_at_most_one_and_a_half_times_the_median(caplog):
    reputation = Reputation(Validation())
    for node in range(5):
        admit(reputation, 10 + node, node)
    with caplog.at_level(logging.WARNING):
        assert admit(reputation, 10**9, 9).examples == 1.5 * 12.5
        assert admit(reputation, 10**9, 10).examples == 1.5 * 13.0
    assert reputation.counts["capped"] == 2
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "examples_cap" in caplog.text
    assert admit(Reputation(Validation(examples_cap=None)), 10**9).examples == 1e9


def test_an_update_is_clipped_to_the_running_median_of_norms():
    reputation = Reputation(Validation(norm_cap=2.0))
    for node in range(5):
        admit(reputation, node_id=node)
    typical = np.sqrt(6.0)
    found = admit(reputation, node_id=9, w=np.full((2, 3), 1e6, np.float32))
    assert norm_of(found.delta) == pytest.approx(2 * typical, rel=1e-6)
    assert reputation.counts["clipped"] == 1
    with pytest.raises(RejectionError, match="norm"):
        admit(reputation, node_id=10, b=np.full(2, 1e300))


@pytest.mark.parametrize("huge", [0, 2, 4])
@pytest.mark.parametrize("n", [3, 5, 8])
def test_a_huge_update_in_the_first_merge_of_a_run_is_clipped_whenever_it_comes(n, huge):
    reputation = Reputation(Validation(norm_cap=2.0))
    merge = CappedMerge(BASE, "buffer_size", cap=reputation.examples, norms=reputation.norms)
    honest = good()
    for node in range(n):
        bad = {"w": np.full((2, 3), 1e6, np.float32)} if node == huge else {}
        answer = admit(reputation, node_id=node, **bad)
        job = Merged(f"m{node}", node, 0, 1.0)
        merge.add(job, answer.delta, answer.counts, examples=answer.examples, metrics={})
    typical = norm_of(Validation().open(reply(honest), BASE).delta)
    assert norm_of(merge.finish()[0]) <= typical * (n - 1 + 2.0) / n * (1 + 1e-6)


def test_an_answer_to_another_nodes_job_is_refused():
    reputation = Reputation(Validation())
    with pytest.raises(RejectionError, match="node 8 answers a job that node 7 received"):
        reputation.open(reply(good(), 8), BASE, node_id=7)
    with pytest.raises(RejectionError, match="node 8"):
        reputation.measurements(reply(good(), 8), node_id=7)


def test_evaluations_are_capped_by_themselves():
    reputation = Reputation(Validation())
    for node in range(5):
        reputation.measurements(reply(good(2), node), node_id=node)
    assert reputation.measurements(reply(good(10**9), 9), node_id=9)[0] == 3.0


def test_a_node_that_keeps_failing_is_rested_for_longer_and_longer_until_it_answers_well(caplog):
    reputation = Reputation(Validation(strikes=2, rest_s=10.0, most_rest_s=25.0))
    problem = RejectionError("shape", "wrong shape")
    with caplog.at_level(logging.INFO):
        reputation.refuse(7, problem, 0.0)
        assert 7 not in reputation.resting(0.0)
        reputation.refuse(7, problem, 1.0)
    assert "node 7" in caplog.text
    assert "wrong shape" in caplog.text
    assert 7 in reputation.resting(10.9)
    assert 7 not in reputation.resting(11.0)
    assert 8 not in reputation.resting(5.0)
    assert reputation.next_return(5.0) == 11.0
    assert reputation.next_return(11.0) == inf
    for now, end in ((20.0, 40.0), (50.0, 75.0), (80.0, 105.0)):
        reputation.refuse(7, problem, now)
        assert reputation.next_return(now) == end
    admit(reputation, node_id=7)
    reputation.refuse(7, problem, 200.0)
    assert 7 not in reputation.resting(200.0)
    assert reputation.counts["rejected: shape"] == 6
    reputation.refuse(7, ProtocolError("?"), 200.0)
    reputation.drop("duplicate")
    assert reputation.counts["rejected: other"] == reputation.counts["rejected: duplicate"] == 1


def test_an_admission_goes_on_from_its_state():
    reputation = Reputation(Validation(norm_cap=2.0, strikes=1))
    for node in range(6):
        admit(reputation, node_id=node)
    reputation.refuse(9, RejectionError("shape", "?"), 5.0)
    again = Reputation(reputation.validation)
    again.load_state_dict(reputation.state_dict())
    assert again.state_dict() == reputation.state_dict()
    assert 9 in again.resting(6.0)
    assert admit(again, 10**9, 8).examples == 15.0


def test_records_are_array_records_only():
    body = RecordDict(
        {"one": record(**GOOD), "two": ArrayRecord(), "m": MetricRecord({"num-examples": 1})}
    )
    assert kind_of(body) == "names"
