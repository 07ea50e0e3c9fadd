"""Smaller messages on replayed devices: what crosses the wire is charged, and nothing else."""

from dataclasses import replace
from itertools import pairwise
from math import prod

import numpy as np
import pytest
from compact_client import CLIENT, bits, calls
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from local_workers import LocalWorkers
from one_thread import one_thread
from small_app import write_small_app
from tiny import COSTS, fleet

from fedstale.client import CompressionMod, ForecastMod
from fedstale.client.compression import NEXT_OF_RECORD, NEXT_RECORD
from fedstale.flower import content_size, identity, stamp
from fedstale.simulation import InlineExecutor, TraceGrid
from fedstale.simulation.executors import ClientCall
from fedstale.simulation.executors.batched import BatchedExecutor
from fedstale.simulation.flower_app import BatchedFunctions, FlowerApp
from fedstale.strategies import Compression, FedAvg, FedBuff
from fedstale.strategies.messages.codec import FORMATS, n_bytes
from fedstale.strategies.messages.records import Requested, coarse, form_of
from fedstale.strategies.server.packing import pack

__all__ = ["one_thread"]

ALWAYS = [(0, 100_000)]
N = 1024


def app(*, around=(), mods=()):
    """Return an app that moves each weight by numbers of its own."""
    client = ForecastMod().client_app(around=list(around)) if around else ClientApp(mods=[*mods])

    @client.train()
    def train(message, context):
        rng = np.random.default_rng(context.node_id)
        (w,) = message.content["arrays"].to_numpy_ndarrays()
        moved = (w + rng.standard_normal(w.shape)).astype(w.dtype)
        metrics = MetricRecord({"num-examples": 10, "train_loss": 1.0})
        content = RecordDict({"arrays": ArrayRecord([moved]), "metrics": metrics})
        return Message(content, reply_to=message)

    return client


def initial():
    return ArrayRecord([np.zeros(N, np.float32)])


def run(client, strategy, n=3, rounds=4, *, windows=ALWAYS, **options):
    costs = options.pop("costs", replace(COSTS, model_bytes=4_000_000))
    grid = TraceGrid(fleet([windows] * n, length=100_000.0), client, costs=costs, **options)
    with grid.running():
        result = strategy.start(grid, initial(), num_rounds=rounds, timeout=5_000.0)
    return grid.events().to_pandas(), result


@pytest.mark.parametrize("form", ["float16", "int8", "int4", "int2"])
def test_a_device_is_charged_the_bytes_of_the_format_times_those_that_the_model_stands_for(form):
    mods = [CompressionMod()]
    plain, _ = run(app(mods=mods), FedAvg())
    small, _ = run(app(mods=mods), FedAvg(stages=[Compression(form, down=form)]))
    scale = 4_000_000 / (4 * N)
    saved = (4 * N - n_bytes(form, N)) * scale
    # What does not grow with the model is a header less, and records more.
    assert np.allclose(plain["uploaded_bytes"] - small["uploaded_bytes"], saved, atol=400)
    first, later = small["round"] == 0, small["round"] > 0
    assert np.allclose(small["downloaded_bytes"][first], plain["downloaded_bytes"][first], atol=400)
    down = plain["downloaded_bytes"][later] - small["downloaded_bytes"][later]
    assert np.allclose(down, saved, atol=600)
    # 8 Mbit/s.
    np.testing.assert_allclose(small["upload_s"], small["uploaded_bytes"] / 1e6)


def test_the_size_of_a_reply_is_known_before_it_is_made():
    lazy = replace(COSTS, model_bytes=4_000_000, constant_replies=True)
    strategy = FedBuff(4, 2, stages=[Compression("int4", down="int8")], seed=1)
    for windows in (ALWAYS, [(0, 40), (50, 90), (95, 100_000)]):
        eager, one = run(app(mods=[CompressionMod()]), strategy, 6, 8, windows=windows)
        later, other = run(
            app(mods=[CompressionMod()]), strategy, 6, 8, windows=windows, costs=lazy
        )
        assert eager.equals(later)
        assert one.arrays == other.arrays
    assert (eager["status"] != "reported").any()


def test_a_fleet_whose_app_has_no_mod_may_promise_its_replies_too():
    lazy = replace(COSTS, model_bytes=4_000_000, constant_replies=True)
    events, _ = run(app(), FedAvg(stages=[Compression("int4")]), costs=lazy)
    assert (events["status"] == "reported").all()
    assert (events["uploaded_bytes"] > 4_000_000).all()


def test_values_of_a_quantised_array_are_all_of_its_bytes():
    small = coarse(initial(), "int4")
    (array,) = small.values()
    assert form_of(array) == "int4"
    size = content_size(RecordDict({"arrays": small}))
    assert size.values == n_bytes("int4", N)


@pytest.mark.parametrize("form", [None, *FORMATS])
def test_what_is_charged_for_a_small_network_is_what_flower_serialises_of_it_packed(form):
    shapes = [(32, 64), (32,), (10, 32), (10,)]
    arrays = [np.linspace(-1, 1, prod(shape), dtype=np.float32).reshape(shape) for shape in shapes]
    reply = RecordDict({"arrays": ArrayRecord(arrays)})
    if form is not None:
        reply["arrays"] = coarse(reply["arrays"], form)
    reply["metrics"] = MetricRecord({"num-examples": 10, "train_loss": 0.5})
    with identity(1):
        message = Message(pack(reply), 1, "train")
    serialised = sum(len(part.deflate()) for part in get_all_nested_objects(message).values())
    # Of the 2.4 KB in 2 bits, 130 bytes more than are charged are names, shapes and dtypes.
    assert sum(content_size(reply)) == pytest.approx(serialised, rel=0.06)


@pytest.mark.parametrize(
    "made",
    [
        lambda: app(mods=[CompressionMod()]),
        lambda: app(mods=[CompressionMod(), ForecastMod()]),
        lambda: app(mods=[ForecastMod(), CompressionMod()]),
        lambda: app(around=[CompressionMod()]),
    ],
)
def test_the_mod_does_the_same_wherever_it_stands(made):
    strategy = FedAvg(stages=[Compression("int2", down="int4")])
    _, result = run(made(), strategy)
    _, expected = run(app(mods=[CompressionMod()]), strategy)
    assert result.arrays == expected.arrays


def test_an_app_without_the_mod_ends_with_the_model_that_it_always_had():
    _, result = run(app(), FedAvg(stages=[Compression("int2", down="int4")]))
    _, expected = run(app(), FedAvg())
    assert result.arrays == expected.arrays


def test_nothing_of_what_rounding_leaves_out_is_lost_with_jobs_that_a_trace_loses():
    # 40 s down, 10 s of training, and 2.6 s up.
    ends = np.cumsum(np.random.default_rng(0).uniform(40, 130, 700))
    cuts = [(start + 1, end) for start, end in pairwise(ends)]
    costs = replace(COSTS, model_bytes=40_000_000)
    traces = fleet([cuts], length=100_000.0)
    grid = TraceGrid(traces, app(mods=[CompressionMod()]), costs=costs)
    n = 100
    with grid.running():
        strategy = FedBuff(1, 1, stages=[Compression("int2")])
        result = strategy.start(grid, initial(), num_rounds=n, timeout=5_000.0)
    events = grid.events().to_pandas()
    lost = events[events["status"] == "interrupted"]
    # Some had trained, and what they left out was in the node's Context.
    assert np.isfinite(lost["trained_at"]).sum() >= 2
    assert (events["status"] == "reported").sum() == n
    state = grid._clients._contexts[1000].state
    assert state[NEXT_OF_RECORD]["message"] == strategy_message(events)
    owed = state[NEXT_RECORD]["0"].numpy()
    change = np.random.default_rng(1000).standard_normal(N)
    moved = result.arrays["0"].numpy()
    np.testing.assert_allclose(moved + owed, n * change, atol=1e-2)
    assert np.abs(owed).max() > 0.1


def strategy_message(events):
    """Return the id of the message behind the last reply."""
    return f"message-{events.loc[events['status'] == 'reported', 'job_id'].max()}"


# Executors.


def digits_calls(n, *, down="int8", rounds=2):
    """Return calls with a model in a format to clients of the digits app."""
    found = FlowerApp.find("digits")
    with found.importable():
        parts = BatchedFunctions.load(found.batched, found.directory)
        client = found.load_client()
        full = ArrayRecord(parts.network(0).state_dict())
    model, calls = coarse(full, down), []
    for i in range(n):
        config = Requested("int4").within(ConfigRecord({"server-round": 1}))
        content = RecordDict({"arrays": model, "config": config})
        node = {"partition-id": i, "num-partitions": n}
        config = found.run_config({"local-epochs": 1, "batch-size": 64})
        message = Message(content, 1000 + i, "train")
        stamp(message, f"message-{i}", 1.0, 10.0)
        context = Context(1, 1000 + i, node, RecordDict(), config)
        calls.append(ClientCall(message, context, seed=i))
    return found, client, parts, calls


def test_workers_answer_with_the_bits_of_one_process(tmp_path):
    app = FlowerApp.find(write_small_app(tmp_path, client=CLIENT))
    with app.importable(), identity(1):
        own = InlineExecutor(app.load_client()).run(list(calls()))
        with LocalWorkers(app.load_client, 2) as pool:
            theirs = pool.run(list(calls()))
    assert {stype for stype, _ in bits(own)[0].values()} == {"fedstale.int4"}
    assert bits(theirs) == bits(own)
    assert [a.context.state for a in theirs] == [a.context.state for a in own]


def test_a_batch_answers_with_the_bits_of_its_own_training_in_the_format():
    def fit_many(models, jobs):
        return {name: stack + 0.37 for name, stack in models.items()}, [0.5] * len(jobs)

    with identity(1):
        _, client, parts, calls = digits_calls(3)
        batched = BatchedExecutor(client, parts)
        batched._fit = fit_many
        ours = batched.run(calls)
        assert not any(answer.reply.has_error() for answer in ours)

        # The same training, one client after the other.
        def training(message, context):
            arrays = {
                k: Array(a.numpy() + np.float32(0.37)) for k, a in message.content["arrays"].items()
            }
            content = RecordDict({"arrays": ArrayRecord(arrays)})
            return Message(content, reply_to=message)

        _, _, _, again = digits_calls(3)
        theirs = [CompressionMod()(call.message, call.context, training) for call in again]
    expected = [
        {k: (a.stype, a.data) for k, a in reply.content["arrays"].items()} for reply in theirs
    ]
    assert bits(ours) == expected
    states = [call.context.state.array_records for call in again]
    assert [answer.context.state.array_records for answer in ours] == states
