"""The benchmark of worlds: its spread, its cases, and that pages and package follow its result."""

import numpy as np
import published
import pytest
from published import page
from scipy.stats import spearmanr

from fedstale.agents.env.forecast_table import NoForecasts
from fedstale.agents.env.learning_proxy import fitted
from fedstale.agents.env.worlds import VARIED, Worlds, read_spread
from fedstale.strategies.selection import Random
from fedstale.traces import TraceSet


@pytest.fixture(scope="module")
def bench():
    """Return the benchmark's module."""
    import agent_worlds

    return agent_worlds


@pytest.fixture(scope="module")
def rows():
    """Return what the benchmark measured."""
    return published.rows("agent_worlds")


def of(rows, part):
    return [row for row in rows if row["part"] == part]


def cell(app, **changed):
    plain = {name: getattr(fitted(), name) for name in VARIED}
    return {"app": app, **plain, **changed}


def test_the_spread_is_the_root_mean_square_of_the_logarithms(bench):
    eta = fitted().eta
    cells = [cell("a", eta=eta * np.e), cell("a", eta=eta / np.e), cell("a"), cell("b", eta=9.0)]
    found = bench.widths(cells, ["a"])
    assert found["eta"] == pytest.approx(np.sqrt(2 / 3), abs=1e-3)
    assert found["rho"] == 0.0
    # A constant that a fit puts at 0 counts as off by exp(2).
    assert bench.widths([cell("a", rho=0.0)], ["a"])["rho"] == 2.0


def test_the_spread_of_the_package_is_the_measured_one(bench, rows):
    (measured,) = [row for row in of(rows, "widths") if row["of"] == "digits and fashion"]
    assert read_spread() == {name: measured[name] for name in VARIED}
    assert measured == {"part": "widths", "of": measured["of"]} | bench.widths(
        of(rows, "spread"), ["digits", "fashion"]
    )


def test_two_hundred_worlds_take_less_than_a_processor_minute(rows):
    found = of(rows, "seconds")
    assert [row["fleet"] for row in found] == ["phones", "desktops", "cars"]
    for row in found:
        assert row["worlds"] == 200
        assert row["processor_s"] < 60


def test_a_case_is_in_the_band_where_the_real_advantage_lies_between_its_ends(bench, rows):
    by_place = {
        (row["app"], row["fleet"], row["schedule"], row["selector"]): row["hours_ratio"]["mean"]
        for row in published.rows("agent_training")
        if "hours_ratio" in row and not row["lies"]
    }
    cases = of(rows, "cases")
    for row in cases:
        assert row["real"] == by_place[row["app"], row["fleet"], row["schedule"], row["rule"]]
        assert row["is_inside"] == (row["low"] <= row["real"] <= row["high"])
    assert bench.held(cases) == of(rows, "held")


def test_the_rank_of_schedules_is_that_of_their_rows(rows):
    (rank,) = [row["rank"] for row in of(rows, "schedules") if "rank" in row]
    found = [row for row in of(rows, "schedules") if "concurrency" in row]
    pairs = [(row["real_progress"], row["proxy_progress"]) for row in found]
    assert len(pairs) == 16
    assert rank == pytest.approx(spearmanr(*zip(*pairs, strict=True))[0], abs=1e-3)


@pytest.fixture(scope="module")
def case(bench):
    """Return a case of two windows, and its fleet."""
    import world_cases
    from agent_training import windows

    traces = TraceSet.synthetic(90, days=6, seed=3)
    return world_cases.Case(
        windows=windows(traces, "phones", range(2)),
        alphas=[0.3],
        kind=0,
        concurrency=4,
        buffer_size=3,
        keeps_stragglers=False,
    ), traces


def test_a_case_has_the_devices_and_hours_of_its_windows(case):
    made, _ = case
    episodes = made.episodes()
    for row, window in enumerate(made.windows):
        assert episodes.start[row] == window.start
        assert (episodes.devices[row][episodes.present[row]] == window.devices).all()
    np.testing.assert_allclose(episodes.end - episodes.start, 4 * 3600.0)


def test_the_hours_to_a_target_are_those_of_the_first_step_that_reaches_it(case):
    import world_cases

    made, traces = case
    worlds = Worlds.around(fitted(), dict.fromkeys(VARIED, 0.3), 3, seed=0)
    scenario = made.scenario(traces, NoForecasts())
    played = world_cases._Played(made, scenario, Random(), worlds, follows=True)
    for row in played.rows:
        steps = played._steps[row]
        assert np.all(np.diff([at for at, _, _ in steps]) >= 0)
        target = steps[10][2]
        found = played.hours(row, target)
        for world in range(3):
            first = next(at for at, _, right in steps if right[world] >= target[world])
            assert found[world] == first
        assert (played.hours(row, np.full(3, 2.0)) == 4 * 3600.0).all()


def test_the_pages_say_in_how_many_cases_the_band_held(rows):
    by_app = {row["app"]: row for row in of(rows, "held")}
    every, unseen = by_app["all"], by_app["shakespeare"]
    inside = f"{every['inside']} of {every['cases']} cases"
    alone = f"{unseen['inside']} of {unseen['cases']}"
    assert f"in {inside}, {alone} of an app that the spread has not seen" in page("will-it-help.md")
    results = page("results/agent-worlds.md")
    assert (
        f"lies in the band in {inside}**: {every['inside'] / every['cases']:.1%}".replace("%", " %")
        in results
    )
    misses, above = (
        every["cases"] - every["inside"],
        [row for row in of(rows, "cases") if row["real"] > row["high"]],
    )
    assert f"{len(above)} of the {misses} misses are above the band" in results
    bounds = sum(row["bound"] == "at least" for row in above)
    assert f"In {bounds} of these" in results
    assert f"the worlds tells in {every['same_sign']} of {every['cases']} cases" in results


def test_the_pages_say_what_the_proxy_makes_of_schedules(rows):
    (rank,) = [row["rank"] for row in of(rows, "schedules") if "rank" in row]
    for name in ("will-it-help.md", "results/agent-worlds.md"):
        assert f"between both is {rank:.2f}" in page(name)
    found = [row for row in of(rows, "schedules") if "concurrency" in row]
    for concurrency in (4, 8, 16):
        some = {row["schedule"]: row for row in found if row["concurrency"] == concurrency}
        assert max(some, key=lambda name: some[name]["real_progress"]) == "buffer of one"
        assert min(some, key=lambda name: some[name]["proxy_progress"]) == "buffer of one"


def test_the_page_says_where_the_agent_is_to_be_preferred(rows):
    prefer = {row["fleet"]: row["prefer"] for row in of(rows, "seconds")}
    assert prefer == {"phones": "agent", "desktops": "p_finish x utility", "cars": "agent"}
    rules = of(rows, "rules")
    least = min(row["ahead"] for row in rules if row["fleet"] != "desktops")
    text = page("results/agent-worlds.md")
    assert f"ahead of each rule in at least {least} of 200 worlds" in text
    desktops = {row["rule"]: row for row in rules if row["fleet"] == "desktops"}
    assert f"ahead of it in {desktops['p_finish x utility']['ahead']} of 200 worlds" in text
    assert max(row["share"] for row in desktops.values()) < 0.9
    n = sum(row["matters"] == "fade" for row in rules)
    assert f"matters most in {n} of the {len(rules)} comparisons" in text
