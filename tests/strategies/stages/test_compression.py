"""Runs whose messages are smaller: what is asked, sent, owed and aggregated."""

import tracemalloc

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from virtual_grid import VirtualGrid, record

from fedstale.client import CompressionMod, ForecastMod
from fedstale.client.compression import NEXT_RECORD, OWED_RECORD
from fedstale.errors import ConfigError
from fedstale.strategies import (
    Compression,
    FedAvg,
    FedBuff,
    StaleStrategy,
    Validation,
)
from fedstale.strategies.messages.codec import FORMATS, decode, encode, n_bytes
from fedstale.strategies.messages.records import COMPACT_RECORD, form_of
from fedstale.strategies.robust import (
    CTMA,
    Bulyan,
    CentredClipping,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    TrimmedMean,
)
from fedstale.strategies.weighting import Gap

pytestmark = pytest.mark.usefixtures("_identity")

N = 600
RULES = CTMA, Bulyan, CentredClipping, GeometricMedian, Krum, Median, MultiKrum, TrimmedMean
MODEL = {
    "w": np.random.default_rng(0).standard_normal((20, 30)).astype(np.float32),
    "b": np.arange(9, dtype=np.float32),
    "n": np.array(3),
}


class Device:
    """A node with a Context of its own, whose training moves each weight by a fixed amount."""

    def __init__(self, node=1, *, mods=None, delay=1.0, dtype=np.float32, sends="model"):
        self.context = Context(1, node, {}, RecordDict(), {})
        self.mods = [CompressionMod()] if mods is None else mods
        self.delay, self.sends = delay, sends
        rng = np.random.default_rng(node)
        self.step = {"w": rng.standard_normal((20, 30)).astype(dtype), "b": dtype(0.5), "n": 2}
        self.received, self.replies, self.seen = [], [], []

    def train(self, message, context):
        self.seen.append(message.content)
        arrays = {k: a.numpy() for k, a in message.content["arrays"].items()}
        if self.sends == "delta":
            moved = {k: np.full_like(x, 0) + self.step[k] for k, x in arrays.items()}
        else:
            moved = {k: (x + self.step[k]).astype(x.dtype) for k, x in arrays.items()}
        body = {"arrays": record(**moved), "metrics": MetricRecord({"num-examples": 1})}
        if self.sends == "delta":
            body["how"] = ConfigRecord({"fedstale.update": "delta"})
        return Message(RecordDict(body), reply_to=message)

    def __call__(self, message, grid):
        self.received.append(message.content)
        own = Message(RecordDict(dict(message.content)), 1, message.metadata.message_type)
        own.metadata.__dict__.update(message.metadata.__dict__)

        def call(message, context, mods=tuple(self.mods)):
            if not mods:
                return self.train(message, context)
            return mods[0](message, context, lambda m, c: call(m, c, mods[1:]))

        reply = call(own, self.context)
        self.replies.append(reply)
        delay = self.delay(len(self.replies)) if callable(self.delay) else self.delay
        return delay, reply.error if reply.has_error() else reply.content

    def owed(self, name="w"):
        owed = self.context.state.get(OWED_RECORD)
        return None if owed is None else owed[name].numpy()


def start(strategy, nodes, rounds=1, model=MODEL, **settings):
    grid = VirtualGrid(nodes)
    result = strategy.start(grid, record(**model), num_rounds=rounds, **settings)
    return grid, {name: array.numpy() for name, array in result.arrays.items()}


def fedavg(**settings):
    return FedAvg(**settings)


def forms(content):
    return {name: form_of(array) for name, array in content["arrays"].items()}


# What is asked.


def test_without_the_setting_messages_and_replies_are_those_of_an_app_without_the_mod():
    device, plain = Device(), Device(mods=[])
    start(fedavg(), {1: device}, 2)
    start(fedavg(), {1: plain}, 2)
    assert device.received == plain.received
    assert [reply.content["arrays"] for reply in device.replies] == [
        reply.content["arrays"] for reply in plain.replies
    ]
    assert not any(COMPACT_RECORD in reply.content for reply in device.replies)
    assert not device.context.state


def test_the_app_sees_what_it_sees_without_the_mod():
    device, plain = Device(), Device(mods=[])
    start(fedavg(stages=[Compression("int4")]), {1: device}, 1)
    start(fedavg(), {1: plain}, 1)
    assert device.seen == plain.seen


@pytest.mark.parametrize("form", FORMATS)
def test_the_first_reply_comes_in_the_format_with_small_arrays_and_counts_in_full(form):
    device = Device()
    start(fedavg(stages=[Compression(form)]), {1: device})
    (reply,) = device.replies
    assert forms(reply.content) == {"w": form, "b": None, "n": None}
    assert len(reply.content["arrays"]["w"].data) == n_bytes(form, N)


@pytest.mark.parametrize("sends", ["model", "delta"])
@pytest.mark.parametrize("form", FORMATS)
def test_the_model_moves_by_the_decoded_change(form, sends):
    device = Device(sends=sends)
    _, model = start(fedavg(stages=[Compression(form)]), {1: device})
    trained = MODEL["w"] + device.step["w"]
    data = (
        encode(device.step["w"], form)
        if sends == "delta"
        else encode(trained, form, minus=MODEL["w"])
    )
    change = decode(data, form, (20, 30), np.float32)
    np.testing.assert_array_equal(model["w"], MODEL["w"] + change)
    np.testing.assert_array_equal(model["b"], MODEL["b"] + np.float32(0.5))
    assert model["n"] == 3 + 2


def test_a_device_without_the_mod_answers_in_full_and_is_aggregated_as_ever():
    nodes = {k: Device(k, mods=[]) for k in (1, 2, 3)}
    _, expected = start(fedavg(), nodes, 3)
    nodes = {k: Device(k, mods=[]) for k in (1, 2, 3)}
    _, model = start(fedavg(stages=[Compression("int2", down="int8")]), nodes, 3)
    for name, array in expected.items():
        np.testing.assert_array_equal(model[name], array)


def test_devices_with_the_mod_and_without_work_in_one_run():
    nodes = {1: Device(1), 2: Device(2, mods=[])}
    grid, model = start(fedavg(stages=[Compression("int8", down="int8")]), nodes, 3)
    assert not grid.refused
    assert forms(nodes[1].received[-1])["w"] == "int8"
    assert forms(nodes[2].received[-1])["w"] is None
    mean = 3 * (nodes[1].step["w"] + nodes[2].step["w"]) / 2
    np.testing.assert_allclose(model["w"], MODEL["w"] + mean, atol=0.1)


def test_fewer_bytes_cross():
    sizes = {}
    for name, stages in (("full", []), ("small", [Compression("int4", down="int8")])):
        device = Device()
        start(fedavg(stages=stages), {1: device}, 2)
        arrays = [content["arrays"] for content in device.received]
        sizes[name] = sum(len(a.data) for one in arrays for a in one.values())
    # The first model goes in full.
    saved = 4 * N + 128 - n_bytes("int8", N)
    assert sizes["full"] - sizes["small"] == saved


# What is owed.


def test_what_rounding_leaves_out_goes_into_the_next_reply():
    device = Device()
    _, model = start(fedavg(stages=[Compression("int2")]), {1: device}, 60)
    wanted = MODEL["w"] + 60 * device.step["w"]
    # Twice the scale of one reply at most, however many there were; without it the small ones
    # of 60 replies would have gone nowhere.
    assert np.abs(model["w"] - wanted).max() < 2 * np.abs(device.step["w"]).max() + 0.1
    once = decode(encode(device.step["w"], "int2"), "int2", (20, 30), np.float32)
    assert np.abs(60 * (once - device.step["w"])).max() > 50


def test_a_reply_that_is_lost_changes_nothing_of_what_is_owed():
    def late_third(n):
        return 500.0 if n == 3 else 1.0

    settings = {"stages": [Compression("int2")], "selector": None}
    lost, kept = Device(delay=late_third), Device()
    grid, _ = start(FedBuff(1, 1, **settings), {1: lost}, 4, timeout=20.0)
    assert any("no reply within 20 s" in reason for _, reason in grid.refused)
    start(FedBuff(1, 1, **settings), {1: kept}, 3)
    # After the third reply the one owes what the second left out, and the other what its own did;
    # with the fourth it is the same again: its training moves by the same amount.
    fourth = lost.replies[3].content["arrays"]["w"].data
    assert fourth == kept.replies[2].content["arrays"]["w"].data
    assert lost.replies[2].content["arrays"]["w"].data == fourth


def test_a_rejected_reply_changes_nothing_of_what_is_owed():
    device, other = Device(), Device(2, delay=0.4)
    other.step = {**other.step, "w": np.zeros((20, 30), np.float32)}
    strategy = FedBuff(2, 1, stages=[Compression("int2")], validation=Validation(max_staleness=0))
    grid, _ = start(strategy, {1: device, 2: other}, 6)
    refused = {message_id for message_id, _ in grid.refused}
    assert refused
    of_device = [r for r in device.replies if r.metadata.reply_to_message_id in refused]
    assert of_device
    owed = np.zeros((20, 30), np.float32)
    for content, reply in zip(device.received, device.replies, strict=True):
        asked = content["arrays"]["w"].numpy()
        left = owed.copy()
        data = encode(asked + device.step["w"], "int2", minus=asked, left=left)
        assert reply.content["arrays"]["w"].data == data
        if reply.metadata.reply_to_message_id not in refused:
            owed = left


def test_a_changed_model_drops_what_is_owed():
    device = Device()
    start(fedavg(stages=[Compression("int2")]), {1: device}, 2)
    assert device.owed() is not None
    device.step["w"] = device.step["w"][:, :15]
    smaller = MODEL | {"w": MODEL["w"][:, :15]}
    _, model = start(fedavg(stages=[Compression("int2")]), {1: device}, 1, smaller)
    trained = smaller["w"] + device.step["w"]
    change = decode(encode(trained, "int2", minus=smaller["w"]), "int2", (20, 15), np.float32)
    np.testing.assert_array_equal(model["w"], smaller["w"] + change)


# The way down.


def test_a_device_trains_from_the_model_that_it_was_sent_and_the_server_keeps_its_own():
    device = Device()
    grid, model = start(fedavg(stages=[Compression(down="int4")]), {1: device}, 3)
    assert not grid.refused
    assert [forms(c)["w"] for c in device.received] == [None, "int4", "int4"]
    # Changes are exact but for their own arithmetic, although models were coarse.
    np.testing.assert_allclose(model["w"], MODEL["w"] + 3 * device.step["w"], atol=1e-5)
    sent = device.seen[-1]["arrays"]["w"].numpy()
    assert np.abs(sent - (model["w"] - device.step["w"])).max() > 0.01


def test_evaluations_are_of_the_model_in_full():
    class Measuring(Device):
        def train(self, message, context):
            if message.metadata.message_type == "evaluate":
                assert set(forms(message.content).values()) == {None}
                metrics = MetricRecord({"num-examples": 1})
                return Message(RecordDict({"metrics": metrics}), reply_to=message)
            return super().train(message, context)

    device = Measuring()
    grid, _ = start(
        fedavg(stages=[Compression("int4", down="int4")], min_evaluate_nodes=1), {1: device}, 3
    )
    assert not grid.refused


def test_a_node_that_has_lost_the_mod_fails_once_and_is_sent_the_model_in_full():
    device = Device()
    strategy = fedavg(stages=[Compression("int8", down="int8")])
    count = len(device.mods)

    class Losing(Device):
        def __call__(self, message, grid):
            if len(self.received) == 2:
                self.mods = []
            try:
                return super().__call__(message, grid)
            except TypeError as problem:
                from flwr.app.error import Error

                return 1.0, Error(1, str(problem))

    device = Losing()
    grid, _ = start(strategy, {1: device}, 4)
    assert count == 1
    assert len([1 for _, reason in grid.refused if "fedstale.int8" in reason]) == 1
    assert forms(device.received[-1])["w"] is None


def test_robust_rules_caps_and_privacy_see_decoded_updates():
    from fedstale.strategies import Privacy
    from fedstale.strategies.robust import Median

    nodes = {k: Device(k) for k in (1, 2, 3)}
    _, model = start(StaleStrategy(stages=[Compression("int8")], robust=Median(f=1)), nodes)
    steps = np.median([node.step["w"] for node in nodes.values()], axis=0)
    np.testing.assert_allclose(model["w"], MODEL["w"] + steps, atol=0.05)
    strategy = FedBuff(
        2,
        2,
        stages=[
            Compression("int8"),
            Privacy(clip_norm=0.5, noise_multiplier=1e-9, delta=1e-6, noise_seed=1),
        ],
    )
    _, model = start(strategy, {k: Device(k) for k in (1, 2)})
    moved = np.sqrt(sum(np.sum((model[k] - MODEL[k]) ** 2) for k in ("w", "b")))
    assert 0.2 < moved <= 0.5 + 1e-4


def private():
    from fedstale.strategies import Privacy

    return Privacy(clip_norm=0.5, noise_multiplier=0.5, delta=1e-6, noise_seed=1)


READERS = {
    **{rule.__name__: lambda rule=rule: {"robust": rule(f=1)} for rule in RULES},
    "norms clipped": lambda: {"validation": Validation(norm_cap=1.01)},
    "privacy": lambda: {"stages": [private()], "normalise": "buffer_size"},
    "gap": lambda: {"weighting": Gap()},
}


@pytest.mark.parametrize("reader", READERS)
def test_whatever_reads_updates_reads_the_decoded_ones(reader):
    compact = {k: Device(k, sends="delta") for k in range(1, 8)}
    plain = {k: Device(k, sends="delta", mods=[]) for k in range(1, 8)}
    for device in plain.values():
        w = device.step["w"]
        device.step["w"] = decode(encode(w, "int4"), "int4", w.shape, w.dtype)
    settings = READERS[reader]()
    stages = [Compression("int4"), *settings.pop("stages", [])]
    _, model = start(StaleStrategy(stages=stages, **settings), compact)
    _, expected = start(StaleStrategy(**READERS[reader]()), plain)
    for name, array in model.items():
        np.testing.assert_array_equal(array, expected[name])
    assert not np.array_equal(model["w"], MODEL["w"])


def test_norm_caps_count_decoded_updates():
    nodes = {k: Device(k) for k in range(1, 8)}
    nodes[7].step = {**nodes[7].step, "w": nodes[7].step["w"] * 1000}
    strategy = StaleStrategy(stages=[Compression("int4")], validation=Validation(norm_cap=2.0))
    _, model = start(strategy, nodes, 2)
    assert np.abs(model["w"] - MODEL["w"]).max() < 10


# Settings.


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: Compression("int3"), "Compression.up = 'int3': expected float16"),
        (lambda: Compression(down=8), "Compression.down = 8: expected float16"),
        (Compression, "up or down to be a format"),
        (
            lambda: FedAvg(stages=["int4"]),
            "strategy.FedAvg.stages = ['int4']: expected instances of Stage",
        ),
    ],
)
def test_settings_that_make_no_sense_are_named(made, text):
    with pytest.raises(ConfigError) as raised:
        made()
    assert text in str(raised.value)


# Bad replies.


def forged(change, name="w"):
    """Return a mod that changes an array of a reply on its way out."""

    def mod(message, context, call_next):
        reply = call_next(message, context)
        arrays = dict(reply.content["arrays"])
        arrays[name] = change(arrays[name])
        reply.content["arrays"] = ArrayRecord(arrays)
        return reply

    return mod


def stored(dtype="float32", shape=(20, 30), stype="fedstale.int4", data=None):
    data = encode(np.ones(N, np.float32), "int4") if data is None else data
    return Array(dtype, shape, stype, data)


@pytest.mark.parametrize(
    ("array", "kind", "text"),
    [
        (stored(data=b"\0" * 100), "format", "has 100 bytes: expected 308"),
        (stored(shape=(600,)), "shape", "has shape (600,): expected (20, 30)"),
        (stored(shape=(10**6, 10**6)), "shape", "has shape (1000000, 1000000)"),
        (stored(dtype="float64"), "dtype", "of 'float64' in int4: expected at least 256 of"),
        (stored(dtype="object"), "dtype", "of 'object' in int4"),
        (
            stored(stype="fedstale.int8", data=encode(np.ones(N, np.float32), "int8")),
            "format",
            "is in int8, which its job did not ask for: int4?",
        ),
        (stored(stype="fedstale.int3"), "format", "is stored as 'fedstale.int3'"),
        (stored(data=np.float32([np.nan, 1]).tobytes() + bytes(300)), "format", "scale of nan"),
        (stored(data=np.float32([-1, 1]).tobytes() + bytes(300)), "format", "scale of -1.0"),
        (stored(data=np.float32([1, np.inf]).tobytes() + bytes(300)), "format", "scale of inf"),
        (stored(data=np.float32([1, 1]).tobytes() + b"\xff" * 300), "format", "does not use"),
        (stored(data=np.float32([3e38, 1]).tobytes() + bytes(300)), "norm", "at most 1e+15"),
    ],
)
def test_a_quantised_array_that_was_made_up_is_rejected_with_its_reason(array, kind, text):
    good = Device(2)
    bad = Device(1, mods=[forged(lambda _: array), CompressionMod()])
    strategy = fedavg(stages=[Compression("int4")])
    grid, model = start(strategy, {1: bad, 2: good})
    ((_, reason),) = grid.refused
    assert reason.startswith("arrays['w']") or kind == "norm"
    assert text in reason
    assert strategy.rejections == {f"rejected: {kind}": 1}
    assert np.isfinite(model["w"]).all()


def test_a_small_array_in_a_format_is_rejected():
    small = stored(shape=(9,), data=encode(np.ones(9, np.float32), "int4"))
    bad = Device(1, mods=[forged(lambda _: small, "b"), CompressionMod()])
    grid, _ = start(fedavg(stages=[Compression("int4")]), {1: bad, 2: Device(2)})
    ((_, reason),) = grid.refused
    assert "arrays['b'] has 9 elements of 'float32' in int4: expected at least 256" in reason


def test_an_array_that_the_model_lacks_is_rejected_before_memory_is_taken():
    def mod(message, context, call_next):
        reply = call_next(message, context)
        more = stored(shape=(1 << 14, 1 << 14))
        reply.content["arrays"] = ArrayRecord({**reply.content["arrays"], "more": more})
        return reply

    bad = Device(1, mods=[mod, CompressionMod()])
    tracemalloc.start()
    try:
        grid, _ = start(fedavg(stages=[Compression("int4")]), {1: bad, 2: Device(2)})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    ((_, reason),) = grid.refused
    assert "more" in reason
    # In full it would take 1 GiB.
    assert peak < 20_000_000


@pytest.mark.parametrize("stages", [[], [Compression(down="int8")], [Compression("int8")]])
def test_a_format_that_nobody_asked_for_is_rejected(stages):
    bad = Device(1, mods=[forged(lambda _: stored())])
    grid, _ = start(fedavg(stages=stages), {1: bad, 2: Device(2)})
    ((_, reason),) = grid.refused
    assert "is in int4, which its job did not ask for" in reason


def test_a_training_that_has_left_the_finite_range_is_rejected_and_owes_nothing():
    device = Device()
    good = device.step["w"]
    device.step["w"] = good.copy()
    device.step["w"][0, 0] = np.nan
    nodes = {1: device, 2: Device(2)}
    strategy = fedavg(stages=[Compression("int2")])
    grid, model = start(strategy, nodes, 2)
    assert all("scale of nan" in reason for _, reason in grid.refused)
    assert len(grid.refused) == 2
    assert np.isfinite(model["w"]).all()
    assert OWED_RECORD not in device.context.state
    device.step["w"] = good
    start(strategy, nodes, 2)
    assert np.isfinite(device.owed()).all()


def test_an_update_beyond_float16_is_rejected():
    device = Device()
    device.step["w"] = np.full((20, 30), 1e6, np.float32)
    grid, _ = start(fedavg(stages=[Compression("float16")]), {1: device, 2: Device(2)})
    ((_, reason),) = grid.refused
    assert "more than float16 can" in reason


# Models in other precisions.


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize("down", [None, "int8"])
def test_models_in_half_and_in_double_precision_move_by_the_decoded_change(dtype, down):
    model = {"w": MODEL["w"].astype(dtype), "b": MODEL["b"].astype(dtype), "n": MODEL["n"]}
    device = Device(dtype=dtype)
    grid, found = start(fedavg(stages=[Compression("int8", down=down)]), {1: device}, 3, model)
    assert not grid.refused
    assert found["w"].dtype == dtype
    tolerance = 0.15 if dtype == np.float16 else 0.05
    np.testing.assert_allclose(
        found["w"], model["w"] + 3.0 * device.step["w"].astype(float), atol=tolerance
    )


# With a forecast.


@pytest.mark.parametrize(
    "mods",
    [[CompressionMod(), ForecastMod()], [ForecastMod(), CompressionMod()]],
    ids=["out", "in"],
)
def test_forecasts_count_the_bytes_that_travel_in_either_order(mods):
    from fedstale.client.device import MessageHistory

    device = Device(mods=mods)
    grid, _ = start(fedavg(stages=[Compression("int4", down="int8")]), {1: device}, 3)
    assert not grid.refused
    assert "fedstale.forecast" in device.replies[-1].content
    history = MessageHistory.read(device.context.state)
    sizes = [
        sum(len(array.data) for array in reply.content["arrays"].values())
        for reply in device.replies
    ]
    assert history["upload_bytes"].tolist() == sizes
    received = [sum(len(a.data) for a in c["arrays"].values()) for c in device.received]
    assert history["download_bytes"].tolist() == received
    assert received[-1] < received[0]


def test_both_orders_make_the_same_bits():
    models = []
    for mods in (
        [CompressionMod(), ForecastMod()],
        [ForecastMod(), CompressionMod()],
        [CompressionMod()],
    ):
        nodes = {1: Device(mods=mods)}
        models.append(start(fedavg(stages=[Compression("int2", down="int4")]), nodes, 4)[1])
    for name in MODEL:
        np.testing.assert_array_equal(models[0][name], models[1][name])
        np.testing.assert_array_equal(models[0][name], models[2][name])


def test_what_is_kept_between_messages_is_twice_what_is_owed():
    device = Device()
    start(fedavg(stages=[Compression("int2")]), {1: device}, 3)
    kept = {
        name: sum(len(a.data) for a in r.values())
        for name, r in device.context.state.array_records.items()
    }
    assert set(kept) == {OWED_RECORD, NEXT_RECORD}
    assert kept[OWED_RECORD] == kept[NEXT_RECORD] == 4 * N + 128
