"""The benchmark of how many jobs are in flight: its arms, and what a run costs."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from agent import how_many, whole_trainings
from fedstale.strategies.pace import Progress
from fedstale.strategies.selection import MostReliable
from lab.training import REGIMES


def made(arm, schedule="fedbuff", price=1.0):
    return how_many.strategy(
        MostReliable(), 3, arm=how_many.ARMS[arm], schedule=schedule, jobs=4, price=4 * price
    )


@pytest.mark.parametrize(
    ("arm", "schedule", "numbers"),
    [
        ("rule", "fedbuff", (4, 2)),
        ("rule", "fedavg", (4, 3)),
        ("one at a time", "fedbuff", (1, 1)),
        ("two, a step each", "fedavg", (2, 1)),
        ("all, a step each", "fedbuff", (4, 1)),
        ("one more each 50", "fedavg", (4, 1)),
    ],
)
def test_arms_differ_by_their_two_numbers(arm, schedule, numbers):
    schedule_of = made(arm, schedule).schedule
    assert (schedule_of.concurrency, schedule_of.buffer_size) == numbers
    assert schedule_of.stragglers == ("keep" if schedule == "fedbuff" else "cancel")


def test_a_pace_is_told_the_price_in_device_hours():
    assert made("one more each 50", price=4.0).pace.every == 50
    assert made("agent's pace", price=4.0).pace.hour_price == 16.0


@pytest.fixture
def run():
    """Return a run of the reference among four devices at work."""
    return how_many.wanted(
        ["rule"], fleets=["phones"], places=[("choice", "digits")], schedules=["fedbuff"]
    )[0][0]


def test_a_cost_is_hours_at_their_price_and_device_hours(run):
    minutes = 120
    curves = {
        "accuracy": [0.0] * 60 + [0.9] * minutes,
        "device_hours": [i / 30.0 for i in range(60 + minutes)],
        "wasted_hours": [0.0] * (60 + minutes),
    }
    found = how_many.rows_of([(run, 0.25)], [curves], {how_many.setting(run): 0.8})
    at = {(row["of_random"], row["price"]): row for row in found}
    assert set(at) == {(share, price) for share in (0.9, 1.0) for price in how_many.PRICES}
    row = at[1.0, 4.0]
    assert (row["hours"], row["device_hours"]) == (1.0, 2.0)
    assert row["cost"] == pytest.approx(1.0 * 4.0 * 4 + 2.0)


def test_a_run_that_is_paced_by_a_price_counts_at_that_price_alone(run):
    curves = {"accuracy": [0.9] * 10, "device_hours": [1.0] * 10, "wasted_hours": [0.0] * 10}
    paced = replace(run, selector="agent's pace")
    found = how_many.rows_of([(paced, 1.0)], [curves], {how_many.setting(run): 0.8})
    assert {row["price"] for row in found} == {1.0}


def test_arms_are_compared_within_windows_and_a_priced_one_is_played_at_each_price():
    runs = how_many.wanted(["rule", "agent's pace"], fleets=["cars"], places=[("long", "digits")])
    assert len(runs) == 5 * 2 * 2 * (1 + len(how_many.PRICES))
    assert len({(run.seed, run.alpha, run.schedule) for run, _ in runs}) == 20
    curves = {"accuracy": [0.9] * 130, "device_hours": [0.5] * 130, "wasted_hours": [0.0] * 130}
    targets = {how_many.setting(run): 0.8 for run, _ in runs}
    found = how_many.tables(how_many.rows_of(runs, [curves] * len(runs), targets))
    assert {row["regime"] for row in found} == {"long", "all"}
    assert {row["to"] for row in found} == {"rule"}, "nobody else played"
    assert all(row["cost_ratio"]["mean"] == 1.0 for row in found)


def test_the_best_rule_of_a_price_decides_as_where_it_was_searched(monkeypatch):
    rules = {0.25: [0.0, 12.0, 0.6, 0.5], 1.0: [1 / 3, 1e9, 1 / 3, 0.0]}
    monkeypatch.setattr(how_many, "best_rules", lambda: rules)
    versions = np.arange(200)
    for price, rule in rules.items():
        searched = SimpleNamespace(most=np.full(200, 20), version=versions)
        jobs, updates = whole_trainings.ramp(np.array(rule))(searched, versions)
        pace = how_many.BestRule(price * 20)
        played = [
            pace.numbers(Progress(version=v, concurrency=20, buffer_size=10)) for v in versions
        ]
        assert played == list(zip(jobs.tolist(), updates.tolist(), strict=True))


def test_others_are_measured_by_the_tuned_rule_and_by_the_agent_as_it_was(run):
    curves = {"accuracy": [0.9] * 130, "device_hours": [0.5] * 130, "wasted_hours": [0.0] * 130}
    arms = ["rule", "agent", "agent, agent's pace", "rule, best pace"]
    runs = how_many.wanted(arms, places=[("choice", "digits")])
    targets = {how_many.setting(run): 0.8 for run, _ in runs}
    found = how_many.tables(how_many.rows_of(runs, [curves] * len(runs), targets))
    assert {(row["to"], row["arm"]) for row in found} == {
        *(("rule", arm) for arm in arms),
        ("agent", "agent, agent's pace"),
        ("rule, best pace", "agent"),
        ("rule, best pace", "agent, agent's pace"),
    }


def test_desktops_are_told_apart():
    curves = {"accuracy": [0.9] * 130, "device_hours": [0.5] * 130, "wasted_hours": [0.0] * 130}
    runs = how_many.wanted(["rule"], places=[("choice", "digits")])
    targets = {how_many.setting(run): 0.8 for run, _ in runs}
    found = how_many.tables(how_many.rows_of(runs, [curves] * len(runs), targets))
    sizes = {row["regime"]: row["runs"] for row in found}
    assert sizes == {"choice": 30, "all": 30, "desktops": 10}


def test_every_place_has_its_fleets():
    for regime, app in how_many.PLACES:
        fleets, skews = how_many.PLACES[regime, app]
        assert set(fleets) <= set(REGIMES[regime].fleets)
        assert skews
    assert {
        how_many.jobs_of(run) for run, _ in how_many.wanted(["rule"], places=[("wide", "digits")])
    } == {20}


def test_an_app_that_trains_slowly_has_few_arms():
    few = how_many.FEW["published", "fashion"]
    runs = how_many.wanted(how_many.ARMS, places=[("published", "fashion")])
    assert {run.selector for run, _ in runs} == set(few) < set(how_many.ARMS)
    # The target is random selection's everywhere.
    learn = how_many.wanted(["random"], part="learn", places=[("published", "fashion")])
    assert {run.selector for run, _ in learn} == {"random"}
