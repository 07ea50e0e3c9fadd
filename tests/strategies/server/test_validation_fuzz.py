"""Mutated replies, as bytes and as fields: no crash, no NaN in the model, no growing memory."""

import gc
import logging
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from replies import job, open_buffer
from virtual_grid import content, identity, record

from fedstale.errors import ProtocolError
from fedstale.strategies.server.checks import Checks, Validation
from fedstale.strategies.server.versions import Snapshot, Versions
from fedstale.strategies.types import forecast_in, is_finite

MODEL = {
    "layer.weight": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
    "layer.bias": np.zeros(2, np.float64),
    "norm.num_batches_tracked": np.array(7),
    "mask": np.array([True, False]),
}
NASTY = (0, -1, 1, 2**31, 2**63 - 1, -(2**63), 10**400, float("nan"), float("inf"), 1e308, 5e-324)
HEADERS = (
    b"(2, 3)", b"(2,3)", b"(3, 2)", b"(-2, 3)", b"()", b"(6,)", b"(2, 3, )", b"((((((",
    b"(99999999999999999, 3)", b"'<f4'", b"'>f4'", b"'<f8'", b"'|O'", b"'<U9'", b"'<f3'", b"'<c8'",
    b"True", b"False", b"__import__", b"{'descr'", b"\x93NUMPY", b"\0" * 16, b"9" * 32,
)  # fmt: skip


def serialised():
    """Replies as a stock client sends them, with whole weights and with changes."""
    rng = np.random.default_rng(0)
    for config in ({}, {"fedstale.update": "delta"}):
        moved = {
            name: (x + rng.normal(size=x.shape) * 0.1).astype(x.dtype) if x.dtype.kind == "f" else x
            for name, x in MODEL.items()
        }
        body = content(record(**moved), 12, train_loss=0.5, square_loss=0.3)
        body["fedstale"] = ConfigRecord(config)
        body["fedstale.forecast"] = ConfigRecord({"p_finish": 0.9, "train_s": [1.0, 2.0, 3.0]})
        yield recorddict_to_proto(body).SerializeToString()


def mutated_bytes(rng, data):
    """Flip, cut, repeat, insert and replace parts of some bytes."""
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        at = int(rng.integers(len(changed) + 1))
        to = min(at + int(rng.integers(1, 17)), len(changed))
        match int(rng.integers(6)):
            case 0:
                changed[at:to] = rng.bytes(to - at)
            case 1:
                del changed[at:to]
            case 2:
                changed[at:at] = changed[at:to] * int(rng.integers(1, 4))
            case 3:
                changed[at:at] = HEADERS[int(rng.integers(len(HEADERS)))]
            case 4:
                old, new = (HEADERS[int(rng.integers(len(HEADERS)))] for _ in range(2))
                changed = bytearray(bytes(changed).replace(old, new, 1))
            case _:
                changed[at:to] = b"\xff" * (to - at)
    return bytes(changed)


def mutated_fields(rng, body):
    """Change a record in a way that bytes alone would seldom hit."""
    arrays = body.array_records.get("arrays")
    name = list(MODEL)[int(rng.integers(len(MODEL)))]
    nasty = NASTY[int(rng.integers(len(NASTY)))]
    match int(rng.integers(10)):
        case 0 | 9 if arrays and name in arrays:
            data = mutated_bytes(rng, arrays[name].data)
            arrays[name] = Array("float32", (2, 3), "numpy.ndarray", data)
        case 1 if arrays:
            value = nasty if isinstance(nasty, float) else float(rng.normal())
            dtype = [np.float16, np.float32, np.float64, np.complex64, np.int8][rng.integers(5)]
            with np.errstate(all="ignore"):
                filled = np.full(MODEL[name].shape, value).astype(np.float64)
                filled = np.nan_to_num(filled) if np.dtype(dtype).kind == "i" else filled
                arrays[name] = Array(
                    np.asarray(
                        np.clip(filled, -100, 100).astype(dtype)
                        if np.dtype(dtype).kind == "i"
                        else filled.astype(dtype)
                    )
                )
        case 2 if arrays:
            shape = tuple(int(n) for n in rng.integers(0, 5, int(rng.integers(0, 4))))
            arrays[name] = Array(np.asarray(np.ones(shape, MODEL[name].dtype)))
        case 3 if arrays:
            del arrays[next(iter(arrays))]
        case 4 if arrays:
            arrays["x" * int(rng.integers(1, 300))] = Array(np.ones(1))
        case 5:
            body["metrics"] = MetricRecord({"num-examples": nasty})
        case 6:
            body["metrics"] = MetricRecord(
                {"num-examples": 5, **{f"{rng.integers(1 << 60)}": nasty for _ in range(4)}}
            )
        case 7:
            body["more"] = ArrayRecord() if rng.random() < 0.5 else MetricRecord({"a": nasty})
        case _:
            body["fedstale.forecast"] = ConfigRecord(
                {"p_finish": nasty, "n": "x", "raw": b"x", "list": [nasty, nasty]}
            )


def body_of(rng, seeds):
    """Return a mutated reply; None if Flower's own parser refuses the bytes."""
    data, parsed = seeds[int(rng.integers(len(seeds)))]
    if rng.random() < 0.2:
        try:
            return recorddict_from_proto(ProtoRecordDict.FromString(mutated_bytes(rng, data)))
        except Exception:
            return None
    body = RecordDict(dict(parsed))
    body["arrays"] = ArrayRecord(dict(parsed["arrays"]))
    for _ in range(int(rng.integers(1, 3))):
        mutated_fields(rng, body)
    return body


def attack(buffer, checks, state, rng, body):
    """Send one reply; return whether it passed."""
    node = int(rng.integers(20))
    message = Message(body, reply_to=Message(RecordDict(), dst_node_id=node, message_type="train"))
    for value in forecast_in(message.content).values():
        assert isinstance(value, float | list)
    versions = state["versions"]
    try:
        update = checks.open(message, job(node, base_version=versions.version), versions)
    except ProtocolError as problem:
        state["longest"] = max(state["longest"], len(str(problem)))
        checks.reject(node, problem, state["now"])
        state["now"] += 1.0
        return False
    assert is_finite(update.delta)
    assert is_finite(update.counts)
    buffer.add(update)
    if len(buffer.updates) == 10:
        step(buffer, versions)
    return True


def step(buffer, versions):
    """Step as the event loop does: one out of the finite range is discarded."""
    with suppress(ProtocolError):
        versions.advance(buffer.step())
    buffer.metrics()
    assert is_finite(versions.current.floats)
    assert is_finite(versions.current.counts)
    buffer.open()


def fuzz(n, seed=1):
    rng = np.random.default_rng(seed)
    seeds = [(x, recorddict_from_proto(ProtoRecordDict.FromString(x))) for x in serialised()]
    checks = Checks(Validation(norm_cap=10.0))
    versions = Versions(Snapshot.of(record(**MODEL)))
    buffer = open_buffer(versions, checks)
    state = {"versions": versions, "now": 0.0, "longest": 0}
    passed, before, sent = 0, 0, 0
    while sent < n:
        body = body_of(rng, seeds)
        if body is None:
            continue
        if sent == n * 4 // 5:
            gc.collect()
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
        sent += 1
        passed += attack(buffer, checks, state, rng, body)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert state["longest"] < 2000
    return passed, grown, checks


@pytest.fixture(autouse=True)
def _identity():
    # Records that pytest keeps of what is logged would be taken for growing memory.
    logging.disable(logging.CRITICAL)
    with identity():
        yield
    logging.disable(logging.NOTSET)


def check(n):
    passed, grown, checks = fuzz(n)
    # Both ends must be reached: replies that pass although they were changed, and each rejection.
    assert passed > n // 100
    kinds = {kind for kind in checks.counts if kind.startswith("rejected")}
    expected = {"format", "shape", "dtype", "bytes", "finite", "examples", "names"}
    assert {f"rejected: {kind}" for kind in expected} <= kinds
    assert grown < 300_000, f"{grown:,} bytes more after {n:,} replies"
    return passed


def test_a_thousand_mutated_replies_do_no_harm():
    check(1_000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_mutated_replies_do_no_harm():
    check(100_000)
