"""The benchmark of the emulator plays what it says, and the page says what came out."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lab.results import read_result


@pytest.fixture(scope="module")
def cases():
    from emulator import cases

    return cases


@pytest.fixture(scope="module")
def case(cases):
    return cases.Case(
        fleet="constant:3",
        app="quadratics:5",
        minutes=1.0,
        megabytes=1.0,
        patience=10.0,
        keeps=False,
        concurrency=3,
        buffer_size=3,
        balanced=False,
        seed=1,
    )


def test_a_job_ends_where_steps_of_gradient_descent_end(cases):
    apps = cases.Quadratics(7, 4)
    apps._noise = 0.0 * apps._noise
    w = apps._first
    wanted = w.copy()
    for _ in range(cases.STEPS):
        step = apps.rates[:, None] * apps._rate * apps._h[2]
        wanted -= step * (wanted - apps._optimum[2])
    found = apps.trained(w, 2, np.random.default_rng(0))
    # A step that goes too far would leave the closed form, which stays where it is.
    stable = apps.rates[:, None] * apps._rate * apps._h[2] < 1.9
    np.testing.assert_allclose(found[stable], wanted[stable], rtol=1e-9)


def test_the_loss_of_all_is_least_where_the_excess_is_nought(cases):
    apps = cases.Quadratics(7, 4)
    weights = apps.examples / apps.examples.sum()

    def loss(w):
        each = (apps._h * (w - apps._optimum) ** 2).sum(axis=2) / 2
        return weights @ each

    least = loss(apps._best)
    np.testing.assert_allclose(apps.scores(apps._best), 0.0)
    rng = np.random.default_rng(0)
    for _ in range(5):
        w = apps._best + rng.normal(0, 1, apps._best.shape)
        wanted = (loss(w) - least) / (loss(apps._first) - least)
        np.testing.assert_allclose(apps.scores(w), wanted, rtol=1e-6)


def test_a_target_is_reached_where_the_mean_of_three_versions_is_there(cases):
    scores = np.array([[1.0], [0.4], [0.1], [0.1], [0.04], [0.01], [0.01]])
    found = cases.reached(scores, (0.3, 0.1, 0.001))
    assert found[0, 2] == np.inf
    assert found[0, 0] == 3.0  # (0.4 + 0.1 + 0.1) / 3
    assert found[0, 1] == 4.0  # (0.1 + 0.1 + 0.04) / 3


def test_a_run_on_devices_that_are_always_online_wastes_nothing_and_counts_its_hours(cases, case):
    found = cases.play(case, Path())
    for app in found["apps"]:
        for took in filter(None, app["reached"]):
            assert took["wasted"] == took["stale_50"] == 0.0
            assert took["hours"] > 0
            assert took["steps"] >= 2
            # Three devices are at work for the whole of a round at most.
            assert took["device_hours"] <= 3 * took["hours"] * (1 + 1e-9)
    assert len(found["apps"]) == cases.N_APPS
    kept = cases.play(replace(case, keeps=True, concurrency=9, buffer_size=1), Path())
    assert kept["end"]["stale_90"] > 1


def test_networks_of_a_file_say_what_the_models_said_that_it_was_made_of():
    from emulator import models
    from emulator.rows import Table
    from fedstale.contrib.emulator.emulator import Emulator

    rng = np.random.default_rng(0)
    n = 80
    table = Table(
        x=rng.normal(0, 1, (n, 6)),
        y=rng.normal(0, 1, (n, 5)),
        reached=np.ones(n, dtype=bool),
        fleet=np.repeat(["a", "b", "c", "d"], n // 4),
        app=np.full(n, "quadratics"),
        group=np.full(n, "one"),
        half=np.zeros(n, dtype=bool),
        case=[None] * n,
        names=list("abcdef"),
    )
    table.x[:, models.KEEPS] = np.arange(n) % 2
    members = models.networks(table)
    arrays = models.arrays_of(members, table, table)
    found = Emulator(arrays, table.names).learnt(table.x)
    wanted = models.ensemble_of(members, table)(table.x)
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_margins_hold_nine_tenths_of_rows_and_each_fleet_counts_alike():
    from emulator import models

    errors, fleets = np.arange(1.0, 101.0), np.ones(100)
    assert models._quantile(errors, fleets) == pytest.approx(91.0, abs=1.0)
    # One fleet of many small errors does not hide the others.
    many = np.concatenate([np.full(900, 0.1), np.arange(1.0, 11.0)])
    alike = np.concatenate([np.full(900, 1 / 900), np.ones(10)])
    assert models._quantile(many, alike) >= 9.0


def test_a_search_that_begins_with_the_best_has_no_regret():
    from emulator import regret

    settings = [
        {"keeps": keeps, "jobs": jobs, "share": share, "rate": rate}
        for keeps in (True, False)
        for jobs in (4, 16)
        for share in (0.0, 0.5, 1.0)
        for rate in (0.3, 1.0, 3.0)
    ]
    hours = np.linspace(3.0, 1.0, len(settings))
    assert regret.searched(settings, hours, [len(settings) - 1], 0)[0] == 0.0
    found = regret.searched(settings, hours, [], 0)
    assert len(found) == regret.RUNS
    assert np.all(np.diff(found) <= 0)
    assert found == regret.searched(settings, hours, [], 0)


def told(what, model):
    (found,) = (
        row
        for row in read_result("emulator")["rows"]
        if (row.get("what"), row["about"]) == (what, "held out") and row["model"] == model
    )
    return found


def test_what_the_page_says_of_other_fleets_is_what_came_out():
    own = told("fleets", "networks")
    assert 0.88 <= own["hours covered"] <= 0.92
    assert np.exp(own["hours width"] / 2) < 1.9
    for what in ("fleets", "schedules"):
        networks = told(what, "networks")
        for other in (told(what, "nearest"), told(what, "5 nearest")):
            for name in ("hours", "device_hours"):
                assert networks[f"{name} r2"] > other[f"{name} r2"]
                assert networks[f"{name} error"] < other[f"{name} error"]
                assert networks[f"{name} width"] < other[f"{name} width"]
                if what == "fleets":
                    assert networks[f"{name} rank"] > other[f"{name} rank"]


def test_what_the_page_says_of_another_app_is_what_came_out():
    own = told("mixed", "networks")
    assert own["hours rank"] > told("mixed", "5 nearest")["hours rank"]
    assert own["hours rank"] > told("mixed", "nearest")["hours rank"]
    assert 1.8 < np.exp(own["hours error"]) < 2.2
    assert own["hours covered"] < 0.55
    assert min(own["wasted r2"], own["stale_50 r2"]) > 0.85


def test_no_search_is_shown_to_be_shorter():
    for row in read_result("emulator")["rows"]:
        if row["about"] == "search":
            _, low, high = row["difference"]
            assert low < 0 < high


def test_the_networks_that_come_with_fedstale_are_those_of_the_benchmark():
    from emulator.run import FLEETS, names
    from fedstale.contrib.emulator import emulator

    about = emulator.FILES.describe(Path(emulator.__file__).parent)
    assert set(about["fleets"]) == set(names("learn")[: FLEETS[False]["learn"]])
    assert set(about["fleets_of_intervals"]) == set(names("check")[: FLEETS[False]["check"]])
    assert about["commit"] == read_result("emulator")["commit"]
