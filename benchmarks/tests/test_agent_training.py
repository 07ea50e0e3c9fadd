"""The benchmark of the agent by real training: windows, lies and ratios."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from places import RECORDINGS

from fedstale.apps import client
from fedstale.strategies.selection import MostReliable, Random, Selector
from fedstale.traces import Status, TraceSet
from fedstale.traces.forecast import TraceObserver, embedded

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


@pytest.fixture(scope="module")
def forecast(training, fleet):
    """Return what returns the forecasts of a window: of the digits that each device is dealt."""
    from lab.apps import opened

    def of(window, alpha=0.3):
        told = training.WindowForecasts(fleet, embedded("phones"), window)
        return told.of(training.own_jobs(window, opened("digits"), alpha))

    return of


def train(bench, training, apps, window, selector, **options):
    forecasts = options.pop("forecasts", None)
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
    with pytest.raises(ValueError, match="0 times 14400 s in which 30 phones appear"):
        training.windows(TraceSet.synthetic(20, days=3, seed=0), "phones", bench.SEEDS)


def test_more_windows_add_other_hours_to_those_of_fewer(bench, training, fleet, windows):
    more = training.windows(fleet, "phones", range(301, 313))
    assert [window.start for window in more[:5]] == [window.start for window in windows]
    starts = np.sort([window.start for window in more])
    assert len({int(start // DAY_S) for start in starts}) < len(more)
    assert (np.diff(starts) >= 4 * 3600.0).all()
    assert [window.seed for window in more] == list(range(301, 313))


def test_a_regime_has_its_hours_its_jobs_and_a_time_to_live(bench, training, fleet):
    fleets = {"phones": training.FleetPart(least=30, history_s=0.0, concurrency=4)}
    long = training.Regime(fleets=fleets, minutes=8.0, hours=8.0)
    window, short = (
        training.windows(fleet, "phones", (1,), each)[0]
        for each in (long, training.Regime(fleets=fleets, minutes=2.0, hours=4.0))
    )
    assert window.work == pytest.approx(4 * short.work)
    assert (window.hours_s, short.hours_s) == (8 * 3600.0, 4 * 3600.0)
    assert [bench.REGIMES[name].ttl_s for name in ("published", "long")] == [1800.0, 4800.0]
    for regime in (bench.REGIMES[name] for name in bench.PLAYED):
        assert regime.hours_s >= 2 * regime.ttl_s


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


def test_every_selector_gets_the_same_windows_and_forecasts(bench, fleet, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "recorded", lambda *_: {"test": fleet, "learn": fleet})
    runs = [
        run
        for run in bench.wanted(["published", "phones", "digits", "honest", "fedbuff"])
        if run.alpha == 0.3 and run.seed in {301, 401}
    ]
    places = {run: bench.place(tmp_path, run) for run in runs}
    told = [place for run, place in places.items() if run.part == "test" and run.forecasts]
    assert len(told) == len(bench.SELECTORS)
    assert len({id(window) for window, _ in told}) == 1
    for _, forecasts in told:
        np.testing.assert_array_equal(forecasts.values, told[0][1].values)
    silent = [place for run, place in places.items() if not run.forecasts]
    assert {id(window) for window, _ in silent} == {id(told[0][0])}
    assert {forecasts for _, forecasts in silent} == {None}
    (learn,) = [place for run, place in places.items() if run.part == "learn"]
    assert learn[0].start != told[0][0].start


def test_a_window_fixes_data_model_and_costs(apps):
    app = apps.opened("digits")
    config = app.config(0.3, 301)
    assert (config["seed"], config["alpha"]) == (301, 0.3)
    costs = app.costs(200.0, 30, 0.3, 301)
    assert costs.work_per_example * costs.epochs * costs.examples == pytest.approx(200.0)
    assert app.examples(30, 0.3, 301).mean() == costs.examples
    assert (app.examples(30, 0.3, 301) != app.examples(30, 0.3, 302)).any()


# Runs.


def test_a_run_is_deterministic_to_the_byte(bench, fleet, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "recorded", lambda *_: {"test": fleet, "learn": fleet})
    names = ["published", "phones", "digits", "fedbuff"]
    run = next(r for r in bench.wanted(names) if r.alpha == 1.0)
    first, again = (bench.play(tmp_path, run) for _ in range(2))
    assert first.pop("cpu_s") > 0.0
    del again["cpu_s"]
    assert json.dumps(first) == json.dumps(again)
    assert first["selector"] == bench.AGENT
    assert first["jobs"] > 50
    assert 0.0 < first["worst_third"] < first["accuracy"]
    curves = first["curves"]
    assert {len(values) for values in curves.values()} == {4 * 60 + 1}
    for wasted, spent in zip(curves["wasted_hours"], curves["device_hours"], strict=True):
        assert wasted <= spent


def test_forecasts_are_those_of_the_devices_at_the_hours_of_the_window(
    fleet, windows, training, forecast, apps
):
    window = windows[2]
    when = np.full(window.n_devices, window.start + 3600.0)
    found = forecast(window).at(np.arange(window.n_devices), when - window.start)
    online = fleet.channel("availability").is_available(window.devices, when)
    jobs = training.own_jobs(window, apps.opened("digits"), 0.3)
    observed = TraceObserver(fleet).at(window.devices, when)
    its = embedded("phones").forecast(observed).of_job(jobs)
    assert online.any()
    np.testing.assert_allclose(found[0][online], its.p_finish[online], rtol=1e-6)
    np.testing.assert_allclose(found[2][online], its.total_s[online, 1], rtol=1e-6)


def test_twice_the_examples_are_a_longer_job_and_no_higher_chance(
    training, windows, fleet, monkeypatch
):
    class App:
        model_bytes = 5_000_000

        def __init__(self, first):
            self.first = first

        def examples(self, n, alpha, seed):
            return np.array([self.first, 60.0 - self.first, *np.full(n - 2, 30.0)])

    window = windows[0]
    told = training.WindowForecasts(fleet, embedded("phones"), window)
    few, many = (told.of(training.own_jobs(window, App(n), None)).values for n in (20.0, 40.0))
    known = np.isfinite(few[0, 0])
    assert known.any()
    assert (many[2, 0] > few[2, 0])[known].all()
    assert (many[0, 0] <= few[0, 0])[known].all()
    assert (many[0, 0] < few[0, 0]).any()
    # Those of all others are the same.
    np.testing.assert_array_equal(many[:, 2:], few[:, 2:])


def test_forecasts_of_own_jobs_are_closer_to_what_happens_than_those_of_the_mean(
    training, windows, fleet, apps
):
    errors = {"own": [], "mean": []}
    for window in windows:
        jobs = training.own_jobs(window, apps.opened("digits"), 0.1)
        told = training.WindowForecasts(fleet, embedded("phones"), window)
        mean = replace(jobs, work=np.full(window.n_devices, window.work))
        devices = np.arange(window.n_devices)
        for now in np.arange(0.0, 4 * 3600.0, 1200.0):
            when = np.full(window.n_devices, window.start + now)
            trips = fleet.trips(window.devices, when, jobs)
            online = fleet.channel("availability").is_available(window.devices, when)
            done = online & (trips.status == Status.REPORTED)
            took = trips.reported - when
            for name, each in (("own", jobs), ("mean", mean)):
                stated = told.of(each).at(devices, when - window.start)[2]
                errors[name] += np.abs(np.log(stated[done] / took[done])).tolist()
    assert len(errors["own"]) > 100
    assert np.mean(errors["own"]) < 0.7 * np.mean(errors["mean"])


def test_every_job_of_a_device_takes_its_own_work_from_the_first(bench, training, apps):
    n = 16
    fast = {"downlink_bit_per_s": 1e9, "uplink_bit_per_s": 1e9}
    window = training.Window(
        traces=TraceSet.constant(n, compute=2.0, **fast),
        devices=np.arange(n),
        start=0.0,
        seed=301,
        work=120.0,
        hours_s=1800.0,
    )
    made = train(bench, training, apps, window, Random())
    dealt = apps.opened("digits").examples(n, 0.3, 301)
    done = np.isfinite(made.ended)
    assert len(set(made.devices[done])) > n / 2
    its = 60.0 * dealt[made.devices[done]] / dealt.mean()
    np.testing.assert_allclose(made.spent_s[done], its + 2 * 0.04, atol=0.001)


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
    some = bench.wanted(["choice", "cars", "fedbuff", "random", "p_finish", "with-forecasts"])
    assert {(r.regime, r.fleet, r.schedule) for r in some} == {("choice", "cars", "fedbuff")}
    assert {r.app for r in some} == {"digits"}
    assert {r.selector for r in some} == {"random", "p_finish"}
    assert sum(r.part == "test" for r in some) == 3 * 5 * 2
    assert len(bench.wanted(["choice", "cars", "random"], n_windows=7)) == 2 * 3 * (7 + 5)
    liars = [r for r in bench.wanted(["loss", "chance", "duration"]) if r.part == "test"]
    assert {bench.setting(r) for r in liars} == set(bench.LIED_TO)
    assert {r.lies for r in liars} == {"loss", "chance", "duration"}
    with pytest.raises(ValueError, match="bikes"):
        bench.wanted(["bikes"])


def test_every_setting_comes_with_the_runs_that_say_what_to_reach(bench):
    for only in ([], ["loss"], ["without-forecasts", "long"]):
        runs = bench.wanted(only)
        learn = [run for run in runs if run.part == "learn"]
        assert {bench.setting(run) for run in learn} == {bench.setting(run) for run in runs}
        assert {(r.selector, r.lies, r.forecasts) for r in learn} == {("random", "", True)}
        assert not {r.seed for r in learn} & {r.seed for r in runs if r.part == "test"}


def test_a_selector_plays_without_forecasts_where_it_uses_them_and_only_small_apps(bench):
    silent = [run for run in bench.wanted() if not run.forecasts]
    assert {r.selector for r in silent} == {n for n, arm in bench.SELECTORS.items() if arm.without}
    assert {r.app for r in silent} == {"digits"}
    assert {r.regime for r in silent} == set(bench.PLAYED)
    larger = bench.wanted(["fashion", "shakespeare"])
    assert {(r.regime, r.fleet) for r in larger} == {("published", "phones")}


def test_other_fleets_and_the_longest_jobs_are_played_by_the_same_selectors(bench):
    everywhere = {name for name, arm in bench.SELECTORS.items() if arm.everywhere}
    for only in (["cars"], ["desktops"], ["longest"], ["fashion"], ["loss"]):
        runs = [run for run in bench.wanted(only) if run.part == "test"]
        assert {run.selector for run in runs} == everywhere
    phones = bench.wanted(["choice", "phones", "honest"])
    assert {run.selector for run in phones if run.part == "test"} == set(bench.SELECTORS)


def test_the_command_judges_kept_runs_at_both_targets_and_goes_on(
    bench, monkeypatch, tmp_path, capsys
):
    from agent.ratios import MEANS
    from lab import results

    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "lack", lambda made_at: "")
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    played = []

    def play(recordings, run):
        """Rise to 0.8 within four hours, or within two if the agent picks."""
        played.append(run)
        hours = np.arange(0, 241) / 60.0
        rise = np.minimum(0.8, hours * (0.4 if run.selector == bench.AGENT else 0.2))
        ended = {name: 0.5 for name in (*MEANS, "start_h") if name != "accuracy"}
        spent = {"device_hours": (3 * hours).tolist(), "wasted_hours": hours.tolist()}
        curves = {"accuracy": rise.tolist(), **spent}
        return bench.asdict(run) | ended | {"accuracy": 0.8, "cpu_s": 1.0, "curves": curves}

    monkeypatch.setattr(bench, "play", play)
    argv = ["training.py", "nowhere", "--keep", str(tmp_path / "runs")]
    monkeypatch.setattr(bench.sys, "argv", [*argv, "--only", "choice", "phones", "random"])
    bench.main()
    first = len(played)
    monkeypatch.setattr(bench.sys, "argv", [*argv, "--only", "choice", "phones", "--windows", "6"])
    bench.main()
    assert len(set(played)) == len(played) > first > 0
    assert "processor hours to go, without digits in published" in capsys.readouterr().out
    monkeypatch.setattr(bench.sys, "argv", [*argv, "--plan"])
    done = len(played)
    bench.main()
    assert len(played) == done

    rows = json.loads((tmp_path / "agent_training.json").read_text())["rows"]
    for share in (0.9, 1.0):
        where = {"of_random": share, "about": "selectors", "schedule": "all", "fleet": "all"}
        of = {r["selector"]: r for r in rows if all(r[k] == v for k, v in where.items() if k in r)}
        agent, random = of["agent"], of["random"]
        assert (agent["hours"], random["hours"]) == pytest.approx((2 * share, 4 * share), abs=0.02)
        assert random["to agent"]["device_hours_ratio"]["mean"] == pytest.approx(2.0, rel=0.01)
        assert agent[f"to {bench.RULE}"]["hours_ratio"]["mean"] == pytest.approx(0.5, rel=0.01)
        assert random["to agent"]["device_hours_ratio"]["windows"] == 6
    assert {r["about"] for r in rows} == {"costs", "selectors", "forecasts", "lies"}
    (cost,) = [r for r in rows if r["about"] == "costs" and r["regime"] == "choice"]
    assert (cost["played"], cost["each"]) == (len(played), 1.0)
    assert cost["played"] < cost["wanted"]
    lines = (tmp_path / "agent_training_runs.csv").read_text().splitlines()
    assert len(lines) == 1 + len([run for run in played if run.part == "test"])
    assert {"hours at 0.9", "hours at 1.0"} < set(lines[0].split(","))


# Lies.


class Spy(Selector):
    """Notes what it is told, and picks the most reliable."""

    told: ClassVar[list] = []

    def select(self, candidates, k, now, rng):
        """Note, then pick."""
        who = candidates.node_ids.astype(np.int64) - 1000
        names = "loss", "examples", "forecast_p_finish", "expected_finishes"
        told = {name: getattr(candidates, name) for name in names}
        told["stated_s"] = candidates._table.columns["forecast_duration_s"][candidates._rows]
        Spy.told.append((who, SimpleNamespace(now=now, **told)))
        return MostReliable().select(candidates, k, now, rng)


def told_with_and_without(liars, *where, **options):
    """Train twice; return the runs, and what the selector was told in each."""
    runs, heard = [], []
    for lying in (None, liars):
        Spy.told = []
        runs.append(train(*where, Spy(), liars=lying, **options))
        heard.append(Spy.told)
    return runs, heard


def test_liars_of_chance_state_certainty_and_are_found_out(
    bench, training, apps, forecast, windows
):
    Spy.told = []
    window = windows[0]
    said = forecast(window)
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


def test_who_works_is_believed_what_it_stated_before(bench, training, apps, forecast, windows):
    class Looks(Random):
        stated, seen = {}, []

        def select(self, candidates, k, now, rng):
            working = candidates.in_flight
            for node, chance in zip(working.node_ids, working.forecast_p_finish, strict=True):
                Looks.seen.append((chance, Looks.stated[node]))
            chosen = super().select(candidates, k, now, rng)
            told = dict(zip(candidates.node_ids, candidates.forecast_p_finish, strict=True))
            Looks.stated |= {node: told[node] for node in chosen}
            return chosen

    said = forecast(windows[0])
    options = {"forecasts": said, "schedule": "fedbuff"}
    train(bench, training, apps, windows[0], Looks(), **options)
    assert len(Looks.seen) > 100
    assert all(chance == stated for chance, stated in Looks.seen)


def test_other_liars_state_multiples_train_as_before_and_take_no_longer(
    bench, training, apps, forecast, windows
):
    window, n = windows[0], windows[0].n_devices
    said = forecast(window)
    lie = training.Lie(loss=10.0, examples=10.0, duration=1.0 / 3.0)
    liars = training.Liars.of(lie, n, 0.3, 301)
    assert liars.who.sum() == round(0.3 * n)
    dealt = apps.opened("digits").examples(n, 0.3, window.seed)
    # It goes by chances alone, so that the same jobs are sent, and would be at other instants if
    # a device took ten times as long.
    runs, heard = told_with_and_without(liars, bench, training, apps, window, forecasts=said)
    np.testing.assert_array_equal(runs[0].spent_s, runs[1].spent_s)
    assert [each[:2] for each in runs[0].reported] == [each[:2] for each in runs[1].reported]
    assert not np.array_equal(runs[0].accuracy, runs[1].accuracy)  # examples weigh updates
    seen = set()
    for (who, true), (_, stated) in zip(*heard, strict=True):
        lies, known = liars.who[who], np.isfinite(true.loss)
        np.testing.assert_allclose(stated.stated_s, np.where(lies, 1.0 / 3.0, 1.0) * true.stated_s)
        np.testing.assert_array_equal(true.examples[known], dealt[who][known])
        np.testing.assert_array_equal(
            stated.examples[known], (np.where(lies, 10, 1) * dealt[who])[known]
        )
        seen |= set(lies[known].tolist())
    assert seen == {True, False}


def test_liars_of_loss_train_as_before_and_state_ten_times_theirs(bench, training, apps, windows):
    window = windows[0]
    liars = training.Liars.of(bench.LIES["loss"], window.n_devices, 0.3, 301)
    runs, heard = told_with_and_without(liars, bench, training, apps, window)
    assert runs[0].accuracy == runs[1].accuracy
    seen = 0
    for (who, true), (_, stated) in zip(*heard, strict=True):
        lies = liars.who[who]
        np.testing.assert_allclose(stated.loss, np.where(lies, 10.0, 1.0) * true.loss)
        seen += int(np.isfinite(true.loss[lies]).sum())
    assert seen


def test_the_server_is_told_before_each_choice_what_devices_forecast(
    bench, training, apps, forecast, windows
):
    Spy.told = []
    said = forecast(windows[0])
    train(bench, training, apps, windows[0], Spy(), forecasts=said)
    assert len(Spy.told) > 50
    for who, told in Spy.told:
        p, _, seconds = said.at(who, np.full(who.size, told.now))
        np.testing.assert_array_equal(told.forecast_p_finish, p)
        np.testing.assert_array_equal(told.stated_s, seconds)
    assert max(told.expected_finishes.max() for _, told in Spy.told) > 2.0


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
    if not Path(apps.IMAGES or "/usr/share/datasets/fashion-mnist").is_dir():
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
        **{
            "regime": "choice",
            "forecasts": True,
            "seed": seed,
            "selector": selector,
            "reached": reached,
            "hours": hours,
        },
        **{"device_hours": 2 * hours, "wasted_hours": 0.0, "waste_share": 0.1},
        **{"valid_ratio": 0.9, "accuracy": 0.8, "gini": 0.2, "ever_merged": 0.7},
        **other,
    }


def test_ratios_are_geometric_means_of_windows_with_students_interval(bench):
    from agent.ratios import pairs, ratio

    own = [row("agent", 1, 1.0), row("agent", 2, 2.0), row("agent", 2, 1.0, alpha=1.0)]
    other = [row("x", 1, 2.0), row("x", 2, 2.0), row("x", 2, 4.0, alpha=1.0)]
    own, other = [*own, row("agent", 3, 1.0)], [*other, row("x", 3, 2.0)]
    found = ratio(pairs(own, other), "hours")
    # The two skews of the second window count once: sqrt(1 x 4) = 2.
    assert (found["mean"], found["low"], found["high"]) == (2.0, 2.0, 2.0)
    assert (found["pairs"], found["windows"], found["bound"]) == (4, 3, "exact")
    other[1]["hours"] = 8.0
    logs = np.log([2.0, 4.0, 2.0])
    half = 4.3027 * logs.std(ddof=1) / np.sqrt(3)
    found = ratio(pairs(own, other), "hours")
    assert found["mean"] == pytest.approx(np.exp(logs.mean()), abs=1e-3)
    assert found["high"] == pytest.approx(np.exp(logs.mean() + half), rel=1e-3)
    assert ratio(pairs(own[:3], other), "hours") is None


@pytest.mark.parametrize(
    ("arrives", "its", "bound"),
    [
        ((True, True, True), (True, False, True), "at least"),
        ((True, False, True), (True, True, True), "at most"),
        ((False, True, True), (True, False, True), "unknown"),
        ((True, True, True), (True, True, True), "exact"),
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
    assert (found["windows"], found["bound"]) == (3, bound)
    steps = {"at least": 1, "at most": -1}.get(bound, 0)
    assert found["mean"] == pytest.approx(2.0 ** (steps / 3), abs=1e-3)


def test_gini_of_counts(bench, training):
    assert training.gini(np.array([3, 3, 3])) == 0.0
    assert training.gini(np.array([0, 0, 0, 8])) == pytest.approx(0.75)
    counts = np.random.default_rng(0).integers(0, 9, 30)
    by_hand = np.abs(counts[:, None] - counts).sum() / (2 * counts.size * counts.sum())
    assert training.gini(counts) == pytest.approx(by_hand)
