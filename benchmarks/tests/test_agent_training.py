"""The benchmark of the agent by real training: windows, lies and ratios."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from places import RECORDINGS

from fedstale.agents.env.forecast_table import ForecastTable, NoForecasts
from fedstale.apps import client
from fedstale.strategies.selection import MostReliable, Random, Selector
from fedstale.strategies.types import History
from fedstale.traces import TraceSet
from fedstale.traces.forecast import embedded

DAY_S = 86_400.0


@pytest.fixture(scope="module")
def bench():
    """Return the benchmark's module."""
    from agent import training

    return training


@pytest.fixture(scope="module")
def training():
    """Return the module of one run."""
    from lab import training

    return training


@pytest.fixture(scope="module")
def fleet():
    """Return a fleet of which enough devices appear on every day."""
    return TraceSet.synthetic(90, days=8, seed=3)


@pytest.fixture(scope="module")
def windows(bench, training, fleet):
    """Return the windows of the comparison."""
    return training.windows(fleet, "phones", bench.SEEDS)


@pytest.fixture
def apps():
    """Return the apps that are trained."""
    from lab import apps

    return apps


def train(bench, training, apps, window, selector, **options):
    forecasts = options.pop("forecasts", NoForecasts())
    strategy = partial(bench.SCHEDULES[options.pop("schedule", "fedavg")], concurrency=8)
    app = apps.opened(options.pop("app", "digits"))
    alpha = options.pop("alpha", 0.3)
    return training.train(
        window, app, alpha, selector, forecasts=forecasts, strategy=strategy, **options
    )


# Windows.


def test_windows_are_of_different_days_and_their_devices_appear(bench, fleet, windows):
    assert len({int(window.start // DAY_S) for window in windows}) == len(windows) == 5
    for window in windows:
        assert np.unique(window.devices).size == window.n_devices >= bench.FLEETS["phones"].least
        assert window.traces.n_devices == window.n_devices
        assert window.start >= bench.FLEETS["phones"].history_s
        assert window.start + 4 * 3600.0 <= 8 * DAY_S
        looks = np.arange(window.start, window.start + 4 * 3600.0, 2.0)
        # All that appear are in it, and no others.
        for device in range(fleet.n_devices):
            times = np.full(looks.size, device)
            appears = fleet.channel("availability").is_available(times, looks).any()
            assert appears == (device in window.devices)


def test_windows_hold_the_hours_of_the_fleet(fleet, windows):
    window = windows[1]
    inside, device = np.arange(0.0, 4 * 3600.0, 600.0), np.zeros(24, dtype=np.int64)
    for name in ("compute", "downlink", "uplink"):
        here = getattr(window.traces, name).value_at(device, inside)
        there = getattr(fleet, name).value_at(device + window.devices[0], inside + window.start)
        np.testing.assert_array_equal(here, there)


def test_too_few_days_are_an_error(bench, training):
    with pytest.raises(ValueError, match="0 days of phones on which 30 devices appear"):
        training.windows(TraceSet.synthetic(20, days=3, seed=0), "phones", bench.SEEDS)


@pytest.mark.parametrize("kind", ["cars"])
def test_recorded_devices_of_a_window_were_logged_before_and_throughout(bench, kind, training):
    if not (RECORDINGS / "ev-norway-charging-reports.csv.xz").is_file():
        pytest.skip("published recordings are not here")
    from lab.fleets import ASSUMED, fleets

    traces = fleets(RECORDINGS, seed=0, kind=kind, assumed=ASSUMED)["test"]
    days = set()
    for window in training.windows(traces, kind, bench.SEEDS):
        begin, end = traces.log_at(window.devices, np.full(window.n_devices, window.start))
        assert (begin <= window.start - bench.FLEETS[kind].history_s).all()
        assert (end >= window.start + 4 * 3600.0).all()
        days.add(int(window.start // DAY_S))
    assert len(days) == 5
    assert max(days) - min(days) > 14


def test_every_selector_gets_the_same_windows_forecasts_and_targets(bench, fleet, monkeypatch):
    seen = {}

    def noted(run, window, forecasts, target):
        seen[run] = (window, forecasts, target)
        return bench.asdict(run)

    monkeypatch.setattr(bench, "play", noted)
    monkeypatch.setattr(bench, "stated", lambda *_: object())
    runs = bench.wanted(["phones", "digits", "honest"])
    kept = bench.Kept()
    assert len(bench.compare(runs, lambda _: fleet, kept=kept, cache=None, jobs=1)) == len(runs)
    bench.compare(runs, None, kept=kept, cache=None, jobs=1)
    assert set(seen) == set(runs)
    for schedule in bench.SCHEDULES:
        for alpha in bench.SKEWS["digits"]:
            for seed in bench.SEEDS:
                mine = [
                    (run.selector, *given)
                    for run, given in seen.items()
                    if (run.schedule, run.alpha, run.seed) == (schedule, alpha, seed)
                ]
                names, drawn, forecasts, targets = zip(*mine, strict=True)
                assert sorted(names) == sorted(bench.SELECTORS)
                assert len({id(window) for window in drawn}) == 1
                assert len({id(each) for each in forecasts}) == 1
                assert len(set(targets)) == 1
    starts = {given[0].seed: given[0].start for given in seen.values()}
    assert len(set(starts.values())) == 5


def test_a_window_fixes_data_model_and_costs(apps):
    for name in ("digits",):
        app = apps.opened(name)
        config = app.config(0.3, 301)
        assert config["seed"] == 301
        assert config["alpha"] == 0.3
        costs = app.costs(200.0, 30, 0.3, 301)
        assert costs.work_per_example * costs.epochs * costs.examples == pytest.approx(200.0)
        assert app.examples(30, 0.3, 301).mean() == costs.examples
        assert (app.examples(30, 0.3, 301) != app.examples(30, 0.3, 302)).any()


# Runs.


def test_a_run_is_deterministic_to_the_byte(bench, fleet, windows, training):
    run = next(r for r in bench.wanted(["phones", "digits", "fedbuff"]) if r.alpha == 1.0)
    said = training.stated(fleet, "phones", windows[0], None)
    first, again = (bench.play(run, windows[0], said, 0.5) for _ in range(2))
    assert json.dumps(first) == json.dumps(again)
    assert first["selector"] == bench.AGENT
    assert first["jobs"] > 50
    assert 0.0 < first["hours"] <= 4.0
    assert first["wasted_hours"] <= first["device_hours"]


def test_forecasts_are_those_of_the_fleet_at_the_hours_of_the_window(
    bench, fleet, windows, training
):
    window = windows[2]
    said = training.stated(fleet, "phones", window, None)
    when = np.full(window.n_devices, window.start + 3600.0)
    found = said.at(window.devices, np.ones(window.n_devices, dtype=np.int64), when)
    kinds = training.training_kinds(fleet, [app.model_bytes for app in bench.APPS.values()])
    whole = ForecastTable.of(
        fleet,
        kinds,
        [(window.devices, embedded("phones"))],
        start=window.start,
        end=window.start + 4 * 3600.0,
    )
    other = whole.at(window.devices, np.ones(window.n_devices, dtype=np.int64), when)
    assert np.isfinite(found[0]).any()
    for mine, its in zip(found, other, strict=True):
        np.testing.assert_array_equal(mine, its)


def test_discarded_replies_are_never_trained(bench, training, apps, windows):
    for schedule in bench.SCHEDULES:
        made = train(bench, training, apps, windows[0], Random(), schedule=schedule)
        assert made.devices.size > len(made.reported) >= made.used.sum() > 0
        # Those that came back late, and those sent before the first reply told its size.
        assert len(made.reported) - made.used.sum() < 2 * 8


def test_spent_time_is_that_of_the_events(bench, training, apps, windows):
    made = train(bench, training, apps, windows[0], Random())
    over = np.isfinite(made.ended)
    worked = over & np.isfinite(made.begun)
    np.testing.assert_allclose((made.ended - made.begun)[worked], made.spent_s[worked], atol=1e-6)
    assert not made.spent_s[~np.isfinite(made.begun)].any()
    assert made.spent_by(4 * 3600.0) == pytest.approx(made.spent_s.sum())
    assert made.spent_by(0.0) == 0.0
    half = made.spent_by(7200.0)
    assert 0.0 < half < made.spent_s.sum()
    by_hand = sum(
        min(max(7200.0 - begun, 0.0), spent)
        for begun, spent in zip(made.begun, made.spent_s, strict=True)
    )
    assert half == pytest.approx(by_hand)
    assert made.wasted_by(4 * 3600.0) == pytest.approx(made.spent_s[over & ~made.used].sum())


def test_only_names_parts_of_the_comparison(bench):
    every = bench.wanted()
    assert len(set(every)) == len(every)
    some = bench.wanted(["digits", "cars", "fedbuff", "random", "p_finish"])
    assert {(r.app, r.fleet, r.schedule) for r in some} == {("digits", "cars", "fedbuff")}
    assert {r.selector for r in some} == {"random", "p_finish"}
    assert len(some) == 3 * 5 * 2
    liars = bench.wanted(["loss", "chance"])
    assert {(r.app, r.fleet, r.schedule, r.alpha) for r in liars} == {bench.LIED_TO}
    assert {r.lies for r in liars} == {"loss", "chance"}
    with pytest.raises(ValueError, match="bikes"):
        bench.wanted(["bikes"])


def test_every_setting_has_a_target_for_each_skew(bench):
    for run in bench.wanted():
        targets = bench.TARGETS[run.app, run.fleet, run.schedule]
        assert len(targets) == len(bench.SKEWS[run.app])
        assert all(0.0 < target < 1.0 for target in targets)


# Lies.


class Spy(Selector):
    """Notes what it is told, and picks the most reliable."""

    told: ClassVar[list] = []

    def select(self, candidates, k, now, rng):
        """Note, then pick."""
        who = candidates.node_ids.astype(np.int64) - 1000
        Spy.told.append((who, candidates))
        return MostReliable().select(candidates, k, now, rng)


def test_liars_of_chance_state_certainty_and_are_found_out(bench, training, apps, fleet, windows):
    Spy.told = []
    window = windows[0]
    said = training.stated(fleet, "phones", window, None)
    liars = training.Liars.of(bench.LIES["chance"], window.n_devices, 0.3, 301)
    train(bench, training, apps, window, Spy(), forecasts=said, liars=liars)
    stated = np.concatenate([c.forecast_p_finish[liars.who[who]] for who, c in Spy.told])
    others = np.concatenate([c.forecast_p_finish[~liars.who[who]] for who, c in Spy.told])
    assert stated.size
    assert (stated == 1.0).all()
    assert (others < 1.0).any()
    expected = np.zeros(window.n_devices)
    for who, candidates in Spy.told:
        expected[who] = candidates.expected_finishes
    # Whole numbers: each of their jobs was sure to finish.
    assert expected[liars.who].max() >= 1.0
    np.testing.assert_array_equal(expected[liars.who] % 1.0, 0.0)


def test_other_liars_state_multiples_train_as_before_and_take_no_longer(
    bench, training, apps, fleet, windows
):
    window, n = windows[0], windows[0].n_devices
    said = training.stated(fleet, "phones", window, None)
    lie = training.Lie(loss=10.0, examples=10.0, duration=1.0 / 3.0)
    liars = training.Liars.of(lie, n, 0.3, 301)
    assert liars.who.sum() == round(0.3 * n)
    dealt = apps.opened("digits").examples(n, 0.3, window.seed)
    # It goes by chances alone, so that the same jobs are sent, and would be at other instants if
    # a device took ten times as long.
    runs, heard = [], []
    for lying in (None, liars):
        Spy.told = []
        runs.append(train(bench, training, apps, window, Spy(), forecasts=said, liars=lying))
        heard.append(Spy.told)
    np.testing.assert_array_equal(runs[0].spent_s, runs[1].spent_s)
    assert [each[:2] for each in runs[0].reported] == [each[:2] for each in runs[1].reported]
    assert not np.array_equal(runs[0].accuracy, runs[1].accuracy)  # examples weigh updates
    seen = set()
    for (who, true), (_, stated) in zip(*heard, strict=True):
        lies, known = liars.who[who], np.isfinite(true.loss)
        np.testing.assert_allclose(
            stated.forecast_duration_s, np.where(lies, 1.0 / 3.0, 1.0) * true.forecast_duration_s
        )
        np.testing.assert_array_equal(true.examples[known], dealt[who][known])
        np.testing.assert_array_equal(
            stated.examples[known], (np.where(lies, 10, 1) * dealt[who])[known]
        )
        seen |= set(lies[known].tolist())
    assert seen == {True, False}


def test_liars_of_loss_train_as_before_and_state_ten_times_theirs(bench, training, apps, windows):
    window = windows[0]
    liars = training.Liars.of(bench.LIES["loss"], window.n_devices, 0.3, 301)
    runs, heard = [], []
    for lying in (None, liars):
        Spy.told = []
        runs.append(train(bench, training, apps, window, Spy(), liars=lying))
        heard.append(Spy.told)
    assert runs[0].accuracy == runs[1].accuracy
    seen = 0
    for (who, true), (_, stated) in zip(*heard, strict=True):
        lies = liars.who[who]
        np.testing.assert_allclose(stated.loss, np.where(lies, 10.0, 1.0) * true.loss)
        seen += int(np.isfinite(true.loss[lies]).sum())
    assert seen


def test_what_was_stated_adds_up_as_on_a_server_that_asks(training, windows):
    class Said:
        def at(self, devices, kind, now):
            p = 0.25 + 0.5 * ((devices + now.astype(np.int64)) % 2)
            return p, p, np.full(devices.size, 60.0)

    class Picks(Selector):
        def select(self, candidates, k, now, rng):
            self.seen = candidates
            return candidates.node_ids[:k].tolist()

    window, history, rng = windows[0], History(), np.random.default_rng(5)
    then, nobody = Picks(), training.Liars.of(training.NO_LIE, window.n_devices, 0.0, 301)
    told, nodes = training.Stating(then, Said(), window, liars=nobody), list(range(1000, 1010))
    for step in range(40):
        now = float(step * 7)
        p = Said().at(window.devices[:10], None, np.full(10, window.start + now))[0]
        free = rng.permutation(nodes)
        picked = told.select(history.candidates(free), 4, now, rng)
        expected = history.candidates(free).expected_finishes
        np.testing.assert_allclose(then.seen.expected_finishes, expected)
        for node in nodes:
            history.forecast(node, {"p_finish": float(p[node - 1000])}, now)
        for node in picked:
            history.picked(node, now)
        for node in picked:
            if rng.random() < 0.3:
                history.failed(node)
            else:
                history.finished(
                    node,
                    duration_s=1.0,
                    examples=1.0,
                    loss=1.0,
                    square_loss=1.0,
                    staleness=0,
                    version=1,
                )
    assert history.candidates(nodes).expected_finishes.max() > 2.0


# Apps.


@pytest.mark.parametrize(
    ("n", "batch_size", "epochs"), [(30, 8, 5), (9, 8, 2), (1, 8, 3), (7, 7, 0)]
)
def test_digits_train_without_autograd_to_the_same_bytes(apps, n, batch_size, epochs):
    from lab import two_layers

    app = apps.opened("digits")
    data = tuple(x[:n] for x in app.test(301))
    order = client.order(n, epochs, (1, 2))
    own, its = app.task.Network(5), app.task.Network(5)
    options = {"batch_size": batch_size, "learning_rate": 0.1}
    mean = client.train(own, app.mean_loss, data, order, **options)
    assert two_layers.train(its, data, order, **options) == mean
    for one, other in zip(own.parameters(), its.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_run_is_that_of_the_apps_own_training(bench, training, apps, windows, monkeypatch):
    first = train(bench, training, apps, windows[0], Random())
    # A job that has something else is left to the app's own training, and so is every one here.
    monkeypatch.setattr(apps, "PLAIN", set())
    again = train(bench, training, apps, windows[0], Random())
    assert first.accuracy == again.accuracy
    assert first.reported == again.reported


def test_fashion_deals_some_images_and_learns(bench, training, apps, windows):
    if not Path("/usr/share/datasets/fashion-mnist").is_dir():
        pytest.skip("dataset-fashion-mnist is not installed")
    app = apps.opened("fashion")
    assert 0.75 * app.most < app.examples(30, 0.3, 301).sum() <= app.most
    first = app.evaluate(app.initial(301), 301)
    assert first[0] < 0.3
    assert first[1].shape == (10,)
    window = replace(windows[0], traces=windows[0].traces.between(0.0, 5400.0))
    made = train(bench, training, apps, window, Random(), app="fashion", alpha=1.0)
    assert made.accuracy[-1] > first[0] + 0.1


def test_shakespeare_trains_on_sixteen_lines(bench, training, apps, windows):
    if not apps.TEXT.is_file():
        pytest.skip(f"{apps.TEXT} is not here")
    app = apps.opened("shakespeare")
    assert app.examples(30, None, 301).tolist() == [16.0] * 30
    window = replace(windows[0], traces=windows[0].traces.between(0.0, 5400.0))
    made = train(bench, training, apps, window, Random(), app="shakespeare", alpha=None)
    assert made.losses[-1][0] < made.losses[0][0]


# Tables.


def row(selector, seed, hours, *, reached=True, **other):
    return {
        **{"app": "digits", "fleet": "phones", "schedule": "fedavg", "alpha": 0.3, "lies": ""},
        **{"seed": seed, "selector": selector, "reached": reached, "hours": hours},
        **{"device_hours": 2 * hours, "wasted_hours": 0.0, "waste_share": 0.1},
        **{"valid_ratio": 0.9, "accuracy": 0.8, "gini": 0.2, "ever_merged": 0.7},
        **other,
    }


def test_ratios_are_geometric_means_of_windows_with_students_interval(bench):
    from agent.ratios import pairs, ratio

    own = [row("agent", 1, 1.0), row("agent", 2, 2.0), row("agent", 2, 1.0, alpha=1.0)]
    other = [row("x", 1, 2.0), row("x", 2, 2.0), row("x", 2, 4.0, alpha=1.0)]
    found = ratio(pairs(own, other), "hours")
    # The two skews of the second window count once: sqrt(1 x 4) = 2.
    assert (found["mean"], found["low"], found["high"]) == (2.0, 2.0, 2.0)
    assert (found["pairs"], found["windows"], found["bound"]) == (3, 2, "exact")
    other[1]["hours"] = 8.0
    logs = np.log([2.0, 4.0])
    half = 12.706 * logs.std(ddof=1) / np.sqrt(2)
    found = ratio(pairs(own, other), "hours")
    assert found["mean"] == pytest.approx(np.exp(logs.mean()), abs=1e-3)
    assert found["high"] == pytest.approx(np.exp(logs.mean() + half), rel=1e-3)
    assert ratio(pairs(own[:1], other), "hours") is None


@pytest.mark.parametrize(
    ("arrives", "its", "bound"),
    [
        ((True, True), (True, False), "at least"),
        ((True, False), (True, True), "at most"),
        ((False, True), (True, False), "unknown"),
        ((True, True), (True, True), "exact"),
    ],
)
def test_censored_runs_count_with_all_hours_and_say_so(bench, arrives, its, bound):
    from agent.ratios import pairs, ratio

    own = [row("agent", i, 2.0 if a else 4.0, reached=a) for i, a in enumerate(arrives)]
    other = [row("x", i, 2.0 if a else 4.0, reached=a) for i, a in enumerate(its)]
    # A window in which neither arrives says nothing.
    own.append(row("agent", 9, 4.0, reached=False))
    other.append(row("x", 9, 4.0, reached=False))
    found = ratio(pairs(own, other), "hours")
    assert (found["windows"], found["bound"]) == (2, bound)
    steps = {"at least": 1, "at most": -1}.get(bound, 0)
    assert found["mean"] == pytest.approx(2.0 ** (steps / 2), abs=1e-3)


def test_gini_of_counts(bench, training):
    assert training.gini(np.array([3, 3, 3])) == 0.0
    assert training.gini(np.array([0, 0, 0, 8])) == pytest.approx(0.75)
    counts = np.random.default_rng(0).integers(0, 9, 30)
    by_hand = np.abs(counts[:, None] - counts).sum() / (2 * counts.size * counts.sum())
    assert training.gini(counts) == pytest.approx(by_hand)
