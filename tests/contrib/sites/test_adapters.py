"""Adapters of different ranks: what is sent, what a reply of any rank changes, what is rejected."""

import re
import tracemalloc
from copy import deepcopy

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from keeping_grid import KeepingGrid, KilledError
from threadpoolctl import threadpool_limits
from tiny import COSTS, fleet
from virtual_grid import VirtualGrid, content, record

from fedstale.contrib.sites import Adapters, adapters, at_rank
from fedstale.errors import ConfigError, ResumeError
from fedstale.simulation import TraceGrid
from fedstale.strategies import (
    Checkpoints,
    Compression,
    FedAvg,
    FedBuff,
    GapAware,
    LocalWork,
    Privacy,
    StaleStrategy,
    Validation,
    parse,
    read_checkpoint,
)
from fedstale.strategies.robust import TrimmedMean
from fedstale.strategies.schedule import k_batch_async
from fedstale.strategies.server.checkpoint import unpacked
from fedstale.strategies.types import Job, RejectionError

pytestmark = pytest.mark.usefixtures("_identity")


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Products this small lose time to several threads."""
    with threadpool_limits(1):
        yield


N_OUT, N_IN = 9, 7
A, B, BA = (f"q.lora_{part}.weight" for part in ("A", "B", "BA"))
CLOSE = {np.float32: 1e-5, np.float64: 1e-12}
"""Largest difference that rounding explains, of products of about 1."""


def product(rank, dtype=np.float64, shape=(N_OUT, N_IN), seed=0):
    """Return a matrix of a rank, whose singular values are apart."""
    rng = np.random.default_rng(seed)
    u, v = (np.linalg.qr(rng.standard_normal((n, rank)))[0] for n in shape)
    return ((u * np.linspace(1.0, 0.3, rank)) @ v.T).astype(dtype)


def model(rank, dtype=np.float64):
    return {BA: product(rank, dtype), "head": np.ones(2, dtype), "n": np.array(3)}


def numbers(arrays):
    return {name: array.numpy() for name, array in arrays.items()}


class Device:
    """A node of a rank, which moves its factors and all else by numbers of its own."""

    def __init__(self, rank, *, delay=1.0, size=0.1, examples=1):
        self.rank, self.delay, self.size, self.examples = rank, delay, size, examples
        self.sent, self.replied = [], []

    def train(self, arrays):
        rng = np.random.default_rng([self.rank, len(self.replied)])
        held = numbers(at_rank(arrays, self.rank))
        missing = self.rank - len(held[A])
        if missing > 0:
            more = rng.standard_normal((missing, held[A].shape[1]))
            held[A] = np.vstack([held[A], more]).astype(held[A].dtype)
            held[B] = np.hstack([held[B], np.zeros((len(held[B]), missing), held[B].dtype)])
        moved = {
            name: (x + self.size * rng.standard_normal(x.shape)).astype(x.dtype)
            for name, x in held.items()
            if x.dtype.kind == "f"
        }
        return moved | {"n": held["n"] + 2}

    def __call__(self, message, grid):
        if message.metadata.message_type == "evaluate":
            return self.delay, RecordDict({"m": MetricRecord({"num-examples": 1, "seen": 1.0})})
        trained = self.train(message.content["arrays"])
        self.sent.append(numbers(message.content["arrays"]))
        self.replied.append(trained)
        return self.delay, content(record(**trained), self.examples)

    def change(self, i=0):
        """Return B' A' - B A, in float64, by another way than the server's."""
        sent, replied = self.sent[i], self.replied[i]
        a, b = (x.astype(np.float64) for x in (sent[A][: self.rank], sent[B][:, : self.rank]))
        return replied[B].astype(np.float64) @ replied[A] - b @ a


def start(strategy, nodes, initial, rounds=1, grid=VirtualGrid, **settings):
    grid = grid(nodes) if isinstance(grid, type) else grid
    result = strategy.start(grid, record(**initial), num_rounds=rounds, **settings)
    return grid, numbers(result.arrays)


# What is merged.


@pytest.mark.parametrize("dtype", CLOSE)
def test_replies_of_mixed_ranks_become_the_mean_of_their_products(dtype):
    # All of a product of rank 1 is in what each of them was sent.
    nodes = {rank: Device(rank, examples=rank) for rank in (1, 2, 4, 6)}
    grid, after = start(FedAvg(stages=[Adapters(4)]), nodes, model(1, dtype))
    assert not grid.refused
    products = [node.replied[0][B].astype(float) @ node.replied[0][A] for node in nodes.values()]
    heads = [node.replied[0]["head"] for node in nodes.values()]
    weights = [node.examples for node in nodes.values()]
    mean = np.average(products, axis=0, weights=weights)
    np.testing.assert_allclose(after[BA], mean, atol=CLOSE[dtype])
    np.testing.assert_allclose(
        after["head"], np.average(heads, axis=0, weights=weights), atol=CLOSE[dtype]
    )
    assert after["n"] == 5
    assert after[BA].dtype == dtype


@pytest.mark.parametrize("rank", [1, 4, 6])
def test_a_device_that_trains_nothing_changes_nothing(rank):
    before = model(6, np.float32)
    node = Device(rank, size=0.0)
    _, after = start(FedAvg(stages=[Adapters(4)]), {1: node}, before, rounds=3)
    np.testing.assert_array_equal(after[BA], before[BA])
    np.testing.assert_array_equal(after["head"], before["head"])


def test_a_stale_reply_is_a_change_of_the_version_that_its_device_was_sent():
    nodes = {1: Device(2, delay=1.0), 2: Device(4, delay=3.5), 3: Device(6, delay=2.2)}
    strategy = StaleStrategy(schedule=k_batch_async(3, 1), stages=[Adapters(4)])
    grid, after = start(strategy, nodes, model(5), rounds=9)
    assert {facts["staleness"] for _, facts in grid.merged} >= {0, 1, 2, 3}
    changes, counted = {}, dict.fromkeys(nodes, 0)
    for number, (_, message) in enumerate(grid.sent):
        node = message.metadata.dst_node_id
        changes[f"m{number}"] = nodes[node].change(counted[node])
        counted[node] += 1
    expected = model(5)[BA] + sum(changes[message_id] for message_id, _ in grid.merged)
    np.testing.assert_allclose(after[BA], expected, atol=1e-12)


# What is sent.


@pytest.mark.parametrize("shape", [(N_OUT, N_IN), (520, 600)], ids=["small", "large"])
@pytest.mark.parametrize("dtype", CLOSE)
def test_the_first_components_are_the_best_approximation_of_their_rank(dtype, shape):
    rng = np.random.default_rng(0)
    x = product(7, dtype, shape) + (0.01 * rng.standard_normal(shape) / shape[0]).astype(dtype)
    sent = Adapters(5).factors(record(**{BA: x}))
    u, s, v = np.linalg.svd(x.astype(float), full_matrices=False)
    for rank in range(1, 6):
        held = numbers(at_rank(sent, rank))
        assert (held[A].shape, held[B].shape) == ((rank, shape[1]), (shape[0], rank))
        best = (u[:, :rank] * s[:rank]) @ v[:rank]
        np.testing.assert_allclose(held[B].astype(float) @ held[A], best, atol=CLOSE[dtype])
        np.testing.assert_allclose(held[A].astype(float) @ held[A].T, np.eye(rank), atol=1e-6)


SPARSE = np.zeros((520, 600))
SPARSE[:40, :30] = product(30, shape=(40, 30))
LARGE = {
    "of few rows": SPARSE,
    "of equal singular values": np.eye(520, 600),
    "of noise": np.random.default_rng(1).standard_normal((520, 600)),
    "of rank 2": product(2, shape=(520, 600)),
}


def left_out(x):
    """Return what factors of rank 4 leave out of a product, and what the best ones would."""
    s = np.linalg.svd(x, compute_uv=False)
    yield (s[4:] ** 2).sum() / (s**2).sum()
    held = numbers(Adapters(4).factors(record(**{BA: x})))
    yield np.linalg.norm(x - held[B] @ held[A]) ** 2 / (s**2).sum()


@pytest.mark.parametrize("x", LARGE.values(), ids=LARGE)
def test_a_large_product_is_approximated_best_although_not_all_of_it_is_decomposed(x, monkeypatch):
    found, svd = left_out(x), np.linalg.svd
    best = next(found)

    def of_small(y, **options):
        assert min(y.shape) < 100
        return svd(y, **options)

    monkeypatch.setattr(np.linalg, "svd", of_small)
    assert next(found) == pytest.approx(best, abs=1e-12)


def test_a_large_product_whose_iteration_does_not_converge_is_decomposed_as_a_whole(monkeypatch):
    monkeypatch.setattr(adapters, "_PASSES", 2)
    best, found = left_out(LARGE["of noise"])
    assert found == pytest.approx(best, abs=1e-12)


def test_factors_of_one_model_are_the_same_bytes():
    for x in (product(7, np.float32), product(7, np.float32, (520, 600))):
        first, second = (Adapters(4).factors(record(**{BA: x.copy()})) for _ in range(2))
        assert first == second


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_product_of_lower_rank_can_be_trained_in_every_direction(rank):
    held = numbers(Adapters(4).factors(record(**{BA: product(rank)})))
    np.testing.assert_allclose(held[A] @ held[A].T, np.eye(4), atol=1e-12)
    assert not held[B][:, rank:].any()
    # Of the loss |B A - target|^2 / 2.
    gradient = (held[B] @ held[A] - product(7, seed=1)) @ held[A].T
    assert (np.linalg.norm(gradient, axis=0) > 0.01).all()


def test_random_rows_are_those_of_the_seed_and_the_name():
    def rows(name, seed):
        grid, _ = start(
            FedAvg(stages=[Adapters(4)], seed=seed),
            {1: lambda message, grid: (1.0, content(message.content["arrays"]))},
            {f"{name}.lora_BA": np.zeros((N_OUT, N_IN))},
        )
        return grid.sent[0][1].content["arrays"][f"{name}.lora_A"].data

    assert rows("q", 0) == rows("q", 0)
    assert len({rows("q", 0), rows("k", 0), rows("q", 1)}) == 3


def test_all_messages_of_a_version_share_its_factors():
    nodes = {k: Device(k) for k in (1, 2, 3)}
    strategy = FedAvg(stages=[LocalWork(0.5), Adapters(2)], min_evaluate_nodes=3)
    grid, _ = start(strategy, nodes, model(5), rounds=3)
    by_version = {}
    for _, message in grid.sent:
        records = by_version.setdefault(message.metadata.group_id, {})
        records.setdefault(message.metadata.message_type, set()).add(id(message.content["arrays"]))
    assert [set(by_version[version]) for version in "0123"] == [
        {"train"},
        *[{"train", "evaluate"}] * 2,
        {"evaluate"},
    ]
    assert all(len(set.union(*records.values())) == 1 for records in by_version.values())


def test_a_layer_with_fewer_rows_than_the_rank_has_factors_of_all_its_rows():
    small = product(3, shape=(3, 7))
    held = numbers(Adapters(8).factors(record(**{BA: small})))
    assert held[A].shape == (3, 7)
    np.testing.assert_allclose(held[B] @ held[A], small, atol=1e-12)


# Between a model of factors and one of products.


PEFT = {
    "a.lora_A.default.weight": (2, 5),
    "a.lora_B.default.weight": (4, 2),
    "b.lora_embedding_A": (3, 6),
    "b.lora_embedding_B": (5, 3),
    "score.weight": (2, 5),
}


def of_peft():
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape) for name, shape in PEFT.items()}


def test_names_of_peft_become_products_and_back():
    held = of_peft()
    made = Adapters.products(record(**held))
    assert list(made) == ["a.lora_BA.default.weight", "b.lora_embedding_BA", "score.weight"]
    np.testing.assert_allclose(
        made["b.lora_embedding_BA"].numpy(),
        held["b.lora_embedding_B"] @ held["b.lora_embedding_A"],
    )
    again = Adapters(3).factors(made)
    assert list(again) == list(PEFT)
    assert Adapters.products(again)["a.lora_BA.default.weight"].shape == (4, 5)
    assert again["score.weight"] == record(**held)["score.weight"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"b.lora_embedding_A": None}, r"'b\.lora_embedding_B'\] has no partner"),
        ({"a.lora_B.default.weight": None}, r"'a\.lora_A\.default\.weight'\] has no partner"),
        ({"a.lora_A.default.weight": (2, 5, 3, 3)}, r"shape \(2, 5, 3, 3\).*convolutions"),
        ({"a.lora_B.default.weight": (4, 3)}, r"\(4, 3\): expected \(rank, in\) and \(out, rank\)"),
    ],
)
def test_factors_that_have_no_product_are_named(changed, words):
    shapes = {name: shape for name, shape in (PEFT | changed).items() if shape}
    with pytest.raises(ConfigError, match=words):
        Adapters.products(record(**{name: np.ones(shape) for name, shape in shapes.items()}))


@pytest.mark.parametrize(
    ("initial", "words"),
    [
        (of_peft(), r"holds a\.lora_A.*initial_arrays=adapters\.products"),
        ({"w": np.zeros(3)}, r"holds no lora_BA.*initial_arrays=adapters\.products"),
        ({BA: np.zeros((4, 3, 2))}, r"'q\.lora_BA\.weight'\] has shape \(4, 3, 2\)"),
        ({BA: np.zeros((4, 3), np.int64)}, "dtype int64: expected"),
    ],
)
def test_a_run_begins_with_products_alone(initial, words):
    with pytest.raises(ConfigError, match=words):
        start(FedAvg(stages=[Adapters(2)]), {1: Device(2)}, initial)


def test_a_device_holds_all_that_it_was_sent_where_its_rank_is_larger():
    sent = Adapters(3).factors(record(**model(5)))
    assert at_rank(sent, 8) == sent
    with pytest.raises(ConfigError, match="rank = 0: expected an integer >= 1"):
        at_rank(sent, 0)


# Bad replies.


def raw(array, **changes):
    """Return an array with other fields than those that belong to it."""
    fields = {"dtype": str(array.dtype), "shape": array.shape, "stype": "numpy.ndarray"}
    return Array(**{**fields, "data": Array(array).data, **changes})


def factors(rank, dtype=np.float64):
    return {A: np.ones((rank, N_IN), dtype), B: np.ones((N_OUT, rank), dtype)}


NAN = np.full((2, N_IN), np.nan)
HUGE = {name: np.full_like(x, 1e200) for name, x in factors(2).items()}
SHAPES = r"expected \(r, 7\) and \(9, r\) with r from 1 to 7"
BAD = {
    "no partner": ({B: None}, "names", r"missing \['q\.lora_B\.weight'\], unknown \[\]"),
    "a product": ({BA: product(2)}, "names", r"unknown \['q\.lora_BA\.weight'\]"),
    "products alone": (
        {A: None, B: None, BA: product(2)},
        "names",
        r"missing \['q\.lora_A\.weight', 'q\.lora_B\.weight'\], unknown \['q\.lora_BA\.weight'\]",
    ),
    "no head": ({"head": None}, "names", r"missing \['head'\]"),
    "a long name": ({"x" * 150: np.ones(1)}, "names", r"unknown \['x{40}'\]"),
    "rank 0": (factors(0), "shape", SHAPES),
    "a rank above both sizes": (factors(8), "shape", SHAPES),
    "two ranks": (factors(2) | {A: np.ones((3, N_IN))}, "shape", SHAPES),
    "another input": ({A: np.ones((2, 6))}, "shape", SHAPES),
    "another output": ({B: np.ones((8, 2))}, "shape", SHAPES),
    "one axis": ({A: np.ones(7)}, "shape", SHAPES),
    "no axis": ({A: np.array(1.0)}, "shape", SHAPES),
    "three axes": ({A: np.ones((2, 7, 1))}, "shape", SHAPES),
    "a shape that lies": ({A: raw(np.ones((2, 6)), shape=(2, 7))}, "shape", r"expected \(2, 7\)"),
    "a rank that nobody can hold": ({A: raw(np.ones((2, 7)), shape=(10**9, 7))}, "shape", SHAPES),
    "another dtype": (factors(2, np.float32), "dtype", r"float32: expected float64"),
    "whole numbers": (factors(2, np.int64), "dtype", r"int64: expected float64"),
    "objects": ({A: raw(np.ones((2, 7)), data=b"\x93NUMPY\1\0\1\0}")}, "format", "plain numbers"),
    "too few bytes": (
        {A: raw(np.ones((2, 7)), data=Array(NAN).data[:-8])},
        "bytes",
        "expected 112",
    ),
    "too many bytes": ({A: raw(NAN, data=bytes(10**5))}, "bytes", r"takes 100,000 bytes"),
    "pickles": ({A: raw(np.ones((2, 7)), stype="pickle")}, "format", "'pickle'"),
    "NaN": ({A: NAN}, "finite", r"arrays\['q\.lora_A\.weight'\] holds NaN"),
    "an infinite head": ({"head": np.full(2, np.inf)}, "finite", r"arrays\['head'\] holds NaN"),
    "a product beyond all": (HUGE, "finite", r"arrays\['q\.lora_BA\.weight'\] holds NaN"),
    "a head of another shape": ({"head": np.ones(3)}, "shape", r"expected \(2,\)"),
    "a change": ({}, "format", r"fedstale\.update = 'delta': expected the factors themselves"),
}


def bad_node(name):
    def node(message, grid):
        sent = numbers(at_rank(message.content["arrays"], 2)) | BAD[name][0]
        arrays = {
            k: x if isinstance(x, Array) else Array(x) for k, x in sent.items() if x is not None
        }
        body = content(ArrayRecord(arrays))
        if name == "a change":
            body["how"] = ConfigRecord({"fedstale.update": "delta"})
        return 1.0, body

    return node


@pytest.mark.parametrize("name", BAD)
def test_a_bad_reply_is_rejected_alone_and_the_run_goes_on(name):
    _, kind, words = BAD[name]
    strategy = StaleStrategy(schedule=k_batch_async(2, 1), stages=[Adapters(4)])
    good = Device(2)
    grid, after = start(strategy, {1: good, 2: bad_node(name)}, model(5), rounds=3)
    reasons = [reason for _, reason in grid.refused if "run ended" not in reason]
    assert reasons
    assert all(re.search(words, reason) for reason in reasons), reasons
    assert set(strategy.rejections) == {f"rejected: {kind}"}
    expected = model(5)[BA] + sum(good.change(i) for i in range(3))
    np.testing.assert_allclose(after[BA], expected, atol=1e-12)


def test_a_reply_without_arrays_is_rejected_too():
    def empty(message, grid):
        return 1.0, RecordDict({"m": MetricRecord({"num-examples": 1})})

    strategy = StaleStrategy(schedule=k_batch_async(2, 1), stages=[Adapters(4)])
    grid, _ = start(strategy, {1: Device(2), 2: empty}, model(5), rounds=3)
    assert any("0 ArrayRecords" in reason for _, reason in grid.refused)


def test_a_hostile_rank_takes_no_memory():
    stage, n = Adapters(2), 256
    sent = numbers(stage.factors(record(**{BA: np.zeros((n, n))})))
    small = raw(np.ones((2, n)), shape=(n, n)), raw(np.ones((n, 2)), shape=(n, n))
    reply = ArrayRecord(dict(zip((A, B), small, strict=True)))
    tracemalloc.start()
    with pytest.raises(RejectionError, match=r"has shape \(2, 256\): expected \(256, 256\)"):
        stage._changes(reply, sent)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * n * n / 4


def test_other_dtypes_are_converted_where_validation_converts_them():
    class Wide(Device):
        def train(self, arrays):
            return {name: np.asarray(x, np.float64) for name, x in super().train(arrays).items()}

    node = Wide(2)
    strategy = FedAvg(stages=[Adapters(4)], validation=Validation(dtypes="cast"))
    grid, after = start(strategy, {1: node}, model(5, np.float32))
    assert not grid.refused
    np.testing.assert_allclose(after[BA], model(5)[BA] + node.change(), atol=1e-5)
    assert (after[BA].dtype, after["n"]) == (np.float32, 5)


# Runs.


TARGET = product(8, np.float64, (12, 10), seed=3)
RANKS = (2, 4, 8)


def learning_app():
    """Return an app whose devices fit factors of their rank to `TARGET` by gradient descent."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        rank = RANKS[context.node_config["partition-id"] % len(RANKS)]
        held = numbers(at_rank(message.content["arrays"], rank))
        a, b = held[A], held[B]
        for _ in range(5):
            error = b @ a - TARGET
            a, b = a - 0.3 * b.T @ error, b - 0.3 * error @ a.T
        metrics = MetricRecord({"num-examples": 10, "train_loss": float((error**2).sum())})
        body = RecordDict({"arrays": record(**{A: a, B: b}), "metrics": metrics})
        return Message(body, reply_to=message)

    return app


LEARN = {
    "FedBuff": lambda **o: FedBuff(6, 3, **o),
    "GapAware": lambda **o: GapAware(6, 3, **o),
    "a robust rule": lambda **o: StaleStrategy(
        schedule=k_batch_async(6, 5), robust=TrimmedMean(f=1), **o
    ),
    "Privacy": lambda stages, **o: FedBuff(
        6, 3, stages=[*stages, Privacy(clip_norm=10.0, noise_multiplier=0.0, delta=1e-5)], **o
    ),
}


@pytest.mark.parametrize("name", LEARN)
def test_devices_of_ranks_2_4_and_8_learn_a_target_of_rank_8_on_traces(name):
    windows = [[(0, 40), (45, 90), (92, 1000)]] * 3 + [[(0, 1000)]] * 3
    grid = TraceGrid(fleet(windows, compute=np.linspace(0.5, 2.0, 6)), learning_app(), costs=COSTS)
    initial = record(**{BA: np.zeros((12, 10))})
    with grid.running():
        strategy = LEARN[name](stages=[Adapters(8)], seed=1)
        result = strategy.start(grid, initial, num_rounds=80, timeout=500.0)
    assert not strategy.rejections
    events = grid.events().to_pandas()
    assert events["staleness"].max() >= 1
    left = np.linalg.norm(result.arrays[BA].numpy() - TARGET) / np.linalg.norm(TARGET)
    s = np.linalg.svd(TARGET, compute_uv=False)
    assert left < 0.1 < np.sqrt((s[4:] ** 2).sum() / (s**2).sum())


def test_a_device_is_charged_the_bytes_of_its_rank():
    grid = TraceGrid(fleet([[(0, 1000)]] * 3), learning_app(), costs=COSTS)
    with grid.running():
        FedAvg(stages=[Adapters(8)]).start(grid, record(**{BA: np.zeros((12, 10))}), num_rounds=1)
    events = grid.events().to_pandas().sort_values("node_id")
    # 1 MB stands for the factors that are sent; names and shapes are not scaled.
    assert events["downloaded_bytes"].to_numpy() == pytest.approx([1e6] * 3, abs=2e3)
    expected = [1e6 * rank / 8 for rank in RANKS]
    assert events["uploaded_bytes"].to_numpy() == pytest.approx(expected, abs=2e3)


def kept_run(grid, **options):
    strategy = FedBuff(4, 2, stages=[Adapters(3)], seed=2, min_evaluate_nodes=1, **options)
    result = strategy.start(grid, record(**model(6, np.float32)), num_rounds=9, timeout=50.0)
    return [array.data for array in result.arrays.values()], [
        [array.data for array in message.content["arrays"].values()] for _, message in grid.sent
    ]


def devices():
    return {k: Device(k, delay=0.3 * k**2) for k in (1, 2, 3, 5)}


def test_a_message_that_could_not_be_sent_keeps_nothing(tmp_path):
    class Full(VirtualGrid):
        def push_messages(self, messages):
            ids = super().push_messages(messages)
            nodes = [message.metadata.dst_node_id for message in messages]
            return [None if node == 3 else i for node, i in zip(nodes, ids, strict=True)]

    strategy = FedAvg(stages=[Adapters(3)], checkpoints=Checkpoints(tmp_path))
    nodes = devices() | {3: lambda message, grid: (0.0, None)}
    grid, _ = start(strategy, nodes, model(6), rounds=4, grid=Full)
    assert len(grid.merged) == 4 * 3
    assert set(read_checkpoint(tmp_path)["stages"]["Adapters"]["_sent"]) == {3}


@pytest.mark.parametrize("die_at", [3, 5])
def test_a_run_that_was_cut_off_with_jobs_in_flight_goes_on_to_the_same_bytes(die_at):
    expected = kept_run(KeepingGrid(devices()))
    grid = KeepingGrid(devices(), die_at=die_at)
    with pytest.raises(KilledError):
        kept_run(grid)
    state = unpacked(grid.kept)
    # What was sent is kept of the versions that replies in flight are changes of, and of the last.
    jobs = [Job(*row) for row in state["jobs"]["open"]]
    bases = {job.base_version for job in jobs if job.purpose == "train"}
    kept = set(state["stages"]["Adapters"]["_sent"])
    assert min(bases) == 0
    assert bases <= kept <= bases | {max(kept)}
    grid.die_at = None
    assert kept_run(grid) == expected


def test_on_real_devices_a_new_run_goes_on_from_the_products(tmp_path):
    def go(rounds, **options):
        strategy = FedBuff(4, 2, stages=[Adapters(3)], **options)
        return start(strategy, devices(), model(6), rounds=rounds)

    _, before = go(4, checkpoints=Checkpoints(tmp_path))
    grid, after = go(7, resume=tmp_path)
    assert [version for version, _ in grid.models] == [5, 6, 7]
    assert np.abs(after[BA] - before[BA]).max() > 0.01
    with pytest.raises(ResumeError, match=r"stages \[Adapters\(3\)\]"):
        start(FedBuff(4, 2, resume=tmp_path), devices(), model(6), rounds=8)


# Settings.


def test_the_stage_is_a_part_of_a_strategy_in_text():
    made = parse("FedBuff(10, 5, stages=[Adapters(8)])")
    assert repr(made) == repr(FedBuff(10, 5, stages=[Adapters(rank=8)]))
    assert repr(deepcopy(made.stages)) == "(Adapters(8),)"


@pytest.mark.parametrize("rank", [0, -1, 2.0, True])
def test_a_rank_is_a_count(rank):
    with pytest.raises(
        ConfigError, match=r"strategy\.Adapters\.rank = .*: expected an integer >= 1"
    ):
        Adapters(rank)


def test_formats_beside_factors_are_refused():
    with pytest.raises(ConfigError, match="Adapters and Compression"):
        FedAvg(stages=[Adapters(2), Compression("int8")])
