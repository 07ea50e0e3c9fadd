"""Shares of the work on replayed devices: what is done is charged, and forecasts are of it."""

from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from interruptions import files, power_cut
from one_thread import one_thread
from shared_fleets import synthetic
from tiny import COSTS, fleet

from fedstale.client import CompressionMod, ForecastMod, PackMod, local_steps
from fedstale.client.device import MessageHistory
from fedstale.config import SimulationConfig
from fedstale.flower import identity, stamp
from fedstale.simulation import InlineExecutor, TraceGrid
from fedstale.simulation.dry_runs import dry_run
from fedstale.simulation.executors import ClientCall
from fedstale.simulation.executors.batched import BatchedExecutor
from fedstale.simulation.flower_app import BatchedFunctions, FlowerApp
from fedstale.simulation.run import simulate
from fedstale.strategies import Compression, FedAvg, FedBuff, LocalWork
from fedstale.strategies.selection import Fastest
from fedstale.strategies.stages.local_work import WORK, StepsDone, asking
from fedstale.strategies.types import FORECAST_RECORD
from fedstale.traces import TraceSet

__all__ = ["one_thread"]

ALWAYS = [(0, 100_000)]
SHORT = [(0, 40), (50, 90), (95, 100_000)]
WHOLE = 10
LAZY = replace(COSTS, constant_replies=True)
"""10 examples of a unit each: a whole job is 10 s on a device of one unit/s, and 10 steps."""


def app(*, mods=None, reads=True, whole=WHOLE):
    """Return an app that moves the weights by 1 a step."""
    made = ClientApp(mods=[PackMod()] if mods is None else [*mods])

    @made.train()
    def train(message, context):
        steps = local_steps(message, 1, whole) if reads else whole
        (w,) = message.content["arrays"].to_numpy_ndarrays()
        metrics = MetricRecord({"num-examples": 10, "train_loss": 1.0})
        content = RecordDict({"arrays": ArrayRecord([w + np.float32(steps)]), "metrics": metrics})
        return Message(content, reply_to=message)

    return made


def run(client, strategy, n=3, rounds=4, *, windows=ALWAYS, compute=1.0, **options):
    costs = options.pop("costs", COSTS)
    traces = fleet([windows] * n, length=100_000.0, compute=compute)
    grid = TraceGrid(traces, client, costs=costs, **options)
    with grid.running():
        initial = ArrayRecord([np.zeros(8, np.float32)])
        result = strategy.start(grid, initial, num_rounds=rounds, timeout=5_000.0)
    return grid.events().to_pandas(), result


@pytest.mark.parametrize(("share", "units"), [(0.125, 1), (0.25, 2), (0.5, 5), (0.875, 8), (1, 10)])
@pytest.mark.parametrize("costs", [COSTS, LAZY])
def test_an_app_that_reads_its_share_is_charged_the_steps_that_it_takes(share, units, costs):
    events, result = run(app(), FedAvg(stages=[LocalWork(share)]), costs=costs)
    assert (events["status"] == "reported").all()
    # Also the first jobs, before any reply has told.
    np.testing.assert_allclose(events["compute_s"], units)
    np.testing.assert_allclose(events["work"], units)
    np.testing.assert_allclose(events["work_share"], share)
    np.testing.assert_allclose(result.arrays["0"].numpy(), 4 * units)


@pytest.mark.parametrize("costs", [COSTS, LAZY])
@pytest.mark.parametrize("mods", [(PackMod(),), ()])
def test_an_app_that_ignores_its_share_is_charged_in_full(costs, mods):
    events, result = run(
        app(reads=False, mods=mods), FedAvg(stages=[LocalWork(0.125)]), costs=costs
    )
    np.testing.assert_allclose(events["work"], 10.0)
    np.testing.assert_allclose(result.arrays["0"].numpy(), 40.0)


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("windows", [ALWAYS, SHORT])
def test_the_same_is_charged_wherever_clients_run_late(reads, windows):
    strategy = FedBuff(4, 2, stages=[LocalWork(0.5)], seed=1)
    eager, one = run(app(reads=reads), strategy, 6, 8, windows=windows, compute=0.2)
    later, other = run(app(reads=reads), strategy, 6, 8, windows=windows, compute=0.2, costs=LAZY)
    assert eager.equals(later)
    assert one.arrays == other.arrays
    assert (windows is ALWAYS) == (eager["status"] == "reported").all()


def test_with_a_promise_only_what_is_delivered_is_trained_once_the_app_is_known():
    ran = []

    def noting(message, context, call_next):
        ran.append(message.metadata.message_id)
        return call_next(message, context)

    client = app(mods=[noting, PackMod()])
    # A whole job takes 50 s of windows of 40 s: half of it is done in 25 s, and some are cut off.
    windows = [(start, start + 32) for start in range(0, 4000, 36)]
    strategy = FedBuff(4, 2, stages=[LocalWork(0.5)], seed=1)
    events, _ = run(client, strategy, 6, 15, windows=windows, compute=0.2, costs=LAZY)
    first = events.loc[events["delivered_at"].idxmin(), "delivered_at"]
    later = events[events["sent_at"] > first]
    lost = later[later["status"] == "interrupted"]
    assert len(lost) >= 3
    assert not {f"message-{job}" for job in lost["job_id"]} & set(ran)


def test_a_share_of_a_single_step_is_that_step_and_is_charged_as_such():
    events, result = run(app(whole=1), FedAvg(stages=[LocalWork(0.125)]))
    np.testing.assert_allclose(events["work"], 10.0)
    np.testing.assert_allclose(result.arrays["0"].numpy(), 4.0)


def test_a_declared_work_of_a_whole_message_has_its_share_too():
    costs = replace(COSTS, work={"train": 40.0})
    events, _ = run(app(), FedAvg(stages=[LocalWork(0.5)]), costs=costs)
    np.testing.assert_allclose(events["work"], 20.0)


def test_a_function_of_the_work_sees_the_share_and_decides():
    def work(message):
        return 7.0 * message.content["config"][WORK]

    events, _ = run(app(), FedAvg(stages=[LocalWork(0.5)]), work=work)
    np.testing.assert_allclose(events["work"], 3.5)
    events, _ = run(app(), FedAvg(stages=[LocalWork(0.5)]), work=lambda message: 7.0)
    np.testing.assert_allclose(events["work"], 7.0)


def test_without_a_share_the_columns_are_empty():
    events, _ = run(app(), FedAvg())
    assert events["work_share"].isna().all()
    assert (events[["format_down", "format_up"]] == "").all().all()


def test_events_name_the_formats_of_each_message():
    client = app(mods=[CompressionMod()])
    strategy = FedAvg(stages=[Compression("int4", down="int8")])
    grid = TraceGrid(fleet([ALWAYS], length=100_000.0), client, costs=COSTS)
    with grid.running():
        strategy.start(grid, ArrayRecord([np.zeros(400, np.float32)]), 3)
    events = grid.events().to_pandas()
    assert events["format_down"].tolist() == ["", "int8", "int8"]
    assert events["format_up"].tolist() == ["int4"] * 3


# Forecasts.


def noting_forecasts(found):
    def noting(message, context, call_next):
        reply = call_next(message, context)
        if FORECAST_RECORD in reply.content:
            found.setdefault(context.node_id, []).append(dict(reply.content[FORECAST_RECORD]))
        return reply

    return noting


@pytest.mark.parametrize("order", ["inside", "outside"])
@pytest.mark.parametrize("costs", [COSTS, LAZY])
def test_devices_forecast_whole_jobs_whatever_share_the_last_one_had(order, costs):
    found = {}
    mods = (
        [CompressionMod(), ForecastMod()]
        if order == "inside"
        else [ForecastMod(), CompressionMod()]
    )
    client = app(mods=[noting_forecasts(found), *mods], whole=800)
    costs = replace(costs, work_per_example=100.0)
    shares = iter([0.125, 1.0, 0.5, 0.25, 1.0, 0.125] * 3)

    class Changing(LocalWork):
        def share_of(self, forecast, upload=1.0):
            return next(shares)

    strategy = FedAvg(stages=[Changing()])
    run(client, strategy, 1, 12, costs=costs)
    said = found[1000]
    np.testing.assert_allclose([s["share"] for s in said], [0.125, 1.0, 0.5, 0.25, 1.0, 0.125] * 2)
    full_job_s = np.array([s["training_s"][1] / s["share"] for s in said])
    # 1000 units on a device of 1 unit/s; a forecaster shrinks towards its fleet at first.
    np.testing.assert_allclose(full_job_s[4:], 1000.0, rtol=0.25)
    assert full_job_s[4:].max() / full_job_s[4:].min() < 1.2


@pytest.mark.parametrize("costs", [COSTS, LAZY])
@pytest.mark.parametrize(
    ("reads", "work"),
    [
        (True, None),
        (False, None),
        (True, lambda message: 100.0 * message.content["config"][WORK]),
        (True, lambda message: 100.0),
    ],
)
def test_a_device_knows_the_work_that_it_is_charged(reads, work, costs):
    client, known = app(mods=[PackMod(), ForecastMod()], whole=13, reads=reads), {}
    traces = fleet([ALWAYS] * 2, length=100_000.0)
    grid = TraceGrid(traces, client, costs=replace(costs, work_per_example=10.0), work=work)
    with grid.running():
        FedAvg(stages=[LocalWork(0.375)]).start(grid, ArrayRecord([np.zeros(8, np.float32)]), 4)
    for node, context in grid._clients._contexts.items():
        known[node] = MessageHistory.read(context.state)["work"]
    events = grid.events().to_pandas()
    for node, own in events.groupby("node_id"):
        np.testing.assert_allclose(known[node], own["work"])


def test_shares_by_the_real_mod_settle_at_what_fits_and_jobs_take_no_longer():
    # 1 s down and 1 s up; a whole training takes 400, 1000 and 8000 s.
    client = app(mods=[PackMod(), ForecastMod()], whole=800)
    compute = np.array([1.0, 0.4, 0.05])
    strategy = FedAvg(stages=[LocalWork(within_s=600.0)])
    costs = replace(LAZY, work_per_example=40.0)
    events, _ = run(client, strategy, 3, 12, costs=costs, compute=compute)
    last = events[events["round"] >= 9].groupby("node_id")
    settled = last["work_share"].agg(["min", "max"])
    assert (settled.loc[1000] == 1.0).all()
    assert settled.loc[1001].between(0.375, 0.625).all()
    assert (settled.loc[1002] == 0.125).all()
    assert (events["work_share"][events["round"] == 0] == 0.5).all()
    took = (events["reported_at"] - events["sent_at"])[events["round"] >= 9]
    node = events.loc[took.index, "node_id"]
    assert took[node == 1001].max() < 600.0 * 1.15
    # It does not fit with the least share, and is asked for that.
    assert took[node == 1002].min() == pytest.approx(1002.0, rel=0.01)


def test_what_jobs_took_is_known_as_of_whole_ones():
    seen = {}

    client = app(mods=[PackMod(), ForecastMod()], whole=800)

    class Seeing(Fastest):
        def select(self, candidates, k, now, rng):
            seen.update(zip(candidates.node_ids.tolist(), candidates.duration_s, strict=True))
            return super().select(candidates, k, now, rng)

    strategy = FedAvg(stages=[LocalWork(within_s=300.0)], selector=Seeing())
    costs = replace(LAZY, work_per_example=40.0)
    run(client, strategy, 2, 12, costs=costs, compute=np.array([1.6, 0.2]))
    # Their jobs take about as long: 250 s and 250 s; whole ones 250 and 2000.
    assert seen[1000] == pytest.approx(252.0, rel=0.1)
    assert seen[1001] == pytest.approx(2002.0, rel=0.35)


# Executors.


def digits_calls(n, share):
    """Return calls with a share of the work to clients of the digits app."""
    found = FlowerApp.find("digits")
    with found.importable():
        parts = BatchedFunctions.load(found.batched, found.directory)
        client = found.load_client()
        model = ArrayRecord(parts.network(0).state_dict())
    calls = []
    for i in range(n):
        config = asking(ConfigRecord({"server-round": 1}), share)
        content = RecordDict({"arrays": model, "config": config})
        node = {"partition-id": i, "num-partitions": n}
        run_config = found.run_config({"local-epochs": 2, "batch-size": 8})
        message = Message(content, 1000 + i, "train")
        stamp(message, f"message-{i}", 1.0, 10.0)
        context = Context(1, 1000 + i, node, RecordDict(), run_config)
        calls.append(ClientCall(message, context, seed=i))
    return client, parts, calls


@pytest.mark.parametrize("share", [0.125, 0.375, 1.0])
def test_batched_digits_take_the_steps_of_inline_and_say_so(share):
    with identity(1):
        client, parts, calls = digits_calls(7, share)
        ours = BatchedExecutor(client, parts).run(calls)
        client, _, calls = digits_calls(7, share)
        theirs = InlineExecutor(client).run(calls)
    for one, other in zip(ours, theirs, strict=True):
        done = StepsDone.of(one.reply.content)
        assert done is not None
        assert done == StepsDone.of(other.reply.content)
        assert done.share <= share or done.steps == 1
        for name, array in other.reply.content["arrays"].items():
            found = one.reply.content["arrays"][name].numpy()
            np.testing.assert_allclose(found, array.numpy(), atol=1e-5)
        losses = [reply.reply.content["metrics"]["train_loss"] for reply in (one, other)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# Whole runs.

CONFIG = SimulationConfig(
    app="digits",
    traces="synthetic:20",
    run_config={
        "strategy": (
            "FedBuff(6, 3, stages=[Compression('int4', down='int8'), "
            "LocalWork(within_s=120), ForecastRequest()])"
        ),
        "num-server-rounds": 8,
        "batch-size": 32,
        "forecasts": True,
    },
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a run whose devices are asked for shares of the work, which was not cut off."""
    config = replace(CONFIG, executor="inline")
    found = simulate(config, tmp_path_factory.mktemp("whole") / "run", traces=synthetic(20))
    assert found.jobs["work_share"].nunique() > 2
    return found


@pytest.mark.usefixtures("every_version_kept", "no_pages")
def test_a_run_that_was_cut_off_ends_byte_for_byte_as_one_that_was_not(tmp_path, whole):
    with power_cut(lambda version, now: version == 4):
        simulate(CONFIG, tmp_path, traces=synthetic(20))
    simulate(CONFIG, tmp_path, traces=synthetic(20), resume=True)
    assert files(tmp_path) == files(whole.folder)


@pytest.mark.parametrize("executor", ["processes", "batched"])
@pytest.mark.usefixtures("local_workers", "no_pages")
def test_processes_give_the_bytes_of_one_process_and_batches_its_events(tmp_path, executor, whole):
    config = replace(CONFIG, executor=executor, workers=2 if executor == "processes" else None)
    other = simulate(config, tmp_path, traces=synthetic(20))
    assert other.jobs.equals(whole.jobs)
    # A batch rounds in another way.
    assert executor == "batched" or files(tmp_path) == files(whole.folder)


# Looking ahead.


def sharing(share):
    return f"FedAvg(10, stages=[LocalWork({share})])"


def test_a_dry_run_counts_the_share():
    traces = TraceSet.ideal(20)
    found = {
        share: dry_run(replace(CONFIG, run_config={"strategy": sharing(share)}), traces).phases_s[
            "training"
        ]
        for share in (0.25, 1)
    }
    assert found[0.25] == pytest.approx(found[1] / 4, rel=0.05)
