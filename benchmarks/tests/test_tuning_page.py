"""What the page of tuning says in words stands in its result."""

import pytest
from published import figures, page, rows


@pytest.fixture(scope="module")
def found():
    """Return the rows of all draws together, by kind, app and what they are of."""
    keys = {
        "searches": "rungs in",
        "tuned against a default": "against",
        "chosen by": "seeds",
    }
    return {
        (row["what"], row["app"], row[keys[row["what"]]]): row
        for row in rows("tuning")
        if row["what"] in keys
    }


def of(found, app, name, key):
    return found["searches", app, name][f"{key} mean"]


def test_what_stopping_saves(found):
    for app, saved, lost in (("digits", 0.60, 0.019), ("fashion", 0.65, 0.016)):
        assert of(found, app, "device time", "saved") == pytest.approx(saved, abs=0.005)
        assert of(found, app, "device time", "regret") <= 0.001
        beaten = of(found, app, "device time", "regret of random search")
        assert beaten == pytest.approx(lost, abs=0.0005)
        assert of(found, app, "device time", "rank correlation") > 0.8


def test_what_one_evaluation_costs(found):
    one = "device time, by one evaluation"
    assert of(found, "fashion", one, "regret") == pytest.approx(0.012, abs=0.0005)
    assert of(found, "fashion", one, "regret of random search") < 0.02


def test_where_the_first_rung_misleads(found):
    early, later = ("device time", "device time, from an hour on")
    assert of(found, "shakespeare", early, "regret") == pytest.approx(0.018, abs=0.0005)
    beaten = of(found, "shakespeare", early, "regret of random search")
    assert 1.8 < of(found, "shakespeare", early, "regret") / beaten < 2.4
    assert of(found, "shakespeare", early, "rank correlation") < 0.6
    assert of(found, "shakespeare", early, "saved") == pytest.approx(0.67, abs=0.005)
    assert of(found, "shakespeare", later, "regret") == pytest.approx(0.010, abs=0.0005)
    assert of(found, "shakespeare", later, "saved") == pytest.approx(0.56, abs=0.005)
    beaten = of(found, "shakespeare", later, "regret of random search")
    assert beaten == pytest.approx(0.005, abs=0.0005)


def test_rungs_in_steps_are_worse_but_on_shakespeare(found):
    for app, lost in (("digits", "0.05"), ("fashion", "0.05"), ("shakespeare", "0.017")):
        steps, time = (of(found, app, name, "regret") for name in ("server steps", "device time"))
        assert f"{steps:.{len(lost) - 2}f}" == lost
        assert (steps > time) is (app != "shakespeare")


def test_what_the_tuned_configuration_is_worth(found):
    gains = {key[1:]: row for key, row in found.items() if key[0] == "tuned against a default"}
    assert all(row["gain mean"] > 0 for (app, _), row in gains.items() if app != "shakespeare")
    assert all(row["better"] == 5 for (app, _), row in gains.items() if app == "digits")
    clothes = {name: row for (app, name), row in gains.items() if app == "fashion"}
    counts = ("better", "interval holds 0", "worse")
    assert [sum(row[key] for row in clothes.values()) for key in counts] == [26, 8, 1]
    near = clothes.pop("direction-aware")
    assert near["gain low"] < 0 < near["gain high"]
    assert near["worse"] == 1
    assert min(row["gain low"] for row in clothes.values()) > 0
    plays = {name: row for (app, name), row in gains.items() if app == "shakespeare"}
    for name in ("flower-fedavg", "fedavg"):
        row = plays.pop(name)
        assert [row[key] for key in counts] == [4, 0, 1]
        assert row["gain mean"] == pytest.approx(0.02, abs=0.002)
        assert row["gain low"] < 0 < row["gain high"]
    behind = [-row["gain mean"] for row in plays.values()]
    assert len(behind) == 5
    assert (f"{min(behind):.3f}", f"{max(behind):.3f}") == ("0.002", "0.015")
    assert [sum(row[key] for row in plays.values()) for key in counts] == [4, 3, 18]
    best = found["chosen by", "shakespeare", "three seeds"]
    assert (best["worse than the best default"], best["choices"]) == (4, 5)


def test_what_one_seed_chooses(found):
    for app, less in (("digits", 0.0), ("shakespeare", 0.0), ("fashion", 0.008)):
        one, three = (found["chosen by", app, name] for name in ("one seed", "three seeds"))
        assert three["tuned"] - one["tuned"] == pytest.approx(less, abs=0.001)
        assert not three["worse than the app's default"]
    assert not found["chosen by", "digits", "one seed"]["worse than the best default"]
    assert one["choices"] == 15
    assert one["worse than the app's default"] == 1


def test_there_are_five_draws_of_each_app(found):
    draws = {(row["app"], row["repetition"]) for row in rows("tuning") if row["what"] == "search"}
    for app in ("digits", "fashion", "shakespeare"):
        assert {draw for own, draw in draws if own == app} == {1, 2, 3, 4, 5}
        assert found["searches", app, "device time"]["n"] == 5
    assert "There are five of each app." in page("results/tuning.md")


def test_two_nodes_are_as_much_faster_as_the_page_says():
    single = sorted(row["speed_up"] for row in rows("two_nodes") if row["turn"] != "median")
    (median,) = (row["speed_up"] for row in rows("two_nodes") if row["turn"] == "median")
    said, *each = figures(
        page("results/tuning.md"),
        "two nodes are # times as fast as one (#, # and #; on a slower day",
    )
    assert [median, *single] == pytest.approx([said, *each], abs=0.006)
    assert all(row["same_bytes"] for row in rows("two_nodes") if row["turn"] != "median")
