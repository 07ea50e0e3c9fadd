"""The world of the selection environment: what devices and servers do, and what servers know."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pandas as pd
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given, settings
from hypothesis import strategies as st
from small_world import SIMPLE, episodes, fleet, one_kind, send, world_of

from fedstale.agents.env.episodes import AGES, EpisodeSettings, JobKinds, draw_episodes
from fedstale.agents.env.forecast_table import ForecastTable, NoForecasts, TrueForecasts
from fedstale.agents.env.scenario import Stage, cross_fitted, stages
from fedstale.agents.env.simulator import Reward, World
from fedstale.agents.play import gini, heuristic, play, top
from fedstale.errors import ConfigError, TraceError
from fedstale.simulation import Costs, TraceGrid
from fedstale.strategies import (
    ByAge,
    ExpectedUtility,
    Fastest,
    LeastAvailable,
    Oort,
    PowerOfChoice,
    Random,
    Selector,
    StaleStrategy,
    inverse_root,
    k_async,
    k_sync,
    semi_synchronous,
)
from fedstale.strategies.server.clients import History
from fedstale.traces import Job, TraceSet
from fedstale.traces.forecast import LastValue, TraceObserver, draw
from fedstale.traces.synthetic.generate import synthesise

ALWAYS = [(0.0, 10_000.0)]


@lru_cache
def phones(n, seed):
    return synthesise(n, 1, seed=seed)


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


@pytest.mark.parametrize("case", ["sync", "async", "deadline", "late"])
def test_the_world_merges_what_a_strategy_merges_on_the_same_devices_at_the_same_time(case):
    schedule = {
        "sync": k_sync(6, 4),
        "async": k_async(6, 3),
        "deadline": k_sync(6, 6),
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
        selector=LowestId(), schedule=schedule, weighting=ByAge(inverse_root()), seed=0
    )
    merged_at = []
    grid.on_aggregated = lambda version, arrays: merged_at.append(grid.now())
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
        keeps=schedule.stragglers == "keep",
        deadline_s=schedule.deadline_s,
        end=2 * 86_400.0,
        rounds=10_000,
        age_weights=[inverse_root()(age) for age in range(AGES)],
    )
    world = world_of(traces, made, kinds=one_kind(work=200.0, ttl_s=ttl))
    found, when = [], []
    finished = world.known["times_finished"]
    while len(found) < n_versions:
        before, version = finished[0].copy(), world.version[0]
        lowest = np.flatnonzero(world.mask[0])[: int(world.slots[0])]
        send(world, *lowest)
        merged = np.flatnonzero(finished[0] > before)
        if world.version[0] > version:
            stale = world.known["staleness"][0, merged]
            found.append((merged.tolist(), sorted(stale.tolist())))
            when.append(world.opened[0])
    assert found == expected
    np.testing.assert_allclose(when, merged_at, atol=1e-3)


def test_what_the_server_knows_after_a_round_is_what_a_history_would_say():
    traces = fleet([ALWAYS, ALWAYS, [(0.0, 50.0)]], compute=[1.0, 0.5, 1.0])
    world = world_of(traces, episodes([0, 1, 2], concurrency=3, buffer_size=3))
    send(world, 0, 1, 2)
    history = History()
    for node in range(3):
        history.picked(node, 0.0)
    for node, seconds in ((0, 100.0), (1, 200.0)):
        history.finished(
            node,
            duration_s=seconds,
            examples=10.0,
            loss=SIMPLE.first_loss,
            square_loss=SIMPLE.first_loss**2,
            staleness=0,
            version=0,
        )
    history.failed(2)
    seen, known = world.candidates(0), history.candidates([0, 1])
    assert seen.node_ids.tolist() == [0, 1]
    for name in ("duration_s", "loss", "square_loss", "examples", "staleness", "last_version"):
        np.testing.assert_allclose(getattr(seen, name), getattr(known, name), err_msg=name)
    for name in ("times_picked", "times_finished", "times_failed", "picked_at", "p_finish"):
        np.testing.assert_array_equal(getattr(seen, name), getattr(known, name), err_msg=name)
    np.testing.assert_allclose(seen.utility, known.utility)
    assert world.known["times_failed"][0].tolist() == [0, 0, 1]


def test_durations_are_the_median_of_the_last_eight():
    world = world_of(fleet([ALWAYS]), episodes([0], concurrency=1, buffer_size=1))
    at = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    for seconds in (900.0, *range(1, 9)):
        world.sent_at[at], world.visible_at[at] = 0.0, seconds
        world.open[at] = world.good[at] = True
        world._merge(np.array([0]), np.array([1000.0]))
    assert world.known["duration_s"][0, 0] == 4.5


def test_a_round_costs_what_the_trips_cost():
    traces = fleet([ALWAYS, [(0.0, 60.0)], ALWAYS], compute=[1.0, 1.0, 0.25])
    world = world_of(traces, episodes([0, 1, 2], concurrency=3, buffer_size=1))
    made = send(world, 0, 1, 2)
    # The first reply ends the round; the slow one is forgotten, the lost one is not seen yet.
    assert made.time_s[0] == pytest.approx(100.0)
    assert (made.sent[0], made.merged[0], made.failed[0], made.forgotten[0]) == (3, 1, 0, 2)
    assert made.wasted_s[0] == pytest.approx(60.0 + 400.0)
    assert made.spent_s[0] == pytest.approx(560.0)
    # Who is still at it is no candidate, whoever waits for it or not.
    assert world.mask[0].tolist() == [True, False, False]
    terms = Reward(time=0.5, waste=2.0).terms(made, np.array([100.0]), np.array([4]))
    assert terms["time"][0] == pytest.approx(-0.5)
    assert terms["waste"][0] == pytest.approx(-2.0 * 460.0 / 400.0)
    assert terms["reward"][0] == pytest.approx(made.gain[0] + terms["time"][0] + terms["waste"][0])


def test_a_late_update_is_merged_with_the_weight_of_its_age():
    traces = fleet([ALWAYS] * 3, compute=[1.0, 1.0, 0.4])
    made = episodes([0, 1, 2], concurrency=3, buffer_size=1, keeps=True)
    made.age_weights[:, 1:] = 0.5
    world = world_of(traces, made)
    for column in (0, 1, 2):
        assert world.mask[0, column]
    send(world, 0, 1, 2)
    assert world.version[0] == 1
    # Nobody new is sent anything: the second reply is one version late.
    before = world.losses[0].copy()
    late = send(world)
    assert late.staleness[0] == 1
    assert late.merged[0] == 1
    fresh = SIMPLE.merged(before[None], 3.0 * np.eye(10)[1:2], np.ones(1))
    weighed = SIMPLE.merged(before[None], 0.5 * 3.0 * np.eye(10)[1:2], np.ones(1))
    np.testing.assert_allclose(world.losses[0], weighed[0])
    assert not np.allclose(fresh, weighed)


def test_a_server_with_nobody_to_ask_waits_for_the_first_who_comes():
    traces = fleet([[(500.0, 900.0)], [(700.0, 900.0)]])
    world = world_of(traces, episodes([0, 1]))
    assert world.now[0] == 500.0
    assert world.mask[0].tolist() == [True, False]
    assert not world.done[0]


def test_an_episode_in_which_nobody_comes_any_more_is_over():
    traces = fleet([[(0.0, 150.0)]])
    world = world_of(traces, episodes([0], concurrency=1, buffer_size=1))
    send(world, 0)
    send(world, 0)
    assert world.done[0]
    assert world.now[0] == 10_000.0
    assert not world.mask.any()


def test_whoever_picks_nobody_is_asked_again_later():
    world = world_of(fleet([ALWAYS]), episodes([0]))
    made = send(world)
    assert made.time_s[0] == 30.0
    assert world.mask[0, 0]


def test_a_device_that_rests_is_no_candidate():
    world = world_of(fleet([ALWAYS] * 2), episodes([0, 1], buffer_size=1, cooldown_s=150.0))
    send(world, 0)
    assert world.now[0] == pytest.approx(100.0)
    assert world.mask[0].tolist() == [False, True]
    send(world)
    send(world)
    assert world.mask[0].tolist() == [True, True]


def test_a_device_that_claims_certainty_is_found_out():
    traces = fleet([[(t, t + 50.0) for t in range(0, 9000, 60)], ALWAYS])
    made = episodes([0, 1], concurrency=1, buffer_size=1)
    made.lies[:, 0] = True
    world = world_of(traces, made, forecasts=TrueForecasts(traces, one_kind()))
    assert world.candidates(0).p_finish.tolist() == [1.0, 1.0]
    for _ in range(20):
        if world.mask[0, 0]:
            send(world, 0)
        else:
            send(world)
    liar = world.candidates(0)
    assert liar.p_finish[liar.node_ids.tolist().index(0)] < 0.5


def test_forecasts_are_as_old_as_the_last_reply_unless_the_server_asks():
    traces = fleet([ALWAYS] * 2)
    said = TrueForecasts(traces, one_kind())
    asks = world_of(traces, episodes([0, 1]), forecasts=said)
    assert asks.candidates(0).forecast_at.tolist() == [0.0, 0.0]
    hears = world_of(traces, episodes([0, 1], asks=False), forecasts=said)
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
    kinds = JobKinds.of_fleet(traces)
    made = draw_episodes(
        traces,
        kinds,
        6,
        devices=np.arange(40),
        start=0.0,
        end=86_400.0,
        n_max=24,
        rng=rng,
        settings=EpisodeSettings(devices=(4, 24), rounds=12, late_share=0.5),
    )
    world = World(traces, kinds, NoForecasts(), b=6, n=24, proxy=SIMPLE)
    world.reset(made)
    rows, before = np.arange(6), world.now.copy()
    total = np.zeros(4)
    while not world.done.all():
        live = rows[~world.done]
        assert (world.slots[live] >= 1).all()
        assert (world.mask[live].sum(axis=1) >= 1).all()
        picked = world.mask[live] & (rng.random((live.size, 24)) < 0.3)
        picked &= np.cumsum(picked, axis=1) <= world.slots[live][:, None]
        world.dispatch(live, picked)
        round_ = world.advance(live)
        total += [round_.sent.sum(), round_.merged.sum(), round_.failed.sum(), 0]
        total[3] += round_.forgotten.sum()
        assert (world.now[live] >= before[live]).all()
        assert all(np.isfinite(v).all() for v in (round_.gain, round_.wasted_s, round_.time_s))
        assert (world.open.sum(axis=1) <= world.concurrency).all()
        before = world.now.copy()
    assert total[0] == total[1:].sum() + world.open.sum()
    assert world.known["times_picked"].sum() == total[0]


def test_episodes_of_a_batch_do_not_touch_one_another():
    settings = EpisodeSettings(devices=(8, 30), rounds=5)
    stage = Stage.of(phones(60, 1), forecasts="oracle", settings=settings)
    made = stage.draw(4, np.random.default_rng(0))
    together = play(stage.world(4), made, LowestId())
    alone = [play(stage.world(1), made.take(np.array([i])), LowestId()) for i in range(4)]
    pd.testing.assert_frame_equal(together, pd.concat(alone, ignore_index=True))


SELECTORS = {
    "random": Random(),
    "fedcs": Fastest(),
    "power": PowerOfChoice(10),
    "likely": ExpectedUtility(),
    "refl": LeastAvailable(),
    "oort": Oort(),
}


@pytest.mark.parametrize("name", SELECTORS)
def test_every_selector_plays_and_the_same_seed_plays_the_same(name):
    traces = phones(60, 1)
    settings = EpisodeSettings(devices=(8, 30), rounds=6)
    stage = Stage.of(traces, forecasts="oracle", settings=settings)
    made = stage.draw(5, np.random.default_rng(0))
    one, two = (play(stage.world(3), made, SELECTORS[name], seed=1) for _ in range(2))
    assert one.equals(two)
    assert len(one) == 5
    assert one["valid_ratio"].dropna().between(0, 1).all()
    assert (one["sent"] > 0).all()
    np.testing.assert_allclose(one["reward"], one["gain"] + one["time"] + one["waste"])


def test_the_truth_is_worth_more_than_nothing():
    traces = phones(150, 2)
    settings = EpisodeSettings(devices=(60, 100), query_share=1.0, liar_share=0.0, rounds=10)
    truth = Stage.of(traces, forecasts="oracle", settings=settings)
    made = truth.draw(40, np.random.default_rng(0))
    told = play(truth.world(40), made, heuristic)
    untold = play(truth.with_forecasts(NoForecasts()).world(40), made, heuristic)
    assert told["valid_ratio"].mean() > untold["valid_ratio"].mean() + 0.02


def test_the_scored_heuristic_is_the_selector():
    traces = phones(80, 4)
    stage = Stage.of(
        traces, forecasts="oracle", settings=EpisodeSettings(devices=(20, 60), rounds=8)
    )
    made = stage.draw(30, np.random.default_rng(5))
    world = stage.world(30)
    rows = np.arange(30)
    world.reset(made, rows)
    world.known["loss"][:] = np.random.default_rng(1).random(world.known["loss"].shape)
    world.known["examples"][:] = 10.0
    world.known["forecast_p_finish"][:] = np.random.default_rng(2).random(world.mask.shape)
    k = np.minimum(world.slots, 3)
    picked = top(world.priors(rows), world.mask, k)
    rng = np.random.default_rng(0)
    for row in rows[~world.done]:
        chosen = ExpectedUtility().select(world.candidates(row), int(k[row]), 0.0, rng)
        assert sorted(chosen) == np.flatnonzero(picked[row]).tolist()


def test_forecasts_of_a_table_are_those_of_the_forecaster_at_or_before_the_instant():
    traces = phones(40, 0)
    kinds = JobKinds.of_fleet(traces)
    examples = draw(TraceObserver(traces), np.arange(15), start=0.0, until=86_400.0, n=400, seed=0)
    forecaster = LastValue().fit(examples, examples, seed=0)
    table = ForecastTable.made(
        traces, kinds, [(np.arange(15, 40), forecaster)], start=7200.0, end=15_000.0
    )
    devices = np.arange(40)
    now = np.full(40, 7200.0 + 20 * 300.0)
    online = traces.availability.is_available(devices, now)
    p, available, duration = table.at(devices, np.ones(40, dtype=np.int64), now)
    assert np.isnan(p[:15]).all()
    told = np.flatnonzero(online & (devices >= 15))
    assert told.size
    forecast = forecaster.forecast(TraceObserver(traces).at(told, now[told]))
    job = one_kind(kinds.work[1], kinds.ttl_s[1])
    asked = Job(
        work=job.work[0],
        download_bytes=kinds.n_bytes[1],
        upload_bytes=kinds.n_bytes[1],
        ttl_s=kinds.ttl_s[1],
    )
    np.testing.assert_allclose(p[told], forecast.of_job(asked).p_finish, rtol=1e-5)
    assert (duration[told] > 0).all()
    assert ((available[told] >= 0) & (available[told] <= 1)).all()
    later = table.at(told, np.ones(told.size, dtype=np.int64), now[told] + 299.0)
    np.testing.assert_array_equal(later[0], p[told])


def test_a_table_does_not_change_when_the_future_does():
    traces = phones(40, 0)
    examples = draw(TraceObserver(traces), np.arange(20), start=0.0, until=86_400.0, n=300, seed=0)
    forecaster = LastValue().fit(examples, examples, seed=0)
    kinds = JobKinds.of_fleet(traces)
    parts = [(np.arange(20), forecaster)]
    whole = ForecastTable.made(traces, kinds, parts, start=0.0, end=30_000.0)
    cut = traces.between(0.0, 30_000.0)
    again = ForecastTable.made(cut, kinds, parts, start=0.0, end=30_000.0)
    np.testing.assert_array_equal(whole.values[:, :, :-1], again.values[:, :, :-1])


def test_a_kept_table_is_read_again_and_a_wrong_one_is_made_anew(tmp_path):
    traces = phones(40, 0)
    examples = draw(TraceObserver(traces), np.arange(12), start=0.0, until=86_400.0, n=200, seed=0)
    forecaster = LastValue().fit(examples, examples, seed=0)
    kinds, path = JobKinds.of_fleet(traces), tmp_path / "made" / "table.npz"
    parts = [(np.arange(12), forecaster)]
    span = {"start": 0.0, "end": 6000.0, "cache": path}
    first = ForecastTable.made(traces, kinds, parts, **span)
    kept = path.read_bytes()
    np.testing.assert_array_equal(
        ForecastTable.made(traces, kinds, parts, **span).values, first.values
    )
    assert path.read_bytes() == kept
    path.write_bytes(kept[: len(kept) // 2])
    cut = ForecastTable.made(traces, kinds, parts, **span)
    np.testing.assert_array_equal(cut.values, first.values)
    other = ForecastTable.made(phones(40, 1), kinds, parts, **span)
    assert not np.array_equal(other.values, first.values, equal_nan=True)


def test_nobody_forecasts_by_a_forecaster_that_learnt_from_it():
    traces = phones(40, 0)
    made = cross_fitted(traces, np.arange(20), kind="last-value", until=50_000.0, n=200)
    found = np.concatenate([devices for devices, _ in made])
    assert sorted(found) == list(range(20))
    assert made[0][1] is not made[1][1]
    with pytest.raises(TraceError, match="two parts"):
        Stage.of(traces, forecaster=[*made, (np.array([3]), made[0][1])])


def test_stages_share_no_device_and_testing_is_later(tmp_path):
    traces = phones(40, 0)
    settings = EpisodeSettings(devices=(2, 8), window_s=3600.0)
    made = stages(traces, forecasts="oracle", settings=settings, cache=tmp_path)
    parts = [set(stage.devices) for stage in (made.training, made.validation, made.testing)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 40
    assert made.training.end <= made.testing.start
    drawn = made.testing.draw(5, np.random.default_rng(0))
    assert set(drawn.devices[drawn.present]) <= parts[2]
    assert (drawn.start >= made.split.turn).all()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"rounds": 0}, "rounds"),
        ({"devices": (0, 4)}, "devices"),
        ({"asked_share": (0.0, 0.5)}, "asked_share"),
        ({"late_share": 1.5}, "late_share"),
        ({"window_s": 0.0}, "window_s"),
        ({"cooldown_s": -1.0}, "cooldown_s"),
    ],
)
def test_settings_out_of_range_are_named(changed, named):
    with pytest.raises(ConfigError, match=f"episodes.{named} = "):
        EpisodeSettings(**changed)


def test_traces_shorter_than_a_window_make_shorter_episodes():
    traces = phones(40, 0)
    stage = Stage.of(
        traces,
        forecasts="none",
        start=70_000.0,
        end=72_000.0,
        settings=EpisodeSettings(devices=(2, 8)),
    )
    drawn = stage.draw(4, np.random.default_rng(0))
    np.testing.assert_allclose(drawn.end - drawn.start, 2000.0)
    table = play(stage.world(4), drawn, Random())
    assert (table["time_s"] <= 2000.0 + stage.kinds.ttl_s.max()).all()


def test_windows_in_which_nobody_is_online_are_an_error():
    traces = fleet([[(0.0, 10.0)]])
    stage = Stage.of(
        traces, forecasts="none", start=100.0, end=5000.0, settings=EpisodeSettings(devices=(1, 4))
    )
    with pytest.raises(TraceError, match="no device is online"):
        stage.draw(3, np.random.default_rng(0))


def test_traces_without_a_channel_are_refused():
    traces = phones(40, 0)
    with pytest.raises(TraceError, match="uplink"):
        Stage.of(replace(traces, uplink=None), forecasts="none")
    with pytest.raises(ConfigError, match="forecasts = 'guess'"):
        Stage.of(traces, forecasts="guess")


def test_gini_of_known_counts():
    present = np.array([[True, True, True, False]] * 3)
    found = gini(np.array([[2, 2, 2, 9], [6, 0, 0, 9], [0, 0, 0, 9]]), present)
    np.testing.assert_allclose(found[:2], [0.0, 2 / 3])
    assert np.isnan(found[2])
