"""The simulator: what devices and servers do, and what servers know."""

from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_fleets import synthetic
from small_episodes import SIMPLE, episodes, fleet, one_kind, send, simulator_of

from fedstale.agents.env.episodes import AGES, INFLATION, EpisodeSettings
from fedstale.agents.env.forecast_table import TrueForecasts
from fedstale.agents.env.scenario import Scenario
from fedstale.agents.env.simulator import Reward
from fedstale.simulation import Costs, TraceGrid
from fedstale.strategies import StaleStrategy
from fedstale.strategies.schedule import k_async, k_sync, semi_synchronous
from fedstale.strategies.selection import Selector
from fedstale.strategies.server.checks import Checks, Validation
from fedstale.strategies.server.runtime import Callback
from fedstale.strategies.types import ClientUpdate, History
from fedstale.strategies.weighting import ByAge, inverse_root
from fedstale.traces import TraceSet

RECHECK_S = 0.05
ALWAYS = [(0.0, 10_000.0)]


def phones(n, seed):
    return synthetic(n, days=1, seed=seed)


class LowestId(Selector):
    """Takes the first candidates, so that two servers choose alike."""

    def select(self, candidates, k, now, rng):
        return [int(node) for node in np.sort(candidates.node_ids)[:k]]


def counting_client(examples):
    app = ClientApp()

    @app.train()
    def train(message, context):
        arrays = [array + 1.0 for array in message.content["arrays"].to_numpy_ndarrays()]
        metrics = MetricRecord({"num-examples": examples, "train_loss": 1.0})
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


@pytest.mark.parametrize("case", ["sync", "whole", "async", "all", "late"])
def test_the_world_merges_what_a_strategy_merges_on_the_same_devices_at_the_same_time(case):
    schedule = {
        "sync": k_sync(6, 4),
        "whole": k_sync(6, 6),
        "async": k_async(6, 3),
        "all": replace(k_sync(6, 6), buffer_size=None),
        "late": semi_synchronous(6, 400.0),
    }[case]
    base = phones(60, 1)
    traces = TraceSet(
        device_ids=base.device_ids,
        availability=base.availability,
        compute=base.compute,
        downlink=fleet([ALWAYS] * 60).downlink,
        uplink=fleet([ALWAYS] * 60).uplink,
        compute_unit=base.compute_unit,
    )
    ttl, n_versions = 900.0, 25
    costs = Costs(work_per_example=20.0, epochs=1, examples=10)
    grid = TraceGrid(traces, counting_client(10), costs=costs)
    strategy = StaleStrategy(
        selector=LowestId(),
        schedule=replace(schedule, recheck_s=RECHECK_S),
        weighting=ByAge(inverse_root()),
        seed=0,
    )
    merged_at = []

    class Instants(Callback):
        def new_version(self, run, version, arrays, updates):
            merged_at.append(run.now())

    grid.runtime.add(Instants())
    with grid.running():
        strategy.start(grid, ArrayRecord([np.zeros(2)]), num_rounds=n_versions, timeout=ttl)
    events = grid.events().to_pandas()
    expected = []
    for version in range(1, n_versions + 1):
        jobs = events[events["aggregated_version"] == version]
        expected.append((sorted(jobs["node_id"] - 1000), sorted(jobs["staleness"])))

    size = 60 if schedule.buffer_size is None else schedule.buffer_size
    made = episodes(
        np.arange(60),
        concurrency=6,
        buffer_size=size,
        keeps_stragglers=schedule.stragglers == "keep",
        deadline_s=schedule.deadline_s,
        end=2 * 86_400.0,
        rounds=10_000,
        age_weights=[inverse_root()(age) for age in range(AGES)],
    )
    simulator = simulator_of(traces, made, kinds=one_kind(work=200.0, ttl_s=ttl))
    found, when = [], []
    finished = simulator.known["times_finished"]
    while len(found) < n_versions:
        before, version = finished[0].copy(), simulator.version[0]
        lowest = np.flatnonzero(simulator.mask[0])[: int(simulator.slots[0])]
        send(simulator, *lowest)
        merged = np.flatnonzero(finished[0] > before)
        if simulator.version[0] > version:
            stale = simulator.known["staleness"][0, merged]
            found.append((merged.tolist(), sorted(stale.tolist())))
            when.append(simulator.stepped_at[0])
    assert found == expected
    assert (events["status"] == "interrupted").any()
    # Where nobody is free, the strategy looks again every so often; nothing else takes time.
    np.testing.assert_allclose(when, merged_at, atol=RECHECK_S)


def test_the_server_knows_after_a_round_what_a_history_holds():
    traces = fleet([ALWAYS, ALWAYS, [(0.0, 50.0)]], compute=[1.0, 0.5, 1.0])
    examples, inflates = np.array([10.0, 40.0, 10.0]), np.array([True, False, False])
    made = episodes([0, 1, 2], concurrency=3, buffer_size=3, examples=examples, inflates=inflates)
    simulator = simulator_of(traces, made)
    send(simulator, 0, 1, 2)
    history, checks = History(), Checks(Validation())
    for node in range(3):
        history.picked(node, 0.0)
    for node, seconds in ((0, 100.0), (1, 200.0)):
        stated = SIMPLE.first_loss * (INFLATION if inflates[node] else 1.0)
        metrics = {"train_loss": stated, "square_loss": stated**2}
        update = ClientUpdate(delta={}, base={}, current={}, staleness=0, metrics=metrics)
        loss, square_loss = checks.losses(update)
        history.finished(
            node,
            duration_s=seconds,
            examples=examples[node],
            loss=loss,
            square_loss=square_loss,
            staleness=0,
            version=0,
        )
    history.failed(2)
    seen, known = simulator.candidates(0), history.candidates([0, 1])
    assert seen.node_ids.tolist() == [0, 1]
    for name in ("duration_s", "loss", "square_loss", "examples", "staleness", "last_version"):
        np.testing.assert_allclose(getattr(seen, name), getattr(known, name), err_msg=name)
    for name in ("times_picked", "times_finished", "times_failed", "picked_at", "p_finish"):
        np.testing.assert_array_equal(getattr(seen, name), getattr(known, name), err_msg=name)
    np.testing.assert_allclose(seen.utility, known.utility)
    # The first states ten times its loss.
    assert seen.utility[1] / seen.utility[0] == pytest.approx(4.0 / INFLATION)
    assert simulator.known["times_failed"][0].tolist() == [0, 0, 1]


def test_a_round_costs_what_the_trips_cost():
    traces = fleet([ALWAYS, [(0.0, 60.0)], ALWAYS], compute=[1.0, 1.0, 0.25])
    simulator = simulator_of(traces, episodes([0, 1, 2], concurrency=3, buffer_size=1))
    made = send(simulator, 0, 1, 2)
    # The first reply ends the round; the slow one is discarded, the lost one is not seen yet.
    assert made.time_s[0] == pytest.approx(100.0)
    assert (made.sent[0], made.aggregated[0], made.failed[0], made.discarded[0]) == (3, 1, 0, 2)
    assert made.wasted_s[0] == pytest.approx(60.0 + 400.0)
    assert made.spent_s[0] == pytest.approx(560.0)
    # Who is still at it is no candidate, whoever waits for it or not.
    assert simulator.mask[0].tolist() == [True, False, False]
    simulator.episodes.buffer_size[:] = 4
    terms = simulator.reward_terms(np.array([0]), made, Reward(time=0.5, waste=2.0))
    assert terms["time"][0] == pytest.approx(-0.5)
    assert terms["waste"][0] == pytest.approx(-2.0 * 460.0 / 400.0)
    assert terms["reward"][0] == pytest.approx(made.gain[0] + terms["time"][0] + terms["waste"][0])


def test_a_stale_update_is_aggregated_with_the_weight_of_its_age():
    traces = fleet([ALWAYS] * 3, compute=[1.0, 1.0, 0.4])
    made = episodes([0, 1, 2], concurrency=3, buffer_size=1, keeps_stragglers=True)
    made.age_weights[:, 1:] = 0.5
    simulator = simulator_of(traces, made)
    for column in (0, 1, 2):
        assert simulator.mask[0, column]
    send(simulator, 0, 1, 2)
    assert simulator.version[0] == 1
    # Nobody new is sent anything: the second reply is one version late.
    before = simulator.losses[0].copy()
    late = send(simulator)
    assert late.staleness[0] == 1
    assert late.aggregated[0] == 1
    fresh = SIMPLE.after_step(before[None], 3.0 * np.eye(10)[1:2], np.ones(1))
    weighed = SIMPLE.after_step(before[None], 0.5 * 3.0 * np.eye(10)[1:2], np.ones(1))
    np.testing.assert_allclose(simulator.losses[0], weighed[0])
    assert not np.allclose(fresh, weighed)


def test_a_device_works_as_long_as_it_has_examples_and_says_so():
    traces = fleet([ALWAYS] * 2)
    forecasts = TrueForecasts(traces, one_kind())
    made = episodes([0, 1], concurrency=2, buffer_size=2, work_scale=[1.0, 3.0])
    simulator = simulator_of(traces, made, forecasts=forecasts)
    np.testing.assert_allclose(simulator.candidates(0).forecast_duration_s, [100.0, 300.0])
    send(simulator, 0, 1)
    np.testing.assert_allclose(simulator.candidates(0).duration_s, [100.0, 300.0])


def test_an_episode_is_over_when_its_devices_have_worked_as_long_as_they_may():
    made = episodes([0, 1, 2], b=2, concurrency=2, buffer_size=1, budget_s=[450.0, 451.0])
    traces = fleet([ALWAYS, ALWAYS, [(0.0, 50.0)]], compute=[1.0, 0.5, 1.0])
    simulator = simulator_of(traces, made)
    for row in (0, 1):
        # It goes offline after 50 s.
        send(simulator, 2, row=row)
        # The first reply ends a round: 100 s are merged, and 200 s discarded.
        send(simulator, 0, 1, row=row)
        assert not simulator.done[row]
        send(simulator, 0, row=row)
    assert simulator.done.tolist() == [True, False]
    assert simulator.worked_s.tolist() == [450.0, 450.0]


def test_a_selector_sees_what_a_step_misses_and_who_is_working():
    traces = fleet([ALWAYS, ALWAYS, [(0.0, 50.0)], ALWAYS], compute=[1.0, 0.5, 1.0, 1.0])
    simulator = simulator_of(traces, episodes([0, 1, 2, 3], concurrency=3, buffer_size=2))
    seen = simulator.candidates(0)
    assert (seen.context.buffer_size, seen.context.n_missing, len(seen.in_flight)) == (2, 2, 0)
    # One device fails while two are at work; another may replace it.
    send(simulator, 0, 1, 2)
    seen = simulator.candidates(0)
    assert (seen.context.n_missing, seen.context.n_in_flight) == (1, 1)
    assert (seen.node_ids.tolist(), seen.in_flight.node_ids.tolist()) == ([3], [1])
    assert seen.in_flight.times_picked.tolist() == [1]


def test_an_episode_without_further_devices_is_over():
    traces = fleet([[(0.0, 150.0)]])
    simulator = simulator_of(traces, episodes([0], concurrency=1, buffer_size=1))
    send(simulator, 0)
    send(simulator, 0)
    assert simulator.done[0]
    assert simulator.now[0] == 10_000.0
    assert not simulator.mask.any()


def test_p_finish_of_an_over_reporting_client_falls():
    traces = fleet([[(t, t + 50.0) for t in range(0, 9000, 60)], ALWAYS])
    made = episodes([0, 1], concurrency=1, buffer_size=1)
    made.over_reports[:, 0] = True
    simulator = simulator_of(traces, made, forecasts=TrueForecasts(traces, one_kind()))
    assert simulator.candidates(0).p_finish.tolist() == [1.0, 1.0]
    for _ in range(20):
        if simulator.mask[0, 0]:
            send(simulator, 0)
        else:
            send(simulator)
    over_reporting = simulator.candidates(0)
    assert over_reporting.p_finish[over_reporting.node_ids.tolist().index(0)] < 0.5


def test_forecasts_are_as_old_as_the_last_reply_unless_the_server_requests_them():
    traces = fleet([ALWAYS] * 2)
    said = TrueForecasts(traces, one_kind())
    asks = simulator_of(traces, episodes([0, 1]), forecasts=said)
    assert asks.candidates(0).forecast_at.tolist() == [0.0, 0.0]
    hears = simulator_of(traces, episodes([0, 1], requests_forecasts=False), forecasts=said)
    assert np.isnan(hears.candidates(0).forecast_at).all()
    send(hears, 0)
    known = hears.candidates(0)
    assert known.forecast_at[0] == pytest.approx(100.0)
    assert np.isnan(known.forecast_at[1])


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10_000))
def test_every_job_ends_once_and_the_clock_never_goes_back(seed):
    rng = np.random.default_rng(seed)
    traces = phones(40, seed % 3)
    settings = EpisodeSettings(devices=(4, 24), rounds=12, keep_share=0.5)
    scenario = Scenario.of(traces, forecasts="none", settings=settings, proxy=SIMPLE)
    made, simulator = scenario.draw(6, rng), scenario.simulator(6)
    simulator.reset(made)
    rows, before = np.arange(6), simulator.now.copy()
    total = np.zeros(4)
    while not simulator.done.all():
        live = rows[~simulator.done]
        assert (simulator.slots[live] >= 1).all()
        assert (simulator.mask[live].sum(axis=1) >= 1).all()
        picked = simulator.mask[live] & (rng.random((live.size, 24)) < 0.3)
        picked &= np.cumsum(picked, axis=1) <= simulator.slots[live][:, None]
        simulator.dispatch(live, picked)
        round_ = simulator.advance(live)
        total += [round_.sent.sum(), round_.aggregated.sum(), round_.failed.sum(), 0]
        total[3] += round_.discarded.sum()
        assert (simulator.now[live] >= before[live]).all()
        assert all(np.isfinite(v).all() for v in (round_.gain, round_.wasted_s, round_.time_s))
        assert (simulator.in_flight.sum(axis=1) <= simulator.episodes.concurrency).all()
        before = simulator.now.copy()
    assert total[0] == total[1:].sum() + simulator.in_flight.sum()
    assert simulator.known["times_picked"].sum() == total[0]
